"""DDPG whose simulator steps run in a compiled loop, `consecutive` at a call: RL-Scope's finding F.5.

The paper met it in TF-Agents: the same data-collection loop cost 2.4 times the Python time with 100 consecutive steps a
call that it cost with 1,000. As many gradient steps follow as steps were made, so the work of a step is always the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from profile_workloads import gymnax_env, mlp, mlp_init

from rlfx import profile

HIDDEN, BATCH, CAPACITY = 64, 64, 4096


def build(consecutive: int, n: int = 16):
    """`(train state, iterate, environment steps an iteration)`, compiled and warmed up."""
    env = gymnax_env("Pendulum-v1", n)
    opt = optax.adam(1e-3)

    def policy(params, obs):
        return jnp.tanh(mlp(params["pi"], obs)[:, 0])

    def q(params, obs, a):
        return mlp(params["q"], jnp.concatenate([obs, a[:, None]], axis=1))[:, 0]

    def loss(params, target, obs, a, r, nxt):
        goal = r + 0.99 * jax.lax.stop_gradient(q(target, nxt, policy(target, nxt)))
        frozen = {**params, "q": jax.lax.stop_gradient(params["q"])}
        return ((q(params, obs, a) - goal) ** 2).mean() - q(frozen, obs, policy(params, obs)).mean()

    @jax.jit
    def collect(params, carry):
        def step(carry, _):
            key, buffer, at, state, obs = carry
            key, noise, sim = jax.random.split(key, 3)
            with profile.operation("inference"):
                a = policy(params, obs) + 0.1 * jax.random.normal(noise, (n,))
            state, nxt, r, _ = env.step(sim, state, a)
            rows = (at + jnp.arange(n)) % CAPACITY
            buffer = jax.tree.map(lambda b, x: b.at[rows].set(x), buffer, (obs, a, r, nxt))
            return (key, buffer, at + n, state, nxt), None

        return jax.lax.scan(step, carry, None, length=consecutive)[0]

    @jax.jit
    def update(learner, key, buffer, at):
        def step(carry, key):
            params, target, state = carry
            rows = jax.random.randint(key, (BATCH,), 0, jnp.minimum(at, CAPACITY))
            grads = jax.grad(loss)(params, target, *(b[rows] for b in buffer))
            updates, state = opt.update(grads, state)
            params = optax.apply_updates(params, updates)
            return (params, optax.incremental_update(params, target, 0.01), state), None

        return jax.lax.scan(step, learner, jax.random.split(key, consecutive))[0]

    def iterate(train):
        learner, (key, *rest) = train
        with profile.operation("simulation"):
            carry = collect(learner[0], (key, *rest))
        with profile.operation("backpropagation"):
            return update(learner, carry[0], carry[1], carry[2]), carry

    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    params = {"q": mlp_init(k1, (env.obs + 1, HIDDEN, HIDDEN, 1)), "pi": mlp_init(k2, (env.obs, HIDDEN, HIDDEN, 1))}
    space, zeros = jnp.zeros((CAPACITY, env.obs)), jnp.zeros(CAPACITY)
    learner = params, jax.tree.map(jnp.copy, params), opt.init(params)
    train = learner, (k3, (space, zeros, zeros, space), jnp.int32(0), *env.reset(k4))
    for _ in range(2):
        train = jax.block_until_ready(iterate(train))
    return train, iterate, consecutive * n
