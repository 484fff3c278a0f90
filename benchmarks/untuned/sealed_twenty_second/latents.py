"""Dreamer's behaviours (DreamerV2, Hafner et al. 2021): from every stored state of a recurrent state-space model, whose latents
are groups of classes, the actor imagines ten steps; what it does and what is drawn pass their gradient on straight. The actor
goes up lambda-returns, the critic learns them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates as gru

GROUPS, CLASSES, ACTIONS, HORIZON, GAMMA, LAMBDA, ENTROPY = 8, 8, 6, 10, 0.99, 0.95, 1e-3
LATENT = GROUPS * CLASSES
elu = jax.nn.elu


def params_of(key, hidden):
    k = jax.random.split(key)
    state = hidden + LATENT
    return {"actor": c.mlp_params(k[0], (state, hidden, ACTIONS)), "critic": c.mlp_params(k[1], (state, hidden, 1))}


def model_of(key, hidden):
    k = jax.random.split(key, 6)
    return {
        "in": c.dense(k[0], LATENT + ACTIONS, hidden), "x": c.dense(k[1], hidden, 3 * hidden),
        "h": c.dense(k[2], hidden, 3 * hidden), "prior": c.mlp_params(k[3], (hidden, hidden, LATENT)),
        "reward": c.mlp_params(k[4], (hidden + LATENT, hidden, 1)),
        "going": c.mlp_params(k[5], (hidden + LATENT, hidden, 1)),
    }  # fmt: skip


def straight(logits, chosen):
    """One-hot, with the gradient of probabilities."""
    probs = jax.nn.softmax(logits)
    return jax.nn.one_hot(chosen, logits.shape[-1]) + probs - stop_gradient(probs)


def moved(m, h, z, action):
    """The next memory, and logits of what is drawn ``[..., GROUPS, CLASSES]``."""
    x = elu(c.linear(m["in"], jnp.concatenate([z, action], -1)))
    h = gru(c.linear(m["x"], x), c.linear(m["h"], h), h)
    logits = c.mlp(m["prior"], h, elu)
    return h, logits.reshape(*logits.shape[:-1], GROUPS, CLASSES)


def entropy_of(logits):
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(-1)


def imagine(p, m, h, z, key):
    """States ``[HORIZON + 1, ...]``, and entropies of what the actor could do at all but the last."""

    def body(carry, key):
        h, z = carry
        act_key, latent_key = jax.random.split(key)
        logits = c.mlp(p["actor"], stop_gradient(jnp.concatenate([h, z])), elu)
        action = straight(logits, jax.random.categorical(act_key, logits))
        h, prior = moved(m, h, z, action)
        z = straight(prior, jax.random.categorical(latent_key, prior)).reshape(-1)
        return (h, z), (h, z, entropy_of(logits))

    _, (hs, zs, entropy) = jax.lax.scan(body, (h, z), jax.random.split(key, HORIZON))
    first = jnp.concatenate([h, z])[None]
    return jnp.concatenate([first, jnp.concatenate([hs, zs], -1)]), entropy


def losses(p, m, old, state, entropy):
    """Of what was imagined, ``state[HORIZON + 1, ...]``."""
    head = lambda p, state: c.mlp(p, state, elu)[..., 0]  # noqa: E731
    reward, discount = head(m["reward"], state[1:]), GAMMA * jax.nn.sigmoid(head(m["going"], state[1:]))
    value = head(old, state)

    def back(after, x):
        reward, discount, value = x
        found = reward + discount * ((1.0 - LAMBDA) * value + LAMBDA * after)
        return found, found

    target = jax.lax.scan(back, value[-1], (reward, discount, value[1:]), reverse=True)[1]
    weight = stop_gradient(jnp.cumprod(jnp.concatenate([jnp.ones_like(discount[:1]), discount[:-1]]), 0))
    actor_loss = -weight * (target + ENTROPY * entropy)
    critic_loss = 0.5 * weight * (head(p["critic"], stop_gradient(state[:-1])) - stop_gradient(target)) ** 2
    return (actor_loss + critic_loss).mean(0)


def program(params, carry, t):
    (p, (m, old)), data = params
    x = rlfx.inputs(data)[t]
    state, entropy = imagine(p, m, x["h"], x["z"], t.key_for("dream"))
    return losses(p, m, old, state, entropy), carry


# -- by hand, as usual


def plain(length, batch):
    def run(p, others, data, key):
        (m, old), (keys,) = others, c.streams(key, batch, "dream")
        keys = jax.vmap(lambda t: c.at(keys, t))(jnp.arange(length))
        h, z, keys = c.rows_of((data["h"], data["z"])) + (keys.reshape(-1),)

        def loss(p):
            state, entropy = jax.vmap(imagine, (None, None, 0, 0, 0), 1)(p, m, h, z, keys)
            return losses(p, m, old, state, entropy).mean()

        return jax.value_and_grad(loss)(p)

    return run
