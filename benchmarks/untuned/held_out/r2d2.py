"""R2D2's learner: an LSTM over stored sequences, a burn-in without a gradient, double Q-learning of n steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, STEPS = 16, 6, 0.997, 5


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "in": c.dense(k[0], OBS, hidden), "x": c.dense(k[1], hidden, 4 * hidden), "h": c.dense(k[2], hidden, 4 * hidden),
        "q": c.dense(k[3], hidden, ACTIONS),
    }  # fmt: skip


def gates(preactivation, cell):
    i, f, g, o = jnp.split(preactivation, 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return cell, jax.nn.sigmoid(o) * jnp.tanh(cell)


def embedded(p, obs):
    return jax.nn.relu(c.linear(p["in"], obs))


def lstm(p, state, obs):
    cell, h = state
    return gates(c.linear(p["x"], embedded(p, obs)) + c.linear(p["h"], h), cell)


def program(burn):
    def r2d2(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        online, aside = carry
        online = jax.tree.map(lambda s: jnp.where(t == burn, stop_gradient(s), s), online)
        online, aside = lstm(p, online, x["obs"]), lstm(target, aside, x["obs"])
        q = c.linear(p["q"], online[1])
        following = rlfx.series(stop_gradient(c.linear(target["q"], aside[1])[jnp.argmax(q)]), end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        aim = stop_gradient(rlfx.n_step_return(step, following[t + 1], gamma=GAMMA, n=STEPS))
        counted = (t >= burn) & (t + STEPS < t.length)
        loss = jnp.where(counted, 0.5 * (q[x["action"]] - aim) ** 2, 0.0)
        restart = lambda s: jax.tree.map(lambda s: jnp.where(x["done"], 0.0, s), s)  # noqa: E731
        return loss, (restart(online), restart(aside))

    return r2d2


def by_rlfx(length, batch, burn):
    loss_fn = rlfx.compile(program(burn), length=length, batch=batch)
    return lambda p, target, start, data: jax.value_and_grad(lambda p: loss_fn(((p, target), data), start)[0])(p)


def stepwise(p, state, data):
    """The states' outputs ``[T, B, H]``; the cell as one writes it."""

    def body(state, x):
        obs, done = x
        state = lstm(p, state, obs)
        return jax.tree.map(lambda s: jnp.where(done[:, None], 0.0, s), state), state[1]

    return jax.lax.scan(body, state, (data["obs"], data["done"]))


def hoisted(p, state, data):
    """The products with the observations for all timesteps at once."""

    def body(state, x):
        x, done = x
        state = gates(x + c.linear(p["h"], state[1]), state[0])
        return jax.tree.map(lambda s: jnp.where(done[:, None], 0.0, s), state), state[1]

    return jax.lax.scan(body, state, (c.linear(p["x"], embedded(p, data["obs"])), data["done"]))


def joined(p, state, data):
    """Embeddings before, and one product of ``[x, h]`` in the loop."""
    both = {"w": jnp.concatenate([p["x"]["w"], p["h"]["w"]]), "b": p["x"]["b"] + p["h"]["b"]}

    def body(state, x):
        x, done = x
        state = gates(c.linear(both, jnp.concatenate([x, state[1]], -1)), state[0])
        return jax.tree.map(lambda s: jnp.where(done[:, None], 0.0, s), state), state[1]

    return jax.lax.scan(body, state, (embedded(p, data["obs"]), data["done"]))


def checkpointed(recurrence, chunk):
    def run(p, state, data):
        length = data["done"].shape[0]
        part = jax.checkpoint(lambda state, x: recurrence(p, state, x), prevent_cse=False)
        parts = c.in_chunks(data, chunk if length % chunk == 0 else length)
        state, hs = jax.lax.scan(part, state, parts)
        return state, hs.reshape(length, *hs.shape[2:])

    return run


def by_hand(length, batch, burn, recurrence, cut=True):
    """``cut``: the burn-in is a call of its own; else a loop over all timesteps stops the gradient at one of them."""

    def outputs(p, state, data):
        if cut:
            early, late = (jax.tree.map(lambda x: x[s], data) for s in (slice(None, burn), slice(burn, None)))
            state, _ = recurrence(stop_gradient(p), state, early)
            return recurrence(p, stop_gradient(state), late)[1]

        def body(state, x):
            t, x = x
            state = jax.tree.map(lambda s: jnp.where(t == burn, stop_gradient(s), s), state)
            state, h = recurrence(p, state, jax.tree.map(lambda x: x[None], x))
            return state, h[0]

        return jax.lax.scan(body, state, (jnp.arange(length), data))[1][burn:]

    def run(p, target, start, data):
        late = jax.tree.map(lambda x: x[burn:], data)
        aside = outputs(target, start[1], data)
        going = GAMMA * (1.0 - late["done"].astype(jnp.float32))

        def loss(p):
            q = c.linear(p["q"], outputs(p, start[0], data))
            following = stop_gradient(c.pick(c.linear(target["q"], aside), jnp.argmax(q, -1)))
            ends = jnp.zeros(batch)
            aim = late["reward"] + going * c.shifted(following, ends)
            for _ in range(STEPS - 1):
                aim = late["reward"] + going * c.shifted(aim, ends)
            error = 0.5 * (c.pick(q, late["action"]) - stop_gradient(aim)) ** 2
            return error[: length - burn - STEPS].sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, burn, hidden, chunk=20):
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.02,
    }  # fmt: skip
    state = lambda k: tuple(0.1 * jax.random.normal(x, (batch, hidden)) for x in jax.random.split(k))  # noqa: E731
    make = lambda *how: by_hand(length, batch, burn, *how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch, burn), "plain": make(stepwise, False), "cut": make(stepwise),
        "cut, hoisted": make(hoisted), "cut, joined": make(joined),
        "cut, joined, checkpointed": make(checkpointed(joined, chunk)),
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], hidden), params_of(k[5], hidden), (state(k[6]), state(k[7])), data))
