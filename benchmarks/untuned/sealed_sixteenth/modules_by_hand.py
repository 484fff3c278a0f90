"""Recurrent independent mechanisms by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_sixteenth import modules as given
from benchmarks.untuned.sealed_sixteenth.modules import ACTIONS, ACTIVE, KEY, OBS, gated, loss_of, params_of

# -- of modules first: ``h[modules, B, width]``


def by_top(score):
    """Which go on, ``[modules, B]``."""
    _, first = jax.lax.top_k(score.T, ACTIVE)
    return jax.nn.one_hot(first, len(score)).sum(1).T


def by_counts(score):
    """Those that fewer than ``ACTIVE`` others are above; of equal ones the first."""
    ahead = score[:, None] > score
    equal = (score[:, None] == score) & (jnp.arange(len(score))[:, None] < jnp.arange(len(score)))[..., None]
    return ((ahead | equal).sum(0) < ACTIVE).astype(jnp.float32)


def talked_apart(talk, h, multiply):
    return (multiply(name, h, talk[name]) for name in "qkv")


def talked_joined(talk, h, multiply):
    made = multiply("talk", h, jnp.concatenate([talk[name] for name in "qkv"], -1))
    return jnp.split(made, [KEY, 2 * KEY], -1)


def product(name, x, w):
    return x @ w


def spoken(query, key, value):
    """What modules read of one another, ``[modules, B, width]``."""
    weights = jax.nn.softmax(jnp.einsum("mbk,nbk->bmn", query, key) / KEY**0.5)
    return jnp.einsum("bmn,nbw->mbw", weights, value)


def spoken_by_elements(query, key, value):
    """The same, where small products are sums of elements."""
    weights = jax.nn.softmax((query[:, None] * key).sum(-1) / KEY**0.5, axis=1)
    return (weights[..., None] * value).sum(1)


def step_of(top, talked, spoken, multiply=product):
    """``asked``, ``of_read``: what is known before of the input, for all timesteps; see ``ahead``."""

    def step(p, h, x):
        h = jnp.where(x["first"][:, None], p["start"][:, None], h)
        score = (h * x["asked"]).sum(-1)
        share, active = jax.nn.sigmoid(score)[..., None], top(score)[..., None]
        new = gated(share * x["of_read"] + p["x"]["b"][:, None], multiply("h", h, p["h"]), h)
        h = active * new + (1.0 - active) * h
        return h + active * spoken(*talked(p["talk"], h, multiply))

    return step


def ahead(p, obs):
    """Of ``[T, B, OBS]``: a module's state times ``asked[T, modules, B, width]`` is its score; ``of_read[..., 3 width]`` is what
    its GRU makes of the input, but for the share that is looked at."""
    look = p["look"]
    size, rows = obs.shape[:2], obs.reshape(-1, OBS)
    key, value = rows @ (look["k"] / KEY**0.5), rows @ look["v"]
    by_time = lambda x: jnp.moveaxis(x.reshape(len(p["h"]), *size, -1), 1, 0)  # noqa: E731
    return by_time(key @ look["q"].mT), by_time(value @ p["x"]["w"])


def ahead_joined(p, obs):
    """The same, where products of weights come first: one product of the observations."""
    look, (modules, width, _) = p["look"], p["h"].shape
    of_obs = jnp.concatenate([(look["k"] / KEY**0.5) @ look["q"].mT, look["v"] @ p["x"]["w"]], -1)
    made = obs @ jnp.moveaxis(of_obs, 0, 1).reshape(OBS, -1)
    made = jnp.moveaxis(made.reshape(*obs.shape[:2], modules, -1), 2, 1)
    return made[..., :width], made[..., width:]


def heads_of(p, states):
    """Of ``states[T, modules, B, width]``."""
    flat = jnp.moveaxis(states, 1, 2).reshape(*states.shape[::2][:2], -1)
    made = flat @ jnp.concatenate([p["pi"]["w"], p["v"]["w"]], -1) + jnp.concatenate([p["pi"]["b"], p["v"]["b"]])
    return made[..., :ACTIONS], made[..., ACTIONS]


def scanned(step, p, h, xs, again=None):
    """All states; ``again``: so many timesteps are computed again for their gradient."""

    def go(h, x):
        h = step(p, h, x)
        return h, h

    if again is None:
        return jax.lax.scan(go, h, xs)[1]
    block = jax.checkpoint(lambda h, x: jax.lax.scan(go, h, x), prevent_cse=False)
    states = jax.lax.scan(block, h, c.in_chunks(xs, again))[1]
    return states.reshape(-1, *states.shape[2:])


def by_hand(length, batch, top=by_counts, talked=talked_joined, spoken=spoken, of=ahead, again=None, chunk=None):
    """``chunk``: environments after the others."""
    scale, step = 1.0 / (length * batch), step_of(top, talked, spoken)

    def loss(p, x):
        data, h = x
        asked, of_read = of(p, data["obs"])
        xs = {"first": data["first"], "asked": asked, "of_read": of_read}
        states = scanned(step, p, jnp.moveaxis(h, 1, 0), xs, again)
        return scale * loss_of(*heads_of(p, states), data)

    return c.gradient_by_environments(loss, chunk)


def weights_after(length, batch, spoken=spoken, of=ahead, chunk=None):
    """The way back through time only makes the gradients of what products in the loop give; gradients of their weights are
    products over all timesteps, behind it."""
    scale = 1.0 / (length * batch)

    def loss(p, x):
        data, h = x
        modules, width, _ = p["h"].shape
        asked, of_read = of(p, data["obs"])
        sizes = {"h": 3 * width, "talk": 2 * KEY + width}
        rows = modules, data["obs"].shape[1]

        def go(weights, h, x):
            taken = {}

            def multiply(name, y, w):
                taken[name] = stop_gradient(y)
                return y @ w + x["none"][name]

            h = step_of(by_counts, talked_joined, spoken, multiply)(weights, h, x)
            return h, (h, taken)

        xs = {"first": data["first"], "asked": asked, "of_read": of_read}
        start = jnp.moveaxis(h, 1, 0)

        @jax.custom_vjp
        def states_of(loose, xs, h_w, talk_w):
            return run(loose, xs, h_w, talk_w)[0]

        def run(loose, xs, h_w, talk_w):
            none = {name: jnp.zeros((len(asked), *rows, size)) for name, size in sizes.items()}

            def of_none(loose, xs, none):
                weights = {**loose, "h": h_w, "talk": talk_w}
                return jax.lax.scan(lambda h, x: go(weights, h, x), start, {**xs, "none": none})[1]

            states, pull, taken = jax.vjp(of_none, loose, xs, none, has_aux=True)
            return states, (pull, taken)

        def back(kept, by):
            pull, taken = kept
            by_loose, by_xs, by_none = pull(by)
            grads = {name: jnp.einsum("tmbi,tmbj->mij", taken[name], by_none[name]) for name in sizes}
            talk = dict(zip("qkv", jnp.split(grads["talk"], [KEY, 2 * KEY], -1), strict=True))
            return by_loose, by_xs, grads["h"], talk

        states_of.defvjp(run, back)
        states = states_of({"x": p["x"], "start": p["start"]}, xs, p["h"], p["talk"])
        return scale * loss_of(*heads_of(p, states), data)

    return c.gradient_by_environments(loss, chunk)


# -- features first: ``h[modules, width, B]``


def columns(length, batch, chunk=None, again=None):
    scale = 1.0 / (length * batch)

    def step(p, h, x):
        h = jnp.where(x["first"], p["start"][..., None], h)
        score = (h * x["asked"]).sum(1)
        share, active = jax.nn.sigmoid(score)[:, None], by_counts(score)[:, None]
        of_h = p["h"].mT @ h
        (reset, update, new), (h_reset, h_update, h_new) = (
            jnp.split(v, 3, 1) for v in (share * x["of_read"] + p["x"]["b"][..., None], of_h)
        )
        update = jax.nn.sigmoid(update + h_update)
        made = update * h + (1.0 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
        h = jnp.where(active > 0, made, h)
        talk = jnp.concatenate([p["talk"][name] for name in "qkv"], -1)
        query, key, value = jnp.split(talk.mT @ h, [KEY, 2 * KEY], 1)
        weights = jax.nn.softmax((query[:, None] * key).sum(2) / KEY**0.5, axis=1)
        return h + active * (weights[:, :, None] * value).sum(1)

    def loss(p, x):
        data, h = x
        size = data["action"].shape
        rows, look = data["obs"].reshape(-1, OBS).T, p["look"]
        key, value = (look["k"] / KEY**0.5).T @ rows, look["v"].T @ rows
        by_time = lambda x: jnp.transpose(x.reshape(*x.shape[:2], *size), (2, 0, 1, 3))  # noqa: E731
        xs = {"first": data["first"], "asked": by_time(look["q"] @ key), "of_read": by_time(p["x"]["w"].mT @ value)}
        states = scanned(step, p, jnp.moveaxis(h, 0, 2), xs, again)
        flat = jnp.moveaxis(states, 3, 1).reshape(*size, -1)
        return scale * loss_of(c.linear(p["pi"], flat), c.linear(p["v"], flat)[..., 0], data)

    return c.gradient_by_environments(loss, chunk)


def workload(length, batch, modules, width, again=8, chunk=8):
    make, after = functools.partial(by_hand, length, batch), functools.partial(weights_after, length, batch)
    top, elements, joined = {"top": by_top}, {"spoken": spoken_by_elements}, {"of": ahead_joined}
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "ahead, top_k, apart": make(**top, talked=talked_apart), "ahead, top_k": make(**top), "ahead": make(),
        "ahead, elements": make(**elements), "ahead, joined": make(**joined), f"ahead, again by {again}": make(again=again),
        "weights after": after(), "weights after, elements": after(**elements), "weights after, joined": after(**joined),
        "features first": columns(length, batch), f"features first, again by {again}": columns(length, batch, again=again),
        f"ahead, {chunk} environments": make(chunk=chunk), f"weights after, {chunk} environments": after(chunk=chunk),
        f"features first, {chunk} environments": columns(length, batch, chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    start = 0.5 * jax.random.normal(k[4], (batch, modules, width))
    return Workload(forms, (params_of(k[5], modules, width), data, start), tolerance=5e-6)
