"""Parts that do not learn, or that go back through a linear recurrence: a GRU above one that is fixed, gated linear
recurrences, CQL."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.critics import twin_params
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu

OBS, ACTIONS, GAMMA = 17, 6, 0.99

# -- a policy that is tuned: a GRU and a head above a GRU that was learnt before


def tuned_program(params, carry, t):
    (p, fixed), data = params
    x = rlfx.inputs(data)[t]
    below, above = carry
    below = gru(fixed["gru"], below, jnp.tanh(c.linear(fixed["in"], x["obs"])))
    above = gru(p["gru"], above, below)
    log_p = jax.nn.log_softmax(c.linear(p["pi"], above))
    going = lambda h: jnp.where(x["done"], 0.0, h)  # noqa: E731
    return -log_p[x["action"]] * x["reward"], (going(below), going(above))


def tuned_plain(batch, hidden):
    def loss(p, fixed, data):
        def body(carry, x):
            below = gru(fixed["gru"], carry[0], x[0])
            above = gru(p["gru"], carry[1], below)
            return jax.tree.map(lambda h: jnp.where(x[1][:, None], 0.0, h), (below, above)), above

        seen, start = jnp.tanh(c.linear(fixed["in"], data["obs"])), (jnp.zeros((batch, hidden)),) * 2
        _, h = jax.lax.scan(body, start, (seen, data["done"]))
        log_p = jax.nn.log_softmax(c.linear(p["pi"], h))
        return -(c.pick(log_p, data["action"]) * data["reward"]).mean()

    return parts.usual(loss)


def tuned(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 4)
    fixed = {"in": c.dense(k[0], OBS, hidden), "gru": gru_params(k[1], hidden, hidden)}
    p = {"gru": gru_params(k[2], hidden, hidden), "pi": c.dense(k[3], hidden, ACTIONS)}
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    start = (jnp.zeros((batch, hidden)),) * 2
    return parts.learner(tuned_program, tuned_plain(batch, hidden), length, batch, p, fixed, data, start)


# -- two gated linear recurrences (minGRU, Feng et al. 2024)


def linear_params(key, width, layers):
    k = iter(jax.random.split(key, 3 * layers + 3))
    layer = lambda: {name: c.dense(next(k), width, width) for name in ("gate", "value", "out")}  # noqa: E731
    heads = {"pi": c.dense(next(k), width, ACTIONS), "v": c.dense(next(k), width, 1)}
    return {"in": c.dense(next(k), OBS, width), "layers": [layer() for _ in range(layers)], **heads}


def made(layer, x):
    """How much of the state stays, and what is added."""
    z = jax.nn.sigmoid(c.linear(layer["gate"], x))
    return 1.0 - z, z * c.linear(layer["value"], x)


def judged(p, h, action, target):
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[..., 0]
    chosen = log_p[action] if h.ndim == 1 else c.pick(log_p, action)
    return 0.5 * (value - target) ** 2 - chosen * stop_gradient(target - value)


def linear_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h, after = c.linear(p["in"], x["obs"]), []
    for layer, state in zip(p["layers"], carry, strict=True):
        keep, new = made(layer, h)
        state = keep * jnp.where(x["first"], 0.0, state) + new
        h, after = h + c.linear(layer["out"], relu(state)), [*after, state]
    going = rlfx.series(jnp.where(x["done"], 0.0, GAMMA))
    target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], going[t:])
    return judged(p, h, x["action"], target), after


def linear_plain(p, _, data):
    h = c.linear(p["in"], data["obs"])
    for layer in p["layers"]:
        keep, new = made(layer, h)
        keep = jnp.where(data["first"][..., None], 0.0, keep)

        def body(state, x):
            state = x[0] * state + x[1]
            return state, state

        _, state = jax.lax.scan(body, jnp.zeros_like(new[0]), (keep, new))
        h = h + c.linear(layer["out"], relu(state))
    target = c.discounted(data["reward"], parts.going(data, GAMMA))
    return judged(p, h, data["action"], target).mean()


def linear(length, batch, width, layers):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    data["first"] = jnp.concatenate([jnp.ones_like(data["done"][:1]), data["done"][:-1]])
    start = [jnp.zeros((batch, width)) for _ in range(layers)]
    p = linear_params(jax.random.key(0), width, layers)
    return parts.learner(linear_program, parts.usual(linear_plain), length, batch, p, (), data, start)


# -- CQL: what ten actions drawn at random, and ten of the policy, are worth is pushed down

DIMS, DRAWN = 6, 10


def actions_of(p, obs, noise):
    """``obs[..., OBS]``, ``noise[..., DRAWN, DIMS]``: actions and their log-probabilities."""
    return c.squashed(p, jnp.broadcast_to(obs[..., None, :], (*noise.shape[:-1], obs.shape[-1])), noise)


def cql_losses(p, target, x, next_obs, noise, uniform):
    """``noise[..., 2 + DRAWN, DIMS]``, ``uniform[..., DRAWN, DIMS]``."""
    next_action, _ = c.squashed(stop_gradient(p["actor"]), next_obs, noise[..., 0, :])
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * c.mapped(target, next_obs, next_action).min(0))
    q = c.mapped(p["critics"], x["obs"], x["action"])
    drawn, log_prob = actions_of(stop_gradient(p["actor"]), x["obs"], noise[..., 2:, :])
    actions = jnp.concatenate([uniform, drawn], -2)
    correction = jnp.concatenate([jnp.full_like(log_prob, -DIMS * 0.693), log_prob], -1)
    obs = jnp.broadcast_to(x["obs"][..., None, :], (*actions.shape[:-1], OBS))
    others = jax.nn.logsumexp(c.mapped(p["critics"], obs, actions) - correction, axis=-1)
    critic = ((q - aim) ** 2 + 5.0 * (others - q)).sum(0)
    action, log_prob = c.squashed(p["actor"], x["obs"], noise[..., 1, :])
    return critic + 0.1 * log_prob - c.mapped(stop_gradient(p["critics"]), x["obs"], action).min(0)


def draw_uniform(key):
    return jax.random.uniform(key, (DRAWN, DIMS), minval=-1.0, maxval=1.0)


def cql_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    noise = jax.random.normal(t.key_for("noise"), (2 + DRAWN, DIMS))
    return cql_losses(p, target, x, next_obs, noise, draw_uniform(t.key_for("uniform"))), carry


def cql_plain(length, batch):
    def loss(p, target, data, key):
        noise = c.normals(key, "noise", length, batch, (2 + DRAWN, DIMS))
        (keys,) = c.streams(key, batch, "uniform")
        uniform = jax.vmap(lambda t: jax.vmap(draw_uniform)(c.at(keys, t)))(jnp.arange(length))
        return cql_losses(p, target, data, parts.with_last(data)[1:], noise, uniform).mean()

    return parts.usual(loss)


def cql(length, batch, hidden):
    k = jax.random.split(jax.random.key(3), 3)
    p = {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS)), "critics": twin_params(k[1], hidden)}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    target = twin_params(k[2], hidden)
    return parts.learner(cql_program, cql_plain(length, batch), length, batch, p, target, data, random=True)
