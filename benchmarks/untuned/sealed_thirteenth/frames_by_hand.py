"""PlaNet's world model by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing as drawing_workload
from benchmarks.untuned.sealed_thirteenth import frames
from benchmarks.untuned.sealed_thirteenth.frames import (
    ACTIONS,
    CHANNELS,
    LATENT,
    apart,
    drawing,
    normal_of,
    params_of,
    relu,
)  # fmt: skip

LAST = ("NHWC", "HWIO", "NHWC")

# -- convolutions of ``[N, side, side, channels]``, to half the side


def turned(w):
    """Kernels as ``[3, 3, in, out]``."""
    return w.transpose(2, 3, 1, 0)


def convolved(p, x):
    return jax.lax.conv_general_dilated(x, turned(p["w"]), (2, 2), "SAME", dimension_numbers=LAST) + p["b"]


def places_of(x):
    """What is in each of nine places of a patch: zeros behind the end."""
    half = x.shape[1] // 2
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    cut = lambda i: slice(i, i + 2 * half - 1, 2)  # noqa: E731
    return [x[:, cut(i), cut(j)] for i in range(3) for j in range(3)]


def by_patches(p, x):
    """One product of patches."""
    x = jnp.concatenate(places_of(x), -1)
    return x @ turned(p["w"]).reshape(x.shape[-1], -1) + p["b"]


def by_places(p, x):
    """A product of each place of patches."""
    w = turned(p["w"]).reshape(9, x.shape[-1], -1)
    return sum(part @ w[i] for i, part in enumerate(places_of(x))) + p["b"]


# -- transposed ones, to twice the side: an even row is of two, an odd one of one


def dilated(p, x):
    return jax.lax.conv_transpose(x, turned(p["w"]), (2, 2), "SAME", dimension_numbers=LAST) + p["b"]


def woven(parts):
    """``parts[row][column]`` of ``[N, n, n, channels]``: rows and columns in turns."""
    rows = jnp.stack([jnp.stack(row, 3) for row in parts], 2)  # [N, n, 2, n, 2, channels]
    n = rows.shape[1]
    return rows.reshape(len(rows), 2 * n, 2 * n, -1)


ODD = ((0, 2), (1,))


def spread(p, x):
    """One product for all nine, and sums of what is shifted."""
    n, columns = x.shape[1], len(p["b"])
    made = x @ turned(p["w"]).transpose(2, 0, 1, 3).reshape(x.shape[-1], -1)
    made = jnp.pad(made, ((0, 0), (1, 0), (1, 0), (0, 0))).reshape(-1, n + 1, n + 1, 3, 3, columns)
    cut = lambda i: slice(0, n) if i == 0 else slice(1, n + 1)  # noqa: E731
    part = lambda rows, cols: sum(made[:, cut(i), cut(j), i, j] for i in rows for j in cols)  # noqa: E731
    return woven([[part(rows, cols) for cols in ODD] for rows in ODD]) + p["b"]


def by_phases(p, x):
    """A product for each kind of places, of those around that it needs."""
    n, w = x.shape[1], turned(p["w"])
    padded = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
    cut = lambda i: slice(0, n) if i == 0 else slice(1, n + 1)  # noqa: E731

    def part(rows, cols):
        seen = jnp.concatenate([padded[:, cut(i), cut(j)] for i in rows for j in cols], -1)
        return seen @ jnp.concatenate([w[i, j] for i in rows for j in cols])

    return woven([[part(rows, cols) for cols in ODD] for rows in ODD]) + p["b"]


# -- codes of frames ``[N, CHANNELS, side, side]``, and half the squares of errors of telling them again


def codes_first(p, x):
    return frames.code_of(p, x)


def errors_first(p, features, x):
    return 0.5 * ((frames.told(p, features)[0] - x) ** 2).sum()


def codes_last(p, x, first=convolved, second=convolved):
    x = relu(second(p["second"], relu(first(p["first"], jnp.moveaxis(x, 1, -1)))))
    w = p["code"]["w"].reshape(x.shape[-1], -1, len(p["code"]["b"])).swapaxes(0, 1)
    return relu(x.reshape(len(x), -1) @ w.reshape(-1, w.shape[-1]) + p["code"]["b"])


def errors_last(p, features, x, third=dilated, fourth=dilated):
    channels, places = p["third"]["w"].shape[1], int((len(p["decode"]["b"]) // p["third"]["w"].shape[1]) ** 0.5)
    last = lambda w: jnp.moveaxis(w.reshape(*w.shape[:-1], channels, -1), -2, -1).reshape(w.shape)  # noqa: E731
    made = relu(features @ last(p["decode"]["w"]) + last(p["decode"]["b"]))
    made = fourth(p["fourth"], relu(third(p["third"], made.reshape(-1, places, places, channels))))
    return 0.5 * ((made - jnp.moveaxis(x, 1, -1)) ** 2).sum()


# -- the loop: ``h``, ``z`` and posteriors, ``[T, B, ...]``


def parts_of(p):
    """Weights of the loop by what they are multiplied with, and their biases."""
    hidden = p["h"]["w"].shape[0]
    first, second = p["posterior"]
    w = {"z": p["x"]["w"][:LATENT], "h": p["h"]["w"], "first": first["w"][:hidden], "second": second["w"]}
    b = {"z": p["x"]["b"], "h": p["h"]["b"], "first": first["b"], "second": second["b"]}
    return w, b


def looped(p, carry, codes, data, draws, taps=None, joined=False, again=False, unroll=1, whole=False):
    """``taps``: what is added to products instead of biases, so that weights' gradients follow behind the loop; ``whole``:
    nothing is made before the loop; ``joined``: one product of a state, for its posterior and for the next state."""
    (w, b), hidden = parts_of(p), carry[0].shape[-1]
    actions, seen = data["acted"] @ p["x"]["w"][LATENT:], codes @ p["posterior"][0]["w"][hidden:]
    going = 1.0 - data["first"].astype(jnp.float32)[..., None]
    ready = not callable(draws)
    both = jnp.concatenate([w["first"], w["h"]], -1)

    def step(carry, x):
        (h, z, hh), (acted, seen, going, code, raw, noise, taps) = carry, x
        kept, noise = {}, noise if ready else draws(noise)

        def mul(name, x):
            kept[name] = x
            return x @ w[name] + b[name] if taps is None else x @ stop_gradient(w[name]) + taps[name]

        h, z = going * h, going * z
        if whole:
            h = gates(c.linear(p["x"], jnp.concatenate([z, raw], -1)), c.linear(p["h"], h), h)
            made = c.mlp(p["posterior"], jnp.concatenate([h, code], -1), relu)
        elif joined:
            h = gates(z @ w["z"] + b["z"] + acted, going * hh + b["h"], h)
            first, hh = jnp.split(h @ both, [hidden], -1)
            made = relu(first + b["first"] + seen) @ w["second"] + b["second"]
        else:
            h = gates(mul("z", z) + acted, mul("h", h), h)
            made = mul("second", relu(mul("first", h) + seen))
        mean, std = normal_of(made)
        z = mean + std * noise
        return (h, z, hh), (h, z, (mean, std), kept)

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    hh = carry[0] @ w["h"] if joined else None
    noise = draws if ready else jnp.arange(len(going))
    xs = actions, seen, going, codes, data["acted"], noise, taps
    return jax.lax.scan(step, (*carry, hh), xs, unroll=unroll)[1]


def by_hand(length, batch, codes=codes_first, errors=errors_first, ahead=True, after=False, chunk=None, parts=None, **how):
    """``after``: weights' gradients of the loop by one product each behind it; ``chunk``: so many frames are told again after the
    others, and their activations made again; ``parts``: so many environments after the others."""

    def told(p, features, x):
        if chunk is None:
            return errors(p, features, x)
        some = jax.checkpoint(lambda total, x: (total + errors(p, *x), None), prevent_cse=False)
        return jax.lax.scan(some, jnp.zeros(()), c.in_chunks((features, x), chunk))[0]

    def some(p, carry, data, draws):
        x, size = c.rows_of(data["frame"]), carry[0].shape[0]

        def loss(p, taps):
            seen = codes(p, x).reshape(length, size, -1)
            hs, zs, posterior, kept = looped(p, carry, seen, data, draws, taps, **how)
            features = c.rows_of(jnp.concatenate([hs, zs], -1))
            reward = c.mlp(p["reward"], features, relu)[..., 0]
            found = told(p, features, x) + 0.5 * ((reward - data["reward"].reshape(-1)) ** 2).sum()
            prior = normal_of(c.mlp(p["prior"], c.rows_of(hs), relu))
            return (found + apart(jax.tree.map(c.rows_of, posterior), prior).sum()) / (length * batch), kept

        if not after:
            (found, _), grads = jax.value_and_grad(loss, has_aux=True)(p, None)
            return found, grads
        taps = jax.tree.map(lambda b: jnp.broadcast_to(b, (length, size, len(b))), parts_of(p)[1])
        (found, kept), (grads, by) = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, taps)
        more = jax.vjp(parts_of, p)[1]((
            {name: jnp.einsum("tbx,tby->xy", kept[name], by[name]) for name in by}, jax.tree.map(lambda x: x.sum((0, 1)), by),
        ))[0]  # fmt: skip
        return found, jax.tree.map(jnp.add, grads, more)

    def run(p, carry, data, key):
        draw = drawing(key, batch)
        draws = jax.vmap(draw)(jnp.arange(length)) if ahead else draw
        if parts is None:
            return some(p, carry, data, draws)
        cut = lambda x: jnp.moveaxis(x.reshape(length, -1, parts, *x.shape[2:]), 1, 0)  # noqa: E731
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, *x)), None)  # noqa: E731
        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        return jax.lax.scan(add, none, (c.in_chunks(carry, parts), *jax.tree.map(cut, (data, draws))))[0]

    return run


def workload(length, batch, side, channels, hidden, chunk=64):
    make, cut, few = functools.partial(by_hand, length, batch), functools.partial, max(batch // 4, 1)
    seen = lambda kind: cut(codes_last, first=kind, second=kind)  # noqa: E731
    told = lambda kind: cut(errors_last, third=kind, fourth=kind)  # noqa: E731
    last, patches = {"codes": codes_last, "errors": errors_last}, {"codes": seen(by_patches), "errors": told(spread)}
    phases, places = {**patches, "errors": told(by_phases)}, {"codes": seen(by_places), "errors": told(spread)}
    mixed = {"codes": seen(by_patches), "errors": cut(errors_last, third=by_phases, fourth=spread)}
    one, after, two, again, some = {"joined": True}, {"after": True}, {"unroll": 2}, {"again": True}, f"{chunk} frames"
    forms = {
        "rlfx": frames.by_rlfx(length, batch), "plain": frames.plain(length, batch), "whole": make(whole=True), "hoisted": make(),
        "hoisted, drawn within": make(ahead=False), "hoisted, joined": make(**one), "weights after": make(**after),
        "channels last": make(**last), "channels last, weights after": make(**last, **after),
        "patches": make(**patches), "patches, joined": make(**patches, **one),
        "patches, weights after": make(**patches, **after), "patches, unrolled by 2": make(**patches, **two),
        "patches, again": make(**patches, **again), f"patches, {some}": make(chunk=chunk, **patches),
        f"patches, {few} environments": make(parts=few, **patches), "phases": make(**phases),
        "phases, weights after": make(**phases, **after), f"phases, {some}": make(chunk=chunk, **phases),
        f"phases, {few} environments": make(parts=few, **phases), "places": make(**places),
        "places, weights after": make(**places, **after), "mixed": make(**mixed), "mixed, weights after": make(**mixed, **after),
        "patches, then convolved": make(codes=seen(by_patches), errors=told(dilated)),
        "convolved, then phases": make(codes=codes_last, errors=told(by_phases)),
        "hoisted, threefry unrolled": make(), "patches, weights after, threefry unrolled": make(**patches, **after),
        "phases, weights after, threefry unrolled": make(**phases, **after),
        "mixed, weights after, threefry unrolled": make(**mixed, **after),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 7), (length, batch)
    done = jax.random.uniform(k[0], size) < 0.03
    data = {
        "frame": jax.random.uniform(k[1], (*size, CHANNELS, side, side)), "reward": jax.random.normal(k[2], size),
        "acted": jax.nn.one_hot(jax.random.randint(k[3], size, 0, ACTIONS), ACTIONS),
        "first": jnp.concatenate([jnp.zeros((1, batch), bool), done[:-1]]),
    }  # fmt: skip
    carry = jnp.tanh(jax.random.normal(k[4], (batch, hidden))), jax.random.normal(k[5], (batch, LATENT))
    return drawing_workload(forms, (params_of(k[6], side, channels, hidden), carry, data), tolerance=5e-5)
