"""PEARL (Rakelly et al. 2019) on replayed transitions of many tasks, one in every environment: what a transition tells of its
task is a Gaussian factor; the product of all of them is the task's posterior, and a sample of it goes into soft actor critic's
networks. The encoder learns by the critics' errors, and is held near the prior. Layers are as equinox's, ``w @ x + b``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, CODE, GAMMA, ALPHA, PRIOR = 14, 3, 5, 0.99, 0.2, 0.1
AXES = {"obs": "tb", "action": "tb", "reward": "tb", "after": "tb", "done": "tb", "noise": "b"}
relu = jax.nn.relu


def layers_of(key, sizes):
    def layer(key, columns, rows):
        return {"w": jax.random.normal(key, (rows, columns)) / columns**0.5, "b": jnp.zeros(rows)}

    keys = jax.random.split(key, len(sizes) - 1)
    return [layer(k, i, o) for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def critics_of(key, hidden):
    """Two, stacked."""
    of = lambda key: layers_of(key, (OBS + ACTIONS + CODE, hidden, hidden, 1))  # noqa: E731
    return jax.vmap(of)(jax.random.split(key))


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "encoder": layers_of(k[0], (2 * OBS + ACTIONS + 1, hidden, hidden, 2 * CODE)),
        "actor": layers_of(k[1], (OBS + CODE, hidden, hidden, 2 * ACTIONS)),
        "critics": critics_of(k[2], hidden),
    }


def mlp(layers, x):
    for layer in layers[:-1]:
        x = relu(layer["w"] @ x + layer["b"])
    return layers[-1]["w"] @ x + layers[-1]["b"]


def factor(layers, x):
    """Mean and precision of what one transition tells."""
    mean, spread = jnp.split(mlp(layers, jnp.concatenate([x["obs"], x["action"], x["reward"][None], x["after"]])), 2)
    return mean, 1.0 / (jax.nn.softplus(spread) + 0.1)


def squashed(mean, log_std, noise):
    """An action and its log-probability."""
    log_std = jnp.clip(log_std, -5.0, 2.0)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), log_prob.sum(-1)


def acted(layers, obs, z, noise):
    return squashed(*jnp.split(mlp(layers, jnp.concatenate([obs, z])), 2), noise)


def values(critics, obs, action, z):
    return jax.vmap(lambda layers: mlp(layers, jnp.concatenate([obs, action, z]))[0])(critics)


def learnt(p, target, x, z, here, there):
    """The loss of one transition, given its task."""
    task = stop_gradient(z)
    action, log_prob = acted(p["actor"], x["after"], task, there)
    following = values(target, x["after"], action, task).min() - ALPHA * log_prob
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    errors = 0.5 * ((values(p["critics"], x["obs"], x["action"], z) - aim) ** 2).sum()
    action, log_prob = acted(p["actor"], x["obs"], task, here)
    gained = values(stop_gradient(p["critics"]), x["obs"], action, task).min() - ALPHA * log_prob
    return errors - gained


def from_prior(mean, variance):
    return 0.5 * (variance + mean**2 - 1.0 - jnp.log(variance)).sum()


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=AXES)[t]
    mean, precision = factor(p["encoder"], x)
    told = rlfx.series({"precision": precision, "weighted": precision * mean})[:]
    variance = 1.0 / told["precision"].sum(0)
    mean = variance * told["weighted"].sum(0)
    z = mean + jnp.sqrt(variance) * x["noise"]
    here, there = (jax.random.normal(t.key_for(name), (ACTIONS,)) for name in ("here", "there"))
    return learnt(p, target, x, z, here, there) + PRIOR * from_prior(mean, variance), carry


# -- by hand, as usual


def drawn(keys, t):
    """Noise of actions, at what is seen and at what is seen after it."""
    return tuple(jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(c.at(k, t)) for k in keys)


def plain(length, batch):
    def run(p, target, data, key):
        keys = c.streams(key, batch, "here", "there")
        here, there = jax.vmap(lambda t: drawn(keys, t))(jnp.arange(length))
        steps = {name: x for name, x in data.items() if name != "noise"}

        def of_task(p, x, noise, here, there):
            mean, precision = jax.vmap(factor, (None, 0))(p["encoder"], x)
            variance = 1.0 / precision.sum(0)
            mean = variance * (precision * mean).sum(0)
            z = mean + jnp.sqrt(variance) * noise
            losses = jax.vmap(learnt, (None, None, 0, None, 0, 0))(p, target, x, z, here, there)
            return losses.mean() + PRIOR * from_prior(mean, variance)

        def loss(p):
            return jax.vmap(of_task, (None, 1, 0, 1, 1))(p, steps, data["noise"], here, there).mean()

        return jax.value_and_grad(loss)(p)

    return run
