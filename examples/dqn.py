"""DQN on CartPole-v1, acting and learning at every timestep: a replay buffer, a target network and shared parameters.

Notice what is in the carry. `carry.memory` is an `rlfx.History`: the series of transitions is written into it, and
`memory[i]` reads any of the last `CAPACITY` timesteps, across calls. `rlfx.Shared` marks the
parameters, the optimiser's state and the target network, which all environments have in common; they may only be
changed by what does not vary with the environment, here `rlfx.shared`: one call for the whole batch. `rlfx.every` is a
condition on time: the learner runs at every second timestep, the target network is copied at every 400th.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from transitions import Transition

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA, CAPACITY, SAMPLES = 0.99, 12_000, 16  # timesteps kept, and samples an update, of each environment
LEARN_EVERY, COPY_EVERY, EXPLORE_UNTIL = 2, 400, 4_000

optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(3e-4))


class Carry(NamedTuple):
    state: object
    memory: rlfx.History
    params: object
    target: object
    opt_state: object


def td_loss(params, target, transition):
    """The squared TD error of one transition; the target network judges what follows (double Q-learning)."""
    best = jnp.argmax(mlp(params, transition.next_obs))
    following = jnp.where(transition.terminated, 0.0, mlp(target, transition.next_obs)[best])
    error = mlp(params, transition.obs)[transition.action] - (transition.reward + GAMMA * following)
    return optax.losses.huber_loss(error)


def batch_loss(params, target, transitions):
    """The mean over transitions ``[B, SAMPLES]``."""
    return jax.vmap(jax.vmap(lambda x: td_loss(params, jax.lax.stop_gradient(target), x)))(transitions).mean()


def dqn(_, carry, t):
    # Act: epsilon-greedy, with less and less exploration.
    obs = env.observe(carry.state)
    epsilon = jnp.maximum(0.05, 1.0 - t / EXPLORE_UNTIL)
    explore = jax.random.bernoulli(t.key_for("explore"), epsilon)
    anything = jax.random.randint(t.key_for("action"), (), 0, env.action_space.n)
    action = jnp.where(explore, anything, jnp.argmax(mlp(carry.params, obs)).astype(jnp.int32))
    state, step = env.step(t.key_for("env"), carry.state, action)

    # Remember, and read the past of this environment at random (`memory[i, b]` reads that of another one).
    transition = Transition(obs, action, step.reward, step.terminated, step.final_obs)
    memory = rlfx.series(transition, history=carry.memory)
    i = jax.random.randint(t.key_for("replay"), (SAMPLES,), jnp.maximum(t.now - CAPACITY + 1, 0), t.now + 1)
    sampled = memory[i]

    # Learn, once for all environments.
    def learn(samples):
        def step():
            grads = jax.grad(batch_loss)(carry.params, carry.target, samples)
            updates, opt_state = optimizer.update(grads, carry.opt_state, carry.params)
            return optax.apply_updates(carry.params, updates), opt_state

        return rlfx.every(LEARN_EVERY, step, otherwise=(carry.params, carry.opt_state))

    params, opt_state = rlfx.shared(learn, sampled)
    target = rlfx.every(COPY_EVERY, lambda: params, otherwise=carry.target)
    return Carry(state, memory.history, params, target, opt_state), step.terminated


def init_carry(key, batch, sizes=(4, 64, 64, 2)):
    params_key, env_key = jax.random.split(key)
    params = init_mlp(params_key, sizes)
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    obs = jnp.zeros(4)
    like = Transition(obs, jnp.int32(0), jnp.float32(0), jnp.bool_(False), obs)
    memory = rlfx.History(capacity=CAPACITY, like=like, batch=batch)
    return Carry(state, memory, *map(rlfx.Shared, (params, params, optimizer.init(params))))


def train(*, steps=12_000, length=1_000, batch=8, seed=0):
    """Falls per 1,000 steps in each call of ``length`` timesteps."""
    program = jax.jit(rlfx.unroll(dqn, length=length, batch=batch))
    init_key, key = jax.random.split(jax.random.key(seed))
    carry, falls = init_carry(init_key, batch), []
    for t0 in range(0, steps, length):  # t0 lets schedules, random keys and the buffer go on
        carry, fell = program(None, carry, key, t0=t0)
        falls.append(1000 * float(fell.mean()))
    return falls


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12_000)
    args = parser.parse_args(argv)
    falls = train(steps=args.steps)
    print("falls per 1,000 steps:", *(f"{f:.1f}" for f in falls))


if __name__ == "__main__":
    main()
