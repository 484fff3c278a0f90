"""IMPALA's learner with Mamba as its memory (Gu and Dao 2023) on stored sequences: state spaces whose steps, inputs and outputs
depend on what is seen, behind short convolutions over time; both forget where an episode ends."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, TAPS, RANK, GAMMA = 24, 6, 4, 4, 0.99
silu = jax.nn.silu


def params_of(key, width, inner, state, layers):
    k = jax.random.split(key, 3 + layers)

    def layer(key):
        k = jax.random.split(key, 6)
        return {
            "scale": jnp.ones(width), "in": c.dense(k[0], width, 2 * inner)["w"],
            "taps": 0.5 * jax.random.normal(k[1], (TAPS, inner)), "offset": jnp.zeros(inner),
            "x": c.dense(k[2], inner, RANK + 2 * state)["w"], "steps": c.dense(k[3], RANK, inner)["w"],
            "begun": -2.0 + 0.5 * jax.random.normal(k[4], (inner,)), "skip": jnp.ones(inner),
            "rates": jnp.log(jnp.broadcast_to(jnp.arange(1.0, state + 1), (inner, state))),
            "out": c.dense(k[5], inner, width)["w"],
        }  # fmt: skip

    ends = {"embed": (OBS, width), "pi": (width, ACTIONS), "v": (width, 1)}
    return {n: c.dense(x, *size) for x, (n, size) in zip(k, ends.items(), strict=False)} | {"layers": [layer(x) for x in k[3:]]}


def normed(scale, y):
    return scale * y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)


def selected(p, x):
    """Of what the convolution made: the step of each channel, and what drives and reads states."""
    low, drive, read = jnp.split(x @ p["x"], (RANK, RANK + (p["x"].shape[1] - RANK) // 2), -1)
    return jax.nn.softplus(low @ p["steps"] + p["begun"]), drive, read


def memory(p, states, y):
    """A layer at one timestep: its state ``[inner, state]``, and the inputs that its convolution saw, ``[TAPS - 1, inner]``."""
    h, recent = states
    x, gate = jnp.split(normed(p["scale"], y) @ p["in"], 2, -1)
    recent = jnp.concatenate([recent, x[None]])
    x = silu((recent * p["taps"]).sum(0) + p["offset"])
    step, drive, read = selected(p, x)
    h = jnp.exp(-step[:, None] * jnp.exp(p["rates"])) * h + (step * x)[:, None] * drive
    made = h @ read + p["skip"] * x
    return (h, recent[1:]), y + (made * silu(gate)) @ p["out"]


def remembered(p, states, obs):
    y, after = c.linear(p["embed"], obs), []
    for layer, state in zip(p["layers"], states, strict=True):
        state, y = memory(layer, state, y)
        after.append(state)
    return after, y


def heads(p, y):
    return c.linear(p["pi"], y), c.linear(p["v"], y)[..., 0]


def program(params, states, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    states, y = remembered(p, states, x["obs"])
    logits, v = heads(p, y)
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    value = rlfx.series(v, end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    target, advantage = stop_gradient(rlfx.vtrace(step, value, value[t + 1], log_prob - x["log_mu"], gamma=GAMMA))
    loss = c.actor_critic_loss(logits, v, log_prob, advantage, target)
    return loss, jax.tree.map(lambda h: jnp.where(x["done"], 0.0, h), states)


# -- by hand: what reads the memory ``[T, B, width]``


def in_loop(p, data, states, again=False):
    """Every layer at one timestep, of all environments."""

    def body(states, x):
        obs, done = x
        states, y = jax.vmap(remembered, (None, 0, 0))(p, states, obs)
        return jax.tree.map(lambda h: jnp.where(done.reshape(-1, *[1] * (h.ndim - 1)), 0.0, h), states), y

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, states, (data["obs"], data["done"]))[1]


def layer_by_layer(p, data, states, scan, flat=True):
    """Everything but the recurrences for all timesteps at once."""
    length, batch = data["done"].shape
    rows = (lambda x: x.reshape(length * batch, -1)) if flat else lambda x: x
    timed = lambda x: x.reshape(length, batch, -1)  # noqa: E731
    goes_on = 1.0 - data["done"].astype(jnp.float32)
    goes_on = jnp.concatenate([jnp.ones_like(goes_on[:1]), goes_on[:-1]])  # since the timestep before
    kept, valid = jnp.ones_like(goes_on), [jnp.ones_like(goes_on)]
    for lag in range(1, TAPS):
        kept = kept * jnp.concatenate([jnp.ones_like(goes_on[: lag - 1]), goes_on[: length - lag + 1]])
        valid.append(kept)
    y = c.linear(p["embed"], rows(data["obs"]))
    for q, (h, recent) in zip(p["layers"], states, strict=True):
        x, gate = jnp.split(normed(q["scale"], y) @ q["in"], 2, -1)
        longer = jnp.concatenate([jnp.moveaxis(recent, 1, 0), timed(x)])
        lagged = [q["taps"][-1 - lag] * longer[TAPS - 1 - lag :][:length] * valid[lag][..., None] for lag in range(TAPS)]
        x = rows(silu(sum(lagged) + q["offset"]))
        step, drive, read = selected(q, x)
        made = rows(scan(q["rates"], goes_on, *(timed(z) for z in (step, x, drive, read)), h)) + q["skip"] * x
        y = y + (made * silu(gate)) @ q["out"]
    return timed(y)


# -- by hand: what is read of states, ``[T, B, inner]``; given are ``step, x[T, B, inner]`` and ``drive, read[T, B, state]``


def stepwise(rates, goes_on, step, x, drive, read, h, unroll=1, again=False):
    """Factors and what drives are made in the loop, of which only what is read comes out."""
    rates = -jnp.exp(rates)

    def body(h, given):
        goes_on, step, moved, drive, read = given
        h = jnp.exp(step[..., None] * rates) * (h * goes_on[:, None, None]) + moved[..., None] * drive[:, None]
        return h, (h * read[:, None]).sum(-1)

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, h, (goes_on, step, step * x, drive, read), unroll=unroll)[1]


def factors(rates, goes_on, step, x, drive):
    a = jnp.exp(-step[..., None] * jnp.exp(rates)) * goes_on[..., None, None]
    return a, (step * x)[..., None] * drive[..., None, :]


def before(rates, goes_on, step, x, drive, read, h, unroll=1):
    """Factors and what drives come before the loop, and what is read after it."""

    def body(h, given):
        h = given[0] * h + given[1]
        return h, h

    h = jax.lax.scan(body, h, factors(rates, goes_on, step, x, drive), unroll=unroll)[1]
    return (h * read[..., None, :]).sum(-1)


def associative(rates, goes_on, step, x, drive, read, h):
    a, u = factors(rates, goes_on, step, x, drive)
    u = u.at[0].add(a[0] * h)
    joined = lambda first, then: (first[0] * then[0], then[0] * first[1] + then[1])  # noqa: E731
    return (jax.lax.associative_scan(joined, (a, u))[1] * read[..., None, :]).sum(-1)


def channels_last(rates, goes_on, step, x, drive, read, h, unroll=1, again=False):
    """As `stepwise`, whose states are ``[B, state, inner]``."""
    rates = -jnp.exp(rates).T

    def body(h, given):
        goes_on, step, moved, drive, read = given
        h = jnp.exp(step[:, None] * rates) * (h * goes_on[:, None, None]) + moved[:, None] * drive[..., None]
        return h, (h * read[..., None]).sum(1)

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, h.swapaxes(1, 2), (goes_on, step, step * x, drive, read), unroll=unroll)[1]


def adjoint(last, unroll=1, keep=True):
    """The recurrence with a derivative by hand: its loop keeps states alone (and factors, if ``keep``), and the loop backwards
    carries what a state sends back and the rates' gradient. ``last``: which axis is innermost, "channels" or "rows"."""
    rows = last == "rows"
    if rows:
        of_channels, of_states = (lambda x: x[None]), (lambda x: x[:, None])  # [inner, B] and [state, B] in [state, inner, B]
        over_channels, over_states, of_rows = (lambda x: x.sum(1)), (lambda x: x.sum(0)), lambda x: x
    else:
        of_channels, of_states = (lambda x: x[:, None]), (lambda x: x[..., None])
        over_channels, over_states, of_rows = (lambda x: x.sum(2)), (lambda x: x.sum(1)), (lambda x: x[:, None, None])

    @jax.custom_vjp
    def run(rates, goes_on, step, moved, drive, read, h):
        return forwards(rates, goes_on, step, moved, drive, read, h)[0]

    def forwards(rates, goes_on, step, moved, drive, read, h):
        def body(h, given):
            goes_on, step, moved, drive, read = given
            before, a = h * of_rows(goes_on), jnp.exp(of_channels(step) * rates)
            h = a * before + of_channels(moved) * of_states(drive)
            return h, (over_states(h * of_states(read)), before, a if keep else None)

        after, (y, before, a) = jax.lax.scan(body, h, (goes_on, step, moved, drive, read), unroll=unroll)
        return y, (rates, goes_on, step, moved, drive, read, before, a, after)

    def backwards(kept, dy):
        rates, goes_on, step, moved, drive, read, before, a, after = kept

        def body(carry, given):
            dh, drates = carry
            dy, goes_on, step, moved, drive, read, before, a = given
            a = jnp.exp(of_channels(step) * rates) if a is None else a
            h = a * before + of_channels(moved) * of_states(drive)
            dh = dh + of_channels(dy) * of_states(read)
            dread = over_channels(h * of_channels(dy))
            dmoved, ddrive = over_states(dh * of_states(drive)), over_channels(dh * of_channels(moved))
            dpower = dh * before * a
            dstep = over_states(dpower * rates)
            by_rates = dpower * of_channels(step)
            return (dh * a * of_rows(goes_on), drates + by_rates), (dstep, dmoved, ddrive, dread)

        xs = dy, goes_on, step, moved, drive, read, before, a
        start = jnp.zeros_like(after), jnp.zeros_like(after)
        (dh, drates), found = jax.lax.scan(body, start, xs, reverse=True, unroll=unroll)
        drates = drates.sum(2, keepdims=True) if rows else drates.sum(0)
        return drates, jnp.zeros_like(goes_on), *found, dh

    run.defvjp(forwards, backwards)

    def scan(rates, goes_on, step, x, drive, read, h):
        rates, moved = -jnp.exp(rates).T, step * x
        if not rows:
            return run(rates, goes_on, step, moved, drive, read, h.swapaxes(1, 2))
        step, moved, drive, read = (jnp.swapaxes(x, 1, 2) for x in (step, moved, drive, read))
        return jnp.swapaxes(run(rates[..., None], goes_on, step, moved, drive, read, h.T), 1, 2)

    return scan


def by_hand(length, batch, learner, flat=True, chunk=None):
    """``chunk``: environments of a block."""

    def loss(p, part):
        data, states = part
        y = learner(p, data, states)
        (y, action, log_mu) = (c.rows_of if flat else lambda x: x)((y, data["action"], data["log_mu"]))
        logits, v = heads(p, y)
        log_prob = c.pick(jax.nn.log_softmax(logits), action)
        timed = lambda x: stop_gradient(x).reshape(data["done"].shape)  # noqa: E731
        target, advantage = c.vtrace(timed(v), jnp.zeros(data["done"].shape[1]), timed(log_prob - log_mu), data, GAMMA)
        target, advantage = (x.reshape(v.shape) for x in (target, advantage))
        return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

    return c.gradient_by_environments(loss, chunk)


def workload(length, batch, width, inner, state, layers, chunk=4):
    def make(scan=stepwise, chunk=None, flat=True, **how):
        scan = functools.partial(scan, **how) if how else scan
        return by_hand(length, batch, functools.partial(layer_by_layer, scan=scan, flat=flat), flat, chunk)

    loss_fn = rlfx.compile(program, length=length, batch=batch)
    whole = lambda **how: by_hand(length, batch, functools.partial(in_loop, **how), flat=False)  # noqa: E731
    channels, again, rows = adjoint("channels"), adjoint("channels", keep=False), adjoint("rows")
    forms = {
        "rlfx": lambda p, data, states: jax.value_and_grad(lambda p: loss_fn((p, data), states)[0])(p),
        "plain": whole(), "checkpointed": whole(again=True), "layer by layer": make(), "not flattened": make(flat=False),
        "layer by layer, checkpointed": make(again=True), "layer by layer, unrolled by 4": make(unroll=4),
        "factors before": make(before), "factors before, unrolled by 4": make(before, unroll=4),
        "associative": make(associative), "channels last": make(channels_last),
        "channels last, checkpointed": make(channels_last, again=True),
        f"channels last, blocks of {chunk}": make(channels_last, chunk=chunk),
        f"channels last, checkpointed, blocks of {chunk}": make(channels_last, chunk=chunk, again=True),
        "adjoint, channels last": make(channels), "adjoint, channels last, factors again": make(again),
        f"adjoint, channels last, blocks of {chunk}": make(channels, chunk=chunk),
        f"adjoint, channels last, factors again, blocks of {chunk}": make(again, chunk=chunk),
        f"adjoint, channels last, blocks of {chunk}, unrolled by 2": make(adjoint("channels", unroll=2), chunk=chunk),
        f"adjoint, channels last, blocks of {chunk}, not flattened": make(channels, chunk=chunk, flat=False),
        "adjoint, channels last, blocks of 2": make(channels, chunk=2), "adjoint, rows last": make(rows),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "log_mu": -1.8 + 0.2 * jax.random.normal(k[2], size), "reward": jax.random.normal(k[3], size),
        "done": (jax.random.uniform(k[4], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    shapes = (batch, inner, state), (batch, TAPS - 1, inner)
    states = [
        tuple(0.1 * jax.random.normal(k, s) for k, s in zip(jax.random.split(k), shapes, strict=True))
        for k in jax.random.split(k[5], layers)
    ]
    return Workload(forms, (params_of(k[6], width, inner, state, layers), data, states), tolerance=1e-5)
