"""Differentiable control by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twelfth import planned
from benchmarks.untuned.sealed_twelfth.planned import (
    CONTEXT,
    CONTROL,
    STATE,
    controls,
    cost_of,
    params_of,
)  # fmt: skip

# -- of one environment: ``squares @ found = right``, of two controls


def by_solve(squares, right):
    return jnp.linalg.solve(squares, right)


def by_cholesky(squares, right):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(squares), right)


def by_inverse(squares, right):
    """In closed form."""
    (k, l), (m, n) = squares
    return jnp.stack([jnp.stack([n, -l]), jnp.stack([-m, k])]) @ right / (k * n - l * m)


def joined_gains(p, cost, value, solve):
    """The state and a one as one vector: the gain's last column is the offset, and that of what it is worth the linear part."""
    (q, r, s), big = cost, value
    a, b = p["a"], p["b"]
    after = big[:, :STATE] @ a
    after = jnp.concatenate([after, big[:, STATE:]], -1)  # what follows, by the state now and by one
    mixed, squares = b.T @ after, jnp.diag(r) + b.T @ big[:, :STATE] @ b
    gain = -solve(squares, mixed)
    worth = jnp.concatenate([jnp.diag(q), s[:, None]], -1) + a.T @ after + mixed[:, :STATE].T @ gain
    return gain, worth


def separate(p, context, x, _solve, unroll):
    """Controls of one environment over all timesteps, gains and offsets apart."""
    return controls(p, context, x, unroll)


def joined(p, context, x, solve, unroll):
    def backwards(value, cost):
        gain, value = joined_gains(p, cost, value, solve)
        return value, gain

    def forwards(x, gain):
        u = gain[:, :STATE] @ x + gain[:, STATE]
        return p["a"] @ x + p["b"] @ u, u

    end = jnp.zeros((STATE, STATE + 1))
    made = jax.lax.scan(backwards, end, cost_of(p["net"], context), reverse=True, unroll=unroll)[1]
    return jax.lax.scan(forwards, x, made, unroll=unroll)[1]


def mapped(length, batch, of=joined, solve=by_inverse, unroll=1, chunk=None):
    """By `jax.vmap`; ``chunk``: so many environments after the others."""

    def run(p, x, data):
        over = jax.vmap(lambda p, x, context: of(p, context, x, solve, unroll), (None, 0, 1), 1)
        scale = 1.0 / (length * batch)
        loss = lambda p, part: scale * ((over(p, part[0], part[1]["context"]) - part[1]["control"]) ** 2).sum()  # noqa: E731
        if chunk is None:
            return jax.value_and_grad(loss)(p, (x, data))
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        return c.summed_gradient(loss, p, (c.in_chunks(x, chunk), parts))

    return run


# -- environments innermost: matrices ``[rows, columns, B]``, vectors ``[rows, B]``


def inverse_of(squares):
    (k, l), (_, n) = squares
    return jnp.stack([jnp.stack([n, -l]), jnp.stack([-l, k])]) / (k * n - l * l)


def times_sums(x, y):
    """Products of matrices, of which either may be shared, by sums of products."""
    return (x[:, :, None] * y[None]).sum(1)


def times_written(x, y):
    """The same, with its terms one after the other."""
    return functools.reduce(jnp.add, (x[:, i, None] * y[i] for i in range(len(y))))


def times_einsum(x, y):
    left, right = "ikb" if x.shape[-1] > 1 else "iko", "kjb" if y.shape[-1] > 1 else "kjo"
    return jnp.einsum(f"{left},{right}->ijb", x, y)


def times_matrix(x, y):
    """One product where either is shared."""
    if x.shape[-1] == 1:
        return (x[..., 0] @ y.reshape(len(y), -1)).reshape(len(x), *y.shape[1:])
    if y.shape[-1] == 1:
        return jnp.einsum("ikb,kj->ijb", x, y[..., 0])
    return times_written(x, y)


def turned(x):
    return x.swapaxes(0, 1)


def vector(times, x, y):
    return times(x, y[:, None])[:, 0]


def shared_of(p):
    return p["a"][..., None], p["b"][..., None]


def costs_innermost(net, context):
    """``[T, ..., B]``."""
    return tuple(x.swapaxes(1, 2) for x in cost_of(net, context))


def costs_in_columns(net, context):
    """The same with features first all along."""
    made = c.columns(net, context.reshape(-1, CONTEXT).T).reshape(-1, *context.shape[:2]).swapaxes(0, 1)
    q, r, s = jnp.split(made, [STATE, STATE + CONTROL], 1)
    return jax.nn.softplus(q), 0.2 + jax.nn.softplus(r), s


def gains_innermost(a, b, cost, value, times):
    """The gain, its inverse, and the value; linear parts are last columns."""
    (q, r, s), big = cost, value
    by_a, by_b = times(big[:, :STATE], a), times(big[:, :STATE], b)
    after = jnp.concatenate([by_a, big[:, STATE:]], 1)
    mixed, inverse = times(turned(b), after), inverse_of(times(turned(b), by_b) + diagonal(r))
    gain = -times(inverse, mixed)
    worth = jnp.concatenate([diagonal(q), s[:, None]], 1)
    return gain, inverse, worth + times(turned(a), after) + times(turned(mixed[:, :STATE]), gain)


def diagonal(x):
    return x[:, None] * jnp.eye(len(x))[..., None]


def rollout(a, b, gains, x, times, unroll):
    """Controls, and states before them, ``[T, ..., B]``."""

    def forwards(x, gain):
        u = vector(times, gain[:, :STATE], x) + gain[:, STATE]
        return vector(times, a, x) + vector(times, b, u), (u, x)

    return jax.lax.scan(forwards, x, gains, unroll=unroll)[1]


def innermost(length, batch, times=times_sums, costs=costs_innermost, unroll=1, again=False):
    def run(p, x, data):
        control, x = data["control"].swapaxes(1, 2), x.T

        def loss(p):
            a, b = shared_of(p)

            def backwards(value, cost):
                gain, _, value = gains_innermost(a, b, cost, value, times)
                return value, gain

            backwards = jax.checkpoint(backwards, prevent_cse=False) if again else backwards
            end = jnp.zeros((STATE, STATE + 1, batch))
            made = jax.lax.scan(backwards, end, costs(p["net"], data["context"]), reverse=True, unroll=unroll)[1]
            return ((rollout(a, b, made, x, times, unroll)[0] - control) ** 2).sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run


# -- the gradient of what is optimal is another such problem, with the same gains (Amos et al. 2018, theorem)


def weights_of(left, right):
    """Sums of outer products over timesteps and environments: of ``[T, rows, B]`` and ``[T, columns, B]``."""
    flat = lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1)  # noqa: E731
    return flat(left) @ flat(right).T


def weights_by_sums(left, right):
    return (left[:, :, None] * right[:, None]).sum((0, 3))


def followed(p, gain, inverse, x, control, scale, times, unroll):
    """Controls and states, what their slopes are worth, and those problems' controls and states."""
    a, b = shared_of(p)
    u, before = rollout(a, b, gain, x, times, unroll)
    slopes = 2.0 * scale * (u - control)

    def worth(later, xs):
        """As of linear costs: of controls alone."""
        gain, inverse, slope = xs
        right = slope + vector(times, turned(b), later)
        now = vector(times, turned(a), later) + vector(times, turned(gain[:, :STATE]), right)
        return now, (-vector(times, inverse, right), later)

    xs = gain, inverse, slopes
    offset, later = jax.lax.scan(worth, jnp.zeros_like(x), xs, reverse=True, unroll=unroll)[1]
    of_slopes = jnp.concatenate([gain[:, :, :STATE], offset[:, :, None]], 2)
    return u, before, later, *rollout(a, b, of_slopes, jnp.zeros_like(x), times, unroll)


def implicit(length, batch, times=times_sums, costs=costs_innermost, unroll=1, weights=weights_of, chunk=None):
    """Backwards the value and gains; forwards states; backwards what controls' slopes are worth; forwards their states."""
    scale = 1.0 / (length * batch)

    def solved(p, x, data):
        size, control, x = x.shape[0], data["control"].swapaxes(1, 2), x.T
        a, b = shared_of(p)
        cost, back = jax.vjp(lambda net: costs(net, data["context"]), p["net"])

        def backwards(value, cost):
            gain, inverse, before = gains_innermost(a, b, cost, value, times)
            return before, (gain, inverse, value)

        end = jnp.zeros((STATE, STATE + 1, size))
        gain, inverse, value = jax.lax.scan(backwards, end, cost, reverse=True, unroll=unroll)[1]
        u, before, later, by_u, by_x = followed(p, gain, inverse, x, control, scale, times, unroll)
        after = lambda x, u: jnp.einsum("ij,tjb->tib", p["a"], x) + jnp.einsum("ij,tjb->tib", p["b"], u)  # noqa: E731
        big = value[:, :, :STATE]
        price = (big * after(before, u)[:, None]).sum(2) + value[:, :, STATE]  # of states, by what is optimal
        by_price = (big * after(by_x, by_u)[:, None]).sum(2) + later
        of_net = back((by_x * before, by_u * u, by_x))[0]
        grads = {
            "a": weights(price, by_x) + weights(by_price, before), "b": weights(price, by_u) + weights(by_price, u),
            "net": of_net,
        }  # fmt: skip
        return scale * ((u - control) ** 2).sum(), grads

    def run(p, x, data):
        if chunk is None:
            return solved(p, x, data)
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        add = lambda total, part: (jax.tree.map(jnp.add, total, solved(p, *part)), None)  # noqa: E731
        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        return jax.lax.scan(add, none, (c.in_chunks(x, chunk), parts))[0]

    return run


def workload(length, batch, hidden, chunk=16):
    one, inner, theirs = (functools.partial(f, length, batch) for f in (mapped, innermost, implicit))
    column, written, matrix = {"costs": costs_in_columns}, {"times": times_written}, {"times": times_matrix}
    forms = {
        "rlfx": planned.by_rlfx(length, batch), "plain": planned.plain(length, batch),
        "time first": one(separate), "joined, solved": one(joined, by_solve), "joined, Cholesky": one(joined, by_cholesky),
        "joined": one(), "joined, unrolled by 2": one(unroll=2), f"joined, {chunk} environments": one(chunk=chunk),
        f"joined, solved, {chunk} environments": one(joined, by_solve, chunk=chunk),
        "environments innermost": inner(), "environments innermost, features first": inner(**column),
        "environments innermost, written": inner(**written, **column), "environments innermost, again": inner(again=True),
        "environments innermost, einsum": inner(times_einsum, **column),
        "environments innermost, matrix": inner(**matrix, **column),
        "environments innermost, unrolled by 2": inner(unroll=2, **column),
        "environments innermost, written, again": inner(again=True, **written, **column),
        "environments innermost, written, unrolled by 2": inner(unroll=2, **written, **column),
        "implicit": theirs(), "implicit, features first": theirs(**column), "implicit, written": theirs(**written, **column),
        "implicit, weights by sums": theirs(weights=weights_by_sums, **column),
        "implicit, einsum": theirs(times_einsum, **column),
        "implicit, matrix": theirs(**matrix, **column), "implicit, unrolled by 2": theirs(unroll=2, **column),
        "implicit, written, unrolled by 2": theirs(unroll=2, **written, **column),
        "implicit, written, unrolled by 4": theirs(unroll=4, **written, **column),
        f"implicit, {chunk} environments": theirs(chunk=chunk, **column),
        f"implicit, matrix, {2 * chunk} environments": theirs(chunk=2 * chunk, **matrix, **column),
        f"implicit, written, unrolled by 2, {2 * chunk} environments": theirs(unroll=2, chunk=2 * chunk, **written, **column),
        f"implicit, written, {4 * chunk} environments": theirs(chunk=4 * chunk, **written, **column),
        f"implicit, written, {chunk} environments": theirs(chunk=chunk, **written, **column),
        f"implicit, written, {2 * chunk} environments": theirs(chunk=2 * chunk, **written, **column),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 4), (length, batch)
    data = {"context": jax.random.normal(k[0], (*size, CONTEXT)), "control": 0.5 * jax.random.normal(k[1], (*size, CONTROL))}
    x = jax.random.normal(k[2], (batch, STATE))
    return Workload(forms, (params_of(k[3], hidden), x, data), tolerance=5e-5)
