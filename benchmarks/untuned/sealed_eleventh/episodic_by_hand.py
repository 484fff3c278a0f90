"""Neural episodic control by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eleventh import episodic
from benchmarks.untuned.sealed_eleventh.episodic import (
    ACTIONS,
    DELTA,
    NEAREST,
    OBS,
    WIDTH,
    params_of,
    relu,
    targets,
)  # fmt: skip

# -- distances of rows ``h[N, WIDTH]`` from all keys: ``[N, ACTIONS, entries]``


def far_of(keys, h):
    """One product with all actions' keys."""
    flat = keys.reshape(-1, WIDTH)
    found = (h * h).sum(-1, keepdims=True) - 2.0 * h @ flat.T + (flat * flat).sum(-1)
    return found.reshape(*h.shape[:-1], *keys.shape[:2])


def far_extended(keys, h):
    """The same: all three terms by one product."""
    flat, one = keys.reshape(-1, WIDTH), jnp.ones_like(h[:, :1])
    left = jnp.concatenate([h, (h * h).sum(-1, keepdims=True), one], -1)
    right = jnp.concatenate([-2.0 * flat, jnp.ones_like(flat[:, :1]), (flat * flat).sum(-1, keepdims=True)], -1)
    return (left @ right.T).reshape(len(h), *keys.shape[:2])


# -- the distance of the nearest that counts no more is above it


def by_top_k(far):
    """By the index of the last: values alone are sorted."""
    return jnp.take_along_axis(far, jax.lax.top_k(-far, NEAREST)[1][..., -1:], -1)


def by_values_of_top_k(far):
    return -jax.lax.top_k(-far, NEAREST)[0][..., -1:]


def by_minima(far):
    """The least, and then the least of what is above, and so on."""
    bound = far.min(-1, keepdims=True)
    for _ in range(NEAREST - 1):
        bound = jnp.where(far > bound, far, jnp.inf).min(-1, keepdims=True)
    return bound


def by_minima_in_a_loop(far):
    body = lambda _, bound: jnp.where(far > bound, far, jnp.inf).min(-1, keepdims=True)  # noqa: E731
    return jax.lax.fori_loop(0, NEAREST, body, jnp.full_like(far[..., :1], -jnp.inf))


def by_sort(far):
    return jnp.sort(far, -1)[..., NEAREST - 1 : NEAREST]


def by_groups(far):
    """The least of each of some groups first: at most so many groups hold those nearest."""
    entries = far.shape[-1]
    size = next(s for s in (16, 8, 4, 2, 1) if entries % s == 0 and entries // s >= NEAREST)
    grouped = far.reshape(*far.shape[:-1], entries // size, size)
    groups = jax.lax.top_k(-grouped.min(-1), NEAREST)[1]
    some = jnp.take_along_axis(grouped, groups[..., None], -2)
    return by_minima(some.reshape(*far.shape[:-1], -1))


# -- values of all actions ``[N, ACTIONS]``, without a gradient


def weights_of(far, bound_of):
    return jnp.where(far <= bound_of(far), 1.0 / (far + DELTA), 0.0)


def values_of(p, h, far, bound_of):
    weight = weights_of(far, bound_of)
    return (weight * p["values"]).sum(-1) / weight.sum(-1)


# -- all actions' values, differentiated


def gathered(p, h, distances=far_of):
    """Distances again, of the nearest alone."""
    near = jax.lax.top_k(-stop_gradient(distances(p["keys"], h)), NEAREST)[1]
    keys = jax.vmap(lambda keys, i: keys[i], (0, 1), 1)(p["keys"], near)  # [N, ACTIONS, NEAREST, WIDTH]
    values = jax.vmap(lambda values, i: values[i], (0, 1), 1)(p["values"], near)
    weight = 1.0 / (((keys - h[:, None, None]) ** 2).sum(-1) + DELTA)
    return (weight * values).sum(-1) / weight.sum(-1)


def picked(p, h, distances=far_of):
    """Distances of all, of which those of the nearest are taken."""
    far = distances(p["keys"], h)
    near = jax.lax.top_k(-stop_gradient(far), NEAREST)[1]
    values = jax.vmap(lambda values, i: values[i], (0, 1), 1)(p["values"], near)
    weight = 1.0 / (jnp.take_along_axis(far, near, -1) + DELTA)
    return (weight * values).sum(-1) / weight.sum(-1)


def masked(p, h, distances=far_of, bound_of=by_minima):
    """All entries, of which those that are far have no weight: no lookups, and products for the way back."""
    far = distances(p["keys"], h)
    weight = jnp.where(far <= bound_of(stop_gradient(far)), 1.0 / (far + DELTA), 0.0)
    return (weight * p["values"]).sum(-1) / weight.sum(-1)


def all_actions(length, batch, q_of, chunk=None, again=False):
    """``chunk``: so many rows of dictionaries after the others."""
    some = jax.checkpoint(q_of) if again else q_of

    def run(p, _, data):
        def loss(p):
            h = c.mlp(p["net"], data["obs"].reshape(-1, OBS), relu)
            if chunk is None:
                q = some(p, h)
            else:
                q = jax.lax.map(lambda h: some(p, h), h.reshape(-1, chunk, WIDTH))
            q = q.reshape(length, batch, ACTIONS)
            target = targets(stop_gradient(q.max(-1)), data["reward"], data["done"])
            return (0.5 * (c.pick(q, data["action"]) - target) ** 2).mean()

        return jax.value_and_grad(loss)(p)

    return run


# -- all actions' values first, and the gradient of what was done alone


def all_first(p, h, action, distances, bound_of):
    """Values, and of what was done: indices among all keys of all actions, ``[N, NEAREST]``."""
    far = distances(p["keys"], h)
    bound = bound_of(far)
    weight = jnp.where(far <= bound, 1.0 / (far + DELTA), 0.0)
    q = (weight * p["values"]).sum(-1) / weight.sum(-1)
    own = jnp.take_along_axis(far, action[:, None, None], 1)[:, 0]
    near = jax.lax.top_k(-own, NEAREST)[1] + action[:, None] * far.shape[-1]
    return q, near


def indices_first(p, h, action, distances, _):
    """The same by indices of all actions' nearest."""
    far, entries = distances(p["keys"], h), p["keys"].shape[1]
    near = jax.lax.top_k(-far, NEAREST)[1]
    weight = 1.0 / (jnp.take_along_axis(far, near, -1) + DELTA)
    near = near + entries * jnp.arange(ACTIONS)[:, None]
    q = (weight * p["values"].reshape(-1)[near]).sum(-1) / weight.sum(-1)
    return q, jnp.take_along_axis(near, action[:, None, None], 1)[:, 0]


def by_lookups(p, _, data, rows, distances, bound_of, chunk, first=all_first):
    """Keys of the nearest of what was done are looked up and differentiated."""
    h, back = jax.vjp(lambda net: c.mlp(net, rows["obs"], relu), p["net"])
    find = lambda x: first(p, *x, distances, bound_of)  # noqa: E731
    parts = h, rows["action"]
    if chunk is None:
        q, near = find(parts)
    else:
        q, near = (x.reshape(len(h), -1) for x in jax.lax.map(find, c.in_chunks(parts, chunk)))
    size = data["reward"].shape
    target = targets(q.max(-1).reshape(size), data["reward"], data["done"]).reshape(-1)

    def loss(keys, values, h):
        weight = 1.0 / (((keys.reshape(-1, WIDTH)[near] - h[:, None]) ** 2).sum(-1) + DELTA)
        found = (weight * values.reshape(-1)[near]).sum(-1) / weight.sum(-1)
        return (0.5 * (found - target) ** 2).mean()

    found, (of_keys, of_values, of_h) = jax.value_and_grad(loss, (0, 1, 2))(p["keys"], p["values"], h)
    return found, {"net": back(of_h)[0], "keys": of_keys, "values": of_values}


def by_products(p, _, data, rows, distances, bound_of, chunk):
    """The way back written out, by products with weights of all entries."""
    h, back = jax.vjp(lambda net: c.mlp(net, rows["obs"], relu), p["net"])
    entries, flat = p["keys"].shape[1], p["keys"].reshape(-1, WIDTH)

    def ahead(x):
        h, action = x
        weight = weights_of(distances(p["keys"], h), bound_of)
        whole = weight.sum(-1)
        q = (weight * p["values"]).sum(-1) / whole
        own = jax.nn.one_hot(action, ACTIONS)
        mine = (own / whole)[..., None] * weight
        return q, (weight * mine).reshape(len(h), -1), mine.reshape(len(h), -1)  # slopes by distances are of squares

    parts = h, rows["action"]
    if chunk is None:
        q, squares, shares = ahead(parts)
    else:
        q, squares, shares = (x.reshape(len(h), -1) for x in jax.lax.map(ahead, c.in_chunks(parts, chunk)))
    size = data["reward"].shape
    target = targets(q.max(-1).reshape(size), data["reward"], data["done"]).reshape(-1)
    error = c.pick(q, rows["action"]) - target
    by = error / len(h)
    found = c.pick(q, rows["action"])
    on = -2.0 * by[:, None] * squares * (p["values"].reshape(-1) - found[:, None])  # by half of a squared distance
    of_h = on.sum(-1, keepdims=True) * h - on @ flat
    of_keys = on.sum(0)[:, None] * flat - on.T @ h
    of_values = (by @ shares).reshape(ACTIONS, entries)
    grads = {"net": back(of_h)[0], "keys": of_keys.reshape(p["keys"].shape), "values": of_values}
    return (0.5 * error**2).mean(), grads


def in_two(length, batch, learn, distances=far_of, bound_of=by_minima, chunk=None):
    def run(p, _, data):
        return learn(p, None, data, c.rows_of(data), distances, bound_of, chunk)

    return run


def workload(length, batch, hidden, entries, chunk=128):
    once, two = functools.partial(all_actions, length, batch), functools.partial(in_two, length, batch)
    cut, more, loop = functools.partial, 2 * chunk, {"bound_of": by_minima_in_a_loop}
    indices, half = cut(by_lookups, first=indices_first), chunk // 2
    forms = {
        "rlfx": c.learner_by_rlfx(episodic.program, length, batch), "plain": episodic.plain(length, batch),
        "gathered": once(gathered), "gathered, three terms": once(cut(gathered, distances=far_extended)), "picked": once(picked),
        "masked": once(masked), "masked, top k": once(cut(masked, bound_of=by_top_k)),
        "masked, values of top k": once(cut(masked, bound_of=by_values_of_top_k)),
        "masked, sorted": once(cut(masked, bound_of=by_sort)), "masked, groups": once(cut(masked, bound_of=by_groups)),
        "masked, minima in a loop": once(cut(masked, **loop)), "masked, again": once(masked, again=True),
        f"masked, {chunk} rows": once(masked, chunk), f"masked, {more} rows": once(masked, more),
        f"masked, {chunk} rows, again": once(masked, chunk, True), f"gathered, {chunk} rows": once(gathered, chunk),
        "looked up": two(by_lookups), "looked up, top k": two(by_lookups, bound_of=by_top_k),
        "looked up, groups": two(by_lookups, bound_of=by_groups), "looked up, minima in a loop": two(by_lookups, **loop),
        f"looked up, {chunk} rows": two(by_lookups, chunk=chunk),
        f"looked up, {half} rows": two(by_lookups, chunk=half),
        f"looked up, minima in a loop, {half} rows": two(by_lookups, chunk=half, **loop),
        f"looked up, minima in a loop, {chunk} rows": two(by_lookups, chunk=chunk, **loop),
        f"looked up, minima in a loop, {more} rows": two(by_lookups, chunk=more, **loop),
        "looked up, minima in a loop, three terms": two(by_lookups, far_extended, **loop),
        "looked up, indices": two(indices), f"looked up, indices, {chunk} rows": two(indices, chunk=chunk),
        "looked up, indices, three terms": two(indices, far_extended),
        f"looked up, three terms, {chunk} rows": two(by_lookups, far_extended, chunk=chunk),
        f"looked up, top k, {chunk} rows": two(by_lookups, bound_of=by_top_k, chunk=chunk),
        f"looked up, groups, {chunk} rows": two(by_lookups, bound_of=by_groups, chunk=chunk),
        "products": two(by_products), "products, groups": two(by_products, bound_of=by_groups),
        "products, top k": two(by_products, bound_of=by_top_k), "products, minima in a loop": two(by_products, **loop),
        f"products, {chunk} rows": two(by_products, chunk=chunk),
        f"products, minima in a loop, {chunk} rows": two(by_products, chunk=chunk, **loop),
        f"products, three terms, {chunk} rows": two(by_products, far_extended, chunk=chunk),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(1), 5), (length, batch)
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.05,
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], hidden, entries), None, data), tolerance=2e-4)
