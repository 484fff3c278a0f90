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


#: ``(parameters, values so far, starts) -> values``, of all starts at once.
BY_HAND = {
    "a recurrence": _recurrence,
    "the one before": lambda p, xs, s: p * xs[-1] * (xs[-2] if len(xs) > 1 else s),
    "two before": lambda p, xs, s: p * xs[-1] + (jnp.cos(xs[-3]) if len(xs) > 2 else s),
    "of what is learned": lambda p, xs, s: (
        xs[-1] * jax.lax.stop_gradient(p * xs[-2] if len(xs) > 1 else s) + p * xs[-1]
    ),
    "a loop of the actor": _summed,
}
ONE = rlfx.Plan()
BLOCKS, SOME, HOST = rlfx.Plan("blocks", 2), rlfx.Plan("blocks", 2, 1), rlfx.Plan("blocks", 2, offload=1)
STREAM, REPLAY = rlfx.Plan("stream", 2), rlfx.Plan("replay", 2)
PLANS = (ONE, BLOCKS, SOME, HOST, STREAM, REPLAY)
#: Gradients that flow through reads of other timesteps run at once; those through a recurrence in blocks too.
LEGAL = {
    "a recurrence": (ONE, BLOCKS, SOME, HOST),
    "the one before": (ONE,),
    "two before": (ONE,),
    "of what is learned": (ONE, BLOCKS, SOME, HOST),
    "a loop of the actor": (ONE, BLOCKS, SOME, HOST, STREAM),
}
QUICK = {("the one before", ONE), ("two before", ONE), ("of what is learned", SOME), ("a loop of the actor", STREAM)}
CASES = [
    pytest.param(r, plan, marks=[pytest.mark.slow] * ((r, plan) not in QUICK), id=f"{r}, {plan}")
    for r, plans in LEGAL.items()
    for plan in plans
]


def arguments():
    ps = jnp.linspace(0.2, 0.8, len(STARTS), dtype=jnp.float32)
    return ps, {"x": jnp.array([0.4, -0.7], jnp.float32), "d": jnp.array([0.3, 1.2], jnp.float32)}


def program(reader, starts=tuple(STARTS)):
    def f(ps, carry, t):
        x, d = carry["x"], carry["d"]
        values = [READERS[reader](p, x, STARTS[s](p, d, d), t) for p, s in zip(ps, starts, strict=True)]
        following = {"x": jax.lax.stop_gradient(jnp.cos(x)), "d": d}
        return sum((1.0 + i) * v for i, v in enumerate(values)), following, values

    return f


def by_hand(reader, ps, carry, starts=tuple(STARTS), length=T):
    """The loss, and values ``[starts, length, B]``."""
    first = jnp.stack([jnp.stack([STARTS[s](p, d, d) for d in carry["d"]]) for p, s in zip(ps, starts, strict=True)])
    xs, found = [], []
    for _ in range(length):
        xs.append(jnp.cos(xs[-1]) if xs else carry["x"][None])
        found.append(jnp.broadcast_to(BY_HAND[reader](ps[:, None], xs, first), first.shape))
    values = jnp.stack(found, 1)
    return jnp.einsum("i,itb->", 1.0 + jnp.arange(len(starts), dtype=jnp.float32), values), values


def close(got, slope, loss, gradient):
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("reader", "plan"), CASES)
def test_starts_that_are_computed_have_their_values_and_gradients(reader: str, plan: rlfx.Plan):
    assert len(STARTS) * len(READERS) >= 50
    ps, carry = arguments()
    (loss, values), gradient = jax.jit(jax.value_and_grad(lambda p: by_hand(reader, p, carry), has_aux=True))(ps)
    outputs = 3 if plan == ONE else 2  # values at all timesteps are for the learner that runs at once
    fn = rlfx.compile(lambda *a: program(reader)(*a)[:outputs], length=T, batch=B, reduce="sum", plan=plan)
    (got, aux), slope = jax.jit(jax.value_and_grad(lambda p: fn(p, carry), has_aux=True))(ps)
    close(got, slope, loss, gradient)
    if plan == ONE:
        for one, other in zip(aux[1], values, strict=True):
            np.testing.assert_allclose(jnp.broadcast_to(one, (T, B)), other, rtol=1e-4, atol=1e-5)


def test_other_plans_are_refused():
    ps, carry = arguments()
    for reader, legal in LEGAL.items():
        for plan in set(PLANS) - set(legal):
            fn = rlfx.compile(
                lambda *a, r=reader: program(r, ("twice it",))(*a)[:2], length=T, batch=B, reduce="sum", plan=plan
            )
            with pytest.raises(rlfx.errors.ScheduleError, match=f"cannot run by the plan '{plan.form}'"):
                jax.eval_shape(jax.grad(lambda p, fn=fn: fn(p, carry)[0]), ps[:1])


@pytest.mark.parametrize("reader", READERS)
def test_the_reference_has_them_too(reader: str):
    """Of a sample, at three timesteps: it evaluates point by point."""
    sample = ("a call", "a loop", "a condition", "of data")
    ps, carry = arguments()
    ps = ps[: len(sample)]
    fn = rlfx.reference(program(reader, sample), length=3, batch=B, reduce="sum")
    outcomes = [
        jax.jit(jax.value_and_grad(loss))(ps)
        for loss in (lambda p: fn(p, carry)[0], lambda p: by_hand(reader, p, carry, sample, 3)[0])
    ]
    close(*outcomes[0], *outcomes[1])
