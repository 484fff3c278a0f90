"""Duelling double Q-learning with noisy networks (Fortunato et al. 2018): it acts by the noise of a timestep, which all
environments share, and learns n-step returns of a target network that has noise of its own."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.noisy_layers import noise_of, noisy, noisy_layer

OBS, ACTIONS, GAMMA, STEPS, EPISODE = 16, 5, 0.99, 5, 40
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)
relu = jax.nn.relu
STREAMS = {"value": 1, "advantage": ACTIONS}


def params_of(key, hidden):
    k = jax.random.split(key, 5)
    stream = lambda i, size: [noisy(k[i], hidden, hidden), noisy(k[i + 1], hidden, size)]  # noqa: E731
    return {"trunk": c.dense(k[4], OBS, hidden), "value": stream(0, 1), "advantage": stream(2, ACTIONS)}


def huber(error):
    return jnp.where(jnp.abs(error) < 1.0, 0.5 * error**2, jnp.abs(error) - 0.5)


def duel(value, advantage):
    return value + advantage - advantage.mean(-1, keepdims=True)


def q_of(p, noise, obs, layer=noisy_layer):
    x = relu(c.linear(p["trunk"], obs))
    made = {n: layer(p[n][1], noise[n][1], relu(layer(p[n][0], noise[n][0], x))) for n in STREAMS}
    return duel(made["value"], made["advantage"])


def program(hidden):
    def dqn(params, state, t):
        p, target = params
        key, aside = jax.random.split(t.shared_key)
        obs = state["x"]
        q = q_of(p, noise_of(key, hidden, STREAMS), obs)
        action = jnp.argmax(q)
        state, step = step_of(t.key_for("env"), state, action)
        of_target = q_of(target, noise_of(aside, hidden, STREAMS), obs)
        following = rlfx.series(stop_gradient(of_target[action]))
        aim = rlfx.n_step_return(step, following[t + 1], gamma=GAMMA, n=STEPS)
        return huber(q[action] - stop_gradient(aim)), state

    return dqn


# -- by hand: values ``[..., B, ACTIONS]`` of noise ``[..., n]`` and observations ``[..., B, OBS]``


def by_matrices(p, noise, obs):
    """The weights of every timestep."""
    return (q_of if obs.ndim == 2 else jax.vmap(q_of, (None, 0, 0)))(p, noise, obs)


def factors_layer(p, noise, x):
    """Noise multiplies what goes in and what comes out, and weights are the same at all timesteps."""
    inputs, outputs = (z[..., None, :] for z in noise)
    return c.linear(p, x) + ((x * inputs) @ p["w noise"] + p["b noise"]) * outputs


def by_factors(p, noise, obs):
    return q_of(p, noise, obs, factors_layer)


def rows_layer(p, noise, x):
    """The same, where the products are of rows."""
    inputs, outputs = (z[..., None, :] for z in noise)
    rows = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    shaped = lambda y: y.reshape(*x.shape[:-1], -1)  # noqa: E731
    return shaped(rows(x) @ p["w"]) + p["b"] + (shaped(rows(x * inputs) @ p["w noise"]) + p["b noise"]) * outputs


def in_rows(p, noise, obs):
    return q_of(p, noise, obs, rows_layer)


def first_joined(p, noise, obs):
    """First layers of both streams are one matrix; the second ones, which are narrow, are factored."""
    first, ins, outs = [p[n][0] for n in STREAMS], *zip(*(noise[n][0] for n in STREAMS), strict=True)
    made = [q["w"] + q["w noise"] * (i[..., :, None] * o[..., None, :]) for q, i, o in zip(first, ins, outs, strict=True)]
    b = jnp.concatenate([q["b"] + q["b noise"] * o for q, o in zip(first, outs, strict=True)], -1)
    h = relu(relu(c.linear(p["trunk"], obs)) @ jnp.concatenate(made, -1) + b[..., None, :])
    halves = zip(STREAMS, jnp.split(h, 2, -1), strict=True)
    return duel(*(factors_layer(p[n][1], noise[n][1], h) for n, h in halves))


# -- by hand: what acting computed is kept, and sent back


def kept(p, noise, obs):
    """Values, and what the layers hold."""
    x = relu(c.linear(p["trunk"], obs))
    h = {n: relu(noisy_layer(p[n][0], noise[n][0], x)) for n in STREAMS}
    return duel(*(noisy_layer(p[n][1], noise[n][1], h[n]) for n in STREAMS)), (x, h)


def layer_back(p, noise, x, g):
    """Of timesteps ``[T, B, ...]``: gradients by products over all rows."""
    inputs, outputs = (z[:, None] for z in noise)
    across = lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])  # noqa: E731
    noised = g * outputs
    found = {"w": across(x, g), "w noise": across(x * inputs, noised), "b": g.sum((0, 1)), "b noise": noised.sum((0, 1))}
    return found, g @ p["w"].T + (noised @ p["w noise"].T) * inputs


def matrix_back(p, noise, x, g):
    """Of one timestep ``[B, ...]``, whose weights are made again."""
    inputs, outputs = noise
    both, dw, db = inputs[:, None] * outputs, x.T @ g, g.sum(0)
    found = {"w": dw, "w noise": dw * both, "b": db, "b noise": db * outputs}
    return found, g @ (p["w"] + p["w noise"] * both).T


def sent_back(p, noise, obs, held, dq, back):
    x, h = held
    streams = {"value": dq.sum(-1, keepdims=True), "advantage": dq - dq.mean(-1, keepdims=True)}
    found, dx = {}, 0.0
    for n, g in streams.items():
        second, dh = back(p[n][1], noise[n][1], h[n], g)
        first, more = back(p[n][0], noise[n][0], x, jnp.where(h[n] > 0, dh, 0.0))
        found[n], dx = [first, second], dx + more
    dx = jnp.where(x > 0, dx, 0.0).reshape(-1, x.shape[-1])
    return found | {"trunk": {"w": obs.reshape(-1, OBS).T @ dx, "b": dx.sum(0)}}


def shared_stream(key):
    """`t.shared_key` but for t."""
    words = np.frombuffer(hashlib.blake2b(b"t.key", digest_size=8).digest(), "<u4")
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]), np.uint32(0xFFFFFFFF))


def by_hand(length, batch, hidden, acting=by_matrices, learning=by_matrices, late=False, ahead=False, chunk=None, keep=None):
    """``late``: the target network comes after the loop; ``ahead``: noise is drawn before it; ``chunk``: timesteps of a block;
    ``keep``: the learner has what acting computed, which is sent back by "loop", "rows", or timestep after "timestep"."""

    def run(p, target, state, key):
        (env_keys,) = c.streams(key, batch, "env")
        shared = shared_stream(key)

        def draw(t):
            keys = jax.random.split(jax.random.fold_in(shared, jnp.uint32(2) * t.astype(jnp.uint32)))
            return tuple(noise_of(k, hidden, STREAMS) for k in keys)

        times = jnp.arange(length + 1)
        every = jax.vmap(draw)(times) if ahead else None
        first = lambda x: jax.tree.map(lambda x: x[:-1], x)  # noqa: E731

        def body(p, state, x):
            t, noise = x if ahead else (x, draw(x))
            obs = state["x"]
            q, held = kept(p, noise[0], obs) if keep in ("rows", "timestep") else (acting(p, noise[0], obs), None)
            action = jnp.argmax(q, -1)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            following = None if late else c.pick(acting(target, noise[1], obs), action)
            value = c.pick(q, action) if keep else None
            return after, (obs, action, step.reward, step.terminated, None if ahead else noise, following, value, held)

        def acted(p):
            xs = first((times, every)) if ahead else times[:-1]
            after, (obs, action, reward, done, noise, following, *mine) = jax.lax.scan(lambda s, x: body(p, s, x), state, xs)
            noise, last = (xs[1], jax.tree.map(lambda x: x[-1], every)) if ahead else (noise, draw(times[-1]))
            if late:
                following = c.pick(learning(target, noise[1], obs), action)
            ends = acting(p, last[0], after["x"])
            ends = c.pick(acting(target, last[1], after["x"]), jnp.argmax(ends, -1))
            going = GAMMA * (1.0 - done.astype(jnp.float32))
            aim = reward + going * c.shifted(following, ends)
            for _ in range(STEPS - 1):
                aim = reward + going * c.shifted(aim, ends)
            return after, obs, action, noise[0], stop_gradient(aim), *mine

        if keep == "loop":

            def in_loop(p):
                after, *_, aim, value, _ = acted(p)
                return huber(value - aim).mean(), after

            (found, after), grads = jax.value_and_grad(in_loop, has_aux=True)(p)
            return found, grads, after

        after, *data, value, held = acted(p)
        if keep:
            obs, action, noise, aim = data
            error = value - aim
            dq = jnp.clip(error, -1.0, 1.0)[..., None] * jax.nn.one_hot(action, ACTIONS) / error.size
            if keep == "rows":
                return huber(error).mean(), sent_back(p, noise, obs, held, dq, layer_back), after
            add = lambda total, x: (jax.tree.map(jnp.add, total, sent_back(p, *x, matrix_back)), None)  # noqa: E731
            zeros = jax.tree.map(jnp.zeros_like, p)
            return huber(error).mean(), jax.lax.scan(add, zeros, (noise, obs, held, dq))[0], after

        def loss(p, part):
            obs, action, noise, aim = part
            return huber(c.pick(learning(p, noise, obs), action) - aim).sum() / (length * batch)

        if chunk is None:
            return *jax.value_and_grad(loss)(p, tuple(data)), after
        return *c.summed_gradient(loss, p, tuple(data) if chunk == 1 else c.in_chunks(tuple(data), chunk)), after

    return run


def workload(length, batch, hidden, chunk=4):
    make = lambda learning=by_matrices, **how: by_hand(length, batch, hidden, learning=learning, **how)  # noqa: E731
    some, ahead, both = {"chunk": chunk, "late": True}, {"late": True, "ahead": True}, {"acting": first_joined}
    by_loop, by_rows, by_time = ({"keep": k, "ahead": True} for k in ("loop", "rows", "timestep"))
    loss_fn = rlfx.compile(program(hidden), length=length, batch=batch)

    def by_rlfx(p, target, state, key):
        of = lambda p: loss_fn((p, target), state, key)  # noqa: E731
        (loss, (state, _)), grads = jax.value_and_grad(of, has_aux=True)(p)
        return loss, grads, state

    forms = {
        "rlfx": by_rlfx, "plain": make(), "targets late": make(late=True), "factors": make(by_factors, late=True),
        "rows": make(in_rows, late=True), "timestep by timestep": make(late=True, chunk=1),
        "first layers joined": make(first_joined, late=True, **both), "drawn ahead": make(**ahead),
        f"rows, blocks of {chunk}": make(in_rows, **some), f"matrices, blocks of {chunk}": make(**some),
        "rows, drawn ahead": make(in_rows, **ahead), "kept, by loop": make(**by_loop), "kept, by rows": make(**by_rows),
        "kept, timestep by timestep, targets late, threefry unrolled": make(**by_time, late=True),
        "kept, timestep by timestep": make(**by_time), "kept, by rows, targets late": make(**by_rows, late=True),
        "joined, timestep by timestep, drawn ahead, threefry unrolled": make(first_joined, **ahead, **both, chunk=1),
        "timestep by timestep, drawn ahead, threefry unrolled": make(**ahead, chunk=1),
        "kept, by loop, threefry unrolled": make(**by_loop), "kept, by rows, threefry unrolled": make(**by_rows),
        "kept, timestep by timestep, threefry unrolled": make(**by_time),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    given = params_of(k[1], hidden), params_of(k[2], hidden), state
    return drawing(forms, given, tolerance=1e-5)
