"""Convolutions by products of patches: the same values and gradients; large ones that no gradient recurs by stay as they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.cpu.convolution import CONVOLUTION
from rlfx.recurrence.rewrite.patches import with_patches
from rlfx.recurrence.schedule.schedule import schedule

CPU = rlfx.target("cpu")
T, B, S, SEEN, C = 4, 2, 5, 2, 3
K = jax.random.split(jax.random.key(0), 8)
PARAMS = {
    "square": jax.random.normal(K[0], (3, 3, SEEN + C, C)) / 4.0,
    "wide": jax.random.normal(K[1], (2, 3, C, C)) / 4.0,
    "line": jax.random.normal(K[2], (3, C, C)) / 4.0,
    "first": jax.random.normal(K[3], (C, C, 3, 3)) / 4.0,
    "mixing": jax.random.normal(K[4], (C, C)),
    "many": jax.random.normal(K[7], (3, 3, 8, C)) / 8.0,
}
X = jax.random.normal(K[5], (T, B, S, S, SEEN))
CARRY = jax.random.normal(K[6], (B, S, S, C))
HWIO = ("NHWC", "HWIO", "NHWC")


def conv(x, w, strides=(1, 1), padding="SAME", numbers=HWIO, **how):
    return jax.lax.conv_general_dilated(x[None], w, strides, padding, dimension_numbers=numbers, **how)[0]


def beside_what_is_seen(p, x, h):
    """What is seen is no part of the recurrence: it has a product of its own."""
    return jnp.tanh(conv(jnp.concatenate([x, h], -1), p["square"]))


def memory_first(p, x, h):
    return jnp.tanh(conv(jnp.concatenate([h, x], -1), p["square"]))


def of_two_ticks(p, x, h):
    return beside_what_is_seen(p, x, beside_what_is_seen(p, x, h))


def of_many(x):
    """More features than are few."""
    return jnp.tile(x, 8)[..., :8]


def seen_alone(p, x, h):
    """A small convolution that is no part of the recurrence, with a stride and a margin."""
    y = jnp.sum(conv(x, p["wide"][:, :, :SEEN], (2, 3), [(1, 0), (0, 2)]), (0, 1), keepdims=True)
    return jnp.tanh(0.9 * h + y)


def strided(p, x, h):
    """Every second row and third column, beyond the edges on one side alone; and repeated to the old size."""
    small = conv(h, p["wide"], (2, 3), [(1, 0), (0, 2)])
    return jnp.tanh(0.5 * h + x.sum(-1, keepdims=True) + jnp.repeat(jnp.repeat(small, 2, 0), 3, 1)[:S, :S])


def of_lines(p, x, h):
    """One axis; rows are the convolution's batch."""
    y = jax.lax.conv_general_dilated(h, p["line"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y + x.sum(-1, keepdims=True))


def features_first(p, x, h):
    """A layout that is put in order first."""
    y = conv(jnp.moveaxis(h, -1, 0), p["first"], numbers=("NCHW", "OIHW", "NCHW"))
    return jnp.tanh(jnp.moveaxis(y, 0, -1) + x.sum(-1, keepdims=True))


MEMORIES = [beside_what_is_seen, memory_first, of_two_ticks, seen_alone, strided, of_lines, features_first]


def timestep(memory, params, h, t):
    p, data = params
    h = memory(p, rlfx.inputs(data)[t], h)
    return jnp.sum(jnp.sin(h @ p["mixing"])), h


def gradient(memory, make=rlfx.compile, **how):
    fn = make(functools.partial(timestep, memory), length=T, batch=B, **how)
    return jax.value_and_grad(lambda p, h: fn((p, X), h)[0], argnums=(0, 1))


def by_hand(memory):
    def loss(p, carry):
        total = 0.0
        for b in range(B):
            h = carry[b]
            for t in range(T):
                h = memory(p, X[t, b], h)
                total += jnp.sum(jnp.sin(h @ p["mixing"]))
        return total / (T * B)

    return jax.value_and_grad(loss, argnums=(0, 1))


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("plan", [None, rlfx.Plan(), rlfx.Plan("blocks", 2), rlfx.Plan("one pass")])
def test_values_and_gradients_are_those_of_convolutions(memory, plan):
    close(jax.jit(gradient(memory, plan=plan))(PARAMS, CARRY), by_hand(memory)(PARAMS, CARRY))


def test_values_and_gradients_are_the_references():
    found = jax.jit(gradient(beside_what_is_seen))(PARAMS, CARRY)
    close(found, gradient(beside_what_is_seen, rlfx.reference)(PARAMS, CARRY))


def convolutions(program):
    return sum(e.op is CONVOLUTION for e in program.equations)


def traced(memory, **how):
    return rlfx.trace(functools.partial(timestep, memory), (PARAMS, X), CARRY, length=T, batch=B, **how)


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m is not features_first])
def test_they_are_products(memory):
    before = traced(memory)
    after = with_patches(before, 1 << 18)
    assert convolutions(before) == (2 if memory is of_two_ticks else 1)
    assert convolutions(after) == 0
    assert with_patches(after, 1 << 18) is after
    assert with_patches(before, 8) is before  # patches are larger


def test_what_is_seen_is_multiplied_before_the_loop():
    after = with_patches(traced(beside_what_is_seen), 1 << 18)
    products = [e for e in after.equations if e.op is J.primitive("dot_general")]
    contracted = [e.inputs[0].shape[e.params["dimension_numbers"][0][0][0]] for e in products]
    assert sorted(contracted) == [C, 9 * SEEN, 9 * C]  # the first is the loss's
    loops = schedule(Graph(after, wanted=frozenset({after.loss, *after.next_carry}))).loops
    assert loops
    assert not any(9 * SEEN in v.shape for loop in loops for e in loop.body for v in e.inputs)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(lambda p, x, h: jax.lax.stop_gradient(conv(of_many(h), p["many"])), id="no gradient recurs"),
        pytest.param(lambda p, x, h: 0.9 * h + conv(of_many(x), p["many"]), id="no recurrence"),
        pytest.param(
            lambda p, x, h: 0.9 * h + conv(jnp.tile(x, (9, 9, 1)), p["square"][:, :, :SEEN])[:S, :S], id="a large image"
        ),
        pytest.param(lambda p, x, h: conv(h, p["square"][:, :, :1], feature_group_count=C), id="groups"),
        pytest.param(lambda p, x, h: conv(h, p["wide"], rhs_dilation=(2, 1)), id="spread kernels"),
        pytest.param(
            lambda p, x, h: conv(h.astype(jnp.bfloat16), p["wide"].astype(jnp.bfloat16)).astype(jnp.float32), id="few bits"
        ),
        pytest.param(lambda p, x, h: jnp.where(conv(of_many(h), p["many"]) > 0.0, h, 0.5 * h), id="by a comparison"),
    ],
)
def test_others_stay_as_they_are(memory):
    program = traced(memory)
    assert convolutions(program) == 1
    assert with_patches(program, 1 << 18) is program
    assert with_patches(traced(beside_what_is_seen), 1 << 18) is not program


def test_small_ones_are_not_where_memory_comes_first():
    program = traced(seen_alone)
    assert convolutions(with_patches(program, 1 << 18)) == 0
    assert with_patches(program, 1 << 18, few=0) is program


def test_it_is_for_cpus():
    assert CPU.rewrites.patches
    assert not rlfx.target("h200").rewrites.patches
    never = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, patches=0))

    def lowered(target):
        return jax.jit(gradient(beside_what_is_seen, target=target)).lower(PARAMS, CARRY).as_text()

    assert "stablehlo.convolution" in lowered(never)
    assert "stablehlo.convolution" not in lowered(CPU)
