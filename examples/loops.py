"""The two loops of recipes: rollouts whose samples are gone over in minibatches, and one program that goes on and on.

Notice what an agent is: everything that the next update needs. Off policy that is the carry of the program, with the replay
and the learner in it, and the time at which it stopped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import rlfx

# -- on policy


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    carry: Any


class Sample(NamedTuple):
    """What PPO keeps of a timestep."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def clipped_surrogate(log_ratio, advantage, clip):
    """PPO's objective (Schulman et al. 2017, eq. 7), of advantages brought to mean 0 and deviation 1."""
    ratio = jnp.exp(log_ratio)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()


def falling_adam(rate, steps):
    """Adam at a rate that falls to zero in so many steps, of gradients whose norm is at most 0.5."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(rate, 0.0, steps), eps=1e-5))


def descent(loss, optimizer):
    """``step((params, opt_state), batch) -> ((params, opt_state), None)``, as `rlfx.minibatch_epochs` takes it."""

    def step(learner, batch):
        params, opt_state = learner
        changes, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), None

    return step


def over_rollouts(act, loss, optimizer, *, length, envs, epochs, minibatches, mesh=None):
    """``update(agent, key) -> (agent, metrics)``: a rollout of ``act``, whose aux is ``(samples, reward)``, then minibatches."""
    rollout, step = rlfx.unroll(act, length=length, batch=envs, mesh=mesh), descent(loss, optimizer)

    def update(agent, key):
        act_key, shuffle_key = jax.random.split(key)
        carry, (samples, reward) = rollout(agent.params, agent.carry, act_key)
        learner, _ = rlfx.minibatch_epochs(
            step, agent[:2], samples, epochs=epochs, minibatches=minibatches, key=shuffle_key, mesh=mesh
        )
        return Agent(*learner, carry), {"reward": reward.mean()}

    return update


# -- off policy


class Carry(NamedTuple):
    """From one timestep to the next."""

    state: Any
    memory: rlfx.History
    learner: Any  # Shared


class Stopped(NamedTuple):
    """An agent between two calls of its program."""

    carry: Any
    t0: jax.Array

    @classmethod
    def at_first(cls, carry):
        return cls(carry, jnp.int32(0))


def going_on(timestep, *, length, envs, mesh=None, metrics=lambda carry, reward: {"reward": reward.mean()}):
    """``update(agent, key) -> (agent, metrics(carry, aux))``: the next ``length`` timesteps of a program without parameters."""
    program = rlfx.unroll(timestep, length=length, batch=envs, mesh=mesh)

    def update(agent, key):
        carry, aux = program(None, agent.carry, key, t0=agent.t0)
        return Stopped(carry, agent.t0 + length), metrics(carry, aux)

    return update
