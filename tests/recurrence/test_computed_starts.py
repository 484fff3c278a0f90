"""Start values that a program computes, under every plan that is legal: against a loop over timesteps and environments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T, B = 5, 2

#: ``(parameter, its data for each environment, state) -> start``: the first value that reads before the first timestep give.
STARTS = {
    "a parameter": lambda p, d, c: p,
    "twice it": lambda p, d, c: 2.0 * p,
    "a function of it": lambda p, d, c: jnp.sin(p) + 1.0,
    "of 16 bits": lambda p, d, c: p + jax.lax.stop_gradient(jnp.tanh(p)).astype(jnp.bfloat16).astype(jnp.float32),
    "a call": lambda p, d, c: jax.jit(jax.nn.softplus)(p),
    "a loop": lambda p, d, c: jax.lax.fori_loop(0, 2, lambda i, x: x * p + 0.1, 0.3),
    "a condition": lambda p, d, c: jax.lax.cond(p > 0.3, lambda: p * p, lambda: -p),
    "of data": lambda p, d, c: p * jnp.cos(d),
    "of the first state": lambda p, d, c: p * jax.lax.stop_gradient(c) + d,
    "stopped": lambda p, d, c: jax.lax.stop_gradient(3.0 * p),
    "a constant": lambda p, d, c: 0.25,
}
#: ``(parameter, what varies, start, t) -> value``, and the same from values so far: ``(parameter, xs, start) -> value``.
READERS = {
    "a recurrence": lambda p, x, s, t: rlfx.solve(lambda a: 0.5 * jnp.sin(a[t - 1]) + p * x, start=s),
    "the one before": lambda p, x, s, t: p * x * rlfx.series(x, start=s)[t - 1],
    "two before": lambda p, x, s, t: p * x + rlfx.series(jnp.cos(x), start=s)[t - 2],
    "of what is learned": lambda p, x, s, t: x * jax.lax.stop_gradient(rlfx.series(p * x, start=s)[t - 1]) + p * x,
    "a loop of the actor": lambda p, x, s, t: p * x * jax.lax.stop_gradient(rlfx.solve(lambda a: 0.6 * a[t - 1] + x, start=s)),
}  # fmt: skip


def _recurrence(p, xs, s):
    a = s
    for x in xs:
        a = 0.5 * jnp.sin(a) + p * x
    return a


def _summed(p, xs, s):
    a = s
    for x in xs:
        a = 0.6 * a + x
    return p * xs[-1] * jax.lax.stop_gradient(a)


BY_HAND = {
    "a recurrence": _recurrence,
    "the one before": lambda p, xs, s: p * xs[-1] * (xs[-2] if len(xs) > 1 else s),
    "two before": lambda p, xs, s: p * xs[-1] + (jnp.cos(xs[-3]) if len(xs) > 2 else s),
    "of what is learned": lambda p, xs, s: (
        xs[-1] * jax.lax.stop_gradient(p * xs[-2] if len(xs) > 1 else s) + p * xs[-1]
    ),
    "a loop of the actor": _summed,
}
PLANS = [rlfx.Plan("blocks", 2), rlfx.Plan("blocks", 2, 1), rlfx.Plan("blocks", 2, offload=1), rlfx.Plan("stream", 2)]
PLANS += [rlfx.Plan("replay", 2)]


#: What is learned from in blocks, as no gradient flows through its reads.
IN_BLOCKS = {"of what is learned", "a loop of the actor"}


def arguments():
    ps = jnp.linspace(0.2, 0.8, len(STARTS), dtype=jnp.float32)
    return ps, {"x": jnp.array([0.4, -0.7], jnp.float32), "d": jnp.array([0.3, 1.2], jnp.float32)}


def program(reader):
    def f(ps, carry, t):
        x, d = carry["x"], carry["d"]
        values = [READERS[reader](p, x, start(p, d, d), t) for p, start in zip(ps, STARTS.values(), strict=True)]
        return (
            sum((1.0 + i) * v for i, v in enumerate(values)),
            {"x": jax.lax.stop_gradient(jnp.cos(x)), "d": d},
            values,
        )

    return f


def by_hand(reader, ps, carry):
    found = np.zeros((T, B), object)
    for b in range(B):
        d, xs = carry["d"][b], []
        for t in range(T):
            xs.append(carry["x"][b] if t == 0 else jnp.cos(xs[-1]))
            found[t, b] = [BY_HAND[reader](p, xs, s(p, d, d)) for p, s in zip(ps, STARTS.values(), strict=True)]
    values = [jnp.stack([jnp.stack([found[t, b][i] for b in range(B)]) for t in range(T)]) for i in range(len(STARTS))]
    return sum((1.0 + i) * v.sum() for i, v in enumerate(values)), values


SLOW = {"a recurrence"}  # eleven of them, back through time


@pytest.mark.parametrize("reader", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in READERS])
def test_starts_that_are_computed_have_their_values_and_gradients_under_every_plan(reader: str):
    assert len(STARTS) * len(READERS) >= 50
    ps, carry = arguments()
    (loss, values), gradient = jax.jit(jax.value_and_grad(lambda p: by_hand(reader, p, carry), has_aux=True))(ps)
    fn = rlfx.compile(program(reader), length=T, batch=B, reduce="sum", plan=rlfx.Plan())
    (got, (_, mine)), slope = jax.jit(jax.value_and_grad(lambda p: fn(p, carry), has_aux=True))(ps)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-5)
    for one, other in zip(mine, values, strict=True):
        np.testing.assert_allclose(jnp.broadcast_to(one, (T, B)), other, rtol=1e-4, atol=1e-5)
    legal = set()
    for plan in PLANS:
        fn = rlfx.compile(lambda *a: program(reader)(*a)[:2], length=T, batch=B, reduce="sum", plan=plan)
        try:
            got, slope = jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, carry)[0]))(ps)
        except rlfx.errors.ScheduleError:
            continue
        legal.add(plan.form)
        np.testing.assert_allclose(got, loss, rtol=1e-5, err_msg=str(plan))
        np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-5, err_msg=str(plan))
    assert "blocks" in legal or reader not in IN_BLOCKS
