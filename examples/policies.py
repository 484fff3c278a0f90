"""One program, four neural network libraries: plain pytrees, flax linen, flax nnx and equinox.

Notice that `make_program` knows a policy only as `apply(params, obs) -> logits`, of one observation: rlfx batches it.
Whatever a library calls a model, its parameters are a pytree of arrays, and that is all that a program needs.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from reinforce import make_update

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")


class Policy(NamedTuple):
    """``apply(params, obs[4]) -> logits[2]``."""

    params: Any
    apply: Callable


def plain(key):
    return Policy(init_mlp(key, (4, 64, 2)), mlp)


def linen(key):
    from flax import linen as nn

    model = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(2)])
    return Policy(model.init(key, jnp.zeros(4)), model.apply)


def nnx(key):
    from flax import nnx

    rngs = nnx.Rngs(key)
    model = nnx.Sequential(nnx.Linear(4, 64, rngs=rngs), jnp.tanh, nnx.Linear(64, 2, rngs=rngs))
    graph, params = nnx.split(model)
    return Policy(params, lambda params, obs: nnx.merge(graph, params)(obs))


def equinox(key):
    import equinox as eqx

    model = eqx.nn.MLP(4, 2, width_size=64, depth=1, activation=jnp.tanh, key=key)
    params, static = eqx.partition(model, eqx.is_array)
    return Policy(params, lambda params, obs: eqx.combine(params, static)(obs))


POLICIES = {"plain": plain, "linen": linen, "nnx": nnx, "equinox": equinox}


def make_program(apply, gamma=0.99):
    def reinforce(params, state, t):
        log_probs = jax.nn.log_softmax(apply(params, env.observe(state)))
        action = jax.random.categorical(t.key_for("action"), log_probs)
        state, step = env.step(t.key_for("env"), state, action)

        reward = rlfx.series(step.reward)
        discount = rlfx.series(jnp.where(step.done, 0.0, gamma))
        returns = rlfx.discounted_sum(reward[t:], discount[t:])
        returns = (returns - rlfx.mean(returns)) / (rlfx.std(returns) + 1e-6)
        return -log_probs[action] * returns, state, 1000 * rlfx.mean(step.terminated)

    return reinforce


def train(name, *, length=250, batch=32, updates=60, seed=0):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    mesh = rlfx.use_all_cores(batch=batch)
    policy_key, env_key, train_key = jax.random.split(jax.random.key(seed), 3)
    policy = POLICIES[name](policy_key)
    loss_fn = rlfx.compile(make_program(policy.apply), length=length, batch=batch, mesh=mesh)
    optimizer = optax.adam(1e-2)
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    train = jax.jit(lambda agent, keys: jax.lax.scan(make_update(loss_fn, optimizer), agent, keys))
    agent = (policy.params, optimizer.init(policy.params), state)
    return train(agent, jax.random.split(train_key, updates))[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    args = parser.parse_args(argv)
    for name in POLICIES:
        falls = train(name, updates=args.updates)
        print(f"{name}: falls per 1,000 steps {falls[0]:.1f} -> {falls[-10:].mean():.1f}")


if __name__ == "__main__":
    main()
