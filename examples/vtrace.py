"""V-trace on CartPole-v1: the actor's parameters lag behind the learner's, as in IMPALA.

Notice that the program acts with one set of parameters and learns another: `log_rho` is the log-ratio of the two
policies for the action taken, and `rlfx.vtrace` gives the critic's target and the policy's advantage from it. Only
`params["learner"]` is differentiated; the actor's copy is data.
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
GAMMA, LAMBDA, ENTROPY, VALUE = 0.99, 0.95, 0.01, 0.5
LENGTH, ENVS, UPDATES, LAG, LEARNING_RATE = 32, 32, 1_000, 4, 2e-3
REWARD_SCALE = 0.1  # values of the size of log-probabilities, whose gradients are clipped together
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held


def impala(params, state, t):
    obs = env.observe(state)
    behaviour = actor(params["actor"], obs)
    action = jax.random.categorical(t.key_for("action"), behaviour)
    state, step = env.step(t.key_for("env"), state, action)

    learner = params["learner"]
    log_probs, value = actor(learner, obs), critic(learner, obs)
    scaled = step.replace(reward=REWARD_SCALE * step.reward)
    next_value = rlfx.next_value(lambda obs: critic(learner, obs), scaled, value)
    log_rho = log_probs[action] - behaviour[action]
    target, advantage = jax.lax.stop_gradient(
        rlfx.vtrace(scaled, value, next_value, log_rho, gamma=GAMMA, lam=LAMBDA, clip_rho=1.0, clip_c=1.0)
    )

    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    loss = VALUE * (value - target) ** 2 - log_probs[action] * advantage - ENTROPY * entropy
    return loss, state, 1000 * rlfx.mean(step.terminated)


def make_update(loss_fn, optimizer, lag):
    """``update((learner, actor, opt_state, state), (i, key))``; every ``lag`` updates the actor gets new parameters."""

    def update(agent, i_and_key):
        learner, behaviour, opt_state, state = agent
        i, key = i_and_key
        behaviour = jax.tree.map(lambda new, old: jnp.where(i % lag == 0, new, old), learner, behaviour)

        def loss(learner):
            return loss_fn({"learner": learner, "actor": behaviour}, state, key)

        (_, (state, falls)), grads = jax.value_and_grad(loss, has_aux=True)(learner)
        updates, opt_state = optimizer.update(grads, opt_state, learner)
        return (optax.apply_updates(learner, updates), behaviour, opt_state, state), falls

    return update


def train(*, length=32, batch=64, updates=400, lag=4, seed=0):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(impala, length=length, batch=batch, mesh=rlfx.use_all_cores(batch=batch))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
    params_key, env_key, train_key = jax.random.split(jax.random.key(seed), 3)
    params = init_actor_critic(params_key, (4, 64, 64, 2))
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    train = jax.jit(lambda agent, xs: jax.lax.scan(make_update(loss_fn, optimizer, lag), agent, xs))
    xs = (jnp.arange(updates), jax.random.split(train_key, updates))
    _, falls = train((params, params, optimizer.init(params), state), xs)
    return falls


class Agent(NamedTuple):
    learner: Any
    actor: Any  # what acts: the learner's parameters of up to LAG - 1 updates ago
    opt_state: Any
    state: Any
    done: jax.Array  # updates so far


def greedy(agent, obs, key):
    return jnp.argmax(actor(agent.learner, obs)).astype(jnp.int32)


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, lag=LAG, hidden=(64, 64), mesh=None):
    loss_fn = rlfx.compile(impala, length=length, batch=envs, mesh=mesh)
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    one = make_update(loss_fn, optimizer, lag)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_actor_critic(params_key, (4, *hidden, 2))
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, params, optimizer.init(params), state, jnp.int32(0))

    def update(agent, key):
        following, falls = one(agent[:4], (agent.done, key))
        return Agent(*following, agent.done + 1), {"falls per 1,000 steps": falls}

    return Recipe("impala", env, init, update, greedy, updates, 50, 50, length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
