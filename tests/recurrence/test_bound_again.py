"""Equations that are copied as they are bound: in a trace that keeps a jaxpr, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate


def program(x, w):
    y = jax.nn.relu(x @ w) + jax.jit(jnp.sin)(x)
    z, _ = jax.lax.scan(lambda c, r: (c * r, c), y[0], y)
    return z.astype(jnp.int32).astype(jnp.float32) + jax.checkpoint(jnp.cos)(z)


X, W = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)
CLOSED = jax.make_jaxpr(program)(X, W)


def again(*args):
    return evaluate(CLOSED.jaxpr, CLOSED.consts, args, lambda *_: None)[0]


def test_a_jaxpr_that_is_bound_again_is_itself():
    assert str(jax.make_jaxpr(again)(X, W).jaxpr) == str(CLOSED.jaxpr)
    scoped = jax.make_jaxpr(jax.named_scope("mine")(again))(X, W)
    assert {str(e.source_info.name_stack) for e in scoped.jaxpr.eqns} == {"mine"}


TRANSFORMED = {
    "jit": (jax.jit, X),
    "vmap": (lambda f: jax.vmap(f, (0, None)), jnp.stack([X, 2 * X])),
    "grad": (lambda f: jax.grad(lambda *args: f(*args).sum()), X),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("jitted", [False, True])
def test_it_means_the_same_under_transformations(name, jitted):
    transform, x = TRANSFORMED[name]
    outer = jax.jit if jitted else lambda f: f
    found, expected = (outer(transform(f))(x, W) for f in (again, program))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x", [X.astype(jnp.bfloat16), X[:2], np.asarray(X)], ids=["dtype", "shape", "numpy"])
def test_other_types_are_bound_as_ever(x):
    (eqn,) = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns
    jaxpr = jax.make_jaxpr(lambda one: J.bind_again(eqn, one))(x)
    assert (jaxpr.out_avals[0].shape, jaxpr.out_avals[0].dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(jax.jit(lambda one: J.bind_again(eqn, one)[0])(x), jax.jit(jnp.sin)(x))


def test_effects_and_constants_are_bound_as_ever():
    seen = []
    closed = jax.make_jaxpr(lambda x: jax.debug.callback(seen.append, x) or x + 1.0)(1.0)
    jax.jit(lambda x: evaluate(closed.jaxpr, closed.consts, [x], lambda *_: None))(2.0)
    jax.effects_barrier()
    assert [float(x) for x in seen] == [2.0]
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(jnp.int32))(1.5).jaxpr.eqns
    assert jax.make_jaxpr(lambda: J.bind_again(eqn, jnp.float32(2.5)))().eqns == []
