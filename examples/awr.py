"""AWR on Pendulum-v1, offline: a policy from what another agent tried while it learned (Peng et al. 2019).

Notice that the log is SAC's replay buffer, made here by SAC's own recipe: series of transitions in the order of time. So returns
are a program over `rlfx.inputs`, from the present critic at each update, and learning is what PPO does of a rollout. An action
counts as much as it was better than expected: from the bad ones of SAC's beginning little is learned. No environment is
stepped but to evaluate; what a curve counts are minibatches.
"""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import sac
from loops import descent, falling_adam
from networks import critic, init_actor_critic, mlp
from recipes import Recipe, main

import rlfx
from rlfx.training import Normal

SAC_UPDATES, UPDATES, MINIBATCHES = 80, 90, 100  # of 8,000 timesteps of 4 environments, all that SAC's buffer holds
GAMMA, LAMBDA, TEMPERATURE, LARGEST, RATE = 0.95, 0.9, 0.1, 20.0, 1e-3
BAR = -200.0  # greedy, the mean of 100 episodes

env = sac.PENDULUM.make()
(OBS,), (ACTIONS,) = env.observation_space.shape, env.action_space.shape


def logged(key, updates, **sizes):
    """``[T, B]`` transitions: all that SAC saw in its first updates."""
    recipe = sac.make(updates=updates, **sizes)
    init_key, *keys = jax.random.split(key, updates + 1)
    agent, _ = jax.lax.scan(recipe.update, recipe.init(init_key), jnp.stack(keys))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1)[: updates * recipe.steps // x.shape[0]], agent.carry.memory.data)


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    target: jax.Array


def targets(both, carry, t):
    """Lambda returns of the log, by the present critic."""
    params, log = both
    x = rlfx.inputs(log)[t]
    seen = rlfx.series(x.obs, end=x.obs)
    cut = (seen[t + 1] != x.next_obs).any() | (t.now == rlfx.series(t.now)[t.length - 1])  # what follows is of another episode
    step = SimpleNamespace(reward=x.reward, terminated=x.terminated, truncated=cut)
    return carry, rlfx.lambda_return(step, critic(params, x.next_obs), gamma=GAMMA, lam=LAMBDA)


def actor(params, obs):
    return Normal(jnp.tanh(mlp(params["actor"], obs)), params["log_std"])


def awr_loss(params, batch):
    value = jax.vmap(lambda obs: critic(params, obs))(batch.obs)
    log_prob = jax.vmap(lambda x: actor(params, x.obs).log_prob(x.action))(batch)
    better = jax.lax.stop_gradient(batch.target - value)
    weight = jnp.minimum(jnp.exp(better / TEMPERATURE), LARGEST)
    return 0.5 * ((value - batch.target) ** 2).mean() - (weight * log_prob).mean()


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    log: Any


def greedy(agent, obs, key):
    return actor(agent.params, obs).mode()


def make(*, sac_updates=SAC_UPDATES, updates=UPDATES, hidden=(64, 64), minibatches=MINIBATCHES, mesh=None, **sizes):
    """``sizes`` are SAC's."""
    optimizer = falling_adam(RATE, updates * minibatches)
    step = descent(awr_loss, optimizer)

    def init(key):
        params_key, log_key = jax.random.split(key)
        params = {**init_actor_critic(params_key, (OBS, *hidden, ACTIONS)), "log_std": jnp.full(ACTIONS, -0.5)}
        return Agent(params, optimizer.init(params), logged(log_key, sac_updates, hidden=hidden, **sizes))

    def update(agent, key):
        length, envs = agent.log.reward.shape
        _, target = rlfx.unroll(targets, length=length, batch=envs, mesh=mesh)((agent.params, agent.log), jnp.zeros(envs))
        samples = Sample(agent.log.obs, agent.log.action, target)
        learner, _ = rlfx.minibatch_epochs(step, agent[:2], samples, epochs=1, minibatches=minibatches, key=key, mesh=mesh)
        return Agent(*learner, agent.log), {"target": target.mean()}

    return Recipe("awr", env, init, update, greedy, updates, 3, 6, minibatches, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
