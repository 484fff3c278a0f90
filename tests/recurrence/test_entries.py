"""What points compute of an entry of a table, computed of the table: the same values and gradients as plain loops; what stays."""

import functools

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.rewrite.entries import with_entries_first
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, N = 8, 3, 3
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "table": jax.random.normal(K[0], (N, 2, 4)), "turned": jax.random.normal(K[1], (2, N, 4)),
    "w": jax.random.normal(K[2], (4, 4)), "x": jax.random.normal(K[3], (T, B, 3)) * 2.0,
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)
EXP = J.primitive("exp")
rewrite = functools.partial(with_entries_first, times=8)


def place(x, i=0):
    """-1 and less, and N and more, are among them: the first and the last entry by jax's rules."""
    return jnp.round(1.0 + x[i]).astype(jnp.int32)


def normalised(p, x, scale):
    return (jax.nn.log_softmax(p["table"][place(x)]) * scale * x[1]).sum()


def two_values(p, x, scale):
    """Two values of one entry, no more numbers than it has."""
    e = jnp.tanh(p["table"][place(x)])
    return (e[0] * scale).sum() * x[1] + (jnp.sin(e[1]) * x[2]).sum()


def another_axis(p, x, scale):
    return (jax.nn.softmax(p["turned"][:, place(x, 1)]) * x[0] * scale).sum()


def layers(p, x, scale):
    """A layer of an embedding, whose weights are the same everywhere."""
    return (jnp.tanh(p["table"][place(x)] @ p["w"]) * scale).sum() + x[0]


def of_the_table(p, x, scale):
    """Of a table that is computed itself, with a scale of its own and reductions."""
    table = p["table"] * p["w"].sum() + 0.1
    return jax.nn.logsumexp(table[place(x)], -1).max() * scale + x[1] * jnp.cos(table[place(x)]).max()


def twice(p, x, scale):
    """Two entries of one table, and an entry of another."""
    a, b = jax.nn.softmax(p["table"][place(x)]), jax.nn.softmax(p["table"][place(x, 1)])
    return (a * b * scale).sum() + (jnp.cos(p["turned"][1][place(x, 2)]) * x[0]).sum()


PROGRAMS = [normalised, two_values, another_axis, layers, of_the_table, twice]


@pytest.mark.parametrize("sums", PROGRAMS)
def test_values_and_gradients_are_those_of_loops(sums):
    found = of_points.gradient(sums, CPU, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, jax.jit(of_points.by_hand(sums, CARRY, T, (0, 1)))(PARAMS, CARRY))


def traced(sums):
    return of_points.traced(sums, PARAMS, CARRY, T)


def at_points(program):
    """Exponentials and the like of points."""
    costly = (J.ELEMENTWISE - J.ARITHMETIC) | {J.primitive("dot_general")}
    return sum(e.op in costly and bool(program.dims_of(e.outputs[0])) for e in program.equations)


@pytest.mark.parametrize("sums", PROGRAMS)
def test_points_only_read_what_is_computed(sums):
    program = traced(sums)
    found = rewrite(program)
    assert at_points(program) > at_points(found) >= at_points(adapted(program, CPU))
    assert rewrite(found) is found
    assert with_entries_first(program, times=9) is program  # 24 points, three entries


def test_what_stays():
    def of_points_too(p, x, s):  # with numbers of the point
        return jnp.tanh(p["table"][place(x)] * x[0]).sum() * s

    def needed(p, x, s):  # the entry itself is needed
        e = p["table"][place(x)]
        return (jnp.tanh(e) * s + e * x[0]).sum()

    def seen(p, x, s):  # and a shape of it
        e = p["table"][place(x)].reshape(-1)
        return (jnp.tanh(e) * s).sum() + e[0] * x[0]

    def cheap(p, x, s):  # is fused with the reading
        return (2.0 * p["table"][place(x)] + 1.0).sum() * s * x[0]

    def wide(p, x, s):  # gives more numbers than an entry has
        spread = jnp.sin(p["table"][place(x)][..., None] * jnp.arange(1.0, 4.0)[None, None])
        return (spread * x[None, None]).sum() * s

    def of_data(p, x, s):  # of what a point has
        return jnp.tanh(x[jnp.clip(place(x), 0, 2)]).sum() * s

    def infinite(p, x, s):  # where a number is zero, or large; of an entry that no point takes, it is nothing
        e = p["table"][place(x)]
        return (jnp.log(jnp.abs(e)) + jnp.sqrt(jnp.abs(e)) + 1.0 / e).sum() * s

    def large(p, x, s):
        return (jnp.exp(p["table"][place(x)]) * s).sum()

    def other_sums(p, x, s):  # of exponentials along other axes than those of the largest, and of other numbers
        e = p["table"][place(x)]
        share = jnp.exp(e - e.max(0)[None])
        return (jnp.log(share.sum(-1)).sum() + jnp.log(jnp.exp(e - e.max(0)[None] + 3.0).sum(0)).sum()) * s

    def turned(p, x, s):  # the largest of rows, taken from columns
        e = p["table"][place(x)][:, :2]
        return (jnp.exp(e - e.max(1)[None]) * s).sum()

    for sums in (of_points_too, needed, seen, cheap, wide, of_data, infinite, large, other_sums, turned):
        program = traced(sums)
        assert rewrite(program) is program, sums
