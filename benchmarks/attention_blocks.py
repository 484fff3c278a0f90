"""Attention over the past: acting (one's own past, step by step) and learning (all timesteps), rlfx against hand-written JAX.

    python benchmarks/attention_blocks.py [--lengths 1024 2048 4096] [--batch 0 4] [--cores 2] [--rounds 7] [--out FILE.json]

Acting: `mask` is the usual decoding loop, a scan over a key/value cache of T positions with a mask, batch-major (and
`mask-t`, time-major). Learning: the gradient of causal attention, `[T, T]` is the masked score matrix as an expert writes
it, `dpa` is `jax.nn.dot_product_attention`. Width 64, one head. All candidates of a row are compared with each other
before anything is timed, and timed interleaved; ratios first. Memory is XLA's `temp_size_in_bytes`. With `--cores`, `mesh` is
rlfx with the batch split over that many devices (XLA splits the products of the others over the same cores).
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import recorded

import rlfx

WIDTH = 64
SCALE = np.float32(1 / np.sqrt(WIDTH))
#: What is measured takes at least so long: of short programs there are more rounds.
SECONDS = 2.0


def weights(seed=0):
    return [jax.random.normal(k, (WIDTH, WIDTH)) * SCALE for k in jax.random.split(jax.random.key(seed), 4)]


# -- acting: y[t] depends on y[t - 1] and attends to every earlier timestep ------------------------------------------


def decode_rlfx(length, batch, mesh=None):
    def step(params, x, t):
        query, key, value = (x @ w for w in params[:3])
        past = rlfx.series((key, value))[: t + 1]
        out = jnp.tanh(jax.nn.softmax(past[0] @ query * SCALE) @ past[1])
        return out, out

    run = rlfx.unroll(step, length=length, batch=batch, mesh=mesh)
    return lambda params, x: run(params, x)[1]


def decode_mask(length, batch):
    def attend(query, keys, values, valid):
        scores = jnp.where(valid, keys @ query * SCALE, -jnp.inf)
        return jax.nn.softmax(scores) @ values

    attend = attend if batch is None else jax.vmap(attend, (0, 0, 0, None))
    lead = () if batch is None else (batch,)

    def run(params, x):
        def step(state, t):
            x, keys, values = state
            query, key, value = (x @ w for w in params[:3])
            write = jax.lax.dynamic_update_index_in_dim
            keys, values = write(keys, key, t, len(lead)), write(values, value, t, len(lead))
            x = jnp.tanh(attend(query, keys, values, jnp.arange(length) <= t))
            return (x, keys, values), x

        cache = jnp.zeros((*lead, length, WIDTH))
        return jax.lax.scan(step, (x, cache, cache), jnp.arange(length))[1]

    return run


def decode_mask_t(length, batch):
    def run(params, x):
        def step(state, t):
            x, keys, values = state
            query, key, value = (x @ w for w in params[:3])
            keys, values = keys.at[t].set(key), values.at[t].set(value)
            scores = jnp.einsum("tbd,bd->bt", keys, query) * SCALE
            probabilities = jax.nn.softmax(jnp.where((jnp.arange(length) <= t)[None], scores, -jnp.inf))
            x = jnp.tanh(jnp.einsum("bt,tbd->bd", probabilities, values))
            return (x, keys, values), x

        cache = jnp.zeros((length, batch, WIDTH))
        return jax.lax.scan(step, (x, cache, cache), jnp.arange(length))[1]

    return run


# -- learning: the gradient of a causal attention layer --------------------------------------------------------------


def loss_rlfx(length, batch, mesh=None):
    def step(params, carry, t):
        xs, ys = (rlfx.inputs(data)[t] for data in params[1])
        query, key, value = (xs @ w for w in params[0][:3])
        past = rlfx.series((key, value))[: t + 1]
        out = jax.nn.softmax(past[0] @ query * SCALE) @ past[1]
        return jnp.mean((jnp.tanh(out @ params[0][3]) - ys) ** 2), carry

    run = rlfx.compile(step, length=length, batch=batch, mesh=mesh)
    return jax.value_and_grad(lambda w, data: run((w, data), None)[0])


def _hand_loss(attend):
    def loss(w, data):
        xs, ys = data  # [T, B?, D]
        query, key, value = (xs @ v for v in w[:3])
        return jnp.mean((jnp.tanh(attend(query, key, value) @ w[3]) - ys) ** 2)

    return jax.value_and_grad(loss)


def loss_square(length, batch):
    def attend(query, key, value):
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), query @ key.T * SCALE, -jnp.inf)
        return jax.nn.softmax(scores) @ value

    return _hand_loss(attend if batch is None else jax.vmap(attend, 1, 1))


def loss_dpa(length, batch):
    def attend(query, key, value):  # [T, B?, D] -> [B, T, heads, D]
        q, k, v = (
            x[None, :, None] if batch is None else jnp.swapaxes(x, 0, 1)[:, :, None] for x in (query, key, value)
        )
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0]
        return out[0] if batch is None else jnp.swapaxes(out, 0, 1)

    return _hand_loss(attend)


# -- measurement -----------------------------------------------------------------------------------------------------


def compiled(fn, *arguments):
    began = time.perf_counter()
    program = jax.jit(fn).lower(*arguments).compile()
    return program, time.perf_counter() - began


def measure(candidates, arguments, rounds, rtol=2e-3, atol=2e-5):
    """Interleaved medians: ``{name: {"ms", "temp_bytes", "compile_s"}}``."""
    programs, rows, results = {}, {}, {}
    for name, fn in candidates.items():
        programs[name], seconds = compiled(fn, *arguments)
        results[name] = jax.block_until_ready(programs[name](*arguments))
        rows[name] = {"compile_s": round(seconds, 2), "temp_bytes": programs[name].memory_analysis().temp_size_in_bytes}
    expected = jax.tree.leaves(results["rlfx"])
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)
    times, since = {name: [] for name in programs}, time.perf_counter()
    while len(times["rlfx"]) < rounds or time.perf_counter() - since < SECONDS:
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[name].append(time.perf_counter() - began)
    for name in programs:
        rows[name]["ms"] = round(1e3 * statistics.median(times[name]), 3)
    return rows


def with_mesh(make, mesh, batch):
    """A candidate for all the cores, where there is a batch to split."""
    if mesh is None or batch is None or batch % mesh.size:
        return {}
    return {"mesh": lambda length, batch: make(length, batch, mesh)}


def ours(rows):
    """The faster of our programs."""
    return min((r for n, r in rows.items() if n in ("rlfx", "mesh")), key=lambda r: r["ms"])


def decoding(length, batch, rounds, mesh):
    x = jax.random.normal(jax.random.key(1), (WIDTH,) if batch is None else (batch, WIDTH))
    candidates = {"rlfx": decode_rlfx, "mask": decode_mask, **({} if batch is None else {"mask-t": decode_mask_t})}
    candidates |= with_mesh(decode_rlfx, mesh, batch)
    rows = measure({n: make(length, batch) for n, make in candidates.items()}, (weights(), x), rounds)
    cache = 2 * length * (batch or 1) * WIDTH * 4
    best = min(r["ms"] for n, r in rows.items() if n not in ("rlfx", "mesh"))
    return {
        "what": "decode", "T": length, "B": batch, "time_ratio": round(ours(rows)["ms"] / best, 3),
        "temp_over_cache": round(rows["rlfx"]["temp_bytes"] / cache, 3), "candidates": rows,
    }  # fmt: skip


def learning(length, batch, rounds, mesh):
    lead = (length,) if batch is None else (length, batch)
    data = tuple(jax.random.normal(k, (*lead, WIDTH)) for k in jax.random.split(jax.random.key(2)))
    candidates = {"rlfx": loss_rlfx, "[T, T]": loss_square, "dpa": loss_dpa, **with_mesh(loss_rlfx, mesh, batch)}
    rows = measure({n: make(length, batch) for n, make in candidates.items()}, (weights(), data), rounds)
    peers = [r for n, r in rows.items() if n not in ("rlfx", "mesh")]
    return {
        "what": "gradient", "T": length, "B": batch,
        "time_ratio": round(ours(rows)["ms"] / min(r["ms"] for r in peers), 3),
        "memory_ratio": round(rows["rlfx"]["temp_bytes"] / min(r["temp_bytes"] for r in peers), 3), "candidates": rows,
    }  # fmt: skip


def show(row):
    batch = f"B={row['B']}" if row["B"] else "no batch"
    second = (
        f"temp/cache {row['temp_over_cache']:.2f}" if row["what"] == "decode" else f"memory {row['memory_ratio']:.3f}"
    )
    print(f"{row['what']:9} T={row['T']:<5} {batch:9} time {row['time_ratio']:.2f}  {second}")
    for name, r in row["candidates"].items():
        print(f"{'':12}{name:8} {r['ms']:9.2f} ms  {r['temp_bytes'] / 2**20:8.2f} MiB  compile {r['compile_s']:.2f} s")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[0, 4], help="0: no batch axis")
    parser.add_argument("--what", nargs="+", choices=("decode", "gradient"), default=["decode", "gradient"])
    parser.add_argument("--cores", type=int, default=1, help="devices for the candidate on a mesh")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    mesh = rlfx.use_all_cores(args.cores) if args.cores > 1 else None
    made = {"decode": decoding, "gradient": learning}
    about = recorded.about("attention_blocks") | {"rounds": args.rounds, "cores": args.cores}
    rows = []
    for length in args.lengths:
        for what in args.what:
            for batch in args.batch:
                rows.append(made[what](length, batch or None, args.rounds, mesh))
                show(rows[-1])
                if args.out:
                    recorded.write(args.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
