"""Gradient TD that learns as it goes, with traces and importance weights (TDC(lambda), Maei 2011), inside a meta-learner (Sutton
1992; Xu et al. 2018): features, step sizes, and the traces' decay get the gradient of all errors, through every update."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, GAMMA = 16, 0.97


def params_of(key, hidden, features):
    return {
        "features": c.mlp_params(key, (OBS, hidden, features)), "decay": jnp.full(features, 2.0),
        "value size": jnp.full(features, -3.5), "second size": jnp.full(features, -4.5),
    }  # fmt: skip


def features_of(p, obs):
    return jnp.tanh(c.mlp(p["features"], obs))


def program(params, learnt, t):
    p, data = params
    w, second, trace = learnt
    x = rlfx.inputs(data)[t]
    features = rlfx.series(features_of(p, x["obs"]), end=0.0)
    here, there = features[t], features[t + 1]
    going, decay = GAMMA * (1.0 - x["done"]), jax.nn.sigmoid(p["decay"])
    error = x["reward"] + going * (w @ there) - w @ here
    trace = x["rho"] * (trace + here)
    sizes = jnp.exp(p["value size"]), jnp.exp(p["second size"])
    w = w + sizes[0] * (error * trace - going * (1.0 - decay) * (trace @ second) * there)
    second = second + sizes[1] * (error * trace - (second @ here) * here)
    return error**2, (w, second, going * decay * trace)


# -- by hand: errors ``[T, B]`` of features ``here, there[T, B, F]``


def constants(p):
    """The traces' decay, and both sizes."""
    return jax.nn.sigmoid(p["decay"]), jnp.exp(p["value size"]), jnp.exp(p["second size"])


def updated(p, learnt, here, there, reward, rho, going):
    """One timestep of all environments: weights ``[B, F]``."""
    (w, second, trace), (decay, size, of_second) = learnt, constants(p)
    error = reward + going * (w * there).sum(-1) - (w * here).sum(-1)
    trace = rho[:, None] * (trace + here)
    change = error[:, None] * trace
    held = ((going * (trace * second).sum(-1))[:, None] * (1.0 - decay)) * there
    after = w + size * (change - held), second + of_second * (change - (second * here).sum(-1)[:, None] * here)
    return (*after, going[:, None] * decay * trace), error


def in_loop(p, learnt, data, again=False):
    """Features are made in the loop."""

    def body(learnt, x):
        here, there = features_of(p, x["obs"]), features_of(p, x["next_obs"]) * x["within"]
        return updated(p, learnt, here, there, x["reward"], x["rho"], GAMMA * (1.0 - x["done"]))

    later = data | {"next_obs": c.shifted(data["obs"], data["obs"][-1])}
    later["within"] = jnp.ones(len(data["done"])).at[-1].set(0.0)
    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if again else body, learnt, later)[1]


def made_before(p, data, flat=True):
    features = features_of(p, c.rows_of(data["obs"]) if flat else data["obs"]).reshape(*data["done"].shape, -1)
    later = c.shifted(features, jnp.zeros_like(features[0]))
    return features, later, data["reward"], data["rho"], GAMMA * (1.0 - data["done"])


def hoisted(p, learnt, data, step=updated, flat=True, unroll=1, again=False, together=None):
    """Features of all timesteps at once; ``together``: so many timesteps are computed again at once."""
    body = lambda learnt, x: step(p, learnt, *x)  # noqa: E731
    body = jax.checkpoint(body, prevent_cse=False) if again else body
    xs = made_before(p, data, flat)
    if together is None:
        return jax.lax.scan(body, learnt, xs, unroll=unroll)[1]
    some = jax.checkpoint(lambda learnt, x: jax.lax.scan(body, learnt, x, unroll=unroll), prevent_cse=False)
    return jax.lax.scan(some, learnt, c.in_chunks(xs, together))[1].reshape(data["done"].shape)


def stacked(p, learnt, here, there, reward, rho, going):
    """Products with weights are two sums: those of `w` with what both features make, and of `second` with both others."""
    (w, second, trace), (decay, size, of_second) = learnt, constants(p)
    error = reward + (w * (going[:, None] * there - here)).sum(-1)
    trace = rho[:, None] * (trace + here)
    held, own = (jnp.stack([trace, here]) * second).sum(-1)
    change = error[:, None] * trace
    w = w + size * change - (going * held)[:, None] * (size * (1.0 - decay)) * there
    second = second + of_second * (change - own[:, None] * here)
    return (w, second, going[:, None] * decay * trace), error


def features_first(p, learnt, data, unroll=1, again=False, outer=True):
    """Environments are innermost: ``[F, B]``."""
    decay, size, of_second = (x[:, None] for x in constants(p))

    def body(learnt, x):
        (w, second, trace), (here, there, reward, rho, going) = learnt, x
        error = reward + (w * (going * there - here)).sum(0)
        trace = rho * (trace + here)
        change = error * trace
        w = w + size * (change - (going * (trace * second).sum(0)) * (1.0 - decay) * there)
        second = second + of_second * (change - (second * here).sum(0) * here)
        return (w, second, (going * decay) * trace), error

    if outer:  # products are of rows, and turned
        here, there, *others = made_before(p, data)
        here, there = here.swapaxes(1, 2), there.swapaxes(1, 2)
    else:
        x = jnp.moveaxis(data["obs"], -1, 1)
        for layer in p["features"]:
            x = jnp.tanh(jnp.einsum("oh,tob->thb", layer["w"], x) + layer["b"][:, None])
        here, there = x, c.shifted(x, jnp.zeros_like(x[0]))
        others = data["reward"], data["rho"], GAMMA * (1.0 - data["done"])
    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, tuple(x.T for x in learnt), (here, there, *others), unroll=unroll)[1]


# -- by hand: the derivative of the whole recurrence


def loop_back(p, learnt, data, unroll=1, first=False):
    """The recurrence with a derivative by hand: weights, and what they were multiplied with, are kept, and gradients of sizes and
    decays are added up for each environment alone. ``first``: features first, environments are innermost."""
    of = (lambda x: x) if first else (lambda x: x[:, None])
    total = lambda x: x.sum(0 if first else -1)  # noqa: E731

    @jax.custom_vjp
    def errors(constants, learnt, xs):
        return forwards(constants, learnt, xs)[0]

    def forwards(constants, learnt, xs):
        decay, size, of_second = constants
        slow = size * (1.0 - decay)

        def body(learnt, x):
            (w, second, trace), (here, there, reward, rho, going) = learnt, x
            error = reward + total(w * (of(going) * there - here))
            trace = of(rho) * (trace + here)
            held, own = going * total(trace * second), total(second * here)
            change = of(error) * trace
            after = w + size * change - of(held) * slow * there, second + of_second * (change - of(own) * here)
            return (*after, of(going) * decay * trace), (error, held, own, w, second, trace)

        error, *kept = jax.lax.scan(body, learnt, xs, unroll=unroll)[1]
        return error, (constants, xs, error, kept)

    def backwards(residuals, by):
        (decay, size, of_second), xs, error, kept = residuals
        slow = size * (1.0 - decay)

        def body(carry, x):
            dw, dsecond, dnext, *sums = carry
            by, error, (here, there, _, rho, going), (held, own, w, second, trace) = x
            by_w, by_second = size * dw, of_second * dsecond
            both, tracked, slowed = by_w + by_second, of(going) * dnext, slow * dw
            derror = by + total(both * trace)
            dheld, down = -going * total(slowed * there), -total(by_second * here)  # of trace @ second, and second @ here
            moved = of(rho) * (of(error) * both + of(dheld) * second + tracked * decay)
            dhere = moved + of(down) * second - of(own) * by_second - of(derror) * w
            dthere = of(derror * going) * w - of(held) * slowed
            change = of(error) * trace
            found = tracked * trace, dw * change, of(held) * there * dw, dsecond * (change - of(own) * here)
            dw = dw + of(derror) * (of(going) * there - here)
            dsecond = dsecond + of(dheld) * trace + of(down) * here
            return (dw, dsecond, moved, *map(jnp.add, sums, found)), (dhere, dthere)

        carry = (jnp.zeros_like(xs[0][0]),) * 7
        carry, (dhere, dthere) = jax.lax.scan(body, carry, (by, error, xs, kept), reverse=True, unroll=unroll)
        ddecay, dsize, held, dof_second = (x.sum(-1, keepdims=True) if first else x.sum(0) for x in carry[3:])
        found = ddecay + size * held, dsize - (1.0 - decay) * held, dof_second
        return found, carry[:3], (dhere, dthere, *(jnp.zeros_like(x) for x in xs[2:]))

    errors.defvjp(forwards, backwards)
    here, there, *others = made_before(p, data)
    if not first:
        return errors(constants(p), learnt, (here, there, *others))
    xs = here.swapaxes(1, 2), there.swapaxes(1, 2), *others
    return errors(tuple(x[:, None] for x in constants(p)), tuple(x.T for x in learnt), xs)


def by_hand(length, batch, recurrence=in_loop, chunk=None):
    """``chunk``: environments of a block."""

    def loss(p, part):
        data, learnt = part
        return (recurrence(p, learnt, data) ** 2).sum() / (length * batch)

    return c.gradient_by_environments(loss, chunk)


def workload(length, batch, hidden, features, chunk=8):
    def make(recurrence=hoisted, chunk=None, **how):
        return by_hand(length, batch, functools.partial(recurrence, **how), chunk)

    loss_fn = rlfx.compile(program, length=length, batch=batch)
    first, back = features_first, loop_back
    forms = {
        "rlfx": lambda p, data, learnt: jax.value_and_grad(lambda p: loss_fn((p, data), learnt)[0])(p),
        "plain": make(in_loop), "checkpointed": make(in_loop, again=True), "hoisted": make(), "not flattened": make(flat=False),
        "hoisted, checkpointed": make(again=True), "hoisted, unrolled by 4": make(unroll=4),
        "fewer sums": make(step=stacked), "fewer sums, checkpointed": make(step=stacked, again=True),
        "fewer sums, again by 8": make(step=stacked, together=8), "features first": make(first),
        "features first, checkpointed": make(first, again=True), "features first, unrolled by 2": make(first, unroll=2),
        "features first throughout": make(first, outer=False), f"blocks of {chunk}": make(step=stacked, chunk=chunk),
        "derivative by hand": make(back), "derivative by hand, features first": make(back, first=True),
        "derivative by hand, features first, unrolled by 2": make(back, first=True, unroll=2),
        f"derivative by hand, blocks of {chunk}": make(back, chunk=chunk),
        f"derivative by hand, blocks of {2 * chunk}": make(back, chunk=2 * chunk),
        f"features first, blocks of {2 * chunk}": make(first, chunk=2 * chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "reward": jax.random.normal(k[1], size),
        "rho": jnp.minimum(jnp.exp(0.3 * jax.random.normal(k[2], size)), 1.5),
        "done": (jax.random.uniform(k[3], size) < 0.05).astype(jnp.float32),
    }  # fmt: skip
    learnt = tuple(0.1 * jax.random.normal(k, (batch, features)) for k in jax.random.split(k[4], 3))
    return Workload(forms, (params_of(k[5], hidden, features), data, learnt), tolerance=1e-5)
