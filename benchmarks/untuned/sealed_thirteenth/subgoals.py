"""HIRO (Nachum et al. 2018) on pieces of replayed episodes: a policy of subgoals, and one that is paid for reaching them. What
the upper one is told that it chose is, of several subgoals, the one by which the lower policy would likeliest have done what was
done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, GOAL, ACTIONS, AHEAD, GAMMA, SPREAD = 16, 6, 4, 8, 0.97, 0.5
relu = jax.nn.relu


def params_of(key, hidden):
    """Of the lower level and of the upper one: a policy, and twin critics ``[2, ...]``."""
    k = jax.random.split(key, 4)
    twins = lambda key, rows: jax.vmap(lambda k: c.mlp_params(k, (rows, hidden, hidden, 1)))(jax.random.split(key))  # noqa: E731
    return {
        "low": {"pi": c.mlp_params(k[0], (OBS + GOAL, hidden, hidden, ACTIONS)), "q": twins(k[1], OBS + GOAL + ACTIONS)},
        "high": {"pi": c.mlp_params(k[2], (OBS, hidden, hidden, GOAL)), "q": twins(k[3], OBS + GOAL)},
    }


def acts(net, obs, goal):
    return jnp.tanh(c.mlp(net, jnp.concatenate([obs, goal], -1), relu))


def chooses(net, obs):
    return 2.0 * jnp.tanh(c.mlp(net, obs, relu))


def td3(q, own, old, seen, done, tried, reward, after, next_done, discount):
    """Twin critics' errors for what was done, and what is tried is worth; ``q(net, seen, action)``: ``[2, ...]``."""
    target = stop_gradient(reward + discount * q(old, after, next_done).min(0))
    errors = 0.5 * ((q(own, seen, done) - target) ** 2).sum(0)
    return errors - q(stop_gradient(own), seen, tried)[0]


def low_loss(p, old, x):
    """Of one transition, or of many ``[..., features]``."""
    goal = x["goal"]
    on = x["obs"][..., :GOAL] + goal - x["after"][..., :GOAL]  # the same place, from where one is next
    reward = -jnp.sqrt((on**2).sum(-1) + 1e-6)
    seen, after = jnp.concatenate([x["obs"], goal], -1), jnp.concatenate([x["after"], on], -1)
    tried, following = acts(p["pi"], x["obs"], goal), acts(old["pi"], x["after"], on)
    return td3(c.mapped, p["q"], old["q"], seen, x["action"], tried, reward, after, following, GAMMA)


def high_loss(p, old, obs, goal, reward, end, discount):
    tried, following = chooses(p["pi"], obs), chooses(old["pi"], end)
    return td3(c.mapped, p["q"], old["q"], obs, goal, tried, reward, end, following, discount)


def candidates_of(goal, obs, end, noise):
    """What was chosen, what was reached, and some about that: ``[..., count, GOAL]``."""
    reached = (end - obs)[..., None, :GOAL]
    return jnp.concatenate([goal[..., None, :], reached, reached + SPREAD * noise], -2)


def program(params, carry, t, count):
    (p, old), data = params
    seen = rlfx.inputs(data)
    x, window = seen[t], seen[t : t + AHEAD]
    last = rlfx.minimum(t + AHEAD, t.length) - 1
    end, obs = seen[last]["after"], x["obs"]
    candidates = candidates_of(x["goal"], obs, end, jax.random.normal(t.key_for("goals"), (count - 2, GOAL)))

    def likely(goal):
        """The lower policy's, of what was done in the window, were it told ``goal`` at first."""
        goals = obs[:GOAL] + goal - window["obs"][:, :GOAL]
        return -((window["action"] - acts(p["low"]["pi"], window["obs"], goals)) ** 2).sum()

    best = candidates[jnp.argmax(jax.vmap(likely)(stop_gradient(candidates)))]
    reward = window["reward"].sum()
    discount = GAMMA ** (last + 1 - t)
    upper = high_loss(p["high"], old["high"], obs, stop_gradient(best), reward, end, discount)
    return low_loss(p["low"], old["low"], x) + upper, carry


# -- by hand, as usual


def windows(x):
    """``[T, ...]`` as ``[T, AHEAD, ...]``, zeros behind the end."""
    padded = jnp.concatenate([x, jnp.zeros((AHEAD - 1, *x.shape[1:]), x.dtype)])
    return jnp.stack([padded[i : i + len(x)] for i in range(AHEAD)], 1)


def noises(key, length, batch, count):
    return c.normals(key, "goals", length, batch, (count - 2, GOAL))


def ends_of(length):
    """Last timesteps of windows, and discounts."""
    last = jnp.minimum(jnp.arange(length) + AHEAD, length) - 1
    return last, GAMMA ** (last + 1 - jnp.arange(length)).astype(jnp.float32)


def plain(length, batch, count):
    def run(p, old, data, key):
        last, discount = ends_of(length)
        end, obs = data["after"][last], data["obs"]
        candidates = candidates_of(data["goal"], obs, end, noises(key, length, batch, count))

        def likely(goal, obs, window, there):
            """Of one goal, of one timestep of one environment."""
            goals = obs[:GOAL] + goal - window["obs"][:, :GOAL]
            away = (window["action"] - acts(p["low"]["pi"], window["obs"], goals)) ** 2
            return -(there[:, None] * away).sum()

        there = windows(jnp.ones(length))
        of_goals = jax.vmap(likely, (0, None, None, None))
        of_all = jax.vmap(jax.vmap(of_goals, (0, 0, 1, None)), (0, 0, 0, 0))
        window = {name: windows(data[name]) for name in ("obs", "action", "reward")}
        scores = of_all(candidates, obs, window, there)
        best = jnp.take_along_axis(candidates, jnp.argmax(scores, -1)[..., None, None], 2)[:, :, 0]
        reward = window["reward"].sum(1)

        def loss(p):
            upper = high_loss(p["high"], old["high"], obs, best, reward, end, discount[:, None])
            return (low_loss(p["low"], old["low"], data) + upper).mean()

        return jax.value_and_grad(loss)(p)

    return run
