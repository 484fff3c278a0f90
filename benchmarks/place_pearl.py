"""PEARL's runtime: does it learn like the sequential recipe, is it as fast as predicted, and what do processes gain?

    python benchmarks/place_pearl.py learning [--seeds 0 1 2 3 4]   # examples/composed_dqn.py, to 160,000 timesteps
    python benchmarks/place_pearl.py learning_sac                   # examples/composed_sac.py, to 24,000 timesteps
    python benchmarks/place_pearl.py predicted                      # seconds of an iteration, on all assignments to two devices
    python benchmarks/place_pearl.py pinned [--batch 256 --actors 1]  # the same, each device's threads on a core of its own
    python benchmarks/place_pearl.py host                           # gymnasium in processes against one after another

Two host devices. `learning` evaluates at timesteps at which the recipe's results, learning_*.json, do. `host` runs
both programs in turn: the sequential one steps gymnasium in its own thread and calls the same compiled functions, one after
another, on one device. Results: benchmarks/results/place_pearl_*.json.
"""

import argparse
import datetime
import itertools
import json
import os
import resource
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen={str(sys.argv[1] != 'pinned').lower()}"
    )
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)

import gymnasium
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import composed_dqn as dqn
import composed_sac as sac
from networks import init_mlp, mlp

import rlfx.envs
from rlfx.place import hardware, pearl
from rlfx.place.compose import Composition, Table, compose, iteration_seconds
from rlfx.place.pearl import host_worker
from rlfx.place.pearl import primitives as do

RESULTS = Path(__file__).parent / "results"


# -- learning --------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """An example that is composed, the results of its sequential recipe, and at which timesteps both are evaluated."""

    example: Any
    recipe: str
    every: int
    last: int


DQN = Task(dqn, "learning_prioritised_dqn", 32_000, 160_000)
SAC = Task(sac, "learning_sac", 2_000, 24_000)


def learning(task, seeds):
    example, system, devices = task.example, task.example.make(), jax.devices()[:2]
    evaluate = jax.jit(
        lambda params, key: rlfx.envs.evaluate(example.env, example.greedy, params, key, 100).mean_return
    )
    returns, ages, cpu = [], {}, time.process_time()
    for seed in seeds:
        init_key, key, test_key = jax.random.split(jax.random.key(seed), 3)
        row = []

        def look(call, row=row, test_key=test_key):
            if call.iteration * system.collected % task.every == 0:
                params = jax.device_put(call.weights, devices[0])
                row.append(round(float(evaluate(params, jax.random.fold_in(test_key, call.iteration))), 2))

        _, report = pearl.run(
            system, system.init(init_key), key, composition=Composition(0, 1, 1, 1, 1.0, 1.0), devices=devices,
            iterations=task.last // system.collected, after=look,
        )  # fmt: skip
        ages = {str(age): ages.get(str(age), 0) + n for age, n in report.ages.items()}
        print(f"seed {seed}: {row}", flush=True)
        returns.append(row)
    recipe = json.loads((RESULTS / f"{task.recipe}.json").read_text())
    steps = list(range(task.every, task.last + 1, task.every))
    return {
        "steps": steps, "seeds": seeds, "returns": np.array(returns).T.tolist(), "ages_in_updates": ages,
        "recipe_seeds": recipe["seeds"], "recipe_returns": [recipe["returns"][recipe["steps"].index(n)] for n in steps],
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }  # fmt: skip


# -- predicted -------------------------------------------------------------------------------------------------------


def predicted(iterations=100):
    """Every assignment of replay and learner to two devices: measured against equation 6."""
    devices, rows = jax.devices()[:2], []
    bandwidth = hardware.measured(devices).bandwidth
    for batch, envs in ((256, 8), (1024, 8)):
        system = dqn.make(envs=envs, updates=4, batch=batch, warmup=2_000)
        state = system.init(jax.random.key(0))
        table, work = pearl.measured(system, state, devices, bandwidth, 15), pearl.workload(system, state)
        for replay, learner in itertools.product(range(2), repeat=2):
            seconds = iteration_seconds(table, work, 0, replay, learner)
            places = Composition(0, replay, learner, learner, seconds, 0.0)
            _, report = pearl.run(
                system, state, jax.random.key(1), composition=places, devices=devices,
                iterations=system.warm + iterations,
            )  # fmt: skip
            late = report.seconds[len(report.seconds) // 2 :]
            rows.append({
                "batch": batch, "envs": envs, "replay": replay, "learner": learner, "predicted_ms": 1e3 * seconds,
                "median_ms": 1e3 * report.iteration, "fastest_ms": 1e3 * float(late.min()),
                "primitives_ms": {p: (1e3 * row).round(3).tolist() for p, row in table.seconds.items()},
            })  # fmt: skip
            print({k: v for k, v in rows[-1].items() if k != "primitives_ms"}, flush=True)
    return {"rows": rows}


# -- devices of a core each --------------------------------------------------------------------------------------------


def pinned(batch, actors, iterations=16):
    """All assignments at a batch and a number of actors, on two devices of a core each.

    Every thread of a run is pinned to its device's core, and so is this one while it measures that device's primitives.
    """
    devices, cores = jax.devices()[:2], sorted(os.sched_getaffinity(0))[:2]
    return {"rows": _assignments(batch, actors, iterations, devices, cores)}


def _assignments(batch, actors, iterations, devices, cores):
    system, everywhere = dqn.make(actors, 64 // actors, 8, updates=16, batch=batch, warmup=2_000), set(cores)
    state, columns = system.init(jax.random.key(0)), []
    for device, core in zip(devices, cores, strict=True):
        os.sched_setaffinity(0, {core})
        columns.append(pearl.measured(system, state, [device], np.full((1, 1), 1e10), 15))
    os.sched_setaffinity(0, everywhere)
    seconds = {p: np.concatenate([c.seconds[p] for c in columns]) for p in columns[0].seconds}
    table, work = Table(tuple(map(str, devices)), seconds, np.full((2, 2), 1e10)), pearl.workload(system, state)
    chosen, rows = compose(table, work), []
    for replay, learner in itertools.product(range(2), repeat=2):
        aim = iteration_seconds(table, work, 0, replay, learner)
        core_of = {"actor": cores[0], "replay": cores[replay], "learner": cores[learner]}

        def pin(call, core_of=core_of):
            for thread in threading.enumerate():
                core = next((core for name, core in core_of.items() if thread.name.startswith(name)), None)
                if core is not None:
                    os.sched_setaffinity(thread.native_id, {core})

        _, report = pearl.run(
            system, state, jax.random.key(1), composition=Composition(0, replay, learner, learner, aim, 0.0),
            devices=devices, iterations=system.warm + 4 + iterations, after=pin,
        )  # fmt: skip
        late = report.seconds[-iterations:]
        rows.append({
            "batch": batch, "actors": actors, "replay": replay, "learner": learner,
            "chosen": (replay, learner) == (chosen.replay, chosen.learner), "predicted_ms": round(1e3 * aim, 2),
            "median_ms": round(1e3 * float(np.median(late)), 2), "mean_ms": round(1e3 * float(late.mean()), 2),
            "primitives_ms": {p: (1e3 * row).round(3).tolist() for p, row in seconds.items()},
        })  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "primitives_ms"}, flush=True)
    return rows


# -- host environments -----------------------------------------------------------------------------------------------


class DDPG(NamedTuple):
    params: dict
    target: dict
    opt_state: object


def ddpg(name, hidden=(64, 64), **sizes):
    """Deterministic policy gradients, for continuous actions."""
    spaces = pearl.HostEnvironment(name).spaces()
    (obs,), (actions,) = spaces.observation.shape, spaces.action.shape
    optimizer = optax.adam(1e-3)

    def learner(key):
        a, c = jax.random.split(key)
        params = {
            "actor": init_mlp(a, (obs, *hidden, actions), 0.01),
            "critic": init_mlp(c, (obs + actions, *hidden, 1)),
        }
        return DDPG(params, params, optimizer.init(params))

    def act(params, obs):
        return jnp.tanh(mlp(params, obs))

    def value(params, obs, action):
        return mlp(params, jnp.concatenate([obs, action]))[0]

    def policy(actor, obs, key, t):
        return jnp.clip(act(actor, obs) + 0.1 * jax.random.normal(key, (actions,)), -1.0, 1.0)

    def gradient(state, x, weight, key):
        def loss(params):
            def one(x):
                future = value(state.target["critic"], x.next_obs, act(state.target["actor"], x.next_obs))
                aim = x.reward + 0.99 * jnp.where(x.terminated, 0.0, future)
                error = value(params["critic"], x.obs, x.action) - aim
                judge = jax.lax.stop_gradient(params["critic"])
                return error**2, value(judge, x.obs, act(params["actor"], x.obs)), error

            squares, values, errors = jax.vmap(one)(x)
            return (weight * squares).mean() - values.mean(), errors

        grads, errors = jax.grad(loss, has_aux=True)(state.params)
        return grads, errors, {}

    def apply(state, grads):
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return DDPG(params, optax.incremental_update(params, state.target, 0.005), opt_state)

    return pearl.System(
        pearl.HostEnvironment(name), learner, lambda state: state.params["actor"], policy, gradient, apply, **sizes
    )


def cartpole(**sizes):
    system = dqn.make(**sizes)
    return pearl.System(**{**vars(system), "env": pearl.HostEnvironment("CartPole-v1")})


def sequential(system, state, iterations):
    """The same program in one thread, on one device: seconds of each iteration."""
    keys, seconds, last = do.Keys.of(jax.random.key(1)), [], time.perf_counter()
    learner, weights = state.learner, state.weights[-1]
    manager, memory = jax.tree.map(jnp.copy, (state.manager, state.memory))
    envs = [[gymnasium.make(system.env.name) for _ in range(system.envs)] for _ in range(system.actors)]
    obs = [
        np.stack([env.reset(seed=17 * a + b)[0] for b, env in enumerate(row)]).astype("f4")
        for a, row in enumerate(envs)
    ]
    for i in range(iterations):
        chunks = []
        for a, row in enumerate(envs):
            rows = []
            for t in range(system.length):
                action = np.asarray(do.choose(system, weights, obs[a], keys.act, np.int32(i), np.int32(a), np.int32(t)))
                following, final, reward, terminated, truncated = zip(*map(host_worker.step, row, action), strict=True)
                flags = np.array(terminated), np.array(truncated)
                final = np.stack(final).astype("f4")
                rows.append(pearl.Transition(obs[a], action, np.array(reward, "f4"), *flags, final))
                obs[a] = np.stack(following).astype("f4")
            chunks.append(jax.tree.map(lambda *x: np.concatenate(x), *rows))
        for u in range(system.updates if i >= system.warm else 0):
            update = np.int32((i - system.warm) * system.updates + u)
            drawn = do.draw(system, manager, keys.draw, update)
            batch = do.read(memory, drawn.indices[0])
            learner, weights, errors, _ = do.train(system, learner, batch, drawn.weight[0], keys.learn, update)
            manager = do.reprioritise(system, manager, drawn.indices, (errors,))
        memory = do.write(memory, np.int32(i * system.collected % system.capacity), tuple(chunks))
        manager = jax.block_until_ready(do.admit(system, manager))
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return np.array(seconds), {}


def host(rounds=3, iterations=200):
    """Both programs in turn, ``rounds`` times."""
    few = {"actors": 2, "envs": 8, "length": 4, "warmup": 640, "capacity": 20_000}
    many = {"actors": 1, "envs": 64, "length": 1, "warmup": 640, "capacity": 20_000, "ahead": 1}
    cases = {
        "CartPole-v1, 2 actors of 8, 4 updates of 256 for 64 steps": cartpole(batch=256, updates=4, **few),
        "CartPole-v1, 1 actor of 64, 4 updates of 256 for 64 steps": cartpole(batch=256, updates=4, **many),
        "HalfCheetah-v5, 1 actor of 64, 2 updates of 256 for 64 steps": ddpg(
            "HalfCheetah-v5", batch=256, updates=2, **many
        ),
        "HalfCheetah-v5, 1 actor of 64, 4 updates of 256 for 64 steps": ddpg(
            "HalfCheetah-v5", batch=256, updates=4, **many
        ),
    }
    rows = []
    for name, system in cases.items():
        state, short, n = system.init(jax.random.key(0)), system.warm + 20, system.warm + 20 + iterations
        for fn in (sequential, together):
            fn(system, state, short)  # compiles
        fixed = {fn.__name__: cpu_seconds(fn, system, state, short)[1] for fn in (sequential, together)}
        row = {"case": name, "ms": {}, "processor_ms": {}}
        for _, fn in itertools.product(range(rounds), (sequential, together)):
            seconds, cpu = cpu_seconds(fn, system, state, n)
            row["ms"].setdefault(fn.__name__, []).append(round(1e3 * float(np.median(seconds[short:])), 2))
            each = {k: round(1e3 * (v - fixed[fn.__name__][k]) / (n - short), 2) for k, v in cpu.items()}
            row["processor_ms"].setdefault(fn.__name__, []).append(each)
        row["ratio"] = [round(a / b, 2) for a, b in zip(*row["ms"].values(), strict=True)]
        rows.append(row)
        print(row, flush=True)
    return {"an iteration": rows}


def together(system, state, iterations):
    """`pearl.run`: seconds of each iteration, processor seconds by part."""
    places, devices = Composition(0, 1, 1, 1, 1.0, 1.0), jax.devices()[:2]
    _, report = pearl.run(system, state, jax.random.key(1), composition=places, devices=devices, iterations=iterations)
    return report.seconds, report.cpu


def cpu_seconds(fn, system, state, iterations):
    """Seconds of each iteration, and processor seconds: of the program, of its threads, and of its processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.process_time()
    seconds, parts = fn(system, state, iterations)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    return seconds, {"program": time.process_time() - begin, "processes": processes, **parts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["learning", "learning_sac", "predicted", "pinned", "host"])
    parser.add_argument("--batch", type=int, default=256, help="of pinned")
    parser.add_argument("--actors", type=int, default=1, help="of pinned")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = {
        "learning": lambda: learning(DQN, args.seeds), "learning_sac": lambda: learning(SAC, args.seeds),
        "predicted": predicted, "pinned": lambda: pinned(args.batch, args.actors), "host": host,
    }[args.what]()  # fmt: skip
    about = {
        "date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "load_average_before": round(load, 2),
        "versions": {p: version(p) for p in ("jax", "jaxlib", "numpy", "gymnasium", "mujoco", "optax")},
        "command": "python benchmarks/place_pearl.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip
    name = f"pinned_{args.batch}_{args.actors}" if args.what == "pinned" else args.what
    (RESULTS / f"place_pearl_{name}.json").write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
