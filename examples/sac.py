"""SAC on Pendulum, a car and robots of brax: acting and learning at every timestep, twin critics, a learned temperature.

Notice that there is no replay buffer class and no training loop: `rlfx.History` keeps the series of transitions, `memory[i]`
reads it at random, and everything that is learned is one `Shared` carry, changed once for all environments. Samples of a
`TanhNormal` are the values before `tanh`, so that the log-probabilities, and their gradients, are right at the bounds too.
One gradient serves the critics, the actor and the temperature: `stop_gradient` says which part learns from which.

A policy whose temperature has fallen goes where the critics promise most, also where they are wrong. `STEADY` critics promise
less of what they have not seen, and follow faster.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from rlfx.envs.spaces import Box
from rlfx.training import TanhNormal

LENGTH, ENVS = 100, 4
SAMPLES = 64  # timesteps read a step, of each environment
POLYAK, LEARNING_RATE = 0.005, 1e-3


def standardized(layers, x):
    """``x[in] -> [out]``, an MLP: what a rectifier gets has mean 0 and deviation 1 (Ball et al. 2023, section 4.2)."""
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        x = jax.nn.relu(jax.nn.standardize(x @ w + b))
    return x @ w_out + b_out


@dataclass(frozen=True)
class Critics:
    """How values are estimated."""

    network: Callable = mlp
    polyak: float = POLYAK  # the target's way to the critics at each step of learning


PLAIN, STEADY = Critics(), Critics(standardized, 0.02)


@dataclass(frozen=True)
class Task:
    """What is learned, how much of it, and what is to be reached: the mean return of 100 greedy episodes."""

    name: str
    env: str
    bar: float
    updates: int  # of LENGTH timesteps of each environment, one step of learning at each
    scale: float  # of rewards
    capacity: int = 8_000  # timesteps kept, of each environment
    explore: int = 200  # timesteps of random actions
    gamma: float = 0.99
    hold: int = 1  # of them a random action is kept for so many; divides LENGTH
    options: tuple = ()  # of the environment
    critics: Critics = PLAIN
    bounds: float = 1.0  # of the environment's actions, where a policy's are 1
    temperature: float = 1.0  # at first
    entropy: float = -1.0  # aimed at, of each action
    falling: bool = False  # the learning rate, to zero at the end
    every: int = 5  # updates from one evaluation to the next

    def make(self):
        """The environment; by its name, so that brax is imported only for its own."""
        env = rlfx.envs.make(self.env, **dict(self.options))
        return rlfx.envs.rescale_action(env, -self.bounds, self.bounds)


PENDULUM = Task("sac", "Pendulum-v1", -200.0, updates=80, scale=0.1)
#: Where the car gets to is a matter of swings: actions drawn anew at each step reach the goal in about 0.2% of episodes. With
#: plain critics two seeds of three fell again after they had learned (docs/training.md).
CAR = Task(
    "sac_mountain_car", "MountainCarContinuous-v0", 90.0, updates=160, scale=0.1, capacity=16_000, explore=1_000, hold=25,
    critics=STEADY,
)  # fmt: skip
BALANCE = Task(
    "sac_inverted_pendulum", "brax/inverted_pendulum", 190.0, updates=80, scale=0.1, options=(("episode_length", 200),),
    critics=STEADY, temperature=0.1, every=10,
)  # fmt: skip
#: On brax's springs the joint rings after a push, and a policy that has the whole force learns to shake. With a tenth of it, an
#: entropy of 0 and a rate that falls it learns to hold, not well enough for the bar (docs/training.md).
SPRINGS = replace(
    BALANCE, name="sac_inverted_pendulum_spring", options=(("backend", "spring"), *BALANCE.options), bounds=10.0, entropy=0.0,
    gamma=0.97, falling=True, every=20,
)  # fmt: skip
#: As gymnasium cuts it. The noise that an entropy of -1 asks for is one of a fourth of the torque here.
REACHER = Task(
    "sac_reacher", "brax/reacher", -10.0, updates=80, scale=3.0, gamma=0.95, bounds=4.0, temperature=0.03, critics=STEADY,
    options=(("episode_length", 50),), falling=True, every=10,
)  # fmt: skip


class Params(NamedTuple):
    actor: Any
    critics: Any  # two, stacked
    log_alpha: jax.Array


class Learner(NamedTuple):
    params: Params
    target: Any  # of the critics
    opt_state: Any


optimizer = optax.adam(LEARNING_RATE)


def actor(params, obs):
    mean, log_std = jnp.split(mlp(params, obs), 2)
    return TanhNormal(mean, jnp.clip(log_std, -5.0, 2.0))


def critic(params, obs, action, network=mlp):
    """The smaller of two values, and both: ``[]`` and ``[2]``."""
    values = jax.vmap(lambda p: network(p, jnp.concatenate([obs, action]))[0])(params)
    return values.min(), values


def sac_loss(params, target, x, key, network=mlp, entropy=-1.0, gamma=0.99):
    """Of one transition (Haarnoja et al. 2018, eqs. 5, 7 and 18; automatic temperature), with critics' ``network``."""
    value = partial(critic, network=network)
    here, following = jax.random.split(key)
    alpha = jnp.exp(params.log_alpha)

    policy = actor(stop_gradient(params.actor), x.next_obs)
    u = policy.sample(following)
    soft_value = value(target, x.next_obs, policy.squash(u))[0] - stop_gradient(alpha) * policy.log_prob(u)
    aim = x.reward + gamma * jnp.where(x.terminated, 0.0, soft_value)
    critic_loss = ((value(params.critics, x.obs, x.action)[1] - stop_gradient(aim)) ** 2).sum()

    policy = actor(params.actor, x.obs)
    u = policy.sample(here)
    log_prob = policy.log_prob(u)
    actor_loss = stop_gradient(alpha) * log_prob - value(stop_gradient(params.critics), x.obs, policy.squash(u))[0]
    alpha_loss = -params.log_alpha * stop_gradient(log_prob + entropy * x.action.size)
    return critic_loss + actor_loss + alpha_loss


def learn(learner, transitions, key, task=PENDULUM, left=None):
    """One step of everything that is learned, from ``transitions[B, SAMPLES]``; ``left`` of the learning rate, all without it."""

    def loss(params):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), transitions)
        keys = jax.random.split(key, flat.reward.shape)
        one = partial(sac_loss, network=task.critics.network, entropy=task.entropy, gamma=task.gamma)
        return jax.vmap(lambda x, k: one(params, learner.target, x, k))(flat, keys).mean()

    updates, opt_state = optimizer.update(jax.grad(loss)(learner.params), learner.opt_state, learner.params)
    updates = updates if left is None else optax.tree.scale(left, updates)
    params = optax.apply_updates(learner.params, updates)
    return Learner(params, optax.incremental_update(params.critics, learner.target, task.critics.polyak), opt_state)


def make_sac(task, env, steps):
    def sac(_, carry, t):
        obs = env.observe(carry.state)
        policy = actor(carry.learner.params.actor, obs)
        anything = rlfx.series(Box(-1.0, 1.0, env.action_space.shape).sample(t.key_for("explore")))
        action = jnp.where(
            t < task.explore, anything[t - t % task.hold], policy.squash(policy.sample(t.key_for("action")))
        )
        state, step = env.step(t.key_for("env"), carry.state, action)

        transition = Transition(obs, action, task.scale * step.reward, step.terminated, step.final_obs)
        memory = rlfx.series(transition, history=carry.memory)
        i = jax.random.randint(t.key_for("replay"), (SAMPLES,), jnp.maximum(t.now - task.capacity + 1, 0), t.now + 1)
        left = 1.0 - t.now / steps if task.falling else None
        learner = rlfx.shared(lambda x: learn(carry.learner, x, t.shared_key, task, left), memory[i])
        return Carry(state, memory.history, learner), step.reward

    return sac


def greedy(agent, obs, key):
    policy = actor(agent.carry.learner.value.params.actor, obs)
    return policy.squash(policy.mode())


def metrics(carry, reward):
    return {"reward": reward.mean(), "alpha": jnp.exp(carry.learner.value.params.log_alpha)}


def make(task=PENDULUM, *, length=LENGTH, envs=ENVS, updates=None, hidden=(64, 64), mesh=None):
    """Of a task; its own number of updates where none is given."""
    env, updates = task.make(), updates or task.updates
    (actions,), (observed,) = env.action_space.shape, env.observation_space.shape
    update = going_on(make_sac(task, env, updates * length), length=length, envs=envs, mesh=mesh, metrics=metrics)

    def init(key):
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        critics = one_each(lambda k: init_mlp(k, (observed + actions, *hidden, 1)), jax.random.split(critic_key))
        policy = init_mlp(actor_key, (observed, *hidden, 2 * actions), 0.01)
        params = Params(policy, critics, jnp.log(jnp.float32(task.temperature)))
        obs, nothing = jnp.zeros(observed), jnp.float32(0.0)
        memory = rlfx.History(
            task.capacity, Transition(obs, jnp.zeros(actions), nothing, jnp.bool_(False), obs), batch=envs
        )
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Stopped.at_first(Carry(state, memory, rlfx.Shared(Learner(params, critics, optimizer.init(params)))))

    return Recipe(task.name, env, init, update, greedy, updates, 5, task.every, length * envs, task.bar)


FAMILY = {"pendulum": make, "mountain_car": partial(make, CAR), "inverted_pendulum": partial(make, BALANCE)}
FAMILY |= {"inverted_pendulum_spring": partial(make, SPRINGS), "reacher": partial(make, REACHER)}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
