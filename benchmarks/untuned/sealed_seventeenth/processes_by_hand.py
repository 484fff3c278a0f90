"""A policy by Gaussian processes by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.scipy.linalg import cho_solve, cholesky, solve_triangular

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_seventeenth import processes as given
from benchmarks.untuned.sealed_seventeenth.processes import INPUTS, STATE, cost_of, model_of, noise_at, params_of


def known_of(model):
    """What there is to know before: seen points by their scales ``[STATE, points, INPUTS]``, factors, weights, variances."""
    rates = jnp.exp(-model["scales"])
    seen = model["x"] * rates[:, None]
    half = 0.5 * (seen**2).sum(-1)
    signal, noise = jnp.exp(2.0 * model["signal"]), jnp.exp(2.0 * model["noise"])
    far = half[..., None] + half[:, None] - seen @ seen.mT
    cov = signal[:, None, None] * jnp.exp(-far) + noise[:, None, None] * jnp.eye(seen.shape[1])
    factor = jax.vmap(functools.partial(cholesky, lower=True))(cov)
    weights = jax.vmap(lambda f, y: cho_solve((f, True), y))(factor, model["y"].T)
    both = {"rates": rates, "seen": seen, "half": half - 2.0 * model["signal"][:, None], "factor": factor}
    return both | {"weights": weights, "most": signal + noise}


def inverses(known):
    eye = jnp.eye(known["factor"].shape[1])
    return jax.vmap(lambda f: solve_triangular(f, eye, lower=True))(known["factor"])


# -- covariances with what was seen, ``[STATE, points, B]``, of ``x[INPUTS, B]``


def by_differences(known, x):
    far = (known["seen"][..., None] - known["rates"][:, None, :, None] * x) ** 2
    return jnp.exp(-0.5 * far.sum(2) - (known["half"] - 0.5 * (known["seen"] ** 2).sum(-1))[..., None])


def by_products(known, x):
    """Squares of differences written out, so that what is large is a product of all processes."""
    rates, seen = known["rates"], known["seen"]
    points = (seen * rates[:, None]).reshape(-1, INPUTS)
    across = (points @ x).reshape(*seen.shape[:2], -1)
    return jnp.exp(across - known["half"][..., None] - 0.5 * (rates**2 @ x**2)[:, None])


def by_one_product(known, x):
    """The same where squares are more inputs, and what is known beforehand is one more."""
    rates, seen = known["rates"], known["seen"]
    squares = jnp.broadcast_to(-0.5 * rates[:, None] ** 2, seen.shape)
    points = jnp.concatenate([seen * rates[:, None], squares, -known["half"][..., None]], -1)
    made = points.reshape(-1, 2 * INPUTS + 1) @ jnp.concatenate([x, x**2, jnp.ones_like(x[:1])])
    return jnp.exp(made.reshape(*seen.shape[:2], -1))


# -- means and variances ``[STATE, B]`` of covariances ``[STATE, points, B]``


def solved(known, cov):
    v = jax.vmap(lambda f, k: solve_triangular(f, k, lower=True))(known["factor"], cov)
    return (known["weights"][..., None] * cov).sum(1), known["most"][:, None] - (v**2).sum(1)


def multiplied(known, cov):
    """By the inverse of Cholesky's factor."""
    v = known["inverse"] @ cov
    return (known["weights"][..., None] * cov).sum(1), known["most"][:, None] - (v**2).sum(1)


def joined(known, cov):
    """Weights are one more row of the inverse."""
    v = jnp.concatenate([known["inverse"], known["weights"][:, None]], 1) @ cov
    return v[:, -1], known["most"][:, None] - (v[:, :-1] ** 2).sum(1)


@jax.custom_vjp
def by_precision(known, cov):
    """By the inverse of the covariance; what it gives is the derivative, too."""
    return forwards(known, cov)[0]


def forwards(known, cov):
    v = known["precision"] @ cov
    mean = (known["weights"][..., None] * cov).sum(1)
    return (mean, known["most"][:, None] - (v * cov).sum(1)), (known, v)


def backwards(kept, by):
    known, v = kept
    by_mean, by_variance = by
    by_cov = known["weights"][..., None] * by_mean[:, None] - 2.0 * v * by_variance[:, None]
    return jax.tree.map(jnp.zeros_like, known), by_cov


by_precision.defvjp(forwards, backwards)


# -- what is learnt


def by_hand(length, batch, measured, given_by, again=None, unroll=1, chunk=None, ahead=True):
    """``again``: "step", or the name of a number of which alone is kept what a timestep made; ``chunk``: particles after the
    others; ``ahead``: noise is drawn before."""

    def step(p, known, state, noise):
        """Of ``state[STATE, B]``."""
        action = jnp.tanh(c.columns(p, state))
        cov = measured(known, jnp.concatenate([state, action]))
        cov = jax.ad_checkpoint.checkpoint_name(cov, "covariances")
        mean, variance = given_by(known, cov)
        state = state + mean + jnp.sqrt(variance) * noise
        return state, cost_of(state.T, action.T)

    if again == "step":
        step = jax.checkpoint(step, prevent_cse=False)
    elif again:
        kept = jax.checkpoint_policies.save_only_these_names(again)
        step = jax.checkpoint(step, prevent_cse=False, policy=kept)

    def some(p, known, start, keys):
        every = jnp.arange(length)
        noise = jax.vmap(lambda t: noise_at(keys, t).T)(every) if ahead else every

        def loss(p):
            def body(state, x):
                return step(p, known, state, x if ahead else noise_at(keys, x).T)

            state, cost = jax.lax.scan(body, start.T, noise, unroll=unroll)
            return cost.sum() / (length * batch), state.T

        return jax.value_and_grad(loss, has_aux=True)(p)

    def run(p, model, start, key):
        known = stop_gradient(known_of(model))
        if given_by in (multiplied, joined, by_precision):
            known["inverse"] = inverses(known)
        if given_by is by_precision:
            known["precision"] = known["inverse"].mT @ known["inverse"]
        (keys,) = c.streams(key, batch, "next")
        if chunk is None:
            (found, state), grads = some(p, known, start, keys)
            return found, grads, state

        def add(total, x):
            (found, state), grads = some(p, known, *x)
            return jax.tree.map(jnp.add, total, (found, grads)), state

        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        parts = start.reshape(-1, chunk, STATE), keys.reshape(-1, chunk)
        (found, grads), states = jax.lax.scan(add, none, parts)
        return found, grads, states.reshape(batch, STATE)

    return run


def workload(length, batch, points, hidden, chunk=16):
    make = functools.partial(by_hand, length, batch)
    forms = {
        "rlfx": c.actor_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "differences, solved": make(by_differences, solved), "products, solved": make(by_products, solved),
        "products, multiplied": make(by_products, multiplied), "products, joined": make(by_products, joined),
        "one product, multiplied": make(by_one_product, multiplied), "products, precision": make(by_products, by_precision),
        "one product, precision": make(by_one_product, by_precision),
        "products, multiplied, again": make(by_products, multiplied, "step"),
        "products, precision, covariances kept": make(by_products, by_precision, "covariances"),
        "products, precision, unrolled": make(by_products, by_precision, unroll=2),
        f"products, precision, {chunk} particles": make(by_products, by_precision, chunk=chunk),
        f"one product, precision, {chunk} particles": make(by_one_product, by_precision, chunk=chunk),
        "products, precision, threefry unrolled": make(by_products, by_precision),
        "products, precision, drawn in the loop, threefry unrolled": make(by_products, by_precision, ahead=False),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    start = jax.random.normal(k[2], (batch, STATE))
    return drawing(forms, (params_of(k[0], hidden), model_of(k[1], points), start), tolerance=1e-4)
