"""Hindsight experience replay on BitFlip (Andrychowicz et al. 2017): what was reached is learned as if it had been the goal.

Notice `hindsight`. A `History` gives the steps that followed a transition, `memory[i[:, None] + jnp.arange(n), b]`, and so
the end of its episode; a later state of the same episode becomes the goal, and rewards are computed anew. With 10 bits a
random walk reaches a goal in about 1 of 100 episodes: the same DQN without hindsight hardly learns.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import Carry, Stopped, going_on
from networks import init_mlp, mlp
from recipes import Recipe, main
from tasks import BitFlip, made

import rlfx.envs
from rlfx.training import draw_times

LENGTH, ENVS, UPDATES = 100, 16, 40  # of each environment: 4,000 timesteps, one step of learning at each
CAPACITY, SAMPLES, WARMUP, SHARE = 1_000, 128, 50, 0.8  # SHARE: of samples whose goal is replaced
GAMMA, POLYAK, LEARNING_RATE, EPSILON = 0.9, 0.05, 1e-3, 0.2
BAR = 0.95  # the share of 100 greedy episodes that reach their goal

task = BitFlip(10)
env = made(task)
ACTIONS = task.size


class Transition(NamedTuple):
    bits: jax.Array
    goal: jax.Array
    action: jax.Array
    next_bits: jax.Array
    done: jax.Array


class Learner(NamedTuple):
    params: Any
    target: Any
    opt_state: Any


optimizer = optax.adam(LEARNING_RATE)


def q_values(params, bits, goal):
    return mlp(params, 2.0 * jnp.concatenate([bits, goal]) - 1.0)


def hindsight(x, key, share):
    """The first of the transitions ``x[n]``, maybe with the goal that a later one of its episode reached ("future")."""
    replaced, which = jax.random.split(key)
    last = jnp.where(x.done.any(), jnp.argmax(x.done), x.done.size - 1)
    later = jax.random.randint(which, (), 0, last + 1)
    goal = jnp.where(jax.random.bernoulli(replaced, share), x.next_bits[later], x.goal[0])
    first = jax.tree.map(lambda leaf: leaf[0], x)
    return first._replace(goal=goal)


def td_loss(params, target, x):
    """Of one transition: double DQN; a goal that is reached ends the task with 1."""
    reached = task.reached(x.next_bits, x.goal)
    best = jnp.argmax(q_values(params, x.next_bits, x.goal))
    following = q_values(target, x.next_bits, x.goal)[best]
    aim = jax.lax.stop_gradient(jnp.where(reached, 1.0, GAMMA * jnp.clip(following, 0.0, 1.0)))
    return (q_values(params, x.bits, x.goal)[x.action] - aim) ** 2


def learn(learner, sequences, key, share):
    """One step, from ``sequences[SAMPLES, n]``."""
    keys = jax.random.split(key, SAMPLES)
    transitions = jax.vmap(lambda x, k: hindsight(x, k, share))(sequences, keys)

    def loss(params):
        return jax.vmap(lambda x: td_loss(params, learner.target, x))(transitions).mean()

    changes, opt_state = optimizer.update(jax.grad(loss)(learner.params), learner.opt_state, learner.params)
    params = optax.apply_updates(learner.params, changes)
    return Learner(params, optax.incremental_update(params, learner.target, POLYAK), opt_state)


def make_timestep(envs, share):
    def timestep(_, carry, t):
        bits, goal = env.observe(carry.state)
        best = jnp.argmax(q_values(carry.learner.params, bits, goal)).astype(jnp.int32)
        explore = jax.random.bernoulli(t.key_for("explore"), EPSILON)
        action = jnp.where(explore, env.action_space.sample(t.key_for("any")), best)
        state, step = env.step(t.key_for("env"), carry.state, action)

        transition = Transition(bits, goal, action, step.final_obs[0], step.done)
        memory = rlfx.series(transition, history=carry.memory)
        times, which, key = jax.random.split(t.shared_key, 3)
        i = draw_times(times, (SAMPLES,), t.now, CAPACITY, length=task.size)
        b = jax.random.randint(which, (SAMPLES, 1), 0, envs).repeat(task.size, 1)
        learned = learn(carry.learner, memory[i[:, None] + jnp.arange(task.size), b], key, share)
        learner = jax.tree.map(lambda new, old: jnp.where(t >= WARMUP, new, old), learned, carry.learner)
        return Carry(state, memory.history, learner), step.reward

    return timestep


def greedy(agent, obs, key):
    return jnp.argmax(q_values(agent.carry.learner.value.params, *obs)).astype(jnp.int32)


def make(share, name, *, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(128, 128), mesh=None):
    update = going_on(make_timestep(envs, share), length=length, envs=envs, mesh=mesh)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_mlp(params_key, (2 * task.size, *hidden, ACTIONS))
        bits = jnp.zeros(task.size)
        memory = rlfx.History(CAPACITY, Transition(bits, bits, jnp.int32(0), bits, jnp.bool_(False)), batch=envs)
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Stopped.at_first(Carry(state, memory, rlfx.Shared(Learner(params, params, optimizer.init(params)))))

    return Recipe(name, env, init, update, greedy, updates, 2, 4, length * envs, BAR)


FAMILY = {"her": partial(make, SHARE, "her"), "without": partial(make, 0.0, "her_without")}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
