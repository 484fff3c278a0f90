"""Frame stacking on CartPole-v1 without velocities: the policy sees the last four positions.

Notice `frames.window(-3, 1)`: the present frame and the three before it, read inside the acting loop. The carry holds
only the environment; rlfx keeps the ring of four frames that the window needs. Frames of an earlier episode are masked
by the age of the present one.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from reinforce import make_update

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
FRAMES, GAMMA = 4, 0.99


def stacked(frame, age):
    """The last frames of this episode, zeros before it; ``float32[FRAMES, ...]``."""
    frames = rlfx.series(frame).window(1 - FRAMES, 1)
    seen = jnp.arange(1 - FRAMES, 1) >= -age
    return jnp.where(seen[:, None], frames, 0.0)


def reinforce(params, state, t):
    obs = env.observe(state)
    frames = stacked(jnp.stack([obs[0], 10.0 * obs[2]]), state.time)  # no velocities
    log_probs = jax.nn.log_softmax(mlp(params, frames.ravel()))
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)

    reward = rlfx.series(step.reward)
    discount = rlfx.series(jnp.where(step.done, 0.0, GAMMA))
    returns = rlfx.discounted_sum(reward[t:], discount[t:])
    returns = (returns - rlfx.mean(returns)) / (rlfx.std(returns) + 1e-6)
    return -log_probs[action] * returns, state, 1000 * rlfx.mean(step.terminated)


def train(*, length=250, batch=32, updates=150, seed=0):
    """Falls per 1,000 steps at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(reinforce, length=length, batch=batch)
    optimizer = optax.adam(1e-2)
    params_key, env_key, train_key = jax.random.split(jax.random.key(seed), 3)
    params = init_mlp(params_key, (2 * FRAMES, 64, 2), 0.01)
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    train = jax.jit(lambda agent, keys: jax.lax.scan(make_update(loss_fn, optimizer), agent, keys))
    _, falls = train((params, optimizer.init(params), state), jax.random.split(train_key, updates))
    return falls


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args(argv)
    falls = train(updates=args.updates)
    print(f"falls per 1,000 steps {falls[0]:.1f} -> {falls[-10:].mean():.1f}")


if __name__ == "__main__":
    main()
