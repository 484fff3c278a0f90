"""PPO of a policy of dilated causal convolutions (van den Oord et al. 2016; Mishra et al. 2018) over what was seen in the
episode: gated layers, each of which reads two timesteps of the one below."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA, CLIP = 32, 6, 0.99, 0.95, 0.2
DILATIONS = 1, 2, 4, 8


def params_of(key, hidden):
    k = jax.random.split(key, 3 + len(DILATIONS))
    return {
        "in": c.dense(k[0], OBS, hidden), "pi": c.dense(k[1], hidden, ACTIONS), "v": c.dense(k[2], hidden, 1),
        "layers": [c.dense(key, 2 * hidden, 2 * hidden) for key in k[3:]],
    }  # fmt: skip


def gated(x):
    filtered, gate = jnp.split(x, 2, -1)
    return jnp.tanh(filtered) * jax.nn.sigmoid(gate)


def heads(p, h):
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def clipped_loss(logits, v, log_prob, x, advantage):
    """Of points: ``logits[..., ACTIONS]``, the log-probability of what was done, and the rest ``[...]``."""
    ratio = jnp.exp(log_prob - x["log_prob"])
    gained = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantage)
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return 0.5 * (v - stop_gradient(v) - advantage) ** 2 - gained - 0.01 * entropy


def program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    episode = rlfx.series(x["episode"], start=-1)
    h = jnp.tanh(c.linear(p["in"], x["obs"]))
    for layer, far in zip(p["layers"], DILATIONS, strict=True):
        same = episode[t - far] == x["episode"]
        before = jnp.where(same, rlfx.series(h, start=jnp.zeros_like(h))[t - far], 0.0)
        h = h + gated(c.linear(layer, jnp.concatenate([h, before])))
    logits, v = heads(p, h)
    value = rlfx.series(stop_gradient(v), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    advantage = rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    return clipped_loss(logits, v, jax.nn.log_softmax(logits)[x["action"]], x, advantage), carry


# -- by hand, as usual: of one environment, ``[T, ...]``


def earlier(x, far, first=0):
    """What was ``far`` timesteps ago."""
    return jnp.concatenate([jnp.full_like(x[:far], first), x[:-far]])


def features(p, x):
    h = jnp.tanh(c.linear(p["in"], x["obs"]))
    for layer, far in zip(p["layers"], DILATIONS, strict=True):
        same = earlier(x["episode"], far, -1) == x["episode"]
        before = jnp.where(same[:, None], earlier(h, far), 0.0)
        h = h + gated(c.linear(layer, jnp.concatenate([h, before], -1)))
    return h


def learnt(logits, v, x, advantage):
    return clipped_loss(logits, v, c.pick(jax.nn.log_softmax(logits), x["action"]), x, advantage)


def plain(length, batch):
    def run(p, _, data, key=None):
        def loss(p):
            h = jax.vmap(features, (None, 1), 1)(p, data)
            logits, v = heads(p, h)
            advantage = c.gae(stop_gradient(v), jnp.zeros(batch), data["reward"], data["done"], GAMMA, LAMBDA)
            return learnt(logits, v, data, advantage).mean()

        return jax.value_and_grad(loss)(p)

    return run
