"""DQN and what became of it, on CartPole-v1: double, dueling, prioritised, n-step, distributional. Each is a value of `Parts`.

Notice that the timestep does not know which of them it is. A network gives, for each action, what an estimate takes: a
number, or the logits of a distribution of returns. The replay says which times of which environments are read. Neither
varies with the environment, so `memory[i, b]`, and all of learning, happens once for the batch, and is a `Shared` carry.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import Stopped, going_on
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx.envs
from rlfx.training import Priorities, draw_times, n_step

LENGTH, ENVS, UPDATES = 250, 16, 128  # of each environment: 32,000 timesteps, one step of learning at each
CAPACITY, SAMPLES, WARMUP = 5_000, 256, 250
GAMMA, POLYAK, FIRST_RATE, LAST_RATE, DECAY = 0.99, 0.1, 1e-3, 1e-5, 12_000
EPSILON, EXPLORE_UNTIL, REWARD_SCALE = 0.05, 2_000, 0.1
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held

env = rlfx.envs.make("CartPole-v1")
ACTIONS, (OBS,) = env.action_space.n, env.observation_space.shape


# -- parts: networks, estimates of returns, which actions follow, replay


def init_plain(key, hidden, atoms):
    return init_mlp(key, (OBS, *hidden, ACTIONS * atoms))


def plain(params, obs):
    """``[ACTIONS, atoms]``."""
    return mlp(params, obs).reshape(ACTIONS, -1)


def init_dueling(key, hidden, atoms):
    *hidden, last = hidden
    body, value, advantage = jax.random.split(key, 3)
    return {
        "body": init_mlp(body, (OBS, *hidden), 2**0.5),
        "value": init_mlp(value, (hidden[-1], last, atoms)),
        "advantage": init_mlp(advantage, (hidden[-1], last, ACTIONS * atoms)),
    }


def dueling(params, obs):
    """A value of the observation, and advantages that are 0 in the mean (Wang et al. 2016, eq. 9)."""
    x = jnp.tanh(mlp(params["body"], obs))
    advantage = mlp(params["advantage"], x).reshape(ACTIONS, -1)
    return mlp(params["value"], x) + advantage - advantage.mean(0)


@dataclass(frozen=True)
class Expectation:
    """Returns by their mean."""

    atoms: int = 1

    def mean(self, x):
        return x[..., 0]

    def loss(self, x, reward, discount, following):
        """``(loss, error)`` of what the network gave for the action: the Huber loss of the TD error."""
        error = x[0] - (reward + discount * following[0])
        return optax.losses.huber_loss(error), error


@dataclass(frozen=True)
class Distribution:
    """Returns by the probabilities of ``atoms`` values from ``low`` to ``high`` (Bellemare et al. 2017)."""

    atoms: int = 51
    low: float = 0.0
    high: float = 100.0 * REWARD_SCALE

    @property
    def support(self):
        return jnp.linspace(self.low, self.high, self.atoms)

    def mean(self, x):
        return jax.nn.softmax(x) @ self.support

    def loss(self, x, reward, discount, following):
        """The cross-entropy to what follows, moved and put back onto the support (Alg. 1)."""
        width = (self.high - self.low) / (self.atoms - 1)
        moved = jnp.clip(reward + discount * self.support, self.low, self.high)
        share = jnp.clip(1 - jnp.abs(moved[None] - self.support[:, None]) / width, 0, 1)  # [to, from]
        aim = share @ jax.nn.softmax(following)
        loss = -jnp.sum(aim * jax.nn.log_softmax(x))
        return loss, loss


def by_target(params, target):
    return target


def by_params(params, target):
    """Double: what is learned chooses the action, and the target network judges it (van Hasselt et al. 2016)."""
    return params


@dataclass(frozen=True)
class Uniform:
    """All that is kept, equally."""

    def init(self, envs, n):
        return ()

    def draw(self, state, t, envs, n):
        """``(state, i, b, weight)``: which times of which environments, and what they count."""
        time, which = jax.random.split(t.shared_key)
        i = draw_times(time, (SAMPLES,), t.now, CAPACITY, length=n)
        return state, (i, jax.random.randint(which, (SAMPLES,), 0, envs), jnp.ones(SAMPLES))

    def learned(self, state, drawn, errors):
        return state


@dataclass(frozen=True)
class Prioritised:
    """In proportion to the last errors (Schaul et al. 2016)."""

    alpha: float = 0.6
    beta: float = 0.4

    def init(self, envs, n):
        return Priorities.of(CAPACITY, batch=envs, length=n)

    def draw(self, state, t, envs, n):
        state = state.written(t.now)
        return state, state.draw(t.shared_key, SAMPLES, t.now, beta=self.beta)

    def learned(self, state, drawn, errors):
        return state.update(drawn, errors, alpha=self.alpha)


@dataclass(frozen=True)
class Parts:
    """What a member of the family is made of."""

    init: Callable = init_plain
    network: Callable = plain
    estimate: Any = Expectation()
    chooses: Callable = by_target
    replay: Any = Uniform()
    n: int = 1


DQN = Parts()
DOUBLE = replace(DQN, chooses=by_params)
DUELING = replace(DOUBLE, init=init_dueling, network=dueling)
PRIORITISED = replace(DUELING, replay=Prioritised())
N_STEP = replace(PRIORITISED, n=3)
DISTRIBUTIONAL = replace(N_STEP, estimate=Distribution())


# -- the program: one timestep of one environment


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array


class Learner(NamedTuple):
    params: Any
    target: Any
    opt_state: Any


class Carry(NamedTuple):
    state: Any
    memory: rlfx.History
    replay: Any  # Shared
    learner: Learner  # Shared


rate = optax.linear_schedule(
    FIRST_RATE, LAST_RATE, DECAY
)  # of steps of learning: the length of a run has no part in it
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(rate))


def td_loss(parts, params, target, x):
    """``(loss, error)`` of n consecutive transitions ``x[n]``."""
    ahead = n_step(x.reward, x.terminated, x.truncated, gamma=GAMMA)
    next_obs = x.next_obs[ahead.last]
    best = jnp.argmax(parts.estimate.mean(parts.network(parts.chooses(params, target), next_obs)))
    following = parts.network(target, next_obs)[best]
    chosen = parts.network(params, x.obs[0])[x.action[0]]
    return parts.estimate.loss(chosen, ahead.reward, ahead.discount, jax.lax.stop_gradient(following))


def learn(parts, learner, transitions, weight):
    """One step, from ``transitions[SAMPLES, n]``: the learner and the errors."""

    def loss(params):
        losses, errors = jax.vmap(lambda x: td_loss(parts, params, learner.target, x))(transitions)
        return (weight * losses).mean(), errors

    grads, errors = jax.grad(loss, has_aux=True)(learner.params)
    updates, opt_state = optimizer.update(grads, learner.opt_state, learner.params)
    params = optax.apply_updates(learner.params, updates)
    return Learner(params, optax.incremental_update(params, learner.target, POLYAK), opt_state), errors


def make_timestep(parts, envs):
    def timestep(_, carry, t):
        obs = env.observe(carry.state)
        values = parts.estimate.mean(parts.network(carry.learner.params, obs))
        epsilon = jnp.maximum(EPSILON, 1.0 - t / EXPLORE_UNTIL)
        explore = jax.random.bernoulli(t.key_for("explore"), epsilon)
        action = jnp.where(explore, env.action_space.sample(t.key_for("any")), jnp.argmax(values).astype(jnp.int32))
        state, step = env.step(t.key_for("env"), carry.state, action)

        transition = Transition(
            obs, action, REWARD_SCALE * step.reward, step.terminated, step.truncated, step.final_obs
        )
        memory = rlfx.series(transition, history=carry.memory)
        replay, drawn = parts.replay.draw(carry.replay, t, envs, parts.n)
        i, b, weight = drawn
        transitions = memory[i[:, None] + jnp.arange(parts.n), b[:, None].repeat(parts.n, 1)]

        learned, errors = learn(parts, carry.learner, transitions, weight)
        learner = jax.tree.map(lambda a, b: jnp.where(t >= WARMUP, a, b), learned, carry.learner)
        replay = parts.replay.learned(replay, drawn, errors)
        return Carry(state, memory.history, replay, learner), step.terminated

    return timestep


def metrics(carry, fell):
    return {"falls per 1,000 steps": 1000 * fell.mean()}


def make(parts, name, *, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    update = going_on(make_timestep(parts, envs), length=length, envs=envs, mesh=mesh, metrics=metrics)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = parts.init(params_key, hidden, parts.estimate.atoms)
        learner = Learner(params, params, optimizer.init(params))
        no, nothing, obs = jnp.bool_(False), jnp.float32(0.0), jnp.zeros(OBS)
        memory = rlfx.History(CAPACITY, Transition(obs, jnp.int32(0), nothing, no, no, obs), batch=envs)
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        replay = parts.replay.init(envs, parts.n)
        return Stopped.at_first(Carry(state, memory, rlfx.Shared(replay), rlfx.Shared(learner)))

    def greedy(agent, obs, key):
        return jnp.argmax(parts.estimate.mean(parts.network(agent.carry.learner.value.params, obs))).astype(jnp.int32)

    return Recipe(name, env, init, update, greedy, updates, 8, 8, length * envs, BAR)


FAMILY = {
    "dqn": partial(make, DQN, "dqn"),
    "double": partial(make, DOUBLE, "double_dqn"),
    "dueling": partial(make, DUELING, "dueling_dqn"),
    "prioritised": partial(make, PRIORITISED, "prioritised_dqn"),
    "n_step": partial(make, N_STEP, "n_step_dqn", updates=64),
    "distributional": partial(make, DISTRIBUTIONAL, "distributional_dqn", updates=64),
}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
