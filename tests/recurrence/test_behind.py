"""What is made of a series with an end has a value behind the last timestep: against loops, and the law that says which."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.errors import BoundaryError, CausalityError

T, B, D = 6, 3, 4
K = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    "x": jax.random.normal(K[0], (T, B, D)), "next": jax.random.normal(K[1], (T, B, D)),
    "w": jax.random.normal(K[2], (D, 5)), "v": jax.random.normal(K[3], (5,)),
}  # fmt: skip
CARRY = jnp.linspace(-0.5, 0.5, B)


def value(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def learner(p, h, t):
    """Observations with what is behind the last one; values of them, of a carry and of the time are read a timestep later."""
    x, after = rlfx.inputs(p["x"])[t], rlfx.inputs(p["next"])[t]
    seen = rlfx.series({"obs": x}, end={"obs": after})[t]
    values = rlfx.series(value(p, seen["obs"]) + h * jnp.sin(t.now.astype(jnp.float32)))
    loss = (seen["obs"][0] + 0.9 * values[t + 1] - values[t]) ** 2
    return loss, jnp.tanh(0.5 * h + x[1]), (values[t + 1], values[t + 2])


def of_loops(p, h, lengths=(T,) * B, t0=0):
    """Environment by environment. The loss, and ``[T, B]`` of the value behind each timestep, and of that two behind."""
    losses, following, behind = [], [], []
    for b, n in enumerate(lengths):
        carried = [h[b]]
        for t in range(n):
            carried.append(jnp.tanh(0.5 * carried[-1] + p["x"][t, b, 1]))
        seen = [*p["x"][:n, b], p["next"][n - 1, b]]
        v = [value(p, x) + c * jnp.sin(float(t0 + t)) for t, (x, c) in enumerate(zip(seen, carried, strict=True))]
        losses += [(p["x"][t, b, 0] + 0.9 * v[t + 1] - v[t]) ** 2 for t in range(n)]
        zeros = [jnp.zeros(())] * (T - n)
        following.append(jnp.stack([*v[1:], *zeros]))
        behind.append(jnp.stack([*v[2:], v[n], *zeros]))
    return jnp.stack(losses).mean(), (jnp.stack(following, 1), jnp.stack(behind, 1))


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.mark.parametrize("compiler", [
    rlfx.reference, rlfx.compile, *(partial(rlfx.compile, plan=plan) for plan in (rlfx.Plan(), rlfx.Plan("one pass")))
])  # fmt: skip
def test_values_and_gradients_are_those_of_loops(compiler):
    fn, t0 = compiler(learner, length=T, batch=B), 3
    (loss, (_, aux)), gradients = jax.value_and_grad(lambda p: fn(p, CARRY, t0=t0), has_aux=True)(PARAMS)
    (expected, others), theirs = jax.value_and_grad(lambda p: of_loops(p, CARRY, t0=t0), has_aux=True)(PARAMS)
    assert_close((loss, aux, gradients), (expected, others, theirs))
    assert np.any(gradients["next"][-1])
    assert not np.any(gradients["next"][:-1])


@pytest.mark.parametrize("compiler", [rlfx.reference, rlfx.compile])
def test_an_environment_has_its_own_end(compiler):
    p, lengths = PARAMS | {"n": jnp.array([2, 5, 6])}, (2, 5, 6)

    def f(p, carry, t):
        loss, h, aux = learner(p, carry[0], t)
        return loss, (h, carry[1] + 1, carry[2]), aux

    start = CARRY, jnp.zeros(B, jnp.int32), p["n"]
    fn = compiler(f, length=T, batch=B, until=lambda carry: carry[1] >= carry[2])
    value_and_grad = jax.value_and_grad(lambda p: fn(p, start), has_aux=True, allow_int=True)
    (loss, (_, aux, ends)), gradients = value_and_grad(p)
    (expected, others), theirs = jax.value_and_grad(lambda p: of_loops(p, CARRY, lengths), has_aux=True)(PARAMS)
    assert ends.tolist() == list(lengths)
    assert_close((loss, aux), (expected, others))
    assert_close({k: gradients[k] for k in PARAMS}, theirs)


def test_a_function_of_a_point_read_later_is_the_function_of_the_point_read_later():
    """``f(x[t])[t + 1]`` is ``f(x[t + 1])``, also where the series itself could go on, and does not vary."""

    def f(p, h, t):
        moving = rlfx.series(h, end=10.0 * h)
        constant = rlfx.series(jnp.float32(2.0), end=3.0)
        named = rlfx.series(moving[t] ** 2), rlfx.series(constant[t] ** 2), rlfx.series(rlfx.mean(moving[t], "b"))
        at_once = moving[t + 1] ** 2, constant[t + 1] ** 2, rlfx.mean(moving[t + 1], "b")
        return 0.5 * h + 0.1, (tuple(x[t + 1] for x in named), at_once)

    for run in (rlfx.unroll(f, length=T, batch=B), rlfx.reference(f, length=T, batch=B, loss=False)):
        later, at_once = run(None, CARRY)[1]
        assert_close(later, at_once)
        assert later[1].reshape(T, -1)[:, 0].tolist() == [4.0] * (T - 1) + [9.0]


def test_the_value_behind_is_computed_once():
    """Returns that go back wait for the end: the critic of what is behind is one product of one timestep."""

    def f(p, h, t):
        x, after = rlfx.inputs(p["x"])[t], rlfx.inputs(p["next"])[t]
        seen = rlfx.series(x, end=after)[t]
        v = rlfx.series(value(p, seen))
        stopped = rlfx.series(jax.lax.stop_gradient(v[t]))
        g = rlfx.solve(lambda g: x[0] + 0.9 * (0.2 * stopped[t + 1] + 0.8 * g[t + 1]), end=stopped[t + 1])
        return (v[t] - g) ** 2, h

    fn = rlfx.compile(f, length=T, batch=B)
    products = [v.aval.shape for e in J.equations_in({"jaxpr": jax.make_jaxpr(lambda p: fn(p, CARRY)[0])(PARAMS).jaxpr})
                if e.primitive is J.primitive("dot_general") for v in e.outvars]  # fmt: skip
    rows = sorted(int(np.prod(shape)) for shape in products)
    assert rows == sorted([T * B * 5, T * B, B * 5, B]), products


def test_what_has_no_value_there_is_refused_with_its_line():
    def f(p, h, t):
        x, after = rlfx.inputs(p["x"])[t], rlfx.inputs(p["next"])[t]
        v = rlfx.series(value(p, rlfx.series(x, end=after)[t]) + after[0])
        return v[t + 1], h

    with pytest.raises(BoundaryError, match=r"cannot be evaluated there: it depends on data given from outside") as error:
        rlfx.compile(f, length=T, batch=B)(PARAMS, CARRY)
    assert "(test_behind.py:" in str(error.value)
    assert "rlfx.series(v, end=...)" in str(error.value)


def test_an_end_of_what_is_read_at_it_is_refused():
    def f(p, h, t):
        after = rlfx.solve(lambda after: 0.5 * after[t - 1] + h, start=0.0)
        v = rlfx.series(rlfx.series(h, end=after)[t] ** 2)
        return v[t + 1] + after, v[t + 1]

    with pytest.raises(CausalityError):
        rlfx.compile(lambda p, h, t: (g := f(p, h, t), (g[0], g[1] + h))[1], length=T, batch=B)(PARAMS, CARRY)
