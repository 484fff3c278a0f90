"""What a user's loop computes of what it only reads is computed once, before: the same values and gradients; what stays."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.invariant import with_invariants_before
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, IN, H = 4, 3, 2, 5
K = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "w": jax.random.normal(K[0], (H, H)), "a": jax.random.normal(K[1], (IN, H)), "x": jax.random.normal(K[2], (T, B, IN)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)


def unit(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


def normalised(p, x, scale):
    """Weights of unit columns, and a product with an input, in each iteration; in a function of its own."""
    layer = jax.jit(lambda z: jnp.tanh(x @ p["a"] + z @ unit(p["w"])))
    z, zs = jax.lax.scan(lambda z, _: (layer(z), z.sum() * scale), jnp.zeros(H), None, length=3)
    return (z**2).sum() + zs.sum()


def given_again(p, x, scale):
    """What the loop gives that is the same in each iteration, one number after another, backwards."""
    step = lambda z, i: (jnp.sin(z) + i * jnp.exp(scale), (jnp.cos(p["w"]).sum(0), z))  # noqa: E731
    z, (same, zs) = jax.lax.scan(step, x, jnp.linspace(0.0, 1.0, 3), reverse=True)
    return (same[0] * same[1]).sum() * scale + (zs * z[None]).sum()


def nested(p, x, scale):
    """A loop in a loop, that reads only what the outer one reads."""
    inner = lambda: jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + x @ p["a"]), None), jnp.ones(H), None, length=2)[0]  # noqa: E731
    z, _ = jax.lax.scan(lambda z, _: (jnp.cos(z * inner()), None), jnp.full(H, 0.5), None, length=3)
    return z.sum() * scale


def in_part(p, x, scale):
    """Of a larger value, what it is made of."""
    wide = lambda: jnp.exp(jnp.sin(x)[:, None] * jnp.arange(1.0, 9.0)[None])  # noqa: E731
    z, _ = jax.lax.scan(lambda z, _: (jnp.sin(z + wide().sum(1)), None), x, None, length=3)
    return z.sum() * scale


def on_both_sides(p, x, scale):
    """A large value, which stays, and a small one that is made of it, which leaves; and a rule that is no derivative."""
    wide = lambda: jnp.exp(jnp.sin(x)[:, None] * jnp.arange(1.0, 9.0)[None])  # noqa: E731

    def step(z, i):
        large = wide()
        return jnp.sin(z + large.sum(1) + (large * i).sum(1) + clipped(x[0])), None

    return jax.lax.scan(step, x, jnp.linspace(0.0, 1.0, 3))[0].sum() * scale


@jax.custom_vjp
def clipped(x):
    """Each iteration has a cotangent of its own."""
    return 2.0 * x


clipped.defvjp(lambda x: (2.0 * x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


#: With the equations that compute in the loop's body before, and after.
PROGRAMS = {normalised: (10, 5), given_again: (6, 3), nested: (7, 2), in_part: (8, 2), on_both_sides: (16, 14)}


@pytest.mark.parametrize("sums", PROGRAMS)
def test_values_and_gradients_are_those_of_loops(sums):
    found = of_points.gradient(sums, CPU, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(sums, CARRY, T, (0, 1))(PARAMS, CARRY))


def traced(sums):
    return of_points.traced(sums, PARAMS, CARRY, T)


def inside(program):
    """The operations of the loops, without those that only arrange."""
    (loop,) = (e for e in program.equations if e.op is J.SCAN and e.params["length"] == 3)
    arranges = {"broadcast_in_dim", "convert_element_type", "pjit", "jit", "squeeze", "reshape"}
    return [e.primitive.name for e in J.equations_in({"jaxpr": loop.params["jaxpr"]}) if e.primitive.name not in arranges]


@pytest.mark.parametrize("sums", PROGRAMS)
def test_it_leaves_the_loop(sums):
    program = traced(sums)
    found = with_invariants_before(program)
    assert (len(inside(program)), len(inside(found))) == PROGRAMS[sums], (inside(program), inside(found))
    assert with_invariants_before(found) is found


def test_what_varies_or_is_cheap_and_large_stays():
    def loop(step):
        return lambda p, x, s: jax.lax.scan(lambda z, i: (step(p, x, z, i), None), x, jnp.arange(3))[0].sum() * s

    for step in (
        lambda p, x, z, i: jnp.sin(z * i.astype(jnp.float32)) + jnp.exp(z),
        lambda p, x, z, i: z + jnp.exp(x[:, None] * jnp.ones((1, 9)))[:, i],  # 18 numbers of two
        lambda p, x, z, i: z * jnp.broadcast_to(x[0], (2,)),
        lambda p, x, z, i: z + jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (2,)),
    ):
        program = traced(loop(step))
        assert with_invariants_before(program) is program
