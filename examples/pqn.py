"""PQN: Q-learning without a replay buffer and without a target network, on many environments at once; CartPole and Breakout.

Notice that this is PPO's form with another loss: a rollout, targets at each of its timesteps, epochs of minibatches. The
targets are `rlfx.q_lambda`. Layers are normalised, which is what keeps Q-learning stable here (Gallici et al. 2024).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import descent
from networks import init_cnn, init_mlp, patches
from recipes import Recipe, main

import rlfx.envs

GAMMA, EPSILON = 0.99, 0.05


# -- networks, of one observation: the values of its actions


def normed(x, layer):
    w, b = layer
    x = x @ w + b
    centred = x - x.mean(-1, keepdims=True)
    return jax.nn.relu(centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5))


def init_vector(env, key, hidden):
    return init_mlp(key, (*env.observation_space.shape, *hidden, env.action_space.n))


def of_vector(layers, obs):
    """``[actions]``, of a network whose hidden layers are normalised."""
    *hidden, (w_out, b_out) = layers
    for layer in hidden:
        obs = normed(obs, layer)
    return obs @ w_out + b_out


def init_board(env, key, hidden):
    return init_cnn(key, env.observation_space.shape, hidden[0], (*hidden[1:], env.action_space.n))


def of_board(params, obs):
    (kernel,) = params["kernel"]
    return of_vector(params["head"], normed(patches(obs), kernel).reshape(-1))


@dataclass(frozen=True)
class Task:
    """What is learned, how much of it, and what is to be reached: the mean return of 100 greedy episodes."""

    name: str
    env: Any
    bar: float
    updates: int
    init: Callable = init_vector
    network: Callable = of_vector
    length: int = 32
    envs: int = 64
    hidden: tuple[int, ...] = (64, 64)
    epochs: int = 4
    minibatches: int = 8
    rate: float = 1e-3
    lam: float = 0.8
    scale: float = 0.1  # of rewards
    explore: float = 0.3  # of the updates, until few actions are random
    average: float = 1.0  # of the new weights, at each update, in those that are evaluated
    every: int = 10  # updates from one evaluation to the next


#: CartPole's bar is reached in half of the updates and held by an average of some 20 updates; the last weights fall now and then.
CARTPOLE = Task("pqn", rlfx.envs.make("CartPole-v1"), 475.0, updates=400, average=0.05)
BREAKOUT = Task(
    "pqn_breakout", rlfx.envs.make("Breakout-MinAtar"), 10.0, 240, init_board, of_board, envs=128, hidden=(16, 128), epochs=2,
    minibatches=32, rate=1e-3, lam=0.65, scale=1.0, explore=0.5, every=20,
)  # fmt: skip


# -- the program: one timestep of one environment


class Carry(NamedTuple):
    state: Any
    epsilon: jax.Array  # Shared


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    target: jax.Array


def make_act(task):
    env = task.env

    def act(params, carry, t):
        obs = env.observe(carry.state)
        q = task.network(params, obs)
        explore = jax.random.bernoulli(t.key_for("explore"), carry.epsilon)
        best = jnp.argmax(q).astype(jnp.int32)
        action = jnp.where(explore, env.action_space.sample(t.key_for("any")), best)
        state, step = env.step(t.key_for("env"), carry.state, action)

        next_value = rlfx.next_value(lambda obs: task.network(params, obs).max(), step, q.max())
        scaled = step.replace(reward=task.scale * step.reward)
        target = rlfx.q_lambda(scaled, next_value, True, gamma=GAMMA, lam=task.lam)
        return Carry(state, carry.epsilon), (Sample(obs, action, target), step.terminated)

    return act


# -- the learner


def q_loss(task, params, batch):
    q = jax.vmap(lambda x: task.network(params, x.obs)[x.action])(batch)
    return 0.5 * ((q - batch.target) ** 2).mean()


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    state: Any
    done: jax.Array  # updates so far
    average: Any  # of the parameters


def make(task, *, length=None, envs=None, updates=None, hidden=None, mesh=None):
    """Of a task; its own numbers where none are given."""
    length, envs, updates = length or task.length, envs or task.envs, updates or task.updates
    rollout = rlfx.unroll(make_act(task), length=length, batch=envs, mesh=mesh)
    rate = optax.linear_schedule(task.rate, 0.0, updates * task.epochs * task.minibatches)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.radam(rate))
    step = descent(partial(q_loss, task), optimizer)
    epsilon = optax.linear_schedule(1.0, EPSILON, int(task.explore * updates))

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = task.init(task.env, params_key, hidden or task.hidden)
        state = jax.vmap(task.env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), state, jnp.int32(0), params)

    def update(agent, key):
        act_key, shuffle_key = jax.random.split(key)
        explores = rlfx.Shared(jnp.asarray(epsilon(agent.done), jnp.float32))
        carry, (samples, fell) = rollout(agent.params, Carry(agent.state, explores), act_key)
        learner, _ = rlfx.minibatch_epochs(
            step, agent[:2], samples, epochs=task.epochs, minibatches=task.minibatches, key=shuffle_key, mesh=mesh
        )
        average = optax.incremental_update(learner[0], agent.average, task.average)
        return Agent(*learner, carry.state, agent.done + 1, average), {"ends per 1,000 steps": 1000 * fell.mean()}

    def greedy(agent, obs, key):
        return jnp.argmax(task.network(agent.average, obs)).astype(jnp.int32)

    return Recipe(task.name, task.env, init, update, greedy, updates, 10, task.every, length * envs, task.bar)


FAMILY = {"cartpole": partial(make, CARTPOLE), "breakout": partial(make, BREAKOUT)}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
