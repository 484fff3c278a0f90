"""The k largest numbers of rows: as jax finds them, to the bit and in its order, in programs and loops, with derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.cpu.largest import TOP_K, _has_both_zeros
from rlfx.recurrence.ir.interpret import rewritten

KEY = jax.random.key(0)


def fast(fn):
    return rewritten(fn, ELEMENTS)


def stays(fn, *args):
    return any(e.primitive is TOP_K for e in jax.make_jaxpr(fast(fn))(*args).eqns)


def equal(found, expected):
    """The same bits, but for what is not a number."""
    assert found.dtype == expected.dtype
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_array_equal(found, expected)
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(expected)[there])


def difficult(shape, dtype):
    """Random numbers; equal ones; few that are not the least; zeros of both signs, first and at last; what is not a number."""
    x, k = jax.random.normal(KEY, shape), jax.random.split(KEY, 4)
    some = lambda i, share: jax.random.bernoulli(k[i], share, shape)  # noqa: E731
    zeros = jnp.where(some(0, 0.5), 0.0, -0.0)
    masked = jnp.where(some(1, 0.97), -jnp.inf, x)
    kinds = {
        "numbers": x, "equal": jnp.round(x), "of one kind": jnp.full(shape, 2.5), "masked": masked,
        "infinite": jnp.where(some(1, 0.3), jnp.inf, x), "nothing left": jnp.full(shape, -jnp.inf), "zeros": zeros,
        "zeros at last": jnp.where(some(2, 0.02), x, zeros), "relu": jnp.maximum(x - 1.5, 0.0),
        "none above zero": jnp.where(x > 0, zeros, x), "no number": jnp.where(some(3, 0.01), jnp.nan, x),
        "of a sign": jnp.where(some(3, 0.01), -jnp.nan, masked), "tiny": jnp.where(some(3, 0.1), 1e-40, -x**2),
        "distances": -jnp.where(some(2, 0.02), 0.0, jnp.abs(x)), "of zeros": jnp.where(some(2, 0.02), 0.0, -jnp.abs(x)),
        "distances, and both": jnp.where(some(1, 0.02), 0.0, -jnp.where(some(2, 0.02), 0.0, jnp.abs(x))),
    }  # fmt: skip
    return {name: kind.astype(dtype) for name, kind in kinds.items()}


SHAPES = [((300, 64), 5, -1), ((67, 3, 101), 1, -1), ((700, 40), 32, 0), ((5, 4100), 7, -1)]


@pytest.mark.parametrize(("shape", "k", "axis"), SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_numbers_and_places_are_those_of_jax(shape, k, axis, dtype):
    fn = lambda x: jax.lax.top_k(x, k, axis=axis)  # noqa: E731
    assert not stays(fn, jnp.ones(shape, dtype))
    mine, theirs = jax.jit(fast(fn)), jax.jit(fn)
    for x in difficult(shape, dtype).values():
        for found, expected in zip(mine(x), theirs(x), strict=True):
            equal(found, expected)


def test_distances_to_oneself_are_found_in_parts():
    """Zeros of one sign in a row are as other numbers: XLA need not choose."""
    x = jnp.zeros((2, 64)).at[:, 1:].set(-1.0)
    assert not bool(_has_both_zeros(x))
    assert not bool(_has_both_zeros(-x))
    assert not bool(_has_both_zeros(x * jnp.array([[1.0], [-1.0]])))
    assert bool(_has_both_zeros(x.at[1, 5].set(-0.0)))


def test_of_rows_in_parts_none_is_lost():
    """More rows than are looked at together, of which a whole number has no room: against a loop of NumPy."""
    x = jax.random.normal(KEY, (1031, 130))
    numbers, places = jax.jit(fast(lambda x: jax.lax.top_k(x, 3)))(x)
    for row, mine, where in zip(np.asarray(x), np.asarray(numbers), np.asarray(places), strict=True):
        expected = sorted(range(130), key=lambda i: -row[i])[:3]
        assert where.tolist() == expected
        assert mine.tolist() == row[expected].tolist()


def test_derivatives():
    """Forwards, backwards and both; slopes go to the numbers that are chosen, of equal ones to the first."""
    x, k = jax.random.normal(KEY, (300, 64)), 4
    weights = jnp.broadcast_to(jnp.array([3.0, -1.0, 0.5, 2.0]), (300, k))
    fn = fast(lambda x: jnp.sum(jax.lax.top_k(x, k)[0] ** 2 * weights))
    dx = jax.random.normal(jax.random.key(1), x.shape)
    for given in (x, jnp.round(x)):
        exact = np.asarray(given, np.float64)
        places = np.argsort(-exact, -1, kind="stable")[:, :k]
        mine = np.zeros(given.shape)
        np.put_along_axis(mine, places, np.asarray(weights, np.float64), -1)
        np.testing.assert_allclose(jax.jit(jax.grad(fn))(given), 2 * exact * mine, rtol=1e-5)
        value, slope = jax.jit(lambda x: jax.jvp(jax.grad(fn), (x,), (dx,)))(given)
        np.testing.assert_allclose(value, 2 * exact * mine, rtol=1e-5)
        np.testing.assert_allclose(slope, 2 * mine * dx, rtol=1e-5)


def test_under_vmap_and_in_loops():
    x = jax.random.normal(KEY, (5, 70, 65))
    for axes in [(0, 0), (1, 1), (0, 1), (2, 0)]:
        fn = lambda x, axes=axes: jax.vmap(jax.vmap(lambda x: jax.lax.top_k(x, 2), axes[1]), axes[0])(x)  # noqa: E731
        jax.tree.map(equal, fast(fn)(x), fn(x))

    def loop(x):
        return jax.lax.scan(lambda n, x: (n + jax.lax.top_k(x, 9)[0], jax.lax.top_k(-x, 2)[1]), jnp.zeros((70, 9)), x)

    assert not any(e.primitive is TOP_K for e in J.equations_in(jax.make_jaxpr(fast(loop))(x).jaxpr.eqns[-1].params))
    jax.tree.map(np.testing.assert_array_equal, fast(loop)(x), loop(x))


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: jax.lax.top_k(x[:, :63], 3), id="short rows"),
        pytest.param(lambda x: jax.lax.top_k(x, 33), id="many of them"),
        pytest.param(lambda x: jax.lax.top_k((100 * x).astype(jnp.int32), 3), id="whole numbers"),
        pytest.param(lambda x: jax.lax.top_k(x, 0), id="none"),
    ],
)
def test_what_stays_jaxs(fn):
    x = jax.random.normal(KEY, (300, 64))
    assert stays(fn, x)
    jax.tree.map(np.testing.assert_array_equal, fast(fn)(x), fn(x))


def test_over_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:1], "d")
    spec = jax.sharding.PartitionSpec("d")
    x = jax.random.normal(KEY, (300, 64))
    mapped = jax.shard_map(fast(lambda x: jax.lax.top_k(x, 3)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.tree.map(equal, tuple(jax.jit(mapped)(x)), tuple(jax.lax.top_k(x, 3)))


def nearest(params, carry, t):
    """What a memory says of an observation, by its nearest entries; and how far these are: a bonus of novelty."""
    w, (keys, values, seen) = params
    h = jnp.tanh(rlfx.inputs(seen)[t] @ w)
    far = ((keys - h[None]) ** 2).sum(-1)
    less, near = jax.lax.top_k(-jax.lax.stop_gradient(far), 5)
    weight = 1.0 / (far[near] + 1e-2)
    return (weight * values[near]).sum() / weight.sum() + jnp.sqrt(-less).mean(), carry


def test_episodic_control_learns_as_by_the_reference():
    """Values and gradients; and as a loop over points has them."""
    k = jax.random.split(KEY, 4)
    memory = jax.random.normal(k[0], (80, 4)), jax.random.normal(k[1], (80,)), jax.random.normal(k[2], (16, 16, 4))
    w, start = 0.5 * jax.random.normal(k[3], (4, 4)), jnp.zeros(16)
    fn, reference = (make(nearest, length=16, batch=16) for make in (rlfx.compile, rlfx.reference))
    loss = lambda fn: lambda w: fn((w, memory), start)[0]  # noqa: E731
    used = {e.primitive for e in J.equations_in({"jaxpr": jax.make_jaxpr(jax.grad(loss(fn)))(w)})}
    assert "places of the largest" in {p.name for p in used}
    (value, slopes), (expected, their) = (jax.value_and_grad(loss(f))(w) for f in (fn, reference))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slopes, their, rtol=1e-4, atol=1e-6)

    keys, values, seen = (np.asarray(x, np.float64) for x in memory)
    total = 0.0
    for h in np.tanh(seen.reshape(-1, 4) @ np.asarray(w, np.float64)):
        far = ((keys - h) ** 2).sum(-1)
        near = np.argsort(far)[:5]
        weight = 1 / (far[near] + 1e-2)
        total += (weight * values[near]).sum() / weight.sum() + np.sqrt(far[near]).mean()
    np.testing.assert_allclose(value, total / 256, rtol=1e-4)
