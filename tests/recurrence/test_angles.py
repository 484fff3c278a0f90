"""Sines, cosines and tangents by arithmetic on CPUs: nearer to the exact values than the C library's, of every argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu import angles
from rlfx.recurrence.cpu.angles import ANGLES, FEWEST, LARGEST

NAMES = ("sin", "cos", "tan")
MANY = 1 << 16


def ours(name):
    fast = ANGLES[J.primitive(name)]
    return lambda x: fast.bind(x, accuracy=None)


def exact(name, x):
    return getattr(np, name)(np.asarray(x, np.float64))


def in_last_places(found, expected):
    """How far values are from the exact ones, in units of the last place of these."""
    return np.abs(np.asarray(found, np.float64) - expected) / np.spacing(np.abs(expected).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reach", [1e-20, 1e-3, 1.0, 10.0, 1e4, 1e6, 2.0**27])
def test_the_nearest_float_or_the_one_beside_it(name, reach):
    x = jax.random.uniform(jax.random.key(0), (MANY,), minval=-reach, maxval=reach)
    assert in_last_places(jax.jit(ours(name))(x), exact(name, x)).max() < 0.51


@pytest.mark.parametrize("name", NAMES)
def test_near_multiples_of_half_a_turn(name):
    """Where the results are small, they have all their digits."""
    near = np.float32(np.pi / 2) * np.arange(1, 2000, dtype=np.float32)
    x = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1e9))])
    assert in_last_places(ours(name)(jnp.asarray(x)), exact(name, x)).max() < 0.51


@pytest.mark.parametrize("name", NAMES)
def test_what_is_too_large_is_left_to_jax(name):
    of_jax = getattr(jax.lax, name)
    x = jnp.linspace(-1.0, 1.0, FEWEST).at[3].set(LARGEST * 4.0).at[5].set(3e38)
    np.testing.assert_array_equal(ours(name)(x), of_jax(x))


@pytest.mark.parametrize("name", NAMES)
def test_special_numbers(name):
    x = jnp.tile(jnp.array([0.0, -0.0, jnp.nan, 1e-30]), FEWEST)
    found = np.asarray(ours(name)(x))[:4]
    np.testing.assert_array_equal(found, np.asarray(getattr(jax.lax, name)(x))[:4])
    assert np.signbit(found[1]) == (name != "cos")
    assert np.isnan(ours(name)(x.at[7].set(jnp.inf))[7])


@pytest.mark.parametrize("name", NAMES)
def test_others_are_jaxs(name):
    """Few numbers, other types, other machines."""
    few = jnp.linspace(-3.0, 3.0, FEWEST - 1)
    of_jax = getattr(jax.lax, name)
    for x in (few, few[3], jnp.linspace(-3, 3, MANY).astype(jnp.bfloat16), jnp.linspace(-3, 3, MANY).astype(jnp.float16)):
        np.testing.assert_array_equal(ours(name)(x), of_jax(x))
    x = jax.ShapeDtypeStruct((MANY,), jnp.float32)
    spelled = {"sin": "sine", "cos": "cosine", "tan": "tan"}[name]
    for platform, by_jax in (("cpu", 1), ("cuda", 1), ("tpu", 1)):
        text = jax.jit(ours(name)).trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert text.count(f"stablehlo.{spelled} ") == by_jax
        assert ("f64" in text) == (platform == "cpu")  # there jax's own is for what is too large


def test_double_precision_is_jaxs():
    with jax.enable_x64(True):
        x = jnp.linspace(-3.0, 3.0, MANY)
        assert x.dtype == jnp.float64
        for name in NAMES:
            np.testing.assert_array_equal(ours(name)(x), getattr(jax.lax, name)(x))


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name):
    x = jax.random.uniform(jax.random.key(1), (MANY,), minval=-1.4, maxval=1.4)
    slope = {"sin": np.cos, "cos": lambda x: -np.sin(x), "tan": lambda x: 1 / np.cos(x) ** 2}[name]
    found = jax.jit(jax.grad(lambda x: ours(name)(x).sum()))(x)
    np.testing.assert_allclose(found, slope(np.asarray(x, np.float64)), rtol=1e-6)
    of_jax = getattr(jax.lax, name)
    second = lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x)  # noqa: E731
    np.testing.assert_allclose(second(ours(name)), second(of_jax), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_equation_under_vmap(name):
    x = jax.random.normal(jax.random.key(2), (5, 7, FEWEST))
    mapped = jax.vmap(jax.vmap(ours(name), 1), 0)
    assert [e.primitive.name for e in jax.make_jaxpr(mapped)(x).eqns if e.primitive.name == name] == [name]
    np.testing.assert_array_equal(mapped(x), jnp.swapaxes(ours(name)(x), 1, 2))


def program(p, x, t):
    """An angle that turns, and what is seen of it."""
    seen = jnp.concatenate([jnp.sin(x), jnp.cos(x)])
    pushed = jnp.tan(0.3 * jnp.tanh(p["w"] @ seen))
    return jnp.sum((pushed - jnp.cos(seen[:3])) ** 2), x + 0.1 * pushed


def test_programs_against_plain_loops():
    length, batch = 4, FEWEST
    p = {"w": jax.random.normal(jax.random.key(3), (3, 6))}
    start = jax.random.normal(jax.random.key(4), (batch, 3))

    def by_hand(p, x):
        total = 0.0
        for _ in range(length):
            seen = jnp.concatenate([jax.lax.sin(x), jax.lax.cos(x)], 1)
            pushed = jax.lax.tan(0.3 * jnp.tanh(seen @ p["w"].T))
            total += ((pushed - jax.lax.cos(seen[:, :3])) ** 2).sum()
            x = x + 0.1 * pushed
        return total / (length * batch)

    fn = rlfx.compile(program, length=length, batch=batch)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: fn(p, start)[0]))(p)
    expected = jax.value_and_grad(by_hand)(p, start)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], expected[1]["w"], rtol=2e-5, atol=1e-6)
    text = jax.jit(lambda p: fn(p, start)[0]).lower(p).as_text()
    assert "f64" in text


def test_nothing_else_becomes_double_precision():
    x = jnp.zeros(MANY)
    for name in NAMES:
        closed = jax.make_jaxpr(ours(name))(x)
        assert [v.aval.dtype for v in closed.jaxpr.outvars] == [jnp.float32]
    assert angles.sin.bind(x, accuracy=None).dtype == jnp.float32
    assert not jax.config.jax_enable_x64 or jnp.float64 == jnp.zeros(1).dtype


# -- the angle of a point ---------------------------------------------------------------------------------------------


def points(count=MANY):
    y, x = jax.random.normal(jax.random.key(5), (2, count))
    return y * jnp.exp(3.0 * x), x


def test_the_angle_of_a_point():
    y, x = points()
    exact = np.arctan2(np.asarray(y, np.float64), np.asarray(x, np.float64))
    ours, of_jax = (in_last_places(jax.jit(f)(y, x), exact).max() for f in (angles.arctan2.bind, jax.lax.atan2))
    assert ours < 0.56
    assert ours < of_jax


def test_the_angle_of_special_points():
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, 1e30, 1e-30], np.float32)
    y, x = (v.ravel() for v in np.meshgrid(special, special))
    found = np.asarray(angles.arctan2.bind(jnp.tile(jnp.asarray(y), 2), jnp.tile(jnp.asarray(x), 2)))[: len(y)]
    np.testing.assert_allclose(found, np.arctan2(y, x), rtol=2e-7)
    known = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(np.arctan2(y, x)[known]))


def test_derivatives_of_the_angle_of_a_point():
    y, x = points()
    for argument in (0, 1):
        slope = lambda f: jax.jit(jax.grad(lambda y, x: f(y, x).sum(), argument))(y, x)  # noqa: E731
        own, of_jax = map(slope, (angles.arctan2.bind, jnp.arctan2))
        np.testing.assert_allclose(own, of_jax, rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0), (0, 0)])
def test_the_angle_of_a_point_under_vmap(axes):
    y, x = (v.reshape(16, 16) for v in points(256))
    mapped = jax.vmap(angles.arctan2.bind, axes)
    y, x = y if axes[0] is not None else y[0], x if axes[1] is not None else x[0]
    np.testing.assert_allclose(mapped(y, x), jax.vmap(jnp.arctan2, axes)(y, x), rtol=5e-7)


def test_a_program_of_angles_of_points():
    def turned(p, x, t):
        angle = jnp.arctan2(p * x[:2], x[2:])
        return jnp.sum(angle**2), 0.9 * x + 0.1 * jnp.tile(angle, 2)

    start = jax.random.normal(jax.random.key(6), (FEWEST, 4))
    make = {"batch": FEWEST, "length": 5}
    found, expected = (
        jax.value_and_grad(lambda p, f=f: f(turned, **make)(p, start)[0])(1.5) for f in (rlfx.compile, rlfx.reference)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5)

    def by_hand(p):
        x, total = start, 0.0
        for _ in range(5):
            angle = jnp.arctan2(p * x[:, :2], x[:, 2:])
            total, x = total + (angle**2).sum(), 0.9 * x + 0.1 * jnp.tile(angle, (1, 2))
        return total / (5 * FEWEST)

    np.testing.assert_allclose(found, jax.value_and_grad(by_hand)(1.5), rtol=2e-5)


def test_inside_of_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    x = jnp.linspace(-3.0, 3.0, FEWEST * len(jax.devices()))
    for fn in (*map(ours, NAMES), lambda x: angles.arctan2.bind(x, x + 1.0)):
        spread = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))
        np.testing.assert_array_equal(spread(x), fn(x))
        slopes = jax.jit(jax.grad(lambda x, spread=spread: spread(x).sum()))
        np.testing.assert_allclose(slopes(x), jax.grad(lambda x, fn=fn: fn(x).sum())(x), rtol=1e-6, atol=1e-6)
