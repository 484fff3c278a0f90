"""Networks as libraries have them, beside the same as rlfx's own examples do, in turns.

    python benchmarks/ways_of_writing.py [--rounds 40] [--json FILE]

Weights ``[out, in]`` on the left, ``w @ x`` (equinox), beside ``x @ w``; a cell that multiplies gate by gate (flax) beside one
product for all of its gates; entities as columns beside rows; one-hot vectors beside rows of weights; weights that a nested loop
normalises beside those that are normalised before it; a condition of each environment beside a choice; the library's attention,
which adds a batch of one, beside attention without. The ratio is of the two (1: it does not matter how a user writes it);
medians of paired rounds, one process; pin it to one core.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import recorded
from rewrites import in_turns

import rlfx

IN, HIDDEN = 16, 64
KEYS = jax.random.split(jax.random.key(0), 4)


def weights(key, *shape):
    return jax.random.normal(key, shape) / shape[-1] ** 0.5


PARAMS = {
    "first": weights(KEYS[0], HIDDEN, IN), "then": weights(KEYS[1], HIDDEN, HIDDEN), "last": weights(KEYS[2], 4, HIDDEN),
    "bias": jnp.zeros(HIDDEN), "gates of x": weights(KEYS[0], 3 * HIDDEN, IN), "gates": weights(KEYS[1], 3 * HIDDEN, HIDDEN),
}  # fmt: skip


def layers(times, p, h, x):
    for name in ("first", "then", "then"):
        x = jnp.tanh(times(p[name], x) + p["bias"])
    return times(p["last"], x), h


def recurrence(times, p, h, x):
    h = jnp.tanh(times(p["first"], x) + times(p["then"], h) + p["bias"])
    return times(p["last"], h), h


def entities(times, p, h, x):
    """Of eight, under ``jax.vmap``."""
    each = jax.vmap(lambda e: jnp.tanh(times(p["then"], jnp.tanh(times(p["first"], e) + p["bias"]))))
    return times(p["last"], each(x * jnp.arange(1.0, 9.0)[:, None]).max(0)), h


def imagined(times, p, h, x):
    """Twenty steps of a model, in a ``lax.scan`` of the user's."""
    step = lambda z, _: (jnp.tanh(times(p["first"], x) + times(p["then"], z)), None)  # noqa: E731
    return times(p["last"], jax.lax.scan(step, jnp.zeros(HIDDEN), None, length=20)[0]), h


def gates(times, p, h, x):
    """A gated recurrent unit, one product for all gates."""
    (a, b, c), (i, j, k) = jnp.split(times(p["gates"], h), 3), jnp.split(times(p["gates of x"], x), 3)
    return gated(p, times, h, a + i, b + j, c, k)


def gate_by_gate(times, p, h, x):
    a, b, c = (times(w, h) for w in p["gates"])
    i, j, k = (times(w, x) for w in p["gates of x"])
    return gated(p, times, h, a + i, b + j, c, k)


def gated(p, times, h, reset, update, of_h, of_x):
    new = jnp.tanh(of_x + jax.nn.sigmoid(reset) * of_h)
    h = new + jax.nn.sigmoid(update) * (h - new)
    return times(p["last"], h), h


def columns(times, p, h, x):
    """Layers of eight entities along the last axis."""
    z = x[:, None] * jnp.arange(1.0, 9.0)
    for name in ("first", "then"):
        z = jnp.tanh(times_columns(times, p[name], z) + p["bias"][:, None])
    return times(p["last"], z.max(1)), h


def times_columns(times, w, z):
    """``w @ z`` for weights on the left; by ``jax.vmap`` over columns for those on the right."""
    return jax.vmap(lambda e: times(w, e), in_axes=1, out_axes=1)(z)


def as_rows(times, p, h, x):
    z = x * jnp.arange(1.0, 9.0)[:, None]
    for name in ("first", "then"):
        z = jnp.tanh(jax.vmap(lambda e, name=name: times(p[name], e))(z) + p["bias"])
    return times(p["last"], z.max(0)), h


def places(x):
    return jnp.abs(100.0 * x).astype(jnp.int32) % HIDDEN


def one_hot(times, p, h, x):
    return times(p["last"], jnp.tanh(jax.vmap(lambda i: times(p["then"], jax.nn.one_hot(i, HIDDEN)))(places(x)).sum(0))), h


def looked_up(times, p, h, x):
    return times(p["last"], jnp.tanh(p["then"][places(x)].sum(0))), h


def unit(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


def normalised(times, p, h, x):
    """Twenty steps, in each of which weights are normalised."""
    step = lambda z, _: (jnp.tanh(times(p["first"], x) + times(unit(p["then"]), z)), None)  # noqa: E731
    return times(p["last"], jax.lax.scan(step, jnp.zeros(HIDDEN), None, length=20)[0]), h


def normalised_before(times, p, h, x):
    w, given = unit(p["then"]), times(p["first"], x)
    step = lambda z, _: (jnp.tanh(given + times(w, z)), None)  # noqa: E731
    return times(p["last"], jax.lax.scan(step, jnp.zeros(HIDDEN), None, length=20)[0]), h


def condition(times, p, h, x):
    other = lambda: times(p["then"], jnp.cos(times(p["first"], x)))  # noqa: E731
    return times(p["last"], jax.lax.cond(x[0] > 0, lambda: jnp.tanh(times(p["first"], x)), other)), h


def choice(times, p, h, x):
    first = times(p["first"], x)
    return times(p["last"], jnp.where(x[0] > 0, jnp.tanh(first), times(p["then"], jnp.cos(first)))), h


def tokens(times, p, x):
    """Eight, as queries, keys and values of four heads."""
    seen = jax.vmap(lambda e: times(p["first"], e))(x * jnp.arange(1.0, 9.0)[:, None]).reshape(8, 4, HIDDEN // 4)
    return seen, jnp.tanh(seen), jnp.cos(seen)


def library_attention(times, p, h, x):
    return times(p["last"], jax.nn.dot_product_attention(*tokens(times, p, x))[0].reshape(-1)), h


def attention(times, p, h, x):
    q, k, v = tokens(times, p, x)
    share = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / (HIDDEN // 4) ** 0.5, -1)
    return times(p["last"], jnp.einsum("hqk,khd->qhd", share, v)[0].reshape(-1)), h


def compiled(network, side, length=64, batch=64):
    data = jax.random.normal(KEYS[3], (length, batch, IN))
    turned = side == "x @ w"
    params = {k: w.T.copy() if turned and w.ndim == 2 else w for k, w in PARAMS.items()}
    if network is gate_by_gate:
        params |= {k: jnp.split(params[k], 3, 1) for k in ("gates", "gates of x")}
    times = (lambda w, x: x @ w) if turned else (lambda w, x: w @ x)

    def program(p, h, t):
        logits, h = network(times, p, h, rlfx.inputs(data)[t])
        return -jax.nn.log_softmax(logits)[0], h

    loss = rlfx.compile(program, length=length, batch=batch)
    carry = jnp.zeros((batch, HIDDEN))
    run = jax.jit(jax.value_and_grad(lambda p: loss(p, carry)[0])).lower(params).compile()
    return lambda: jax.block_until_ready(run(params))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    ways = [(network, (network, "w @ x"), (network, "x @ w")) for network in (layers, recurrence, entities, imagined, gates)]
    for theirs, ours in ((gate_by_gate, gates), (columns, as_rows), (one_hot, looked_up), (normalised, normalised_before)):
        ways.append((theirs, (theirs, "x @ w"), (ours, "x @ w")))
    ways.append((columns, (columns, "w @ x"), (as_rows, "x @ w")))
    for theirs, ours in ((condition, choice), (library_attention, attention)):
        ways.append((theirs, (theirs, "x @ w"), (ours, "x @ w")))
    for network, *pair in ways:
        ratio, their_ms, our_ms = in_turns([compiled(*way) for way in pair], args.rounds)
        row = {"network": network.__name__, "way": pair[0][1], "ratio": round(ratio, 3)}
        rows.append(row | {"theirs_ms": round(their_ms, 2), "ours_ms": round(our_ms, 2)})
        print(f"{network.__name__:17} {pair[0][1]} {ratio:5.2f}   {their_ms:7.2f} ms, {our_ms:7.2f} ms as rlfx's examples")
    if args.json:
        recorded.write(args.json, recorded.about("ways_of_writing") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
