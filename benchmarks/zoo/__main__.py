"""What a timestep may compute, beside the same by hand, in turns on one core. Ratios first.

    python -m benchmarks.zoo [--only NAME ...] [--rounds 11] [--seconds 4] [--length 32] [--batch 32] [--out FILE.json]

By hand, a network is `jax.vmap` twice, once over all points, over points that lie last, and in blocks with `jax.checkpoint`; a
recurrence `jax.lax.scan`, unrolled by four, in checkpointed pieces, and with environments last. The loss and its gradient by all
parameters, which must be equal; CPU seconds, medians. `best` is the fastest by hand. Nothing else of an entry is rewritten by
hand: what is measured is whether a way of writing is slower here than there, not whether an expert knows another formula.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from benchmarks.untuned.__main__ import keep_to

if __name__ == "__main__":  # before jax counts cores
    keep_to(1)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rlfx
from benchmarks import recorded
from benchmarks.untuned.measure import Workload, line, measure, ratios, summary
from benchmarks.zoo import functions, networks, recurrences
from benchmarks.zoo.parts import NETWORKS, RECURRENCES

#: What fills the tables.
KINDS = (networks, functions, recurrences)


def of_points(entry, length, batch):
    data = jax.random.normal(jax.random.key(99), (length, batch, *entry.shape))
    rows = data.reshape(length * batch, *entry.shape)
    program = lambda p, state, t: (entry.fn(p, rlfx.inputs(data)[t]), state)  # noqa: E731
    loss = rlfx.compile(program, length=length, batch=batch)
    each = lambda p: lambda x: entry.fn(p, x)  # noqa: E731

    def blocks(count):
        def run(p):
            part = jax.checkpoint(lambda total, x: (total + jax.vmap(each(p))(x).sum(), None))
            return lax.scan(part, 0.0, rows.reshape(count, -1, *entry.shape))[0] / len(rows)

        return run

    return {
        "rlfx": lambda p: loss(p, ())[0], "plain": lambda p: jax.vmap(jax.vmap(each(p)))(data).mean(),
        "all points": lambda p: jax.vmap(each(p))(rows).mean(),
        "points last": lambda p: jax.vmap(each(p), in_axes=-1)(jnp.moveaxis(rows, 0, -1)).mean(),
        "8 blocks": blocks(8), "a block each timestep": blocks(length),
    }  # fmt: skip


def of_a_recurrence(entry, length, batch):
    data = jax.random.normal(jax.random.key(99), (length, batch, *entry.shape))
    start = jax.tree.map(lambda x: jnp.tile(jnp.asarray(x), (batch, *[1] * np.ndim(x))), entry.start)
    loss = rlfx.compile(lambda p, state, t: entry.fn(p, state, rlfx.inputs(data)[t]), length=length, batch=batch)

    def scanned(axis=0, unroll=1, pieces=None):
        step = jax.vmap(entry.fn, in_axes=(None, axis, axis), out_axes=axis)
        turned = lambda x, at: jnp.moveaxis(x, at, axis if axis < 0 else at + axis)  # noqa: E731

        def run(p):
            body = lambda state, x: step(p, state, x)[::-1]  # noqa: E731
            state, xs = jax.tree.map(lambda x: turned(x, 0), start), turned(data, 1)
            if pieces is None:
                return lax.scan(body, state, xs, unroll=unroll)[1].mean()
            piece = jax.checkpoint(lambda state, xs: lax.scan(body, state, xs))
            return lax.scan(piece, state, xs.reshape(pieces, -1, *xs.shape[1:]))[1].mean()

        return run

    return {
        "rlfx": lambda p: loss(p, start)[0], "plain": scanned(), "unrolled by 4": scanned(unroll=4),
        "8 checkpointed pieces": scanned(pieces=8), "environments last": scanned(axis=-1),
    }  # fmt: skip


def workload(name, length, batch):
    """One entry; recurrences have twice as many timesteps."""
    entry = NETWORKS.get(name) or RECURRENCES[name]
    forms = of_points(entry, length, batch) if entry.start is None else of_a_recurrence(entry, 2 * length, batch)
    return Workload({form: jax.value_and_grad(f) for form, f in forms.items()}, (entry.params,), tolerance=1e-3)


def kept(row):
    """What is recorded of an entry."""
    ours, best = row["forms"]["rlfx"], row["forms"][row["best"]]
    found = {to: round(float(np.median(ratios(row, to))), 3) for to in ("plain", "best")} | {"best_is": row["best"]}
    return found | {"ms": round(ours["cpu_ms"], 3), "bytes": ours["temp_bytes"], "bytes_of_best": best["temp_bytes"]}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=(*NETWORKS, *RECURRENCES), default=(*NETWORKS, *RECURRENCES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for name in args.only:
        rows[name] = measure(workload(name, args.length, args.batch), args.rounds, args.seconds)
        print(line(name, rows[name]), flush=True)
        jax.clear_caches()
        gc.collect()
    means = summary(rows)
    slower = {to: [name for name, row in rows.items() if np.median(ratios(row, to)) > 1.05] for to in ("plain", "best")}
    plain, best = means["time_of_plain"], means["time_of_best"]
    print(f"{len(rows)} entries, {plain:.2f} of plain, {best:.2f} of the best; above 1.05: {slower}")
    if args.out:
        sizes = {"length": args.length, "batch": args.batch, "rounds": args.rounds}
        record = recorded.about("zoo") | sizes | {"means": means, "slower": slower}
        recorded.write(args.out, record | {"rows": {name: kept(row) for name, row in rows.items()}})


if __name__ == "__main__":
    main()
