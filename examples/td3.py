"""DDPG and TD3 on Pendulum-v1: acting and learning at every timestep. TD3 is DDPG with three parts changed, each a value.

Notice `Parts`: how many critics judge, how much noise the action that follows gets, and how often the actor learns. All that
is learned is one `Shared` carry; times and environments that are read do not vary with the environment, so `memory[i, b]`
is read, and learning happens, once for the batch.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient
from loops import Carry, Stopped, going_on
from networks import init_mlp, mlp, one_each
from recipes import Recipe, main
from transitions import Transition

import rlfx.envs
from rlfx.training import draw_times

LENGTH, ENVS, UPDATES = 100, 4, 80  # of each environment: 8,000 timesteps, one step of learning at each
CAPACITY, SAMPLES, EXPLORE = 8_000, 256, 200  # timesteps kept; samples a step; random actions, and no learning, before
GAMMA, POLYAK, LEARNING_RATE, REWARD_SCALE, NOISE = 0.99, 0.005, 1e-3, 0.1, 0.1
BAR = -200.0  # greedy, the mean of 100 episodes

env = rlfx.envs.rescale_action(rlfx.envs.make("Pendulum-v1"))
(ACTIONS,), (OBS,) = env.action_space.shape, env.observation_space.shape


@dataclass(frozen=True)
class Parts:
    """What makes TD3 of DDPG (Fujimoto et al. 2018, section 4 and 5)."""

    critics: int  # the smallest of their values is believed
    smoothing: float  # deviation of the noise on the action that follows, cut at 2.5 deviations
    delay: int  # the actor and the targets move at every so many steps


DDPG = Parts(critics=1, smoothing=0.0, delay=1)
TD3 = Parts(critics=2, smoothing=0.2, delay=2)


class Params(NamedTuple):
    actor: Any
    critics: Any  # stacked


class Learner(NamedTuple):
    params: Params
    target: Params
    opt_state: Params  # of each


optimizer = optax.adam(LEARNING_RATE)


def actor(params, obs):
    return jnp.tanh(mlp(params, obs))


def critics(params, obs, action):
    """``[critics]``."""
    return jax.vmap(lambda p: mlp(p, jnp.concatenate([obs, action]))[0])(params)


def loss(parts, params, target, x, key):
    """Of one transition; each part learns from its own."""
    noise = jnp.clip(
        parts.smoothing * jax.random.normal(key, (ACTIONS,)), -2.5 * parts.smoothing, 2.5 * parts.smoothing
    )
    following = jnp.clip(actor(target.actor, x.next_obs) + noise, -1.0, 1.0)
    value = critics(target.critics, x.next_obs, following).min()
    aim = stop_gradient(x.reward + GAMMA * jnp.where(x.terminated, 0.0, value))
    critic_loss = ((critics(params.critics, x.obs, x.action) - aim) ** 2).sum()
    return critic_loss - critics(stop_gradient(params.critics), x.obs, actor(params.actor, x.obs))[0]


def learn(parts, learner, transitions, key, t):
    """One step from ``transitions[SAMPLES]``; the actor and the targets wait for theirs."""
    keys = jax.random.split(key, SAMPLES)

    def mean_loss(params):
        return jax.vmap(lambda x, k: loss(parts, params, learner.target, x, k))(transitions, keys).mean()

    def moved(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    grads = jax.grad(mean_loss)(learner.params)
    now_and_then = lambda new, old: jax.tree.map(partial(jnp.where, t.now % parts.delay == 0), new, old)  # noqa: E731
    new_critics, critics_state = moved(learner.params.critics, learner.opt_state.critics, grads.critics)
    old = learner.params.actor, learner.opt_state.actor
    new_actor, actor_state = now_and_then(moved(*old, grads.actor), old)
    params = Params(new_actor, new_critics)
    target = now_and_then(optax.incremental_update(params, learner.target, POLYAK), learner.target)
    return Learner(params, target, Params(actor_state, critics_state))


def make_timestep(parts, envs):
    def timestep(_, carry, t):
        obs = env.observe(carry.state)
        noise = NOISE * jax.random.normal(t.key_for("noise"), (ACTIONS,))
        action = jnp.clip(actor(carry.learner.params.actor, obs) + noise, -1.0, 1.0)
        action = jnp.where(t < EXPLORE, env.action_space.sample(t.key_for("explore")), action)
        state, step = env.step(t.key_for("env"), carry.state, action)

        transition = Transition(obs, action, REWARD_SCALE * step.reward, step.terminated, step.final_obs)
        memory = rlfx.series(transition, history=carry.memory)
        times, which, key = jax.random.split(t.shared_key, 3)
        i = draw_times(times, (SAMPLES,), t.now, CAPACITY)
        transitions = memory[i, jax.random.randint(which, (SAMPLES,), 0, envs)]
        learned = learn(parts, carry.learner, transitions, key, t)
        learner = jax.tree.map(lambda new, old: jnp.where(t >= EXPLORE, new, old), learned, carry.learner)
        return Carry(state, memory.history, learner), step.reward

    return timestep


def greedy(agent, obs, key):
    return actor(agent.carry.learner.value.params.actor, obs)


def make(parts, name, *, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    update = going_on(make_timestep(parts, envs), length=length, envs=envs, mesh=mesh)

    def init(key):
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        new_critic = lambda k: init_mlp(k, (OBS + ACTIONS, *hidden, 1))  # noqa: E731
        params = Params(
            init_mlp(actor_key, (OBS, *hidden, ACTIONS), 0.01),
            one_each(new_critic, jax.random.split(critic_key, parts.critics)),
        )
        learner = Learner(params, params, Params(*map(optimizer.init, params)))
        obs, nothing = jnp.zeros(OBS), jnp.float32(0.0)
        memory = rlfx.History(CAPACITY, Transition(obs, jnp.zeros(ACTIONS), nothing, jnp.bool_(False), obs), batch=envs)
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Stopped.at_first(Carry(state, memory, rlfx.Shared(learner)))

    return Recipe(name, env, init, update, greedy, updates, 5, 5, length * envs, BAR)


FAMILY = {"ddpg": partial(make, DDPG, "ddpg"), "td3": partial(make, TD3, "td3")}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
