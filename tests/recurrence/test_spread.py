"""Products of what is spread along an axis: computed once, the same values and gradients; what is not spread stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.spread import with_spread_after

CPU = rlfx.target("cpu")
NEVER = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, apart=False))
DOT = J.primitive("dot_general")
T, B, N, D, H = 5, 3, 4, 6, 7
K = jax.random.split(jax.random.key(0), 7)
PARAMS = {
    "in": jax.random.normal(K[0], (D, H)),
    "out": jax.random.normal(K[1], (H, D)) / 2.0,
    "twins": jax.random.normal(K[2], (2, D, H)),
    "b": jax.random.normal(K[3], (H,)),
    "models": jax.random.normal(K[4], (N, D, D)) / 3.0,
    "wide": jax.random.normal(K[5], (2 * D, H)),
}
CARRY = jax.random.normal(K[6], (B, D))
WEIGHTS = jnp.arange(float(N))  # of copies, so that they count apart


def policy(p, x):
    return jnp.tanh(jax.nn.relu(x @ p["in"] + p["b"][None]) @ p["out"])


def rollouts(p, x):
    """Of several models: the first action is the same for all of them."""
    states, found = jnp.broadcast_to(x, (N, D)), 0.0
    for _ in range(2):
        states = states + 0.1 * jax.vmap(jnp.matmul)(states, p["models"]) * policy(p, states)
        found += jnp.sum(states**2)
    return found


def of_twins(p, x):
    """Two critics of all copies, beside each other."""
    copies = jnp.repeat(x[None], N, 0)
    found = jax.vmap(lambda w: jnp.tanh(copies @ w))(p["twins"])
    return jnp.sum(found.min(0) * WEIGHTS[:, None])


def put_together(p, x):
    """With another value that is spread alike; their product is, too."""
    both = jnp.concatenate([jnp.broadcast_to(x, (N, D)), jnp.broadcast_to(jnp.sin(x), (N, D))], 1)
    return jnp.sum(jnp.tanh(both @ p["wide"]) * WEIGHTS[:, None])


def turned(p, x):
    """Along the last axis, reshaped and transposed, and one of two axes."""
    cube = jnp.broadcast_to(x[:, None, None], (D, N, 2)) + jnp.arange(2.0)[None, None]
    rows = jnp.transpose(cube, (1, 2, 0)).reshape(N, 2, 2, D // 2).reshape(N, 2, D)
    h = jnp.tanh(jnp.einsum("nkd,dh->hkn", rows, p["in"]))
    first, _ = jnp.split(h, [3], 0)
    weights = WEIGHTS[None]
    return jnp.sum(first * weights[None]) + jnp.sum(h.max(1) * weights)


def at_zero(p, x):
    """relu's derivative at 0 is 0."""
    copies = jnp.broadcast_to(jnp.where(jnp.arange(D) < 3, 0.0, x), (N, D))
    return jnp.sum(jax.nn.relu(copies) @ p["in"] * WEIGHTS[:, None])


SPREAD = {rollouts: 2, of_twins: 1, put_together: 1, turned: 1, at_zero: 1}


def different(p, x):
    """Each copy has a number of its own."""
    return jnp.sum(policy(p, x[None] * jnp.arange(1.0, N + 1.0)[:, None]))


def without_products(p, x):
    """XLA spreads it for nothing."""
    return jnp.sum(jnp.tanh(jnp.broadcast_to(x, (N, D)) * 2.0) * p["in"][:, :N].T)


def models_of_one(p, x):
    """A batch of matrices: each copy is multiplied with another one."""
    return jnp.sum(jnp.tanh(jax.vmap(jnp.matmul)(jnp.broadcast_to(x, (N, D)), p["models"])))


OTHERS = [different, without_products, models_of_one]


def program_of(f):
    def loss(p, x, t):
        return f(p, x * jnp.cos(t.now.astype(x.dtype))), jnp.roll(x, 1)

    return loss


def gradient(f, make=rlfx.compile, **how):
    fn = make(program_of(f), length=T, batch=B, **how)
    run = jax.value_and_grad(lambda p, x: fn(p, x)[0], (0, 1))
    return (jax.jit(run) if make is rlfx.compile else run)(PARAMS, CARRY)


def rows(program):
    """Rows of all products, that is all but the last axis of what they give."""
    return [int(np.prod(e.outputs[0].shape[:-1])) for e in program.equations if e.op is DOT]


def traced(f):
    return rlfx.compile(program_of(f), length=T, batch=B, target=NEVER).trace(PARAMS, CARRY)


@pytest.mark.parametrize("f", [*SPREAD, *OTHERS])
def test_values_and_gradients_are_those_of_the_reference(f):
    expected = gradient(f, rlfx.reference)
    for target in (CPU, NEVER):
        found = gradient(f, target=target)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


@pytest.mark.parametrize("f", SPREAD)
def test_what_is_spread_is_multiplied_once(f):
    before = traced(f)
    after = with_spread_after(before)
    fewer = [a < b for a, b in zip(rows(after), rows(before), strict=True)]
    assert sum(fewer) == SPREAD[f]
    assert with_spread_after(after) is after


@pytest.mark.parametrize("f", OTHERS)
def test_what_is_not_stays(f):
    before = traced(f)
    assert with_spread_after(before) is before


def test_it_is_part_of_what_a_cpu_does():
    def flops(target):
        fn = rlfx.compile(program_of(rollouts), length=T, batch=B, target=target)
        call = jax.jit(lambda p: fn(p, CARRY)[0]).lower(PARAMS).compile()
        return call.cost_analysis()["flops"]

    assert flops(CPU) < 0.8 * flops(NEVER)
