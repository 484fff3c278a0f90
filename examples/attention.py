"""Attention over the episode's past, on CartPole-v1 without velocities.

Notice `keys[:t + 1]`: every key so far, an array whose length grows with t. What is done with it is ordinary `jnp`:
scores, a mask, `softmax`, a weighted sum. When acting, rlfx keeps the keys and values in a buffer and attends to what is
there; when learning, the actions are known, and all timesteps attend at once, as a causal transformer's do, in blocks
where `[T, T]` scores would be large.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from reinforce import make_update

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
HEADS, WIDTH, GAMMA = 2, 8, 0.99


class Memory(NamedTuple):
    """What a timestep leaves behind for later ones."""

    key: jax.Array  # [heads, width]
    value: jax.Array  # [heads, width]
    time: jax.Array  # timesteps since the episode began
    begin: jax.Array  # when it began


def attend(params, x, time, t):
    """What the heads find in this episode's past; ``float32[heads, width]``."""
    query, key, value = mlp(params["attention"], x).reshape(3, HEADS, WIDTH)
    begin = t - time
    past = rlfx.series(Memory(key, value, time, begin))[: t + 1]

    scores = jnp.einsum("thw,hw->th", past.key, query) / WIDTH**0.5
    age = (time - past.time).astype(jnp.float32)
    scores = scores - jax.nn.softplus(params["slope"])[None] * age[:, None]  # ALiBi (Press et al. 2022), learned slopes
    scores = jnp.where((past.begin == begin)[:, None], scores, -jnp.inf)
    return jnp.einsum("th,thw->hw", jax.nn.softmax(scores, axis=0), past.value)


def reinforce(params, state, t):
    obs = env.observe(state)
    x = jnp.stack([obs[0], 10.0 * obs[2]])  # no velocities
    features = jnp.concatenate([x, attend(params, x, state.time, t).ravel()])
    log_probs = jax.nn.log_softmax(mlp(params["head"], features))
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)

    reward = rlfx.series(step.reward)
    discount = rlfx.series(jnp.where(step.done, 0.0, GAMMA))
    returns = rlfx.discounted_sum(reward[t:], discount[t:])
    returns = (returns - rlfx.mean(returns)) / (rlfx.std(returns) + 1e-6)
    return -log_probs[action] * returns, state, 1000 * rlfx.mean(step.terminated)


def init_params(key):
    k1, k2 = jax.random.split(key)
    return {
        "attention": init_mlp(k1, (2, 3 * HEADS * WIDTH)),
        "slope": jnp.array([-1.0, 1.0]),
        "head": init_mlp(k2, (2 + HEADS * WIDTH, 64, 2), 0.01),
    }


def train(*, length=128, batch=32, updates=150, seed=0):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(reinforce, length=length, batch=batch, mesh=rlfx.use_all_cores(batch=batch))
    optimizer = optax.adam(1e-2)
    update = make_update(loss_fn, optimizer)

    def iteration(learner, key):  # attention does not reach into the rollout before: each begins with new episodes
        env_key, act_key = jax.random.split(key)
        state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
        (params, opt_state, _), falls = update((*learner, state), act_key)
        return (params, opt_state), falls

    params_key, train_key = jax.random.split(jax.random.key(seed))
    params = init_params(params_key)
    train = jax.jit(lambda learner, keys: jax.lax.scan(iteration, learner, keys))
    return train((params, optimizer.init(params)), jax.random.split(train_key, updates))[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args(argv)
    falls = train(updates=args.updates)
    print(f"falls per 1,000 steps {falls[0]:.1f} -> {falls[-10:].mean():.1f}")


if __name__ == "__main__":
    main()
