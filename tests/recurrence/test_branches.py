"""Conditions that each environment has for itself: the same values and gradients as plain loops, of points that share weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.rewrite.branches import with_branches_chosen
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, D, OUT = 5, 3, 4, 3
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "w": jax.random.normal(K[0], (D, OUT)), "u": jax.random.normal(K[1], (2, D, OUT)), "b": jnp.linspace(-1.0, 1.0, OUT),
    "x": jax.random.normal(K[2], (T, B, D)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)


def two_networks(p, x, scale):
    other = lambda: jnp.cos(x @ p["u"][0] * scale + p["b"]).sum()  # noqa: E731
    return jax.lax.cond(x[0] > 0, lambda: (jnp.tanh(x @ p["w"] + p["b"]) * scale).sum(), other)


def heads(p, x, scale):
    """One of three, of which one is none, and an index that is outside for some."""
    heads = [lambda x: jnp.tanh(x @ p["w"]) * p["b"], lambda x: x @ p["u"][0] - p["b"], lambda x: jnp.zeros(OUT)]
    return jax.lax.switch((2.5 * jnp.abs(x[1])).astype(jnp.int32), heads, x).sum() * scale


def roots(p, x, scale):
    """What the other branch makes has no derivative where it is not taken."""
    root = lambda: (jnp.sqrt(x @ p["w"]) * p["b"] + jnp.log(x[:OUT] * scale) @ jnp.abs(p["w"][:OUT])).sum()  # noqa: E731
    good = (x[:OUT].min() > 0) & ((x @ p["w"]).min() > 0)
    return jax.lax.cond(good, root, lambda: (x / p["b"].max() * p["w"][:, 0]).sum())


def rows_of_weights(p, x, scale):
    """Sums, choices and rows of what is shared."""
    i = (3.0 * jnp.abs(x[0])).astype(jnp.int32) % D
    one = lambda: (jnp.maximum(p["w"][i], x[:OUT]) - jnp.where(x[1] > 0, p["b"], scale)).max()  # noqa: E731
    return jax.lax.cond(x[2] > 0, one, lambda: jnp.concatenate([x, p["b"], scale * p["w"].mean(0)]).max())


def nested(p, x, scale):
    inner = lambda: jax.lax.cond(x[1] > 0, lambda: x @ p["w"], lambda: x @ p["u"][1])  # noqa: E731
    return (jax.lax.cond(x[0] > 0, inner, lambda: p["b"] * x[0]) * scale).sum()


def piecewise(p, x, scale):
    return jnp.piecewise(x[0], [x[0] < -0.5, x[0] > 0.5], [lambda v: v * p["b"][0], lambda v: (v * p["w"]).max(), scale])


PROGRAMS = [two_networks, heads, roots, rows_of_weights, nested, piecewise]


def conditions(program):
    return [e for e in program.equations if e.op is J.COND]


def by_hand(program, wrt):
    """With real branches: no batch of conditions anywhere. (``roots`` of every environment by ``where`` would not be finite.)"""
    return of_points.by_hand(program, CARRY, T, wrt)


@pytest.mark.parametrize("wrt", [(0, 1), 0], ids=["with data", "weights"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_loops(f, wrt):
    expected = by_hand(f, wrt)(PARAMS, CARRY)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    of_points.close(of_points.gradient(f, CPU, CARRY, T, wrt)(PARAMS, CARRY), expected)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_no_condition_is_left(f):
    found = rewritten(f)
    assert not conditions(found)
    assert with_branches_chosen(found) is found


def rewritten(f):
    program = of_points.traced(f, PARAMS, CARRY, T)
    assert conditions(program)
    return with_branches_chosen(program)


def test_a_second_derivative_is_that_of_loops():
    squared = lambda fn: lambda p, c: sum(jnp.sum(g**2) for g in jax.tree.leaves(fn(p, c)[1]))  # noqa: E731
    expected = jax.grad(squared(by_hand(two_networks, (0, 1))))(PARAMS, CARRY)
    found = jax.jit(jax.grad(squared(of_points.gradient(two_networks, CPU, CARRY, T))))(PARAMS, CARRY)
    of_points.close(found, expected)


@pytest.mark.parametrize("f", [two_networks, heads, nested], ids=lambda f: f.__name__)
def test_points_have_no_weights_of_their_own(f):
    """No value of the compiled program has an element for each point and weight."""
    many = 1024
    data = {**PARAMS, "x": jnp.tile(PARAMS["x"], (1, many, 1))}
    run = of_points.gradient(f, CPU, jnp.ones(B * many), T, wrt=0)
    compiled = run.lower(data, jnp.ones(B * many)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * T * B * many * D * OUT


def test_in_a_recurrence_it_is_that_of_loops():
    """The state goes through the branch of each environment."""

    def act(p, s, t):
        s = jax.lax.cond(s[0] > 0.1, lambda: jnp.tanh(s @ p["w"] @ p["u"][0].T), lambda: jnp.cos(s + p["u"][1][:, 0]))
        return s.sum(), s

    fn = rlfx.compile(act, length=T, batch=B)
    state = PARAMS["x"][0]

    def loops(p):
        total, states = 0.0, list(state)
        for _ in range(T):
            losses, states = zip(*(act(p, s, None) for s in states), strict=True)
            total += sum(losses)
        return total / (T * B)

    of_points.close(jax.value_and_grad(lambda p: fn(p, state)[0])(PARAMS), jax.value_and_grad(loops)(PARAMS))


def of_time(p, x, scale):
    return jax.lax.cond(x[0] > 0, lambda: (x * scale).sum(), lambda: jnp.cos(x).sum())  # nothing that is shared


def through_a_loop(p, x, scale):
    """Weights of a loop: the derivative of every iteration is of all points."""
    step = lambda z, _: (jnp.tanh(z @ p["w"] @ p["u"][0].T), None)  # noqa: E731
    return jax.lax.cond(x[0] > 0, lambda: jax.lax.scan(step, x, None, length=3)[0].sum(), lambda: x.sum()) * scale


def powers(p, x, scale):
    """An operation whose derivative by what is shared is infinite at zero."""
    return jax.lax.cond(x[0] > 0, lambda: (jnp.abs(x[:OUT]) ** p["b"]).sum(), lambda: p["b"].sum()) * scale


@pytest.mark.parametrize("f", [of_time, through_a_loop, powers], ids=lambda f: f.__name__)
def test_what_stays(f):
    program = of_points.traced(f, PARAMS, CARRY, T)
    assert with_branches_chosen(program) is program
    of_points.close(of_points.gradient(f, CPU, CARRY, T)(PARAMS, CARRY), by_hand(f, (0, 1))(PARAMS, CARRY))


def test_a_condition_of_all_environments_stays_one():
    """It is of the timestep alone: one branch runs."""
    loss = lambda p, s, t: (jax.lax.cond(t.now % 2 == 0, lambda: s @ p["w"], lambda: s @ p["u"][0]).sum(), s)  # noqa: E731
    program = rlfx.trace(loss, PARAMS, PARAMS["x"][0], length=T, batch=B)
    assert conditions(program)
    assert with_branches_chosen(program) is program


def test_without_a_derivative_loops_are_chosen_too():
    stopped = lambda p, x, scale: through_a_loop(jax.lax.stop_gradient(p), jax.lax.stop_gradient(x), 1.0) * scale  # noqa: E731
    program = of_points.traced(stopped, PARAMS, CARRY, T)
    assert conditions(program)
    assert not conditions(with_branches_chosen(program))
    of_points.close(of_points.gradient(stopped, CPU, CARRY, T)(PARAMS, CARRY), by_hand(stopped, (0, 1))(PARAMS, CARRY))


def test_every_machine_has_them():
    bare = dataclasses.replace(CPU, rewrites=type(CPU.rewrites)())
    assert not conditions(adapted(of_points.traced(heads, PARAMS, CARRY, T), bare))
