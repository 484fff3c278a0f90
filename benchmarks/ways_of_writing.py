"""Networks as libraries have them, beside the same as rlfx's own examples do, in turns.

    python benchmarks/ways_of_writing.py [--rounds 40] [--json FILE]

Weights ``[out, in]`` on the left, ``w @ x`` (equinox), beside ``x @ w``; a cell that multiplies gate by gate (flax) beside one
product for all of its gates. The ratio is of the two (1: it does not matter how a user writes it); medians of paired rounds, one
process; pin it to one core.
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
    for network, *pair in (*ways, (gate_by_gate, (gate_by_gate, "x @ w"), (gates, "x @ w"))):
        ratio, their_ms, our_ms = in_turns([compiled(*way) for way in pair], args.rounds)
        row = {"network": network.__name__, "ratio": round(ratio, 3)}
        rows.append(row | {"theirs_ms": round(their_ms, 2), "ours_ms": round(our_ms, 2)})
        print(f"{network.__name__:12} {ratio:5.2f}   {their_ms:7.2f} ms as libraries, {our_ms:7.2f} ms as rlfx's examples")
    if args.json:
        recorded.write(args.json, recorded.about("ways_of_writing") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
