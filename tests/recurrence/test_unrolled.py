"""Nested loops without a loop: the same values and gradients; only of short ones of few equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.unrolled import with_recurrent_iterations, with_unrolled
from tests import strategies
from tests.sampling import spread

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, unrolled=n)) for n in (4096, 0))
T, B, N = 4, 2, 3


def ahead(p, z, x):
    z = jnp.tanh(p["w"] @ z + x)
    return z, jnp.sum(z) * p["scale"]


def program(steps):
    def run(p, h, t):
        x = rlfx.series(rlfx.inputs(p["x"])[t])
        last, rewards = jax.lax.scan(functools.partial(ahead, p), h, x.window(0, steps), reverse=steps == 2)
        return jnp.sum(rewards**2) + last[0], 0.5 * h + x[t], rewards

    return run


def arguments():
    k = jax.random.split(jax.random.key(0), 3)
    p = {"w": jax.random.normal(k[0], (N, N)), "scale": jnp.float32(0.7), "x": jax.random.normal(k[1], (T, B, N))}
    return p, jax.random.normal(k[2], (B, N))


def by_hand(p, h, steps):
    total = 0.0
    for b in range(B):
        state = h[b]
        for t in range(T):
            window = [p["x"][t + i, b] if t + i < T else jnp.zeros(N) for i in range(steps)]
            z, rewards = state, []
            for x in window[::-1] if steps == 2 else window:
                z, reward = ahead(p, z, x)
                rewards.append(reward)
            total += sum(r**2 for r in rewards) + z[0]
            state = 0.5 * state + p["x"][t, b]
    return total / (T * B)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_values_and_gradients_are_those_of_loops(steps):
    fn = rlfx.compile(program(steps), length=T, batch=B, target=ALWAYS)
    found = jax.jit(jax.value_and_grad(lambda p, h: fn(p, h)[0], argnums=(0, 1)))(*arguments())
    expected = jax.value_and_grad(functools.partial(by_hand, steps=steps), argnums=(0, 1))(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def loops(steps, target):
    fn = rlfx.compile(program(steps), length=T, batch=B, target=target)
    return jax.jit(jax.grad(lambda p, h: fn(p, h)[0])).lower(*arguments()).as_text().count("stablehlo.while")


def test_of_short_loops_none_is_left():
    assert loops(3, CPU) == loops(3, ALWAYS) < loops(3, NEVER)
    assert loops(200, CPU) == loops(200, NEVER)
    assert rlfx.target("h200").rewrites.unrolled == CPU.rewrites.unrolled
    assert not rlfx.target("v5e").rewrites.unrolled


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_a_loop_that_multiplies_is_unrolled_up_to_fewer_equations(target):
    """On a CPU; where starting is dear, products are no reason for a loop. Five iterations of a cell, and ten."""

    def body(p, multiplies):
        def cell(z, _):
            for w in (p["w"], p["v"]):
                made = jnp.tanh(w @ z if multiplies else w[0] * z)
                z = jax.nn.sigmoid(jnp.sin(z)) * made + jnp.cos(z) * jnp.exp(-z * z) - 0.1 * z
            return z, z[0]

        return cell

    p = {k: jnp.eye(N) for k in "wv"}
    kept = {}
    for multiplies in (True, False):
        for steps in (5, 10):
            f = lambda p, h, t: (jax.lax.scan(body(p, multiplies), h, length=steps)[1].sum(), h)  # noqa: E731
            fn = rlfx.compile(f, length=T, batch=B, target=target)
            jaxpr = jax.make_jaxpr(lambda p: fn(p, jnp.ones((B, N)))[0])(p)
            scans = [e for e in J.equations_in({"jaxpr": jaxpr.jaxpr}) if e.primitive is J.SCAN and e.params["length"] == steps]
            kept[multiplies, steps] = any(e.params["unroll"] == 1 for e in scans)
    assert kept == {(True, 5): False, (True, 10): target == "cpu", (False, 5): False, (False, 10): False}


def test_what_the_user_unrolls_and_programs_without_loops_stay():
    plain = rlfx.trace(lambda w, x, t: (w * x, x * 0.5), 2.0, jnp.float32(1.0), length=3)
    assert with_unrolled(plain, 100) is plain

    def in_part(w, x, t):
        return jax.lax.scan(lambda z, _: (z * w, None), x, None, length=4, unroll=2)[0], x * 0.5

    traced = rlfx.trace(in_part, 2.0, jnp.float32(1.0), length=3)
    assert with_unrolled(traced, 100) is traced


def test_loops_over_slices_whose_length_depends_on_t_stay():
    def over_the_past(w, x, t):
        return jax.lax.scan(lambda z, y: (z * w + y, None), 0.0, rlfx.series(x)[: t + 1])[0], x * 0.5

    traced = rlfx.trace(over_the_past, jnp.float32(2.0), jnp.float32(1.0), length=3)
    assert with_unrolled(traced, 100) is traced
    out = rlfx.unroll(lambda w, x, t: over_the_past(w, x, t)[::-1], length=3, target=ALWAYS)(2.0, jnp.float32(1.0))[1]
    np.testing.assert_allclose(out, [1.0, 2.5, 5.25])


def looking_ahead(generated):
    """A generated program whose loss is refined by a nested loop over its own values."""
    inner = generated.function

    def run(p, carry, t):
        loss, after, aux = inner(p, carry, t)
        last, ys = jax.lax.scan(lambda z, w: (jnp.sin(z * w + p["a"]), z * w), loss, p["w"])
        return last + 0.1 * jnp.sum(ys), after, aux

    return run


@pytest.mark.parametrize("seed", spread(range(12), 2))
def test_generated_programs_are_the_same_with_and_without(seed):
    generated = strategies.program(4000 + seed)
    params, carry, key = generated.arguments()
    inexact = {k: v for k, v in params.items() if k in ("a", "w")}

    def gradient(target):
        fn = rlfx.compile(looking_ahead(generated), target=target, **generated.options())
        return jax.jit(jax.value_and_grad(lambda own: fn({**params, **own}, carry, key)[0]))(inexact)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient(ALWAYS), gradient(NEVER))


def ticks(p, h, t):
    """A recurrence that asks its cell three times, and a loop beside it that no timestep depends on."""
    x = rlfx.inputs(p["x"])[t]
    cell = lambda z, _: (jnp.tanh(p["w"] @ z + x), z.sum() * p["scale"])  # noqa: E731
    h, rewards = jax.lax.scan(cell, h, None, length=3)
    beside, _ = jax.lax.scan(lambda z, _: (jnp.sin(p["w"] @ z), None), x, None, length=3)
    return jnp.sum(rewards**2) + jnp.sum(h * beside), h


def test_iterations_of_a_recurrence_are_equations():
    """Of the loop that a timestep depends on alone."""
    program = rlfx.trace(ticks, *arguments(), length=T, batch=B)
    found = with_recurrent_iterations(program, 512)
    scans = lambda program: [e for e in program.equations if e.op is J.SCAN]  # noqa: E731
    assert (len(scans(program)), len(scans(found))) == (2, 1)
    assert sum(e.op is J.primitive("dot_general") for e in found.equations) == 3
    assert with_recurrent_iterations(found, 512) is found
    assert with_recurrent_iterations(program, 8) is program


@pytest.mark.parametrize("deferred", [0, 32])
def test_values_and_gradients_of_a_recurrence_of_loops(deferred):
    """As by hand, whether gradients of weights are contracted after the loop over time or in it."""

    def plain(p, h):
        total = 0.0
        for b in range(B):
            state = h[b]
            for t in range(T):
                x = beside = p["x"][t, b]
                for _ in range(3):
                    total += (state.sum() * p["scale"]) ** 2
                    state, beside = jnp.tanh(p["w"] @ state + x), jnp.sin(p["w"] @ beside)
                total += jnp.sum(state * beside)
        return total / (T * B)

    target = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, deferred_rows=deferred))
    fn = rlfx.compile(ticks, length=T, batch=B, target=target)
    found = jax.jit(jax.value_and_grad(lambda p, h: fn(p, h)[0], argnums=(0, 1)))(*arguments())
    expected = jax.value_and_grad(plain, argnums=(0, 1))(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)
