"""A spiking actor and critic by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_seventeenth import spikes as given
from benchmarks.untuned.sealed_seventeenth.spikes import ACTIONS, LEAK, OBS, SLOPE, TICKS, fired, loss_of, params_of

# -- what both layers do: currents ``[T, B, hidden]`` of the input to rates ``[T, B, hidden]``


def kept_of(data):
    """0.0 where an episode begins: ``[T, B, 1]``."""
    return 1.0 - data["first"].astype(jnp.float32)[..., None]


def scanned(step, state, xs, again=None):
    """All rates; ``again``: so many timesteps are computed again for their gradient."""
    if again is None:
        return jax.lax.scan(step, state, xs)[1]
    block = jax.checkpoint(lambda state, xs: jax.lax.scan(step, state, xs), prevent_cse=False)
    rates = jax.lax.scan(block, state, c.in_chunks(xs, again))[1]
    return rates.reshape(-1, *rates.shape[2:])


def together(p, current, kept, state, looped=False, again=None):
    """Both layers in one loop over time; ``looped``: ticks are a loop of their own."""

    def step(state, x):
        current, kept = x
        state = jax.tree.map(lambda s: kept * s, state)
        if looped:
            state, spikes = jax.lax.scan(lambda s, _: given.tick(p, current, s), state, None, length=TICKS)
            return state, spikes.mean(0)
        total = 0.0
        for _ in range(TICKS):
            state, spikes = given.tick(p, current, state)
            total = total + spikes
        return state, total / TICKS

    return scanned(step, state, (current, kept), again)


def first_spikes(current, kept, potential):
    """Of the first layer, which knows nothing of the second: ``[T, TICKS, B, hidden]``."""

    def step(potential, x):
        current, kept = x
        potential, out = kept * potential, []
        for _ in range(TICKS):
            potential, spikes = fired(potential, current)
            out.append(spikes)
        return potential, jnp.stack(out)

    return scanned(step, potential, (current, kept))


def layer_by_layer(p, current, kept, state):
    """All of the first layer before the second, and what it gives the second is one product."""
    first = first_spikes(current, kept, state["a"])
    driven = first @ p["b"]["w"] + p["b"]["b"]

    def step(state, x):
        driven, kept = x
        (b, spikes), total = jax.tree.map(lambda s: kept * s, state), 0.0
        for i in range(TICKS):
            b, spikes = fired(b, driven[i] + spikes @ p["back"])
            total = total + spikes
        return (b, spikes), total / TICKS

    return scanned(step, (state["b"], state["fired"]), (driven, kept))


def first_of_ticks(current, kept, potential):
    """Spikes of the first layer ``[T * TICKS, B, hidden]``, and 0.0 at those ticks where an episode begins."""
    kept = jnp.stack([kept, *[jnp.ones_like(kept)] * (TICKS - 1)], 1).reshape(-1, *kept.shape[1:])

    def one(potential, x):
        current, kept = x
        return fired(kept * potential, current)

    return jax.lax.scan(one, potential, (jnp.repeat(current, TICKS, 0), kept))[1], kept


def every_tick(p, current, kept, state):
    """One loop over ticks of all timesteps for each layer."""
    length, size = len(current), current.shape[1:]
    first, kept = first_of_ticks(current, kept, state["a"])
    driven = first @ p["b"]["w"] + p["b"]["b"]

    def two(state, x):
        driven, kept = x
        b, spikes = jax.tree.map(lambda s: kept * s, state)
        b, spikes = fired(b, driven + spikes @ p["back"])
        return (b, spikes), spikes

    spikes = jax.lax.scan(two, (state["b"], state["fired"]), (driven, kept))[1]
    return spikes.reshape(length, TICKS, *size).mean(1)


def slope_of(above):
    return 1.0 / (1.0 + SLOPE * jnp.abs(above)) ** 2


@jax.custom_vjp
def second_rates(back, driven, kept, b, spikes):
    """Rates of the second layer, ``driven[T, TICKS, B, hidden]``; the gradient of ``back`` is one product over all ticks."""
    return forwards(back, driven, kept, b, spikes)[0]


def forwards(back, driven, kept, b, spikes):
    def step(state, x):
        driven, kept = x
        (b, spikes), seen, slopes, total = jax.tree.map(lambda s: kept * s, state), [], [], 0.0
        for i in range(TICKS):
            b = LEAK * b + driven[i] + spikes @ back
            seen.append(spikes)
            slopes.append(slope_of(b - 1.0))
            spikes = (b > 1.0).astype(jnp.float32)
            b, total = b * (1.0 - spikes), total + spikes
        return (b, spikes), (total / TICKS, jnp.stack([*seen, spikes]), jnp.stack(slopes))

    rates, seen, slopes = jax.lax.scan(step, (b, spikes), (driven, kept))[1]
    return rates, (back, kept, seen, slopes)


def backwards(saved, by):
    back, kept, seen, slopes = saved

    def step(state, x):
        by, kept, seen, slopes = x
        (by_b, by_spikes), out = state, []
        for i in range(TICKS - 1, -1, -1):
            by_b = by_b * (1.0 - seen[i + 1]) + (by / TICKS + by_spikes) * slopes[i]
            out.append(by_b)
            by_b, by_spikes = LEAK * by_b, by_b @ back.T
        return (kept * by_b, kept * by_spikes), jnp.stack(out[::-1])

    none = jnp.zeros(by.shape[1:])
    last, by_driven = jax.lax.scan(step, (none, none), (by, kept, seen, slopes), reverse=True)
    by_back = jnp.einsum("tkbi,tkbj->ij", seen[:, :-1], by_driven)
    return by_back, by_driven, jnp.zeros_like(kept), *last


second_rates.defvjp(forwards, backwards)


def weights_after(p, current, kept, state):
    first = first_spikes(current, kept, state["a"])
    return second_rates(p["back"], first @ p["b"]["w"] + p["b"]["b"], kept, state["b"], state["fired"])


@jax.custom_vjp
def second_spikes(back, driven, kept, b, spikes):
    """The same of ticks of all timesteps, ``driven[T * TICKS, B, hidden]``: their spikes."""
    return forwards_of_ticks(back, driven, kept, b, spikes)[0]


def forwards_of_ticks(back, driven, kept, b, spikes):
    def step(state, x):
        driven, kept = x
        b, spikes = jax.tree.map(lambda s: kept * s, state)
        b = LEAK * b + driven + spikes @ back
        spikes = (b > 1.0).astype(jnp.float32)
        return (b * (1.0 - spikes), spikes), (spikes, slope_of(b - 1.0))

    every, slopes = jax.lax.scan(step, (b, spikes), (driven, kept))[1]
    return every, (back, kept, spikes, every, slopes)


def backwards_of_ticks(saved, by):
    back, kept, start, every, slopes = saved

    def step(state, x):
        (by_b, by_spikes), (by, kept, spikes, slope) = state, x
        by_b = by_b * (1.0 - spikes) + (by + by_spikes) * slope
        return (LEAK * kept * by_b, kept * (by_b @ back.T)), by_b

    none = jnp.zeros(by.shape[1:])
    last, by_driven = jax.lax.scan(step, (none, none), (by, kept, every, slopes), reverse=True)
    seen = kept * jnp.concatenate([start[None], every[:-1]])
    by_back = seen.reshape(-1, len(back)).T @ by_driven.reshape(-1, len(back))
    return by_back, by_driven, jnp.zeros_like(kept), *last


second_spikes.defvjp(forwards_of_ticks, backwards_of_ticks)


def weights_after_ticks(p, current, kept, state):
    first, each = first_of_ticks(current, kept, state["a"])
    spikes = second_spikes(p["back"], first @ p["b"]["w"] + p["b"]["b"], each, state["b"], state["fired"])
    return spikes.reshape(-1, TICKS, *current.shape[1:]).mean(1)


@jax.custom_vjp
def both_layers(w, bias, current, kept, state):
    """Spikes of the second layer at all ticks, ``[T * TICKS, B, hidden]``; ``w[2 * hidden, hidden]``: what both layers give it.
    Only potentials are kept, of which spikes and slopes are made again."""
    return forwards_of_both(w, bias, current, kept, state)[0]


def ticks_of(current, kept):
    """What a tick takes of its timestep; ``kept[T, B, 1]`` at its first tick only."""

    def of(i):
        timestep = i // TICKS
        return current[timestep], jnp.where(i % TICKS == 0, kept[timestep], 1.0)

    return of, jnp.arange(len(current) * TICKS)


def is_above(potential):
    return (potential > 1.0).astype(jnp.float32)


def forwards_of_both(w, bias, current, kept, state):
    of, ticks = ticks_of(current, kept)

    def step(state, i):
        current, kept = of(i)
        a, b, fired = jax.tree.map(lambda s: kept * s, state)
        a = LEAK * a + current
        first = is_above(a)
        b = LEAK * b + jnp.concatenate([first, fired], -1) @ w + bias
        second = is_above(b)
        return (a * (1.0 - first), b * (1.0 - second), second), (a, b)

    a, b = jax.lax.scan(step, (state["a"], state["b"], state["fired"]), ticks)[1]
    return is_above(b), (w, current, kept, state, a, b)


def backwards_of_both(saved, by):
    w, current, kept, state, a, b = saved
    of, ticks = ticks_of(current, kept)
    hidden = a.shape[-1]

    def step(slopes, x):
        by_a, by_b, by_fired = slopes
        i, by, a, b = x
        kept = of(i)[1]
        by_b = by_b * (1.0 - is_above(b)) + (by + by_fired) * slope_of(b - 1.0)
        both = by_b @ w.T
        by_a = by_a * (1.0 - is_above(a)) + both[:, :hidden] * slope_of(a - 1.0)
        return (LEAK * kept * by_a, LEAK * kept * by_b, kept * both[:, hidden:]), (by_a, by_b)

    none = (jnp.zeros(a.shape[1:]),) * 3
    last, (by_a, by_b) = jax.lax.scan(step, none, (ticks, by, a, b), reverse=True)
    second = is_above(b)
    seen = jax.vmap(lambda i: of(i)[1])(ticks) * jnp.concatenate([state["fired"][None], second[:-1]])
    flat = by_b.reshape(-1, hidden)
    by_w = jnp.concatenate([is_above(a).reshape(-1, hidden).T @ flat, seen.reshape(-1, hidden).T @ flat])
    by_current = by_a.reshape(-1, TICKS, *a.shape[1:]).sum(1)
    by_state = dict(zip(("a", "b", "fired"), last, strict=True))
    return by_w, flat.sum(0), by_current, jnp.zeros_like(kept), by_state


both_layers.defvjp(forwards_of_both, backwards_of_both)


def joined_after(p, current, kept, state):
    spikes = both_layers(jnp.concatenate([p["b"]["w"], p["back"]]), p["b"]["b"], current, kept, state)
    return spikes.reshape(-1, TICKS, *current.shape[1:]).mean(1)


# -- what is learnt


def heads_of(p, rates):
    made = rates @ jnp.concatenate([p["pi"]["w"], p["v"]["w"]], -1) + jnp.concatenate([p["pi"]["b"], p["v"]["b"]])
    return made[..., :ACTIONS], made[..., ACTIONS]


def by_hand(length, batch, layers, chunk=None):
    """``chunk``: environments after the others."""
    scale = 1.0 / (length * batch)

    def loss(p, x):
        data, state = x
        rates = layers(p, c.linear(p["a"], data["obs"]), kept_of(data), stop_gradient(state))
        return scale * loss_of(*heads_of(p, rates), data)

    return c.gradient_by_environments(loss, chunk)


# -- features first: ``[hidden, B]``


def columns(length, batch, chunk=None):
    scale = 1.0 / (length * batch)

    def loss(p, x):
        data, state = x
        state = jax.tree.map(jnp.transpose, state)
        kept = 1.0 - data["first"].astype(jnp.float32)[:, None]
        current = p["a"]["w"].T @ data["obs"].mT + p["a"]["b"][:, None]
        first = first_spikes(current, kept, state["a"])
        driven = p["b"]["w"].T @ first + p["b"]["b"][:, None]
        back = p["back"].T

        def step(state, x):
            driven, kept = x
            (b, spikes), total = jax.tree.map(lambda s: kept * s, state), 0.0
            for i in range(TICKS):
                b, spikes = fired(b, driven[i] + back @ spikes)
                total = total + spikes
            return (b, spikes), total / TICKS

        rates = scanned(step, (state["b"], state["fired"]), (driven, kept))
        return scale * loss_of(*heads_of(p, rates.mT), data)

    return c.gradient_by_environments(loss, chunk)


def workload(length, batch, hidden, again=8, chunk=8):
    make, of = functools.partial(by_hand, length, batch), functools.partial
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "inputs ahead": make(of(together, looped=True)), "inputs ahead, ticks unrolled": make(together),
        f"inputs ahead, again by {again}": make(of(together, again=again)), "layer by layer": make(layer_by_layer),
        "every tick": make(every_tick), "weights after": make(weights_after), "features first": columns(length, batch),
        "every tick, weights after": make(weights_after_ticks), "joined, weights after": make(joined_after),
        f"layer by layer, {chunk} environments": make(layer_by_layer, chunk=chunk),
        f"weights after, {chunk} environments": make(weights_after, chunk=chunk),
        f"every tick, weights after, {chunk} environments": make(weights_after_ticks, chunk=chunk),
        f"joined, weights after, {chunk} environments": make(joined_after, chunk=chunk),
        f"features first, {chunk} environments": columns(length, batch, chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    data["obs"] = jnp.round(8.0 * data["obs"]) / 8.0
    state = jax.vmap(lambda _: given.at_rest(hidden))(jnp.arange(batch))
    return Workload(forms, (params_of(k[5], hidden), data, state), tolerance=2e-5)
