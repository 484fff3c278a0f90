"""PQN on CartPole-v1: Q-learning without a replay buffer and without a target network, on many environments at once.

Notice that this is PPO's form with another loss: a rollout, targets at each of its timesteps, epochs of minibatches. The
targets are `rlfx.q_lambda`. Layers are normalised, which is what keeps Q-learning stable here (Gallici et al. 2024).
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import descent
from networks import init_mlp
from recipes import Recipe, main

import rlfx.envs

LENGTH, ENVS, EPOCHS, MINIBATCHES, UPDATES = 32, 64, 4, 8, 400
GAMMA, LAMBDA, LEARNING_RATE, EPSILON, EXPLORE, REWARD_SCALE = 0.99, 0.8, 1e-3, 0.05, 0.3, 0.1
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held

env = rlfx.envs.make("CartPole-v1")
ACTIONS, (OBS,) = env.action_space.n, env.observation_space.shape


def q_values(layers, obs):
    """``[ACTIONS]``, of a network whose hidden layers are normalised."""
    *hidden, (w_out, b_out) = layers
    x = obs
    for w, b in hidden:
        x = x @ w + b
        x = jax.nn.relu((x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5))
    return x @ w_out + b_out


class Carry(NamedTuple):
    state: Any
    epsilon: jax.Array  # Shared


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    target: jax.Array


def act(params, carry, t):
    obs = env.observe(carry.state)
    q = q_values(params, obs)
    explore = jax.random.bernoulli(t.key_for("explore"), carry.epsilon)
    best = jnp.argmax(q).astype(jnp.int32)
    action = jnp.where(explore, env.action_space.sample(t.key_for("any")), best)
    state, step = env.step(t.key_for("env"), carry.state, action)

    next_value = rlfx.next_value(lambda obs: q_values(params, obs).max(), step, q.max())
    scaled = step.replace(reward=REWARD_SCALE * step.reward)
    target = rlfx.q_lambda(scaled, next_value, True, gamma=GAMMA, lam=LAMBDA)
    return Carry(state, carry.epsilon), (Sample(obs, action, target), step.terminated)


def q_loss(params, batch):
    q = jax.vmap(lambda x: q_values(params, x.obs)[x.action])(batch)
    return 0.5 * ((q - batch.target) ** 2).mean()


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    state: Any
    done: jax.Array  # updates so far


def greedy(agent, obs, key):
    return jnp.argmax(q_values(agent.params, obs)).astype(jnp.int32)


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    rollout = rlfx.unroll(act, length=length, batch=envs, mesh=mesh)
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates * EPOCHS * MINIBATCHES)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.radam(rate))
    step = descent(q_loss, optimizer)
    epsilon = optax.linear_schedule(1.0, EPSILON, int(EXPLORE * updates))

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_mlp(params_key, (OBS, *hidden, ACTIONS))
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), state, jnp.int32(0))

    def update(agent, key):
        act_key, shuffle_key = jax.random.split(key)
        explores = rlfx.Shared(jnp.asarray(epsilon(agent.done), jnp.float32))
        carry, (samples, fell) = rollout(agent.params, Carry(agent.state, explores), act_key)
        learner, _ = rlfx.minibatch_epochs(
            step, agent[:2], samples, epochs=EPOCHS, minibatches=MINIBATCHES, key=shuffle_key, mesh=mesh
        )
        return Agent(*learner, carry.state, agent.done + 1), {"falls per 1,000 steps": 1000 * fell.mean()}

    return Recipe("pqn", env, init, update, greedy, updates, 10, 10, length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
