"""``rlfx.series(v, window=n)``: lookups with a promise how far back, against loops of NumPy, and what a loop keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError

T, B, N = 9, 2, 3


def f(w, c, t, outside="fill"):
    x = rlfx.series(jnp.sin(w * c), window=N)
    back = jnp.floor(jnp.abs(7.0 * c)).astype(jnp.int32) % 5
    seen = x.lookup(t.now - back, outside=outside)
    seen = jnp.where(jnp.isnan(seen), 0.3, seen)
    c = 0.5 * c + seen + 0.1
    return c**2, c, (c, back)


def numpy(w, start, outside):
    cs = np.zeros((T, B))
    for b in range(B):
        c, x = float(start[b]), []
        for t in range(T):
            x.append(np.sin(w * c))
            s, oldest = t - int(np.floor(abs(7.0 * c))) % 5, max(0, t - N + 1)
            seen = x[max(s, oldest)] if s >= oldest or outside == "clip" else 0.3
            c = 0.5 * c + seen + 0.1
            cs[t, b] = c
    return cs


@pytest.mark.parametrize("outside", ["fill", "clip"])
def test_lookups_reach_as_far_as_was_promised(outside):
    start = np.array([0.42, 0.77], np.float32)
    loss = lambda w: (numpy(w, start, outside) ** 2).sum()  # noqa: E731
    slope = (loss(0.7 + 1e-6) - loss(0.7 - 1e-6)) / 2e-6
    for make in (rlfx.compile, rlfx.reference):
        fn = make(lambda w, c, t: f(w, c, t, outside), length=T, batch=B, reduce="sum")
        (_, (_, (cs, back))), got = jax.value_and_grad(lambda w, fn=fn: fn(w, start), has_aux=True)(jnp.float32(0.7))
        assert (back >= N).any()
        np.testing.assert_allclose(cs, numpy(0.7, start, outside), rtol=1e-4)
        np.testing.assert_allclose(got, slope, rtol=1e-3)


def test_a_loop_keeps_no_more_than_was_promised():
    def bytes_of(length):
        def program(w, c, t):
            x = rlfx.series(w * c, window=4)
            return x.lookup(t.now - jnp.int32(jnp.abs(c[0])) % 4).sum(0) * jnp.ones(64) + 0.1, rlfx.Last(c)

        fn = jax.jit(rlfx.unroll(program, length=length))
        return fn.lower(jnp.float32(0.5), jnp.ones(64)).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(10) == bytes_of(1000)


@pytest.mark.parametrize(
    "read", [lambda x, t: x[t - 3], lambda x, t: x[: t + 1].sum(), lambda x, t: x.window(-3, 1).sum()]
)
def test_what_reads_further_back_is_refused(read):
    def program(_, c, t):
        return c, read(rlfx.series(1.0 * t, start=0.0, window=N), t)

    with pytest.raises(
        DomainError, match=r"(?s)promised to be read at most 2 back.*Fix: Name it with rlfx\.series\(v, window="
    ):
        rlfx.unroll(program, length=6)(None, None)
