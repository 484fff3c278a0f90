"""Where the time of other people's scripts goes: SB3, CleanRL, PureJaxRL and rejax, unmodified, through `run`.

    python benchmarks/profile_frameworks.py --checkouts DIR --environments DIR [--seconds 200] [NAME...]

Nothing of theirs is kept here. `--checkouts` holds git clones `cleanrl`, `purejaxrl` and `rejax` at the commits in
`COMMITS`; `--environments` virtual environments, each with what `ENVIRONMENTS` lists and rlfx' own dependencies. Scripts run
as their authors wrote them; operations are named from outside (`run --operation`), and jitted functions and modules by
`NAMES`. PureJaxRL and rejax get today's gymnax with its old interface, and an empty `navix` (a `sitecustomize` in the
folder `--stand-ins`).
brax 0.14.2's own learner does not run under jax 0.10 (`jax.device_put_replicated` is gone): it is that of the clone `brax`,
called by `framework_programs/brax_ppo.py`, as brax has no script of its own. A script that goes on for longer than
`--seconds` is ended; what was captured is on disk by then. Writes benchmarks/results/profile_frameworks.json: for each script
the seconds of its window by category and state of the host.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from rlfx.errors import ProfileError
from rlfx.profile.capture import machine

ROOT = pathlib.Path(__file__).parents[1]
RESULT = pathlib.Path(__file__).parent / "results/profile_frameworks.json"
COMMITS = {
    "brax": "0b96d05",
    "cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "purejaxrl": "31756b197773a52db763fdbe6d635e4b46522a73",
    "rejax": "d7510951b7a89ca8463cb2a6d18e21750ec454ff",
}
ENVIRONMENTS = {
    "torch": "torch==2.13.0 stable-baselines3 rl_zoo3 gymnasium[mujoco]",
    "cleanrl": "torch==2.13.0 stable-baselines3 gymnasium[mujoco] flax optax tyro tensorboard",
    "jaxrl": "flax optax distrax tfp-nightly gymnax brax rejax pyyaml matplotlib",
}
SIMULATION, INFERENCE, BACKPROPAGATION, OTHER = "simulation", "inference", "backpropagation", "other"
#: What an operation is, by its outermost name that is known.
NAMES = (
    (r"simulation", SIMULATION), (r"inference", INFERENCE), (r"backpropagation", BACKPROPAGATION),
    (r"jit\(update\w*\)|jit\(.*learn.*\)", BACKPROPAGATION),  # CleanRL's jitted functions
    (r"jit\(apply\w*\)|jit\(_argmax\)|jit\(get_action\w*\)", INFERENCE),
    (r"ActorCritic|Actor|QNetwork|Critic|DiscretePolicy|GaussianPolicy|VNetwork", INFERENCE),  # networks outside of the learner
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One script: `path` is below the checkouts, or below the environment's packages where it starts with
    `packages`, or beside this file where it starts with `framework_programs`; `clone`: in place of a package's release."""

    name: str
    framework: str
    task: str
    simulator: str  # where it runs
    environment: str
    path: str
    arguments: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    on_policy: bool = True
    clone: str = ""


VECTOR = "simulation=gymnasium.vector.sync_vector_env:SyncVectorEnv.step"
GYMNAX = "simulation=gymnax.environments.environment:Environment.step"
GRADIENT = "backpropagation=jax:value_and_grad()"
SB3 = ("simulation=stable_baselines3.common.vec_env.base_vec_env:VecEnv.step",)
SB3_ON = (*SB3, "inference=stable_baselines3.common.policies:ActorCriticPolicy.forward",
          "backpropagation=stable_baselines3.ppo.ppo:PPO.train")  # fmt: skip
SB3_OFF = "inference=stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm._sample_action"
ZOO = "packages/rl_zoo3/train.py"
SCRIPTS = (
    Script("SB3 PPO", "SB3 (torch)", "CartPole-v1", "host", "torch", ZOO,
           ("--algo", "ppo", "--env", "CartPole-v1", "--eval-freq", "-1"), SB3_ON),
    Script("SB3 DQN", "SB3 (torch)", "CartPole-v1", "host", "torch", ZOO,
           ("--algo", "dqn", "--env", "CartPole-v1", "--eval-freq", "-1"),
           (*SB3, SB3_OFF, "backpropagation=stable_baselines3.dqn.dqn:DQN.train"), False),
    Script("SB3 PPO", "SB3 (torch)", "Hopper-v5 (MuJoCo)", "host", "torch", ZOO,
           ("--algo", "ppo", "--env", "Hopper-v5", "--conf-file", "{hopper}", "--eval-freq", "-1"), SB3_ON),
    Script("SB3 SAC", "SB3 (torch)", "Hopper-v5 (MuJoCo)", "host", "torch", ZOO,
           ("--algo", "sac", "--env", "Hopper-v5", "--conf-file", "{hopper}", "--eval-freq", "-1"),
           (*SB3, SB3_OFF, "backpropagation=stable_baselines3.sac.sac:SAC.train"), False),
    Script("CleanRL dqn_jax.py", "CleanRL (JAX)", "CartPole-v1", "host", "cleanrl", "cleanrl/cleanrl/dqn_jax.py",
           (), (VECTOR, GRADIENT), False),
    Script("CleanRL ddpg_continuous_action_jax.py", "CleanRL (JAX)", "Hopper-v5 (MuJoCo)", "host", "cleanrl",
           "cleanrl/cleanrl/ddpg_continuous_action_jax.py",
           ("--env-id", "Hopper-v5", "--learning-starts", "2000"), (VECTOR, GRADIENT), False),
    Script("CleanRL td3_continuous_action_jax.py", "CleanRL (JAX)", "Hopper-v5 (MuJoCo)", "host", "cleanrl",
           "cleanrl/cleanrl/td3_continuous_action_jax.py",
           ("--env-id", "Hopper-v5", "--learning-starts", "2000"), (VECTOR, GRADIENT), False),
    Script("PureJaxRL ppo.py", "PureJaxRL", "CartPole-v1", "compiled", "jaxrl", "purejaxrl/purejaxrl/ppo.py", (),
           (GYMNAX, GRADIENT)),
    Script("PureJaxRL ppo_continuous_action.py", "PureJaxRL", "hopper (brax)", "compiled", "jaxrl",
           "purejaxrl/purejaxrl/ppo_continuous_action.py", (), ("simulation=brax.envs.hopper:Hopper.step", GRADIENT)),
    Script("rejax train.py, PPO", "rejax", "CartPole-v1", "compiled", "jaxrl", "rejax/train.py",
           ("--algorithm", "ppo", "--config", "configs/gymnax/cartpole.yaml"), (GYMNAX, "backpropagation=jax:grad()")),
    Script("rejax train.py, DQN", "rejax", "CartPole-v1", "compiled", "jaxrl", "rejax/train.py",
           ("--algorithm", "dqn", "--config", "configs/gymnax/cartpole.yaml"), (GYMNAX, "backpropagation=jax:grad()"),
           False),
    Script("brax PPO", "brax", "inverted_pendulum (brax)", "compiled", "jaxrl", "framework_programs/brax_ppo.py", (),
           ("simulation=brax.envs.inverted_pendulum:InvertedPendulum.step", GRADIENT), clone="brax"),
)  # fmt: skip
#: rl_zoo3's own settings of Hopper-v4, which has no entry for v5.
HOPPER = "Hopper-v5:\n  n_envs: 1\n  policy: 'MlpPolicy'\n  n_timesteps: !!float 1e6\n  normalize: {normalize}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkouts", type=pathlib.Path, required=True)
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    parser.add_argument("--stand-ins", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--keep", type=pathlib.Path, help="keep traces and outputs in this folder")
    parser.add_argument("--options", default="", help="of `run`, which choose another window: '--start 60 --events 3000000'")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    parser.add_argument("names", nargs="*", help="parts of names and tasks")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text())["scripts"] if arguments.out.exists() else []
    for script in SCRIPTS:
        label = f"{script.name} {script.task}"
        if arguments.names and not all(n in label for n in arguments.names):
            continue
        found = profiled(script, arguments)
        print(json.dumps({k: v for k, v in found.items() if k not in ("cells", "gains")}, indent=1), flush=True)
        rows = [r for r in rows if (r["name"], r["task"]) != (script.name, script.task)] + [found]
        order = [(s.name, s.task) for s in SCRIPTS]
        rows.sort(key=lambda r: order.index((r["name"], r["task"])))
        result = {"date": datetime.date.today().isoformat(), "machine": rows[-1]["machine"], "commits": COMMITS,
                  "note": "two cores of a virtual machine that others used meanwhile; CPU only", "scripts": rows}  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def profiled(script: Script, arguments: argparse.Namespace) -> dict:
    """Run a script, and say where its window went."""
    python = (arguments.environments / script.environment / "bin/python").absolute()
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    inside = script.path.startswith("packages")
    path = packages / script.path.removeprefix("packages/") if inside else arguments.checkouts / script.path
    path = pathlib.Path(__file__).parent / script.path if script.path.startswith("framework_programs") else path
    label = re.sub(r"\W+", "-", f"{script.name} {script.task}")
    folder = pathlib.Path(tempfile.mkdtemp()) if arguments.keep is None else arguments.keep / label
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hopper = folder / "hopper.yml"
    hopper.write_text(HOPPER.format(normalize="true" if "ppo" in script.arguments else "false"))
    given = [a.format(hopper=hopper) for a in script.arguments]
    options = [*shlex.split(arguments.options), *(x for text in script.operations for x in ("--operation", text))]
    command = [str(python), "-m", "rlfx.profile", "run", "--out", str(folder / "trace"), *options, str(path.absolute()), *given]
    older = script.framework in ("PureJaxRL", "rejax")
    stand_ins = [str(arguments.stand_ins.absolute())] if arguments.stand_ins and older else []
    checkout = arguments.checkouts / (script.clone or pathlib.Path(script.path).parts[0])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *stand_ins, str(checkout.absolute())]), "MPLBACKEND": "agg",
           "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled"}  # fmt: skip
    where = checkout if checkout.is_dir() else folder
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=where, env=env, stdout=output, stderr=subprocess.STDOUT)
        ended = within(process, arguments.seconds)
    read = [str(python), "-m", "rlfx.profile", "report", "--json", str(folder / "trace")]
    done = subprocess.run(read, env=env, capture_output=True, text=True)
    if done.returncode:
        print((folder / "output.txt").read_text()[-3000:], done.stderr[-2000:], file=sys.stderr)
        raise ProfileError(f"{script.name} left no trace.")
    found = json.loads(done.stdout)
    if arguments.keep is None:
        shutil.rmtree(folder)
    return summary(script, found) | {"ended": ended}


def within(process: subprocess.Popen, seconds: float) -> str:
    """How it ended: by itself, by a signal, or killed, where a call of XLA keeps signals waiting."""
    ways = ("by itself", None, seconds), ("SIGTERM", signal.SIGTERM, 120.0), ("SIGKILL", signal.SIGKILL, 20.0)
    for how, number, patience in ways:
        if number is not None:
            process.send_signal(number)
        try:
            process.wait(patience)
            return how
        except subprocess.TimeoutExpired:
            continue
    raise SystemExit("A process cannot be killed.")


def category(path: list[str]) -> str:
    for name in path:
        for pattern, found in NAMES:
            if re.fullmatch(pattern, name):
                return found
    return OTHER


def summary(script: Script, found: dict) -> dict:
    cells: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    device: collections.Counter = collections.Counter()
    for row in found["rows"]:
        cells[category(row["path"])][row["host"]] += row["ns"] / found["window_ns"]
    for row in found["device_rows"]:
        device[category(row["path"])] += row["ns"]
    total = sum(device.values())
    moves = collections.Counter()
    for t in found["transitions"]:
        moves[f"{t['from']} to {t['to']}"] += t["count"]
    return {
        "name": script.name, "framework": script.framework, "task": script.task, "simulator": script.simulator,
        "on_policy": script.on_policy, "seconds": found["seconds"], "verdict": found["verdict"],
        "shares": {k: sum(c.values()) for k, c in cells.items()},
        "cells": {k: dict(c) for k, c in cells.items()},
        "host": dict(sum((c for c in cells.values()), collections.Counter())),
        "device": {k: v / total for k, v in device.items()} if total else {},
        "device_busy": found["device_busy"], "device_bound": found["device_bound"],
        "naive_utilisation": found["naive_utilisation"], "compile_share": found["compile_share"],
        "one_call": found["one_call"], "transitions": dict(moves.most_common(8)), "limits": found["limits"],
        "gains": [f"without {g['what']}: {g['speedup']:.2f}x" for g in found["gains"]], "machine": machine(),
        "problems": len(found["problems"]),
    }  # fmt: skip


if __name__ == "__main__":
    main()
