"""`entities` by hand: layouts of its networks, and its learner."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

from . import entities as e

N = e.ENTITIES


def joined(p):
    """The weights of queries, keys and values as one."""
    return jnp.concatenate([p[name] for name in "qkv"], -1)


# -- attention of rows ``h[R, N, H]``


def in_one_product(p, h, alive):
    """Queries, keys and values by one product of a matrix."""
    rows, _, hidden = h.shape
    made = (h.reshape(-1, hidden) @ joined(p)).reshape(rows, N, 3, e.HEADS, -1)
    q, k, v = (jnp.swapaxes(made[:, :, i], 1, 2) for i in range(3))
    scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
    mixed = jax.nn.softmax(jnp.where(alive[:, None, None], scores, e.NEVER)) @ v
    return c.linear(p["out"], jnp.swapaxes(mixed, 1, 2).reshape(-1, hidden)).reshape(h.shape)


def heads_apart(p, h, alive):
    """Every head by products of its own, so that nothing is transposed."""
    rows, _, hidden = h.shape
    flat, size = h.reshape(-1, hidden), hidden // e.HEADS
    total = p["out"]["b"]
    for i in range(e.HEADS):
        own = slice(i * size, (i + 1) * size)
        made = flat @ jnp.concatenate([p[name][:, own] for name in "qkv"], -1)
        q, k, v = (x.reshape(rows, N, size) for x in jnp.split(made, 3, -1))
        scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(size))
        mixed = jax.nn.softmax(jnp.where(alive[:, None], scores, e.NEVER)) @ v
        total += mixed.reshape(-1, size) @ p["out"]["w"][own]
    return total.reshape(h.shape)


def several_at_once(graphs):
    """Products of some graphs as one, though entities look at no other graph's."""
    of = np.arange(graphs * N) // N

    def attend(p, h, alive):
        hidden = h.shape[-1]
        made = (h.reshape(-1, hidden) @ joined(p)).reshape(-1, graphs * N, 3, e.HEADS, hidden // e.HEADS)
        q, k, v = (jnp.swapaxes(made[:, :, i], 1, 2) for i in range(3))
        scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
        there = alive.reshape(-1, 1, 1, graphs * N) & (of[:, None] == of)
        mixed = jax.nn.softmax(jnp.where(there, scores, e.NEVER)) @ v
        return c.linear(p["out"], jnp.swapaxes(mixed, 1, 2).reshape(-1, hidden)).reshape(h.shape)

    return attend


def folded(p, x):
    """`e.net` of rows ``x[R, N, FEATURES]``: scales of norms are folded into what follows, shares divided after their product."""
    alive, rows = x[..., 4] > 0.0, len(x)
    h = c.linear(p["in"], x.reshape(-1, e.FEATURES))
    hidden, of = h.shape[-1], np.arange(2 * N) // N
    there = alive.reshape(-1, 1, 2 * N) & (of[:, None] == of)
    whitened = lambda x: e.normed({"scale": 1.0, "bias": 0.0}, x)  # noqa: E731
    for b in p["blocks"]:
        seen, w, total = whitened(h), joined(b), b["out"]["b"]
        made = seen @ (b["norm"]["scale"][:, None] * w) + b["norm"]["bias"] @ w
        parts = [jnp.split(x, e.HEADS, -1) for x in jnp.split(made.reshape(-1, 2 * N, 3 * hidden), 3, -1)]
        for q, k, v, out in zip(*parts, jnp.split(b["out"]["w"], e.HEADS), strict=True):
            scores = jnp.where(there, q @ jnp.swapaxes(k, 1, 2) / np.float32(np.sqrt(q.shape[-1])), e.NEVER)
            shares = jnp.exp(scores - stop_gradient(scores.max(-1, keepdims=True)))
            total += (shares @ v / shares.sum(-1, keepdims=True)).reshape(-1, len(out)) @ out
        h += total
        w = b["first"]["w"]
        wide = whitened(h) @ (b["norm2"]["scale"][:, None] * w) + b["norm2"]["bias"] @ w + b["first"]["b"]
        h += c.linear(b["second"], jax.nn.relu(wide))
    each, living = h.reshape(rows, N, hidden), alive.astype(jnp.float32)[..., None]
    mean = (living * each).sum(-2) / living.sum(-2)
    z = jax.nn.relu(c.linear(p["pool"], jnp.concatenate([each[:, 0], mean], -1)))
    pointer = (h @ p["key"]).reshape(each.shape), c.linear(p["query"], z), alive
    return c.linear(p["kind"], z), c.linear(p["value"], z)[..., 0], pointer


# -- graphs innermost: ``h[H, N * R]``


def columns(p, x):
    return p["w"].T @ x + p["b"][:, None]


def pairs_at_once(q, k, v, alive):
    """``[HEADS, D, N, R]``."""
    scores = (q[:, :, :, None] * k[:, :, None]).sum(1) / np.float32(np.sqrt(q.shape[1]))
    weights = jax.nn.softmax(jnp.where(alive[None, None], scores, e.NEVER), 2)
    return (weights[:, None] * v[:, :, None]).sum(3)


def innermost(p, x):
    """For ``x[R, N, FEATURES]``."""
    rows = len(x)
    alive = x[..., 4].T > 0.0
    h = columns(p["in"], jnp.transpose(x, (2, 1, 0)).reshape(e.FEATURES, -1))
    hidden = len(h)
    for b in p["blocks"]:
        made = (joined(b).T @ e.normed(b["norm"], h, 0)).reshape(3, e.HEADS, -1, N, rows)
        h += columns(b["out"], pairs_at_once(*made, alive).reshape(hidden, -1))
        h += columns(b["second"], jax.nn.relu(columns(b["first"], e.normed(b["norm2"], h, 0))))
    each, living = h.reshape(hidden, N, rows), alive.astype(jnp.float32)
    mean = (living * each).sum(1) / living.sum(0)
    z = jax.nn.relu(columns(p["pool"], jnp.concatenate([each[:, 0], mean])))
    pointer = (p["key"].T @ h).reshape(hidden, N, rows), columns(p["query"], z), alive
    return columns(p["kind"], z).T, columns(p["value"], z)[0], pointer


def pointed_innermost(p, pointer, kind):
    keys, query, alive = pointer
    scores = (keys * (query + p["embedded"].T[:, kind])[:, None]).sum(0) / np.float32(np.sqrt(len(query)))
    return jnp.where(alive & (jnp.arange(N) > 0)[:, None], scores, e.NEVER).T


def mapped(p, x):
    return jax.vmap(lambda x: e.net(p, x))(x)


PLAIN, BATCHED, FOLDED, INNERMOST = (
    (mapped, e.pointed),
    (e.net, e.pointed),
    (folded, e.pointed),
    (innermost, pointed_innermost),
)
ROWS, APART, TWO = (
    (functools.partial(e.net, attend=attend), e.pointed) for attend in (in_one_product, heads_apart, several_at_once(2))
)


# -- the learner


def point_loss(kinds, v, log_prob, old, normalised, aim):
    ratio = jnp.exp(log_prob - old)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised)
    return c.actor_critic_loss(kinds, v, 0.0, 0.0, aim) - gain


def by_hand(length, batch, acting=PLAIN, onepass=False, chunk=None, ahead=False, again=False):
    """``onepass``: the acting loop itself is differentiated, ``again``: and computes each timestep again; ``chunk``: timesteps of
    a block of the learner; ``ahead``: random numbers of actions are drawn before the loop."""
    net, pointed = acting

    def run(p, state, key):
        kind_keys, target_keys, env_keys = c.streams(key, batch, "kind", "target", "env")
        gumbels = lambda keys, n: jax.vmap(lambda k: jax.random.gumbel(k, (n,)))(keys)  # noqa: E731
        draws = lambda t: (gumbels(c.at(kind_keys, t), e.KINDS), gumbels(c.at(target_keys, t), N))  # noqa: E731
        times = jnp.arange(length)
        xs = times, jax.vmap(draws)(times) if ahead else None

        def acted(p):
            def body(state, given):
                t, drawn = given
                for_kind, for_target = draws(t) if drawn is None else drawn
                kinds, v, pointer = net(p, state["x"])
                kind = jnp.argmax(stop_gradient(kinds) + for_kind, -1)
                targets = pointed(p, pointer, kind)
                target = jnp.argmax(stop_gradient(targets) + for_target, -1)
                log_prob = c.pick(jax.nn.log_softmax(kinds), kind) + c.pick(jax.nn.log_softmax(targets), target)
                after, step = jax.vmap(e.step_of)(c.at(env_keys, t), state, kind, target)
                kept = kinds if onepass else state["x"]
                return after, (kept, v, log_prob, kind, target, step.reward, step.terminated)

            body = jax.checkpoint(body, prevent_cse=False) if again else body
            return jax.lax.scan(body, state, xs)

        def advantages(p, after, v, reward, done):
            gained = c.gae(v, net(p, after["x"])[1], reward, done, e.GAMMA, e.LAMBDA)
            return (gained - gained.mean()) / (gained.std() + 1e-8), gained + v

        if onepass:

            def whole(p):
                after, (kinds, v, log_prob, _, _, reward, done) = acted(p)
                given = stop_gradient(advantages(stop_gradient(p), after, stop_gradient(v), reward, done))
                return point_loss(kinds, v, log_prob, stop_gradient(log_prob), *given).mean(), after

            (found, after), grads = jax.value_and_grad(whole, has_aux=True)(p)
            return found, grads, after

        after, (x, v, old, kind, target, reward, done) = acted(p)

        def loss(p, data):
            x, kind, target, *given = data
            kinds, v, pointer = net(p, x)
            targets = pointed(p, pointer, kind)
            log_prob = c.pick(jax.nn.log_softmax(kinds), kind) + c.pick(jax.nn.log_softmax(targets), target)
            return point_loss(kinds, v, log_prob, *given).sum() / (length * batch)

        data = c.rows_of((x, kind, target, old, *advantages(p, after, v, reward, done)))
        if chunk is None:
            return *jax.value_and_grad(loss)(p, data), after
        return *c.summed_gradient(loss, p, c.in_chunks(data, chunk * batch)), after

    return run


def workload(length, batch, hidden, layers, chunk=4):
    make = lambda acting=PLAIN, **how: by_hand(length, batch, acting, **how)  # noqa: E731
    forms = {
        "rlfx": c.by_rlfx(e.program, length, batch), "plain": make(), "batched": make(BATCHED), "joined": make(ROWS),
        "joined, one pass": make(ROWS, onepass=True), f"joined, blocks of {chunk}": make(ROWS, chunk=chunk),
        f"joined, blocks of {chunk}, drawn ahead": make(ROWS, chunk=chunk, ahead=True),
        f"joined, blocks of {chunk}, drawn ahead, threefry unrolled": make(ROWS, chunk=chunk, ahead=True),
        f"heads apart, blocks of {chunk}": make(APART, chunk=chunk),
        f"heads apart, blocks of {chunk}, threefry unrolled": make(APART, chunk=chunk),
        f"two at once, blocks of {chunk}, threefry unrolled": make(TWO, chunk=chunk),
        "folded, blocks of 1, threefry unrolled": make(FOLDED, chunk=1),
        f"folded, blocks of {chunk}": make(FOLDED, chunk=chunk),
        f"folded, blocks of {chunk}, threefry unrolled": make(FOLDED, chunk=chunk),
        f"folded, blocks of {chunk}, drawn ahead, threefry unrolled": make(FOLDED, chunk=chunk, ahead=True),
        f"folded, blocks of {2 * chunk}, threefry unrolled": make(FOLDED, chunk=2 * chunk),
        "folded, one pass, threefry unrolled": make(FOLDED, onepass=True),
        "folded, one pass, again, threefry unrolled": make(FOLDED, onepass=True, again=True),
        f"graphs innermost, blocks of {chunk}": make(INNERMOST, chunk=chunk),
    }  # fmt: skip
    given = e.params_of(hidden, layers), c.batch_of(e.reset, batch)
    unrolled = *given, jax.random.key(2, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, tolerance=2e-5)
