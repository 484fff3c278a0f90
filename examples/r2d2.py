"""R2D2 on a T-maze: recurrent Q-learning from sequences that replay keeps (Kapturowski et al. 2019).

Notice that sequences are read from a `History`, `memory[i[:, None] + jnp.arange(n), b]`, with the memory that the network had
there when it acted. `unrolled` is a program of its own, over the timesteps of a sequence: its first ones only bring the memory
up to date (the burn-in), the others are learned, with targets that are `rlfx.q_lambda` of the same sequence. It is called, and
differentiated, at a timestep of the program that acts. What to do at the end of the corridor was seen at its beginning alone.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import Stopped, going_on
from networks import init_mlp, mlp
from recipes import Recipe, main
from recurrent_ppo import gru, init_gru
from tasks import TMaze, made

import rlfx.envs
from rlfx.training import draw_times

LENGTH, ENVS, UPDATES, HIDDEN = 100, 16, 60, 16  # of each environment: 6,000 timesteps, one step of learning at every second
CAPACITY, SAMPLES, BURN, LEARNED, WARMUP, EVERY = 6_000, 128, 4, 12, 100, 2
GAMMA, LAMBDA, POLYAK, LEARNING_RATE, EPSILON, EXPLORE = 0.97, 0.8, 0.02, 2e-3, 0.05, 2_000
BAR = 0.95  # the mean return of 100 greedy episodes, of at most 1; in half of the updates, and held

env = made(TMaze())
ACTIONS, (OBS,) = env.action_space.n, env.observation_space.shape


def q_values(params, h, obs):
    """``(h, [ACTIONS])``."""
    h = gru(params["gru"], h, jnp.tanh(mlp(params["embed"], obs)))
    return h, mlp(params["head"], h)


class Transition(NamedTuple):
    obs: jax.Array
    h: jax.Array  # the memory before this observation
    action: jax.Array
    reward: jax.Array
    done: jax.Array


class Learner(NamedTuple):
    params: Any
    target: Any
    opt_state: Any


class Carry(NamedTuple):
    state: Any
    h: jax.Array
    memory: rlfx.History
    learner: Any  # Shared


def unrolled(networks, hs, t):
    """A timestep of a stored sequence: the loss of both networks' values along it; nothing of the burn-in."""
    params, target, sequence = networks
    x = rlfx.inputs(sequence)[t]
    learns = t >= BURN
    h, of_target = (jax.lax.select(t == BURN, jax.lax.stop_gradient(h), h) for h in hs)
    h, q = q_values(params, h, x.obs)
    of_target, q_target = q_values(target, of_target, x.obs)

    # Double: what is learned chooses, the target network judges. T-maze's episodes end, and are never cut.
    judged = jnp.where(jnp.arange(ACTIONS) == jnp.argmax(q), q_target, 0.0).sum()
    next_value = rlfx.series(judged, end=judged)[t + 1]
    # What follows the last one was not stored: it is a value for the one before it, and learns nothing itself.
    step = SimpleNamespace(reward=x.reward, terminated=x.done, truncated=t >= t.length - 2)
    aim = jax.lax.stop_gradient(rlfx.q_lambda(step, next_value, True, gamma=GAMMA, lam=LAMBDA))
    error = q[x.action] - aim
    hs = tuple(jnp.where(x.done, 0.0, h) for h in (h, of_target))
    return jnp.where(learns & (t < t.length - 1), error**2, 0.0), hs


sequence_loss = rlfx.compile(unrolled, length=BURN + LEARNED, batch=SAMPLES)


def learn(optimizer, learner, sequences):
    """One step, from ``sequences[SAMPLES, BURN + LEARNED]``."""
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sequences)

    def loss(params):
        stored = by_time.h[0]
        return sequence_loss((params, learner.target, by_time), (stored, stored))[0]

    changes, opt_state = optimizer.update(jax.grad(loss)(learner.params), learner.opt_state, learner.params)
    params = optax.apply_updates(learner.params, changes)
    return Learner(params, optax.incremental_update(params, learner.target, POLYAK), opt_state)


def make_timestep(optimizer, envs):
    def timestep(_, carry, t):
        obs = env.observe(carry.state)
        h, q = q_values(carry.learner.params, carry.h, obs)
        explore = jax.random.bernoulli(t.key_for("explore"), jnp.maximum(EPSILON, 1.0 - t / EXPLORE))
        action = jnp.where(explore, env.action_space.sample(t.key_for("any")), jnp.argmax(q).astype(jnp.int32))
        state, step = env.step(t.key_for("env"), carry.state, action)

        memory = rlfx.series(Transition(obs, carry.h, action, step.reward, step.done), history=carry.memory)
        times, which = jax.random.split(t.shared_key)
        n = BURN + LEARNED
        i = draw_times(times, (SAMPLES,), t.now, CAPACITY, length=n)
        b = jax.random.randint(which, (SAMPLES, 1), 0, envs).repeat(n, 1)
        sequences = memory[i[:, None] + jnp.arange(n), b]
        learns = (t >= WARMUP) & (t % EVERY == 0)
        learner = jax.lax.cond(learns, partial(learn, optimizer), lambda learner, _: learner, carry.learner, sequences)
        return Carry(state, jnp.where(step.done, 0.0, h), memory.history, learner), step.reward

    return timestep


def greedy(agent, h, obs, key):
    h, q = q_values(agent.carry.learner.value.params, h, obs)
    return jnp.argmax(q).astype(jnp.int32), h


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=HIDDEN, mesh=None):
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates * length // EVERY)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(rate))
    update = going_on(make_timestep(optimizer, envs), length=length, envs=envs, mesh=mesh)

    def init(key):
        embed, recurrent, head, env_key = jax.random.split(key, 4)
        params = {
            "embed": init_mlp(embed, (OBS, hidden), 2**0.5),
            "gru": init_gru(recurrent, hidden, hidden),
            "head": init_mlp(head, (hidden, ACTIONS)),
        }
        h, nothing = jnp.zeros(hidden), jnp.float32(0.0)
        like = Transition(jnp.zeros(OBS), h, jnp.int32(0), nothing, jnp.bool_(False))
        carry = Carry(
            jax.vmap(env.reset)(jax.random.split(env_key, envs)), jnp.zeros((envs, hidden)),
            rlfx.History(CAPACITY, like, batch=envs), rlfx.Shared(Learner(params, params, optimizer.init(params))),
        )  # fmt: skip
        return Stopped.at_first(carry)

    memory = jnp.zeros(hidden)
    return Recipe("r2d2", env, init, update, greedy, updates, 3, 6, length * envs, BAR, memory=memory)


if __name__ == "__main__":
    sys.exit(main(make))
