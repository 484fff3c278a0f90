"""REINFORCE on CartPole-v1: Monte-Carlo returns, and n-step returns by editing one slice.

Notice `future = slice(t, None)`: `reward[t:]` is every reward from now on, `reward[t:t + n]` the next n. Nothing else
changes between the two programs. The first waits for the end of the rollout and learns backwards; the second needs only
n timesteps at once, and rlfx derives both schedules from the slice.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA = 0.99
LENGTH, ENVS, UPDATES, LEARNING_RATE = 250, 32, 200, 1e-2
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held


def make_program(n=None, normalize=True):
    """The per-timestep program; ``n`` rewards ahead, or all of them."""

    def reinforce(params, state, t):
        log_probs = jax.nn.log_softmax(mlp(params, env.observe(state)))
        action = jax.random.categorical(t.key_for("action"), log_probs)
        state, step = env.step(t.key_for("env"), state, action)

        reward = rlfx.series(step.reward)
        discount = rlfx.series(jnp.where(step.done, 0.0, GAMMA))  # nothing is counted beyond the end of an episode
        future = slice(t, None) if n is None else slice(t, t + n)
        returns = rlfx.discounted_sum(reward[future], discount[future])

        if normalize:  # over all timesteps of all environments: a baseline, and a scale
            returns = (returns - rlfx.mean(returns)) / (rlfx.std(returns) + 1e-6)
        falls = 1000 * rlfx.mean(step.terminated)
        return -log_probs[action] * returns, state, falls

    return reinforce


def make_update(loss_fn, optimizer):
    """``update((params, opt_state, state), key) -> (..., falls per 1,000 steps)``."""

    def update(agent, key):
        params, opt_state, state = agent
        (_, (state, falls)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, state), falls

    return update


def train(n=None, *, length=250, batch=32, updates=100, seed=0, learning_rate=1e-2):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(make_program(n), length=length, batch=batch, mesh=rlfx.use_all_cores(batch=batch))
    optimizer = optax.adam(learning_rate)
    params_key, env_key, train_key = jax.random.split(jax.random.key(seed), 3)
    params = init_mlp(params_key, (4, 64, 2), 0.01)
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    print(loss_fn.explain(params, state))
    train = jax.jit(lambda agent, keys: jax.lax.scan(make_update(loss_fn, optimizer), agent, keys))
    _, falls = train((params, optimizer.init(params), state), jax.random.split(train_key, updates))
    return falls


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    state: Any


def greedy(agent, obs, key):
    return jnp.argmax(mlp(agent.params, obs)).astype(jnp.int32)


def make(n, name, *, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64,), mesh=None):
    loss_fn = rlfx.compile(make_program(n), length=length, batch=envs, mesh=mesh)
    optimizer = optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, updates))
    one = make_update(loss_fn, optimizer)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_mlp(params_key, (4, *hidden, 2), 0.01)
        return Agent(params, optimizer.init(params), jax.vmap(env.reset)(jax.random.split(env_key, envs)))

    def update(agent, key):
        following, falls = one(agent, key)
        return Agent(*following), {"falls per 1,000 steps": falls}

    return Recipe(name, env, init, update, greedy, updates, 10, 10, length * envs, BAR)


FAMILY = {"monte_carlo": partial(make, None, "reinforce"), "n_step": partial(make, 25, "n_step_reinforce")}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
