"""Slices with a step against loops of NumPy: values and gradients, in acting and in the learner, and in the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError
from tests.sampling import spread

T, B = 7, 2
XS = np.random.default_rng(0).normal(size=(T, B)).astype(np.float32)

#: How it is read, and the range that it is at t of N timesteps.
PAST = {
    "x[:t + 1:3]": (lambda x, t: x[: t + 1 : 3], lambda t, n: (0, t + 1, 3)),
    "x[:t:2]": (lambda x, t: x[:t:2], lambda t, n: (0, t, 2)),
    "x[t - 5:t + 1:2]": (lambda x, t: x[t - 5 : t + 1 : 2], lambda t, n: (t - 5, t + 1, 2)),
    "x[t - 3:t:2]": (lambda x, t: x[t - 3 : t : 2], lambda t, n: (t - 3, t, 2)),
    "x[t - t % 4:t + 1:2]": (lambda x, t: x[t - t % 4 : t + 1 : 2], lambda t, n: (t - t % 4, t + 1, 2)),
}
ANY = PAST | {
    "x[::2]": (lambda x, t: x[::2], lambda t, n: (0, n, 2)),
    "x[2:6:3]": (lambda x, t: x[2:6:3], lambda t, n: (2, 6, 3)),
    "x[t::2]": (lambda x, t: x[t::2], lambda t, n: (t, n, 2)),
    "x[t + 1::2]": (lambda x, t: x[t + 1 :: 2], lambda t, n: (t + 1, n, 2)),
    "x[t:t + 20:4]": (lambda x, t: x[t : t + 20 : 4], lambda t, n: (t, t + 20, 4)),
    "x[t - 2:t + 3:2]": (lambda x, t: x[t - 2 : t + 3 : 2], lambda t, n: (t - 2, t + 3, 2)),
    "x[t - t % 4:t - t % 4 + 4:2]": (
        lambda x, t: x[t - t % 4 : t - t % 4 + 4 : 2],
        lambda t, n: (t - t % 4, t - t % 4 + 4, 2),
    ),
    "minimum": (
        lambda x, t: x[rlfx.maximum(t - 2, 1) : rlfx.minimum(t + 4, 6) : 2],
        lambda t, n: (max(t - 2, 1), min(t + 4, 6), 2),
    ),
}


def weighed(s):
    """A sum in which each row has another weight."""
    return (s * (1.0 + jnp.arange(s.shape[0], dtype=s.dtype))).sum()


def rows(x, bounds, t):
    return [x[k] for k in range(*bounds(t, len(x))) if 0 <= k < len(x)]


def looped(x, bounds, t):
    return sum((j + 1) * v for j, v in enumerate(rows(x, bounds, t)))


def differences(fn, w, eps=1e-2):
    return (fn(w + eps) - fn(w - eps)) / (2 * eps)


@pytest.mark.parametrize("ends", spread([(7, 4), None], 1))
def test_slices_of_complete_series(ends):
    def f(w, c, t):
        x = rlfx.series(jnp.sin(w * rlfx.inputs(XS)[t]))
        ys = {name: weighed(read(x, t)) for name, (read, _) in ANY.items()}
        return sum(y**2 for y in ys.values()), {"n": c["n"] + 1, "end": c["end"]}, ys

    def numpy(w):
        ys = {name: np.zeros((T, B)) for name in ANY}
        for b, n in enumerate(ends or (T, T)):
            x = np.sin(w * XS[:n, b].astype(np.float64))
            for name, (_, bounds) in ANY.items():
                ys[name][:n, b] = [looped(x, bounds, t) for t in range(n)]
        return ys

    options = {
        "length": T,
        "batch": B,
        "reduce": "sum",
        "until": None if ends is None else lambda c: c["n"] >= c["end"],
    }
    carry = {"n": jnp.zeros(B, jnp.int32), "end": jnp.array(ends or (T + 1, T + 1))}
    loss = lambda w: sum((y**2).sum() for y in numpy(w).values())  # noqa: E731
    for make in (
        (rlfx.compile,) if ends else (rlfx.compile, rlfx.reference)
    ):  # interpreted, every end is a trace of its own
        fn = make(f, **options)
        (total, (_, ys, *_)), slope = jax.value_and_grad(lambda w, fn=fn: fn(w, carry), has_aux=True)(jnp.float32(1.3))
        for name, wanted in numpy(1.3).items():
            got = np.broadcast_to(ys[name], wanted.shape)  # x[::2] is the same at every timestep
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(total, loss(1.3), rtol=1e-4)
        np.testing.assert_allclose(slope, differences(loss, 1.3, 1e-4), rtol=1e-3)


def test_slices_of_ones_own_past():
    def f(w, c, t):
        x = rlfx.series(jnp.sin(w * c))
        c = 0.1 * sum(weighed(read(x, t)) for read, _ in PAST.values()) + rlfx.inputs(XS)[t]
        return c**2, c, c

    def numpy(w):
        cs = np.zeros((T, B))
        for b in range(B):
            c, x = 0.5, []
            for t in range(T):
                x.append(np.sin(w * c))
                padded = x + [np.nan] * (T - t - 1)
                c = 0.1 * sum(looped(padded, bounds, t) for _, bounds in PAST.values()) + float(XS[t, b])
                cs[t, b] = c
        return cs

    loss = lambda w: (numpy(w) ** 2).sum()  # noqa: E731
    for make in (rlfx.compile, rlfx.reference):
        fn = make(f, length=T, batch=B, reduce="sum")
        (_, (_, cs)), slope = jax.value_and_grad(lambda w, fn=fn: fn(w, jnp.full(B, 0.5)), has_aux=True)(
            jnp.float32(0.7)
        )
        np.testing.assert_allclose(cs, numpy(0.7), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(slope, differences(loss, 0.7, 1e-4), rtol=1e-3)


REFUSED = {
    "x[::-1]": (lambda x, t: x[::-1], r"got -1.*Fix: .*jnp\.flip\(x\[:\]\)"),
    "x[t:t + 9:-3]": (lambda x, t: x[t : t + 9 : -3], r"got -3.*Fix: .*jnp\.flip\(x\[t:t \+ 9:3\]\)"),
    "x[::0]": (lambda x, t: x[::0], "got 0"),
    "x[::1.5]": (
        lambda x, t: x[::1.5],
        r"got 1\.5.*Fix: Give a number, x\[:4\]|got 1\.5.*Fix: Give a number, x\[::4\]",
    ),
    "x[::t]": (lambda x, t: x[::t], r"x\[:\]\[i\] with an array of integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_is_a_positive_integer(name):
    read, text = REFUSED[name]
    with pytest.raises(DomainError, match="(?s)The step of a slice of a series is a positive integer, .*" + text):
        rlfx.unroll(lambda _, c, t: (c, read(rlfx.series(1.0 * t), t).sum()), length=4)(None, None)
