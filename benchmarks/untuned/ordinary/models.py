"""Learners with models of the world: DreamerV3's observations and its imagination, and curiosity (ICM, RND)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu

OBS, ACTIONS, GAMMA = 17, 6, 0.99
CLASSES, GROUPS = 16, 16
silu = jax.nn.silu

# -- a recurrent state-space model that observes: groups of classes with straight-through gradients, balanced KL, free nats


def rssm_params(key, hidden):
    k = jax.random.split(key, 8)
    code = GROUPS * CLASSES
    return {
        "in": c.dense(k[0], code + ACTIONS, hidden), "gru": gru_params(k[1], hidden, hidden),
        "prior": c.mlp_params(k[2], (hidden, hidden, code)), "posterior": c.mlp_params(k[3], (2 * hidden, hidden, code)),
        "encoder": c.mlp_params(k[4], (OBS, hidden, hidden)), "decoder": c.mlp_params(k[5], (hidden + code, hidden, OBS)),
        "reward": c.mlp_params(k[6], (hidden + code, hidden, 1)), "goes": c.mlp_params(k[7], (hidden + code, hidden, 1)),
    }  # fmt: skip


def grouped(logits):
    """Log-probabilities ``[..., GROUPS, CLASSES]``, with one percent of uniform ones."""
    p = jax.nn.softmax(logits.reshape(*logits.shape[:-1], GROUPS, CLASSES))
    return jnp.log(0.99 * p + 0.01 / CLASSES)


def sampled(log_p, gumbel):
    """One-hot, straight through; flat."""
    hard = jax.nn.one_hot(jnp.argmax(log_p + gumbel, -1), CLASSES)
    p = jnp.exp(log_p)
    z = stop_gradient(hard - p) + p
    return z.reshape(*z.shape[:-2], -1)


def divergence(a, b):
    return jnp.maximum((jnp.exp(a) * (a - b)).sum((-2, -1)), 1.0)


def rssm_step(p, h, z, action, done, code, gumbel):
    """Of rows, or of one: the new state, its sample, and both distributions."""
    keep = 1.0 - done.astype(jnp.float32)[..., None]
    x = silu(c.linear(p["in"], jnp.concatenate([z * keep, action * keep], -1)))
    h = gru(p["gru"], h * keep, x)
    posterior = grouped(c.mlp(p["posterior"], jnp.concatenate([h, code], -1), silu))
    return h, sampled(posterior, gumbel), posterior


def rssm_losses(p, x, h, z, posterior):
    prior = grouped(c.mlp(p["prior"], h, silu))
    features = jnp.concatenate([h, z], -1)
    decoded = ((c.mlp(p["decoder"], features, silu) - x["obs"]) ** 2).sum(-1)
    reward = (c.mlp(p["reward"], features, silu)[..., 0] - x["reward"]) ** 2
    goes, ended = c.mlp(p["goes"], features, silu)[..., 0], x["done"].astype(jnp.float32)
    kl = 0.5 * divergence(stop_gradient(posterior), prior) + 0.1 * divergence(posterior, stop_gradient(prior))
    return decoded + reward + jnp.maximum(goes, 0.0) - goes * (1.0 - ended) + jnp.log1p(jnp.exp(-jnp.abs(goes))) + kl


def rssm_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    gumbel = jax.random.gumbel(t.key_for("z"), (GROUPS, CLASSES))
    code = silu(c.mlp(p["encoder"], x["obs"], silu))
    h, z, posterior = rssm_step(p, *carry, x["action"], x["first"], code, gumbel)
    return rssm_losses(p, x, h, z, posterior), (h, z)


def drawn(key, name, length, batch, draw):
    (keys,) = c.streams(key, batch, name)
    return jax.vmap(lambda t: jax.vmap(draw)(c.at(keys, t)))(jnp.arange(length))


def rssm_plain(length, batch, hidden):
    def loss(p, _, data, key):
        gumbel = drawn(key, "z", length, batch, lambda k: jax.random.gumbel(k, (GROUPS, CLASSES)))
        code = silu(c.mlp(p["encoder"], data["obs"], silu))

        def body(state, x):
            h, z, posterior = rssm_step(p, *state, *x)
            return (h, z), (h, z, posterior)

        start = jnp.zeros((batch, hidden)), jnp.zeros((batch, GROUPS * CLASSES))
        _, found = jax.lax.scan(body, start, (data["action"], data["first"], code, gumbel))
        return rssm_losses(p, data, *found).mean()

    return parts.usual(loss)


def rssm(length, batch, hidden):
    k = jax.random.split(jax.random.key(1), 4)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    data["action"] = jax.nn.one_hot(data["action"], ACTIONS)
    p = rssm_params(jax.random.key(0), hidden)
    start = jnp.zeros((batch, hidden)), jnp.zeros((batch, GROUPS * CLASSES))
    return parts.learner(
        rssm_program, rssm_plain(length, batch, hidden), length, batch, p, (), data, start, random=True
    )


# -- imagination: an actor that learns through the model, with lambda returns of what its critic expects; t is imagined


def imagined_step(p, model, h, z, noise, gumbel):
    """``action``: continuous, of as many numbers as there are actions."""
    features = stop_gradient(jnp.concatenate([h, z], -1))
    action, log_prob = c.squashed(p["actor"], features, noise)
    x = silu(c.linear(model["in"], jnp.concatenate([z, action], -1)))
    h = gru(model["gru"], h, x)
    return h, sampled(grouped(c.mlp(model["prior"], h, silu)), gumbel), log_prob


def features_of(h, z):
    return jnp.concatenate([h, z], -1)


def imagination_program(params, carry, t):
    (p, (model, old)), _ = params
    h, z = carry
    noise = jax.random.normal(t.key_for("action"), (ACTIONS,))
    gumbel = jax.random.gumbel(t.key_for("z"), (GROUPS, CLASSES))
    h, z, log_prob = imagined_step(p, model, h, z, noise, gumbel)
    features = features_of(h, z)
    reward, goes = c.mlp(model["reward"], features, silu)[0], jax.nn.sigmoid(c.mlp(model["goes"], features, silu)[0])
    discount, value = GAMMA * goes, c.mlp(old, features, silu)[0]
    following = rlfx.series(value, end=value)[t + 1]
    returns = rlfx.solve(lambda g: reward + discount * (0.05 * following + 0.95 * g[t + 1]), end=value)
    before = rlfx.series(discount, start=1.0)
    weight = stop_gradient(jnp.prod(before[:t]))
    guess = c.mlp(p["critic"], stop_gradient(features), silu)[0]
    return weight * (-returns + 3e-3 * log_prob + (guess - stop_gradient(returns)) ** 2), (h, z)


def imagination_plain(length, batch, start):
    def loss(p, given, _, key):
        model, old = given
        noise = c.normals(key, "action", length, batch, (ACTIONS,))
        gumbel = drawn(key, "z", length, batch, lambda k: jax.random.gumbel(k, (GROUPS, CLASSES)))

        def body(state, x):
            h, z, log_prob = imagined_step(p, model, *state, *x)
            return (h, z), (h, z, log_prob)

        _, (h, z, log_prob) = jax.lax.scan(body, start, (noise, gumbel))
        features = features_of(h, z)
        reward, goes = (c.mlp(model[name], features, silu)[..., 0] for name in ("reward", "goes"))
        discount, value = GAMMA * jax.nn.sigmoid(goes), c.mlp(old, features, silu)[..., 0]
        following = c.shifted(value, value[-1])

        def back(g, x):
            g = x[0] + x[1] * (0.05 * x[2] + 0.95 * g)
            return g, g

        _, returns = jax.lax.scan(back, value[-1], (reward, discount, following), reverse=True)
        weight = stop_gradient(jnp.cumprod(jnp.concatenate([jnp.ones_like(discount[:1]), discount[:-1]]), 0))
        guess = c.mlp(p["critic"], stop_gradient(features), silu)[..., 0]
        return (weight * (-returns + 3e-3 * log_prob + (guess - stop_gradient(returns)) ** 2)).mean()

    return parts.usual(loss)


def imagination(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 6)
    wide = hidden + GROUPS * CLASSES
    model = rssm_params(k[0], hidden)
    p = {
        "actor": c.mlp_params(k[1], (wide, hidden, hidden, 2 * ACTIONS)), "critic": c.mlp_params(k[2], (wide, hidden, 1)),
    }  # fmt: skip
    old = c.mlp_params(k[3], (wide, hidden, 1))
    z = jax.nn.one_hot(jax.random.randint(k[4], (batch, GROUPS), 0, CLASSES), CLASSES).reshape(batch, -1)
    start = 0.5 * jax.random.normal(k[5], (batch, hidden)), z
    plain = imagination_plain(length, batch, start)
    return parts.learner(imagination_program, plain, length, batch, p, (model, old), (), start, random=True)


# -- curiosity: ICM's two models, and RND's error, scaled by its own deviation, as rewards of an actor-critic


def curious_params(key, hidden):
    k = jax.random.split(key, 6)
    return {
        "features": c.mlp_params(k[0], (OBS, hidden, hidden)), "forward": c.mlp_params(k[1], (hidden + ACTIONS, hidden, hidden)),
        "inverse": c.mlp_params(k[2], (2 * hidden, hidden, ACTIONS)), "guess": c.mlp_params(k[3], (OBS, hidden, hidden)),
        "pi": c.mlp_params(k[4], (OBS, hidden, ACTIONS)), "v": c.mlp_params(k[5], (OBS, hidden, 1)),
    }  # fmt: skip


def icm(p, obs, next_obs, action):
    """The losses of both models: the first one is the reward."""
    here, there = c.mlp(p["features"], obs, relu), c.mlp(p["features"], next_obs, relu)
    guess = c.mlp(p["forward"], jnp.concatenate([stop_gradient(here), jax.nn.one_hot(action, ACTIONS)], -1), relu)
    log_p = jax.nn.log_softmax(c.mlp(p["inverse"], jnp.concatenate([here, there], -1), relu))
    return ((guess - stop_gradient(there)) ** 2).mean(-1), log_p


def rnd(p, fixed, next_obs):
    return ((c.mlp(p["guess"], next_obs, relu) - c.mlp(fixed, next_obs, relu)) ** 2).mean(-1)


def curious_program(params, carry, t):
    (p, fixed), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    forward, log_inverse = icm(p, x["obs"], next_obs, x["action"])
    novelty = rnd(p, fixed, next_obs)
    bonus = stop_gradient(0.1 * forward + novelty / (rlfx.std(novelty) + 1e-6))
    step = parts.step_of(x | {"reward": x["reward"] + 0.1 * bonus})
    value = c.mlp(p["v"], x["obs"])[0]
    following = rlfx.series(value, end=c.mlp(p["v"], x["last"])[0])[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=0.95))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    actor_critic = 0.5 * (value - stop_gradient(value) - advantage) ** 2 - log_p[x["action"]] * advantage
    return actor_critic + forward - log_inverse[x["action"]] + novelty, carry


def curious_plain(p, fixed, data):
    obs = parts.with_last(data)
    forward, log_inverse = icm(p, obs[:-1], obs[1:], data["action"])
    novelty = rnd(p, fixed, obs[1:])
    bonus = stop_gradient(0.1 * forward + novelty / (novelty.std() + 1e-6))
    value = c.mlp(p["v"], obs)[..., 0]
    value, last = value[:-1], value[-1]
    advantage = stop_gradient(c.gae(value, last, data["reward"] + 0.1 * bonus, data["done"], GAMMA, 0.95))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], data["obs"]))
    actor_critic = 0.5 * (value - stop_gradient(value) - advantage) ** 2 - c.pick(log_p, data["action"]) * advantage
    return (actor_critic + forward - c.pick(log_inverse, data["action"]) + novelty).mean()


def curious(length, batch, hidden):
    p, fixed = curious_params(jax.random.key(0), hidden), c.mlp_params(jax.random.key(1), (OBS, hidden, hidden))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(curious_program, parts.usual(curious_plain), length, batch, p, fixed, data)
