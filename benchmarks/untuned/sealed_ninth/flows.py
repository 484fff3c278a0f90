"""A generative flow network that fills a bag of symbols (GFlowNet; sub-trajectory balance, Madan et al. 2023): a flow and two
policies, forwards and backwards, of one network; every pair of timesteps has to balance, those far apart for less."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

LAMBDA, TEMPER, UNIT = 0.9, 0.8, 0.25


def params_of(key, kinds, hidden):
    return c.mlp_params(key, (kinds, hidden, hidden, 2 * kinds + 1))


def worth(bag):
    """The logarithm of what a full bag ``[..., kinds]`` is worth."""
    share = bag / bag.sum(-1, keepdims=True)
    return 4.0 * jnp.cos(6.0 * share).sum(-1) - 8.0 * (share**2).sum(-1)


def policies(made, bag):
    """Log-probabilities forwards and backwards, ``[..., kinds]``; only what is in the bag can be taken out. And the flow."""
    forwards, backwards, flow = jnp.split(made, (bag.shape[-1], 2 * bag.shape[-1]), -1)
    backwards = jnp.where(bag > 0, backwards, -1e9)
    return jax.nn.log_softmax(forwards), jax.nn.log_softmax(backwards), flow[..., 0]


def program(p, bag, t):
    forwards, backwards, flow = policies(c.mlp(p, UNIT * bag), bag)
    action = jax.random.categorical(t.key_for("action"), TEMPER * stop_gradient(forwards))
    after = bag + jax.nn.one_hot(action, len(bag))
    gained = forwards[action] - rlfx.series(backwards)[t + 1][action]
    total = rlfx.series(gained)[: t + 1].sum()
    starts = rlfx.series(flow - (total - gained))
    ends = jnp.where(t + 1 == t.length, worth(after), rlfx.series(flow)[t + 1]) - total
    ago = t.now - rlfx.series(t.now)[: t + 1]
    return (LAMBDA ** ago.astype(jnp.float32) * (starts[: t + 1] - ends) ** 2).sum(), after


# -- by hand: the sum over all pairs, of ``levels[T + 1, B]``


def all_pairs(levels):
    """``[T + 1, T + 1, B]``."""
    ago = np.arange(len(levels))[None] - np.arange(len(levels))[:, None] - 1
    weights = np.where(ago >= 0, LAMBDA ** np.maximum(ago, 0), 0.0).astype(np.float32)
    return (weights[..., None] * (levels[:, None] - levels[None]) ** 2).sum()


def end_by_end(levels):
    """The pairs of one end after the other."""
    times = jnp.arange(len(levels))

    def of(end):
        ago = end - 1 - times
        weights = jnp.where(ago >= 0, LAMBDA ** jnp.maximum(ago, 0).astype(jnp.float32), 0.0)
        return (weights[:, None] * (levels - levels[end]) ** 2).sum()

    return jax.lax.map(of, times[1:]).sum()


def joined_pairs(length):
    """Weights of both orders, and their sums: the loss is a quadratic form."""
    ago = np.abs(np.arange(length + 1)[None] - np.arange(length + 1)[:, None])
    weights = np.where(ago > 0, LAMBDA ** (ago - 1.0), 0.0).astype(np.float32)
    return weights.sum(0)[:, None], weights


def slopes_of(levels):
    """The sum over pairs and its slopes, by one product: all is relative to an environment's mean, for it cancels."""
    sums, weights = joined_pairs(len(levels) - 1)
    levels = levels - levels.mean(0)
    half = sums * levels - weights @ levels
    return (levels * half).sum(), 2.0 * half


@jax.custom_vjp
def by_product(levels):
    return slopes_of(levels)[0]


by_product.defvjp(slopes_of, lambda slopes, by: (by * slopes,))


def by_recurrences(levels):
    """Sums of what came before, of its squares, and of weights, that decay."""

    def body(carry, level):
        weight, first, second = carry
        found = second - 2.0 * level * first + weight * level**2
        return (LAMBDA * weight + 1.0, LAMBDA * first + level, LAMBDA * second + level**2), found.sum()

    levels = levels - stop_gradient(levels.mean(0))
    zero = jnp.zeros_like(levels[0])
    return jax.lax.scan(body, (zero, zero, zero), levels, unroll=4)[1].sum()


# -- by hand: levels, and losses of what the network makes of ``bag[T + 1, B, kinds]``


def levels_of(made, bag, action):
    forwards, backwards, flow = policies(made, bag)
    gained = c.pick(forwards[:-1], action) - c.pick(backwards[1:], action)
    flow = jnp.concatenate([flow[:-1], worth(bag[-1:])])
    return flow - jnp.concatenate([jnp.zeros_like(gained[:1]), jnp.cumsum(gained, 0)])


def by_ones(made, bag, action):
    """What was drawn is picked by ones and zeros, and log-probabilities are made of that alone; sums over time are a product."""
    kinds, length = bag.shape[-1], len(action)
    forwards, backwards, flow = jnp.split(made, (kinds, 2 * kinds), -1)
    hot = jax.nn.one_hot(action, kinds)
    backwards = jnp.where(bag[1:] > 0, backwards[1:], -1e9)
    normal = jax.nn.logsumexp(forwards[:-1], -1) - jax.nn.logsumexp(backwards, -1)
    gained = (hot * (forwards[:-1] - backwards)).sum(-1) - normal
    before = np.tril(np.ones((length + 1, length), np.float32), -1)
    return jnp.concatenate([flow[:-1, :, 0], worth(bag[-1:])]) - before @ gained


def in_columns(p, x):
    """Rows ``[N, ...]``, innermost in between."""
    return c.columns(p, x.T).T


def acted(p, bag, key, length, batch, net=c.mlp, ahead=False, unroll=1):
    """Bags ``[T + 1, B, kinds]``, actions ``[T, B]``, and what was computed on the way, of the last bag too."""
    (keys,) = c.streams(key, batch, "action")
    kinds = bag.shape[-1]
    draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (kinds,)))(c.at(keys, t))  # noqa: E731
    times = jnp.arange(length)

    def body(bag, given):
        t, noise = given
        kept = net(p, UNIT * bag)
        made = kept[-1] if isinstance(kept, tuple) else kept
        said = TEMPER * (made[:, :kinds] if ahead else jax.nn.log_softmax(made[:, :kinds]))
        action = jnp.argmax(said + (draw(t) if noise is None else noise), -1)
        return bag + jax.nn.one_hot(action, kinds), (bag, action, kept)

    end, (bags, action, kept) = jax.lax.scan(body, bag, (times, jax.vmap(draw)(times) if ahead else None), unroll=unroll)
    return jnp.concatenate([bags, end[None]]), action, kept


def by_hand(length, batch, pairs=all_pairs, levels=levels_of, net=c.mlp, flat=True, again=False, **how):
    scale = 1.0 / (length * batch)

    def run(p, bag, key):
        bags, action, _ = acted(p, bag, key, length, batch, **how)

        def loss(p):
            some = jax.checkpoint(net) if again else net
            x = UNIT * (c.rows_of(bags) if flat else bags)
            return scale * pairs(levels(some(p, x).reshape(length + 1, batch, -1), bags, action))

        return *jax.value_and_grad(loss)(p), bags[-1]

    return run


def through_acting(length, batch, pairs=all_pairs, unroll=1, **how):
    """Acting is differentiated itself, timestep by timestep."""

    def run(p, bag, key):
        def loss(p):
            bags, action, made = acted(p, bag, key, length, batch, unroll=unroll, **how)
            bags = stop_gradient(bags)
            made = jnp.concatenate([made, c.mlp(p, UNIT * bags[-1])[None]])
            return pairs(levels_of(made, bags, action)) / (length * batch), bags[-1]

        (found, end), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, end

    return run


def all_layers(p, x):
    """What every layer makes."""
    first = jnp.tanh(c.linear(p[0], x))
    second = jnp.tanh(c.linear(p[1], first))
    return first, second, c.linear(p[2], second)


def back(p, x, kept, slopes):
    """Gradients of rows, by what was kept of them."""
    first, second = kept
    by_second = (slopes @ p[2]["w"].T) * (1.0 - second * second)
    by_first = (by_second @ p[1]["w"].T) * (1.0 - first * first)
    pairs = (x, by_first), (first, by_second), (second, slopes)
    return [{"w": before.T @ by, "b": by.sum(0)} for before, by in pairs]


def slopes_first(length, batch, levels=by_ones, pairs=by_product, chunk=None, keep=False, turned=False, **how):
    """Acting has made all that the loss is of, whose slopes are known before the network is differentiated. ``keep``: so are its
    layers, and nothing is computed again; ``chunk``: timesteps of a block."""

    def run(p, bag, key):
        bags, action, kept = acted(p, bag, key, length, batch, all_layers if keep else c.mlp, **how)
        last = all_layers(p, UNIT * bags[-1])
        kept = kept if keep else (kept,)
        joined = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), kept, last if keep else last[2:])
        loss = lambda made: pairs(levels(made, bags, action)) / (length * batch)  # noqa: E731
        value, slopes = jax.value_and_grad(loss)(joined[-1])

        def of(p, part):
            x, slopes, kept = part
            if keep:
                return back(p, x, kept, slopes)
            net = in_columns if turned else c.mlp
            return jax.vjp(lambda p: net(p, x), p)[1](slopes)[0]

        part = UNIT * bags, slopes, joined[:2] if keep else None
        if chunk is None:
            return value, of(p, c.rows_of(part)), bags[-1]
        blocks = c.in_chunks(c.rows_of(jax.tree.map(lambda x: x[:-1], part)), chunk * batch)
        add = lambda total, part: (jax.tree.map(jnp.add, total, of(p, part)), None)  # noqa: E731
        start = of(p, jax.tree.map(lambda x: x[-1], part))
        return value, jax.lax.scan(add, start, blocks)[0], bags[-1]

    return run


def workload(length, batch, kinds, hidden, chunk=8):
    make = lambda *a, **how: by_hand(length, batch, *a, **how)  # noqa: E731
    first = lambda **how: slopes_first(length, batch, **how)  # noqa: E731
    through = lambda *a, **how: through_acting(length, batch, *a, **how)  # noqa: E731
    some, ahead, keep = {"chunk": chunk}, {"ahead": True}, {"keep": True}
    forms = {
        "rlfx": c.by_rlfx(program, length, batch), "plain": make(flat=False), "rows": make(), "end by end": make(end_by_end),
        "pairs by a product": make(by_product), "pairs by recurrences": make(by_recurrences),
        "by ones": make(by_product, by_ones),
        "features first": make(by_product, by_ones, in_columns), "again": make(by_product, by_ones, again=True),
        "drawn ahead": make(by_product, by_ones, **ahead), "through acting": through(by_product),
        "through acting, drawn ahead, unrolled by 2": through(by_product, unroll=2, **ahead),
        "slopes first": first(), f"slopes first, blocks of {chunk}": first(**some),
        f"slopes first, features first, blocks of {chunk}": first(turned=True, **some),
        "kept": first(**keep), "kept, drawn ahead": first(**keep, **ahead), f"kept, blocks of {chunk}": first(**keep, **some),
        "slopes first, threefry unrolled": first(), "by ones, drawn ahead, threefry unrolled": make(by_product, by_ones, **ahead),
        f"slopes first, blocks of {chunk}, drawn ahead, threefry unrolled": first(**some, **ahead),
        "kept, threefry unrolled": first(**keep), "kept, drawn ahead, threefry unrolled": first(**keep, **ahead),
        f"kept, blocks of {chunk}, drawn ahead, threefry unrolled": first(**keep, **some, **ahead),
        f"kept, blocks of {chunk // 2}, drawn ahead, threefry unrolled": first(chunk=chunk // 2, **keep, **ahead),
        f"kept, blocks of {2 * chunk}, drawn ahead, threefry unrolled": first(chunk=2 * chunk, **keep, **ahead),
        "kept, drawn ahead, unrolled by 2, threefry unrolled": first(**keep, **ahead, unroll=2),
        "kept, recurrences, drawn ahead, threefry unrolled": first(pairs=by_recurrences, **keep, **ahead),
    }  # fmt: skip
    bag = jnp.zeros((batch, kinds)).at[jnp.arange(batch), jnp.arange(batch) % kinds].set(1.0)
    return drawing(forms, (params_of(jax.random.key(0), kinds, hidden), bag), tolerance=2e-5)
