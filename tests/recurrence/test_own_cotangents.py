"""A derivative of one's own sees the cotangent of its own point, also where the value is the same at all points."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.sampling import spread

T, B = 2, 2


def _vjp(fn, backward):
    made = jax.custom_vjp(fn)
    made.defvjp(lambda *xs: (fn(*xs), xs), backward)
    return made


#: Functions of what varies and of a parameter, whose values do not vary.
FUNCTIONS = {
    "the parameter": _vjp(lambda c, p: p, lambda cp, g: (0.0 * g, cp[0] * g)),
    "a product": _vjp(lambda c, p: p * p, lambda cp, g: (3.0 * g, cp[0] * cp[1] * g)),
    "nothing": _vjp(lambda c, p: jnp.zeros_like(p), lambda cp, g: (cp[1] * g, (1.0 + cp[0]) * g)),
    "not linear": _vjp(lambda c, p: 2.0 * p, lambda cp, g: (g, jnp.clip(g, -1.5, 1.5) * cp[0])),
    "a rule without what varies": _vjp(lambda c, p: jnp.sin(p), lambda cp, g: (jnp.cos(g), 7.0 * g)),
    "beside an integer": (lambda f: lambda c, p: f((10.0 * c).astype(jnp.int32), c, p))(
        _vjp(lambda i, c, p: p, lambda icp, g: (None, g, icp[0].astype(g.dtype) * g))
    ),
    "two values": _vjp(lambda c, p: (p, c * p), lambda cp, g: (g[0] - g[1], cp[0] * (g[0] + 2.0 * g[1]))),
}


#: Their rules are not linear: they are called once for what does not vary, such as a state that is never changed.
NOT_LINEAR = [FUNCTIONS["not linear"], FUNCTIONS["a rule without what varies"]]


def _looped(f, c, p):
    return jax.lax.scan(
        lambda a, w: (a + w * jnp.sum(jnp.stack(jax.tree.leaves(f(c, p)))), None),
        0.0 * c,
        jnp.arange(1.0, 3.0, dtype=jnp.float32),
    )[0]


#: Where they are called: a function, what varies, a parameter -> values.
CALLS = {
    "at once": lambda f, c, p: f(c, p),
    "in jit": lambda f, c, p: jax.jit(lambda c, p: f(c, p))(c, p),
    "in checkpoint": lambda f, c, p: jax.checkpoint(lambda c, p: f(c, p))(c, p),
    "in scan": _looped,
    "in cond": lambda f, c, p: jax.lax.cond(c > 1.5, lambda c: f(c, p), lambda c: f(2.0 * c, p), c),
    "in vmap": lambda f, c, p: jax.vmap(f)(jnp.stack([c, c + 1.0]), jnp.stack([p, p])),
    "in another": lambda f, c, p: _vjp(lambda c, p: f(c, p), lambda cp, g: jax.vjp(f, *cp)[1](g))(c, p),
    "in jit in scan": lambda f, c, p: _looped(jax.jit(f), c, p),
}
CASES = list(itertools.product(FUNCTIONS.values(), CALLS.values()))


def total(tree):
    return sum(jnp.sum(x * (1.0 + i)) for i, x in enumerate(jax.tree.leaves(tree)))


def point(ps, c, q, t):
    """The losses of one timestep of one environment, plain jax: of a value that varies with t, b, or both."""
    operands = [(c, 1.0 + c), (t, 2.0 + c), (q, 1.0 - 0.5 * c)]
    losses = []
    for i, (p, (f, call)) in enumerate(zip(ps, CASES, strict=True)):
        x, weight = operands[0 if f in NOT_LINEAR else i % 3]
        losses.append(total(call(f, x, p)) * weight)
    return sum(losses)


def expected(ps, c, q):
    """A loop over timesteps and environments."""
    losses = [point(ps, c[b] * 1.5**t, q[b], jnp.float32(t)) for t in range(T) for b in range(B)]
    return sum(losses)


def program(ps, carry, t):
    c, q = carry
    c = rlfx.series(c)[t]
    return point(ps, c, q, t.now.astype(jnp.float32)), (1.5 * c, q)


@pytest.fixture(scope="module")
def truth():
    ps = jnp.linspace(0.3, 1.2, len(CASES), dtype=jnp.float32)
    arguments = (ps, jnp.array([1.0, -0.6], jnp.float32), jnp.array([0.7, 2.0], jnp.float32))
    return arguments, jax.jit(jax.value_and_grad(expected, argnums=(0, 1, 2)))(*arguments)


@pytest.mark.parametrize("kind", spread(["blocks", "compile", "reference"], 1))
def test_every_point_calls_the_rule_with_its_own_cotangent(kind, truth):
    assert len(CASES) >= 50
    (ps, c, q), (value, gradients) = truth
    make = rlfx.reference if kind == "reference" else rlfx.compile
    plan = {"plan": rlfx.Plan("blocks", 1)} if kind == "blocks" else {}
    fn = make(program, length=T, batch=B, reduce="sum", **plan)
    gradient = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)
    (got, _), (in_ps, (in_c, in_q)) = (gradient if kind == "reference" else jax.jit(gradient))(ps, (c, q))
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for mine, theirs in zip((in_ps, in_c, in_q), gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5)


def test_slices_too():
    same = FUNCTIONS["a product"]

    def f(p, c, t):
        x = rlfx.series(c)
        return total(same(x[t:], p * jnp.ones_like(x[t:])) * x[t:]) + total(same(x[t].sum(), p) * x[: t + 1]), 2.0 * c

    def loops(p):
        x = 1.1 * 2.0 ** jnp.arange(float(T), dtype=jnp.float32)
        return sum(
            total(same(x[t:], p * jnp.ones(T - t, jnp.float32)) * x[t:]) + total(same(x[t], p) * x[: t + 1])
            for t in range(T)
        )

    fn = rlfx.compile(f, length=T, reduce="sum")
    got = jax.grad(lambda p: fn(p, jnp.float32(1.1))[0])(jnp.float32(0.4))
    np.testing.assert_allclose(got, jax.grad(loops)(jnp.float32(0.4)), rtol=1e-5)
