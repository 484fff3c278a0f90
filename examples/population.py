"""A population with migration: every few iterations the worse half copies the better, with a learning rate near to its.

Notice `member`: one member, in one iteration; it calls and differentiates a program over t and b. The parallel axis is named p:
`i.index("p")` is the member's number, `learned[i, parent]` is what another one has learned, and `rlfx.min(x, over="p")` is
over all.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
from networks import actor, critic, init_actor_critic, one_each

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA, LAMBDA, MIGRATE_EVERY = 0.99, 0.95, 3


def actor_critic(params, state, t):
    obs = env.observe(state)
    log_probs, value = actor(params, obs), critic(params, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)
    next_value = rlfx.next_value(lambda obs: critic(params, obs), step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, next_value, gamma=GAMMA, lam=LAMBDA))
    target = jax.lax.stop_gradient(advantage + value)
    return 0.5 * (value - target) ** 2 - log_probs[action] * advantage, state, rlfx.mean(step.terminated)


class Member(NamedTuple):
    params: object
    rate: jax.Array
    state: object


def make_train(*, iterations, members=8, length=32, batch=8):
    """``train(None, members, key) -> (members, logs)``, each with the axis [P]."""
    loss_fn = rlfx.compile(actor_critic, length=length, batch=batch)

    def member(_, me, i):
        loss = lambda params: loss_fn(params, me.state, i.key)  # noqa: E731
        (_, (state, falls)), grads = jax.value_and_grad(loss, has_aux=True)(me.params)
        params = jax.tree.map(lambda p, g: p - me.rate * g, me.params, grads)
        learned = rlfx.series((params, me.rate))

        p = i.index("p")
        order = rlfx.shared(jnp.argsort, falls)  # of all members, the best first
        rank = jnp.argmax(order == p)
        parent = jnp.where(rank < members // 2, p, order[rank - members // 2])
        params, rate = learned[i, parent]
        rate = jnp.where(parent == p, rate, rate * jnp.exp(0.2 * jax.random.normal(i.key_for("rate"))))
        params, rate = rlfx.every(MIGRATE_EVERY, lambda: (params, rate), otherwise=learned[i])
        logs = {"falls": falls, "best": rlfx.min(falls, over="p"), "rate": rate, "parent": parent}
        return Member(params, rate, state), logs

    return rlfx.unroll(member, length=iterations, dim="i", batch={"p": members})


def init(key, members=8, batch=8, rate=1e-2):
    keys = jax.random.split(key, members)
    params = one_each(lambda k: init_actor_critic(k, (4, 16, 2)), keys)
    state = jax.vmap(lambda k: jax.vmap(env.reset)(jax.random.split(k, batch)))(keys)
    return Member(params, jnp.full(members, rate), state)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    args = parser.parse_args(argv)
    _, logs = jax.jit(make_train(iterations=args.iterations))(None, init(jax.random.key(0)), jax.random.key(1))
    for i in range(0, args.iterations, 10):
        best, mean = 1000 * logs["best"][i, 0], 1000 * logs["falls"][i].mean()
        print(
            f"iteration {i}: falls per 1,000 steps {mean:.1f}, of the best {best:.1f}; rates up to {logs['rate'][i].max():.1e}"
        )


if __name__ == "__main__":
    main()
