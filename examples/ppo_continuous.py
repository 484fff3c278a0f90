"""PPO with continuous actions, on Pendulum-v1 and robots of brax: a Gaussian policy, observations and rewards on a scale.

Notice the moments. `rlfx.normalize` counts the observations of the whole batch at every timestep, in a `Shared` carry: all
environments see the same scale, and it is saved with the agent. `moments(obs)` uses it without counting: for the critic on
`final_obs`, and in evaluation. Rewards are divided by the deviation of their discounted sum in the same way.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from loops import Agent, Sample, clipped_surrogate, falling_adam, over_rollouts
from networks import critic, init_actor_critic, mlp
from recipes import Recipe, main

import rlfx.envs
from rlfx.training import Normal

EPOCHS, MINIBATCHES = 10, 8
LAMBDA, CLIP, LEARNING_RATE = 0.95, 0.2, 1e-3


@dataclass(frozen=True)
class Task:
    """What is learned, how much of it, and what is to be reached: the mean return of 100 greedy episodes.

    The environment is made by its name where a recipe is made, so that brax is imported only for its own.
    """

    name: str
    env: str
    bar: float
    updates: int
    options: tuple = ()  # of the environment
    length: int = 128
    envs: int = 32
    gamma: float = 0.95
    bounds: float = 1.0  # of the environment's actions, where a policy's are 1

    def make(self):
        env = rlfx.envs.make(self.env, **dict(self.options))
        return rlfx.envs.clip_action(rlfx.envs.rescale_action(env, -self.bounds, self.bounds))


PENDULUM = Task("ppo_continuous", "Pendulum-v1", -200.0, updates=100)
BALANCE = Task(
    "ppo_inverted_pendulum", "brax/inverted_pendulum", 190.0, updates=40, gamma=0.99,
    options=(("backend", "spring"), ("episode_length", 200)),
)  # fmt: skip
#: As gymnasium cuts it; who does nothing has -11.8. The whole torque turns the arm by 4 rad/s in a step, and costs its square.
REACHER = Task(
    "ppo_reacher", "brax/reacher", -5.0, updates=100, gamma=0.98, bounds=5.0, options=(("episode_length", 50),),
)  # fmt: skip


def actor(params, obs):
    return Normal(mlp(params["actor"], obs), params["log_std"])


# -- the program: one timestep of one environment


class Scale(NamedTuple):
    obs: rlfx.Moments
    returns: rlfx.Moments


class Carry(NamedTuple):
    state: Any
    discounted: jax.Array  # the discounted sum of this episode's rewards so far
    scale: Scale  # Shared


def make_act(task, env):
    def act(params, carry, t):
        obs, of_obs = rlfx.normalize(env.observe(carry.state), carry.scale.obs)
        policy, value = actor(params, obs), critic(params, obs)
        action = policy.sample(t.key_for("action"))
        state, step = env.step(t.key_for("env"), carry.state, action)

        discounted = task.gamma * carry.discounted + step.reward
        _, of_returns = rlfx.normalize(discounted, carry.scale.returns)
        scaled = step.replace(reward=of_returns.scale(step.reward))
        next_value = rlfx.next_value(lambda obs: critic(params, of_obs(obs)), scaled, value)
        advantage = rlfx.gae(scaled, value, next_value, gamma=task.gamma, lam=LAMBDA)

        sample = Sample(obs, action, policy.log_prob(action), advantage, advantage + value)
        return Carry(state, jnp.where(step.done, 0.0, discounted), Scale(of_obs, of_returns)), (sample, step.reward)

    return act


# -- the learner


def ppo_loss(params, batch):
    policy = jax.vmap(lambda obs: actor(params, obs))(batch.obs)
    log_prob = policy.log_prob(batch.action)
    value = jax.vmap(lambda obs: critic(params, obs))(batch.obs)
    surrogate = clipped_surrogate(log_prob - batch.log_prob, batch.advantage, CLIP)
    return 0.5 * ((value - batch.target) ** 2).mean() - surrogate


def greedy(agent, obs, key):
    """The policy that is evaluated: the mode, and moments that stand still."""
    return actor(agent.params, agent.carry.scale.value.obs(obs)).mode()


def make(task=PENDULUM, *, length=None, envs=None, updates=None, hidden=(64, 64), mesh=None):
    """Of a task; its own numbers where none are given."""
    length, envs, updates, env = length or task.length, envs or task.envs, updates or task.updates, task.make()
    (actions,), (observed,) = env.action_space.shape, env.observation_space.shape
    optimizer = falling_adam(LEARNING_RATE, updates * EPOCHS * MINIBATCHES)
    update = over_rollouts(
        make_act(task, env), ppo_loss, optimizer, length=length, envs=envs, epochs=EPOCHS, minibatches=MINIBATCHES, mesh=mesh
    )

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = {**init_actor_critic(params_key, (observed, *hidden, actions)), "log_std": jnp.zeros(actions)}
        scale = rlfx.Shared(Scale(rlfx.Moments.of(jnp.zeros(observed)), rlfx.Moments.of(0.0)))
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), Carry(state, jnp.zeros(envs), scale))

    return Recipe(task.name, env, init, update, greedy, updates, 5, 10, length * envs, task.bar)


FAMILY = {"pendulum": make, "inverted_pendulum": partial(make, BALANCE), "reacher": partial(make, REACHER)}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
