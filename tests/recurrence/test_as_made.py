"""Products of slices with what varies with t stay as they are made: t behind the heads, turned for those alone that ask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.execute.values import Value, Values

T, B, H, W = 24, 3, 2, 4


def program(params, carry, t):
    """Attention over the past, of the learner alone."""
    data, weights = params
    query, key, value = (rlfx.inputs(data)[t] @ weights).reshape(3, H, W)
    keys, values = rlfx.series(key)[: t + 1], rlfx.series(value)[: t + 1]
    shares = jax.nn.softmax(jnp.einsum("thw,hw->th", keys, query), axis=0)
    return (jnp.einsum("th,thw->hw", shares, values) ** 2).sum(), carry


def arguments():
    k = jax.random.split(jax.random.key(0))
    return jax.random.normal(k[0], (T, B, 5)), jax.random.normal(k[1], (5, 3 * H * W))


def losses():
    made = (make(program, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    return [lambda data, weights, fn=fn: fn((data, weights), jnp.zeros(B))[0] for fn in made]


def test_no_matrix_of_scores_is_turned():
    """Masks, and what is repeated along the scores, XLA makes in any order."""
    jaxpr = jax.make_jaxpr(jax.grad(losses()[0], 1))(*arguments())
    made_of = _definitions(jaxpr.jaxpr)
    turned = [e for e in made_of.values() if e.primitive.name == "transpose" and e.outvars[0].aval.size >= B * H * T * T]
    assert all(made_of[e.invars[0]].primitive.name == "broadcast_in_dim" for e in turned)
    scores = [e for e in made_of.values() if e.primitive.name == "exp"]
    assert [e.outvars[0].aval.shape for e in scores] == [(B, H, T, T)]


def _definitions(jaxpr):
    found = {}
    for e in jaxpr.eqns:
        found.update(dict.fromkeys(e.outvars, e))
        for inner, _ in J.sub_jaxprs(e.params) if e.primitive.name != "while" else ():  # it runs where a value is not finite
            found.update(_definitions(inner))
    return found


@pytest.mark.parametrize("transform", ["gradient", "one environment", "one timestep", "vmap", "vmap of keys", "twice"])
def test_values_and_gradients(transform):
    data, weights = arguments()
    length, batch = (1 if transform == "one timestep" else T // 2), (1 if transform == "one environment" else B)
    data = data[:length, :batch]
    made = (make(program, length=length, batch=batch) for make in (rlfx.compile, rlfx.reference))
    of = [lambda data, weights, fn=fn: fn((data, weights), jnp.zeros(batch))[0] for fn in made]
    if transform == "vmap":  # over the weights: one more axis before all
        of = [lambda data, weights, f=f: jax.vmap(f, (None, 0))(data, jnp.stack([weights, 0.5 * weights])).sum() for f in of]
    if transform == "vmap of keys":  # over the last axis
        of = [lambda data, weights, f=f: jax.vmap(f, (3, None))(jnp.stack([data, -data], 3), weights).sum() for f in of]
    if transform == "twice":
        of = [lambda data, weights, f=f: (jax.grad(f, 1)(data, weights) ** 2).sum() for f in of]
    (value, grads), (expected, wanted) = (jax.value_and_grad(f, (0, 1))(data, weights) for f in of)
    np.testing.assert_allclose(value, expected, rtol=2e-5)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * np.abs(want).max())


def two_axes(xs, t):
    """Pairs of what comes next: two axes whose lengths depend on t."""
    return jnp.abs(xs[:, None] - xs[None, :]).sum() / xs.shape[0]


def by_position(xs, t):
    """t behind no axis, and behind one."""
    weights = jnp.exp(-0.1 * (jnp.arange(xs.shape[0]) + t.now).astype(jnp.float32))
    return (jnp.outer(jnp.arange(2.0), weights * xs).sum(1) * jnp.sin(xs).max()).sum()


def ordered(xs, t):
    """Sorted, accumulated, picked from: every kind of rule meets them."""
    scores = jnp.stack([xs * (1.0 + t.now.astype(jnp.float32)), -xs])
    where = scores.argmax(1).sum().astype(jnp.float32)
    return jnp.sort(scores, axis=1)[0, 0] + jnp.cumsum(scores, axis=1).max() + scores[1, -1] + where


@pytest.mark.parametrize("use", [two_axes, by_position, ordered])
@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("read", ["past", "future"])
def test_every_kind_of_operation(use, until, read):
    def program(params, carry, t):
        x = rlfx.series(jnp.sin(params * carry))
        xs = x[t:] if read == "future" else x[: t + 1]
        return use(xs, t) * x[t], 0.9 * carry + 0.1

    ends = {"until": lambda carry: carry > 0.9} if until else {}
    made = [make(program, length=7, batch=B, **ends) for make in (rlfx.compile, rlfx.reference)]
    start = jnp.linspace(0.1, 0.7, B)
    found = [jax.value_and_grad(lambda p, fn=fn: fn(p, start)[0])(1.3) for fn in made]
    np.testing.assert_allclose(*found, rtol=2e-5)


def test_values_are_turned_for_those_who_ask():
    data = jnp.arange(24.0).reshape(2, 3, 4)  # [b, axis, t]
    made = Value(data, frozenset("tb"), (None,), before=1)
    values = Values({"x": made})
    assert made.time_axis == 2
    assert values["x"].data.shape == (4, 2, 3)
    np.testing.assert_array_equal(values["x"].data, jnp.moveaxis(data, 2, 0))
    others = [dict(values)["x"], {**values}["x"], values.get("x"), *values.values(), *(x for _, x in values.items())]
    assert all(x.before == 0 and x.data.shape == (4, 2, 3) for x in others)
    assert values.get("y") is None


def test_axes_of_vmap_go_where_the_last_one_is():
    x, mask = jnp.ones((2, 3, 4)), jnp.ones((3, 4)) > 0  # [b, n, t] and [n, t]

    def point(x, mask):
        return jnp.where(*J.alike(mask, x, jnp.zeros_like(x)))

    over_b = jax.vmap(point, (0, None))
    both = jax.vmap(over_b, (2, 1), 2)
    jaxpr = jax.make_jaxpr(both)(x, mask)
    assert not any(e.primitive.name == "transpose" and e.invars[0].aval.dtype == x.dtype for e in jaxpr.eqns)
    np.testing.assert_array_equal(both(x, mask), x)
    assert J.alike(x, mask) == (x, mask)
