"""PPO over several processes: the same recipe, on a mesh of all their devices.

    python examples/distributed.py --local 2                   # two processes on this machine
    srun python examples/distributed.py                        # Slurm, TPU pods: who else is there is found out
    python examples/distributed.py --coordinator HOST:PORT --processes 2 --process 0      # on the first host; 1 on the other

Notice that nothing but `connect` and the sharding of the first agent speaks of processes. Each runs this file, makes the same
calls in the same order, and holds its part of the environments; gradients are summed over all. Checkpoints and rows of files
are written by process 0, and every process reads them when the run goes on.
"""

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import jax

from rlfx.training import CSV, Checkpoints, Metrics, Progress, run


def connect(coordinator, processes, process):
    """Make one machine of all processes; before anything is computed. Arguments that are None are the cluster's."""
    jax.distributed.initialize(coordinator, processes, process)


def everything():
    """The mesh of all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), ("b",), axis_types=(jax.sharding.AxisType.Auto,))


def train(mesh, *, updates=None, length=None, envs=None, hidden=None, seed=0, out=None, every=50, episodes=100):
    """``(agent, mean return)``, the same on every process."""
    import ppo  # what it computes when it is imported may start jax, which `connect` has to come before

    recipe = ppo.make(ppo.CARTPOLE, updates=updates, length=length, envs=envs, hidden=hidden, mesh=mesh)
    init_key, train_key, evaluate_key = jax.random.split(jax.random.key(seed), 3)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # the first update splits what it splits
    agent = jax.jit(recipe.init, out_shardings=everywhere)(init_key)
    callbacks = [Progress("ppo")]
    if out:
        callbacks += [Checkpoints(Path(out, "checkpoints"), every=every), Metrics(CSV(Path(out, "metrics.csv")))]
    agent = run(recipe.update, agent, train_key, updates=recipe.updates, per_call=5, callbacks=callbacks).agent
    score = jax.jit(lambda agent, key: recipe.evaluate(agent, key, episodes), out_shardings=everywhere)
    return agent, float(score(agent, evaluate_key))


def start(processes, arguments):
    """This file, ``processes`` times, on this machine; the first exit status that is not 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--coordinator", address, "--processes", str(processes)]
    started = [subprocess.Popen([*command, "--process", str(i)]) for i in range(processes)]
    return next(filter(None, [process.wait() for process in started]), 0)


def main(argv=None):
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1 over several processes")
    parser.add_argument("--local", type=int, help="start so many processes on this machine")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--out", help="a directory that all processes see: checkpoints and metrics; a run goes on from there")
    args = parser.parse_args(argv)
    if args.local:
        return start(args.local, ["--updates", str(args.updates), *(["--out", args.out] if args.out else [])])
    connect(args.coordinator, args.processes, args.process)
    _, score = train(everything(), updates=args.updates, out=args.out)
    if jax.process_index() == 0:
        print(f"mean return {score:.1f} after {args.updates} updates by {jax.process_count()} processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
