"""Analytic policy gradients on Pendulum-v1: the gradient of the return itself, through the dynamics (SHAC, Xu et al. 2022).

Notice `differentiable=True`, and that there is no score function, no log-probability and no sampled baseline: `jax.grad`
of a program whose loss is the negative return goes through the environment's steps. A window is short, so that gradients
neither explode nor vanish, and a critic says what follows it: its value of the state that the window ends in is differentiated,
too. The critic learns from lambda returns in the same loss; `stop_gradient` says what is a constant.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx.envs

LENGTH, ENVS, UPDATES = 16, 64, 1_500
GAMMA, LAMBDA, NOISE, REWARD_SCALE, POLYAK = 0.97, 0.95, 0.5, 0.1, 0.2
RATES = {"actor": 1e-3, "critic": 5e-3}  # the critic has to be ahead: its slope is what the actor follows
BAR = -200.0  # greedy, the mean of 100 episodes

env = rlfx.envs.rescale_action(rlfx.envs.make("Pendulum-v1", differentiable=True))
(ACTIONS,), (OBS,) = env.action_space.shape, env.observation_space.shape


def actor(params, obs):
    return jnp.tanh(mlp(params, obs))


def critic(params, obs):
    return mlp(params, obs)[0]


class Carry(NamedTuple):
    state: Any
    weight: jax.Array  # of this timestep's reward: the discount since the window, or the episode, began


def apg(params, carry, t):
    learned, target = params
    obs = env.observe(carry.state)
    noise = NOISE * jax.random.normal(t.key_for("noise"), (ACTIONS,))
    action = jnp.clip(actor(learned["actor"], obs) + noise, -1.0, 1.0)
    state, step = env.step(t.key_for("env"), carry.state, action)

    scaled = step.replace(reward=REWARD_SCALE * step.reward)
    ends = step.done | (t == t.length - 1)
    following = GAMMA * jnp.where(ends & ~step.terminated, critic(target, step.final_obs), 0.0)
    reached = carry.weight * (scaled.reward + following)

    fixed = stop_gradient(obs)
    value = critic(target, fixed)
    next_value = rlfx.next_value(lambda obs: critic(target, obs), scaled, value)
    aim = stop_gradient(rlfx.lambda_return(scaled, next_value, gamma=GAMMA, lam=LAMBDA))
    error = critic(learned["critic"], fixed) - aim
    weight = jnp.where(step.done, 1.0, GAMMA * carry.weight)
    return 0.5 * error**2 - reached, Carry(state, weight), step.reward


class Agent(NamedTuple):
    params: Any
    target: Any  # of the critic
    opt_state: Any
    state: Any


def greedy(agent, obs, key):
    return actor(agent.params["actor"], obs)


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    loss_fn = rlfx.compile(apg, length=length, batch=envs, mesh=mesh)
    optimizer = optax.multi_transform(
        {
            part: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(rate, 0.0, updates)))
            for part, rate in RATES.items()
        },
        {part: part for part in RATES},
    )

    def init(key):
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        params = {
            "actor": init_mlp(actor_key, (OBS, *hidden, ACTIONS), 0.01),
            "critic": init_mlp(critic_key, (OBS, *hidden, 1)),
        }
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, params["critic"], optimizer.init(params), state)

    def update(agent, key):
        def loss(params):
            return loss_fn((params, agent.target), Carry(agent.state, jnp.ones(envs)), key)

        grads, (carry, reward) = jax.grad(loss, has_aux=True)(agent.params)
        changes, opt_state = optimizer.update(grads, agent.opt_state, agent.params)
        params = optax.apply_updates(agent.params, changes)
        target = optax.incremental_update(params["critic"], agent.target, POLYAK)
        return Agent(params, target, opt_state, carry.state), {"reward": reward.mean()}

    return Recipe("apg", env, init, update, greedy, updates, 75, 150, length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
