"""Learners of sequences with a memory: R2D2 with and without burn-in, recurrent PPO, cloning by two LSTMs, LoRA adapters
of a GRU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, lstm, lstm_params, relu
from benchmarks.untuned.ordinary.pixels import clipped

OBS, ACTIONS, GAMMA, STEPS = 24, 6, 0.99, 5


def restarted(done, state):
    """The state after a timestep: nothing where an episode ended."""
    return jax.tree.map(lambda s: jnp.where(done.reshape(done.shape + (1,) * (s.ndim - done.ndim)), 0.0, s), state)


# -- R2D2: double Q-learning of five steps, behind an LSTM with a dueling head


def r2d2_params(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "in": c.dense(k[0], OBS, hidden), "lstm": lstm_params(k[1], hidden, hidden),
        "advantage": c.mlp_params(k[2], (hidden, hidden, ACTIONS)), "value": c.mlp_params(k[3], (hidden, hidden, 1)),
    }  # fmt: skip


def dueling(p, h):
    advantage = c.mlp(p["advantage"], h, relu)
    return c.mlp(p["value"], h, relu) + advantage - advantage.mean(-1, keepdims=True)


def r2d2_program(burn):
    def r2d2(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        if burn:
            carry = jax.tree.map(lambda s: jnp.where(t == burn, stop_gradient(s), s), carry)
        here, there = (
            lstm(w["lstm"], s, relu(c.linear(w["in"], x["obs"]))) for w, s in zip((p, target), carry, strict=True)
        )
        q = dueling(p, here[1])
        following = rlfx.series(stop_gradient(dueling(target, there[1])[jnp.argmax(q)]), end=0.0)
        aim = stop_gradient(rlfx.n_step_return(parts.step_of(x), following[t + 1], gamma=GAMMA, n=STEPS))
        counted = (t >= burn) & (t + STEPS < t.length)
        loss = jnp.where(counted, 0.5 * (q[x["action"]] - aim) ** 2, 0.0)
        return loss, restarted(x["done"], (here, there))

    return r2d2


def r2d2_plain(length, batch, burn, start):
    def states(p, state, data):
        def body(state, x):
            state = lstm(p["lstm"], state, x["in"])
            return restarted(x["done"], state), state[1]

        return jax.lax.scan(body, state, {"in": relu(c.linear(p["in"], data["obs"])), "done": data["done"]})

    def loss(p, target, data):
        early, late = (jax.tree.map(lambda x: x[s], data) for s in (slice(None, burn), slice(burn, None)))
        here, there = start
        if burn:
            here = stop_gradient(states(p, here, early)[0])
            there = states(target, there, early)[0]
        q, aside = dueling(p, states(p, here, late)[1]), dueling(target, states(target, there, late)[1])
        following = c.pick(aside, jnp.argmax(q, -1))
        aim = late["reward"] + parts.going(late, GAMMA) * c.shifted(following, jnp.zeros(batch))
        for _ in range(STEPS - 1):
            aim = late["reward"] + parts.going(late, GAMMA) * c.shifted(aim, jnp.zeros(batch))
        error = 0.5 * (c.pick(q, late["action"]) - stop_gradient(aim)) ** 2
        return error[: length - burn - STEPS].sum() / (length * batch)

    return parts.usual(loss)


def r2d2(length, batch, burn, hidden):
    k = jax.random.split(jax.random.key(0), 6)
    state = lambda k: tuple(0.1 * jax.random.normal(k, (2, batch, hidden)))  # noqa: E731
    start = state(k[0]), state(k[1])
    p, target = (r2d2_params(key, hidden) for key in k[2:4])
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.02)
    del data["last"]
    plain = r2d2_plain(length, batch, burn, start)
    return parts.learner(r2d2_program(burn), plain, length, batch, p, target, data, start)


# -- PPO with a GRU


def policy_params(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "in": c.dense(k[0], OBS, hidden), "gru": gru_params(k[1], hidden, hidden),
        "pi": c.dense(k[2], hidden, ACTIONS), "v": c.dense(k[3], hidden, 1),
    }  # fmt: skip


def ppo_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    advantage, target = parts.advantage_and_target(x, t, GAMMA)
    h = gru(p["gru"], h, jnp.tanh(c.linear(p["in"], x["obs"])))
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[0]
    loss = clipped(log_p, log_p[x["action"]], x["log_prob"], value, advantage, target)
    return loss, jnp.where(x["done"], 0.0, h)


def ppo_plain(length, batch, start):
    def loss(p, _, data):
        advantage, target = parts.advantages_and_targets(data, GAMMA)

        def body(h, x):
            h = gru(p["gru"], h, x[0])
            return jnp.where(x[1][:, None], 0.0, h), h

        _, h = jax.lax.scan(body, start, (jnp.tanh(c.linear(p["in"], data["obs"])), data["done"]))
        log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[..., 0]
        return clipped(log_p, c.pick(log_p, data["action"]), data["log_prob"], value, advantage, target).mean()

    return parts.usual(loss)


def ppo(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 4)
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.03)
    value = jax.random.normal(k[1], (length + 1, batch))
    noise = 0.1 * jax.random.normal(k[2], (length, batch))
    data |= {"value": value[:-1], "last_value": value[-1], "log_prob": noise - 1.8}
    del data["last"]
    start = jnp.zeros((batch, hidden))
    plain = ppo_plain(length, batch, start)
    return parts.learner(ppo_program, plain, length, batch, policy_params(k[0], hidden), (), data, start)


# -- behaviour cloning by two LSTMs, one above the other, and a mixture of normals (of robomimic's BC-RNN-GMM)

MIXED, DIMS = 5, 7


def cloning_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "lstm": [lstm_params(k[0], OBS, hidden), lstm_params(k[1], hidden, hidden)],
        "out": c.dense(k[2], hidden, MIXED * (2 * DIMS + 1)),
    }  # fmt: skip


def mixture(out, action):
    """The log-density of an action ``[..., DIMS]``."""
    means, scales, weights = jnp.split(out, (MIXED * DIMS, 2 * MIXED * DIMS), -1)
    means, scales = (x.reshape(*x.shape[:-1], MIXED, DIMS) for x in (means, scales))
    scales = jax.nn.softplus(scales) + 1e-2
    z = (action[..., None, :] - jnp.tanh(means)) / scales
    each = (-0.5 * z**2 - jnp.log(scales) - 0.919).sum(-1)
    return jax.nn.logsumexp(jax.nn.log_softmax(weights) + each, axis=-1)


def cloning_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h, after = x["obs"], []
    for layer, state in zip(p["lstm"], carry, strict=True):
        state = lstm(layer, state, h)
        h, after = state[1], [*after, state]
    return -mixture(c.linear(p["out"], h), x["action"]), after


def cloning_plain(batch, hidden):
    def loss(p, _, data):
        h, start = data["obs"], (jnp.zeros((batch, hidden)), jnp.zeros((batch, hidden)))
        for layer in p["lstm"]:

            def body(state, x, layer=layer):
                state = lstm(layer, state, x)
                return state, state[1]

            _, h = jax.lax.scan(body, start, h)
        return -mixture(c.linear(p["out"], h), data["action"]).mean()

    return parts.usual(loss)


def cloning(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    data = {"obs": data["obs"], "action": data["action"]}
    start = [(jnp.zeros((batch, hidden)), jnp.zeros((batch, hidden)))] * 2
    p = cloning_params(jax.random.key(0), hidden)
    return parts.learner(cloning_program, cloning_plain(batch, hidden), length, batch, p, (), data, start)


# -- adapters of low rank in a GRU that is fixed


def lora_params(key, hidden, rank):
    k = jax.random.split(key, 5)
    down, up = c.dense(k[0], hidden, rank)["w"], c.dense(k[1], rank, 3 * hidden)["w"]
    adapters = {name: {"down": down, "up": 0.1 * up} for name in ("x", "h")}
    fixed = {"in": c.dense(k[2], OBS, hidden), "gru": gru_params(k[3], hidden, hidden)}
    return {"adapters": adapters, "pi": c.dense(k[4], hidden, ACTIONS)}, fixed


def adapted(p, a, x):
    return c.linear(p, x) + (x @ a["down"]) @ a["up"]


def lora_gru(p, a, h, x):
    rx, zx, nx = jnp.split(adapted(p["x"], a["x"], x), 3, -1)
    rh, zh, nh = jnp.split(adapted(p["h"], a["h"], h), 3, -1)
    z = jax.nn.sigmoid(zx + zh)
    return (1.0 - z) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + z * h


def lora_program(params, h, t):
    (p, fixed), data = params
    x = rlfx.inputs(data)[t]
    h = lora_gru(fixed["gru"], p["adapters"], h, jnp.tanh(c.linear(fixed["in"], x["obs"])))
    log_p = jax.nn.log_softmax(c.linear(p["pi"], h))
    return -log_p[x["action"]], jnp.where(x["done"], 0.0, h)


def lora_plain(batch, hidden):
    def loss(p, fixed, data):
        def body(h, x):
            h = lora_gru(fixed["gru"], p["adapters"], h, x[0])
            return jnp.where(x[1][:, None], 0.0, h), h

        inputs = jnp.tanh(c.linear(fixed["in"], data["obs"]))
        _, h = jax.lax.scan(body, jnp.zeros((batch, hidden)), (inputs, data["done"]))
        return -c.pick(jax.nn.log_softmax(c.linear(p["pi"], h)), data["action"]).mean()

    return parts.usual(loss)


def lora(length, batch, hidden, rank):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action", "done")}
    p, fixed = lora_params(jax.random.key(0), hidden, rank)
    start = jnp.zeros((batch, hidden))
    return parts.learner(lora_program, lora_plain(batch, hidden), length, batch, p, fixed, data, start)
