"""``discounted_sum`` of numbers of every dtype, against NumPy loops in float64; the last discount has no part in it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T = 5
QUICK = {"xla_llvm_disable_expensive_passes": True}
SLICES = {
    "t:": lambda t, n: (t, n),
    ":t + 1": lambda t, n: (0, t + 1),
    ":": lambda t, n: (0, n),
    "t + 1:": lambda t, n: (t + 1, n),
    "t:t + 2": lambda t, n: (t, min(t + 2, n)),
    "t:t + 3": lambda t, n: (t, min(t + 3, n)),
    "t:t + 4": lambda t, n: (t, min(t + 4, n)),
    "t - 1:t + 1": lambda t, n: (max(t - 1, 0), t + 1),
    "t - t % 2:t - t % 2 + 2": lambda t, n: (t - t % 2, min(t - t % 2 + 2, n)),
}
REWARDS = {d: np.array([1, 0, 2, 3, 1]).astype(d) for d in ("bool", "int8", "uint8", "int32", "float16", "float32")}
DISCOUNTS = {
    "0.99": 0.99,
    "1": 1,
    "bool slice": np.array([True, True, False, True, True]),
    "int slice": np.array([1, 2, 0, 1, 3], np.int32),
    "half slice": np.array([0.5, 0.25, 1.0, 0.75, 2.0], np.float16),
    "float slice": np.array([0.9, 0.5, 0.3, 0.7, 0.2], np.float32),
}


def total(rewards, discounts):
    out, weight = 0.0, 1.0
    for k, r in enumerate(rewards):
        out += weight * float(r)
        if k + 1 < len(rewards):
            weight *= float(discounts[k])
    return out


def by_hand(rewards, discounts, index):
    discounts = np.broadcast_to(discounts, (T,))
    spans = (SLICES[index](t, T) for t in range(T))
    return np.array([total(rewards[lo:hi], discounts[lo:hi]) for lo, hi in spans])


def sums(rewards, discounts, index, t):
    cut = eval(f"lambda x, t: x[{index}]")
    return rlfx.discounted_sum(
        cut(rlfx.inputs(rewards), t), cut(rlfx.inputs(discounts), t) if np.ndim(discounts) else discounts
    )


@pytest.mark.parametrize("index", SLICES)
def test_every_dtype(index):
    """The result has the dtype of the product, as jnp.sum gives it: no discount is cast to the rewards' integers."""
    members = list(itertools.product(REWARDS, DISCOUNTS))
    if index != "t:":
        members = members[:: 5 if "2" in index else 7]

    def f(_, c, t):
        return c, {m: sums(jnp.asarray(REWARDS[m[0]]), DISCOUNTS[m[1]], index, t) for m in members}

    out = jax.jit(lambda: rlfx.unroll(f, length=T)(None, None)[1], compiler_options=QUICK)()
    for r, d in members:
        got, discount = out[r, d], DISCOUNTS[d]
        kinds = {np.dtype(r).kind, np.asarray(discount).dtype.kind}
        assert jnp.issubdtype(got.dtype, jnp.floating if "f" in kinds else jnp.integer), (r, d, got.dtype)
        tolerance = 1e-2 if got.dtype == jnp.float16 else 1e-5
        np.testing.assert_allclose(got, by_hand(REWARDS[r], discount, index), rtol=tolerance, err_msg=f"{r}, {d}")


def test_in_the_dtypes_of_the_rewards_and_the_discounts():
    f32, f16 = jnp.ones(T, jnp.float32), jnp.ones(T, jnp.float16)

    def f(_, c, t):
        cases = [(f16, 0.9), (f16, np.ones(T, np.float32)), (f32, np.ones(T, np.float16)), (jnp.ones(T, bool), 1)]
        return c, [sums(r, d, "t:", t) for r, d in cases]

    got = [x.dtype for x in rlfx.unroll(f, length=T)(None, None)[1]]
    assert got == [jnp.float16, jnp.float32, jnp.float32, jnp.arange(1).dtype]


LAST = {
    index: [t for t in range(T) if all(t == hi - 1 or not lo <= t < hi for lo, hi in (s(u, T) for u in range(T)))]
    for index, s in SLICES.items()
}


@pytest.mark.parametrize("bad", [np.inf, np.nan], ids=["inf", "nan"])
def test_the_last_discount_is_not_used(bad):
    """Neither in values nor in gradients, however the sum is computed, and also where an episode ends before."""
    rewards = jnp.asarray(REWARDS["float32"])
    discounts = {}
    for index in SLICES:
        discounts[index] = np.array(DISCOUNTS["float slice"])
        discounts[index][LAST[index]] = bad
    assert sum(map(len, LAST.values())) > 9

    def f(d, c, t):
        each = [sums(rewards, d[index], index, t) for index in SLICES]
        return jnp.stack(each).sum(), c, each

    fn = rlfx.compile(f, length=T, reduce="sum")
    out, grads = jax.jit(
        jax.grad(lambda d: (lambda loss, rest: (loss, rest[1]))(*fn(d, None)), has_aux=True), compiler_options=QUICK
    )(jax.tree.map(jnp.asarray, discounts))[::-1]
    for got, (index, d) in zip(out, discounts.items(), strict=True):
        np.testing.assert_allclose(got, by_hand(REWARDS["float32"], d, index), rtol=1e-5, err_msg=index)

        def loss(d, index=index):
            return by_hand(REWARDS["float32"], d, index).sum()

        steps = 1e-6 * np.eye(T)
        expected = [(loss(d + s) - loss(d - s)) / 2e-6 if np.isfinite(d[i]) else 0.0 for i, s in enumerate(steps)]
        np.testing.assert_allclose(grads[index], expected, rtol=1e-4, atol=1e-5, err_msg=index)

    lengths = np.array([2, 4])

    def ended(d, c, t):
        x = rlfx.inputs(d)[t]
        return rlfx.discounted_sum(rlfx.series(c)[t:], rlfx.series(x)[t:]), c + 1

    two = np.array([[0.9, 0.5], [bad, 0.3], [1.0, 0.7], [1.0, bad], [1.0, 1.0]], np.float32)
    c0 = np.array([3.0, 1.0])  # until the carry is 5: after 2 and 4 timesteps
    fn = rlfx.compile(ended, length=T, batch=2, reduce="sum", until=lambda c: c >= 5.0)
    loss, grads = jax.value_and_grad(lambda d: fn(d, jnp.asarray(c0, jnp.float32))[0])(jnp.asarray(two))

    def expected_loss(d):
        each = [(np.arange(n) + c0[b], d[:n, b]) for b, n in enumerate(lengths)]
        return sum(total(r[t:], x[t:]) for r, x in each for t in range(len(r)))

    np.testing.assert_allclose(loss, expected_loss(two), rtol=1e-5)
    assert np.isfinite(grads).all()
    step = np.zeros_like(two, dtype=float)
    step[0, 1] = 1e-5
    derivative = (expected_loss(two + step) - expected_loss(two - step)) / 2e-5
    np.testing.assert_allclose(grads[0, 1], derivative, rtol=1e-4)


@pytest.mark.parametrize("jit", [True, False])
def test_of_one_reward(jit):
    """Without jit, jax has no loops of no iterations."""
    fn = rlfx.compile(lambda w, x, t: (rlfx.discounted_sum(rlfx.series(w * x)[t:], 0.5) ** 2, x), length=1)
    with jax.disable_jit(not jit):
        value, slope = jax.value_and_grad(lambda w: fn(w, jnp.float32(3.0))[0])(2.0)
    assert (value, slope) == (36.0, 36.0)
