"""VariBAD: a GRU's belief about the task at every timestep, told from the one before, decodes the rewards of all timesteps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, LATENT = 6, 2, 8
GIVEN = OBS + ACTIONS


def params_of(key, hidden, decoder):
    k = jax.random.split(key, 5)
    return {
        "in": c.dense(k[0], GIVEN + 1, hidden), "x": c.dense(k[1], hidden, 3 * hidden), "h": c.dense(k[2], hidden, 3 * hidden),
        "belief": c.dense(k[3], hidden, 2 * LATENT),
        "decoder": c.mlp_params(k[4], (LATENT + GIVEN, decoder, decoder, 1)),
    }  # fmt: skip


def before(p, x):
    """The cell's products with what is seen, which no recurrence needs."""
    seen = jnp.concatenate([x["obs"], x["action"], x["reward"][..., None]], -1)
    return c.linear(p["x"], jnp.tanh(c.linear(p["in"], seen)))


def cell(p, h, x):
    return gates(before(p, x), c.linear(p["h"], h), h)


def divergence(new, old):
    """Of one diagonal normal from another, each a mean and a logarithm of deviations."""
    (mean, log_std), (expected, log_spread) = new, old
    ratio = jnp.exp(2.0 * (log_std - log_spread)) + ((mean - expected) / jnp.exp(log_spread)) ** 2
    return (log_spread - log_std + 0.5 * ratio - 0.5).sum(-1)


def decoded(p, z, x):
    """The reward that a task ``z`` gives."""
    return c.mlp(p["decoder"], jnp.concatenate([z, x["obs"], x["action"]], -1))[..., 0]


def program(params, h, t):
    p, data = params
    given = rlfx.inputs(data)
    h = cell(p, h, given[t])
    mean, log_std = jnp.split(c.linear(p["belief"], h), 2)
    beliefs = rlfx.series((mean, log_std), start=(jnp.zeros(LATENT), jnp.zeros(LATENT)))
    z = mean + jnp.exp(log_std) * jax.random.normal(t.key_for("latent"), (LATENT,))
    everything = given[:]
    rewards = jax.vmap(lambda x: decoded(p, z, x))(everything)
    error = 0.5 * ((rewards - everything["reward"]) ** 2).mean()
    return error + 0.05 * divergence((mean, log_std), beliefs[t - 1]), h


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, h, key: jax.value_and_grad(lambda p: loss_fn((p, data), h, key)[0])(p)


# -- by hand: errors of all pairs of a latent ``z[S, B, LATENT]`` and a timestep of ``x[T, B, ...]``, summed


def paired(p, z, x):
    """Rows of a latent beside what is given."""
    size = z.shape[0], *x["reward"].shape
    both = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (size[0], *x.shape)), x)
    return 0.5 * ((decoded(p, jnp.broadcast_to(z[:, None], (*size, LATENT)), both) - both["reward"]) ** 2).sum()


def halves(p, z, x):
    """The decoder's first product of each part alone."""
    first = p["decoder"][0]
    return z @ first["w"][:LATENT], jnp.concatenate([x["obs"], x["action"]], -1) @ first["w"][LATENT:] + first["b"]


def split(p, z, x):
    """The first product of each part alone, and sums of the two."""
    of_z, of_x = halves(p, z, x)
    h = jnp.tanh(of_z[:, None] + of_x[None])
    return 0.5 * ((c.mlp(p["decoder"][1:], h)[..., 0] - x["reward"]) ** 2).sum()


def features_first(p, z, x):
    """The same with pairs innermost."""
    of_z, of_x = (jnp.moveaxis(h, -1, 0) for h in halves(p, z, x))
    h = jnp.tanh(of_z[:, :, None] + of_x[:, None])
    h = h.reshape(h.shape[0], -1)
    _, second, last = p["decoder"]
    h = jnp.tanh(second["w"].T @ h + second["b"][:, None])
    told = (last["w"].T @ h + last["b"][:, None]).reshape(z.shape[0], *x["reward"].shape)
    return 0.5 * ((told - x["reward"]) ** 2).sum()


def encoded(p, h, data, noise, hoisted=False, chunk=None, unroll=1):
    """The latents, and the sum of the divergences; ``chunk``: the gradient runs so many timesteps again."""
    xs = before(p, data) if hoisted else data

    def body(h, x):
        h = gates(x, c.linear(p["h"], h), h) if hoisted else cell(p, h, x)
        return h, h

    if chunk is None:
        hs = jax.lax.scan(body, h, xs, unroll=unroll)[1]
    else:
        part = jax.checkpoint(lambda h, xs: jax.lax.scan(body, h, xs), prevent_cse=False)
        hs = jax.lax.scan(part, h, c.in_chunks(xs, chunk))[1].reshape(*noise.shape[:2], -1)
    new = jnp.split(c.linear(p["belief"], hs), 2, -1)
    old = [jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]) for x in new]
    return new[0] + jnp.exp(new[1]) * noise, divergence(new, old).sum()


def errors_again(errors, chunk, p, z, x):
    """In blocks of latents, each computed again for its gradient."""
    some = jax.checkpoint(lambda z: errors(p, z, x), prevent_cse=False)
    return jax.lax.scan(lambda total, z: (total + some(z), None), 0.0, c.in_chunks(z, chunk))[0]


def by_hand(length, batch, errors=paired, hoisted=False, chunk=None, direct=None, unroll=1):
    """``chunk``: timesteps that the encoder runs again; ``direct``: latents of a block whose errors and their gradient are
    computed at once, and summed."""

    def run(p, data, h, key):
        (keys,) = c.streams(key, batch, "latent")
        draw = jax.vmap(lambda k: jax.random.normal(k, (LATENT,)))
        noise = jax.vmap(lambda t: draw(c.at(keys, t)))(jnp.arange(length))
        encode = functools.partial(encoded, h=h, data=data, noise=noise, hoisted=hoisted, chunk=chunk, unroll=unroll)
        mean = 1.0 / (length * batch)

        def loss(p):
            z, told = encode(p)
            return mean * (errors(p, z, data) / length + 0.05 * told)

        if direct is None:
            return jax.value_and_grad(loss)(p)
        (z, told), back = jax.vjp(encode, p)

        def add(total, z):
            found, (of_p, of_z) = jax.value_and_grad(lambda p, z: errors(p, z, data), (0, 1))(p, z)
            return jax.tree.map(jnp.add, total, (found, of_p)), of_z

        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        (found, of_p), of_z = jax.lax.scan(add, start, c.in_chunks(z, direct))
        (through,) = back((mean / length * of_z.reshape(z.shape), jnp.float32(0.05 * mean)))
        grads = jax.tree.map(lambda a, b: mean / length * a + b, of_p, through)
        return mean * (found / length + 0.05 * told), grads

    return run


def workload(length, batch, hidden, decoder, chunk=4):
    k = jax.random.split(jax.random.key(0), 4)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size),
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    again = lambda errors, n: functools.partial(errors_again, errors, n)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "hoisted": make(hoisted=True),
        "hoisted, split": make(hoisted=True, errors=split),
        "hoisted, features first": make(hoisted=True, errors=features_first),
        f"hoisted, split, again by {chunk}": make(hoisted=True, errors=again(split, chunk)),
        f"pairs again by {chunk}, encoder too": make(hoisted=True, errors=again(paired, chunk), chunk=chunk),
        f"hoisted, split, direct by {chunk}": make(hoisted=True, errors=split, direct=chunk),
        "hoisted, split, direct by 1": make(hoisted=True, errors=split, direct=1),
        f"hoisted, features first, direct by {chunk}": make(hoisted=True, errors=features_first, direct=chunk),
        f"hoisted, features first, direct by {chunk}, unrolled": make(
            hoisted=True, errors=features_first, direct=chunk, unroll=6
        ),
        "hoisted, pairs, direct by 1": make(hoisted=True, direct=1),
    }  # fmt: skip
    p = params_of(k[3], hidden, decoder)
    return Workload(forms, (p, data, jnp.zeros((batch, hidden)), jax.random.key(3)), tolerance=5e-6)
