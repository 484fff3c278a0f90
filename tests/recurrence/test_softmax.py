"""Attention that divides once, and maxima by halves: the same numbers, another program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.execute.extremes import largest_or_smallest
from rlfx.recurrence.execute.ragged.tree_reduction import by_halves, extreme, reduced
from rlfx.recurrence.language.primitives import attend_p
from rlfx.recurrence.rewrite.softmax import divide_last
from tests.sampling import met

T, B, D = 7, 2, 4
SLICES = {
    "past": lambda x, t: x[: t + 1],
    "future": lambda x, t: x[t:],
    "some": lambda x, t: x[t : t + 3],
    "before": lambda x, t: x[:t],
    "after": lambda x, t: x[t + 1 :],
}
MIXES = {
    "weights first": lambda p, v: p @ v,
    "weights last": lambda p, v: v.T @ p,
    "heads": lambda p, v: jnp.einsum("ht,thd->dh", jnp.stack([p, p[::-1]]), v.reshape(-1, 2, D // 2)),
    "two queries": lambda p, v: jnp.einsum("tq,td->qd", jnp.stack([p, p], 1), v),
}


def attention(mix, slice_of=SLICES["past"], softmax=jax.nn.softmax):
    def f(w, x, t):
        query, key, value = (jnp.tanh(x @ m) for m in w)
        keys, values = slice_of(rlfx.series((key, value)), t)
        return jnp.sum(jnp.sin(mix(softmax(keys @ query), values))), x * 1.1 + 0.1

    return f


def heads(w, x, t):
    """Softmax along the last axis of [heads, n] and along the first of [n, queries]."""
    query, key, value = (jnp.tanh(x @ m).reshape(2, D // 2) for m in w)
    keys, values = rlfx.series((key, value))[: t + 1]
    rows = jnp.einsum("ht,thd->hd", jax.nn.softmax(jnp.einsum("thd,hd->ht", keys, query)), values)
    columns = jnp.einsum("thd,th->dh", values, jax.nn.softmax(jnp.einsum("thd,hd->th", keys, query), axis=0))
    return jnp.sum(rows**2) + jnp.sum(jnp.sin(columns)), x * 1.1 + 0.1


ARGUMENTS = (
    [jax.random.normal(k, (D, D)) for k in jax.random.split(jax.random.key(0), 3)],
    jnp.linspace(-1.0, 1.0, B * D),
)


def arguments():
    w, x = ARGUMENTS
    return w, x.reshape(B, D)


def divisions(f):
    """How many values of a symbolic length are divided."""
    program = rlfx.trace(f, *arguments(), length=T, batch=B)
    return sum(e.op is J.primitive("div") and bool(J.symbolic_axes(e.outputs[0].shape)) for e in program.equations)


def check(f):
    def value_and_gradient(make):
        run = make(f, length=T, batch=B)
        return jax.value_and_grad(lambda w, x: run(w, x)[0], (0, 1))(*arguments())

    got, expected = jax.jit(lambda: value_and_gradient(rlfx.compile))(), value_and_gradient(rlfx.reference)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6), got, expected)


@pytest.mark.parametrize("slice_of", SLICES)
def test_the_product_is_divided(slice_of):
    f = attention(MIXES["weights first"], SLICES[slice_of])
    assert divisions(f) == 0
    check(f)


def test_with_64_bit_types_a_slice_may_be_empty():
    """There a length is an int64."""
    with jax.enable_x64(True):
        f = attention(MIXES["weights first"], SLICES["before"])
        assert divisions(f) == 0
        w, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arguments())
        got, expected = (make(f, length=T, batch=B)(w, x)[0] for make in (rlfx.compile, rlfx.reference))
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize(("mix", "left"), [("weights first", 0), ("weights last", 0), ("heads", 1), ("two queries", 1)])
def test_orders_of_the_product(mix, left):
    """A softmax that is put into another array before its product stays as it is."""
    assert divisions(attention(MIXES[mix])) == left
    check(attention(MIXES[mix]))


def test_heads():
    assert divisions(heads) == 0
    check(heads)


def of_tokens(axes=(-2, -1), slice_of=SLICES["past"]):
    """Two tokens a timestep; a softmax over timesteps and tokens."""

    def f(w, x, t):
        query, key, value = (jnp.tanh(jnp.stack([x, x[::-1]]) @ m) for m in w)
        keys, values = slice_of(rlfx.series((key, value)), t)  # [n, 2, D]
        share = jax.nn.softmax(jnp.einsum("qd,nkd->qnk", query, keys), axis=axes)
        return jnp.sum(jnp.sin(jnp.einsum("qnk,nkd->qd", share, values))), x * 1.1 + 0.1

    return f


@pytest.mark.parametrize("slice_of", ["past", "before", "some"])
def test_over_several_axes(slice_of):
    f = of_tokens(slice_of=SLICES[slice_of])
    assert divisions(f) == 0
    check(f)


def test_a_product_over_more_axes_than_the_softmax_stays():
    assert divisions(of_tokens(axes=-2)) == 1
    check(of_tokens(axes=-2))


def test_over_two_slices_stays():
    """Of all pairs of the past: two axes of symbolic length."""

    def f(w, x, t):
        keys, values = rlfx.series((jnp.tanh(x @ w[0]), jnp.tanh(x @ w[1])))[: t + 1]
        scores = keys @ values.T
        return jnp.einsum("st,st->", jax.nn.softmax(scores, axis=(0, 1)), jnp.sin(scores)), x * 1.1 + 0.1

    assert divisions(f) == 1
    check(f)


def test_over_several_axes_of_its_own_past():
    """In a loop it is divided after its product, too; it is no ``attend_p``, which is of one axis."""

    def f(w, x, t):
        query, key, value = (jnp.tanh(jnp.stack([x, x[::-1]]) @ m) for m in w)
        keys, values = rlfx.series((key, value))[: t + 1]
        share = jax.nn.softmax(jnp.einsum("qd,nkd->qnk", query, keys), axis=(-2, -1))
        out = jnp.einsum("qnk,nkd->qd", share, values)
        return jnp.sum(out**2), jnp.tanh(out[0] + 0.5 * x)

    program = rlfx.trace(f, *arguments(), length=T, batch=B)
    assert divisions(f) == 0
    assert not any(e.op is attend_p for e in program.equations)
    check(f)


def test_what_stays():
    def entropy(p, v):
        return p @ v - jnp.sum(p * jnp.log(p))

    by_hand = lambda s: jnp.exp(s) / jnp.exp(s).sum()  # noqa: E731  # may overflow: divided first
    normalized = lambda s: jnp.exp(s - s.max()) / jnp.exp(s).sum()  # noqa: E731
    for f in (attention(entropy), attention(MIXES["weights first"], softmax=by_hand),
              attention(MIXES["weights first"], softmax=normalized)):  # fmt: skip
        assert divisions(f) == 1
        check(f)


def test_float16_may_overflow_and_stays():
    f = attention(lambda p, v: (p.astype(jnp.float16) @ v.astype(jnp.float16)).astype(jnp.float32),
                  softmax=lambda s: jax.nn.softmax(s.astype(jnp.float16)))  # fmt: skip
    assert divisions(f) == 1


def over_its_own_past(mix, slice_of=SLICES["past"], softmax=jax.nn.softmax):
    def f(w, x, t):
        query, key, value = (jnp.tanh(x @ m) for m in w)
        keys, values = slice_of(rlfx.series((key, value)), t)
        out = mix(softmax(keys @ query), values)
        return jnp.sum(out**2), jnp.tanh(jnp.ravel(out)[:D] + 0.5 * x)

    return f


def is_one_equation(f):
    program = rlfx.trace(f, *arguments(), length=T, batch=B)
    return sum(e.op is attend_p for e in program.equations) == 1


@pytest.mark.parametrize(
    ("mix", "slice_of"),
    [*((mix, "past") for mix in MIXES), *((mix, "before") for mix in MIXES if mix != "heads")],
)
def test_a_loop_over_its_own_past(mix, slice_of):
    """One equation; acting, and its gradient. Before the first timestep there is nothing, and the product is 0."""
    f = over_its_own_past(MIXES[mix], SLICES[slice_of])
    assert is_one_equation(f) == mix.startswith("weights")
    check(f)


@pytest.mark.parametrize("shape", ["uniform", "some impossible", "enormous"])
def test_scores_of_any_shape_over_its_own_past(shape):
    softmax = {
        "uniform": lambda s: jax.nn.softmax(jnp.zeros_like(s)),
        "some impossible": lambda s: jax.nn.softmax(jnp.where(s < s[-1], -jnp.inf, s)),
        "enormous": lambda s: jax.nn.softmax(1e4 * s - 1e6),
    }[shape]
    f = over_its_own_past(MIXES["weights first"], softmax=softmax)
    assert is_one_equation(f)
    check(f)


def test_a_maximum_of_the_other_axis():
    """Exponentials of what is not the same along the slice are no softmax."""

    def mix(p, v):
        scores = jnp.stack([jnp.log(p), v[:, 0]])
        weights = jnp.exp(scores - scores.max(0, keepdims=True))
        return weights / weights.sum(1, keepdims=True) @ v

    f = over_its_own_past(mix)
    assert not is_one_equation(f)
    check(f)


def test_all_scores_impossible_is_nan():
    """As jax.nn.softmax is of them; 0 would hide the mistake."""
    f = over_its_own_past(MIXES["weights first"], softmax=lambda s: jax.nn.softmax(jnp.full_like(s, -jnp.inf)))
    assert is_one_equation(f)
    assert all(np.isnan(make(f, length=T, batch=B)(*arguments())[0]) for make in (rlfx.compile, rlfx.reference))


def acted_by_hand(length, score, aux):
    """What a loop over its own past puts out for each environment, in 64 bits: ``(x, *aux(scores, weights))``."""
    w, states = (np.asarray(a, np.float64) for a in (jnp.stack(arguments()[0]), arguments()[1]))
    for x in states:
        keys, values, outs = [], [], []
        for _ in range(length):
            query, key, value = (np.tanh(x @ m) for m in w)
            keys, values = [*keys, key], [*values, value]
            scores = score(np.stack(keys), query)
            weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            x = np.tanh(weights @ np.stack(values) + 0.1 * x)
            outs.append((x, *aux(scores, weights)))
        yield [np.stack(leaf) for leaf in zip(*outs, strict=True)]


@pytest.mark.parametrize("length", [T, 200])  # 200: more than a tile
def test_what_is_returned_of_the_weights(length):
    """They are as wide as the past at every timestep, and what is made of them is computed after the loop."""

    def f(w, x, t):
        query, key, value = (jnp.tanh(x @ m) for m in w)
        keys, values = rlfx.series((key, value))[: t + 1]
        weights = jax.nn.softmax(keys @ query)
        out = jnp.tanh(weights @ values + 0.1 * x)
        return out, (out, -jnp.sum(weights * jnp.log(weights)), weights.max())

    def aux(_, weights):
        return -np.sum(weights * np.log(weights)), weights.max()

    w, x = arguments()
    got = rlfx.unroll(f, length=length, batch=B)(w, x)[1]
    for b, expected in enumerate(acted_by_hand(length, lambda keys, query: keys @ query, aux)):
        for g, e in zip(got, expected, strict=True):
            np.testing.assert_allclose(g[:, b], e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["weights first", "weights last", "heads"])
@pytest.mark.parametrize("length", [T, 200])
def test_very_low_scores_while_acting(order, length):
    """What is not written yet has the score 0, a thousand above the others: its exponential is infinite."""
    low = lambda k, q: jnp.sum(jnp.abs(k) + 1.0, -1) * -300.0  # noqa: E731
    mix = {
        "weights first": lambda p, v: p @ v,
        "weights last": lambda p, v: v.T @ p,
        "heads": lambda p, v: jnp.einsum("th,ht->h", v, jnp.stack([p] * D)),
    }[order]

    def f(w, x, t):
        query, key, value = (jnp.tanh(x @ m) for m in w)
        keys, values = rlfx.series((key, value))[: t + 1]
        scores = low(keys, query)
        out = jnp.tanh(mix(jax.nn.softmax(scores), values) + 0.1 * x)
        return out, (out, scores.max())

    w, x = arguments()
    got = rlfx.unroll(f, length=length, batch=B)(w, x)[1]
    score = lambda keys, _: np.sum(np.abs(keys) + 1.0, -1) * -300.0  # noqa: E731
    for b, expected in enumerate(acted_by_hand(length, score, lambda scores, _: (scores.max(),))):
        for g, e in zip(got, expected, strict=True):
            np.testing.assert_allclose(g[:7, b], e[:7], rtol=1e-3, atol=1e-3)  # scores of -2000, in 32 bits
        assert np.isfinite(got[0]).all()


@pytest.mark.parametrize("slice_of", ["future", "after"])
def test_until(slice_of):
    attend = attention(MIXES["weights first"], SLICES[slice_of])

    def f(w, c, t):
        loss, x = attend(w, c["x"], t)
        return loss, {"x": x, "left": c["left"] - 1}

    w, x = arguments()
    carry = {"x": x, "left": jnp.array([3, 9])}

    def value_and_gradient(make):
        run = make(f, length=T, batch=B, until=lambda c: c["left"] <= 0)
        return jax.value_and_grad(lambda w: run(w, carry)[0])(w)

    got, expected = jax.jit(lambda: value_and_gradient(rlfx.compile))(), value_and_gradient(rlfx.reference)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6), got, expected)


def test_idempotent():
    program = rlfx.trace(heads, *arguments(), length=T, batch=B)
    assert divide_last(program) is program


def test_scores_of_any_size():
    f = attention(MIXES["weights first"], softmax=lambda s: jax.nn.softmax(30.0 * s - 200.0))
    assert divisions(f) == 0
    check(f)


# -- maxima by halves -----------------------------------------------------------------------------------------------------

EXTREMES = {"reduce_max": jnp.max, "reduce_min": jnp.min}


@pytest.mark.parametrize("shape", [(17,), (64,), (3, 129), (2, 2, 1000)])
@pytest.mark.parametrize("op", EXTREMES)
def test_extremes(op, shape):
    x = jnp.round(3 * jax.random.normal(jax.random.key(0), shape))  # rounded: several attain it
    expected, pull = jax.vjp(lambda x: EXTREMES[op](x, axis=-1), x)
    halves = partial(extreme, J.primitive(op))
    by = lambda x: largest_or_smallest(op.removeprefix("reduce_"), x, (x.ndim - 1,), reduced=halves)  # noqa: E731
    got, pulled = jax.vjp(jax.jit(by), x)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(pulled(jnp.ones_like(got))[0], pull(jnp.ones_like(got))[0])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("op", EXTREMES)
def test_extremes_that_are_not_finite(op, bad):
    x = jnp.arange(50.0).at[33].set(bad)
    np.testing.assert_array_equal(extreme(J.primitive(op), x), EXTREMES[op](x))


def test_where_halves_are_faster():
    """Along the last axis, if that is long."""
    op, long = J.primitive("reduce_max"), jnp.zeros((2, 64))
    assert by_halves(op, (1,), long)
    assert not by_halves(op, (0,), long)
    assert not by_halves(op, (1,), long[:, :16])
    assert not by_halves(op, (1,), long.astype(jnp.int32))
    assert not by_halves(J.primitive("reduce_sum"), (1,), long)


@pytest.mark.parametrize(
    ("lengths", "lead"), met([(1,), (17,), (64, 32, 16, 16), (48, 16), (100, 7, 63), (33, 33), (5, 3)], [(3,), ()])
)
def test_reductions_of_pieces(lengths, lead):
    """Of any lengths, along the last axis and along another."""
    keys = jax.random.split(jax.random.key(2), len(lengths))
    pieces = [jax.random.normal(k, (*lead, n)) for k, n in zip(keys, lengths, strict=True)]
    whole = jnp.concatenate(pieces, axis=-1)
    for both, many in ((jnp.add, jnp.sum), (jnp.maximum, jnp.max)):
        np.testing.assert_allclose(
            reduced(both, many, pieces, len(lead), halves=True), many(whole, -1), rtol=1e-5, atol=1e-5
        )
        turned = [jnp.moveaxis(p, -1, 0) for p in pieces]
        np.testing.assert_allclose(reduced(both, many, turned, 0, halves=True), many(whole, -1), rtol=1e-5, atol=1e-5)
