"""SARSA(lambda) on MountainCar-v0: eligibility traces, and weights that change at every timestep.

Notice that learning is part of the timestep. The weights are `rlfx.Shared`: 16 cars drive with the same ones, each with
its own trace, and the update is the mean over the cars. The gradient of q is `jax.grad` inside the program, so q may be
any function; here it is linear in a Fourier basis (Konidaris et al. 2011). Nothing is kept for later: memory does not
grow with the number of timesteps.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlfx.envs

env = rlfx.envs.make("MountainCar-v0", max_steps_in_episode=500)
GAMMA, LAMBDA, EPSILON, ORDER = 1.0, 0.9, 0.02, 5

LOW, HIGH = np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32)
FREQUENCIES = np.stack(np.meshgrid(*[np.arange(ORDER + 1)] * 2), -1).reshape(-1, 2).astype(np.float32)
STEP_SIZES = 0.01 / np.maximum(np.linalg.norm(FREQUENCIES, axis=1), 1.0).astype(np.float32)  # finer waves learn slower


class Carry(NamedTuple):
    state: object
    action: jax.Array
    trace: jax.Array
    weights: jax.Array


def q(weights, obs, action):
    """The value of an action, linear in ``cos(pi c . obs)``; ``weights[actions, features]``."""
    features = jnp.cos(jnp.pi * (FREQUENCIES @ ((obs - LOW) / (HIGH - LOW))))
    return weights[action] @ features


def epsilon_greedy(key, weights, obs):
    explore, anything = jax.random.split(key)
    values = jax.vmap(lambda a: q(weights, obs, a))(jnp.arange(env.action_space.n))
    random = jax.random.randint(anything, (), 0, env.action_space.n)
    return jnp.where(jax.random.bernoulli(explore, EPSILON), random, jnp.argmax(values).astype(jnp.int32))


def sarsa(_, carry, t):
    weights, obs = carry.weights, env.observe(carry.state)
    state, step = env.step(t.key_for("env"), carry.state, carry.action)

    # Within an episode both are the same action; where it ended, the first belongs to its last observation.
    following = epsilon_greedy(t.key_for("action"), weights, step.final_obs)
    action = epsilon_greedy(t.key_for("action"), weights, env.observe(state))

    value, gradient = jax.value_and_grad(q)(weights, obs, carry.action)
    trace = GAMMA * LAMBDA * carry.trace + gradient
    target = step.reward + GAMMA * jnp.where(step.terminated, 0.0, q(weights, step.final_obs, following))
    weights = weights + rlfx.mean((target - value) * STEP_SIZES[None] * trace, over="b")

    return Carry(state, action, jnp.where(step.done, 0.0, trace), weights), (step.done, target - value)


def init_carry(key, batch):
    env_key, action_key = jax.random.split(key)
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    weights = jnp.zeros((env.action_space.n, len(FREQUENCIES)))
    action = jax.random.randint(action_key, (batch,), 0, env.action_space.n)
    return Carry(state, action, jnp.zeros((batch, *weights.shape)), rlfx.Shared(weights))


def train(*, steps=20_000, length=2_000, batch=16, seed=0):
    """Mean length of an episode in each call of ``length`` timesteps."""
    program = jax.jit(rlfx.unroll(sarsa, length=length, batch=batch))
    init_key, key = jax.random.split(jax.random.key(seed))
    carry, lengths = init_carry(init_key, batch), []
    for t0 in range(0, steps, length):
        carry, (done, _) = program(None, carry, key, t0=t0)
        lengths.append(done.size / max(1, int(done.sum())))
    return lengths


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args(argv)
    lengths = train(steps=args.steps)
    print("timesteps to the top of the hill:", *(f"{n:.0f}" for n in lengths))


if __name__ == "__main__":
    main()
