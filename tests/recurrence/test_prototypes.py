"""Squared distances to what all points share: the values and derivatives of plain loops, with products in the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.rewrite.prototypes import with_prototypes
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
ALWAYS = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, pairs=1))
T, B, N, D = 4, 3, 9, 5
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "x": jax.random.normal(K[0], (T, B, D)), "y": jax.random.normal(K[1], (N, D)),
    "s": 1.0 + jax.random.uniform(K[2], (3, D)), "w": jax.random.normal(K[3], (N,)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)


def radial(p, x, scale):
    return jnp.exp(-0.3 * ((x[None] - p["y"]) ** 2).sum(-1)) @ p["w"] * scale


def other_first(p, x, scale):
    far = jnp.square(p["y"] - jnp.sin(x * scale)[None]).sum(1)
    return (p["w"] / (1.0 + far)).sum()


def divided(p, x, scale):
    """By a length of each dimension."""
    return (jnp.exp(-(((x[None] - p["y"]) / p["s"][0][None]) ** 2).sum(-1)) * p["w"]).sum() * scale


def several(p, x, scale):
    """Kernels with lengths of their own, under ``jax.vmap``; and one number for all dimensions."""
    kernel = lambda s: jnp.exp(-((((x[None] - p["y"]) / s[None]) ** 2).sum(-1)))  # noqa: E731
    both = jax.vmap(kernel)(p["s"]) @ p["w"]
    far = ((x[None] - p["y"]) * p["s"][0, 0]) ** 2
    return both.sum() * scale + jnp.tanh(far.sum(-1)).sum()


def multiplied(p, x, scale):
    d = (x[None] - p["y"]) * p["s"][1][None]
    return jnp.log(1.0 + (d * d).sum(-1)).sum() * scale


PROGRAMS = [radial, other_first, divided, several, multiplied]


@pytest.mark.parametrize("sums", PROGRAMS)
def test_values_and_gradients_are_those_of_loops(sums):
    """Of points, of prototypes, and of scales."""
    found = of_points.gradient(sums, ALWAYS, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(sums, CARRY, T, (0, 1))(PARAMS, CARRY))


def traced(sums):
    return of_points.traced(sums, PARAMS, CARRY, T)


@pytest.mark.parametrize("sums", PROGRAMS)
def test_they_are_found(sums):
    program = traced(sums)
    found = with_prototypes(program, 1)

    def squares(program):
        """Of more than one number, however they are written."""
        power = lambda e: e.op.name in ("integer_pow", "square") or (e.op.name == "mul" and e.inputs[0] is e.inputs[1])  # noqa: E731
        return sum(power(e) and len(e.outputs[0].shape) > 1 for e in program.equations)

    assert squares(program) > squares(found) == 0
    assert with_prototypes(found, 1) is found
    assert with_prototypes(program, 10_000) is program


def test_second_derivatives():
    fn = rlfx.compile(lambda p, s, t: (divided(p, rlfx.inputs(p["x"])[t], s), s), length=T, batch=B, target=ALWAYS)
    slope = jax.jit(jax.grad(lambda p: fn(p, CARRY)[0]))
    along = jax.tree.map(jnp.cos, PARAMS)
    _, change = jax.jit(lambda p: jax.jvp(slope, (p,), (along,)))(PARAMS)
    at = lambda h: slope(jax.tree.map(lambda a, b: a + h * b, PARAMS, along))  # noqa: E731
    jax.tree.map(
        lambda c, a, b: np.testing.assert_allclose(c, (a - b) / 4e-3, rtol=1e-2, atol=2e-3), change, at(2e-3), at(-2e-3)
    )


def test_it_does_not_matter_where_points_are():
    """A thousand from zero, gradients are as those of differences."""

    def program(p, s, t):
        return jnp.exp(-0.5 * ((rlfx.inputs(p["x"])[t][None] - p["y"]) ** 2).sum(-1)).sum(), s

    far = PARAMS | {"x": PARAMS["x"] + 1000.0, "y": PARAMS["y"] + 1000.0}
    fn = rlfx.compile(program, length=T, batch=B, target=ALWAYS)
    slope = jax.jit(jax.grad(lambda x, p: fn(p | {"x": x}, CARRY)[0]))(far["x"], far)
    x, y = (np.asarray(far[name], np.float64) for name in ("x", "y"))
    d = x[:, :, None] - y
    expected = -(np.exp(-0.5 * (d**2).sum(-1))[..., None] * d).sum(2) / (T * B)
    np.testing.assert_allclose(slope, expected, rtol=2e-5, atol=2e-7)


def test_what_is_no_such_distance_stays():
    for sums in (
        lambda p, x, s: ((x[None] - jnp.outer(p["w"], x)) ** 2).sum() * s,  # of what each point has
        lambda p, x, s: (jnp.abs(x[None] - p["y"]) ** 3).sum() * s,
        lambda p, x, s: ((x[None] - p["y"]) ** 2).sum(0).max() * s,
        lambda p, x, s: ((x[None] - p["y"][:3]) ** 2).sum(-1).max() * s,  # few
        lambda p, x, s: jax.lax.stop_gradient(((x[None] - p["y"]) ** 2).sum(-1)).max() * s,
    ):
        program = traced(sums)
        assert with_prototypes(program, 1) is program


def test_in_a_recurrence_nothing_of_all_prototypes_and_dimensions_is_kept():
    n, length, batch = 64, 16, 8
    centres = jax.random.normal(K[0], (n, D))

    def program(w, z, t):
        z = jnp.tanh(jnp.exp(-((z[None] - centres) ** 2).sum(-1)) @ w)
        return (z**2).sum(), z

    fn = rlfx.compile(program, length=length, batch=batch, plan=rlfx.Plan())
    step = jax.jit(jax.grad(lambda w: fn(w, jnp.ones((batch, D)))[0]))
    w = jax.random.normal(K[1], (n, D)) / 3.0
    assert f"[{length},{batch},{n},{D}]" not in step.lower(w).as_text(dialect="hlo")
    expected = jax.grad(lambda w: rlfx.reference(program, length=length, batch=batch)(w, jnp.ones((batch, D)))[0])(w)
    np.testing.assert_allclose(step(w), expected, rtol=2e-4, atol=1e-6)
