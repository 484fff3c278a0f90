"""Prioritised DQN on CartPole-v1, its actors, replay and learner at work together on two devices (PEARL).

Notice that the algorithm is six pure functions, and that nothing in them says what runs where. `composed` measures the parts
on each device and decides; `run` drives them. Two devices of the host will do: `main` makes them. The network and its loss are
those of `dqn_family.py`, and so are all the numbers but one: actors act with weights of the last iteration, four updates old.
"""

import argparse
import sys

import dqn_family as family
import jax
import jax.numpy as jnp
import optax
from dqn_family import PRIORITISED, Learner, env

import rlfx.envs
from rlfx.place import hardware, pearl

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
    parser = argparse.ArgumentParser(description="prioritised DQN on two devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    args = parser.parse_args(argv)

    system = make()
    init_key, key, test_key = jax.random.split(jax.random.key(args.seed), 3)
    state = system.init(init_key)
    devices = jax.devices()[:2]
    composition = pearl.composed(system, state, devices, hardware.measured(devices).bandwidth)
    print(*(f"{part} on {devices[d]}" for part, d in composition._asdict().items() if isinstance(d, int)), sep=", ")

    def show(call):
        if call.metrics is not None and call.iteration % 100 == 0:
            print(f"{call.iteration * system.collected:,} timesteps: loss {call.metrics['loss']:.4f}")

    state, report = pearl.run(
        system, state, key, composition=composition, devices=devices, iterations=args.iterations, after=show
    )
    print(report.explain())
    params = jax.device_put(state.learner.params, devices[0])
    found = rlfx.envs.evaluate(env, greedy, params, test_key, 100)
    print(f"mean return of 100 greedy episodes: {found.mean_return:.1f}")
    return state, report


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # kernels run in the threads that drive the devices
    main()
    sys.exit(0)
