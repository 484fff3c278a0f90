"""Phasic policy gradient by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_eighteenth import phases as given
from benchmarks.untuned.sealed_eighteenth.phases import (
    ACTIONS,
    AUXILIARY,
    CLIP,
    CLONED,
    GAMMA,
    ITERATIONS,
    LAMBDA,
    MINIBATCHES,
    Rollout,
    optimizer,
    params_of,
    shuffled,
)  # fmt: skip

# -- networks of rows: logits, the auxiliary value, and the value


def layers_of(p, name):
    """Of flax's parameters, as pairs of weights and biases."""
    layers = p[name]["params"]
    return [(layers[n]["kernel"], layers[n]["bias"]) for n in sorted(layers)]


def through(layer, x):
    return x @ layer[0] + layer[1]


def side_by_side(*layers):
    return tuple(jnp.concatenate(x, -1) for x in zip(*layers, strict=True))


def apart(p, obs):
    """The actor's two last layers as one."""
    a0, a1, logits, auxiliary = layers_of(p, "actor")
    v0, v1, value = layers_of(p, "critic")
    made = through(side_by_side(logits, auxiliary), jnp.tanh(through(a1, jnp.tanh(through(a0, obs)))))
    return made[..., :ACTIONS], made[..., ACTIONS], through(value, jnp.tanh(through(v1, jnp.tanh(through(v0, obs)))))[..., 0]


def joined(p, obs):
    """Both first layers as one, too."""
    a0, a1, logits, auxiliary = layers_of(p, "actor")
    v0, v1, value = layers_of(p, "critic")
    a, v = jnp.split(jnp.tanh(through(side_by_side(a0, v0), obs)), 2, -1)
    made = through(side_by_side(logits, auxiliary), jnp.tanh(through(a1, a)))
    return made[..., :ACTIONS], made[..., ACTIONS], through(value, jnp.tanh(through(v1, v)))[..., 0]


def stacked(p, obs):
    """The second ones as one product of a batch of two, too."""
    a0, a1, logits, auxiliary = layers_of(p, "actor")
    v0, v1, value = layers_of(p, "critic")
    h = jnp.tanh(through(side_by_side(a0, v0), obs))
    pair = jnp.moveaxis(h.reshape(*h.shape[:-1], 2, -1), -2, 0)
    w, b = (jnp.stack(x) for x in zip(a1, v1, strict=True))
    a, v = jnp.tanh(jnp.einsum("n...i,nij->n...j", pair, w) + b.reshape(2, *(1,) * (obs.ndim - 1), -1))
    made = through(side_by_side(logits, auxiliary), a)
    return made[..., :ACTIONS], made[..., ACTIONS], through(value, v)[..., 0]


def columns(p, obs):
    """Rows innermost."""
    a0, a1, logits, auxiliary = layers_of(p, "actor")
    v0, v1, value = layers_of(p, "critic")
    up = lambda layer, x: layer[0].T @ x + layer[1][:, None]  # noqa: E731
    a, v = jnp.split(jnp.tanh(up(side_by_side(a0, v0), obs.reshape(-1, obs.shape[-1]).T)), 2)
    made = up(side_by_side(logits, auxiliary), jnp.tanh(up(a1, a)))
    value = up(value, jnp.tanh(up(v1, v)))[0].reshape(obs.shape[:-1])
    return made[:ACTIONS].T.reshape(*obs.shape[:-1], -1), made[ACTIONS].reshape(obs.shape[:-1]), value


# -- minibatches


def in_turn(step, learner, data, order):
    """Each minibatch is gathered when its turn comes."""
    some = lambda index: jax.tree.map(lambda x: x[index], data)  # noqa: E731
    return jax.lax.scan(lambda learner, index: step(learner, some(index)), learner, order.reshape(MINIBATCHES, -1))


def packed(step, learner, data, order):
    """All of a point is one row."""
    leaves, structure = jax.tree.flatten(data)
    kinds = [x.dtype for x in leaves]
    table = jnp.concatenate([x.reshape(len(x), -1).astype(jnp.float32) for x in leaves], -1)
    ends = np.cumsum([x[0].size for x in leaves])[:-1]

    def one(learner, index):
        parts = jnp.split(table[index], ends, -1)
        parts = [x.reshape(-1, *y.shape[1:]).astype(k) for x, y, k in zip(parts, leaves, kinds, strict=True)]
        return step(learner, jax.tree.unflatten(structure, parts))

    return jax.lax.scan(one, learner, order.reshape(MINIBATCHES, -1))


# -- what is learnt


class Way(NamedTuple):
    net: Any = apart
    epoch: Any = in_turn
    ahead: bool = False  # what is drawn comes before the loop
    unroll: int = 1  # of the loop that acts
    flat: bool = False  # parameters are one vector while they learn


def policy_loss(net, p, x):
    logits, _, value = net(p, x.obs)
    log_p = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.where(x.action == 0, log_p[:, 0], log_p[:, 1]) - x.log_prob)
    advantage = (x.advantage - x.advantage.mean()) / (x.advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantage)
    error = 0.5 * (value - (x.advantage + x.value)) ** 2
    return (0.5 * error - gain + 0.01 * (jnp.exp(log_p) * log_p).sum(-1)).mean()


def auxiliary_loss(net, p, x):
    obs, target, old = x
    logits, auxiliary, value = net(p, obs)
    held = (jnp.exp(old) * (old - jax.nn.log_softmax(logits))).sum(-1)
    return (0.5 * (auxiliary - target) ** 2 + CLONED * held + 0.5 * (value - target) ** 2).mean()


def acted(way, length, batch, p, state, key):
    action_keys, env_keys = c.streams(key, batch, "action", "env")
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))
    draw = lambda t: (gumbel(c.at(action_keys, t)), c.at(env_keys, t))  # noqa: E731

    def body(state, x):
        noise, keys = x if way.ahead else draw(x)
        obs = state["x"]
        logits, _, value = way.net(p, obs)
        action = jnp.argmax(logits + noise, -1)
        state, step = jax.vmap(c.cartpole_step)(keys, state, action)
        log_prob = c.pick(jax.nn.log_softmax(logits), action)
        return state, (Rollout(obs, action, log_prob, value, step.reward), step.terminated)

    times = jnp.arange(length)
    state, (x, done) = jax.lax.scan(body, state, jax.vmap(draw)(times) if way.ahead else times, unroll=way.unroll)
    advantage = c.gae(x.value, way.net(p, state["x"])[2], x.advantage, done, GAMMA, LAMBDA)
    return state, c.rows_of(x._replace(advantage=advantage))


def by_hand(length, batch, way):
    def update(learner, state, key):
        back = jax.flatten_util.ravel_pytree(learner[0])[1] if way.flat else lambda p: p
        flatten = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jax.flatten_util.ravel_pytree(x)[0] if isinstance(x, dict) else x, tree,
            is_leaf=lambda x: isinstance(x, dict),
        )  # fmt: skip
        unflatten = lambda tree: jax.tree.map(lambda x: back(x) if x.ndim == 1 else x, tree)  # noqa: E731
        step = lambda loss: functools.partial(given.descended, lambda p, x: loss(way.net, back(p), x))  # noqa: E731

        def iteration(learnt, key):
            learner, state = learnt
            act_key, shuffle_key = jax.random.split(key)
            state, x = acted(way, length, batch, back(learner[0]), state, act_key)
            order = rlfx.shuffle(jax.random.split(shuffle_key, 1)[0], length * batch)
            learner, losses = way.epoch(step(policy_loss), learner, x, order)
            return (learner, state), (x.obs, x.advantage + x.value, losses[None])

        *keys, last = jax.random.split(key, ITERATIONS + 1)
        learner = flatten(learner) if way.flat else learner
        (learner, state), (obs, target, losses) = jax.lax.scan(iteration, (learner, state), jnp.stack(keys))
        obs, target = obs.reshape(-1, obs.shape[-1]), target.reshape(-1)
        data = obs, target, jax.nn.log_softmax(way.net(back(learner[0]), obs)[0])

        def epoch(learner, key):
            return way.epoch(step(auxiliary_loss), learner, data, rlfx.shuffle(key, len(obs)))

        learner, auxiliary = jax.lax.scan(epoch, learner, jax.random.split(last, AUXILIARY))
        return unflatten(learner) if way.flat else learner, state, losses, auxiliary

    return update


def workload(length, batch, hidden):
    make, ahead = functools.partial(by_hand, length, batch), {"ahead": True}
    forms = {
        "rlfx": given.by_rlfx(length, batch, hidden), "plain": given.plain(length, batch, hidden),
        "shuffled, heads joined": make(Way(epoch=shuffled)), "in turn": make(Way()), "in turn, joined": make(Way(joined)),
        "packed": make(Way(epoch=packed)), "packed, joined": make(Way(joined, packed)),
        "packed, stacked": make(Way(stacked, packed)),
        "packed, rows innermost": make(Way(columns, packed)),
        "packed, joined, a vector of parameters": make(Way(joined, packed, flat=True)),
        "packed, joined, drawn ahead": make(Way(joined, packed, **ahead)),
        "packed, joined, the actor unrolled by 2": make(Way(joined, packed, unroll=2)),
        "packed, joined, drawn ahead, threefry unrolled": make(Way(joined, packed, **ahead)),
        "in turn, threefry unrolled": make(Way()),
        "shuffled, drawn ahead, threefry unrolled": make(Way(apart, shuffled, **ahead)),
        "packed, drawn ahead, threefry unrolled": make(Way(apart, packed, **ahead)),
    }  # fmt: skip
    p = params_of(jax.random.key(0), hidden)
    learner = p, optimizer.init(p)
    compared = lambda found: (found[0][0], *found[1:])  # noqa: E731
    return drawing(forms, (learner, c.batch_of(c.cartpole_reset, batch)), compared=compared, tolerance=2e-3)
