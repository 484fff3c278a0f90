"""What a rewrite made is a program, or an error names the rewrite and what is wrong."""

import dataclasses

import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import ProgramError
from rlfx.recurrence.api.traced import REWRITES
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.ir.verify import rewritten, verify
from tests import strategies


def loss(w, x, t):
    y = rlfx.series(jnp.tanh(w * x), end=0.0)
    return (y[t] - y[t + 1]) ** 2, x + 1.0, y[t]


def program():
    return rlfx.trace(loss, jnp.float32(2.0), jnp.ones(3), length=4, batch=3)


def equations(p, change):
    """The program with other equations."""
    return dataclasses.replace(p, equations=tuple(change(list(p.equations))))


def named(p, op):
    return next(i for i, e in enumerate(p.equations) if e.op.name == op)


def without(op):
    return lambda p: equations(p, lambda es: [e for e in es if e.op.name != op])


def swapped(p):
    i = named(p, "tanh")
    return equations(p, lambda es: [*es[: i - 1], es[i], es[i - 1], *es[i + 1 :]])


def twice(p):
    i = named(p, "tanh")
    return equations(p, lambda es: [*es, es[i]])


def retyped(op, shape, dtype):
    def change(p):
        i = named(p, op)
        other = Var(999, shape, jnp.dtype(dtype))
        wrong = dataclasses.replace(p.equations[i], outputs=(other,))
        return equations(p, lambda es: [*es[: i + 1], wrong, *es[i + 1 :]])

    return change


def lost(p):
    return dataclasses.replace(p, loss=Var(999, (), p.loss.dtype))


def counts(p):
    return dataclasses.replace(p, next_carry=(p.now,))


def steady(p):
    return dataclasses.replace(p, dims={**p.dims, p.loss: frozenset()})


BROKEN = {
    "an operand is gone": (without("tanh"), "series uses .* but nothing defines it"),
    "before its operand": (swapped, "tanh uses .* before it is defined"),
    "twice": (twice, "is defined twice"),
    "another type": (retyped("tanh", (), "int32"), r"tanh is f32\[\], and is written as i32\[\]"),
    "another shape": (retyped("read", (2,), "float32"), r"a read of f32\[\] is f32\[2\]"),
    "a series of another type": (retyped("series", (), "bool"), "series is f32.*, and is written as bool"),
    "a loss of nowhere": (lost, "the loss is .* which nothing defines"),
    "more aux": (lambda p: dataclasses.replace(p, aux=(*p.aux, p.now)), "aux has 2 leaves, and aux_dims is of 1"),
    "wider aux": (
        lambda p: dataclasses.replace(p, aux_dims=(frozenset("b"),)),
        "leaf 0 of aux varies with t, and is returned without",
    ),
    "another carry": (counts, "leaf 0 of the carry is f32.*, and becomes i32"),
    "dims of before": (steady, "varies with b and t, and dims says with nothing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_program_is_refused(name):
    change, text = BROKEN[name]
    with pytest.raises(ProgramError, match=f"What my_rewrite made of loss is no program: .*{text}"):
        verify(change(program()), "my_rewrite")


def test_a_transform_of_the_user_is_verified_and_named():
    def forgets(p):
        return without("tanh")(p)

    compiled = rlfx.compile(loss, length=4, batch=3, transform=forgets)
    with pytest.raises(ProgramError, match="What transform= made of loss is no program"):
        compiled(jnp.float32(2.0), jnp.ones(3))
    with pytest.raises(ProgramError, match="What forgets made of loss is no program"):
        rewritten(forgets, program())


@pytest.mark.parametrize("seed", range(20))
def test_rewrites_of_generated_programs_are_programs(seed):
    p = strategies.program(seed, 3)
    try:
        traced = rlfx.trace(p.function, *p.arguments(), **p.options())
    except rlfx.errors.RlfxError:
        return
    verify(traced, "all rewrites")
    for rewrite in REWRITES:
        once = rewritten(rewrite, traced)
        assert len(rewritten(rewrite, once).equations) == len(once.equations)


@pytest.mark.parametrize("part", [lambda x: x[:, 1], lambda x: x[1:], lambda x: x[:, 0] * x[::-1][:, 1]])
def test_constant_positions_in_a_slice_are_typed(part):
    """What tracing notes of them is no parameter of jax's."""

    def f(p, c, t):
        x = rlfx.series(p * c)
        return rlfx.series(part(x[: t + 1]).sum())[t] + x[t].sum(), c

    p, c = jnp.float32(2.0), jnp.arange(1.0, 3.0)
    got, expected = (make(f, length=3)(p, c)[0] for make in (rlfx.compile, rlfx.reference))
    assert got == expected


def test_verifying_is_a_small_part_of_planning():
    def deep(w, x, t):
        for _ in range(300):
            x = jnp.sin(w * x)
        return x, x

    from time import process_time

    began = process_time()
    traced = rlfx.trace(deep, jnp.float32(0.5), jnp.float32(1.0), length=8)
    rlfx.compile(deep, length=8).plan(jnp.float32(0.5), jnp.float32(1.0))
    planning, began = process_time() - began, process_time()
    verify(traced, "nothing")
    assert process_time() - began < 0.3 * planning
