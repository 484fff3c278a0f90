"""CrossQ by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_tenth import crossed
from benchmarks.untuned.sealed_tenth.crossed import (
    ACTIONS,
    ALPHA,
    EPS,
    GAMMA,
    OBS,
    drawn,
    moments_of,
    params_of,
    relu,
    toward,
)  # fmt: skip

# -- a layer behind its norm: of rows ``x[N, features]``, and the moments


def moments_in_one_pass(x):
    mean = x.mean(0)
    return {"mean": mean, "variance": (x * x).mean(0) - mean * mean}


def plainly(layer, x):
    x, moments = crossed.two_passes(layer, x)
    return c.linear(layer, x), moments


def in_one_pass(layer, x):
    moments = moments_in_one_pass(x)
    return c.linear(layer, crossed.scaled(layer, x, moments)), moments


def folded_into(layer, moments):
    """Weights that have the norm in them."""
    slope = layer["scale"] * jax.lax.rsqrt(moments["variance"] + EPS)
    return {"w": slope[:, None] * layer["w"], "b": layer["b"] + (layer["shift"] - slope * moments["mean"]) @ layer["w"]}


def folded(layer, x):
    moments = moments_in_one_pass(x)
    return c.linear(folded_into(layer, moments), x), moments


@jax.custom_vjp
def whitened(x):
    """Without a mean, of variance one."""
    return whitened_forwards(x)[0]


def whitened_forwards(x):
    moments = moments_in_one_pass(x)
    rate = jax.lax.rsqrt(moments["variance"] + EPS)
    y = (x - moments["mean"]) * rate
    return (y, moments), (y, rate)


def whitened_backwards(kept, by):
    (y, rate), by = kept, by[0]
    return (rate * (by - by.mean(0) - y * (by * y).mean(0)),)


whitened.defvjp(whitened_forwards, whitened_backwards)


def ruled(layer, x):
    y, moments = whitened(x)
    return c.linear(layer, layer["scale"] * y + layer["shift"]), moments


@jax.custom_vjp
def merged(layer, x):
    """Norm and layer are one product forwards; backwards all sums over rows are taken from products of weights' size."""
    return merged_forwards(layer, x)[0]


def merged_forwards(layer, x):
    made, moments = folded(layer, x)
    return (made, moments), (layer, x, moments)


def merged_backwards(kept, by):
    (layer, x, moments), by = kept, by[0]
    rate = jax.lax.rsqrt(moments["variance"] + EPS)
    rows, summed = 1.0 / len(x), by.sum(0)
    product = rate[:, None] * (x.T @ by - moments["mean"][:, None] * summed)
    of_scale, of_shift = (layer["w"] * product).sum(1), layer["w"] @ summed
    slope = layer["scale"] * rate
    turning = slope * rate * of_scale * rows
    fixed = slope * of_shift * rows - turning * moments["mean"]
    by_x = by @ (slope[:, None] * layer["w"]).T - turning * x - fixed
    weights = layer["scale"][:, None] * product + layer["shift"][:, None] * summed
    return {"w": weights, "b": summed, "scale": of_scale, "shift": of_shift}, by_x


merged.defvjp(merged_forwards, merged_backwards)


# -- both critics of rows ``x[N, INPUTS]``: values ``[2, N]``, and moments


def one(layer_of, layers, x):
    told = []
    for i, layer in enumerate(layers):
        x, moments = layer_of(layer, x if i == 0 else relu(x))
        told.append(moments)
    return x[:, 0], told


def of_twin(critics, i):
    return jax.tree.map(lambda w: w[i], critics)


def stack(found):
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def by_vmap(layer_of):
    return lambda critics, x: jax.vmap(lambda layers: one(layer_of, layers, x))(critics)


def one_by_one(layer_of):
    return lambda critics, x: stack([one(layer_of, of_twin(critics, i), x) for i in range(2)])


def in_turn(layer_of):
    """A loop over the critics."""
    return lambda critics, x: jax.lax.map(lambda layers: one(layer_of, layers, x), critics)


def firsts_joined(layer_of):
    """The data's moments are both critics' own: one product of folded weights."""

    def run(critics, x):
        moments = moments_in_one_pass(x)
        parts = [folded_into(of_twin(critics[0], i), moments) for i in range(2)]
        h = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), *parts), x)
        found = [one(layer_of, of_twin(critics[1:], i), relu(h)) for i, h in enumerate(jnp.split(h, 2, -1))]
        q, told = stack(found)
        return q, [jax.tree.map(lambda m: jnp.stack([m, m]), moments), *told]

    return run


def in_columns(critics, x):
    """Features first, rows innermost; norms are in the weights."""

    def of(layers):
        h, told = x.T, []
        for i, layer in enumerate(layers):
            h = h if i == 0 else relu(h)
            mean = h.mean(1)
            told.append({"mean": mean, "variance": (h * h).mean(1) - mean * mean})
            layer = folded_into(layer, told[-1])
            h = layer["w"].T @ h + layer["b"][:, None]
        return h[0], told

    return stack([of(of_twin(critics, i)) for i in range(2)])


# -- what the actor is told by: both critics by running moments


def running_folded(critics, moments, x):
    return c.one_by_one(running_weights(critics, moments), x[:, :OBS], x[:, OBS:])


def running_weights(critics, moments):
    return [jax.vmap(folded_into)(layer, m) for layer, m in zip(critics, moments, strict=True)]


def running_joined(critics, moments, x):
    return c.twins_joined(running_weights(critics, moments), x[:, :OBS], x[:, OBS:])


def running_columns(critics, moments, x):
    weights = running_weights(critics, moments)
    return jnp.concatenate([c.columns(of_twin(weights, i), x.T, relu) for i in range(2)])


def by_hand(length, batch, critics, running_of=crossed.by_running, one_policy=False, again=False, apart=False):
    """``one_policy``: of both observations one evaluation; ``apart``: the actor's gradient and the critics' are two."""
    scale = 1.0 / (length * batch)
    critics = jax.checkpoint(critics) if again else critics

    def run(p, running, data, key):
        x, later_noise, noise = c.rows_of((data, *drawn(key, length, batch)))
        done = jnp.concatenate([x["obs"], x["action"]], -1)

        def acts(actor):
            if not one_policy:
                later = stop_gradient(c.squashed(actor, x["after"], later_noise))
                return later, c.squashed(actor, x["obs"], noise)
            both = jnp.concatenate([x["after"], x["obs"]]), jnp.concatenate([later_noise, noise])
            action, log_prob = c.squashed(actor, *both)
            cut = len(done)
            return stop_gradient((action[:cut], log_prob[:cut])), (action[cut:], log_prob[cut:])

        def of_actor(actor):
            later, (own, log_prob) = acts(actor)
            seen = jnp.concatenate([x["obs"], own], -1)
            judged = running_of(stop_gradient(p["critics"]), running, seen).min(0)
            return scale * (ALPHA * log_prob - judged).sum(), later

        def of_critics(layers, later):
            both = jnp.concatenate([done, jnp.concatenate([x["after"], later[0]], -1)])
            q, moments = critics(layers, both)
            q = q.reshape(2, 2, -1)
            aim = x["reward"] + GAMMA * (1.0 - x["done"]) * (q[:, 1].min(0) - ALPHA * later[1])
            return scale * ((q[:, 0] - stop_gradient(aim)) ** 2).sum(), toward(running, moments)

        if apart:
            (loss, later), actor_grads = jax.value_and_grad(of_actor, has_aux=True)(p["actor"])
            (more, moved), critic_grads = jax.value_and_grad(of_critics, has_aux=True)(p["critics"], later)
            return loss + more, {"actor": actor_grads, "critics": critic_grads}, moved

        def total(p):
            loss, later = of_actor(p["actor"])
            more, moved = of_critics(p["critics"], later)
            return loss + more, moved

        (loss, moved), grads = jax.value_and_grad(total, has_aux=True)(p)
        return loss, grads, moved

    return run


def workload(length, batch, hidden):
    make = functools.partial(by_hand, length, batch)
    own, joined, once, two = running_folded, running_joined, {"one_policy": True}, {"apart": True}
    forms = {
        "rlfx": crossed.by_rlfx(length, batch), "plain": crossed.plain(length, batch), "rows": make(by_vmap(plainly)),
        "one by one": make(one_by_one(plainly)), "in one pass": make(by_vmap(in_one_pass)),
        "one by one, in one pass": make(one_by_one(in_one_pass), own), "ruled": make(one_by_one(ruled), own),
        "folded": make(by_vmap(folded), own), "one by one, folded": make(one_by_one(folded), own),
        "merged": make(one_by_one(merged), own), "merged, mapped": make(by_vmap(merged), own),
        "merged, in turn": make(in_turn(merged), own), "firsts joined, merged": make(firsts_joined(merged), joined),
        "firsts joined, ruled": make(firsts_joined(ruled), joined), "firsts joined, folded": make(firsts_joined(folded), joined),
        "features first": make(in_columns, running_columns), "again": make(one_by_one(folded), own, again=True),
        "merged, one policy": make(one_by_one(merged), own, **once), "merged, apart": make(one_by_one(merged), own, **two),
        "merged, in turn, apart": make(in_turn(merged), own, **two),
        "firsts joined, merged, apart": make(firsts_joined(merged), joined, **two),
        "folded, in turn": make(in_turn(folded), own), "one by one, folded, one policy": make(one_by_one(folded), own, **once),
        "one by one, folded, threefry unrolled": make(one_by_one(folded), own),
        "one by one, folded, apart, threefry unrolled": make(one_by_one(folded), own, **two),
        "folded, the actor's firsts joined, apart, threefry unrolled": make(one_by_one(folded), joined, **two),
        "firsts joined, folded, apart, threefry unrolled": make(firsts_joined(folded), joined, **two),
        "merged, threefry unrolled": make(one_by_one(merged), own),
        "merged, apart, threefry unrolled": make(one_by_one(merged), own, **two),
        "ruled, apart, threefry unrolled": make(one_by_one(ruled), own, **two),
        "firsts joined, merged, one policy, threefry unrolled": make(firsts_joined(merged), joined, **once),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "after": jax.random.normal(k[1], (*size, OBS)),
        "action": jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS))), "reward": jax.random.normal(k[3], size),
        "done": jax.random.uniform(k[4], size) < 0.02,
    }  # fmt: skip
    return drawing(forms, (params_of(k[5], hidden), moments_of(k[6], hidden), data), tolerance=2e-5)
