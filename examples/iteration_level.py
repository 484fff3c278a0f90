"""Time at two levels: an iteration-level program around a timestep-level one.

Notice that `iteration` is a program like any other, whose "timestep" is one iteration of training. Its learning rate is
a recurrence, `lr[i] = 0.98 lr[i - 1]`; its target network is copied every `COPY_EVERY` iterations; and `loss_fn`, the
compiled timestep-level program, is one operation of it, with its gradient. The whole training run is one function, so
it can be vmapped over seeds.
"""

import argparse
from typing import NamedTuple

import jax
import optax
from networks import actor, critic, init_actor_critic

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA, LAMBDA, COPY_EVERY = 0.99, 0.95, 4

adam = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam())


def actor_critic(params, state, t):
    """Policy gradient; the target network judges, the online network acts and learns."""
    online, target = params["online"], params["target"]
    obs = env.observe(state)
    log_probs = actor(online, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)

    value = critic(target, obs)
    next_value = rlfx.next_value(lambda obs: critic(target, obs), step, value)
    advantage = rlfx.gae(step, value, next_value, gamma=GAMMA, lam=LAMBDA)
    value_error = critic(online, obs) - (advantage + value)
    advantage = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)

    loss = 0.5 * value_error**2 - log_probs[action] * jax.lax.stop_gradient(advantage)
    return loss, state, 1000 * rlfx.mean(step.terminated)


class Carry(NamedTuple):
    params: object
    target: object
    opt_state: object
    state: object


def make_iteration(loss_fn, optimizer, first_rate):
    """``optimizer`` gives the direction of a step, the recurrence its length."""

    def iteration(_, carry, i):
        rate = rlfx.solve(lambda lr: 0.98 * lr[i - 1], start=first_rate)
        target = rlfx.every(COPY_EVERY, lambda: carry.params, otherwise=carry.target)

        def loss(online):
            return loss_fn({"online": online, "target": target}, carry.state, i.key)

        (value, (state, falls)), grads = jax.value_and_grad(loss, has_aux=True)(carry.params)
        direction, opt_state = optimizer.update(grads, carry.opt_state)
        params = jax.tree.map(lambda p, d: p - rate * d, carry.params, direction)
        return Carry(params, target, opt_state, state), {"loss": value, "rate": rate, "falls": falls}

    return iteration


def make_train(*, iterations=200, length=64, batch=32, first_rate=1e-2, optimizer=adam):
    """``train(key) -> {"loss", "rate", "falls"}``, each ``float32[iterations]``."""
    loss_fn = rlfx.compile(actor_critic, length=length, batch=batch)
    run = rlfx.unroll(make_iteration(loss_fn, optimizer, first_rate), length=iterations, dim="i")

    def train(key):
        params_key, env_key, key = jax.random.split(key, 3)
        params = init_actor_critic(params_key, (4, 64, 64, 2))
        state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
        return run(None, Carry(params, params, optimizer.init(params), state), key)[1]

    return train


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    args = parser.parse_args(argv)
    train = jax.jit(jax.vmap(make_train(iterations=args.iterations)))
    logs = train(jax.random.split(jax.random.key(0), 3))
    for seed, (falls, rate) in enumerate(zip(logs["falls"], logs["rate"], strict=True)):
        change = f"{falls[:10].mean():.1f} -> {falls[-10:].mean():.1f}"
        print(f"seed {seed}: falls per 1,000 steps {change}, learning rate {rate[-1]:.1e}")


if __name__ == "__main__":
    main()
