"""Sinkhorn imitation (Papagiannis and Li 2022; rewards as PWIL's, Dadashi et al. 2021): the reward of a timestep is what it
costs to move it to where an expert was, in the optimal transport (Cuturi 2013) of the whole trajectory to the expert's. What
costs how much is learnt against the policy, through Sinkhorn's iterations (Genevay et al. 2018); an advantage actor critic
learns from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, ROUNDS, SMOOTH, GAMMA, LAMBDA, CRITIC = 12, 4, 8, 0.2, 0.99, 0.95, 0.5
relu = jax.nn.relu


def params_of(key, hidden, code):
    k = jax.random.split(key, 3)
    return {
        "pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)),
        "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
        "code": c.mlp_params(k[2], (OBS + ACTIONS, hidden, hidden, code)),
    }


def codes(layers, obs, action):
    x = c.mlp(layers, jnp.concatenate([obs, jax.nn.one_hot(action, ACTIONS)], -1), relu)
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def program(params, carry, t):
    p, data, expert = params
    x = rlfx.inputs(data)[t]
    goals = codes(p["code"], expert["obs"], expert["action"])
    cost = 1.0 - goals @ codes(p["code"], x["obs"], x["action"])
    wanted = jnp.log(t.length / len(goals))  # an expert's timestep gets as much as every other one
    price = jnp.zeros(len(goals))
    for _ in range(ROUNDS):
        mine = -jax.nn.logsumexp((price - cost) / SMOOTH)
        given = rlfx.series(mine - cost / SMOOTH)[:]
        price = SMOOTH * (wanted - jax.nn.logsumexp(given, axis=0))
    distance = (jax.nn.softmax((price - cost) / SMOOTH) * cost).sum()

    log_p, value = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"])), c.mlp(p["v"], x["obs"])[0]
    step = c.Step(-stop_gradient(distance), x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=LAMBDA))
    target = stop_gradient(advantage + value)
    loss = c.actor_critic_loss(log_p, value, log_p[x["action"]], advantage, target)
    return loss - CRITIC * distance, carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, expert: jax.value_and_grad(lambda p: loss_fn((p, data, expert), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def distances(cost):
    """Of ``cost[T, E]``, what every timestep costs: ``[T]``."""
    wanted = jnp.log(cost.shape[0] / cost.shape[1])
    price = jnp.zeros(cost.shape[1])
    for _ in range(ROUNDS):
        mine = -jax.nn.logsumexp((price - cost) / SMOOTH, axis=1)
        price = SMOOTH * (wanted - jax.nn.logsumexp(mine[:, None] - cost / SMOOTH, axis=0))
    return (jax.nn.softmax((price - cost) / SMOOTH) * cost).sum(1)


def acted(logits, value, distance, data):
    """The loss of the actor and critic, of ``[T, B]``, summed."""
    log_p = jax.nn.log_softmax(logits)
    gained = c.gae(value, jnp.zeros_like(value[0]), -stop_gradient(distance), data["done"], GAMMA, LAMBDA)
    advantage = stop_gradient(gained)
    log_prob = c.pick(log_p, data["action"])
    return c.actor_critic_loss(log_p, value, log_prob, advantage, stop_gradient(advantage + value)).sum()


def plain(length, batch):
    def run(p, data, expert):
        def loss(p):
            goals = codes(p["code"], expert["obs"], expert["action"])
            cost = 1.0 - codes(p["code"], data["obs"], data["action"]) @ goals.T
            distance = jax.vmap(distances, 1, 1)(cost)
            logits, value = c.mlp(p["pi"], data["obs"]), c.mlp(p["v"], data["obs"])[..., 0]
            return (acted(logits, value, distance, data) - CRITIC * distance.sum()) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
