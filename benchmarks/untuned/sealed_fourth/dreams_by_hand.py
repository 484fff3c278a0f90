"""`dreams` by hand: its recurrence, and its heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

from . import dreams as e

# -- the recurrence: states, latents and what was believed, ``[T, B, ...]``, after what it ends with; ``noise`` is what it draws
# of, and how


def together(p, groups, told, data, noise):
    """As a cell is written."""
    draws, draw = noise

    def body(carry, given):
        told, first, action, own = given
        h, z, action = (jnp.where(first[:, None], 0.0, s) for s in (*carry, action))
        h = e.moved(p, h, z, action)
        posterior = e.mixed(c.linear(p["posterior"], jnp.concatenate([h, told], -1)), groups)
        z = e.straight(posterior, jnp.argmax(stop_gradient(posterior) + draw(own), -1))
        return (h, z), (h, z, posterior)

    return body, (told, data["first"], data["action"], draws)


def parts(p):
    """Weights of what the loop makes itself, and those of what is told and done."""
    hidden = p["gru"]["w"].shape[1] // 3
    own = {"in": p["in"]["w"][: -e.ACTIONS], "gru": p["gru"]["w"], "posterior": p["posterior"]["w"][:hidden]}
    return own, p["in"]["w"][-e.ACTIONS :], p["posterior"]["w"][hidden:]


def before(p, told, data):
    """What is added to the loop's products, but for the biases of gates."""
    _, of_action, of_told = parts(p)
    action = jnp.where(data["first"][..., None], 0.0, data["action"])
    return {"in": action @ of_action + p["in"]["b"], "posterior": told @ of_told + p["posterior"]["b"]}


def cell(w, norms, groups, pre, carry, first, drawn):
    """One timestep of products ``w``; what they were taken of."""
    h, z = (jnp.where(first[:, None], 0.0, s) for s in carry)
    x = jax.nn.silu(e.normed(norms["in"], z @ w["in"] + pre["in"]))
    both = jnp.concatenate([x, h], -1)
    after = e.gru(e.normed(norms["gru"], both @ w["gru"] + pre["gru"]), h)
    posterior = e.mixed(after @ w["posterior"] + pre["posterior"], groups)
    chosen = jnp.argmax(stop_gradient(posterior) + drawn, -1)
    z_after = e.straight(posterior, chosen)
    return (after, z_after), (after, z_after, posterior), {"in": z, "gru": both, "posterior": after}


def hoisted(p, groups, told, data, noise):
    """Products with what is told, and with actions, are before the loop."""
    w, (draws, draw) = parts(p)[0], noise

    def body(carry, given):
        pre, first, own = given
        carry, made, _ = cell(w, p["norm"], groups, pre | {"gru": p["gru"]["b"]}, carry, first, draw(own))
        return carry, made

    return body, (before(p, told, data), data["first"], draws)


def looped(cells, again=False, chunk=None):
    """``again``: the gradient computes each timestep again, or ``chunk`` timesteps."""

    def run(p, groups, told, data, carry, noise):
        body, xs = cells(p, groups, told, data, noise)
        if chunk is None:
            return jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if again else body, carry, xs)
        some = jax.checkpoint(lambda carry, xs: jax.lax.scan(body, carry, xs), prevent_cse=False)
        carry, made = jax.lax.scan(some, carry, c.in_chunks(xs, chunk))
        return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), made)

    return run


def weights_after(p, groups, told, data, carry, noise):
    """The loop backwards gives the gradients of sums; those of weights are taken of all timesteps at once."""
    draws, draw = noise

    def loop(w, norms, pre, carry):
        def body(carry, given):
            pre, first, own = given
            carry, made, inputs = cell(w, norms, groups, pre, carry, first, draw(own))
            return carry, (made, inputs)

        carry, (made, inputs) = jax.lax.scan(body, carry, (pre, data["first"], draws))
        return (carry, made), inputs

    @jax.custom_vjp
    def run(w, norms, pre):
        return loop(w, norms, pre, carry)[0]

    def forwards(w, norms, pre):
        out, through, inputs = jax.vjp(lambda norms, pre: loop(w, norms, pre, carry), norms, pre, has_aux=True)
        return out, (through, inputs)

    def backwards(residuals, by):
        through, inputs = residuals
        by_norms, by_pre = through(by)
        found = {name: c.rows_of(x).T @ c.rows_of(by_pre[name]) for name, x in inputs.items()}
        return found, by_norms, by_pre

    run.defvjp(forwards, backwards)
    shape = *data["first"].shape, len(p["gru"]["b"])
    return run(parts(p)[0], p["norm"], before(p, told, data) | {"gru": jnp.broadcast_to(p["gru"]["b"], shape)})


# -- heads of rows


def apart(p, h, z, posterior, x):
    return e.point_loss(p, h, z, posterior, x).sum()


def joined(p, h, z, posterior, x):
    """The first layers of three heads as one product, and no more of the rewards' logits than their sum and two of them."""
    names = "decoder", "reward", "going"
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name][0] for name in names))
    wide = jnp.split(jax.nn.silu(c.linear(first, jnp.concatenate([h, z], -1))), 3, -1)
    decoded, rewards, going = (c.linear(p[name][1], x) for name, x in zip(names, wide, strict=True))
    error = 0.5 * ((decoded - e.symlog(x["obs"])) ** 2).sum()
    told = (jax.nn.logsumexp(rewards, -1) - (e.two_hot(e.symlog(x["reward"])) * rewards).sum(-1)).sum()
    goes_on = (jax.nn.softplus(going[..., 0]) - (1.0 - x["last"]) * going[..., 0]).sum()
    prior = e.mixed(e.head(p, "prior", h), posterior.shape[-2])
    return error + told + goes_on + e.balanced(posterior, prior).sum()


def by_hand(length, batch, groups, recurrence, heads=apart, flat=True, blocks=None, ahead=True):
    """``blocks``: timesteps for which the heads run at a time; ``ahead``: random numbers are drawn before the loop."""

    def run(p, data, carry, key):
        (keys,) = c.streams(key, batch, "latent")
        shape, times = (groups, carry[1].shape[-1] // groups), jnp.arange(length)
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, shape))(c.at(keys, t))  # noqa: E731
        noise = (jax.vmap(draw)(times), lambda x: x) if ahead else (times, draw)
        rows = c.rows_of if flat else lambda x: x

        def states(p):
            told = e.head(p, "encoder", rows(e.symlog(data["obs"]))).reshape(length, batch, -1)
            return recurrence(p, groups, told, data, carry, noise)

        def loss(p):
            after, made = states(p)
            return heads(p, *rows(made), rows(data)) / (length * batch), after

        if blocks is None:
            (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
            return found, grads, after

        made, pull, after = jax.vjp(lambda p: states(p)[::-1], p, has_aux=True)

        def add(total, part):
            some = lambda p, made: heads(p, *made, part[1]) / (length * batch)  # noqa: E731
            found, (grads, by_made) = jax.value_and_grad(some, (0, 1))(p, part[0])
            return jax.tree.map(jnp.add, total, (found, grads)), by_made

        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        parts = c.in_chunks(rows((made, data)), blocks * (batch if flat else 1))
        (found, grads), by_made = jax.lax.scan(add, start, parts)
        by_made = jax.tree.map(lambda by, x: by.reshape(x.shape), by_made, made)
        return found, jax.tree.map(jnp.add, grads, pull(by_made)[0]), after

    return run


def in_one_loop(length, batch, groups, again=False):
    """The heads are in the loop, too."""

    def run(p, data, carry, key):
        (keys,) = c.streams(key, batch, "latent")
        shape = groups, carry[1].shape[-1] // groups
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, shape))(c.at(keys, t))  # noqa: E731

        def loss(p):
            told = e.head(p, "encoder", e.symlog(data["obs"]))
            cell, xs = together(p, groups, told, data, (jnp.arange(length), draw))

            def body(carry, given):
                carry, made = cell(carry, given[0])
                return carry, e.point_loss(p, *made, given[1]).mean()

            after, found = jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if again else body, carry, (xs, data))
            return found.mean(), after

        (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, after

    return run


def workload(length, batch, hidden, groups, classes, blocks=4, chunk=8):
    make = lambda recurrence, **how: by_hand(length, batch, groups, recurrence, **how)  # noqa: E731
    plain, before = looped(together), looped(hoisted)
    one, some = {"heads": joined}, {"heads": joined, "blocks": blocks}
    forms = {
        "rlfx": c.actor_by_rlfx(e.program(groups), length, batch),
        "plain": make(plain, flat=False, ahead=False), "rows": make(plain, ahead=False),
        "in one loop": in_one_loop(length, batch, groups), "in one loop, again": in_one_loop(length, batch, groups, again=True),
        "drawn ahead": make(plain), "hoisted": make(before), "hoisted, heads joined": make(before, **one),
        "hoisted, again": make(looped(hoisted, again=True)), f"hoisted, again by {chunk}": make(looped(hoisted, chunk=chunk)),
        f"heads by {blocks}": make(plain, blocks=blocks, ahead=False), f"hoisted, joined heads by {blocks}": make(before, **some),
        f"again, joined heads by {blocks}": make(looped(together, again=True), **some, ahead=False),
        f"hoisted, again, joined heads by {blocks}": make(looped(hoisted, again=True), **some),
        "weights after": make(weights_after), "weights after, heads joined": make(weights_after, **one),
        f"weights after, heads by {blocks}": make(weights_after, blocks=blocks),
        f"weights after, joined heads by {blocks}": make(weights_after, **some),
        f"weights after, joined heads by {blocks}, drawn late": make(weights_after, **some, ahead=False),
        f"weights after, joined heads by {blocks}, threefry unrolled": make(weights_after, **some),
        "weights after, heads joined, threefry unrolled": make(weights_after, **one),
        "hoisted, heads joined, threefry unrolled": make(before, **one),
        f"hoisted, again, joined heads by {blocks}, threefry unrolled": make(looped(hoisted, again=True), **some, ahead=False),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    flags = lambda k, share: (jax.random.uniform(k, size) < share).astype(jnp.float32)  # noqa: E731
    data = {
        "obs": 2.0 * jax.random.normal(k[0], (*size, e.OBS)), "action": jax.random.normal(k[1], (*size, e.ACTIONS)),
        "reward": 3.0 * jax.random.normal(k[2], size), "first": flags(k[3], 0.05) > 0.0, "last": flags(k[4], 0.05),
    }  # fmt: skip
    latent = jax.nn.one_hot(jax.random.randint(k[5], (batch, groups), 0, classes), classes).reshape(batch, -1)
    given = (
        e.params_of(k[6], hidden, groups, classes),
        data,
        (jnp.tanh(jax.random.normal(k[7], (batch, hidden))), latent),
    )
    unrolled = *given, jax.random.key(2, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, tolerance=1e-5)
