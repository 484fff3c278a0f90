"""Calls with a rule of their own inside of loops and conditions of a timestep: against plain loops, timestep by timestep.

Of each product of a call and a construct the value, and the gradients with respect to weights of its own, the parameters and
the carry. The weights' gradient is a contraction over timesteps and environments inside of the construct.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T, B, N = 3, 2, 2


def layer(w, x):
    return jnp.tanh(w @ x)


def _own_vjp():
    made = jax.custom_vjp(layer)
    made.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda wx, g: (2.0 * jnp.outer(g, wx[1]), wx[0].T @ g))
    return made


def _own_jvp():
    made = jax.custom_jvp(layer)

    @made.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        out = layer(w, x)
        return out, out * (dw @ x) + 3.0 * (w @ dx)

    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, w, x):
    return factor * layer(w, x)


scaled.defvjp(
    lambda factor, w, x: (scaled(factor, w, x), (w, x)),
    lambda factor, wx, g: (factor * jnp.outer(g, wx[1]), 0.5 * wx[0].T @ g),
)


@jax.custom_gradient
def graded(w, x):
    return layer(w, x), lambda g: (jnp.outer(g, jnp.cos(x)), w.T @ g)


def solved(w, x):
    matrix = w @ w.T + 2.0 * jnp.eye(N, dtype=w.dtype)
    return jax.lax.custom_linear_solve(
        lambda y: matrix @ y, x, lambda mv, y: jnp.linalg.solve(matrix, y), symmetric=True
    )


def closed(w, x):
    """What jax itself makes of a loop with a checkpoint that is differentiated: calls that no user wrote."""
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda a, k: (jax.checkpoint(layer)(k * w, a), None), x, ONES)[0]))(
        x
    )


ONES = np.ones(2, np.float32)
own_vjp, own_jvp = _own_vjp(), _own_jvp()
SAVED = jax.checkpoint_policies.dots_saveable

#: ``(weights, vector) -> vector``.
CALLS = {
    "jit": jax.jit(layer),
    "custom_vjp": own_vjp,
    "custom_jvp": own_jvp,
    "nondiff_argnums": functools.partial(scaled, 0.7),
    "custom_gradient": graded,
    "checkpoint": jax.checkpoint(layer),
    "checkpoint, a policy": jax.checkpoint(lambda w, x: jnp.sin(layer(w, x)), policy=SAVED),
    "custom_linear_solve": solved,
    "a gradient": closed,
    "calls in calls": jax.checkpoint(jax.jit(lambda w, x: own_vjp(w, jax.checkpoint(own_jvp)(w, x)))),
    "jax.nn": lambda w, x: jax.nn.silu(w @ x) + jax.nn.logsumexp(x),
}


FACTORS = np.arange(1.0, 3.0, dtype=np.float32)


def layers(ws, xs):
    """Every call once, each with weights and a state of its own."""
    return jnp.stack([call(ws[i], xs[i]) for i, call in enumerate(CALLS.values())])


def _scanned(ws, xs, f=layers, **options):
    def body(a, k):
        out = f(k * ws, a)
        return out + xs, out

    return jax.lax.scan(body, xs, FACTORS, **options)


def _repeated(ws, xs):
    """Without a derivative in reverse: of values."""
    ws, xs = jax.lax.stop_gradient((ws, xs))
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layers(ws, s[1])), (jnp.int32(0), xs))[1]


def _chosen(ws, xs):
    return jax.lax.cond(xs[0, 0] > 0.1, layers, lambda ws, xs: 0.5 * xs, ws, xs)


#: ``(weights of the calls, their states) -> states``.
INSIDE = {
    "scan": lambda ws, xs: _scanned(ws, xs)[0],
    "what a scan stacks, from the last": lambda ws, xs: _scanned(ws, xs, reverse=True)[1].sum(0),
    "while_loop": _repeated,
    "cond in scan": lambda ws, xs: _scanned(ws, xs, _chosen)[0],
    "scan in checkpoint in scan": lambda ws, xs: _scanned(ws, xs, jax.checkpoint(lambda w, x: _scanned(w, x)[0]))[0],
}
SIZES = (len(INSIDE), len(CALLS), N)


def point(ws, xs):
    """In the first constructs, as many as there are weights."""
    return jnp.stack([inside(w, x) for inside, w, x in zip(INSIDE.values(), ws, xs, strict=False)])


def program(ws, xs, t):
    values = point(ws, xs)
    return jnp.sum(values * rlfx.series(jnp.cos(xs))[t]), 1.3 * xs, values


def by_hand(ws, xs):
    def one(xs):
        values = point(ws, xs)
        return jnp.sum(values * jnp.cos(xs)), values

    losses, values = jax.vmap(one)(jnp.concatenate([1.3**t * xs for t in range(T)]))
    return losses.sum(), values.reshape(T, *xs.shape)


@functools.cache
def truth(inside: int):
    """Weights and states of the first so many constructs, and the outcome."""
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.uniform(-0.8, 0.8, (*SIZES, N)), jnp.float32)[:inside]
    xs = jnp.asarray(rng.uniform(-1, 1, (B, *SIZES)), jnp.float32)[:, :inside]
    return (ws, xs), jax.jit(jax.value_and_grad(by_hand, (0, 1), has_aux=True))(ws, xs)


CASES = [
    pytest.param(rlfx.Plan(), len(INSIDE) - 1, id="at once, all but the nested loops"),
    pytest.param(rlfx.Plan(), len(INSIDE), id="at once", marks=pytest.mark.slow),
    pytest.param(rlfx.Plan("blocks", 2), len(INSIDE), id="in blocks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plan", "inside"), CASES)
def test_calls_keep_their_rules_inside_of_loops(plan: rlfx.Plan, inside: int):
    assert len(INSIDE) * len(CALLS) >= 50
    arguments, ((loss, values), gradients) = truth(inside)
    fn = rlfx.compile(program, length=T, batch=B, reduce="sum", plan=plan)
    (got, (_, mine)), slopes = jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(*arguments)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(mine, values, rtol=1e-5, atol=1e-5)
    for found, expected in zip(slopes, gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_reference_has_them_too():
    """In a scan, at one timestep and two environments: it evaluates point by point."""
    (ws, xs), _ = truth(1)
    fn = rlfx.reference(program, length=1, batch=B, reduce="sum")
    outcomes = [
        jax.jit(jax.value_and_grad(loss, (0, 1)))(ws[:1], xs[:, :1])
        for loss in (
            lambda w, x: fn(w, x)[0],
            lambda w, x: jnp.sum(jax.vmap(point, (None, 0))(w, x) * jnp.cos(x)),
        )
    ]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), *outcomes)
