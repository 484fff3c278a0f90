"""Triangular systems of many small matrices: against numpy in double precision, derivatives, what stays, and solves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.contractions import FAST
from rlfx.recurrence.cpu.triangles import is_of_small_systems
from rlfx.recurrence.ir.interpret import rewritten


def system(n, sides, pairs=(20,), left=True, seed=0):
    k = jax.random.split(jax.random.key(seed))
    diagonal = jnp.diag(jnp.where(jnp.arange(n) % 2 == 1, 1.5, -1.2))
    a = 0.3 * jax.random.normal(k[0], (*pairs, n, n)) + jnp.broadcast_to(diagonal, (*pairs, n, n))
    return a, jax.random.normal(k[1], (*pairs, n, sides) if left else (*pairs, sides, n))


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(b).max()))


def ours(fn, *args):
    return jax.jit(rewritten(fn, FAST))(*args)


def systems(fn, *args):
    """How many equations are of the kind, and how many are left after."""
    return [sum(map(is_of_small_systems, J.equations_in({"jaxpr": jax.make_jaxpr(f)(*args)}))) for f in (fn, rewritten(fn, FAST))]


HOW = [
    dict(zip(("left_side", "lower", "transpose_a", "unit_diagonal"), flags, strict=True))
    for flags in itertools.product([True, False], repeat=4)
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(k for k, v in how.items() if v) or "none")
def test_every_kind(how):
    a, b = system(4, 3, left=how["left_side"])
    fn = lambda a, b: lax.linalg.triangular_solve(a, b, **how)  # noqa: E731
    assert systems(fn, a, b) == [1, 0]
    whole = np.asarray((jnp.tril if how["lower"] else jnp.triu)(a), np.float64)
    if how["unit_diagonal"]:
        whole = whole - whole * np.eye(4) + np.eye(4)
    whole = np.swapaxes(whole, -1, -2) if how["transpose_a"] else whole
    if how["left_side"]:
        wanted = np.linalg.solve(whole, np.asarray(b, np.float64))
    else:
        wanted = np.swapaxes(np.linalg.solve(np.swapaxes(whole, -1, -2), np.swapaxes(np.asarray(b, np.float64), -1, -2)), -1, -2)
    close(ours(fn, a, b), wanted.astype(a.dtype))


@pytest.mark.parametrize(("n", "sides", "pairs"), [(1, 1, (16,)), (2, 6, (4, 5)), (8, 1, (3, 2, 4)), (5, 16, (30,))])
def test_sizes(n, sides, pairs):
    a, b = system(n, sides, pairs)
    fn = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    assert systems(fn, a, b) == [1, 0]
    close(ours(fn, a, b), fn(a, b))


@pytest.mark.parametrize(("n", "sides", "pairs"), [(9, 1, (20,)), (3, 17, (20,)), (3, 2, (15,)), (3, 2, ())])
def test_what_stays(n, sides, pairs):
    a, b = system(n, sides, pairs)
    assert systems(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), a, b) == [0, 0]


def test_complex_numbers_stay():
    a, b = system(3, 2)
    a, b = (lax.complex(x, jnp.zeros_like(x)) for x in (a, b))
    assert systems(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), a, b) == [0, 0]


SOLVES = {
    "solve": lambda a, b: jnp.linalg.solve(a, b),
    "a vector": lambda a, b: jax.vmap(jnp.linalg.solve)(a, b[..., 0]),
    "inverse": lambda a, b: jnp.linalg.inv(a) @ b,
    "Cholesky": lambda a, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a @ jnp.swapaxes(a, -1, -2)), True), b),
}


@pytest.mark.parametrize("name", SOLVES)
def test_solves_and_their_derivatives(name):
    a, b = system(3, 2)
    fn = SOLVES[name]
    count, left = systems(fn, a, b)
    assert count >= 2
    assert left == 0
    close(ours(fn, a, b), fn(a, b))
    loss = lambda a, b: jnp.sum(jnp.sin(fn(a, b)))  # noqa: E731
    gradient = jax.grad(loss, (0, 1))
    assert systems(gradient, a, b)[1] == 0
    close(ours(gradient, a, b), gradient(a, b))
    twice = jax.grad(lambda a, b: sum(jnp.sum(g**2) for g in gradient(a, b)), (0, 1))
    close(ours(twice, a, b), twice(a, b))
    close(jax.grad(lambda a, b: jnp.sum(jnp.sin(rewritten(fn, FAST)(a, b))), (0, 1))(a, b), gradient(a, b))


def test_what_has_no_solution_is_as_in_lapack():
    a, b = jnp.zeros((16, 2, 2)), jnp.ones((16, 2, 1)).at[3].set(0.0)
    fn = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    np.testing.assert_array_equal(np.isfinite(ours(fn, a, b)), np.isfinite(fn(a, b)))
