"""Contrastive prediction over time (CPC): a GRU's context tells the encodings of the next timesteps from all of its sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import Workload

OBS = 16


def params_of(key, code, hidden, steps):
    k = jax.random.split(key, 4)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, code)), "x": c.dense(k[1], code, 3 * hidden),
        "h": c.dense(k[2], hidden, 3 * hidden),
        "ahead": jax.random.normal(k[3], (steps, hidden, code)) / np.float32(np.sqrt(hidden)),
    }  # fmt: skip


def by_rlfx(length, batch, steps):
    def program(params, h, t):
        p, obs = params
        z = c.mlp(p["encoder"], rlfx.inputs(obs)[t])
        h = gates(c.linear(p["x"], z), c.linear(p["h"], h), h)
        codes, loss = rlfx.series(z), 0.0
        for k in range(1, steps + 1):
            told = h @ p["ahead"][k - 1]
            right = codes[rlfx.minimum(t + k, t.length - 1)] @ told
            wrong = jax.nn.logsumexp(codes[:] @ told)
            loss += jnp.where(t + k < t.length, wrong - right, 0.0)
        return loss, h

    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, obs, h: jax.value_and_grad(lambda p: loss_fn((p, obs), h)[0])(p)


def contexts(p, z, h, hoisted, chunk):
    """``[T, B, H]``; ``hoisted``: products with codes before the loop; ``chunk``: its gradient runs so many steps again."""
    xs = c.linear(p["x"], z) if hoisted else z

    def body(h, x):
        h = gates(x if hoisted else c.linear(p["x"], x), c.linear(p["h"], h), h)
        return h, h

    if chunk is None:
        return jax.lax.scan(body, h, xs)[1]
    part = jax.checkpoint(lambda h, xs: jax.lax.scan(body, h, xs), prevent_cse=False)
    hs = jax.lax.scan(part, h, c.in_chunks(xs, chunk))[1]
    return hs.reshape(*z.shape[:2], -1)


def by_hand(length, batch, steps, scored="at once", hoisted=False, chunk=None, again=False):
    """``scored``: of all steps at once, of one step at a time, or of one sequence at a time."""

    def of_step(weights, k, hs, z):
        """``hs, z[..., T, features]``, sequences first."""
        told = hs @ weights
        wrong = jax.nn.logsumexp(told @ jnp.swapaxes(z, -1, -2), -1)
        right = (told * jnp.roll(z, -k, -2)).sum(-1)
        return jnp.where(np.arange(length) + k < length, wrong - right, 0.0).sum()

    def scores(p, hs, z):
        if scored == "at once":
            told = jnp.einsum("tbh,khc->btkc", hs, p["ahead"])
            wrong = jax.nn.logsumexp(jnp.einsum("btkc,sbc->btks", told, z), -1)
            ahead = jnp.stack([jnp.roll(z, -k, 0) for k in range(1, steps + 1)], 2)
            right = jnp.einsum("btkc,tbkc->btk", told, ahead)
            counted = np.arange(length)[:, None] + np.arange(1, steps + 1) < length
            return jnp.where(counted, wrong - right, 0.0).sum()
        one = jax.checkpoint(of_step, static_argnums=1) if again else of_step
        some = lambda hs, z: sum(one(w, k + 1, hs, z) for k, w in enumerate(p["ahead"]))  # noqa: E731
        hs, z = jnp.swapaxes(hs, 0, 1), jnp.swapaxes(z, 0, 1)
        return some(hs, z) if scored == "by step" else jax.lax.map(lambda x: some(*x), (hs, z)).sum()

    def loss(p, obs, h):
        z = c.mlp(p["encoder"], obs)
        return scores(p, contexts(p, z, h, hoisted, chunk), z) / (length * batch)

    return jax.value_and_grad(loss)


def workload(length, batch, steps, code, hidden, chunk=16):
    k = jax.random.split(jax.random.key(0))
    make = lambda **how: by_hand(length, batch, steps, **how)  # noqa: E731
    step, sequence = {"scored": "by step", "hoisted": True}, {"scored": "by sequence", "hoisted": True}
    forms = {
        "rlfx": by_rlfx(length, batch, steps), "plain": make(), "hoisted": make(hoisted=True), "by step": make(**step),
        "by step, again": make(**step, again=True), "by sequence, again": make(**sequence, again=True),
        f"by step, checkpointed by {chunk}": make(**step, chunk=chunk),
    }  # fmt: skip
    obs = jax.random.normal(k[1], (length, batch, OBS))
    return Workload(forms, (params_of(k[0], code, hidden, steps), obs, jnp.zeros((batch, hidden))))
