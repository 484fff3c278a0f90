"""Multi-task IMPALA with PopArt (Hessel et al. 2019): an LSTM over another policy's data of several tasks, a value for each of
them, and V-trace. Targets are normalised by moments of their task, which the batch itself moves first."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fifth import recurrent as r

OBS, ACTIONS, GAMMA, RATE, LEAST = r.OBS, 6, 0.99, 0.1, 1e-2


def params_of(key, tasks, hidden):
    k = jax.random.split(key, 5)
    sizes = {
        "in": (OBS, hidden), "x": (hidden, 4 * hidden), "h": (hidden, 4 * hidden), "pi": (hidden, ACTIONS), "v": (hidden, tasks),
    }  # fmt: skip
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def deviation(moments):
    return jnp.sqrt(jnp.maximum(moments["second"] - moments["mean"] ** 2, LEAST**2))


def point_loss(log_probs, v, action, aim, gained):
    """``v``: normalised values, ``aim`` their normalised targets."""
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return 0.5 * (v - aim) ** 2 - c.pick(log_probs, action) * gained - 0.01 * entropy


def program(params, memory, t):
    p, moments, data, tasks = params
    x, task = rlfx.inputs(data)[t], rlfx.inputs(tasks, axes="b")[t]
    memory = r.lstm(p, r.forgotten(x["first"], memory), x["obs"])
    log_probs, v = jax.nn.log_softmax(c.linear(p["pi"], memory[1])), c.linear(p["v"], memory[1])[task]
    value = rlfx.series(stop_gradient(deviation(moments)[task] * v + moments["mean"][task]), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    log_rho = log_probs[x["action"]] - x["log_mu"]
    target, advantage = stop_gradient(rlfx.vtrace(step, value, value[t + 1], log_rho, gamma=GAMMA))

    hot = jax.nn.one_hot(task, len(moments["mean"]))
    mean_of = lambda y: rlfx.sum(hot * y) / rlfx.sum(hot)  # noqa: E731
    toward = lambda old, new: old + RATE * (new - old)  # noqa: E731
    moved = {
        "mean": toward(moments["mean"], mean_of(target)),
        "second": toward(moments["second"], mean_of(target**2)),
    }
    scale = deviation(moved)[task]
    aim = (target - moved["mean"][task]) / scale
    return point_loss(log_probs, v, x["action"], aim, advantage / scale), memory, moved


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, moments, data, tasks, memory):
        of = lambda p: loss_fn((p, moments, data, tasks), memory)  # noqa: E731
        (loss, (_, moved)), grads = jax.value_and_grad(of, has_aux=True)(p)
        return loss, grads, moved

    return run


# -- by hand: the recurrence, ``h[T, B, H]``; others are those of recurrent PPO


def one_tanh(p, memory, obs, first, unroll=1):
    """All gates are one hyperbolic tangent, for which the weights of the logistic ones are halved before the loop; the way back
    is written out, and the weights' gradient is of all timesteps at once."""
    hidden = memory[0].shape[-1]
    halves = jnp.repeat(jnp.array([0.5, 0.5, 1.0, 0.5]), hidden)
    ahead = jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), hidden)
    goes_on = 1.0 - first.astype(jnp.float32)[..., None]

    def gates(made):
        i, f, g, o = jnp.split(made, 4, -1)
        return 0.5 * i + 0.5, 0.5 * f + 0.5, g, 0.5 * o + 0.5

    def forwards(w, x):
        def body(memory, x):
            cell, h = memory[0] * x[1], memory[1] * x[1]
            made = jnp.tanh(x[0] + h @ w)
            i, f, g, o = gates(made)
            after = f * cell + i * g
            squashed = jnp.tanh(after)
            return (after, o * squashed), (o * squashed, (cell, h, squashed, made))

        hs, kept = jax.lax.scan(body, memory, (x, goes_on), unroll=unroll)[1]
        return hs, (w, kept)

    @jax.custom_vjp
    def run(w, x):
        return forwards(w, x)[0]

    def backwards(residuals, by):
        w, kept = residuals
        turned = w.T

        def body(carry, x):
            (by_cell, by_h), (by, on, (cell, _, squashed, made)) = carry, x
            i, f, g, o = gates(made)
            by_h = by_h + by
            by_cell = by_cell + by_h * o * (1.0 - squashed**2)
            by_gates = jnp.concatenate([by_cell * g, by_cell * cell, by_cell * i, by_h * squashed], -1)
            by_made = by_gates * (halves * (1.0 - made**2))
            return (by_cell * f * on, (by_made @ turned) * on), by_made

        start = jax.tree.map(jnp.zeros_like, memory)
        by_made = jax.lax.scan(body, start, (by, goes_on, kept), reverse=True, unroll=unroll)[1]
        return c.rows_of(kept[1]).T @ c.rows_of(by_made), by_made

    run.defvjp(forwards, backwards)
    x = r.embedded(p, obs.reshape(-1, OBS)) @ (p["x"]["w"] * halves) + (p["x"]["b"] + p["h"]["b"] + ahead) * halves
    return run(p["h"]["w"] * halves, x.reshape(*first.shape, -1))


def in_blocks(p, memory, obs, first, chunk):
    """The recurrence of some timesteps is computed again for the gradient."""

    def step(memory, x):
        cell, h = r.forgotten(x[1][:, None], memory)
        memory = r.gates(x[0] + h @ p["h"]["w"], cell)
        return memory, memory[1]

    def block(memory, x):
        made = r.embedded(p, x[0]) @ p["x"]["w"] + (p["x"]["b"] + p["h"]["b"])
        return jax.lax.scan(step, memory, (made, x[1]))

    hs = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), memory, c.in_chunks((obs, first), chunk))[1]
    return hs.reshape(*first.shape, -1)


# -- by hand: heads of ``h[N, H]``: logits, and values of the rows' tasks, ``hot[N, tasks]``


def apart(p, h, task, hot):
    return c.linear(p["pi"], h), c.pick(c.linear(p["v"], h), task)


def by_ones(p, h, task, hot):
    return c.linear(p["pi"], h), (c.linear(p["v"], h) * hot).sum(-1)


def heads_joined(p, h, task, hot):
    """One product; the task's value is picked by ones and zeros."""
    made = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"]), h)
    return made[..., :ACTIONS], (made[..., ACTIONS:] * hot).sum(-1)


def own_task(p, h, task, hot):
    """Only the task's value."""
    return c.linear(p["pi"], h), (h * (hot @ p["v"]["w"].T)).sum(-1) + hot @ p["v"]["b"]


# -- by hand: sums of targets ``[T, B]`` and of their squares, over the environments of each task


def of_points(target, hot):
    """``hot[T, B, tasks]``."""
    return (hot * target[..., None]).sum((0, 1)), (hot * target[..., None] ** 2).sum((0, 1)), hot.sum((0, 1))


def of_environments(target, hot):
    """Over timesteps first, for a task is an environment's own."""
    both = jnp.stack([target.sum(0), (target**2).sum(0)]) @ hot[0]
    return both[0], both[1], len(hot) * hot[0].sum(0)


def by_hand(length, batch, recurrence=r.stepwise, heads=apart, sums=of_environments, flat=True, unroll=1):
    """``unroll``: of V-trace's loop."""

    def run(p, moments, data, tasks, memory):
        flatten = c.rows_of if flat else lambda x: x
        count = len(moments["mean"])
        task = jnp.broadcast_to(tasks, (length, batch))
        hot = jnp.broadcast_to(jax.nn.one_hot(tasks, count), (length, batch, count))
        going = 1.0 - data["done"].astype(jnp.float32)

        def loss(p):
            h = recurrence(p, memory, data["obs"], data["first"])
            logits, v = heads(p, *flatten((h, task, hot)))
            log_probs = jax.nn.log_softmax(logits)
            fixed = stop_gradient(v.reshape(length, batch))
            value = deviation(moments)[tasks] * fixed + moments["mean"][tasks]
            log_prob = stop_gradient(c.pick(log_probs, flatten(data["action"]))).reshape(length, batch)
            clipped = jnp.minimum(jnp.exp(log_prob - data["log_mu"]), 1.0)
            zero = jnp.zeros(batch)
            delta = clipped * (data["reward"] + GAMMA * going * c.shifted(value, zero) - value)
            target = value + c.discounted(delta, GAMMA * going * clipped, unroll)
            advantage = clipped * (data["reward"] + GAMMA * going * c.shifted(target, zero) - value)
            first, second, number = sums(target, hot)
            toward = lambda old, new: old + RATE * (new / number - old)  # noqa: E731
            moved = {"mean": toward(moments["mean"], first), "second": toward(moments["second"], second)}
            scale = deviation(moved)[tasks]
            aim = (target - moved["mean"][tasks]) / scale
            found = point_loss(log_probs, v, *flatten((data["action"], aim, advantage / scale)))
            return found.sum() / (length * batch), moved

        (found, moved), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, moved

    return run


def workload(length, batch, tasks, hidden, chunk=8):
    make = lambda recurrence=r.stepwise, heads=apart, **how: by_hand(length, batch, recurrence, heads, **how)  # noqa: E731
    cut = lambda recurrence, unroll: functools.partial(recurrence, unroll=unroll)  # noqa: E731
    after, joined, four = r.weights_after, heads_joined, {"unroll": 4}
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(sums=of_points, flat=False), "rows": make(), "hoisted": make(r.hoisted),
        "joined": make(r.joined), "heads joined": make(heads=joined), "own task": make(r.hoisted, own_task),
        "hoisted, heads joined": make(r.hoisted, joined), "hoisted, again": make(functools.partial(r.hoisted, again=True)),
        f"hoisted, blocks of {chunk}": make(functools.partial(in_blocks, chunk=chunk)),
        "hoisted, unrolled by 2": make(cut(r.hoisted, 2)),
        "weights after": make(after), "weights after, not flattened": make(after, flat=False),
        "weights after, by ones": make(after, by_ones), "weights after, heads joined": make(after, joined, **four),
        "weights after, heads joined, unrolled by 2": make(cut(after, 2), joined, **four), "one tanh": make(one_tanh),
        "one tanh, by ones": make(one_tanh, by_ones, **four), "one tanh, heads joined": make(one_tanh, joined, **four),
        "one tanh, heads joined, unrolled by 2": make(cut(one_tanh, 2), joined, **four),
        "one tanh, heads joined, unrolled by 4": make(cut(one_tanh, 4), joined, **four),
        "one tanh, own task": make(one_tanh, own_task, **four),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    done = jax.random.uniform(k[0], size) < 0.03
    own = jnp.arange(batch) % tasks
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "action": jax.random.randint(k[2], size, 0, ACTIONS), "done": done,
        "reward": (1.0 + own) * jax.random.normal(k[3], size) + own, "log_mu": -1.8 + 0.3 * jax.random.normal(k[4], size),
        "first": jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]]),
    }  # fmt: skip
    moments = {"mean": 3.0 + jnp.arange(tasks, dtype=jnp.float32)}
    moments["second"] = moments["mean"] ** 2 + 1.0 + moments["mean"]
    memory = tuple(0.3 * jax.random.normal(x, (batch, hidden)) for x in jax.random.split(k[5]))
    given = params_of(k[6], tasks, hidden), moments, data, jax.random.permutation(k[7], own), memory
    return Workload(forms, given, tolerance=2e-5)
