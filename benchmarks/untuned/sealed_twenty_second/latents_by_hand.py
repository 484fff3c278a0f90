"""Dreamer's behaviours by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twenty_second import latents as given
from benchmarks.untuned.sealed_twenty_second.latents import (
    ACTIONS,
    CLASSES,
    ENTROPY,
    GAMMA,
    GROUPS,
    HORIZON,
    LAMBDA,
    LATENT,
    elu,
    gru,
    model_of,
    params_of,
)  # fmt: skip


def drawn(key, length, batch):
    """Gumbel noise of actions ``[HORIZON, N, ACTIONS]`` and latents ``[HORIZON, N, GROUPS, CLASSES]``."""
    (keys,) = c.streams(key, batch, "dream")
    keys = jax.vmap(lambda t: c.at(keys, t))(jnp.arange(length)).reshape(-1)

    def of(key):
        def step(key):
            act, latent = jax.random.split(key)
            return jax.random.gumbel(act, (ACTIONS,)), jax.random.gumbel(latent, (GROUPS, CLASSES))

        return jax.vmap(step)(jax.random.split(key, HORIZON))

    return jax.vmap(of, out_axes=1)(keys)


def softmax(x, axis):
    """Without looking for the largest twice."""
    grown = jnp.exp(x - stop_gradient(x.max(axis, keepdims=True)))
    return grown / grown.sum(axis, keepdims=True)


def straight(logits, noise, axis):
    """One-hot by comparing, with the gradient of probabilities."""
    noisy = stop_gradient(logits) + noise
    hot = (noisy == noisy.max(axis, keepdims=True)).astype(logits.dtype)
    probs = softmax(logits, axis)
    return hot + probs - stop_gradient(probs)


class StateRows:
    """Features come last."""

    axis = -1

    def product(self, w, x):
        return x @ w

    def bias(self, b):
        return b

    def linear(self, p, x):
        return self.product(p["w"], x) + self.bias(p["b"])

    def of_state(self, layer, h, z):
        """A layer of memory and latents, without joining them."""
        size = h.shape[self.axis]
        return self.product(layer["w"][:size], h) + self.product(layer["w"][size:], z) + self.bias(layer["b"])

    def groups(self, x):
        return x.reshape(-1, GROUPS, CLASSES)

    def flat(self, x):
        return x.reshape(-1, LATENT)

    def squeeze(self, x):
        return x[..., 0]

    def gru(self, made, told, h):
        return gru(made, told, h)


class StateColumns(StateRows):
    """Rows are innermost."""

    axis = 0

    def product(self, w, x):
        return w.T @ x

    def bias(self, b):
        return b[:, None]

    def groups(self, x):
        return x.reshape(GROUPS, CLASSES, -1)

    def flat(self, x):
        return x.reshape(LATENT, -1)

    def squeeze(self, x):
        return x[0]

    def gru(self, made, told, h):
        xr, xz, xn = jnp.split(made, 3)
        hr, hz, hn = jnp.split(told, 3)
        keep = jax.nn.sigmoid(xz + hz)
        return keep * h + (1.0 - keep) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


class Way(NamedTuple):
    layout: StateRows = StateRows()
    unroll: int = 1
    again: bool = False  # a step is computed a second time
    after: bool = False  # the actor's weights have their gradients of all steps at once, behind the loop
    joined: bool = False  # first layers of heads are one product
    states: int | None = None  # stored states after the others


def by_hand(length, batch, way):
    lay, axis = way.layout, way.layout.axis
    flat_axis = 1 if axis == 0 else 0  # of rows

    def two(layers, h, z):
        return lay.linear(layers[1], elu(lay.of_state(layers[0], h, z)))

    def heads(nets, h, z):
        if not way.joined:
            return [two(layers, h, z) for layers in nets]
        first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(layers[0] for layers in nets))
        hidden = jnp.split(elu(lay.of_state(first, h, z)), len(nets), axis)
        return [lay.linear(layers[1], x) for layers, x in zip(nets, hidden, strict=True)]

    def every(x):
        """``[HORIZON, ...]`` of all steps as rows."""
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1) if axis == 0 else x.reshape(-1, x.shape[-1])

    def steps_of(x, rows):
        """Back, of one number a row."""
        return x.reshape(-1, rows)

    def step(p, m, carry, x):
        """``more``: what is added to the actor's layers."""
        (h, z), (act_noise, latent_noise, more) = carry, x
        asked = stop_gradient((h, z))
        hidden = elu(lay.of_state(p["actor"][0], *asked) + more[0])
        logits = lay.linear(p["actor"][1], hidden) + more[1]
        action = straight(logits, act_noise, axis)
        w = m["in"]
        x = elu(lay.product(w["w"][:LATENT], z) + lay.product(w["w"][LATENT:], action) + lay.bias(w["b"]))
        h = lay.gru(lay.linear(m["x"], x), lay.linear(m["h"], h), h)
        prior = lay.linear(m["prior"][1], elu(lay.linear(m["prior"][0], h)))
        z = lay.flat(straight(lay.groups(prior), latent_noise, -1 if axis == -1 else 1))
        return (h, z), (h, z, logits, asked, hidden)

    def imagined(p, others, h, z, noise, more):
        """Sum of losses of some states; what the actor was asked, and its hidden layer."""
        m, old = others
        body = functools.partial(step, p, m)
        body = jax.checkpoint(body) if way.again else body
        _, (hs, zs, logits, asked, hidden) = jax.lax.scan(body, (h, z), (*noise, more), unroll=way.unroll)
        rows = h.shape[flat_axis]
        told = heads((m["reward"], m["going"], old), every(hs), every(zs))
        reward, going, value = (steps_of(lay.squeeze(x), rows) for x in told)
        discount = GAMMA * jax.nn.sigmoid(going)
        target, found = value[-1], []
        for i in reversed(range(HORIZON)):
            target = reward[i] + discount[i] * ((1.0 - LAMBDA) * value[i] + LAMBDA * target)
            found.append(target)
        target = jnp.stack(found[::-1])
        fixed = stop_gradient(discount)
        weight = jnp.cumprod(jnp.concatenate([jnp.ones_like(fixed[:1]), fixed[:-1]]), 0)
        log_p = jax.nn.log_softmax(logits, axis if axis == -1 else 1)
        entropy = -(jnp.exp(log_p) * log_p).sum(axis if axis == -1 else 1)
        before = (every(x) for x in asked)
        valued = steps_of(lay.squeeze(two(p["critic"], *before)), rows)
        critic_loss = 0.5 * weight * (valued - stop_gradient(target)) ** 2
        loss = (critic_loss - weight * (target + ENTROPY * entropy)).sum() / (HORIZON * length * batch)
        return loss, (asked, hidden)

    def learn(p, others, part):
        """Value and gradient of a part of states."""
        h, z, noise = part
        size = p["actor"][0]["b"].shape[0]
        shape = (lambda n: (HORIZON, n, h.shape[1])) if axis == 0 else (lambda n: (HORIZON, h.shape[0], n))
        none = jnp.zeros(shape(size)), jnp.zeros(shape(ACTIONS))
        if not way.after:
            lost = lambda p: imagined(p, others, h, z, noise, tuple(jnp.zeros((HORIZON, 1, 1)) for _ in none))[0]  # noqa: E731
            return jax.value_and_grad(lost)(p)

        def lost(critic, more):
            return imagined({"actor": stop_gradient(p["actor"]), "critic": critic}, others, h, z, noise, more)

        found = jax.value_and_grad(lost, (0, 1), has_aux=True)(p["critic"], none)
        (loss, (asked, hidden)), (by_critic, by_layers) = found
        asked, hidden = (every(x) for x in asked), every(hidden)
        behind = lambda actor, asked=tuple(asked): (lay.of_state(actor[0], *asked), lay.linear(actor[1], hidden))  # noqa: E731
        by_actor = jax.vjp(behind, p["actor"])[1](tuple(every(x) for x in by_layers))[0]
        return loss, {"actor": by_actor, "critic": by_critic}

    def run(p, others, data, key):
        h, z = c.rows_of((data["h"], data["z"]))
        noise = drawn(key, length, batch)
        if way.states is None:
            return learn(p, others, turned((h, z, noise)))
        cut = lambda x, axis: jnp.moveaxis(x.reshape(*x.shape[:axis], -1, way.states, *x.shape[axis + 1 :]), axis, 0)  # noqa: E731
        parts = cut(h, 0), cut(z, 0), jax.tree.map(lambda x: cut(x, 1), noise)
        add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, others, turned(x))), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]

    def turned(part):
        h, z, noise = part
        if axis == -1:
            return part
        return h.T, z.T, (jnp.moveaxis(noise[0], 1, -1), jnp.moveaxis(noise[1], 1, -1))

    return run


def flat(length, batch):
    """As usual, but of rows from the first."""

    def run(p, others, data, key):
        (m, old), (h, z), draws = others, c.rows_of((data["h"], data["z"])), drawn(key, length, batch)

        def loss(p):
            def body(carry, noise):
                h, z = carry
                logits = c.mlp(p["actor"], stop_gradient(jnp.concatenate([h, z], -1)), elu)
                action = given.straight(logits, jnp.argmax(logits + noise[0], -1))
                h, prior = given.moved(m, h, z, action)
                z = given.straight(prior, jnp.argmax(prior + noise[1], -1)).reshape(len(h), -1)
                return (h, z), (jnp.concatenate([h, z], -1), given.entropy_of(logits))

            state, entropy = jax.lax.scan(body, (h, z), draws)[1]
            state = jnp.concatenate([jnp.concatenate([h, z], -1)[None], state])
            return given.losses(p, m, old, state, entropy).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, states=32):
    make = functools.partial(by_hand, length, batch)
    after, both = Way(after=True), Way(after=True, joined=True)
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "flat": flat(length, batch), "heads after, unrolled": make(Way(unroll=HORIZON)), "again": make(Way(again=True)),
        "weights after": make(after), "weights after, joined": make(both),
        "features first, weights after, joined": make(both._replace(layout=StateColumns())),
        f"weights after, {states} states": make(after._replace(states=states)),
        f"weights after, joined, {states} states": make(both._replace(states=states)),
        "weights after, joined, threefry unrolled": make(both),
        f"weights after, {states} states, threefry unrolled": make(after._replace(states=states)),
        f"weights after, joined, {states} states, threefry unrolled": make(both._replace(states=states)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    chosen = jax.random.randint(k[1], (*size, GROUPS), 0, CLASSES)
    data = {"h": jnp.tanh(jax.random.normal(k[0], (*size, hidden))), "z": jax.nn.one_hot(chosen, CLASSES).reshape(*size, LATENT)}
    others = model_of(k[2], hidden), params_of(k[3], hidden)["critic"]
    return drawing(forms, (params_of(k[4], hidden), others, data), tolerance=5e-5)
