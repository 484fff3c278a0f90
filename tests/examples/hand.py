"""What the examples compute, written by hand: scans and loops over arrays with the axes [T, B]."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import rlfx


def keys(length, batch, key, *names):
    """The keys ``t.key_for(name)`` of a program, ``[T, B]`` each: they depend on nothing else in it."""
    return _keys(length, batch, names)(None, None, key)[1]


@functools.cache
def _keys(length, batch, names):
    return jax.jit(rlfx.unroll(lambda _, c, t: (c, tuple(t.key_for(n) for n in names)), length=length, batch=batch))


def rollout(env, log_probs, state, action_keys, env_keys):
    """Act with a scan over time of a vmap over environments; ``(final state, data[T, B])``."""

    def step(state, key):
        obs = jax.vmap(env.observe)(state)
        action = jax.vmap(jax.random.categorical)(key[0], jax.vmap(log_probs)(obs))
        state, out = jax.vmap(env.step)(key[1], state, action)
        return state, (obs, action, out)

    state, (obs, action, out) = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(state, (action_keys, env_keys))
    done = out.terminated | out.truncated
    data = SimpleNamespace(obs=obs, action=action, done=done, **vars(out))
    return state, data


def chosen(log_probs, action):
    """The log-probability of each action."""
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def over(fn, *args):
    """``fn`` at every point of [T, B]."""
    return jax.vmap(jax.vmap(fn))(*args)


def monte_carlo(reward, done, gamma, n=None):
    """Discounted rewards, ``n`` of them or all, up to the end of the episode and of the rollout."""
    reward, done = np.asarray(reward, np.float64), np.asarray(done)
    returns = np.zeros_like(reward)
    length = len(reward)
    for t in range(length):
        weight = np.ones(reward.shape[1])
        for s in range(t, length if n is None else min(t + n, length)):
            returns[t] += weight * reward[s]
            weight = weight * gamma * ~done[s]
    return returns.astype(np.float32)


def next_values(critic, data, values, last_obs):
    """The value of what followed: of the next observation, or of the last one of an episode that was cut."""
    following = np.concatenate([values[1:], np.asarray(jax.vmap(critic)(last_obs))[None]])
    return np.where(data.truncated & ~data.terminated, np.asarray(over(critic, data.final_obs)), following)


def gae(data, values, following, gamma, lam):
    """Generalised advantage estimation, by a loop from the end."""
    terminated, done = np.asarray(data.terminated), np.asarray(data.done)
    advantages, after = np.zeros_like(values), np.zeros_like(values[0])
    for t in reversed(range(len(values))):
        delta = data.reward[t] + gamma * np.where(terminated[t], 0.0, following[t]) - values[t]
        after = delta + gamma * lam * np.where(done[t], 0.0, after)
        advantages[t] = after
    return advantages.astype(np.float32)


def assert_close(got, wanted, tolerance=1e-5):
    """Every leaf, relative to the largest element of the wanted one."""
    jax.tree.map(lambda g, w: _assert_close(np.asarray(g), np.asarray(w), tolerance), got, wanted)


def _assert_close(got, wanted, tolerance):
    assert got.shape == wanted.shape
    scale = max(float(np.abs(wanted).max(initial=0.0)), 1e-6)
    np.testing.assert_allclose(got / scale, wanted / scale, rtol=0, atol=tolerance)
