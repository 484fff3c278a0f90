"""A2C on CartPole-v1: five-step returns that bootstrap from the critic, actor and critic in one loss.

Notice that the loss is written at the timestep where its action is taken, though its target lies up to five timesteps
ahead. `rlfx.next_value` is the critic on the next observation: on `final_obs` where an episode was cut by its time
limit, and on the observation of the final carry where the rollout ends.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import actor, critic, init_actor_critic
from recipes import Recipe, main

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA, STEPS, ENTROPY, VALUE = 0.99, 5, 0.01, 0.5
LENGTH, ENVS, UPDATES, LEARNING_RATE = 32, 32, 1_000, 3e-3
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held


def a2c(params, state, t):
    obs = env.observe(state)
    log_probs, value = actor(params, obs), critic(params, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)

    next_value = rlfx.next_value(lambda obs: critic(params, obs), step, value)
    target = jax.lax.stop_gradient(rlfx.n_step_return(step, next_value, gamma=GAMMA, n=STEPS))
    advantage = jax.lax.stop_gradient(target - value)

    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    loss = VALUE * (value - target) ** 2 - log_probs[action] * advantage - ENTROPY * entropy
    falls = 1000 * rlfx.mean(step.terminated)
    return loss, state, falls


def make_update(loss_fn, optimizer):
    """``update((params, opt_state, state), key) -> (..., falls per 1,000 steps)``."""

    def update(agent, key):
        params, opt_state, state = agent
        (_, (state, falls)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, state), falls

    return update


def train(program=a2c, *, length=32, batch=64, updates=600, seed=0, learning_rate=3e-3):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(program, length=length, batch=batch, mesh=rlfx.use_all_cores(batch=batch))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(learning_rate, decay=0.99, eps=1e-5))
    params_key, env_key, train_key = jax.random.split(jax.random.key(seed), 3)
    params = init_actor_critic(params_key, (4, 64, 64, 2))
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    train = jax.jit(lambda agent, keys: jax.lax.scan(make_update(loss_fn, optimizer), agent, keys))
    _, falls = train((params, optimizer.init(params), state), jax.random.split(train_key, updates))
    return falls


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    state: Any


def greedy(agent, obs, key):
    return jnp.argmax(actor(agent.params, obs)).astype(jnp.int32)


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    loss_fn = rlfx.compile(a2c, length=length, batch=envs, mesh=mesh)
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(rate, decay=0.99, eps=1e-5))
    one = make_update(loss_fn, optimizer)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_actor_critic(params_key, (4, *hidden, 2))
        return Agent(params, optimizer.init(params), jax.vmap(env.reset)(jax.random.split(env_key, envs)))

    def update(agent, key):
        following, falls = one(agent, key)
        return Agent(*following), {"falls per 1,000 steps": falls}

    return Recipe("a2c", env, init, update, greedy, updates, 50, 50, length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
