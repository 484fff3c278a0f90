"""DreamerV3's world model (Hafner et al. 2023) on stored sequences: a recurrence with norms, whose latents are sampled from
groups of classes and pass their gradient on straight; symlog and two-hot heads, balanced divergences with free bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, BINS, FREE, REPRESENTATION = 24, 6, 255, 1.0, 0.1
EDGES = np.linspace(-20.0, 20.0, BINS, dtype=np.float32)


def params_of(key, hidden, groups, classes):
    k = jax.random.split(key, 8)
    latent, state = groups * classes, hidden + groups * classes
    dense = {"in": (latent + ACTIONS, hidden), "gru": (2 * hidden, 3 * hidden), "posterior": (2 * hidden, latent)}
    made = {name: c.dense(k, *size) for k, (name, size) in zip(k, dense.items(), strict=False)}
    heads = {
        "encoder": (OBS, hidden, hidden), "prior": (hidden, hidden, latent), "decoder": (state, hidden, OBS),
        "reward": (state, hidden, BINS), "going": (state, hidden, 1),
    }  # fmt: skip
    made |= {name: c.mlp_params(k, size) for k, (name, size) in zip(k[3:], heads.items(), strict=True)}
    made["posterior"]["w"] *= 3.0  # beliefs that are more than free
    norms = {"in": hidden, "gru": 3 * hidden}
    return made | {"norm": {name: {"scale": jnp.ones(n), "bias": jnp.zeros(n)} for name, n in norms.items()}}


def normed(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3) * p["scale"] + p["bias"]


def gru(made, h):
    """The next state, of a norm's output."""
    reset, candidate, update = jnp.split(made, 3, -1)
    update = jax.nn.sigmoid(update - 1.0)
    return update * jnp.tanh(jax.nn.sigmoid(reset) * candidate) + (1.0 - update) * h


def moved(p, h, z, action):
    x = jax.nn.silu(normed(p["norm"]["in"], c.linear(p["in"], jnp.concatenate([z, action], -1))))
    return gru(normed(p["norm"]["gru"], c.linear(p["gru"], jnp.concatenate([x, h], -1))), h)


def mixed(logits, groups):
    """Log-probabilities ``[..., groups, classes]``, of which a hundredth is even."""
    probs = jax.nn.softmax(logits.reshape(*logits.shape[:-1], groups, -1))
    return jnp.log(0.99 * probs + 0.01 / probs.shape[-1])


def straight(log_probs, chosen):
    """One-hot, with the gradient of probabilities."""
    probs = jnp.exp(log_probs)
    z = jax.nn.one_hot(chosen, probs.shape[-1]) + probs - stop_gradient(probs)
    return z.reshape(*z.shape[:-2], -1)


def symlog(x):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def two_hot(x):
    """Shares of the two bins around x, ``[..., BINS]``."""
    place = (jnp.clip(x, EDGES[0], EDGES[-1]) - EDGES[0]) / (EDGES[1] - EDGES[0])
    return jnp.maximum(1.0 - jnp.abs(place[..., None] - np.arange(BINS, dtype=np.float32)), 0.0)


def divergence(a, b):
    return (jnp.exp(a) * (a - b)).sum((-2, -1))


def balanced(posterior, prior):
    dynamics = jnp.maximum(divergence(stop_gradient(posterior), prior), FREE)
    return dynamics + REPRESENTATION * jnp.maximum(divergence(posterior, stop_gradient(prior)), FREE)


def of_heads(decoded, rewards, going, x):
    """The loss of what the heads made."""
    error = 0.5 * ((decoded - symlog(x["obs"])) ** 2).sum(-1)
    told = -(two_hot(symlog(x["reward"])) * jax.nn.log_softmax(rewards)).sum(-1)
    return error + told + jax.nn.softplus(going) - (1.0 - x["last"]) * going


def head(p, name, state):
    return c.mlp(p[name], state, jax.nn.silu)


def point_loss(p, h, z, posterior, x):
    state, groups = jnp.concatenate([h, z], -1), posterior.shape[-2]
    prior = mixed(head(p, "prior", h), groups)
    made = head(p, "decoder", state), head(p, "reward", state), head(p, "going", state)[..., 0]
    return of_heads(*made, x) + balanced(posterior, prior)


def program(groups):
    def dreamer(params, carry, t):
        p, data = params
        x = rlfx.inputs(data)[t]
        h, z, action = (jnp.where(x["first"], 0.0, s) for s in (*carry, x["action"]))
        h = moved(p, h, z, action)
        told = head(p, "encoder", symlog(x["obs"]))
        posterior = mixed(c.linear(p["posterior"], jnp.concatenate([h, told])), groups)
        z = straight(posterior, jax.random.categorical(t.key_for("latent"), posterior))
        return point_loss(p, h, z, posterior, x), (h, z)

    return dreamer
