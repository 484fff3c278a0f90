"""PPO on Pendulum-v1: a Gaussian policy, observations and rewards on a common scale, several seeds as one program.

Notice the moments. `rlfx.normalize` counts the observations of the whole batch at every timestep, in a `Shared` carry: all
environments see the same scale, and it is saved with the agent. `moments(obs)` uses it without counting: for the critic on
`final_obs`, and in evaluation. Rewards are divided by the deviation of their discounted sum in the same way.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import critic, init_actor_critic, mlp
from recipes import Recipe, clipped_surrogate, main

import rlfx.envs
from rlfx.training import Normal

LENGTH, ENVS, EPOCHS, MINIBATCHES, UPDATES = 128, 32, 10, 8, 100
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.95, 0.95, 0.2, 1e-3
BAR = -200.0  # greedy, the mean of 100 episodes

env = rlfx.envs.clip_action(
    rlfx.envs.rescale_action(rlfx.envs.make("Pendulum-v1"))
)  # a policy's -1 and 1 are its bounds
(ACTIONS,), (OBS,) = env.action_space.shape, env.observation_space.shape


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


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def act(params, carry, t):
    obs, of_obs = rlfx.normalize(env.observe(carry.state), carry.scale.obs)
    policy, value = actor(params, obs), critic(params, obs)
    action = policy.sample(t.key_for("action"))
    state, step = env.step(t.key_for("env"), carry.state, action)

    discounted = GAMMA * carry.discounted + step.reward
    _, of_returns = rlfx.normalize(discounted, carry.scale.returns)
    scaled = step.replace(reward=of_returns.scale(step.reward))
    next_value = rlfx.next_value(lambda obs: critic(params, of_obs(obs)), scaled, value)
    advantage = rlfx.gae(scaled, value, next_value, gamma=GAMMA, lam=LAMBDA)

    sample = Sample(obs, action, policy.log_prob(action), advantage, advantage + value)
    return Carry(state, jnp.where(step.done, 0.0, discounted), Scale(of_obs, of_returns)), (sample, step.reward)


# -- the learner


def ppo_loss(params, batch):
    policy = jax.vmap(lambda obs: actor(params, obs))(batch.obs)
    log_prob = policy.log_prob(batch.action)
    value = jax.vmap(lambda obs: critic(params, obs))(batch.obs)
    surrogate = clipped_surrogate(log_prob - batch.log_prob, batch.advantage, CLIP)
    return 0.5 * ((value - batch.target) ** 2).mean() - surrogate


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    carry: Carry


def greedy(agent, obs, key):
    """The policy that is evaluated: the mode, and moments that stand still."""
    return actor(agent.params, agent.carry.scale.value.obs(obs)).mode()


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64)):
    rollout = rlfx.unroll(act, length=length, batch=envs)
    schedule = optax.linear_schedule(LEARNING_RATE, 0.0, updates * EPOCHS * MINIBATCHES)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = {**init_actor_critic(params_key, (OBS, *hidden, ACTIONS)), "log_std": jnp.zeros(ACTIONS)}
        scale = rlfx.Shared(Scale(rlfx.Moments.of(jnp.zeros(OBS)), rlfx.Moments.of(0.0)))
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), Carry(state, jnp.zeros(envs), scale))

    def learn(learner, batch):
        params, opt_state = learner
        updates, opt_state = optimizer.update(jax.grad(ppo_loss)(params, batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def update(agent, key):
        act_key, shuffle_key = jax.random.split(key)
        carry, (samples, reward) = rollout(agent.params, agent.carry, act_key)
        learner, _ = rlfx.minibatch_epochs(
            learn, agent[:2], samples, epochs=EPOCHS, minibatches=MINIBATCHES, key=shuffle_key
        )
        return Agent(*learner, carry), {"reward": reward.mean(), "std": jnp.exp(learner[0]["log_std"]).mean()}

    return Recipe("ppo_continuous", env, init, update, greedy, updates, 5, 10, length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
