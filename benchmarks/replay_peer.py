"""Prioritised replay against flashbax: add, sample and update, one after another, iteration after iteration.

    PYTHONPATH=DIR python benchmarks/replay_peer.py

where DIR holds flashbax and chex (``pip install --target DIR --no-deps flashbax chex``). Both hold the same transitions
in rings of the same capacity, draw stratified batches in proportion to priorities to the power of 0.6, and set the
priorities of what was drawn. flashbax's is its prioritised item buffer. An iteration is a compiled call whose state is
donated ("calls"), or all are one compiled loop ("loop"). Results: benchmarks/results/replay_peer.json.
"""

import argparse
import datetime
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

from rlfx.place import replay

OUT = Path(__file__).parent / "results" / "replay_peer.json"
ALPHA = 0.6
EXAMPLE = {
    "obs": jnp.zeros(16), "next_obs": jnp.zeros(16), "action": jnp.int32(0), "reward": jnp.float32(0),
    "done": jnp.zeros((), bool),
}  # fmt: skip


def transitions(count, i):
    """Transitions that differ from iteration to iteration."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(i).astype(x.dtype), (count, *x.shape)), EXAMPLE)


def errors(batch, key):
    """What a learner would compute: positive, and dependent on all that was drawn."""
    return jax.random.uniform(key, batch["reward"].shape) + 1e-6 * jnp.abs(batch["reward"]) + 0.0 * batch["obs"][:, 0]


def ours(capacity, added, drawn, fanout=16):
    """State and step of ``rlfx.place.replay``."""

    def step(state, inputs):
        i, key = inputs
        k_sample, k_error = jax.random.split(key)
        state = replay.insert(state, transitions(added, i))
        sample = replay.sample(state, k_sample, drawn)
        state = replay.update_priorities(state, sample.indices, errors(sample.data, k_error), ALPHA)
        return state, jnp.sum(sample.probability)

    return replay.insert(replay.make_replay(capacity, EXAMPLE, fanout), transitions(capacity, 0)), step


def theirs(capacity, added, drawn):
    """State and step of flashbax's prioritised item buffer."""
    buffer = flashbax.make_prioritised_item_buffer(
        capacity, drawn, drawn, add_batches=True, priority_exponent=ALPHA, device="cpu"
    )

    def step(state, inputs):
        i, key = inputs
        k_sample, k_error = jax.random.split(key)
        state = buffer.add(state, transitions(added, i))
        sample = buffer.sample(state, k_sample)
        state = buffer.set_priorities(state, sample.indices, errors(sample.experience, k_error))
        return state, jnp.sum(sample.probabilities)

    state = buffer.init(EXAMPLE)
    chunk = min(capacity, 4096)
    fill = jax.jit(buffer.add, donate_argnums=0)
    for _ in range(capacity // chunk):
        state = fill(state, transitions(chunk, 0))
    return state, step


def called(made, iterations):
    """A function that runs the iterations, one compiled call each, and returns seconds."""
    state, step = made
    program, held = jax.jit(step, donate_argnums=0), [state]

    def run(seed):
        inputs = [(jnp.int32(i), key) for i, key in enumerate(jax.random.split(jax.random.key(seed), iterations))]
        begin = time.perf_counter()
        for i in inputs:
            held[0], total = program(held[0], i)
        jax.block_until_ready((held[0], total))
        return time.perf_counter() - begin

    return run


def looped(made, iterations):
    """A function that runs the iterations in one compiled loop and returns seconds."""
    state, step = made

    def many(state, key):
        keys = jax.random.split(key, iterations)
        return jax.lax.scan(step, state, (jnp.arange(iterations, dtype=jnp.int32), keys))

    program, held = jax.jit(many, donate_argnums=0), [state]

    def run(seed):
        begin = time.perf_counter()
        held[0], sums = jax.block_until_ready(program(held[0], jax.random.key(seed)))
        seconds = time.perf_counter() - begin
        assert np.all(np.isfinite(sums))
        return seconds

    return run


def main():
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacities", nargs="+", type=int, default=[2**16])
    parser.add_argument("--how", nargs="+", default=["calls", "loop"])
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 256, 1024])
    parser.add_argument("--added", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    for capacity, drawn, how in itertools.product(args.capacities, args.batches, args.how):
        runner = {"calls": called, "loop": looped}[how]
        runs = {
            "rlfx": runner(ours(capacity, args.added, drawn), args.iterations),
            "flashbax": runner(theirs(capacity, args.added, drawn), args.iterations),
        }
        times = {name: [] for name in runs}
        for i in range(args.repeats + 1):  # in turn: the machine may be faster at one time than at another
            for name, run in runs.items():
                times[name].append(run(i))
        rate = {name: args.iterations / float(np.median(t[1:])) for name, t in times.items()}
        rows = [r for r in rows if (r["capacity"], r["drawn"], r["how"]) != (capacity, drawn, how)]
        rows.append({
            "capacity": capacity, "added": args.added, "drawn": drawn, "how": how, "iterations_per_s": rate,
            "ratio": rate["rlfx"] / rate["flashbax"], "seconds": times,
        })  # fmt: skip
        print(capacity, drawn, how, {k: round(v) for k, v in rate.items()}, round(rows[-1]["ratio"], 2), flush=True)
        OUT.write_text(json.dumps({
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "jax": jax.__version__,
            "flashbax": version("flashbax"), "device": f"{jnp.zeros(()).device} of {os.cpu_count()} cores",
            "rows": rows,
        }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
