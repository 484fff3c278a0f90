"""The learned policy on 20 held-out graphs, of other models and sizes than it was trained on, against search at equal seconds.

    python benchmarks/place_held_out.py [--first 0] [--count 20]

The policy is trained on ChainMM (stages I and II, 4,096 episodes), once. Then, for each graph, nothing of which is compiled:

* zero-shot: 16 samples of the policy, and the best of them by the simulator; its seconds are what the others get;
* polish: the heuristics' starts and the search, as long as that took, and 3 s more;
* proposal: the same search from the heuristics and the samples, until the same seconds are spent.

Seconds are of the process's processor time, compilation included: the machine has other work. Results: place_held_out.json.
"""

import argparse
import datetime
import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place import baselines, hardware, methods, search, train, workloads
from rlfx.place.explode import explode
from rlfx.place.policy import DualPolicy
from rlfx.place.problem import build

RESULT = Path(__file__).parent / "results" / "place_held_out.json"
MORE, CHUNK = 3.0, 64  # seconds after the zero-shot ones; simulator calls between looks at the clock


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(layers, parts):
    """Layers of one width; rows and columns in ``parts``."""

    def fn(x, weights):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return x

    splits = {f"layer{i}": parts for i in range(layers)}
    return explode(fn, f32(4096, 4096), (f32(4096, 4096),) * layers, splits=splits, name="mlp")


def chain(matrices, parts):
    """A product of matrices from the left."""

    def fn(first, *others):
        for i, w in enumerate(others):
            with jax.named_scope(f"product{i}"):
                first = first @ w
        return first

    splits = {f"product{i}": parts for i in range(matrices - 1)}
    return explode(fn, *(f32(4096, 4096),) * matrices, splits=splits, name="chain")


def ensemble(members, parts):
    """Members of two layers each, which read the same, and their mean."""

    def fn(x, weights):
        outs = []
        for i, (w1, w2) in enumerate(weights):
            with jax.named_scope(f"member{i}"):
                outs.append(jax.nn.relu(x @ w1) @ w2)
        return sum(outs) / len(outs)

    weights = ((f32(2048, 4096), f32(4096, 2048)),) * members
    return explode(fn, f32(2048, 2048), weights, splits={f"member{i}": parts for i in range(members)}, name="ensemble")


def block(tokens, parts):
    """The attention half of a Llama layer in other sizes and parts."""
    work, (rows, columns) = workloads.llama_block(tokens, 2048, 16), parts
    splits = {
        **work.splits, "norm": (rows,), **dict.fromkeys(("query", "key", "value"), (rows, 1, columns)),
        **dict.fromkeys(("scores", "mix"), (columns, rows)), "project": (rows, columns),
    }  # fmt: skip
    return explode(work.fn, *work.avals, splits=splits, fuse=work.fuse, out_splits=(rows,), name="block")


PARTS = {
    mlp: {3: (2, 2, 2), 6: (4, 1, 2), 8: (2, 1, 4), 5: (4, 2, 2), 10: (4, 1, 4)},
    chain: {4: (2, 2, 2), 6: (2, 4, 2), 5: (4, 1, 4), 8: (2, 2, 4), 7: (4, 2, 2)},
    ensemble: {3: (2, 1, 2), 5: (4, 1, 2), 7: (2, 1, 1), 6: (2, 2, 2), 10: (4, 1, 1)},
    block: {1024: (2, 2), 2048: (4, 2), 4096: (2, 4), 3072: (8, 2), 8192: (4, 4)},
}
GRAPHS = [(make, size, parts) for make, sizes in PARTS.items() for size, parts in sizes.items()]


def searched(problem, key, starts, costs, until):
    """`polish` in runs of ``CHUNK`` calls until some times: milliseconds of the best at each, and how many calls it took."""
    state, calls, found = search.initial(problem, starts, costs, 1), len(starts), []
    gain = max(0.0, 1.0 - problem.lower_bound() / float(state.best_cost.min()))
    for end in until:
        while time.process_time() < end:
            key, now = jax.random.split(key)
            state, _ = search.anneal(
                problem, now, state, CHUNK, hot=1e-3 * gain, cold=1e-3 * gain, moves=methods.GUIDED
            )
            jax.block_until_ready(state)
            calls += CHUNK
        found.append(search.winner(state)[1] * 1e3)
    return [round(ms, 3) for ms in found], calls


def compared(policy, params, number):
    make, size, parts = GRAPHS[number]
    graph = make(size, parts)
    problem = build(graph, hardware.p100_pcie(bandwidth=(2.5e9, 1e10)[number % 2]).fitted(graph, 0.1))
    key = jax.random.key(number)
    jax.clear_caches()
    begin = time.process_time()
    samples = train.sample(policy, params, problem, key, 16)
    costs = baselines.evaluate(problem, samples)
    zero = time.process_time() - begin
    began = time.process_time()
    starts, found = methods.heuristic_starts(problem, key, 512)
    both = [*starts, *samples], np.concatenate([found, costs])
    proposal, more = searched(problem, key, *both, [began + MORE])
    jax.clear_caches()
    begin = time.process_time()
    starts, found = methods.heuristic_starts(problem, key, 512)
    heuristics = float(found.min()) * 1e3
    polish, calls = searched(problem, key, starts, found, [begin + zero, begin + zero + MORE])
    return {
        "graph": f"{make.__name__} {size} in {parts}", "tasks": problem.tasks, "bound_ms": problem.lower_bound() * 1e3,
        "zero_shot_ms": round(float(costs.min()) * 1e3, 3), "zero_shot_seconds": round(zero, 2),
        "heuristics_ms": round(heuristics, 3), "polish_ms": polish[0], "polish_more_ms": polish[1],
        "proposal_ms": proposal[0], "calls": {"polish": calls, "proposal": more},
    }  # fmt: skip


def trained(policy, seed=0, episodes=4096):
    work = workloads.chainmm()
    graph = work.graph()
    problem = build(graph, hardware.p100_pcie(bandwidth=2.5e9).fitted(graph, work.one_device_seconds))
    keys = jax.random.split(jax.random.key(seed), 3)
    learner = train.start(keys[0], problem, policy)
    steps = train.Training().imitation_steps
    learner = train.imitate_critical_path(policy, learner, problem, keys[1], steps=steps)
    return train.learn(policy, learner, problem, keys[2], episodes=episodes)[0].params


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(GRAPHS))
    args = parser.parse_args()
    policy, rows = DualPolicy(), []
    params = trained(policy)
    about = {
        "date": datetime.date.today().isoformat(), "device": f"CPU, {os.cpu_count()} cores, other work beside",
        "versions": {p: version(p) for p in ("jax", "jaxlib", "numpy", "flax", "optax")},
        "command": "python benchmarks/place_held_out.py",
    }  # fmt: skip
    order = np.random.default_rng(0).permutation(len(GRAPHS))[args.first : args.first + args.count]
    for number in order.tolist():
        rows.append(compared(policy, params, number))
        print(rows[-1], flush=True)
        RESULT.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
