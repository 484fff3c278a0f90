"""Functions with a derivative of their own keep it, whatever they are called on: against plain jax, timestep by timestep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ProgramError, UnsupportedSliceOp

T = 3


def _vjp(fn, backward):
    made = jax.custom_vjp(fn)
    made.defvjp(lambda *xs: (fn(*xs), xs), backward)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def scaled(factor, x, power):
    return factor * x


scaled.defvjp(lambda factor, x, power: (factor * x, x), lambda factor, power, x, g: (g * jnp.cos(x) * power,))


@jax.custom_jvp
def outer(x, y):
    return x * jnp.sum(y)


@outer.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return outer(x, y), 3.0 * dx * jnp.sum(y) + 5.0 * x * jnp.sum(dy * y)


@jax.custom_jvp
def tripled(x):
    return jnp.sin(x)


tripled.defjvps(lambda dx, out, x: 3.0 * dx * out)

reverse = _vjp(lambda x: x, lambda _, g: (-g,))
clipped = _vjp(lambda x: x, lambda _, g: (jnp.clip(g, -0.3, 0.3),))  # not linear in the cotangent
of_all = _vjp(lambda x: 1.5 * x, lambda xs, g: (g * jnp.sum(xs[0]) + jnp.max(g),))
product = _vjp(lambda w, x: w @ x, lambda wx, g: (2.0 * g * wx[1], 3.0 * g * wx[0]))
picked = _vjp(lambda x, i: jnp.where(i > 1, x, 2.0 * x), lambda xi, g: (g * xi[1].astype(g.dtype), None))
two = _vjp(lambda x: (x.sum(), 2.0 * x), lambda xs, g: (g[0] * xs[0] + 0.5 * g[1],))

#: ``(values of a slice, a parameter, weights of its length) -> scalar``.
FUNCTIONS = {
    "reverse": lambda s, p, w: jnp.sum(w * reverse(s)),
    "clipped": lambda s, p, w: jnp.sum(w * clipped(s) * s),
    "of all": lambda s, p, w: jnp.sum(w * of_all(s)),
    "product": lambda s, p, w: product(w * p, s),
    "integers": lambda s, p, w: jnp.sum(w * picked(s, jnp.arange(s.shape[0]))),
    "two results": lambda s, p, w: two(s)[0] + jnp.sum(w * two(s)[1]),
    "nondiff_argnums": lambda s, p, w: jnp.sum(w * scaled(2.0, s, 3.0)),
    "vmap": lambda s, p, w: jnp.sum(w * jax.vmap(lambda x: of_all(jnp.stack([x, p])).sum())(s)),
    "jvp": lambda s, p, w: jnp.sum(w * tripled(s)),
    "jvp of two": lambda s, p, w: jnp.sum(w * outer(p, s)) + jnp.sum(outer(s, s[:1])),
    "sum": lambda s, p, w: jnp.sum(w * tripled(jnp.cumsum(s)) * reverse(p)),
    "nested": lambda s, p, w: jnp.sum(w * jax.jit(lambda x: reverse(tripled(x)))(clipped(s))),
    "checkpoint": lambda s, p, w: jnp.sum(w * jax.checkpoint(lambda x: tripled(x) * x)(s)),
    "relu": lambda s, p, w: jnp.sum(w * jax.nn.relu(s - p)),  # 0 at the first timestep: a derivative of 0, not of 1/2
    "logaddexp": lambda s, p, w: jnp.sum(w * jnp.logaddexp(s, p)),
    "sinc": lambda s, p, w: jnp.sum(w * jnp.sinc(s)),
    "xlogy": lambda s, p, w: jnp.sum(w * jax.scipy.special.xlogy(s, s)),
}
SLICES = {
    "past": (lambda x, t: x[: t + 1], lambda t: (0, t + 1)),
    "future": (lambda x, t: x[t:], lambda t: (t, T)),
    "window": (lambda x, t: x[t - 1 : t + 2], lambda t: (max(t - 1, 0), min(t + 2, T))),
}


def weights(n):
    return jnp.cos(jnp.arange(n).astype(jnp.float32))


def expected(ps, c):
    """The loss of every function and slice, each with a parameter of its own: timestep by timestep, on plain arrays."""
    losses = []
    for i, fn in enumerate(FUNCTIONS.values()):
        for j, (_, bounds) in enumerate(SLICES.values()):
            x = ps[i, j] * c * 1.3 ** np.arange(T, dtype=np.float32)
            losses.append(sum(fn(x[lo:hi], ps[i, j], weights(hi - lo)) for lo, hi in map(bounds, range(T))))
    return sum(losses), jnp.stack(losses).reshape(ps.shape)


def program(ps, c, t):
    def loss(p, fn, of):
        s = of(rlfx.series(p * c), t)
        return fn(s, p, weights(s.shape[0]))

    losses = [
        loss(ps[i, j], fn, of) for i, fn in enumerate(FUNCTIONS.values()) for j, (of, _) in enumerate(SLICES.values())
    ]
    return sum(losses), c * 1.3, jnp.stack(losses).reshape(ps.shape)


def test_functions_of_slices_keep_the_derivative_they_are_given():
    ps, c = jnp.full((len(FUNCTIONS), len(SLICES)), 0.7, jnp.float32), jnp.float32(1.0)
    (_, values), gradients = jax.value_and_grad(expected, has_aux=True)(ps, c)
    fn = rlfx.compile(program, length=T, reduce="sum")
    (_, (_, losses)), got = jax.jit(jax.value_and_grad(fn, has_aux=True))(ps, c)
    np.testing.assert_allclose(losses.sum(0), values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, gradients, rtol=1e-4, atol=1e-5)


def test_the_derivative_is_one_of_each_timestep_and_environment_whoever_evaluates():
    def f(p, c, t):
        x = rlfx.series(p * c)
        return jnp.sum(clipped(x[: t + 1]) ** 2) + jnp.sum(tripled(x[t:])), c * 1.3

    p, c = jnp.float32(0.7), jnp.array([1.0, -0.5], jnp.float32)
    kinds = (
        rlfx.reference(f, length=T, batch=2),
        rlfx.reference(rlfx.trace(f, p, c, length=T, batch=2)),
        rlfx.compile(f, length=T, batch=2),
        rlfx.compile(rlfx.vectorize(f), length=T, batch=2),
    )
    first, *others = (jax.grad(lambda p, c, fn=fn: fn(p, c)[0], argnums=(0, 1))(p, c) for fn in kinds)
    for other in others:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), other, first)


def closing(inside, with_vjp):
    def f(p, c, t):
        x = rlfx.series(p * c)
        h = (jax.custom_vjp if with_vjp else jax.custom_jvp)(lambda y: y + inside(x, y, t))
        h.defvjp(lambda y: (h(y), None), lambda _, g: (-g,)) if with_vjp else h.defjvps(lambda dy, out, y: 3.0 * dy)
        return jnp.sum(h(p * c)), c

    return f


#: What reads other timesteps: 26, each in a ``custom_vjp`` and in a ``custom_jvp``.
READING = [
    lambda x, y, t: x[t],
    lambda x, y, t: x[0],
    lambda x, y, t: x[t // 2],
    lambda x, y, t: x[t.length - 1],
    lambda x, y, t: x[rlfx.minimum(t + 1, t.length - 1)],
    lambda x, y, t: rlfx.series(y, start=0.0)[t - 1],
    lambda x, y, t: rlfx.series(y, end=0.0)[t + 1],
    lambda x, y, t: x[: t + 1].sum(),
    lambda x, y, t: x[:].max(),
    lambda x, y, t: x[t - 1 : t + 1].mean(),
    lambda x, y, t: jax.lax.stop_gradient(x[t:]).sum(),
    lambda x, y, t: rlfx.series(y)[t:].sum(),
    lambda x, y, t: jnp.cumsum(x[: t + 1])[0],
    lambda x, y, t: rlfx.discounted_sum(x[t:], 0.9),
    lambda x, y, t: x.window(-1, 1).sum(),
    lambda x, y, t: rlfx.series(y).window(0, 2, fill=1.0)[1],
    lambda x, y, t: x.lookup(0),
    lambda x, y, t: rlfx.series(y).lookup(t.now),
    lambda x, y, t: rlfx.solve(lambda a: 0.5 * a[t - 1], start=1.0),
    lambda x, y, t: rlfx.solve(lambda a: y + a[t + 1], end=1.0),
    lambda x, y, t: rlfx.mean(y),
    lambda x, y, t: rlfx.sum(y, "t"),
    lambda x, y, t: rlfx.last(y),
    lambda x, y, t: rlfx.std(y),
    lambda x, y, t: jax.jit(lambda z: z * x[t])(y),
    lambda x, y, t: jax.lax.cond(y > 0, lambda: x[0], lambda: y),
]


@pytest.mark.parametrize("with_vjp", [True, False])
def test_a_function_with_a_derivative_of_its_own_may_not_read(with_vjp):
    assert 2 * len(READING) >= 50
    text = r"derivative of its own(.|\n)*pass the value as an argument: f\(y, x\[t\]\)"
    for inside in READING:
        for make in (rlfx.compile, rlfx.reference):
            with pytest.raises(ProgramError, match=text):
                make(closing(inside, with_vjp), length=T)(1.0, 1.0)


def test_nor_close_over_a_value_of_the_program_when_it_is_called_on_a_slice():
    def f(p, c, t):
        h = _vjp(lambda s: s * p, lambda _, g: (g,))
        return jnp.sum(h(rlfx.series(c)[: t + 1])), c

    with pytest.raises(ProgramError, match="closes over a value of the program"):
        rlfx.compile(f, length=T)(1.0, 1.0)


def test_a_rule_without_meaning_on_a_slice_is_refused_where_it_is_needed():
    odd = _vjp(lambda x: x, lambda _, g: (g[jnp.array([0])] * jnp.ones(T, jnp.float32),))

    def f(p, c, t):
        return jnp.sum(odd(rlfx.series(p * c)[: t + 1])), c

    fn = rlfx.compile(f, length=T)
    fn(1.0, 1.0)
    with pytest.raises(
        UnsupportedSliceOp, match=r"derivative that this function is given(.|\n)*test_custom_derivatives.py"
    ):
        jax.grad(lambda p: fn(p, 1.0)[0])(1.0)
