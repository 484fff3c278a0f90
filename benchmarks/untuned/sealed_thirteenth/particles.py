"""Deep variational reinforcement learning (DVRL, Igl et al. 2018) from what was recorded: a particle filter whose particles are
states of a GRU, drawn anew by their weights at every timestep; their weighted mean is what an actor-critic is told, and a bound
of the likelihood of what was seen is learnt beside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates

OBS, ACTIONS, PARTICLES, LATENT, GAMMA, LAMBDA, BOUND = 16, 5, 8, 8, 0.99, 0.95, 0.1
TOLD = OBS + ACTIONS


def params_of(key, hidden):
    """``prior`` and ``posterior``: of a latent; ``decoder``: of what is seen; ``x`` and ``h``: the GRU."""
    k = jax.random.split(key, 7)
    return {
        "prior": c.mlp_params(k[0], (hidden + ACTIONS, hidden, 2 * LATENT)),
        "posterior": c.mlp_params(k[1], (hidden + TOLD, hidden, 2 * LATENT)),
        "decoder": c.mlp_params(k[2], (hidden + LATENT, hidden, OBS)),
        "x": c.dense(k[3], TOLD + LATENT, 3 * hidden), "h": c.dense(k[4], hidden, 3 * hidden),
        "pi": c.dense(k[5], hidden, ACTIONS), "v": c.dense(k[6], hidden, 1),
    }  # fmt: skip


def normal_of(made):
    mean, spread = jnp.split(made, 2, -1)
    return mean, 0.1 + jax.nn.softplus(spread)


def log_prob(x, mean, std):
    return (-0.5 * ((x - mean) / std) ** 2 - jnp.log(std)).sum(-1)


def filtered(p, h, obs, acted, noise):
    """Particles ``h[PARTICLES, hidden]`` one timestep on, and their logarithmic weights."""
    beside = lambda x: jnp.broadcast_to(x, (len(h), *x.shape))  # noqa: E731
    told = jnp.concatenate([obs, acted])
    mean, std = normal_of(c.mlp(p["posterior"], jnp.concatenate([h, beside(told)], -1)))
    z = mean + std * noise
    prior = normal_of(c.mlp(p["prior"], jnp.concatenate([h, beside(acted)], -1)))
    seen = c.mlp(p["decoder"], jnp.concatenate([h, z], -1))
    log_w = log_prob(z, *prior) - log_prob(z, mean, std) + log_prob(obs, seen, 1.0)
    x = jnp.concatenate([z, beside(told)], -1)
    return gates(c.linear(p["x"], x), c.linear(p["h"], h), h), log_w


def outputs(p, belief):
    return c.linear(p["pi"], belief), c.linear(p["v"], belief)[..., 0]


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    h, log_w = jax.tree.map(lambda m: jnp.where(x["first"], 0.0, m), carry)
    ancestors = jax.random.categorical(t.key_for("ancestors"), stop_gradient(log_w), shape=(PARTICLES,))
    noise = jax.random.normal(t.key_for("noise"), (PARTICLES, LATENT))
    h, log_w = filtered(p, h[ancestors], x["obs"], x["acted"], noise)
    logits, v = outputs(p, jax.nn.softmax(log_w) @ h)
    value = rlfx.series(stop_gradient(v), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    advantage = rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    loss = c.actor_critic_loss(logits, v, jax.nn.log_softmax(logits)[x["action"]], advantage, advantage + stop_gradient(v))
    bound = jax.nn.logsumexp(log_w) - jnp.log(PARTICLES)
    return loss - BOUND * bound, (h, log_w)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, carry, data, key: jax.value_and_grad(lambda p: loss_fn((p, data), carry, key)[0])(p)


# -- by hand, as usual


def drawing(key, batch):
    """Of a timestep: Gumbel noise ``[B, PARTICLES, PARTICLES]`` of the ancestors, and noise of latents."""
    ancestors, noises = c.streams(key, batch, "ancestors", "noise")

    def of(t):
        gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (PARTICLES, PARTICLES)))(c.at(ancestors, t))
        return gumbel, jax.vmap(lambda k: jax.random.normal(k, (PARTICLES, LATENT)))(c.at(noises, t))

    return of


def learnt(logits, v, log_w, data):
    """Summed over ``[T, B]``."""
    fixed = stop_gradient(v)
    advantage = c.gae(fixed, jnp.zeros_like(v[0]), data["reward"], data["done"], GAMMA, LAMBDA)
    chosen = c.pick(jax.nn.log_softmax(logits), data["action"])
    bound = jax.nn.logsumexp(log_w, -1) - jnp.log(PARTICLES)
    return (c.actor_critic_loss(logits, v, chosen, advantage, advantage + fixed) - BOUND * bound).sum()


def plain(length, batch):
    def run(p, carry, data, key):
        draw = drawing(key, batch)

        def loss(p):
            def one(carry, x, gumbel, noise):
                h, log_w = jax.tree.map(lambda m: jnp.where(x["first"], 0.0, m), carry)
                ancestors = jnp.argmax(stop_gradient(log_w) + gumbel, -1)
                h, log_w = filtered(p, h[ancestors], x["obs"], x["acted"], noise)
                return (h, log_w), (*outputs(p, jax.nn.softmax(log_w) @ h), log_w)

            def step(carry, x):
                x, t = x
                return jax.vmap(one)(carry, x, *draw(t))

            made = jax.lax.scan(step, carry, (data, jnp.arange(length)))[1]
            return learnt(*made, data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
