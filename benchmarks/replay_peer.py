"""Prioritised replay against flashbax: add, sample and update, one after another, iteration after iteration.

    PYTHONPATH=DIR python benchmarks/replay_peer.py --cores 1

where DIR holds flashbax and chex (``pip install --target DIR --no-deps flashbax chex``). Both hold the same transitions
in rings of the same capacity, draw stratified batches in proportion to priorities to the power of 0.6, and set the
priorities of what was drawn. flashbax's is its prioritised item buffer. An iteration is a compiled call whose state is
donated ("calls"), or all are one compiled loop ("loop"); the rings are full, or hold a sixteenth ("few"). rlfx runs with
several fan-outs of its tree, in turn with flashbax. Results: benchmarks/results/replay_peer.json.
"""

import argparse
import itertools
import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import recorded

from rlfx._sum_tree import FANOUT
from rlfx.place import replay

OUT = Path(__file__).parent / "results" / "replay_peer.json"
ALPHA, ADDED = 0.6, 32
EXAMPLE = {
    "obs": np.zeros(16, np.float32), "next_obs": np.zeros(16, np.float32), "action": np.int32(0), "reward": np.float32(0),
    "done": np.zeros((), bool),
}  # fmt: skip


def transitions(count, i):
    """Transitions that differ from iteration to iteration."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(i).astype(x.dtype), (count, *x.shape)), EXAMPLE)


def errors(batch, key):
    """What a learner would compute: positive, and dependent on all that was drawn."""
    return jax.random.uniform(key, batch["reward"].shape) + 1e-6 * jnp.abs(batch["reward"]) + 0.0 * batch["obs"][:, 0]


def ours(capacity, filled, drawn, fanout=FANOUT):
    """State and step of ``rlfx.place.replay``."""

    def step(state, inputs):
        i, key = inputs
        k_sample, k_error = jax.random.split(key)
        state = replay.insert(state, transitions(ADDED, i))
        sample = replay.sample(state, k_sample, drawn)
        state = replay.update_priorities(state, sample.indices, errors(sample.data, k_error), ALPHA)
        return state, jnp.sum(sample.probability)

    return replay.insert(replay.make_replay(capacity, EXAMPLE, fanout), transitions(filled, 0)), step


def theirs(capacity, filled, drawn):
    """State and step of flashbax's prioritised item buffer."""
    buffer = flashbax.make_prioritised_item_buffer(
        capacity, drawn, drawn, add_batches=True, priority_exponent=ALPHA, device="cpu"
    )

    def step(state, inputs):
        i, key = inputs
        k_sample, k_error = jax.random.split(key)
        state = buffer.add(state, transitions(ADDED, i))
        sample = buffer.sample(state, k_sample)
        state = buffer.set_priorities(state, sample.indices, errors(sample.experience, k_error))
        return state, jnp.sum(sample.probabilities)

    state = buffer.init(jax.tree.map(jnp.asarray, EXAMPLE))
    chunk = min(filled, 4096)
    fill = jax.jit(buffer.add, donate_argnums=0)
    for _ in range(filled // chunk):
        state = fill(state, transitions(chunk, 0))
    return state, step


def seconds(begin):
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def now():
    return time.process_time(), time.perf_counter()


def called(made, iterations):
    """A function that runs the iterations, one compiled call each, and returns seconds of CPU and wall."""
    state, step = made
    program, held = jax.jit(step, donate_argnums=0), [state]

    def run(seed):
        keys = jax.random.split(jax.random.key(seed), iterations)
        inputs = jax.block_until_ready([(jnp.int32(i), key) for i, key in enumerate(keys)])
        begin = now()
        for i in inputs:
            held[0], total = program(held[0], i)
        jax.block_until_ready((held[0], total))
        return seconds(begin)

    return run


def looped(made, iterations):
    """A function that runs the iterations in one compiled loop and returns seconds of CPU and wall."""
    state, step = made

    def many(state, key):
        keys = jax.random.split(key, iterations)
        return jax.lax.scan(step, state, (jnp.arange(iterations, dtype=jnp.int32), keys))

    program, held = jax.jit(many, donate_argnums=0), [state]

    def run(seed):
        begin = now()
        held[0], sums = jax.block_until_ready(program(held[0], jax.random.key(seed)))
        spent = seconds(begin)
        assert np.all(np.isfinite(sums))
        return spent

    return run


def compared(capacity, filled, drawn, how, *, fanouts, iterations, repeats):
    """Microseconds an iteration, CPU and wall, of each; in turn: the machine may be faster at one time than at another."""
    runner = {"calls": called, "loop": looped}[how]
    runs = {"flashbax": runner(theirs(capacity, filled, drawn), iterations)}
    runs |= {f"rlfx {k}": runner(ours(capacity, filled, drawn, k), iterations) for k in fanouts}
    times = {name: [] for name in runs}
    for i in range(repeats + 1):  # the first compiles
        for name, run in runs.items():
            times[name].append(run(i))
    return {name: np.median(t[1:], axis=0) / iterations * 1e6 for name, t in times.items()}


def main():
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacities", nargs="+", type=int, default=[2**14, 2**17, 2**20])
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--how", nargs="+", default=["calls", "loop"])
    parser.add_argument("--filled", nargs="+", default=["few", "full"])
    parser.add_argument("--fanouts", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--cores", type=int, default=1)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    for capacity, drawn, filled, how in itertools.product(args.capacities, args.batches, args.filled, args.how):
        where = {"capacity": capacity, "added": ADDED, "drawn": drawn, "filled": filled, "how": how, "cores": args.cores}
        count = capacity if filled == "full" else capacity // 16
        spent = compared(
            capacity, count, drawn, how, fanouts=args.fanouts, iterations=args.iterations, repeats=args.repeats
        )
        ratio = spent["flashbax"] / spent[f"rlfx {FANOUT}"]
        row = where | {
            "cpu_us": {name: round(float(cpu), 2) for name, (cpu, _) in spent.items()},
            "wall_us": {name: round(float(wall), 2) for name, (_, wall) in spent.items()},
            "ratio_cpu": round(float(ratio[0]), 3), "ratio_wall": round(float(ratio[1]), 3),
        }  # fmt: skip
        rows = [r for r in rows if where != {k: r[k] for k in where}] + [row]
        print(*where.values(), row["cpu_us"], f"{ratio[0]:.2f} (wall {ratio[1]:.2f})", flush=True)
        about = recorded.about("python benchmarks/replay_peer.py --cores 1, --cores 2", flashbax=version("flashbax"))
        recorded.write(OUT, about | {"fanout": FANOUT, "iterations": args.iterations, "rows": rows})


if __name__ == "__main__":
    main()
