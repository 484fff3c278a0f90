"""Active pre-training by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fifteenth import entropies
from benchmarks.untuned.sealed_fifteenth.entropies import (
    ACTIONS,
    GAMMA,
    LAMBDA,
    NEAREST,
    OBS,
    normal,
    params_of,
    relu,
)  # fmt: skip

# -- squares of distances ``[T, B, B]`` of codes ``z[T, B, code]``


def by_differences(z):
    return ((z[:, :, None] - z[:, None]) ** 2).sum(-1)


def code_by_code(z):
    """Nothing is summed over neighbours in memory."""
    parts = [(z[:, :, None, i] - z[:, None, :, i]) ** 2 for i in range(z.shape[-1])]
    return functools.reduce(jnp.add, parts)


def by_products(z):
    """Of codes about their mean, so that little is lost; a code is not away from itself."""
    z = z - z.mean(1, keepdims=True)
    size = (z**2).sum(-1)
    away = size[:, :, None] + size[:, None] - 2.0 * (z @ z.mT)
    return jnp.maximum(away, 0.0) * (1.0 - jnp.eye(z.shape[1]))


# -- means of the roots of the least of ``[T, B, B]``


def by_top(away):
    return jnp.sqrt(-jax.lax.top_k(-away, min(NEAREST, away.shape[-1]))[0]).mean(-1)


def by_sorting(away):
    count = min(NEAREST, away.shape[-1])
    return jnp.sqrt(jax.lax.sort(away, is_stable=False)[..., :count]).mean(-1)


def taken_out(away, unroll=True):
    """The least are taken out one after the other, those that are equal at once; all rows side by side."""
    count = min(NEAREST, away.shape[-1])
    left, total = jnp.full(away.shape[:2], float(count)), jnp.zeros(away.shape[:2])

    def take(carry, _=None):
        away, left, total = carry
        least = away.min(1)
        equal = away == least[:, None]
        some = jnp.minimum(equal.sum(1).astype(jnp.float32), left)
        return (
            jnp.where(equal, jnp.inf, away),
            left - some,
            total + jnp.where(some > 0, some * jnp.sqrt(least), 0.0),
        ), None

    carry = away, left, total  # symmetric: which axis is searched is all one
    if unroll:
        for _ in range(count):
            carry, _ = take(carry)
        return carry[2] / count
    return jax.lax.scan(take, carry, None, length=count)[0][2] / count


def by_network(away):
    """The least by a sorting network: blocks are sorted, and of two the lesser half is merged; rows side by side."""
    size = away.shape[1]
    if size & (size - 1) or size < 16:
        return by_sorting(away)
    rows = [away[:, i] for i in range(size)]
    swap = lambda a, b: (jnp.minimum(a, b), jnp.maximum(a, b))  # noqa: E731

    def merged(xs):
        """A bitonic sequence, sorted."""
        step, xs = len(xs) // 2, list(xs)
        while step:
            for i in range(len(xs)):
                if not i & step:
                    xs[i], xs[i + step] = swap(xs[i], xs[i + step])
            step //= 2
        return xs

    def sort(xs):
        if len(xs) == 1:
            return xs
        half = len(xs) // 2
        return merged(sort(xs[:half]) + sort(xs[half:])[::-1])

    blocks = [sort(rows[i : i + 16]) for i in range(0, size, 16)]
    while len(blocks) > 1:
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        lesser = [[jnp.minimum(a, b) for a, b in zip(x, y[::-1], strict=True)] for x, y in pairs]
        blocks = [merged(x) for x in lesser] if len(lesser) > 1 else lesser
    # of the last 16 the sum is wanted without the largest 4
    return functools.reduce(jnp.add, [jnp.sqrt(x) for x in merged(blocks[0])[:NEAREST]]) / NEAREST


def rewards(z, squares, nearest, chunk=None):
    found = lambda z: nearest(squares(z))  # noqa: E731
    if chunk is not None:
        made = jax.lax.map(found, c.in_chunks(z, chunk)).reshape(z.shape[:2])
    else:
        made = found(z)
    return normal(jnp.log(1.0 + made))


# -- networks of rows: codes ``[(T + 1) B, code]``, values, logits, and what is learnt of codes ``[N]``


def apart(p, obs, layers):
    return layers(p["encoder"], obs), layers(p["v"], obs)[:, 0], layers(p["pi"], obs)


def first_joined(p, obs, layers):
    """The first layers are one product."""
    nets = [p[name] for name in ("encoder", "v", "pi")]
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(net[0] for net in nets))
    hidden = jnp.split(relu(c.linear(first, obs)), len(nets), -1)
    z, v, logits = (layers(net[1:], x) for net, x in zip(nets, hidden, strict=True))
    return z, v[:, 0], logits


def as_rows(layers, x):
    return c.mlp(layers, x, relu)


def as_columns(layers, x):
    """Features first."""
    return c.columns(layers, x.T, relu).T


def codes_apart(p, z, after, action, layers):
    log_p = jax.nn.log_softmax(layers(p["inverse"], jnp.concatenate([z, after], -1)))
    foreseen = layers(p["ahead"], jnp.concatenate([z, jax.nn.one_hot(action, ACTIONS)], -1))
    return 0.5 * ((foreseen - after) ** 2).mean(-1) - c.pick(log_p, action)


def codes_joined(p, z, after, action, layers):
    """What both networks make of a code is one product; an action adds a row of weights, as a product with ones."""
    (first, *inverse), (foresees, *ahead), size = p["inverse"], p["ahead"], z.shape[1]
    both = z @ jnp.concatenate([first["w"][:size], foresees["w"][:size]], -1)
    done, hidden = jax.nn.one_hot(action, ACTIONS), first["w"].shape[1]
    log_p = jax.nn.log_softmax(layers(inverse, relu(both[:, :hidden] + after @ first["w"][size:] + first["b"])))
    foreseen = layers(ahead, relu(both[:, hidden:] + done @ foresees["w"][size:] + foresees["b"]))
    return 0.5 * ((foreseen - after) ** 2).mean(-1) - (done * log_p).sum(-1)


# -- what is learnt


def by_hand(
    length,
    batch,
    squares=by_differences,
    nearest=by_top,
    nets=apart,
    codes=codes_apart,
    layers=as_rows,
    blocks=None,
    chunk=None,
):
    """``blocks``: timesteps whose distances are looked at together. ``chunk``: timesteps that are learnt from together; then
    codes and values are made once for rewards and targets, and once more to learn."""
    scale, rows = 1.0 / (length * batch), length * batch

    def targets(z, value, data):
        reward = rewards(z.reshape(length + 1, batch, -1)[:-1], squares, nearest, blocks)
        value = value.reshape(length + 1, batch)
        return c.gae(value[:-1], value[-1], reward, data["done"], GAMMA, LAMBDA).reshape(-1)

    def learnt(p, made, data, advantage, fixed):
        z, value, logits = made
        size = len(advantage)
        found = codes(p, z[:size], z[batch:], data["action"], layers)
        log_prob = (jax.nn.one_hot(data["action"], ACTIONS) * jax.nn.log_softmax(logits[:size])).sum(-1)
        target = advantage + fixed
        acted = c.actor_critic_loss(logits[:size], value[:size], log_prob, advantage, target)
        return scale * (jnp.where(data["done"], 0.0, found) + acted).sum()

    def run(p, last, data):
        obs = jnp.concatenate([data["obs"], last[None]])

        def loss(p):
            z, value, logits = nets(p, obs.reshape(-1, OBS), layers)
            fixed = stop_gradient(value)
            advantage = stop_gradient(targets(stop_gradient(z), fixed, data))
            return learnt(p, (z, value, logits), c.rows_of(data), advantage, fixed[:rows])

        if chunk is None:
            return jax.value_and_grad(loss)(p)
        z, value, _ = nets(p, obs.reshape(-1, OBS), layers)
        advantage = targets(z, value, data)
        seen = jnp.stack([obs[i : i + chunk + 1] for i in range(0, length, chunk)])
        rest = c.in_chunks((c.rows_of(data), advantage, value[:rows]), chunk * batch)

        def of_block(p, x):
            obs, (data, advantage, fixed) = x
            return learnt(p, nets(p, obs.reshape(-1, OBS), layers), data, advantage, fixed)

        return c.summed_gradient(of_block, p, (seen, rest))

    return run


def workload(length, batch, code, hidden, chunk=8):
    make = functools.partial(by_hand, length, batch)
    products, each, columns = {"squares": by_products}, {"squares": code_by_code}, {"layers": as_columns}
    out, net, loop = ({"nearest": x} for x in (taken_out, by_network, functools.partial(taken_out, unroll=False)))
    joined = {"nets": first_joined, "codes": codes_joined}
    fast = {**products, **net}
    forms = {
        "rlfx": c.learner_by_rlfx(entropies.program, length, batch), "plain": entropies.plain(length, batch),
        "once": make(), "products": make(**products), "products, taken out": make(**products, **out),
        "products, taken out in a loop": make(**products, **loop), "products, network": make(**fast),
        "code by code, network": make(**each, **net), "products, network, features first": make(**fast, **columns),
        "products, network, joined": make(**fast, **joined),
        f"products, taken out, by {chunk}, joined": make(**products, **out, blocks=chunk, **joined),
        f"products, network, by {chunk}": make(**fast, blocks=chunk),
        f"products, network, by {chunk}, joined": make(**fast, blocks=chunk, **joined),
        f"products, network, blocks of {chunk}": make(**fast, chunk=chunk),
        f"products, network, joined, blocks of {chunk}": make(**fast, **joined, chunk=chunk),
        f"products, network, by {chunk}, joined, blocks of {chunk}": make(**fast, **joined, blocks=chunk, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 5)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "done": jax.random.uniform(k[2], size) < 0.03,
    }  # fmt: skip
    return Workload(forms, (params_of(k[3], code, hidden), jax.random.normal(k[4], (batch, OBS)), data), tolerance=1e-4)
