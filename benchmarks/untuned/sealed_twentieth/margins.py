"""Safe control by an epigraph (EFPPO, So and Fan 2023): what a state is worth is the worst margin to come, or what it will have
cost beyond a budget, whichever is more; of every number of steps ahead there is an estimate by maxima and sums so far and by both
critics behind them, and all estimates are weighed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA, EPISODE, ENTROPY, DT = 9, 5, 0.99, 0.95, 200, 0.01, 0.1
FORCES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
CENTRES = np.array([[0.8, 0.8], [-0.9, 0.5], [0.4, -1.0], [-0.7, -0.8]], np.float32)
RADII = np.array([0.4, 0.35, 0.45, 0.3], np.float32)


def params_of(key, hidden):
    k = jax.random.split(key)
    return {"pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 2))}


def reset(key):
    k = jax.random.split(key)
    place = jax.random.uniform(k[0], (2,), minval=-1.5, maxval=1.5)
    budget = jax.random.uniform(k[1], (), maxval=10.0)
    return {"x": jnp.concatenate([place, jnp.zeros(2)]), "budget": budget, "count": jnp.int32(0)}


def margins(x):
    """Above zero inside of an obstacle."""
    return RADII - jnp.linalg.norm(x[:2] - CENTRES, axis=-1)


def observed(state):
    return jnp.concatenate([state["x"], 0.1 * state["budget"][None], margins(state["x"])])


def step_of(key, state, action):
    """The worst margin here, what this timestep costs, and whether the episode ends."""
    x = state["x"]
    cost = 0.3 * jnp.sqrt(x[0] ** 2 + x[1] ** 2 + 1e-3)
    speed = 0.95 * x[2:] + DT * jnp.asarray(FORCES)[action]
    place = x[:2] + DT * speed
    count = state["count"] + 1
    done = (count >= EPISODE) | (jnp.abs(place).max() > 2.0)
    new = {"x": jnp.concatenate([place, speed]), "budget": (state["budget"] - cost) / GAMMA, "count": count}
    after = jax.tree.map(lambda start, new: jnp.where(done, start, new), reset(key), new)
    return stop_gradient(after), margins(x).max(), cost, done


def program(p, carry, t):
    state, episode = carry
    obs = observed(state)
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], obs))
    risk, price = c.mlp(p["v"], obs)
    action = jax.random.categorical(t.key_for("action"), log_p)
    after, margin, cost, done = step_of(t.key_for("env"), state, action)

    critics = rlfx.series(stop_gradient((risk, price)))[t + 1]
    risk_behind = rlfx.series(jnp.where(done, margin, critics[0]))[t:]
    price_behind = rlfx.series(jnp.where(done, 0.0, critics[1]))[t:]
    steps = rlfx.series(t.now)[t:] - t.now
    discount = GAMMA**steps
    worst = jnp.maximum(jax.lax.cummax(rlfx.series(margin)[t:]), risk_behind)
    spent = jnp.cumsum(discount * rlfx.series(cost)[t:]) + GAMMA * discount * price_behind
    weight = jnp.where(rlfx.series(episode)[t:] == episode, LAMBDA**steps, 0.0)
    weight = weight / weight.sum()
    total = (weight * jnp.maximum(worst, spent - state["budget"])).sum()

    advantage = total - jnp.maximum(stop_gradient(risk), stop_gradient(price) - state["budget"])
    missed = (risk - (weight * worst).sum()) ** 2 + (price - (weight * spent).sum()) ** 2
    entropy = -(jnp.exp(log_p) * log_p).sum()
    return 0.5 * missed + log_p[action] * advantage - ENTROPY * entropy, (after, episode + done)


# -- by hand, as usual


def estimates(risk, price, last, margin, cost, done, budget):
    """Of one environment ``[T]``: backwards, with a row of an estimate for each timestep behind which critics are asked."""
    length = len(risk)

    def body(rows, x):
        t, margin, cost, done, budget, risk_after, price_after = x
        worst, spent, weight = rows
        worst, spent = jnp.maximum(margin, worst), cost + GAMMA * spent
        weight = jnp.where(done, 0.0, LAMBDA * weight)
        worst = worst.at[t].set(jnp.where(done, margin, jnp.maximum(margin, risk_after)))
        spent = spent.at[t].set(cost + GAMMA * jnp.where(done, 0.0, price_after))
        weight = weight.at[t].set(1.0)
        share = weight / weight.sum()
        total = jnp.maximum(worst, spent - budget)
        return (worst, spent, weight), ((share * worst).sum(), (share * spent).sum(), (share * total).sum())

    zeros = jnp.zeros(length)
    after = c.shifted(risk, last[0]), c.shifted(price, last[1])
    x = jnp.arange(length), margin, cost, done, budget, *after
    return jax.lax.scan(body, (zeros, zeros, zeros), x, reverse=True)[1]


def learnt(p, obs, action, found):
    """The loss of points ``[...]``, of which is found what critics are to say, and the advantage."""
    worst, spent, advantage = found
    log_p, both = jax.nn.log_softmax(c.mlp(p["pi"], obs)), c.mlp(p["v"], obs)
    missed = (both[..., 0] - worst) ** 2 + (both[..., 1] - spent) ** 2
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return 0.5 * missed + c.pick(log_p, action) * advantage - ENTROPY * entropy


def plain(length, batch):
    def run(p, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(carry, t):
            state, episode = carry
            obs = jax.vmap(observed)(state)
            action = c.categorical(c.at(action_keys, t), c.mlp(p["pi"], obs))
            after, margin, cost, done = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            return (after, episode + done), (obs, action, state["budget"], margin, cost, done)

        carry, (obs, action, budget, margin, cost, done) = jax.lax.scan(body, carry, jnp.arange(length))
        both, last = c.mlp(p["v"], obs), c.mlp(p["v"], jax.vmap(observed)(carry[0]))
        of = jax.vmap(estimates, (1, 1, 0, 1, 1, 1, 1), 1)
        worst, spent, total = of(both[..., 0], both[..., 1], last, margin, cost, done, budget)
        found = worst, spent, total - jnp.maximum(both[..., 0], both[..., 1] - budget)
        return *jax.value_and_grad(lambda p: learnt(p, obs, action, found).mean())(p), carry

    return run
