"""Gradients of ordinary losses in blocks of the batch: rlfx.incrementalize beside the other ways to do it.

    python benchmarks/memory_losses.py [--models mlp cnn transformer gru] [--rounds 7] [--out FILE.json]

For each model: XLA's temporary bytes at 1, 2, 4, 8 and 16 blocks (of one program each, after compilation), and at 8
blocks the median wall time, interleaved, and the largest error of the gradients relative to the whole batch's. The other
ways: `optax.microbatch` of the gradient function (means of means), `lax.map` of checkpointed blocks of the loss, and an
accumulation loop written by hand. Prints ratios to the whole batch first.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import recorded

from rlfx.transforms.incrementalize import incrementalize


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / np.float32(np.sqrt(shape[0]) if len(shape) > 1 else 1.0)


def labels(seed, high, *shape):
    return jax.random.randint(jax.random.key(seed), shape, 0, high)


def nll(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0].mean()


def mlp(n=8192):
    def loss(params, batch):
        x, y = batch
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b)
        return nll(x @ params[-1][0] + params[-1][1], y)

    sizes = [(48, 256), (256, 256), (256, 10)]
    params = [(normal(i, *s), jnp.zeros(s[1])) for i, s in enumerate(sizes)]
    return loss, params, (normal(5, n, 48), labels(6, 10, n))


def cnn(n=1024):
    def loss(params, batch):
        x, y = batch
        for w in params["convs"]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return nll(x.reshape(len(x), -1) @ params["w"], y)

    convs = [0.2 * normal(0, 3, 3, 3, 16), 0.2 * normal(1, 3, 3, 16, 16)]
    return loss, {"convs": convs, "w": normal(2, 8 * 8 * 16, 10)}, (normal(3, n, 32, 32, 3), labels(4, 10, n))


def transformer(n=256, s=32, d=64, heads=4):
    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(p, batch):
        tokens, y = batch
        x = p["embed"][tokens]
        for layer in p["layers"]:
            q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], heads, 3 * d // heads), 3, -1)
            scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.float32(np.sqrt(d // heads))
            weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf))
            x = x + jnp.einsum("nhst,nthd->nshd", weights, v).reshape(x.shape) @ layer["o"]
            x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
        return nll(norm(x) @ p["embed"].T, y)

    def layer(i):
        shapes = {"qkv": (d, 3 * d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        return {k: normal(10 * i + j, *shape) for j, (k, shape) in enumerate(shapes.items())}

    params = {"embed": normal(0, 128, d), "layers": [layer(1), layer(2)]}
    return loss, params, (labels(5, 128, n, s), labels(6, 128, n, s))


def gru(n=1024, length=32, inputs=16, hidden=64):
    def loss(p, batch):
        xs, y = batch

        def cell(h, x):
            a, b = x @ p["wx"], h @ p["wh"]
            r, z = jnp.split(jax.nn.sigmoid(a[:, : 2 * hidden] + b[:, : 2 * hidden]), 2, -1)
            h = z * h + (1.0 - z) * jnp.tanh(a[:, 2 * hidden :] + r * b[:, 2 * hidden :])
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((len(xs), hidden)), xs.swapaxes(0, 1))
        return jnp.mean((hs @ p["out"] - y.T) ** 2)

    params = {"wx": normal(0, inputs, 3 * hidden), "wh": normal(1, hidden, 3 * hidden), "out": normal(2, hidden)}
    return loss, params, (normal(3, n, length, inputs), normal(4, n, length))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "gru": gru}


# -- ways to compute a gradient in blocks ------------------------------------------------------------------------------


def by_rlfx(loss, blocks):
    return jax.value_and_grad(incrementalize(loss, blocks=blocks))


def by_optax(loss, blocks):
    def step(params, batch):
        size = len(jax.tree.leaves(batch)[0]) // blocks
        kind = optax.microbatching.AccumulationType.MEAN
        return optax.microbatch(jax.value_and_grad(loss), 1, size, kind)(params, batch)

    return step


def cut(batch, blocks):
    return jax.tree.map(lambda x: x.reshape(blocks, x.shape[0] // blocks, *x.shape[1:]), batch)


def by_map(loss, blocks):
    """The mean over `lax.map` of checkpointed blocks."""

    def mean(params, batch):
        part = jax.checkpoint(lambda block: loss(params, block))
        return jax.lax.map(part, cut(batch, blocks)).mean()

    return jax.value_and_grad(mean)


def by_hand(loss, blocks):
    def step(params, batch):
        def add(total, block):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, block)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, cut(batch, blocks))
        return jax.tree.map(lambda x: x / blocks, total)

    return step


WAYS = {"rlfx": by_rlfx, "optax.microbatch": by_optax, "lax.map": by_map, "by hand": by_hand}


# -- measurement -------------------------------------------------------------------------------------------------------


def temp(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def error(got, want):
    """The largest difference of a leaf, relative to the leaf's largest number."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)) for a, b in pairs)


def measure(name, rounds, counts=(1, 2, 4, 8, 16), timed=8):
    loss, params, batch = MODELS[name]()
    compile_ = lambda fn: jax.jit(fn).lower(params, batch).compile()  # noqa: E731
    whole = compile_(jax.value_and_grad(loss))
    want = whole(params, batch)
    rows = {"whole": {"temp": {"1": temp(whole)}}}
    runs = {"whole": whole}
    for way, make in WAYS.items():
        compiled = {n: compile_(make(loss, n)) for n in (counts if way == "rlfx" else (timed,))}
        runs[way] = compiled[timed]
        rows[way] = {
            "temp": {str(n): temp(c) for n, c in compiled.items()},
            "error": error(runs[way](params, batch), want),
        }
    times = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(params, batch))
            times[way].append(time.perf_counter() - begin)
    for way in runs:
        rows[way]["ms"] = 1e3 * statistics.median(times[way])
        pairs = zip(times[way], times["whole"], strict=True)
        rows[way]["time_ratio"] = statistics.median(a / b for a, b in pairs)
    return {"model": name, "batch": len(jax.tree.leaves(batch)[0]), "blocks": timed, "rounds": rounds, "ways": rows}


def show(result):
    rows, blocks = result["ways"], str(result["blocks"])
    whole = rows["whole"]["temp"]["1"]
    print(f"{result['model']}, batch {result['batch']}: whole {whole / 1e6:.1f} MB, {rows['whole']['ms']:.1f} ms")
    for way, row in rows.items():
        if way != "whole":
            print(
                f"  {way:17} {blocks} blocks: temp {row['temp'][blocks] / whole:5.3f}x  time {row['time_ratio']:5.2f}x  "
                f"error {row['error']:.1e}  ({row['temp'][blocks] / 1e6:.2f} MB, {row['ms']:.1f} ms)"
            )
    falls = "  ".join(f"{n}: {whole / bytes_:.1f}" for n, bytes_ in rows["rlfx"]["temp"].items())
    print(f"  rlfx, blocks: how many times less  {falls}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    args = parser.parse_args()
    results = []
    for name in args.models:
        results.append(measure(name, args.rounds))
        show(results[-1])
    if args.out:
        record = recorded.about("memory_losses", optax=optax.__version__) | {
            "results": results,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
