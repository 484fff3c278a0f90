"""Implicit behavioural cloning by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_sixteenth import energies
from benchmarks.untuned.sealed_sixteenth.energies import (
    ACTIONS,
    FRAMES,
    OBS,
    PENALTY,
    RATE,
    SPREAD,
    STEEP,
    drawn,
    params_of,
    relu,
    seen_of,
)  # fmt: skip

SEEN = FRAMES * OBS

# -- of points ``seen[N, SEEN]`` and actions ``[N, S, ACTIONS]``: energies ``[N, S]`` and their slopes


def of_seen(layers, seen):
    """What the first layer makes of all but the action, once for all samples: ``[N, hidden]``."""
    return seen @ layers[0]["w"][:SEEN] + layers[0]["b"]


def hidden_of(layers, before, action):
    """Both hidden layers ``[N, S, hidden]``, of what ``before[N, hidden]`` is known."""
    h = jnp.tanh(before[:, None] + action @ layers[0]["w"][SEEN:])
    return h, jnp.tanh(h @ layers[1]["w"] + layers[1]["b"])


def slopes_of(layers, h, g):
    by_g = (1.0 - g**2) * layers[2]["w"]
    return ((1.0 - h**2) * (by_g @ layers[1]["w"].T)) @ layers[0]["w"][SEEN:].T


def as_written(layers, seen):
    """Energies and slopes by a gradient of the sum, of rows that repeat what is seen."""

    def found(action):
        same = jnp.broadcast_to(seen[:, None], (*action.shape[:2], SEEN))
        return energies.energy(layers, same, action)

    return found, jax.grad(lambda action: found(action).sum())


def seen_once(layers, seen):
    """The same, where what is seen is multiplied once."""
    before = of_seen(layers, seen)

    def found(action):
        return hidden_of(layers, before, action)[1] @ layers[2]["w"]

    return found, jax.grad(lambda action: found(action).sum())


def by_slopes(layers, seen):
    """Slopes written out."""
    before = of_seen(layers, seen)
    found = lambda action: hidden_of(layers, before, action)[1] @ layers[2]["w"]  # noqa: E731
    return found, lambda action: slopes_of(layers, *hidden_of(layers, before, action))


# -- losses of rows, summed


def led_down(slopes, tried, noise):
    """``tried[N, SAMPLES, ACTIONS]``, ``noise[N, STEPS, SAMPLES, ACTIONS]``."""
    for i in range(noise.shape[1]):
        tried = jnp.clip(tried - RATE * slopes(tried) + SPREAD * noise[:, i], -1.0, 1.0)
    return tried


def led_down_looped(slopes, tried, noise):
    step = lambda tried, each: (jnp.clip(tried - RATE * slopes(tried) + SPREAD * each, -1.0, 1.0), None)  # noqa: E731
    return jax.lax.scan(step, tried, jnp.moveaxis(noise, 1, 0))[0]


def told_apart(found, slopes):
    """The loss of energies ``[N, S]``, of what was done first, and slopes."""
    steep = relu(jnp.abs(slopes).max(-1) - STEEP) ** 2
    return (found[:, 0] + jax.nn.logsumexp(-found, axis=1) + PENALTY * steep.mean(1)).sum()


def by_gradient(of, down=led_down):
    def learn(layers, seen, action, tried, noise):
        every = jnp.concatenate([action[:, None], down(of(layers, seen)[1], tried, noise)], 1)

        def loss(layers):
            found, slopes = of(layers, seen)
            return told_apart(found(every), slopes(every))

        return jax.value_and_grad(loss)(layers)

    return learn


def both_at_once(layers, seen, action, tried, noise):
    """Energies and slopes are of the same hidden layers."""
    every = jnp.concatenate([action[:, None], led_down(by_slopes(layers, seen)[1], tried, noise)], 1)

    def loss(layers):
        h, g = hidden_of(layers, of_seen(layers, seen), every)
        return told_apart(g @ layers[2]["w"], slopes_of(layers, h, g))

    return jax.value_and_grad(loss)(layers)


def of_losses(found, slopes):
    """The loss, and its gradient by energies and by slopes."""
    samples = found.shape[1]
    size = jnp.abs(slopes)
    steep = relu(size.max(-1, keepdims=True) - STEEP)
    top = jnp.argmax(size, -1, keepdims=True) == jnp.arange(ACTIONS)
    by_slopes = jnp.where(top, 2.0 * PENALTY / samples * steep * jnp.sign(slopes), 0.0)
    by_found = -jax.nn.softmax(-found, axis=1)
    by_found = by_found.at[:, 0].add(1.0)
    value = (found[:, 0] + jax.nn.logsumexp(-found, axis=1)).sum() + PENALTY / samples * (steep**2).sum()
    return value, by_found, by_slopes


def written_out(layers, seen, action, tried, noise):
    """Derivatives of the second order by hand, of rows."""
    first, second, last = layers
    before, w = of_seen(layers, seen), first["w"][SEEN:]
    slope = lambda action: slopes_of(layers, *hidden_of(layers, before, action))  # noqa: E731
    every = jnp.concatenate([action[:, None], led_down(slope, tried, noise)], 1)
    h, g = hidden_of(layers, before, every)
    of_h, of_g = 1.0 - h**2, 1.0 - g**2
    up_g = of_g * last["w"]
    made = up_g @ second["w"].T
    up_h = of_h * made
    value, e, r = of_losses(g @ last["w"], up_h @ w.T)

    def product(a, b):
        return a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])

    down = r @ w
    over = down * of_h
    by_up_g = over @ second["w"]
    # of the sum before the second tanh: by its slope, and by the energy
    by_second = e[..., None] * up_g - 2.0 * by_up_g * g * up_g
    by_first = (by_second @ second["w"].T - 2.0 * down * h * made) * of_h
    by_point = by_first.sum(1)
    last_w = jnp.einsum("ns,nsh->h", e, g) + jnp.einsum("nsh,nsh->h", by_up_g, of_g)
    grads = [
        {"w": jnp.concatenate([seen.T @ by_point, product(every, by_first) + product(r, up_h)]), "b": by_point.sum(0)},
        {"w": product(over, up_g) + product(h, by_second), "b": by_second.sum((0, 1))},
        {"w": last_w},
    ]
    return value, grads


def written_columns(layers, seen, action, tried, noise):
    """The same with features first, ``[features, S * N]``, points innermost."""
    first, second, last = layers
    w, count = first["w"][SEEN:], len(seen)
    before = first["w"][:SEEN].T @ seen.T + first["b"][:, None]

    def hidden(action):
        samples = action.shape[1]
        x = (w.T @ action.reshape(ACTIONS, -1)).reshape(-1, samples, count) + before[:, None]
        h = jnp.tanh(x).reshape(-1, samples * count)
        return h, jnp.tanh(second["w"].T @ h + second["b"][:, None])

    def slope(action):
        h, g = hidden(action)
        return (w @ ((1.0 - h**2) * (second["w"] @ ((1.0 - g**2) * last["w"][:, None])))).reshape(action.shape)

    tried, noise = jnp.transpose(tried, (2, 1, 0)), jnp.transpose(noise, (1, 3, 2, 0))
    for each in noise:
        tried = jnp.clip(tried - RATE * slope(tried) + SPREAD * each, -1.0, 1.0)
    every = jnp.concatenate([action.T[:, None], tried], 1)
    samples = every.shape[1]
    h, g = hidden(every)
    of_h, of_g = 1.0 - h**2, 1.0 - g**2
    up_g = of_g * last["w"][:, None]
    made = second["w"] @ up_g
    up_h = of_h * made
    found = (last["w"] @ g).reshape(samples, count)
    value, e, r = of_losses(found.T, jnp.transpose((w @ up_h).reshape(every.shape), (2, 1, 0)))
    e, r = e.T.reshape(-1), jnp.transpose(r, (2, 1, 0)).reshape(ACTIONS, -1)
    down = w.T @ r
    over = down * of_h
    by_up_g = second["w"].T @ over
    by_second = e * up_g - 2.0 * by_up_g * g * up_g
    by_first = (second["w"] @ by_second - 2.0 * down * h * made) * of_h
    by_point = by_first.reshape(-1, samples, count).sum(1)
    of_action = every.reshape(ACTIONS, -1) @ by_first.T + r @ up_h.T
    grads = [
        {"w": jnp.concatenate([(by_point @ seen).T, of_action]), "b": by_point.sum(1)},
        {"w": over @ up_g.T + h @ by_second.T, "b": by_second.sum(1)},
        {"w": g @ e + (by_up_g * of_g).sum(1)},
    ]
    return value, grads


# -- what is learnt


def by_hand(length, batch, learn, chunk=None):
    """``chunk``: timesteps of a block, whose random numbers are drawn there."""
    scale = 1.0 / (length * batch)

    def run(p, data, key):
        keys = c.streams(key, batch, "samples", "noise")

        def some(p, x):
            seen, action, t = x
            rows = c.rows_of((seen, action, *jax.vmap(lambda t: drawn(keys, t))(t)))
            return learn(p, *rows)

        parts = seen_of(data["obs"]), data["action"], jnp.arange(length)
        if chunk is None:
            total = some(p, parts)
        else:
            add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, x)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            total = jax.lax.scan(add, none, c.in_chunks(parts, chunk))[0]
        return stop_gradient(jax.tree.map(lambda x: scale * x, total))

    return run


def workload(length, batch, hidden, chunk=2):
    make = functools.partial(by_hand, length, batch)
    looped = by_gradient(seen_once, led_down_looped)
    forms = {
        "rlfx": energies.by_rlfx(length, batch), "plain": energies.plain(length, batch),
        "repeated": make(by_gradient(as_written)), "seen once": make(by_gradient(seen_once)), "seen once, looped": make(looped),
        "slopes written out": make(by_gradient(by_slopes)), "both at once": make(both_at_once),
        "written out": make(written_out), "written out, features first": make(written_columns),
        f"both at once, blocks of {chunk}": make(both_at_once, chunk=chunk),
        f"written out, blocks of {chunk}": make(written_out, chunk=chunk),
        f"written out, features first, blocks of {chunk}": make(written_columns, chunk=chunk),
        "written out, threefry unrolled": make(written_out),
        f"written out, blocks of {chunk}, threefry unrolled": make(written_out, chunk=chunk),
        f"written out, blocks of {2 * chunk}, threefry unrolled": make(written_out, chunk=2 * chunk),
        f"written out, features first, blocks of {chunk}, threefry unrolled": make(written_columns, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)),
        "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
    }  # fmt: skip
    return drawing(forms, (params_of(k[2], hidden), data), tolerance=5e-6)
