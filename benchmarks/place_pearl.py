"""PEARL's runtime: does it learn like the sequential recipe, and what do processes gain?

    python benchmarks/place_pearl.py learning [--seeds 0 1 2 3 4]   # examples/composed_dqn.py, to 160,000 timesteps
    python benchmarks/place_pearl.py learning_sac                   # examples/composed_sac.py, to 24,000 timesteps
    python benchmarks/place_pearl.py host [--cases 0 2]             # gymnasium in processes against one after another

`learning` is on two host devices, and evaluates at timesteps at which the recipe's results, learning_*.json, do. `host` runs
programs in turn: the sequential ones step gymnasium in their own thread and call compiled functions one after another, on a
device of one core, and on jax's, which may use both: one for each primitive, or the runtime's, which makes an iteration's
updates as one. The runtime has two devices of one core, with threads, in turn, and as `composed` chose by three trials. What is
predicted of iterations is in place_pearl_grid.py. Results: benchmarks/results/place_pearl_*.json.
"""

import argparse
import datetime
import itertools
import json
import os
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

if __name__ == "__main__":
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
from rlfx.place import core_devices, pearl
from rlfx.place.compose import Composition
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


def separate(system, manager, memory, learner, keys, update, chunks, position):
    """Updates and insertion by a call for each primitive."""
    for u in range(system.updates):
        drawn = do.draw(system, manager, keys.draw, np.int32(update + u))
        batch = do.read(memory, drawn.indices[0])
        learner, weights, errors, _ = do.train(
            system, learner, batch, drawn.weight[0], keys.learn, np.int32(update + u)
        )
        manager = do.reprioritise(system, manager, drawn.indices, (errors,))
    return do.admit(system, manager), do.write(memory, position, chunks), learner, weights


def as_one(system, manager, memory, learner, keys, update, chunks, position):
    """Updates by one program, then insertion and last priorities by another: those of the runtime."""
    made = do.updated(system, system.updates, manager, memory, learner, keys, np.int32(update))
    manager, memory = do.closed(
        system, made.manager, memory, position, chunks, made.drawn.indices[0], made.errors, bool(made.drawn.free)
    )
    return manager, memory, made.learner, made.weights


def sequential(system, state, iterations, learn=separate):
    """The same program in one thread, on one device: seconds of each iteration, and those of them spent on acting."""
    keys, seconds, acting = do.Keys.of(jax.random.key(1)), [], []
    learner, weights = state.learner, state.weights[-1]
    manager, memory = jax.tree.map(jnp.copy, (state.manager, state.memory))
    envs = [[gymnasium.make(system.env.name) for _ in range(system.envs)] for _ in range(system.actors)]
    obs = [
        np.stack([env.reset(seed=17 * a + b)[0] for b, env in enumerate(row)]).astype("f4")
        for a, row in enumerate(envs)
    ]
    last = time.perf_counter()
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
        acting.append(time.perf_counter() - last)
        position = np.int32(i * system.collected % system.capacity)
        if i < system.warm:
            manager, memory = do.admit(system, manager), do.write(memory, position, tuple(chunks))
        else:
            update = (i - system.warm) * system.updates
            manager, memory, learner, weights = learn(
                system, manager, memory, learner, keys, update, tuple(chunks), position
            )
        jax.block_until_ready((manager, memory))
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return np.array(seconds), {"acting": float(np.median(acting[system.warm :]))}


def one_core(system, state, iterations):
    """One after another on one core, a call for each primitive."""
    device = core_devices(2)[0]
    with jax.default_device(device):
        return sequential(system, jax.device_put(state, device), iterations)


def one_program(system, state, iterations):
    """The same with the updates of an iteration as one program, as the runtime has them."""
    device = core_devices(2)[0]
    with jax.default_device(device):
        return sequential(system, jax.device_put(state, device), iterations, as_one)


def both_cores(system, state, iterations):
    """One after another, each program on as many cores as XLA gives it."""
    return sequential(system, jax.device_put(state, jax.devices()[0]), iterations)


def together(system, state, iterations, places=Composition(0, 1, 1, 1, 1.0, 1.0)):
    """`pearl.run` on two cores: seconds of each iteration, processor seconds by part."""
    _, report = pearl.run(
        system, state, jax.random.key(1), composition=places, devices=core_devices(2), iterations=iterations
    )
    return report.seconds, report.cpu


def in_turn(system, state, iterations):
    """`pearl.run` with one thread."""
    return together(system, state, iterations, Composition(0, 0, 0, 0, 1.0, 1.0, True))


PROGRAMS = {
    "one core": one_core, "one core, one program": one_program, "both cores": both_cores, "together": together,
    "in turn": in_turn,
}  # fmt: skip


def cases():
    """Systems by name."""
    sizes = {"length": 1, "warmup": 640, "capacity": 20_000, "ahead": 1, "batch": 256}
    return {
        "CartPole-v1, 2 actors of 8": cartpole(updates=4, **{**sizes, "actors": 2, "envs": 8, "length": 4, "ahead": 0}),
        "CartPole-v1, 1 actor of 64": cartpole(updates=4, actors=1, envs=64, **sizes),
        "CartPole-v1, 1 actor of 256": cartpole(updates=4, actors=1, envs=256, **sizes),
        "HalfCheetah-v5, 1 actor of 64": ddpg("HalfCheetah-v5", updates=4, actors=1, envs=64, **sizes),
        "HalfCheetah-v5, 1 actor of 64, fewer updates": ddpg("HalfCheetah-v5", updates=2, actors=1, envs=64, **sizes),
        "Hopper-v5, 1 actor of 64": ddpg("Hopper-v5", updates=4, actors=1, envs=64, **sizes),
    }


def host(which, rounds=5, iterations=100):
    """All programs in turn, ``rounds`` times, of some of the cases: the others' rows stay."""
    path = RESULTS / "place_pearl_host.json"
    rows = json.loads(path.read_text())["an iteration"] if path.exists() else []
    for name, system in list(cases().items())[which]:
        state, short, n = system.init(jax.random.key(0)), system.warm + 10, system.warm + 10 + iterations
        for fn in PROGRAMS.values():
            fn(system, state, short)  # compiles
        links = np.full((2, 2), 1e10)
        chosen = {
            f"{trials} trials": pearl.composed(system, state, core_devices(2), links, 10, trials=trials)
            for trials in (0, 3)
        }
        programs = PROGRAMS | {"composed": partial(together, places=chosen["3 trials"])}
        row = {"case": name, "updates": system.updates, "steps": system.collected, "ms": {}, "acting_ms": {}}
        row["chosen"] = {how: {k: v for k, v in c._asdict().items() if k != "throughput"} for how, c in chosen.items()}
        for _, (who, fn) in itertools.product(range(rounds), programs.items()):
            seconds, about = fn(system, state, n)
            row["ms"].setdefault(who, []).append(round(1e3 * float(np.median(seconds[short:])), 2))
            if "acting" in about:
                row["acting_ms"].setdefault(who, []).append(round(1e3 * about["acting"], 2))
        row["load"] = round(os.getloadavg()[0], 1)
        rows = [r for r in rows if r["case"] != name] + [row]
        print(row, flush=True)
    order = list(cases())
    return {"an iteration": sorted(rows, key=lambda r: order.index(r["case"]))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["learning", "learning_sac", "host"])
    parser.add_argument(
        "--cases", type=int, nargs=2, default=[0, 6], help="of host: from which on to which, not included"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = {
        "learning": lambda: learning(DQN, args.seeds), "learning_sac": lambda: learning(SAC, args.seeds),
        "host": lambda: host(slice(*args.cases)),
    }[args.what]()  # fmt: skip
    about = {
        "date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "load_average_before": round(load, 2),
        "versions": {p: version(p) for p in ("jax", "jaxlib", "numpy", "gymnasium", "mujoco", "optax")},
        "command": "python benchmarks/place_pearl.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip
    (RESULTS / f"place_pearl_{args.what}.json").write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
