"""A recurrent state-space model and an actor-critic in its imagination: an inner scan from every state of the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, LATENT, GAMMA, LAMBDA = 16, 4, 16, 0.99, 0.95


def params_of(hidden):
    k = jax.random.split(jax.random.key(0), 9)
    sizes = {
        "in": (LATENT + ACTIONS, hidden), "x": (hidden, 3 * hidden), "h": (hidden, 3 * hidden), "prior": (hidden, 2 * LATENT),
        "posterior": (hidden + OBS, 2 * LATENT), "decoder": (hidden + LATENT, OBS), "reward": (hidden + LATENT, 1),
        "actor": (hidden + LATENT, ACTIONS), "critic": (hidden + LATENT, 1),
    }  # fmt: skip
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def moved(p, h, z, action):
    """The deterministic state after an action, a GRU."""
    x = jax.nn.elu(c.linear(p["in"], jnp.concatenate([z, action], -1)))
    xr, xz, xn = jnp.split(c.linear(p["x"], x), 3, -1)
    hr, hz, hn = jnp.split(c.linear(p["h"], h), 3, -1)
    keep = jax.nn.sigmoid(xz + hz)
    return keep * h + (1 - keep) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def normal(x):
    mean, spread = jnp.split(x, 2, -1)
    return mean, jax.nn.softplus(spread) + 0.1


def observed(p, h, obs, noise):
    """The latent that an observation tells of, and the divergence from what was expected."""
    (mean, std), (expected, spread) = (
        normal(c.linear(p["posterior"], jnp.concatenate([h, obs], -1))),
        normal(c.linear(p["prior"], h)),
    )
    divergence = jnp.log(spread / std) + (std**2 + (mean - expected) ** 2) / (2 * spread**2) - 0.5
    return mean + std * noise, divergence.sum(-1)


def model_loss(p, h, z, divergence, obs, reward):
    state = jnp.concatenate([h, z], -1)
    errors = (
        0.5 * ((c.linear(p["decoder"], state) - obs) ** 2).sum(-1)
        + 0.5 * (c.linear(p["reward"], state)[..., 0] - reward) ** 2
    )
    return errors + 0.1 * divergence


def imagined_loss(p, h, z, noise, unroll=1, again=False):
    """Of one state ``h[...], z[...]``, or of rows of them: the actor follows the model's gradient; ``noise[H, ..., LATENT]``."""
    model = stop_gradient(p)

    def body(carry, noise):
        h, z = carry
        action = jax.nn.softmax(c.linear(p["actor"], jnp.concatenate([h, z], -1)))
        h = moved(model, h, z, action)
        mean, std = normal(c.linear(model["prior"], h))
        z = mean + std * noise
        state = jnp.concatenate([h, z], -1)
        return (h, z), (c.linear(model["reward"], state)[..., 0], state)

    start = stop_gradient((h, z))
    body = jax.checkpoint(body, prevent_cse=False) if again else body
    _, (reward, states) = jax.lax.scan(body, start, noise, unroll=unroll)
    value = c.linear(model["critic"], states)[..., 0]

    def back(after, x):
        reward, value = x
        after = reward + GAMMA * ((1 - LAMBDA) * value + LAMBDA * after)
        return after, after

    returns = jax.lax.scan(back, value[-1], (reward, value), reverse=True, unroll=unroll)[1]
    states = stop_gradient(jnp.concatenate([jnp.concatenate(start, -1)[None], states[:-1]]))
    critic = 0.5 * (c.linear(p["critic"], states)[..., 0] - stop_gradient(returns)) ** 2
    return (critic - returns).mean(0)


def program(horizon):
    def dreamer(params, carry, t):
        p, data = params
        x = rlfx.inputs(data)[t]
        h = moved(p, *carry, x["action"])
        z, divergence = observed(p, h, x["obs"], jax.random.normal(t.key_for("latent"), (LATENT,)))
        noise = jax.random.normal(t.key_for("imagined"), (horizon, LATENT))
        loss = model_loss(p, h, z, divergence, x["obs"], x["reward"]) + imagined_loss(p, h, z, noise)
        return loss, (h, z)

    return dreamer


def by_rlfx(length, batch, horizon):
    loss_fn = rlfx.compile(program(horizon), length=length, batch=batch)
    return lambda p, data, start, key: jax.value_and_grad(lambda p: loss_fn((p, data), start, key)[0])(p)


def by_hand(length, batch, horizon, inside=False, blocks=None, checkpointed=False, **how):
    """``inside``: imagination is in the loop over the data; else of all states at once, or a block of them at a time."""

    def run(p, data, start, key):
        latent_keys, imagined_keys = c.streams(key, batch, "latent", "imagined")
        times = jnp.arange(length)
        draw = lambda keys, shape: jax.vmap(lambda k: jax.random.normal(k, shape))(keys)  # noqa: E731
        imagined_noise = lambda t: jnp.moveaxis(draw(c.at(imagined_keys, t), (horizon, LATENT)), 0, 1)  # noqa: E731
        latent_noise = jax.vmap(lambda t: draw(c.at(latent_keys, t), (LATENT,)))(times)

        def loss(p):
            def body(carry, x):
                t, x, noise = x
                h = moved(p, *carry, x["action"])
                z, divergence = observed(p, h, x["obs"], noise)
                if not inside:
                    return (h, z), (h, z, divergence)
                point = model_loss(p, h, z, divergence, x["obs"], x["reward"])
                return (h, z), point + imagined_loss(p, h, z, imagined_noise(t), **how)

            body = jax.checkpoint(body, prevent_cse=False) if checkpointed else body
            found = jax.lax.scan(body, start, (times, data, latent_noise))[1]
            if inside:
                return found.mean()
            h, z, divergence = found
            model = model_loss(p, h, z, divergence, data["obs"], data["reward"]).mean()
            dream = lambda t, h, z: imagined_loss(p, h, z, imagined_noise(t), **how)  # noqa: E731
            if blocks is None:  # [H, T, B, LATENT]: rows of states
                noise = jnp.moveaxis(jax.vmap(imagined_noise)(times), 1, 0)
                return model + imagined_loss(p, h, z, noise, **how).mean()
            some = jax.checkpoint(jax.vmap(dream))
            parts = jax.lax.map(lambda x: some(*x), c.in_chunks((times, h, z), blocks))
            return model + parts.mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, horizon, blocks=4):
    k = jax.random.split(jax.random.key(1), 4)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "reward": jax.random.normal(k[1], size),
        "action": jax.nn.one_hot(jax.random.randint(k[2], size, 0, ACTIONS), ACTIONS),
    }  # fmt: skip
    start = jnp.zeros((batch, hidden)), jnp.zeros((batch, LATENT))
    make = lambda **how: by_hand(length, batch, horizon, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch, horizon), "plain": make(), "inside": make(inside=True), "unrolled by 5": make(unroll=5),
        "checkpointed": make(again=True, checkpointed=True), f"blocks of {blocks}": make(blocks=blocks),
    }  # fmt: skip
    return Workload(forms, (params_of(hidden), data, start, jax.random.key(2)))
