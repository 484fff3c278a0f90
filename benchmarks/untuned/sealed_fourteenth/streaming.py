"""Stream AC(lambda) (Elsayed et al. 2024): every environment has an agent of its own, which learns from each timestep as it comes
and keeps nothing: traces, layers that are normalised, observations and rewards by running moments, and steps that are bounded so
that none overshoots. Nothing is learnt through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA, ENTROPY, EPISODE, SLOPE = 12, 4, 0.99, 0.8, 0.01, 40, 0.01
KAPPA = {"pi": 3.0, "v": 2.0}


def agent_of(key, hidden):
    k = jax.random.split(key)
    return {name: c.mlp_params(k, (OBS, hidden, hidden, n)) for name, k, n in (("pi", k[0], ACTIONS), ("v", k[1], 1))}


def begins(key, batch, hidden):
    """Moments: count, mean, and sum of squares about it; they begin as if there had been one of deviation 1."""
    nets = jax.vmap(lambda k: agent_of(k, hidden))(jax.random.split(key, batch))
    moments = lambda *size: (jnp.ones(batch), jnp.zeros((batch, *size)), jnp.ones((batch, *size)))  # noqa: E731
    return {
        "world": c.batch_of(c.drift_reset(OBS), batch), "nets": nets, "traces": jax.tree.map(jnp.zeros_like, nets),
        "seen": moments(OBS), "gains": moments(), "gain": jnp.zeros(batch),
    }  # fmt: skip


def counted(moments, x):
    count, mean, squares = moments
    after = mean + (x - mean) / (count + 1.0)
    return count + 1.0, after, squares + (x - mean) * (x - after)


def deviation(moments):
    return jnp.sqrt(moments[2] / moments[0] + 1e-8)


def normalised(x):
    away = x - x.mean(-1, keepdims=True)
    return away / jnp.sqrt((away**2).mean(-1, keepdims=True) + 1e-5)


def net(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(normalised(c.linear(layer, x)), SLOPE)
    return c.linear(layers[-1], x)


def world_step(key, state, action):
    """As the drifting one, but that its limit is a truncation: the state, what is seen before a new episode begins, the reward,
    whether the episode terminated, and whether another began."""
    x = jnp.tanh(0.95 * state["x"] + 0.1 * jnp.roll(state["x"], 1) + 0.05 * (action.astype(jnp.float32) - 1.5))
    count, terminated = state["count"] + 1, x[0] > 0.9
    done = terminated | (count >= EPISODE)
    start = jax.random.normal(key, (OBS,))
    return {"x": jnp.where(done, start, x), "count": jnp.where(done, 0, count)}, x, -jnp.mean(x**2), terminated, done


def bounded(weights, traces, error, kappa):
    """A step along traces, that is no longer than would have taken the error away."""
    length = sum(jnp.abs(z).sum() for z in jax.tree.leaves(traces))
    size = error / jnp.maximum(1.0, kappa * jnp.maximum(jnp.abs(error), 1.0) * length)
    return jax.tree.map(lambda w, z: w + size * z, weights, traces)


def timestep(carry, key_of_action, key_of_world):
    """What the agent of one environment does, and how it learns."""
    nets, world = carry["nets"], carry["world"]
    seen = counted(carry["seen"], world["x"])
    told = lambda x: (x - seen[1]) / deviation(seen)  # noqa: E731
    obs = told(world["x"])
    action = jax.random.categorical(key_of_action, net(nets["pi"], obs))
    world, x, reward, terminated, done = world_step(key_of_world, world, action)
    gain = GAMMA * carry["gain"] + reward
    gains = counted(carry["gains"], gain)

    value, by_v = jax.value_and_grad(lambda p: net(p, obs)[0])(nets["v"])
    going = GAMMA * (1.0 - terminated.astype(jnp.float32))
    error = reward / deviation(gains) + going * net(nets["v"], told(x))[0] - value

    def likely(p):
        log_p = jax.nn.log_softmax(net(p, obs))
        return log_p[action] - ENTROPY * jnp.sign(error) * (jnp.exp(log_p) * log_p).sum()

    grads = {"pi": jax.grad(likely)(nets["pi"]), "v": by_v}
    traces = jax.tree.map(lambda z, g: GAMMA * LAMBDA * z + g, carry["traces"], grads)
    nets = {name: bounded(nets[name], traces[name], error, KAPPA[name]) for name in nets}
    carry = {
        "world": world, "nets": nets, "traces": jax.tree.map(lambda z: jnp.where(done, 0.0, z), traces),
        "seen": seen, "gains": gains, "gain": jnp.where(done, 0.0, gain),
    }  # fmt: skip
    return carry, {"error": error, "reward": reward}


def program(_, carry, t):
    return timestep(carry, t.key_for("action"), t.key_for("world"))


def by_rlfx(length, batch):
    learn = rlfx.unroll(program, length=length, batch=batch)

    def run(carry, key):
        carry, out = learn(None, carry, key)
        return carry["nets"], out

    return run


# -- by hand, as usual


def plain(length, batch):
    def run(carry, key):
        action_keys, world_keys = c.streams(key, batch, "action", "world")

        def step(carry, t):
            return jax.vmap(timestep)(carry, c.at(action_keys, t), c.at(world_keys, t))

        carry, out = jax.lax.scan(step, carry, jnp.arange(length))
        return carry["nets"], out

    return run
