"""PPO of dilated convolutions by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eleventh import dilated
from benchmarks.untuned.sealed_eleventh.dilated import (
    ACTIONS,
    DILATIONS,
    GAMMA,
    LAMBDA,
    OBS,
    earlier,
    gated,
    learnt,
    params_of,
)  # fmt: skip


def one_sigmoid(x):
    """Both nonlinearities by one: tanh(x) is 2 sigmoid(2x) - 1."""
    half = x.shape[-1] // 2
    scale = jnp.where(jnp.arange(x.shape[-1]) < half, 2.0, 1.0)
    s = jax.nn.sigmoid(scale * x)
    return (2.0 * s[..., :half] - 1.0) * s[..., half:]


@jax.custom_vjp
def gated_kept(x):
    return gated_forwards(x)[0]


def gated_forwards(x):
    filtered, gate = jnp.split(x, 2, -1)
    a, s = jnp.tanh(filtered), jax.nn.sigmoid(gate)
    return a * s, (a, s)


def gated_backwards(kept, by):
    a, s = kept
    return (jnp.concatenate([by * s * (1.0 - a * a), by * a * s * (1.0 - s)], -1),)


gated_kept.defvjp(gated_forwards, gated_backwards)

# -- a layer: ``h[T, B, hidden]`` and whether that of ``far`` ago counts, ``same[T, B, 1]``, as floats


def concatenated(layer, h, same, far, gate):
    return h + gate(c.linear(layer, jnp.concatenate([h, same * earlier(h, far)], -1)))


def two_products(layer, h, same, far, gate):
    now, before = jnp.split(layer["w"], 2)
    return h + gate(h @ now + (same * earlier(h, far)) @ before + layer["b"])


def shifted_after(layer, h, same, far, gate):
    """One product of what is here, of which a half is for later."""
    both = h @ jnp.concatenate(jnp.split(layer["w"], 2), -1)
    now, later = jnp.split(both, 2, -1)
    return h + gate(now + same * earlier(later, far) + layer["b"])


def products_shifted(layer, h, same, far, gate):
    """Two products of what is here; the second without its last timesteps."""
    now, before = jnp.split(layer["w"], 2)
    later = same[far:] * (h[:-far] @ before)
    return h + gate(h @ now + layer["b"] + jnp.concatenate([jnp.zeros_like(later, shape=(far, *later.shape[1:])), later]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def written_out(layer, h, same, far, gate):
    return written_forwards(layer, h, same, far, gate)[0]


def written_forwards(layer, h, same, far, gate):
    x = jnp.concatenate([h, same * earlier(h, far)], -1)
    made, (a, s) = gated_forwards(c.linear(layer, x))
    return h + made, (layer, x, same, a, s)


def written_backwards(far, gate, kept, by):
    layer, x, same, a, s = kept
    on = jnp.concatenate([by * s * (1.0 - a * a), by * a * s * (1.0 - s)], -1)
    rows = on.reshape(-1, on.shape[-1])
    here, there = jnp.split(on @ layer["w"].T, 2, -1)
    there = same * there
    later = jnp.concatenate([there[far:], jnp.zeros_like(there[:far])])
    return {"w": x.reshape(len(rows), -1).T @ rows, "b": rows.sum(0)}, by + here + later, jnp.zeros_like(same)


written_out.defvjp(written_forwards, written_backwards)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def written_apart(layer, h, same, far, gate):
    """The same without what is concatenated: only gates are kept beside inputs."""
    return apart_forwards(layer, h, same, far, gate)[0]


def apart_forwards(layer, h, same, far, gate):
    now, before = jnp.split(layer["w"], 2)
    made, (a, s) = gated_forwards(h @ now + same * earlier(h, far) @ before + layer["b"])
    return h + made, (layer, h, same, a, s)


def apart_backwards(far, gate, kept, by):
    layer, h, same, a, s = kept
    now, before = jnp.split(layer["w"], 2)
    on = jnp.concatenate([by * s * (1.0 - a * a), by * a * s * (1.0 - s)], -1)
    masked = same * on
    later = jnp.concatenate([masked[far:], jnp.zeros_like(masked[:far])])
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    weights = jnp.concatenate([flat(h).T @ flat(on), flat(h).T @ flat(later)])
    return {"w": weights, "b": flat(on).sum(0)}, by + on @ now.T + later @ before.T, jnp.zeros_like(same)


written_apart.defvjp(apart_forwards, apart_backwards)


def features(p, data, layer_of, gate, again):
    layer_of = jax.checkpoint(layer_of, static_argnums=(3, 4)) if again else layer_of
    h = jnp.tanh(c.linear(p["in"], data["obs"]))
    for layer, far in zip(p["layers"], DILATIONS, strict=True):
        same = (earlier(data["episode"], far, -1) == data["episode"]).astype(jnp.float32)[..., None]
        h = layer_of(layer, h, same, far, gate)
    return h


def heads_joined(p, h):
    both = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"]), h)
    return both[..., :ACTIONS], both[..., ACTIONS]


def end_of(p, h, data, heads, unroll):
    """Summed."""
    logits, v = heads(p, h)
    advantage = c.gae(stop_gradient(v), jnp.zeros_like(v[0]), data["reward"], data["done"], GAMMA, LAMBDA, unroll)
    return learnt(logits, v, data, advantage).sum()


def by_hand(
    length, batch, layer_of=concatenated, gate=gated, heads=dilated.heads, again=False, unroll=1, chunk=None
):
    """``chunk``: so many environments after the others."""
    scale = 1.0 / (length * batch)

    def run(p, _, data):
        def loss(p, data):
            return scale * end_of(p, features(p, data, layer_of, gate, again), data, heads, unroll)

        if chunk is None:
            return jax.value_and_grad(loss)(p, data)
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        return c.summed_gradient(loss, p, parts)

    return run


# -- features first, ``h[hidden, T, B]``


def columns_earlier(h, far):
    return jnp.concatenate([jnp.zeros_like(h[:, :far]), h[:, :-far]], 1)


def product(w, h):
    return (w.T @ h.reshape(len(h), -1)).reshape(-1, *h.shape[1:])


def column_layer(layer, h, same, far):
    made = product(layer["w"], jnp.concatenate([h, same * columns_earlier(h, far)])) + layer["b"][:, None, None]
    filtered, gate = jnp.split(made, 2)
    return h + jnp.tanh(filtered) * jax.nn.sigmoid(gate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def column_written(layer, h, same, far):
    return column_forwards(layer, h, same, far)[0]


def column_forwards(layer, h, same, far):
    x = jnp.concatenate([h, same * columns_earlier(h, far)])
    filtered, gate = jnp.split(product(layer["w"], x) + layer["b"][:, None, None], 2)
    a, s = jnp.tanh(filtered), jax.nn.sigmoid(gate)
    return h + a * s, (layer, x, same, a, s)


def column_backwards(far, kept, by):
    layer, x, same, a, s = kept
    on = jnp.concatenate([by * s * (1.0 - a * a), by * a * s * (1.0 - s)])
    flat = on.reshape(len(on), -1)
    here, there = jnp.split(product(layer["w"].T, on), 2)
    there = same * there
    later = jnp.concatenate([there[:, far:], jnp.zeros_like(there[:, :far])], 1)
    return {"w": x.reshape(len(x), -1) @ flat.T, "b": flat.sum(1)}, by + here + later, jnp.zeros_like(same)


column_written.defvjp(column_forwards, column_backwards)


def in_columns(length, batch, unroll=1, chunk=None, layer_of=column_layer):
    def loss(p, data):
        obs = jnp.moveaxis(data["obs"], -1, 0)
        h = jnp.tanh(product(p["in"]["w"], obs) + p["in"]["b"][:, None, None])
        for layer, far in zip(p["layers"], DILATIONS, strict=True):
            same = (earlier(data["episode"], far, -1) == data["episode"]).astype(jnp.float32)
            h = layer_of(layer, h, same, far)
        logits, v = product(p["pi"]["w"], h), product(p["v"]["w"], h)[0] + p["v"]["b"][0]
        logits = jnp.moveaxis(logits, 0, -1) + p["pi"]["b"]
        advantage = c.gae(stop_gradient(v), jnp.zeros_like(v[0]), data["reward"], data["done"], GAMMA, LAMBDA, unroll)
        return learnt(logits, v, data, advantage).sum() / (length * batch)

    def run(p, _, data):
        if chunk is None:
            return jax.value_and_grad(loss)(p, data)
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        return c.summed_gradient(loss, p, parts)

    return run


# -- environments first, ``[B, T, ...]``


def batch_major(length, batch, gate=gated):
    def before(x, far, first=0.0):
        return jnp.pad(x[:, :-far], ((0, 0), (far, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=first)

    def run(p, _, data):
        x = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)

        def loss(p):
            h = jnp.tanh(c.linear(p["in"], x["obs"]))
            for layer, far in zip(p["layers"], DILATIONS, strict=True):
                same = (before(x["episode"], far, -1) == x["episode"]).astype(jnp.float32)[..., None]
                h = h + gate(c.linear(layer, jnp.concatenate([h, same * before(h, far)], -1)))
            logits, v = heads_joined(p, h)
            known = stop_gradient(v).T
            advantage = c.gae(known, jnp.zeros(batch), data["reward"], data["done"], GAMMA, LAMBDA, 8)
            return learnt(logits, v, x, advantage.T).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, chunk=4):
    make, columns = functools.partial(by_hand, length, batch), functools.partial(in_columns, length, batch)
    kept, best = {"gate": gated_kept}, {"heads": heads_joined, "unroll": 8}
    out, apart, after = {"layer_of": written_out}, {"layer_of": written_apart}, {"layer_of": shifted_after}
    forms = {
        "rlfx": c.learner_by_rlfx(dilated.program, length, batch), "plain": dilated.plain(length, batch),
        "time first": make(), "time first, heads joined, unrolled by 8": make(**best), "two products": make(two_products, **best),
        "shifted after": make(**after, **best), "products shifted": make(products_shifted, **best),
        "one sigmoid": make(gate=one_sigmoid, **best), "gates kept": make(**kept, **best),
        "shifted after, gates kept": make(**after, **kept, **best), "again": make(again=True, **best),
        "written out": make(**out, **best), "written apart": make(**apart, **best),
        "environments first": batch_major(length, batch),
        "environments first, gates kept": batch_major(length, batch, gated_kept),
        "features first": columns(), "features first, unrolled by 8": columns(8),
        f"features first, {chunk} environments": columns(8, chunk),
        "features first, written out": columns(8, None, column_written),
        f"features first, written out, {chunk // 2} environments": columns(8, chunk // 2, column_written),
        f"features first, written out, {chunk} environments": columns(8, chunk, column_written),
        f"features first, written out, {2 * chunk} environments": columns(8, 2 * chunk, column_written),
        f"{chunk} environments": make(chunk=chunk, **best), f"{2 * chunk} environments": make(chunk=2 * chunk, **best),
        f"gates kept, {chunk} environments": make(chunk=chunk, **kept, **best),
        f"shifted after, gates kept, {chunk} environments": make(chunk=chunk, **after, **kept, **best),
        f"written out, {chunk} environments": make(chunk=chunk, **out, **best),
        f"written out, {2 * chunk} environments": make(chunk=2 * chunk, **out, **best),
        f"written apart, {chunk} environments": make(chunk=chunk, **apart, **best),
        f"written apart, {2 * chunk} environments": make(chunk=2 * chunk, **apart, **best),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 6), (length, batch)
    done = jax.random.uniform(k[0], size) < 0.05
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "action": jax.random.randint(k[2], size, 0, ACTIONS),
        "reward": jax.random.normal(k[3], size), "done": done, "log_prob": -1.8 + 0.3 * jax.random.normal(k[4], size),
        "episode": jnp.concatenate([jnp.zeros((1, batch), jnp.int32), jnp.cumsum(done, 0)[:-1].astype(jnp.int32)]),
    }  # fmt: skip
    return Workload(forms, (params_of(k[5], hidden), None, data), tolerance=5e-5)
