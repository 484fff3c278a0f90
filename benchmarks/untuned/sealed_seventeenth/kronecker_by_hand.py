"""ACKTR's gradients and factors by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_seventeenth import kronecker as given
from benchmarks.untuned.sealed_seventeenth.kronecker import (
    ACTIONS,
    GAMMA,
    LAMBDA,
    LAYERS,
    OBS,
    drawn_by,
    params_of,
    with_one,
)

# -- slopes of likelihoods and of losses at heads ``[N, ACTIONS + 1]``: logits first, then values


def heads_joined(p):
    return jnp.concatenate([p["pi"], p["v"]], -1)


def of_likelihood(made, gumbels, noise):
    """Of the action drawn less what was expected; and of the value that was seen, just the noise."""
    logits = made[:, :ACTIONS]
    drawn = jnp.argmax(logits + gumbels, -1)[:, None] == jnp.arange(ACTIONS)
    return jnp.concatenate([drawn - jax.nn.softmax(logits), noise[:, None]], -1)


def advantages(value, data):
    return c.gae(value, jnp.zeros_like(value[0]), data["reward"], data["done"], GAMMA, LAMBDA)


def losses(made, action, advantage, target):
    """Summed, of heads ``[N, ACTIONS + 1]``."""
    log_p = jax.nn.log_softmax(made[:, :ACTIONS])
    return c.actor_critic_loss(log_p, made[:, ACTIONS], c.pick(log_p, action), advantage, target).sum()


def losses_and_slopes(made, action, advantage):
    """The same where targets are values and advantages, and derivatives by hand."""
    log_p = jax.nn.log_softmax(made[:, :ACTIONS])
    prob, done = jnp.exp(log_p), action[:, None] == jnp.arange(ACTIONS)
    entropy = -(prob * log_p).sum(-1, keepdims=True)
    by_logits = advantage[:, None] * (prob - done) + 0.01 * prob * (log_p + entropy)
    value = 0.5 * (advantage**2).sum() - (c.pick(log_p, action) * advantage).sum() - 0.01 * entropy.sum()
    return value, jnp.concatenate([by_logits, -advantage[:, None]], -1)


# -- of rows ``obs[N, OBS]``


def forwards(p, obs):
    h = jnp.tanh(with_one(obs) @ p["one"])
    g = jnp.tanh(with_one(h) @ p["two"])
    return h, g, with_one(g) @ heads_joined(p)


def backwards(p, h, g, by):
    """Slopes at both hidden layers."""
    by_g = (by @ heads_joined(p)[:-1].T) * (1.0 - g**2)
    return (by_g @ p["two"][:-1].T) * (1.0 - h**2), by_g


def square(x):
    return x.T @ x


def square_with_one(x):
    """Of ``with_one(x)``, which is not made."""
    total = x.sum(0)
    return jnp.block([[x.T @ x, total[:, None]], [total[None], jnp.full((1, 1), float(len(x)))]])


def factors_of(inputs, slopes):
    """``inputs``: of three layers, and ``slopes``: of three, of which the last is of both heads."""
    by_pi, by_v = slopes[2][:ACTIONS, :ACTIONS], slopes[2][ACTIONS:, ACTIONS:]
    return {
        name: {"inputs": a, "slopes": g}
        for name, a, g in zip(LAYERS, (*inputs, inputs[2]), (*slopes[:2], by_pi, by_v), strict=True)
    }


def split_heads(one, two, heads):
    return {"one": one, "two": two, "pi": heads[:, :ACTIONS], "v": heads[:, ACTIONS:]}


def by_gradient(p, obs, data, gumbels, noise, squared=square_with_one):
    """The loss's gradient by `jax.grad`; slopes by hand."""
    size = data["reward"].shape

    def loss(p):
        h, g, made = forwards(p, obs)
        value = stop_gradient(made[:, ACTIONS])
        advantage = advantages(value.reshape(size), data).reshape(-1)
        return losses(made, data["action"].reshape(-1), advantage, value + advantage), (h, g, made)

    (value, (h, g, made)), grads = jax.value_and_grad(loss, has_aux=True)(p)
    by = of_likelihood(made, gumbels, noise)
    slopes = [*backwards(p, h, g, by), by]
    inputs = [squared(x) for x in (obs, h, g)]
    return value, grads, factors_of(inputs, [square(x) for x in slopes])


def by_pull(p, obs, data, gumbels, noise, squared=square_with_one):
    """One function's way back, for the loss and for the likelihood of every row; weights' gradients are products of slopes."""
    size = data["reward"].shape
    x = with_one(obs)

    def network(one, two, heads):
        h = jnp.tanh(x @ p["one"] + one)
        g = jnp.tanh(with_one(h) @ p["two"] + two)
        return with_one(g) @ heads_joined(p) + heads, (h, g)

    none = [jnp.zeros((len(obs), w.shape[1])) for w in (p["one"], p["two"], heads_joined(p))]
    made, pull, (h, g) = jax.vjp(network, *none, has_aux=True)
    advantage = advantages(made[:, ACTIONS].reshape(size), data).reshape(-1)
    value, by_loss = losses_and_slopes(made, data["action"].reshape(-1), advantage)
    by = pull(of_likelihood(made, gumbels, noise))
    grads = split_heads(*(with_one(a).T @ g for a, g in zip((obs, h, g), pull(by_loss), strict=True)))
    return value, grads, factors_of([squared(a) for a in (obs, h, g)], [square(g) for g in by])


def written_out(p, obs, data, gumbels, noise, stacked=False):
    """All by hand; ``stacked``: the rows of both ways back are one product."""
    h, g, made = forwards(p, obs)
    advantage = advantages(made[:, ACTIONS].reshape(data["reward"].shape), data).reshape(-1)
    value, by_loss = losses_and_slopes(made, data["action"].reshape(-1), advantage)
    by = of_likelihood(made, gumbels, noise)
    if stacked:
        both = jnp.stack([by, by_loss])
        by_h, by_g = backwards(p, h, g, both)
        (s_h, d_h), (s_g, d_g) = by_h, by_g
    else:
        (s_h, s_g), (d_h, d_g) = backwards(p, h, g, by), backwards(p, h, g, by_loss)
    weights = lambda a, d: jnp.concatenate([a.T @ d, d.sum(0, keepdims=True)])  # noqa: E731
    grads = split_heads(weights(obs, d_h), weights(h, d_g), weights(g, by_loss))
    inputs = [square_with_one(x) for x in (obs, h, g)]
    return value, grads, factors_of(inputs, [square(x) for x in (s_h, s_g, by)])


def products_joined(p, obs, data, gumbels, noise):
    """Of every layer's inputs one product, with themselves and with slopes of the loss."""
    h, g, made = forwards(p, obs)
    advantage = advantages(made[:, ACTIONS].reshape(data["reward"].shape), data).reshape(-1)
    value, by_loss = losses_and_slopes(made, data["action"].reshape(-1), advantage)
    by = of_likelihood(made, gumbels, noise)
    (s_h, s_g), (d_h, d_g) = backwards(p, h, g, by), backwards(p, h, g, by_loss)
    inputs, grads = [], []
    for a, d in ((obs, d_h), (h, d_g), (g, by_loss)):
        a = with_one(a)
        made = a.T @ jnp.concatenate([a, d], -1)
        inputs.append(made[:, : a.shape[1]])
        grads.append(made[:, a.shape[1] :])
    return value, split_heads(*grads), factors_of(inputs, [square(x) for x in (s_h, s_g, by)])


def columns(p, obs, data, gumbels, noise):
    """Features first, ``[features, N]``."""
    one, two, heads = p["one"], p["two"], heads_joined(p)
    layer = lambda w, x: w[:-1].T @ x + w[-1][:, None]  # noqa: E731
    x = obs.T
    h = jnp.tanh(layer(one, x))
    g = jnp.tanh(layer(two, h))
    made = layer(heads, g).T
    advantage = advantages(made[:, ACTIONS].reshape(data["reward"].shape), data).reshape(-1)
    value, by_loss = losses_and_slopes(made, data["action"].reshape(-1), advantage)
    by, by_loss = of_likelihood(made, gumbels, noise).T, by_loss.T

    def back(by):
        by_g = (heads[:-1] @ by) * (1.0 - g**2)
        return (two[:-1] @ by_g) * (1.0 - h**2), by_g, by

    def inputs(x):
        total = x.sum(1)
        return jnp.block([[x @ x.T, total[:, None]], [total[None], jnp.full((1, 1), float(x.shape[1]))]])

    weights = lambda a, d: jnp.concatenate([a @ d.T, d.sum(1)[None]])  # noqa: E731
    grads = split_heads(*(weights(a, d) for a, d in zip((x, h, g), back(by_loss), strict=True)))
    return value, grads, factors_of([inputs(a) for a in (x, h, g)], [s @ s.T for s in back(by)])


# -- what is learnt


def by_hand(length, batch, learn, chunk=None):
    """``chunk``: environments after the others, whose random numbers are drawn there."""

    def some(p, data, keys):
        gumbels, noise = jax.vmap(lambda t: drawn_by(keys, t))(jnp.arange(length))
        return learn(p, data["obs"].reshape(-1, OBS), data, gumbels.reshape(-1, ACTIONS), noise.reshape(-1))

    def run(p, data, key):
        keys = c.streams(key, batch, "action", "value")
        if chunk is None:
            total = some(p, data, keys)
        else:
            parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
            keys = jax.tree.map(lambda k: k.reshape(-1, chunk), keys)
            first = jax.tree.map(lambda x: x[0], (parts, keys))
            none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(some, p, *first))
            add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, *x)), None)  # noqa: E731
            total = jax.lax.scan(add, none, (parts, keys))[0]
        return jax.tree.map(lambda x: x / (length * batch), total)

    return run


def workload(length, batch, hidden, chunk=8):
    make, of = functools.partial(by_hand, length, batch), functools.partial
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "slopes by hand": make(of(by_gradient, squared=lambda x: square(with_one(x)))),
        "slopes by hand, sums apart": make(by_gradient), "one way back, called twice": make(by_pull),
        "written out": make(written_out), "written out, stacked": make(of(written_out, stacked=True)),
        "written out, products joined": make(products_joined), "written out, features first": make(columns),
        f"written out, {chunk} environments": make(written_out, chunk=chunk),
        f"written out, features first, {chunk} environments": make(columns, chunk=chunk),
        "written out, threefry unrolled": make(written_out),
        "written out, features first, threefry unrolled": make(columns),
        f"written out, {chunk} environments, threefry unrolled": make(written_out, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    return drawing(forms, (params_of(k[5], hidden), c.episodes(k, (length, batch), OBS, ACTIONS)), tolerance=2e-5)
