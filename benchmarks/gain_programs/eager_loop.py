"""CleanRL's shape: a loop in Python, an environment on the host, jitted calls, and advantages written without a jit."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gain_programs.cartpole import apply, network

STEPS = 64
envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
params = network(jax.random.key(0))


@jax.jit
def act(params, observed, key):
    logits, value = apply(params, observed)
    key, one = jax.random.split(key)
    return jax.random.categorical(one, logits), value, key


@jax.jit
def learn(params, observed, advantages):
    def loss(params):
        logits, value = apply(params, observed)
        return ((value - advantages) ** 2).mean() + logits.mean()

    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))


def advantages_of(values, rewards, dones):
    out, last = [], jnp.zeros(4)
    for t in reversed(range(STEPS - 1)):
        last = rewards[t] + 0.99 * values[t + 1] * (1 - dones[t]) - values[t] + 0.94 * (1 - dones[t]) * last
        out.append(last)
    return jnp.stack(out[::-1])


def once():
    global params
    key = jax.random.key(1)
    observed, _ = envs.reset(seed=0)
    for _ in range(16):
        kept = []
        for _ in range(STEPS):
            action, value, key = act(params, observed, key)
            after, reward, done, *_ = envs.step(np.asarray(action))
            kept.append((observed, value, reward.astype(np.float32), done.astype(np.float32)))
            observed = after
        seen, values, rewards, dones = (list(x) for x in zip(*kept, strict=True))
        advantages = advantages_of(values, rewards, dones)
        params = jax.block_until_ready(learn(params, np.stack(seen[:-1]), advantages))
