"""Short axes in order: as jax sorts them, in programs and in what they call, with derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.cpu.sorting import SORT
from rlfx.recurrence.ir.interpret import rewritten

KEY = jax.random.key(0)


def fast(fn):
    return rewritten(fn, ELEMENTS)


def operations(fn, *args):
    return [e.primitive for e in J.equations_in({"jaxpr": jax.make_jaxpr(fn)(*args)})]


def difficult(shape, dtype):
    """Random numbers; many that are equal; zeros of both signs; infinities; what is not a number; all of one kind."""
    x = jax.random.normal(KEY, shape).astype(dtype)
    k = jax.random.split(KEY, 4)
    zeros = jnp.where(jax.random.bernoulli(k[0], 0.5, shape), 0.0, -0.0).astype(dtype)
    infinite = jnp.where(jax.random.bernoulli(k[1], 0.3, shape), jnp.inf, jnp.where(x > 1, -jnp.inf, x)).astype(dtype)
    nothing = jnp.where(jax.random.bernoulli(k[2], 0.3, shape), jnp.nan, infinite).astype(dtype)
    negative = jnp.where(jax.random.bernoulli(k[3], 0.5, shape), -nothing, nothing)
    kinds = [jnp.full_like(x, value) for value in (jnp.inf, -jnp.inf, jnp.nan, -0.0, 1e-40)]
    return [x, jnp.round(x), zeros, infinite, nothing, negative, *kinds]


@pytest.mark.parametrize(("shape", "axis"), [((7, 2), -1), ((5, 25), -1), ((30, 3), 0), ((2, 67, 3), 1), ((256,), 0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_order_is_that_of_jax(shape, axis, dtype):
    """To the bit: signs of zeros, too. ``argsort`` tells equal ones apart."""
    for fn in (lambda x: jnp.sort(x, axis), lambda x: jnp.argsort(x, axis), lambda x: jnp.sort(x, axis, descending=True)):
        assert SORT not in operations(fast(fn), jnp.ones(shape, dtype))
        mine, theirs = jax.jit(fast(fn)), jax.jit(fn)
        for x in difficult(shape, dtype):
            found, expected = mine(x), theirs(x)
            assert found.dtype == expected.dtype
            found, expected = (np.asarray(y, np.float32) for y in (found, expected))
            np.testing.assert_array_equal(found, expected)
            there = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(expected)[there])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.int8, jnp.uint16, jnp.bool_, jnp.bfloat16])
def test_what_goes_with_the_numbers(dtype):
    x = jnp.round(jax.random.normal(KEY, (6, 31)))
    other = jax.random.randint(jax.random.key(1), (6, 31), 0, 100).astype(dtype)
    fn = lambda x, y: jax.lax.sort((x, y), num_keys=1)  # noqa: E731
    for found, expected in zip(fast(fn)(x, other), fn(x, other), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n", [2, 5, 24, 25, 100])
def test_derivatives(n):
    """Forwards, backwards, and both, of the weighed squares of rows in order; of tied numbers, too."""
    x, weights = jax.random.normal(KEY, (4, n)), jnp.broadcast_to(jnp.linspace(-1.0, 2.0, n), (4, n))
    dx = jax.random.normal(jax.random.key(1), x.shape)
    fn = fast(lambda x: jnp.sum(jnp.sort(x, -1) ** 2 * weights))
    for given in (x, jnp.round(x)):
        places = np.argsort(np.asarray(given), -1, kind="stable")
        mine = np.zeros(given.shape)  # the weight of each number
        np.put_along_axis(mine, places, np.asarray(weights, np.float64), -1)
        exact = np.asarray(given, np.float64)
        np.testing.assert_allclose(fn(given), np.sum(exact**2 * mine), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(fn)(given), 2 * exact * mine, rtol=1e-5)
        np.testing.assert_allclose(jax.jvp(fn, (given,), (dx,))[1], np.sum(2 * exact * mine * dx), rtol=1e-4)
        np.testing.assert_allclose(jax.jvp(jax.grad(fn), (given,), (dx,))[1], 2 * mine * dx, rtol=1e-5)


def test_under_vmap_and_in_loops():
    x = jax.random.normal(KEY, (3, 4, 30))
    for axes in [(0, 0), (1, 1), (0, 1), (2, 0)]:
        fn = lambda x, axes=axes: jax.vmap(jax.vmap(jnp.sort, axes[1]), axes[0])(x)  # noqa: E731
        np.testing.assert_array_equal(fast(fn)(x), fn(x))

    def loop(x):
        return jax.lax.scan(lambda n, x: (n + jnp.sort(x, -1), jnp.argsort(x, -1)), jnp.zeros((4, 30)), x)

    assert SORT not in operations(fast(loop), x)
    jax.tree.map(np.testing.assert_array_equal, fast(loop)(x), loop(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.sort(x.astype(jnp.int32), -1),
        lambda x: jnp.sort(jnp.tile(x, 20), -1),
        lambda x: jax.lax.sort((x, x), num_keys=2)[0],
        lambda x: jnp.sort(x[:, :1], -1),
        lambda x: jax.lax.sort((x, jax.lax.complex(x, x)), num_keys=1)[0],
    ],
)
def test_what_stays_jaxs(fn):
    x = jax.random.normal(KEY, (4, 20))
    assert SORT in operations(fast(fn), x)
    np.testing.assert_array_equal(fast(fn)(x), fn(x))


def test_over_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:1], "d")
    spec = jax.sharding.PartitionSpec("d")
    x = jax.random.normal(KEY, (4, 20))
    mapped = jax.shard_map(fast(lambda x: jnp.sort(x, -1)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(x), jnp.sort(x, -1))


def test_a_critic_of_truncated_quantiles_learns_as_by_the_reference():
    """Targets are the smaller half of the quantiles of two critics (TQC): values and gradients, and against NumPy."""
    length, batch, count = 6, 3, 9
    k = jax.random.split(KEY, 3)
    w = 0.5 * jax.random.normal(k[0], (2, 4, count))
    data = {"x": jax.random.normal(k[1], (length, batch, 4)), "reward": jax.random.normal(k[2], (length, batch))}

    def critic(params, carry, t):
        w, data = params
        x = rlfx.inputs(data)[t]
        quantiles = jnp.einsum("i,kin->kn", x["x"], w)
        ordered = jnp.sort(quantiles.reshape(-1))[:count]
        following = rlfx.series(jax.lax.stop_gradient(ordered), end=jnp.zeros(count))[t + 1]
        wrong = x["reward"] + 0.9 * following[None, :, None] - quantiles[:, None, :]
        return jnp.mean(wrong**2) + jnp.median(ordered), carry

    start = jnp.zeros(batch)
    how = {"length": length, "batch": batch}
    fn, reference = rlfx.compile(critic, **how), rlfx.reference(critic, **how)
    loss = lambda fn: lambda w: fn((w, data), start, KEY)[0]  # noqa: E731
    assert SORT not in operations(jax.grad(loss(fn)), w)
    (value, slopes), (expected, their) = (jax.value_and_grad(loss(f))(w) for f in (fn, reference))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slopes, their, rtol=1e-4, atol=1e-6)

    quantiles = np.einsum("tbi,kin->tbkn", data["x"], w)
    ordered = np.sort(quantiles.reshape(length, batch, -1), -1)[..., :count]
    following = np.concatenate([ordered[1:], np.zeros((1, batch, count))])
    wrong = np.asarray(data["reward"])[..., None, None, None] + 0.9 * following[:, :, None, :, None] - quantiles[..., None, :]
    by_hand = (wrong**2).mean((2, 3, 4)) + np.median(ordered, -1)
    np.testing.assert_allclose(value, by_hand.mean(), rtol=1e-4)
