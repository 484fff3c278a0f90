"""Prioritised DQN on CartPole-v1, its actors, replay and learner at work together on two devices (PEARL).

Notice that the algorithm is six pure functions, and that nothing in them says what runs where. `pearl.composed` measures the
parts on each device and decides; `pearl.run` drives them (`composed.py`). Two devices of the host will do. The network and its
loss are those of `dqn_family.py`, and so are all the numbers but one: actors act with weights of the last iteration, four
updates old.
"""

import sys

import dqn_family as family
import jax
import jax.numpy as jnp
import optax
from composed import train, use_two_devices
from dqn_family import PRIORITISED, Learner, env

from rlfx.place import pearl

ACTORS, ENVS, LENGTH = 2, 8, 4  # 64 transitions an iteration
ITERATIONS = 500  # 32,000 timesteps


def init(key, hidden=(64, 64)):
    params = family.init_dueling(key, hidden, 1)
    return Learner(params, params, family.optimizer.init(params))


def policy(params, obs, key, t):
    explore, which = jax.random.split(key)
    exploring = jax.random.bernoulli(explore, jnp.maximum(family.EPSILON, 1.0 - t / family.EXPLORE_UNTIL))
    return jnp.where(exploring, jax.random.randint(which, (), 0, family.ACTIONS), greedy(params, obs, key))


def greedy(params, obs, key):
    return jnp.argmax(PRIORITISED.estimate.mean(PRIORITISED.network(params, obs))).astype(jnp.int32)


def gradient(learner, transitions, weight, key):
    """Of the mean over a sub-batch, and TD errors for the priorities."""
    x = transitions._replace(reward=family.REWARD_SCALE * transitions.reward)

    def loss(params):
        def one(x):
            return family.td_loss(PRIORITISED, params, learner.target, jax.tree.map(lambda leaf: leaf[None], x))

        losses, errors = jax.vmap(one)(x)
        return (weight * losses).mean(), errors

    (value, errors), grads = jax.value_and_grad(loss, has_aux=True)(learner.params)
    return grads, errors, {"loss": value}


def apply(learner, grads):
    updates, opt_state = family.optimizer.update(grads, learner.opt_state, learner.params)
    params = optax.apply_updates(learner.params, updates)
    return Learner(params, optax.incremental_update(params, learner.target, family.POLYAK), opt_state)


def make(actors=ACTORS, envs=ENVS, length=LENGTH, **sizes):
    """The system: an update of 256 transitions for every 16 timesteps."""
    collected = actors * envs * length
    replay = {"batch": family.SAMPLES, "capacity": 16 * family.CAPACITY, "warmup": 16 * family.WARMUP}
    sizes = {"updates": collected // 16, **replay, **sizes}
    return pearl.System(
        env, init, lambda learner: learner.params, policy, gradient, apply, actors, envs, length, **sizes
    )


def main(argv=None):
    return train("prioritised DQN on two devices", make(), greedy, iterations=ITERATIONS, shown="loss", every=100, argv=argv)


if __name__ == "__main__":
    use_two_devices()
    main()
    sys.exit(0)
