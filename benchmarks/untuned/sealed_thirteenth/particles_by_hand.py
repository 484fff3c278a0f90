"""DVRL by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing as drawing_workload
from benchmarks.untuned.sealed_thirteenth import particles
from benchmarks.untuned.sealed_thirteenth.particles import (
    ACTIONS,
    LATENT,
    OBS,
    PARTICLES,
    drawing,
    learnt,
    outputs,
    params_of,
)  # fmt: skip

# -- weights by the products that they are of: of particles (for posterior and GRU, and for prior and decoder), of latents (for
# -- the GRU, and for the decoder), and of hidden layers; biases; and what is made of data before the loop


def products(p):
    hidden = p["h"]["w"].shape[0]
    posterior, prior, decoder = (p[name] for name in ("posterior", "prior", "decoder"))
    w = {
        "moves": jnp.concatenate([posterior[0]["w"][:hidden], p["h"]["w"]], -1),
        "weighs": jnp.concatenate([prior[0]["w"][:hidden], decoder[0]["w"][:hidden]], -1),
        "posterior": posterior[1]["w"], "prior": prior[1]["w"], "decoder": decoder[1]["w"],
        "x": p["x"]["w"][:LATENT], "seen": decoder[0]["w"][hidden:],
    }  # fmt: skip
    b = {
        "moves": jnp.concatenate([posterior[0]["b"], p["h"]["b"]]),
        "weighs": jnp.concatenate([prior[0]["b"], decoder[0]["b"]]),
        "posterior": posterior[1]["b"], "prior": prior[1]["b"], "decoder": decoder[1]["b"],
        "x": p["x"]["b"], "seen": jnp.zeros(hidden),
    }  # fmt: skip
    return w, b


def made_before(p, data):
    """What data add to the posterior's, the GRU's and the prior's first products, ``[T, B, ...]``."""
    hidden = p["h"]["w"].shape[0]
    told = jnp.concatenate([data["obs"], data["acted"]], -1)
    both = jnp.concatenate([p["posterior"][0]["w"][hidden:], p["x"]["w"][LATENT:]], -1)
    posterior, x = jnp.split(told @ both, [hidden], -1)
    return posterior, x, data["acted"] @ p["prior"][0]["w"][hidden:]


# -- one timestep: particles ``h[B, PARTICLES, hidden]`` (``axis`` -1) or ``h[hidden, B, PARTICLES]`` (0)


def beside(x, axis):
    """Data ``[B, ...]`` of an environment, for all of its particles."""
    return x[:, None] if axis == -1 else x.T[..., None]


def times(x, w, axis):
    return x @ w if axis == -1 else jnp.tensordot(w, x, ((0,), (0,)))


def added(b, axis):
    return b if axis == -1 else b[:, None, None]


def normal_of(made, axis):
    mean, spread = jnp.split(made, 2, axis)
    return mean, 0.1 + jax.nn.softplus(spread)


def log_prob(x, mean, std, axis):
    return (-0.5 * ((x - mean) / std) ** 2 - jnp.log(std)).sum(axis)


def gates(x, hh, h, axis):
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, axis), jnp.split(hh, 3, axis)
    z = jax.nn.sigmoid(xz + hz)
    return z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def moved(mul, by_h, h, before, noise, axis):
    posterior, x, _ = before
    hidden = h.shape[axis]
    first, hh = jnp.split(by_h, [hidden], axis)
    mean, std = normal_of(mul("posterior", jnp.tanh(first + beside(posterior, axis))), axis)
    z = mean + std * noise
    return gates(mul("x", z) + beside(x, axis), hh, h, axis), (z, mean, std)


def weighed(mul, by_h, latent, before, obs, axis):
    z, mean, std = latent
    first, decoder = jnp.split(by_h, 2, axis)
    prior = normal_of(mul("prior", jnp.tanh(first + beside(before[2], axis))), axis)
    seen = mul("decoder", jnp.tanh(decoder + mul("seen", z)))
    away = log_prob(z, *prior, axis) - log_prob(z, mean, std, axis)
    return away + log_prob(beside(obs, axis), seen, 1.0, axis)


def both_moved(mul, h, before, obs, noise, axis, joined=None):
    """``joined``: weights of both products of particles."""
    if joined is None:
        moves, weighs = mul("moves", h), mul("weighs", h)
    else:
        hidden = h.shape[axis]
        moves, weighs = jnp.split(times(h, joined[0], axis) + added(joined[1], axis), [4 * hidden], axis)
    after, latent = moved(mul, moves, h, before, noise, axis)
    return after, weighed(mul, weighs, latent, before, obs, axis)


# -- particles drawn anew


def taken(h, ancestors, axis):
    if axis == 0:
        return jnp.take_along_axis(h, ancestors[None], 2)
    return jnp.take_along_axis(h, ancestors[..., None], 1)


def by_rows(h, ancestors, axis):
    """Rows of one table of all environments' particles."""
    if axis == 0:
        return taken(h, ancestors, axis)
    rows = (jnp.arange(len(h))[:, None] * PARTICLES + ancestors).reshape(-1)
    return h.reshape(-1, h.shape[-1])[rows].reshape(h.shape)


def by_ones(h, ancestors, axis):
    one = jax.nn.one_hot(ancestors, PARTICLES)
    return one @ h if axis == -1 else jnp.einsum("bkj,hbj->hbk", one, h)


def chosen(log_w, gumbel, going):
    return jnp.argmax(stop_gradient(log_w * going[:, None])[:, None] + gumbel, -1)


def turned(h, axis):
    """``[..., B, PARTICLES, features]`` as a loop has it."""
    return h if axis == -1 else jnp.moveaxis(h, -1, -3)


# -- the whole loop: particles ``[T, B, PARTICLES, hidden]`` and logarithmic weights


def multiplied(w, b, axis):
    return lambda name, x: times(x, w[name], axis) + added(b[name], axis)


def filtered(p, carry, data, draws, of, axis=-1, joined=False, again=False, unroll=1):
    """``draws``: of all timesteps, or what makes them at one."""
    w, b = products(p)
    before, going = made_before(p, data), 1.0 - data["first"].astype(jnp.float32)
    whole = [jnp.concatenate([x["moves"], x["weighs"]], -1) for x in (w, b)] if joined else None
    ready = isinstance(draws, tuple)

    def step(carry, x):
        (h, log_w), (before, going, obs, draw) = carry, x
        gumbel, noise = draw if ready else draws(draw)
        h = h * (going[:, None, None] if axis == -1 else going[:, None])
        h = of(h, chosen(log_w, gumbel, going), axis)
        found = both_moved(multiplied(w, b, axis), h, before, obs, turned(noise, axis), axis, whole)
        return found, found

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    xs = before, going, data["obs"], draws if ready else jnp.arange(len(data["obs"]))
    hs, log_w = jax.lax.scan(step, (turned(carry[0], axis), carry[1]), xs, unroll=unroll)[1]
    return (hs if axis == -1 else jnp.moveaxis(hs, 1, -1)), log_w


# -- two passes: the first one finds ancestors, the second one has nothing in its loop but what recurs


def replayed(p, carry, data, draws, ancestors, of, axis=-1, again=False, unroll=1):
    w, b = products(p)
    mul = multiplied(w, b, axis)
    before, going = made_before(p, data), 1.0 - data["first"].astype(jnp.float32)

    def step(h, x):
        before, going, noise, ancestors = x
        h = of(h * (going[:, None, None] if axis == -1 else going[:, None]), ancestors, axis)
        after, latent = moved(mul, mul("moves", h), h, before, turned(noise, axis), axis)
        return after, (h, after, latent)

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    made = jax.lax.scan(step, turned(carry[0], axis), (before, going, draws[1], ancestors), unroll=unroll)[1]

    def flat(x):
        return c.rows_of(x) if axis == -1 else jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1, PARTICLES)

    h, after, latent = jax.tree.map(flat, made)
    rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (before, data["obs"]))
    log_w = weighed(mul, mul("weighs", h), latent, *rows, axis)
    after = after if axis == -1 else jnp.moveaxis(after, 0, -1)
    return after.reshape(*ancestors.shape, -1), log_w.reshape(ancestors.shape)


def ancestors_of(p, carry, data, draws, of, axis):
    """By a loop that keeps nothing else."""
    w, b = products(p)
    before, going = made_before(p, data), 1.0 - data["first"].astype(jnp.float32)

    def step(carry, x):
        (h, log_w), (before, going, obs, (gumbel, noise)) = carry, x
        ancestors = chosen(log_w, gumbel, going)
        h = of(h * (going[:, None, None] if axis == -1 else going[:, None]), ancestors, axis)
        return both_moved(multiplied(w, b, axis), h, before, obs, turned(noise, axis), axis), ancestors

    return jax.lax.scan(step, (turned(carry[0], axis), carry[1]), (before, going, data["obs"], draws))[1]


def by_hand(length, batch, of=taken, ahead=True, passes=1, chunk=None, axis=-1, **how):
    """``chunk``: so many environments after the others."""

    def some(p, carry, data, draws):
        def loss(p):
            if passes == 2:
                hs, log_w = replayed(p, carry, data, draws, ancestors, of, axis, **how)
            else:
                hs, log_w = filtered(p, carry, data, draws, of, axis, **how)
            belief = (jax.nn.softmax(log_w)[..., None] * hs).sum(-2)
            return learnt(*outputs(p, belief), log_w, data) / (length * batch)

        ancestors = ancestors_of(p, carry, data, draws, of, axis) if passes == 2 else None
        return jax.value_and_grad(loss)(p)

    def run(p, carry, data, key):
        draw = drawing(key, batch)
        draws = jax.vmap(draw)(jnp.arange(length)) if ahead else draw
        if chunk is None:
            return some(p, carry, data, draws)
        cut = lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0)  # noqa: E731
        parts = c.in_chunks(carry, chunk), *jax.tree.map(cut, (data, draws))
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, *x)), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]

    return run


def workload(length, batch, hidden, chunk=4):
    make = functools.partial(by_hand, length, batch)
    rows, one, first, joined = {"of": by_rows}, {"of": by_ones}, {"axis": 0}, {"joined": True}
    two, double, again = {"passes": 2}, 2 * chunk, {"again": True}
    forms = {
        "rlfx": particles.by_rlfx(length, batch), "plain": particles.plain(length, batch),
        "hoisted, drawn within": make(ahead=False), "hoisted": make(), "hoisted, rows": make(**rows),
        "hoisted, ones": make(**one),
        "hoisted, joined": make(**joined), "hoisted, joined, rows": make(**joined, **rows),
        "hoisted, joined, ones": make(**joined, **one), "hoisted, joined, again": make(**joined, **again),
        "hoisted, joined, unrolled by 2": make(unroll=2, **joined), "features first": make(**first),
        "features first, ones": make(**first, **one), "features first, joined": make(**first, **joined),
        "features first, joined, ones": make(**first, **joined, **one), "features first, again": make(**first, **again),
        "two passes": make(**two), "two passes, rows": make(**two, **rows), "two passes, ones": make(**two, **one),
        "two passes, again": make(**two, **again), "two passes, unrolled by 2": make(unroll=2, **two),
        "two passes, features first": make(**two, **first), "two passes, features first, ones": make(**two, **first, **one),
        f"joined, {chunk} environments": make(chunk=chunk, **joined),
        f"joined, {double} environments": make(chunk=double, **joined),
        f"two passes, {double} environments": make(chunk=double, **two),
        f"features first, joined, {double} environments": make(chunk=double, **first, **joined),
        "hoisted, drawn within, threefry unrolled": make(ahead=False), "hoisted, threefry unrolled": make(),
        "hoisted, joined, rows, threefry unrolled": make(**joined, **rows),
        "hoisted, joined, ones, threefry unrolled": make(**joined, **one),
        "features first, joined, threefry unrolled": make(**first, **joined),
        "two passes, rows, threefry unrolled": make(**two, **rows),
        "two passes, ones, threefry unrolled": make(**two, **one),
        "two passes, features first, ones, threefry unrolled": make(**two, **first, **one),
        f"joined, {double} environments, threefry unrolled": make(chunk=double, **joined),
        f"joined, ones, {double} environments, threefry unrolled": make(chunk=double, **joined, **one),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 8), (length, batch)
    done = jax.random.uniform(k[0], size) < 0.03
    actions = jax.random.randint(k[1], (length + 1, batch), 0, ACTIONS)
    data = {
        "obs": jax.random.normal(k[2], (*size, OBS)), "acted": jax.nn.one_hot(actions[:-1], ACTIONS), "action": actions[1:],
        "reward": jax.random.normal(k[3], size), "done": done, "first": jnp.concatenate([jnp.zeros((1, batch), bool), done[:-1]]),
    }  # fmt: skip
    carry = 0.5 * jax.random.normal(k[4], (batch, PARTICLES, hidden)), jax.random.normal(k[5], (batch, PARTICLES))
    return drawing_workload(forms, (params_of(k[6], hidden), carry, data), tolerance=1e-4)
