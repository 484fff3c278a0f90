"""Products of many small matrices: against jax's own and plain loops, in any order of axes; what stays; in programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.contractions import FAST
from rlfx.recurrence.cpu.small_matrices import is_of_small_matrices
from rlfx.recurrence.cpu.triangles import is_of_small_systems
from rlfx.recurrence.ir.interpret import rewritten

PRODUCTS = {
    "bij,bjk->bik": ((20, 3, 5), (20, 5, 4)),
    "ibj,kbj->bik": ((3, 20, 5), (4, 20, 5)),
    "bji,jbk->bik": ((20, 5, 3), (5, 20, 4)),
    "abij,abkj->abik": ((4, 6, 3, 2), (4, 6, 7, 2)),
    "iabj,bjak->abik": ((3, 4, 6, 2), (6, 2, 4, 7)),
    "bijk,bkjl->bil": ((20, 3, 2, 4), (20, 4, 2, 5)),
    "bijk,bkl->bijl": ((20, 3, 2, 4), (20, 4, 5)),
    "bij,bjk->bki": ((16, 16, 16), (16, 16, 16)),
}


def operands(name, dtype=jnp.float32):
    k = jax.random.split(jax.random.key(len(name)))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(k, PRODUCTS[name], strict=True)]


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


def ours(fn, *args):
    return jax.jit(rewritten(fn, FAST))(*args)


def products(fn, *args):
    """How many products there are of the kind, and how many are left after."""
    of = lambda f: [*J.equations_in({"jaxpr": jax.make_jaxpr(f)(*args)})]  # noqa: E731
    return [sum(map(is_of_small_matrices, of(f))) for f in (fn, rewritten(fn, FAST))]


@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name):
    left, right = operands(name)
    fn = lambda x, y: jnp.einsum(name, x, y)  # noqa: E731
    count, left_over = products(fn, left, right)
    assert (count, left_over) == (1, 0)
    wanted = np.einsum(name, *(np.asarray(x, np.float64) for x in (left, right)))
    np.testing.assert_allclose(ours(fn, left, right), wanted, rtol=1e-5, atol=1e-5)
    loss = lambda x, y: jnp.sum(jnp.sin(fn(x, y)))  # noqa: E731
    for grad in (jax.grad(loss, (0, 1)), jax.grad(lambda x, y: jnp.sum(jax.grad(loss)(x, y) ** 2), (0, 1))):
        close(ours(grad, left, right), grad(left, right))
    inside = rewritten(fn, FAST)  # differentiated after
    close(jax.grad(lambda x, y: jnp.sum(jnp.sin(inside(x, y))), (0, 1))(left, right), jax.grad(loss, (0, 1))(left, right))


def test_against_plain_loops():
    left, right = operands("bij,bjk->bik")
    wanted = np.zeros((20, 3, 4))
    for b, i, k, j in np.ndindex(20, 3, 4, 5):
        wanted[b, i, k] += float(left[b, i, j]) * float(right[b, j, k])
    np.testing.assert_allclose(ours(jnp.matmul, left, right), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 3, 5), (4, 5, 4)), ((20, 1, 5), (20, 5, 4)), ((20, 3, 17), (20, 17, 4)), ((20, 3, 5), (20, 5, 1)),
        ((20, 3, 1), (20, 1, 4)),
    ],
)  # fmt: skip
def test_what_stays(left, right):
    """Few pairs; rows and columns that are alone; large ones."""
    assert products(jnp.matmul, jnp.ones(left), jnp.ones(right)) == [0, 0]


def test_narrow_numbers_stay():
    x, y = operands("bij,bjk->bik", jnp.bfloat16)
    assert products(jnp.matmul, x, y) == [0, 0]
    assert products(jnp.matmul, jnp.ones((20, 3, 5), jnp.int32), jnp.ones((20, 5, 4), jnp.int32)) == [0, 0]


def test_in_loops_and_branches():
    x, y = operands("bij,bjk->bik")

    def fn(x, y):
        z = jax.lax.scan(lambda c, _: (jnp.tanh(c @ (y @ jnp.swapaxes(y, 1, 2))), None), x, None, length=3)[0]
        return jax.lax.cond(z.sum() > 0, lambda z: z @ y, lambda z: -(z @ y), z)

    count, left = products(fn, x, y)
    assert count == 4
    assert left == 0
    np.testing.assert_allclose(ours(fn, x, y), fn(x, y), rtol=1e-5, atol=1e-5)


LENGTH, BATCH, SIZE, KEY = 3, 17, 3, jax.random.key(0)


def filtered(p, state, t):
    """A Kalman filter of each environment."""
    mean, spread = state
    seen = rlfx.inputs(p["seen"])[t]
    mean, spread = p["a"] @ mean, p["a"] @ spread @ p["a"].T + 0.1 * jnp.eye(SIZE, dtype=spread.dtype)
    part = p["c"] @ spread @ p["c"].T + jnp.eye(2, dtype=spread.dtype)
    gain = jnp.linalg.solve(part, p["c"] @ spread).T
    off = seen - p["c"] @ mean
    mean, spread = mean + gain @ off, spread - gain @ p["c"] @ spread
    return jnp.sum(off**2) + jnp.sum(spread @ spread), (mean, spread)


def of_filter():
    k = jax.random.split(jax.random.key(2), 4)
    p = {
        "a": 0.4 * jax.random.normal(k[0], (SIZE, SIZE)), "c": jax.random.normal(k[1], (2, SIZE)),
        "seen": jax.random.normal(k[2], (LENGTH, BATCH, 2)),
    }  # fmt: skip
    root = 0.3 * jax.random.normal(k[3], (BATCH, SIZE, SIZE))
    return p, (jnp.zeros((BATCH, SIZE)), jnp.eye(SIZE)[None] + root @ jnp.swapaxes(root, 1, 2))


def gradient(make):
    f = make(filtered, length=LENGTH, batch=BATCH)
    return jax.value_and_grad(lambda p, x: f(p, x, KEY)[0], (0, 1))


def test_a_filter_is_as_the_reference_has_it():
    p, state = of_filter()
    found, wanted = (jax.jit(gradient(make))(p, state) for make in (rlfx.compile, rlfx.reference))
    close(found, wanted)
    found = J.equations_in({"jaxpr": jax.make_jaxpr(gradient(rlfx.compile))(p, state)})
    assert not any(is_of_small_matrices(e) or is_of_small_systems(e) for e in found)


def acting(p, state, t):
    """Attention among eight entities that move: nothing is learnt of what moves them."""
    h = state
    q, k = jnp.tanh(h @ p["a"]), h @ p["a"].T
    weights = jax.nn.softmax(q @ k.T)
    h = jax.lax.stop_gradient(h + 0.1 * weights @ h)
    return jnp.sum(jnp.sin(h @ p["a"])), h


def test_what_acts_has_them_too():
    p = {"a": 0.3 * jax.random.normal(jax.random.key(5), (SIZE, SIZE))}
    state = jax.random.normal(jax.random.key(6), (BATCH, 8, SIZE))
    both = [
        jax.value_and_grad(lambda p, f=make(acting, length=LENGTH, batch=BATCH): f(p, state, KEY)[0])
        for make in (rlfx.compile, rlfx.reference)
    ]
    close(*(jax.jit(f)(p) for f in both))
    found = J.equations_in({"jaxpr": jax.make_jaxpr(both[0])(p)})
    assert not any(map(is_of_small_matrices, found))


def test_a_filter_as_by_hand():
    """By loops, and finite differences."""

    def loss(p, state):
        means, spreads = state
        total = 0.0
        for b in range(BATCH):
            mean, spread = means[b], spreads[b]
            for t in range(LENGTH):
                mean, spread = p["a"] @ mean, p["a"] @ spread @ p["a"].T + 0.1 * np.eye(SIZE)
                gain = np.linalg.solve(p["c"] @ spread @ p["c"].T + np.eye(2), p["c"] @ spread).T
                off = p["seen"][t, b] - p["c"] @ mean
                mean, spread = mean + gain @ off, spread - gain @ p["c"] @ spread
                total += np.sum(off**2) + np.sum(spread @ spread)
        return total / (BATCH * LENGTH)

    p, state = jax.tree.map(lambda v: np.asarray(v, np.float64), of_filter())
    value, slopes = jax.jit(gradient(rlfx.compile))(*of_filter())
    np.testing.assert_allclose(value, loss(p, state), rtol=1e-4)
    rng, step = np.random.default_rng(0), 1e-6
    moved = jax.tree.map(lambda v: rng.normal(size=v.shape), (p, state))
    ends = [loss(*jax.tree.map(lambda v, d, s=s: v + s * step * d, (p, state), moved)) for s in (1, -1)]
    along = jax.tree.map(lambda g, d: np.sum(np.asarray(g, np.float64) * d), slopes, moved)
    np.testing.assert_allclose(sum(jax.tree.leaves(along)), (ends[0] - ends[1]) / (2 * step), rtol=2e-3)
