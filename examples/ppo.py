"""PPO with discrete actions: classic tasks, Breakout from images, and a knapsack in which most actions are forbidden.

Notice `Task`: an environment, a network of one observation, and numbers. The timestep, the loss and the loop know nothing
else of it. A policy is a `Categorical`; with a mask, what is forbidden is never sampled and has no part in entropy or gradients.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from loops import Agent, Sample, clipped_surrogate, falling_adam, over_rollouts
from networks import cnn, init_actor_critic, init_cnn, mlp
from recipes import Recipe, main
from tasks import Knapsack, made

import rlfx.envs
from rlfx.training import Categorical

GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCHES = 0.99, 0.95, 0.2, 4, 4


# -- networks, of one observation: (policy, value)


def init_vector(env, key, hidden):
    return init_actor_critic(key, (*env.observation_space.shape, *hidden, env.action_space.n))


def of_vector(params, obs):
    return Categorical(mlp(params["actor"], obs)), mlp(params["critic"], obs)[0]


def of_scaled(env, network=of_vector):
    """Of observations whose bounds are brought to -1 and 1."""
    low, high = env.observation_space.low, env.observation_space.high
    return lambda params, obs: network(params, 2 * (obs - low) / (high - low) - 1)


def init_board(env, key, hidden):
    """One convolution for both, and what each makes of it."""
    return init_cnn(key, env.observation_space.shape, hidden[0], (*hidden[1:], env.action_space.n + 1), 0.1)


def of_board(params, obs):
    out = cnn(params, obs)
    return Categorical(out[:-1]), out[-1]


def init_things(env, key, hidden):
    return init_actor_critic(key, (env.observation_space.shape[-1], *hidden, 1))


def of_things(params, obs):
    """Each thing is judged for itself, and only what fits may be taken."""
    logits, values = (jax.vmap(partial(mlp, params[name]))(obs)[:, 0] for name in ("actor", "critic"))
    fits = obs[:, 2] > 0
    return Categorical(logits, fits), jnp.where(fits, values, 0.0).mean()


@dataclass(frozen=True)
class Task:
    """What is learned, how much of it, and what is to be reached: the mean return of 100 greedy episodes."""

    name: str
    env: Any
    bar: float
    updates: int
    init: Callable = init_vector
    network: Callable = of_vector
    length: int = 128
    envs: int = 16
    hidden: tuple[int, ...] = (64, 64)
    rate: float = 2.5e-3
    entropy: float = 0.01
    scale: float = 0.1  # of rewards


#: CartPole's run goes on for twice as long as it needs, and longer.
CARTPOLE = Task("ppo_cartpole", rlfx.envs.make("CartPole-v1"), 475.0, updates=200)
CAR = rlfx.envs.make("MountainCar-v0")
MOUNTAIN_CAR = Task("ppo_mountain_car", CAR, -130.0, updates=200, network=of_scaled(CAR))
ACROBOT = Task("ppo_acrobot", rlfx.envs.make("Acrobot-v1"), -100.0, updates=200)
#: Following the ball ends at 6 or 7, where no paddle reaches it: bounces have to be tried while that works, hence the entropy.
BREAKOUT = Task(
    "ppo_breakout", rlfx.envs.make("Breakout-MinAtar"), 10.0, 120, init_board, of_board, length=64, envs=64, hidden=(16, 64),
    entropy=0.1, scale=1.0,
)  # fmt: skip
MASKED = Task("ppo_masked", made(Knapsack()), 0.97, 20, init_things, of_things, length=32, hidden=(32, 32), scale=1.0)


# -- the program: one timestep of one environment


def make_act(task):
    def act(params, state, t):
        obs = task.env.observe(state)
        policy, value = task.network(params, obs)
        action = policy.sample(t.key_for("action"))
        state, step = task.env.step(t.key_for("env"), state, action)

        scaled = step.replace(reward=task.scale * step.reward)
        next_value = rlfx.next_value(lambda obs: task.network(params, obs)[1], scaled, value)
        advantage = rlfx.gae(scaled, value, next_value, gamma=GAMMA, lam=LAMBDA)
        return state, (Sample(obs, action, policy.log_prob(action), advantage, advantage + value), step.reward)

    return act


# -- the learner


def ppo_loss(task, params, batch):
    def of_one(sample):
        policy, value = task.network(params, sample.obs)
        return policy.log_prob(sample.action), policy.entropy(), value

    log_prob, entropy, value = jax.vmap(of_one)(batch)
    surrogate = clipped_surrogate(log_prob - batch.log_prob, batch.advantage, CLIP)
    return 0.25 * ((value - batch.target) ** 2).mean() - surrogate - task.entropy * entropy.mean()


def make(task, *, length=None, envs=None, updates=None, hidden=None, mesh=None):
    """Of a task; its own numbers where none are given."""
    length, envs, updates = length or task.length, envs or task.envs, updates or task.updates
    optimizer = falling_adam(task.rate, updates * EPOCHS * MINIBATCHES)
    update = over_rollouts(
        make_act(task), partial(ppo_loss, task), optimizer, length=length, envs=envs, epochs=EPOCHS,
        minibatches=MINIBATCHES, mesh=mesh,
    )  # fmt: skip

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = task.init(task.env, params_key, hidden or task.hidden)
        return Agent(params, optimizer.init(params), jax.vmap(task.env.reset)(jax.random.split(env_key, envs)))

    def greedy(agent, obs, key):
        return task.network(agent.params, obs)[0].mode()

    per_call = max(updates // 20, 1)
    return Recipe(task.name, task.env, init, update, greedy, updates, per_call, 2 * per_call, length * envs, task.bar)


FAMILY = {
    task.name.removeprefix("ppo_"): partial(make, task) for task in (CARTPOLE, ACROBOT, MOUNTAIN_CAR, BREAKOUT, MASKED)
}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
