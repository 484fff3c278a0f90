"""Slices that begin after an episode's end, where what is computed of it is infinite: their derivatives are those of loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T = 6
#: Bounds in rlfx, and in NumPy of t and the length n. With shorter episodes each of them begins after the end.
BOUNDS = {
    "1:": (lambda t: slice(1, None), lambda t, n: (1, n)),
    "2:4": (lambda t: slice(2, 4), lambda t, n: (2, 4)),
    "4:": (lambda t: slice(4, None), lambda t, n: (4, n)),
    "from t, or 2": (lambda t: slice(rlfx.maximum(t, 2), None), lambda t, n: (max(t, 2), n)),
    "t + 2:": (lambda t: slice(t + 2, None), lambda t, n: (t + 2, n)),
}
FORMS = {
    "times": (lambda s, h: jnp.sum(s * h), lambda s, h: sum(x * h for x in s)),
    "divided": (lambda s, h: jnp.sum(s / h), lambda s, h: sum(x / h for x in s)),
    "product": (lambda s, h: s @ jnp.full_like(s, h), lambda s, h: sum(x * h for x in s)),
    "tanh": (lambda s, h: jnp.sum(jnp.tanh(s * h) * s), lambda s, h: sum(np.tanh(x * h) * x for x in s)),
    "exp": (lambda s, h: jnp.sum(jnp.exp(s * h)), lambda s, h: sum(np.exp(x * h) for x in s)),
    "powers": (
        lambda s, h: jnp.cumsum(s * h).sum(),
        lambda s, h: sum(h * sum(s[: i + 1]) for i in range(len(s))),
    ),
}


def loops(form, bounds, xs, h, n):
    """The sum over one episode of length n."""
    total = 0.0
    for t in range(n):
        lo, hi = BOUNDS[bounds][1](t, n)
        total += FORMS[form][1]([xs[i] for i in range(max(lo, 0), min(hi, n))], h)
    return total


@pytest.mark.parametrize("bounds", BOUNDS)
def test_infinities_after_the_end(bounds: str):
    """Six functions, episodes of 1 to 6 timesteps: 36 members, 180 in all."""

    def program(h, carry, t):
        k, end = carry
        x = rlfx.series(jnp.where(k >= end, jnp.inf, jnp.sin(1.0 + k.astype(jnp.float32))))
        found = [f(x[BOUNDS[bounds][0](t)], h[i]) for i, (f, _) in enumerate(FORMS.values())]
        return jnp.stack(found) @ jnp.arange(1.0, 1.0 + len(FORMS), dtype=jnp.float32), (k + 1, end)

    run = rlfx.compile(program, length=T, reduce="sum", until=lambda c: c[0] >= c[1])
    both = jax.jit(jax.value_and_grad(lambda h, end: run(h, (jnp.int32(0), end))[0]))
    xs, h, weights = np.sin(1.0 + np.arange(T)), np.linspace(0.4, 1.1, len(FORMS)), np.arange(1.0, 1.0 + len(FORMS))
    for n in range(1, T + 1):
        each = lambda h, n=n: np.array([loops(f, bounds, xs, h[i], n) for i, f in enumerate(FORMS)])  # noqa: E731
        value, gradient = both(jnp.asarray(h, jnp.float32), jnp.int32(n))
        np.testing.assert_allclose(value, each(h) @ weights, rtol=1e-5, atol=1e-6)
        slopes = (each(h + 1e-6) - each(h - 1e-6)) / 2e-6
        np.testing.assert_allclose(gradient, weights * slopes, rtol=1e-4, atol=1e-5)
