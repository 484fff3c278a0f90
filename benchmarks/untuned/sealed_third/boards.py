"""Deep repeated ConvLSTMs (Guez et al. 2019) on stored games on a small board: layers of convolutional memories that go on for a
few ticks at each timestep, and V-trace."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

PLANES, ACTIONS, WIDTH, GAMMA = 4, 5, 64, 0.97
OFFSETS = [(i, j) for i in range(3) for j in range(3)]


def params_of(key, side, channels, layers):
    k = jax.random.split(key, 4 + 2 * layers)

    def kernel(key, inputs, outputs):
        return jax.random.normal(key, (3, 3, inputs, outputs)) / np.float32(np.sqrt(9 * inputs))

    cells = [
        {"w": kernel(k[2 * i], 3 * channels, 4 * channels), "pool": c.dense(k[2 * i + 1], 2 * channels, 4 * channels)}
        for i in range(layers)
    ]
    heads = {"dense": c.dense(k[-3], 2 * channels * side**2, WIDTH), "pi": c.dense(k[-2], WIDTH, ACTIONS)}
    return heads | {"see": kernel(k[-4], PLANES, channels), "cells": cells, "v": c.dense(k[-1], WIDTH, 1)}


def convolved(x, w):
    """``x[N, S, S, I]``."""
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def lstm_gates(gates, memory):
    i, f, g, o = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(f + 1.0) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def injected(p, h):
    return c.linear(p, jnp.concatenate([h.max((1, 2)), h.mean((1, 2))], -1))[:, None, None]


def cell(p, seen, below, state):
    """Of boards ``[N, S, S, C]``; what is pooled of a layer's output is injected everywhere."""
    h, memory = state
    gates = convolved(jnp.concatenate([seen, below, h], -1), p["w"]) + injected(p["pool"], h)
    return lstm_gates(gates, memory)


def core(p, ticks, x, states):
    """What is seen, and the states of all layers after some ticks; the lowest layer is given the highest's output."""
    seen = jax.nn.relu(convolved(x, p["see"]))
    for _ in range(ticks):
        below, after = states[-1][0], []
        for q, state in zip(p["cells"], states, strict=True):
            after.append(cell(q, seen, below, state))
            below = after[-1][0]
        states = after
    return seen, states


def heads(p, seen, h):
    both = jnp.concatenate([seen, h], -1)
    z = jax.nn.relu(c.linear(p["dense"], both.reshape(*both.shape[:-3], -1)))
    return c.linear(p["pi"], z), c.linear(p["v"], z)[..., 0]


def program(ticks):
    def drc(params, states, t):
        p, data = params
        x = rlfx.inputs(data)[t]
        seen, states = core(p, ticks, x["board"][None], jax.tree.map(lambda s: s[None], states))
        seen, states = jax.tree.map(lambda s: s[0], (seen, states))
        logits, v = heads(p, seen, states[-1][0])
        log_prob = jax.nn.log_softmax(logits)[x["action"]]
        value = rlfx.series(v, end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        found = rlfx.vtrace(step, value, value[t + 1], log_prob - x["log_mu"], gamma=GAMMA)
        target, advantage = stop_gradient(found)
        loss = c.actor_critic_loss(logits, v, log_prob, advantage, target)
        return loss, jax.tree.map(lambda s: jnp.where(x["done"], 0.0, s), states)

    return drc


def by_rlfx(length, batch, ticks):
    loss_fn = rlfx.compile(program(ticks), length=length, batch=batch)
    return lambda p, data, states: jax.value_and_grad(lambda p: loss_fn((p, data), states)[0])(p)


# -- by hand: learners give what is seen and the highest layer's outputs, ``[T, B, S, S, C]``


def reset(done, states):
    return jax.tree.map(lambda s: jnp.where(done[:, None, None, None], 0.0, s), states)


def together(p, ticks, boards, done, states, again=False):
    """The usual loop."""

    def body(states, given):
        x, done = given
        seen, states = core(p, ticks, x, states)
        return reset(done, states), (seen, states[-1][0])

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, states, (boards, done))[1]


def patched(x, w):
    """A convolution as one product of rows of patches."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    size = x.shape[1]
    patches = jnp.concatenate([padded[:, i : i + size, j : j + size] for i, j in OFFSETS], -1)
    flat = patches.reshape(-1, patches.shape[-1]) @ w.reshape(-1, w.shape[-1])
    return flat.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def mixed(x, w):
    """XLA's convolution, whose kernel's gradient is one product of patches."""
    return convolved(x, w)


def mixed_backwards(given, by):
    x, w = given
    (dx,) = jax.vjp(lambda x: convolved(x, w), x)[1](by)
    (dw,) = jax.vjp(lambda w: patched(x, w), w)[1](by)
    return dx, dw


mixed.defvjp(lambda x, w: (convolved(x, w), (x, w)), mixed_backwards)


def ticked(w, ticks, conv, pre, states):
    """One timestep; ``pre[tick][layer]`` are products with what is seen. States, and what each product was taken of."""
    given = []
    for tick in range(ticks):
        below, after = states[-1][0], []
        for (kernel, pool), x, (h, memory) in zip(w, pre[tick], states, strict=True):
            both = jnp.concatenate([below, h], -1)
            after.append(lstm_gates(conv(both, kernel) + x + injected(pool, h), memory))
            given.append(both)
            below = after[-1][0]
        states = after
    return states, given


def before_loop(p, conv, boards):
    """What is seen, and what the cells make of it, ``[T, B, ...]``."""
    unflat = lambda x: x.reshape(*boards.shape[:2], *x.shape[1:])  # noqa: E731
    seen = jax.nn.relu(conv(c.rows_of(boards), p["see"]))
    return unflat(seen), [unflat(conv(seen, q["w"][:, :, : seen.shape[-1]])) for q in p["cells"]]


def hoisted(p, ticks, boards, done, states, conv=convolved, after=False, again=False):
    """Products with what is seen are outside of the loop, once for all ticks; ``after``: so are the gradients of the kernels."""
    seen, pre = before_loop(p, conv, boards)
    w = [(q["w"][:, :, seen.shape[-1] :], q["pool"]) for q in p["cells"]]

    def loop(w, pre):
        """``pre[T, ticks, ...]`` of each layer, or without ticks."""

        def body(states, given):
            done, *pre = given
            per_tick = [[x[i] for x in pre] for i in range(ticks)] if after else [pre] * ticks
            states, inputs = ticked(w, ticks, conv, per_tick, states)
            return reset(done, states), (states[-1][0], inputs if after else None)

        body = jax.checkpoint(body, prevent_cse=False) if again else body
        return jax.lax.scan(body, states, (done, *pre))[1]

    return seen, kernels_after(loop, conv, ticks, w, pre) if after else loop(w, pre)[0]


def sent_on(p, ticks, boards, done, states, conv=patched, again=False):
    """A layer's output is multiplied once, by the kernels of all that read it: those products are what the loop carries."""
    seen, pre = before_loop(p, conv, boards)
    cells, channels = p["cells"], seen.shape[-1]
    own = [q["w"][:, :, 2 * channels :] for q in cells]
    above = [q["w"][:, :, channels : 2 * channels] for q in [*cells[1:], cells[0]]]
    kernels = [jnp.concatenate(w, -1) for w in zip(own, above, strict=True)]

    def sent(layer, h):
        to_own, to_next = jnp.split(conv(h, kernels[layer]), 2, -1)
        pooled = jnp.concatenate([h.max((1, 2)), h.mean((1, 2))], -1) @ cells[layer]["pool"]["w"]
        return to_own + pooled[:, None, None], to_next

    def body(carry, given):
        (memories, owns, below), (done, *pre) = carry, given
        for _ in range(ticks):
            after = []
            for layer, x in enumerate(pre):
                h, memory = lstm_gates(x + owns[layer] + below + cells[layer]["pool"]["b"], memories[layer])
                to_own, below = sent(layer, h)
                after.append((memory, to_own))
            memories, owns = (list(x) for x in zip(*after, strict=True))
        return reset(done, (memories, owns, below)), h

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    begun = [sent(layer, h) for layer, (h, _) in enumerate(states)]
    start = [memory for _, memory in states], [to_own for to_own, _ in begun], begun[-1][1]
    return seen, jax.lax.scan(body, start, (done, *pre))[1]


def kernels_after(loop, conv, ticks, w, pre):
    """The loop backwards gives the gradients of all gates; those of the kernels are taken of all timesteps at once."""

    @jax.custom_vjp
    def run(w, pre):
        return loop(w, [jnp.repeat(x[:, None], ticks, 1) for x in pre])[0]

    def forwards(w, pre):
        each = [jnp.repeat(x[:, None], ticks, 1) for x in pre]
        h, backwards, inputs = jax.vjp(lambda x: loop(w, x), each, has_aux=True)
        return h, (w, backwards, inputs)

    def backwards(residuals, by):
        w, through, inputs = residuals
        (dgates,) = through(by)
        found = [jax.tree.map(jnp.zeros_like, layer) for layer in w]
        for i, both in enumerate(inputs):
            tick, layer = divmod(i, len(w))
            both, by_gates = c.rows_of((both, dgates[layer][:, tick]))
            h = jnp.split(both, 2, -1)[1]
            made = lambda q, both=both, h=h: conv(both, q[0]) + injected(q[1], h)  # noqa: E731
            (more,) = jax.vjp(made, w[layer])[1](by_gates)
            found[layer] = jax.tree.map(jnp.add, found[layer], more)
        return found, [d.sum(1) for d in dgates]

    run.defvjp(forwards, backwards)
    return run(w, pre)


def by_hand(length, batch, learner, chunk=None):
    """``chunk``: environments of a block."""

    def loss(p, part):
        data, states = part
        outputs = heads(p, *c.rows_of(learner(p, boards=data["board"], done=data["done"], states=states)))
        logits, v = (x.reshape(*data["done"].shape, *x.shape[1:]) for x in outputs)
        log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
        log_rho = stop_gradient(log_prob) - data["log_mu"]
        target, advantage = c.vtrace(stop_gradient(v), jnp.zeros_like(v[0]), log_rho, data, GAMMA)
        return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

    return c.gradient_by_environments(loss, chunk)


def workload(length, batch, side, channels, layers, ticks, chunk=2):
    def make(learner=hoisted, chunk=None, **how):
        return by_hand(length, batch, functools.partial(learner, ticks=ticks, **how), chunk)

    mix, rows = {"conv": mixed}, {"conv": patched}
    forms = {
        "rlfx": by_rlfx(length, batch, ticks), "plain": make(together), "checkpointed": make(together, again=True),
        "hoisted": make(), "hoisted, kernels after": make(after=True),
        "hoisted, mixed": make(**mix), "hoisted, mixed, checkpointed": make(**mix, again=True),
        "hoisted, patches": make(**rows), "hoisted, patches, checkpointed": make(**rows, again=True),
        "hoisted, patches, kernels after": make(**rows, after=True),
        f"hoisted, patches, blocks of {chunk}": make(**rows, chunk=chunk),
        f"hoisted, patches, checkpointed, blocks of {chunk}": make(**rows, chunk=chunk, again=True),
        "sent on, mixed": make(sent_on, **mix), "sent on, patches": make(sent_on),
        "sent on, patches, checkpointed": make(sent_on, again=True),
        "sent on, patches, blocks of 1": make(sent_on, chunk=1),
        f"sent on, patches, blocks of {chunk}": make(sent_on, chunk=chunk),
        f"sent on, patches, checkpointed, blocks of {chunk}": make(sent_on, chunk=chunk, again=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "board": (jax.random.uniform(k[0], (*size, side, side, PLANES)) < 0.25).astype(jnp.float32),
        "action": jax.random.randint(k[1], size, 0, ACTIONS), "log_mu": -1.6 + 0.2 * jax.random.normal(k[2], size),
        "reward": jax.random.normal(k[3], size), "done": (jax.random.uniform(k[4], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    shape = batch, side, side, channels
    states = [
        tuple(0.1 * jax.random.normal(k, shape) for k in jax.random.split(k, 2)) for k in jax.random.split(k[5], layers)
    ]
    return Workload(forms, (params_of(k[6], side, channels, layers), data, states), tolerance=1e-5)
