"""Where each rewrite for CPUs pays, and where it stops: the same program with and without it, in turns.

    python benchmarks/rewrites.py [--only NAME ...] [--rounds 15] [--json FILE]

The rewrites are fields of ``rlfx.target("cpu").rewrites``: a target without one of them compiles the same program otherwise.
Ratios first (time with / time without; below 1 it pays), medians of rounds in turns, one process; pin it to one core.
"""

import argparse
import collections
import json
import pathlib
import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import recorded

import rlfx

CPU = rlfx.target("cpu")
Step = collections.namedtuple("Step", "reward terminated truncated")
KEY = jax.random.key(0)


def normal(*shape):
    return jax.random.normal(KEY, shape) / shape[-2 if len(shape) > 1 else -1] ** 0.5


def layers(width, batch, length=64):
    """A policy of two layers, learned from what was stored."""

    def loss(w, x, t):
        new = jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
        return jnp.sum((jnp.tanh(jax.lax.stop_gradient(x) @ w[0]) @ w[1]) ** 2), jax.lax.stop_gradient(new)

    return loss, (normal(width, width), normal(width, width)), 0.1 * jnp.ones((batch, width)), length, batch


def images(side, batch, length=8):
    """A convolution of what the environment shows, learned in blocks."""

    def loss(w, x, t):
        seen = jax.lax.stop_gradient(jnp.broadcast_to(x, (1, 3, side, side)))
        found = jax.lax.conv_general_dilated(seen, w, (2, 2), "SAME")
        return jnp.sum(found**2), x * 0.9

    return loss, normal(16, 3, 5, 5), jnp.ones((batch,)), length, batch


def attends(width, batch, length=256):
    """Acting with attention to one's own past."""

    def step(w, x, t):
        past = rlfx.series(x, end=0.0)[: t + 1]
        return jnp.tanh(jax.nn.softmax(past @ (x @ w)) @ past), jnp.sum(x)

    return step, normal(width, width), 0.1 * jnp.ones((batch, width)), length, batch


def gates(width, batch, length=128):
    """Acting with a gated recurrence: three products of one state."""

    def step(w, h, t):
        z, r, n = (h @ w[i] for i in range(3))
        z = jax.nn.sigmoid(z)
        return (1 - z) * jnp.tanh(jax.nn.sigmoid(r) * n) + z * h, jnp.sum(h)

    return step, tuple(normal(width, width) for _ in range(3)), 0.1 * jnp.ones((batch, width)), length, batch


def recurrence(width, batch, length=128):
    """Backpropagation through time."""

    def loss(w, h, t):
        h = jnp.tanh(h @ w)
        return jnp.sum(h**2), h

    return loss, normal(width, width), 0.1 * jnp.ones((batch, width)), length, batch


def fed(width, batch, length=128):
    """Acting with a gated recurrence over data."""

    def step(w, h, t):
        new, gate = jnp.split(rlfx.inputs(w["data"])[t] @ w["x"] + h @ w["h"], 2)
        z = jax.nn.sigmoid(gate)
        return z * h + (1 - z) * jnp.tanh(new), jnp.sum(h)

    w = {"x": normal(width, 2 * width), "h": normal(width, 2 * width), "data": normal(length, batch, width)}
    return step, w, 0.1 * jnp.ones((batch, width)), length, batch


def turned(width, batch, length=128):
    """A linear recurrence of complex numbers, learned through time."""

    def step(w, h, t):
        h = jnp.exp(w["rate"]) * h + rlfx.inputs(w["data"])[t] @ w["in"]
        return jnp.sum(jnp.real(h @ w["out"]) ** 2), h

    both = lambda *shape: jax.lax.complex(normal(*shape), normal(*shape))  # noqa: E731
    w = {
        "rate": both(width) - 0.5,
        "in": both(width, width),
        "out": both(width, width),
        "data": normal(length, batch, width),
    }
    return step, w, jnp.zeros((batch, width), jnp.complex64), length, batch


def planned(width, batch, length=64, steps=5):
    """A model that is rolled out over the next steps from every timestep of data."""

    def step(w, h, t):
        def ahead(z, x):
            z = jnp.tanh(jnp.concatenate([z, x]) @ w["model"])
            return z, jnp.sum(z @ w["reward"])

        data = rlfx.series(rlfx.inputs(w["data"])[t])
        return jnp.sum(jax.lax.scan(ahead, data[t] @ w["in"], data.window(0, steps))[1] ** 2), h

    w = {
        "model": normal(2 * width, width),
        "reward": normal(width, 1),
        "in": normal(width, width),
        "data": normal(length, batch, width),
    }
    return step, w, jnp.zeros((batch,)), length, batch


def acts(width, batch, length=64, observations=4, actions=2):
    """An actor-critic of few units, few actions and one value."""

    def loss(w, x, t):
        hidden = jnp.tanh(jnp.tanh(x @ w["in"]) @ w["h"])
        logits, value = hidden @ w["pi"], (hidden @ w["v"])[0]
        action = jax.random.categorical(t.key, jax.lax.stop_gradient(logits))
        target = rlfx.discounted_sum(rlfx.series(jnp.cos(x[0]))[t:], 0.99)
        advantage = jax.lax.stop_gradient(target - value)
        loss = 0.5 * (value - target) ** 2 - jax.nn.log_softmax(logits)[action] * advantage
        return loss, jax.lax.stop_gradient(0.9 * x + 0.1 * jnp.sin(x + action))

    w = {
        "in": normal(observations, width),
        "h": normal(width, width),
        "pi": normal(width, actions),
        "v": normal(width, 1),
    }
    return loss, w, 0.1 * jnp.ones((batch, observations)), length, batch


def compares(width, batch, length=64):
    """A loss over all pairs of quantiles and targets."""

    def loss(w, x, t):
        seen = rlfx.inputs(w["data"])[t]
        error = jax.lax.stop_gradient(jnp.cos(seen @ w["target"]))[None, :] - (seen @ w["found"])[:, None]
        size = jnp.abs(error)
        huber = jnp.where(size <= 1.0, 0.5 * error**2, size - 0.5)
        return (jnp.where(error < 0, 0.3, 0.7) * huber).mean(1).sum(), x

    w = {"found": normal(16, width), "target": normal(16, width), "data": normal(length, batch, 16)}
    return loss, w, jnp.zeros((batch,)), length, batch


def measures(width, batch, length=64):
    """How alike all pairs of ``width`` codes are, of 16 numbers each."""

    def loss(w, x, t):
        seen = rlfx.inputs(w["data"])[t]
        ours, theirs = (jnp.tanh(seen @ w[name]).reshape(width, 16) for name in ("ours", "theirs"))
        return jnp.sin((ours[:, None] * theirs[None]).sum(-1)).mean(), x

    w = {"ours": normal(16, 16 * width), "theirs": normal(16, 16 * width), "data": normal(length, batch, 16)}
    return loss, w, jnp.zeros((batch,)), length, batch


def decodes(width, batch, length=64):
    """What is told of a state at sixteen points, the same at every timestep."""

    def loss(w, x, t):
        tell = lambda y: jnp.tanh(jnp.tanh(jnp.concatenate([x, y]) @ w["first"]) @ w["last"])  # noqa: E731
        return jnp.sum(jax.vmap(tell)(w["points"]) ** 2), jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * jnp.cos(x))

    w = {"first": normal(width + 8, width), "last": normal(width, 1), "points": normal(16, 8)}
    return loss, w, 0.1 * jnp.ones((batch, width)), length, batch


def remembers_boards(width, batch, length=16, channels=16):
    """A convolutional memory of boards of ``width`` x ``width``, beside what is seen of them."""

    def convolved(x, w):
        return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]

    def loss(w, h, t):
        together = jnp.concatenate([rlfx.inputs(w["data"])[t], h], -1)
        gate, new = jnp.split(convolved(together, w["kernel"]), 2, -1)
        h = h + jax.nn.sigmoid(gate) * (jnp.tanh(new) - h)
        return jnp.sum((h @ w["out"]) ** 2), h

    w = {
        "kernel": normal(3, 3, 4 + channels, 2 * channels),
        "out": normal(channels, 1),
        "data": normal(length, batch, width, width, 4),
    }
    return loss, w, jnp.zeros((batch, width, width, channels)), length, batch


def judges(width, batch, length=128):
    """A policy acts; a target network judges what it has seen, and a critic learns returns of that."""

    def loss(w, x, t):
        value = lambda first, last: jnp.sum(jnp.tanh(jax.lax.stop_gradient(x) @ first) @ last)  # noqa: E731
        following = jax.lax.stop_gradient(rlfx.series(value(w["first"], w["last"]), end=0.0)[t + 1])
        aim = rlfx.lambda_return(Step(jnp.cos(x[0]), jnp.bool_(False), jnp.bool_(False)), following, gamma=0.99, lam=0.9)
        new = jnp.tanh(jnp.tanh(x @ w["act"]) @ w["act"])
        return (value(w["own"], w["last"]) - jax.lax.stop_gradient(aim)) ** 2, jax.lax.stop_gradient(new)

    w = {name: normal(width, width) for name in ("first", "own", "act")} | {"last": normal(width, 1)}
    return loss, w, 0.1 * jnp.ones((batch, width)), length, batch


def traces(width, batch, length=64):
    """Agents that each learn along traces of their own, which are cut where an episode ends."""

    def step(_, carry, t):
        w, z = carry
        x = jnp.cos(jnp.arange(width) * 0.3 + t.now)
        z = 0.9 * z + x[:, None] * jnp.tanh(x @ w)[None]
        w = w - 0.01 * z / (1.0 + jnp.abs(z).sum())
        return (w, jnp.where(w[0, 0] > 0.1, 0.0, z)), w[0, 0]

    return step, None, (normal(batch, width, width), jnp.zeros((batch, width, width))), length, batch


def glances(width, batch, length=64, window=16):
    """Attention to the last timesteps, by four heads."""

    def loss(w, x, t):
        seen = rlfx.inputs(w["data"])[t]
        q, k, v = ((seen @ m).reshape(4, -1) for m in w["to"])
        keys, values = rlfx.series((k, v)).window(1 - window, 1)
        weights = jax.nn.softmax(jnp.einsum("hw,mhw->hm", q, keys))
        return (jnp.einsum("hm,mhw->hw", weights, values) ** 2).sum(), x

    w = {"to": tuple(normal(width, width) * (i + 1) for i in range(3)), "data": normal(length, batch, width)}
    return loss, w, jnp.zeros((batch,)), length, batch


def looks_up(width, batch, length=64):
    """Eight one-hot vectors of ``width`` places, times weights of 64 units."""

    def loss(w, x, t):
        places = rlfx.inputs(w["data"])[t].astype(jnp.int32)
        return (jnp.tanh((jax.nn.one_hot(places, width) @ w["table"]).sum(0)) ** 2).sum(), x

    places = jax.random.randint(KEY, (length, batch, 8), 0, width)
    return loss, {"table": normal(width, 64), "data": places.astype(jnp.float32)}, jnp.zeros((batch,)), length, batch


def moves(width, batch, length=64):
    """A belief over ``width`` states that one of four actions moves."""

    def loss(w, belief, t):
        seen, action = (rlfx.inputs(w[name])[t] for name in ("seen", "action"))
        moved = jax.nn.logsumexp(belief[:, None] + jax.nn.log_softmax(w["moves"][action.astype(jnp.int32)]), 0)
        return -moved[0], jax.nn.log_softmax(moved + seen)

    action = jax.random.randint(KEY, (length, batch), 0, 4).astype(jnp.float32)
    w = {"moves": normal(4, width, width), "seen": normal(length, batch, width), "action": action}
    return loss, w, jnp.zeros((batch, width)), length, batch


def projects(width, batch, length=32):
    """A distribution over ``width`` places that is moved, and added up at the places beside each."""

    def loss(w, x, t):
        seen = rlfx.inputs(w["data"])[t]
        share = jax.nn.softmax(seen @ w["w"])
        at = jnp.clip(0.9 * jnp.arange(float(width)) + seen[0], 0.0, width - 1.0)
        below = jnp.floor(at)
        found = jnp.zeros(width).at[below.astype(jnp.int32)].add(share * (1.0 - at + below))
        return (found**2).sum(), x

    return loss, {"w": normal(16, width), "data": normal(length, batch, 16)}, jnp.zeros((batch,)), length, batch


def draws_frames(width, batch, length=16):
    """Frames of 16 x 16 out of 4 x 4 by two transposed convolutions with steps of two."""

    def loss(w, x, t):
        y = rlfx.inputs(w["data"])[t].reshape(1, 4, 4, width)
        for kernel in w["kernels"]:
            y = jnp.tanh(jax.lax.conv_transpose(y, kernel, (2, 2), "SAME"))
        return (y**2).mean(), x

    w = {"kernels": (normal(3, 3, width, width), normal(3, 3, width, 3)), "data": normal(length, batch, 16 * width)}
    return loss, w, jnp.zeros((batch,)), length, batch


#: Of rewrites with a bound, one that all sizes are within: where it would stop paying is seen as well.
BEYOND = {"shared_rows": 4096, "deferred_rows": 4096, "narrow": 4096, "reals": 1, "unrolled": 4096, "pairs": 1, "contracted": 1,
          "patches": 1 << 40, "leaving_rows": 1 << 20, "postponed": 1, "windows": 1, "entries": 1}  # fmt: skip
#: Rewrite: (the program, its sizes (width, batch), whether a gradient is taken, the value without it).
CASES = {
    "contractions": (layers, [(16, 64), (64, 64), (64, 512), (256, 64)], True, False),
    "channels_last": (images, [(16, 8), (64, 8)], True, False),
    "patches": (remembers_boards, [(4, 4), (8, 1), (8, 4), (8, 32), (16, 4), (16, 16), (32, 4), (64, 1)], True, 0),
    "dense": (draws_frames, [(4, 16), (16, 1), (16, 16), (16, 64), (32, 16)], True, False),
    "rows": (projects, [(8, 32), (32, 4), (32, 32), (64, 64)], True, False),
    "tree_reductions": (attends, [(8, 1), (8, 16), (64, 16)], False, False),
    "shared_rows": (gates, [(32, 4), (64, 4), (64, 64), (128, 64), (256, 4), (256, 64)], False, 0),
    "deferred_rows": (recurrence, [(16, 32), (64, 4), (64, 16), (64, 32), (64, 64), (256, 4), (256, 16), (256, 32)], True, 0),
    "leaving_rows": (judges, [(32, 4), (64, 4), (64, 16), (64, 64), (64, 256), (256, 4), (256, 16), (256, 64)], True, 0),
    "inside": (fed, [(64, 4), (64, 16), (64, 64), (128, 16), (128, 64), (256, 16), (256, 64)], False, False),
    "reals": (turned, [(16, 1), (8, 16), (16, 16), (64, 4), (64, 16), (256, 16)], True, 0),
    "unrolled": (planned, [(16, 4), (16, 64), (64, 16), (64, 64), (256, 16)], True, 0),
    "apart": (decodes, [(8, 4), (8, 64), (32, 4), (32, 64), (128, 16)], True, False),
    "pairs": (compares, [(8, 16), (16, 1), (16, 16), (16, 128), (32, 16), (64, 1), (64, 16), (200, 16)], True, 0),
    "contracted": (measures, [(4, 4), (4, 64), (6, 16), (8, 4), (8, 64), (16, 16), (32, 16)], True, 0),
    "postponed": (traces, [(8, 32), (16, 32), (16, 512), (32, 32), (64, 4), (64, 32), (128, 16)], False, 0),
    "windows": (glances, [(16, 4), (16, 16), (16, 64), (32, 4), (32, 64), (64, 1), (64, 16), (64, 64), (256, 16)], True, 0),
    "rows_taken": (looks_up, [(4, 64), (16, 4), (16, 64), (64, 4), (64, 64), (256, 64)], True, False),
    "entries": (moves, [(4, 1), (4, 16), (16, 4), (16, 64), (32, 16)], True, 0),
    "narrow": (acts, [(8, 64), (16, 64), (16, 512), (16, 4096), (32, 64), (32, 512), (64, 512), (64, 4096)], True, 0),
}


def runner(make, size, gradient, **rewrites):
    f, params, carry, length, batch = make(*size)
    compiler = rlfx.compile if gradient else rlfx.unroll
    target = replace(CPU, rewrites=replace(CPU.rewrites, **rewrites))
    fn = compiler(f, length=length, batch=batch, target=target)
    call = jax.jit(jax.grad(lambda p, c: fn(p, c, KEY)[0]) if gradient else lambda p, c: fn(p, c))
    compiled = call.lower(params, carry).compile()
    return lambda: jax.block_until_ready(compiled(params, carry))


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(runs, rounds):
    """How long the first of two takes beside the second, the median of paired rounds, and the milliseconds of each."""
    for run in runs:
        run()
    pairs = [[timed(run) for run in runs] for _ in range(rounds)]
    return statistics.median(a / b for a, b in pairs), *(1e3 * statistics.median(x) for x in zip(*pairs, strict=True))


def compare(name, rounds):
    make, sizes, gradient, without = CASES[name]
    rows = []
    for size in sizes:
        runs = [runner(make, size, gradient, **{name: value}) for value in (BEYOND.get(name, True), without)]
        ratio, with_ms, without_ms = in_turns(runs, rounds)
        own = getattr(CPU.rewrites, name)
        rows.append(
            {
                "rewrite": name,
                "width": size[0],
                "batch": size[1],
                "ratio": round(ratio, 3),
                "with_ms": round(with_ms, 3),
                "without_ms": round(without_ms, 3),
                "used": bool(own),
            }
        )
        print(f"{name:16} width {size[0]:4} batch {size[1]:4}   {ratio:5.2f}   "
              f"{with_ms:8.2f} ms with, {without_ms:8.2f} ms without")  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = [row for name in arguments.only for row in compare(name, arguments.rounds)]
    if arguments.json:
        path = pathlib.Path(arguments.json)
        before = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = [row for row in before if row["rewrite"] not in arguments.only] + rows  # what was not run stays
        recorded.write(arguments.json, recorded.about("rewrites") | {"rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
