"""In which dtype sums over points are accumulated: at least float32, whatever the loss and the parameters are, by every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan

QUICK = {"xla_llvm_disable_expensive_passes": True}
T = 2048  # more ones than bfloat16 (256) and float16 (2,048) can count one by one
NARROW = (jnp.bfloat16, jnp.float16)
PLANS = [None, Plan("blocks", 1), Plan("blocks", 4), Plan("blocks", 100), Plan("stream", 3), Plan("stream", 64)]
PLANS += [Plan("replay", 32), Plan("replay", 1)]


def gradients(fn, params, carry):
    return jax.jit(jax.grad(lambda p: fn(p, carry)[0]), compiler_options=QUICK)(params)


def ones(params, c, t):
    """The gradient with respect to each parameter is T, in any order of summation that can count so far."""
    x = jnp.where(t.now >= 0, c, c + 1.0)
    return sum((p * x.astype(p.dtype)).astype(jnp.float32) for p in params), c


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradients_are_accumulated_in_float32(plan):
    params = [jnp.ones((), d) for d in (*NARROW, jnp.float32)]
    fn = rlfx.compile(ones, length=T, reduce="sum", plan=plan)
    try:
        got = gradients(fn, params, jnp.ones(()))
    except rlfx.errors.ScheduleError:
        pytest.skip("not a plan of this program")
    assert [g.dtype for g in got] == [p.dtype for p in params]
    np.testing.assert_array_equal(np.asarray(got, np.float32), T)


def test_a_few_environments_at_a_time():
    params = [jnp.ones((), d) for d in NARROW]
    fn = rlfx.compile(ones, length=2, batch=1024, reduce="sum", plan=Plan("blocks", 1, 1))
    np.testing.assert_array_equal(np.asarray(gradients(fn, params, jnp.ones(1024)), np.float32), 2048)


@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
def test_gradients_through_a_recurrence(dtype):
    """Of what every iteration of the backward loop adds to, by products (which are contracted after it) or not."""

    def f(p, c, t):
        a, b = c
        return jnp.sum(a + b).astype(jnp.float32), (p["w"] + 0 * a, p["m"] @ (0 * b + 1))

    params = {"w": jnp.ones(2, dtype), "m": jnp.ones((2, 2), dtype)}
    carry = (jnp.ones(2, dtype), jnp.ones(2, dtype))
    for batch in (None, 1):
        state = carry if batch is None else jax.tree.map(lambda x: x[None], carry)
        got = gradients(rlfx.compile(f, length=T + 1, batch=batch, reduce="sum"), params, state)
        np.testing.assert_array_equal(np.asarray(got["w"], np.float32), T)
        np.testing.assert_array_equal(np.asarray(got["m"], np.float32), T)


def test_the_reference_accumulates_alike():
    def f(p, c, t):
        return p, c

    p = jnp.ones((), jnp.bfloat16)
    got = jax.grad(lambda p: rlfx.reference(f, length=300, reduce="sum")(p, None)[0].astype(jnp.float32))(p)
    assert got.dtype == p.dtype
    assert got == 300


LOSSES = {
    "plain": {},
    "until": {"until": lambda c: c > 1e9},
    "blocks": {"plan": Plan("blocks", 2)},
    "mesh": {"mesh": 4},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=list(LOSSES))
def test_a_mean_of_many_losses(options):
    """8,000 losses of 10 are 80,000 in all: more than the largest float16. Means in the program alike."""

    def f(p, c, t):
        loss = jnp.float16(10) * p
        return loss, c, (rlfx.mean(loss + 0 * c.astype(jnp.float16)), rlfx.mean(loss, "b"))

    options = dict(options)
    if "mesh" in options:
        options["mesh"] = jax.make_mesh((options["mesh"],), ("b",))
    fn = rlfx.compile(f, length=8, batch=1000, **options)
    carry = jnp.zeros(1000)
    out = jax.jit(jax.value_and_grad(lambda p: fn(p, carry), has_aux=True), compiler_options=QUICK)
    (loss, (_, (mean, over_b), *_)), grad = out(jnp.float16(1))
    assert loss.dtype == grad.dtype == mean.dtype == jnp.float16
    assert loss == mean == 10
    assert (over_b == 10).all()
    assert abs(grad - 10) < 0.02
    forward = fn(jnp.float16(1), carry)[0]
    assert forward == 10


def test_the_share_of_a_point_is_not_rounded_to_float32():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(7, 3))

        def f(p, c, t):
            return p * rlfx.inputs(jnp.asarray(x))[t], c

        for plan in (None, Plan("blocks", 2)):
            fn = rlfx.compile(f, length=7, batch=3, plan=plan)
            loss, grad = jax.value_and_grad(lambda p, fn=fn: fn(p, None)[0])(np.float64(3.0))
            assert abs(loss - 3 * x.mean()) < 1e-15
            assert abs(grad - x.mean()) < 1e-15
        fn = rlfx.compile(f, length=7, batch=3)
        _, pull = jax.vjp(lambda p: fn(p, jnp.ones(3)), np.float64(3.0))
        (grad,) = pull((np.float64(1.0), (jnp.ones(3), None)))
        assert abs(grad - x.mean()) < 1e-15


def test_returns_are_accumulated_in_float32():
    def f(_, c, t):
        one = rlfx.series(jnp.ones((), jnp.bfloat16) + 0 * c)
        return c, [
            rlfx.discounted_sum(one[t:], 1),
            one[t:].sum(),
            rlfx.sum(one[t], "t"),
            rlfx.discounted_sum(one[:], 1),
        ]

    out = jax.jit(lambda c: rlfx.unroll(f, length=512)(None, c)[1], compiler_options=QUICK)(jnp.bfloat16(1))
    assert [(x.dtype, float(x[0])) for x in out] == [(jnp.bfloat16, 512.0)] * 4


@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
def test_blocks_of_ordinary_losses(dtype):
    loss = rlfx.incrementalize(lambda w, x: jnp.sum(w * x), batch_argnums=1, block_size=1)
    got = jax.grad(lambda w: loss(w, jnp.ones(2048, dtype)).astype(jnp.float32))(jnp.ones((), dtype))
    assert got.dtype == dtype
    assert got == 2048


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_a_python_number_as_a_boundary_does_not_widen(x64):
    """Neither bfloat16 to float32, nor float32 to float64 where that is enabled."""
    with jax.enable_x64(x64):
        for dtype in (*NARROW, jnp.float32, *([jnp.float64] if x64 else [])):
            x = jnp.linspace(0, 1, 3).astype(dtype)

            def f(_, c, t, x=x):
                at = rlfx.inputs(x)[t]
                past = rlfx.solve(lambda a: at + 0.5 * a[t - 1], start=0.0)
                future = rlfx.solve(lambda a: at + 0.5 * a[t + 1], end=1)
                pair = rlfx.solve(lambda a: (at * a[t - 1][1], a[t - 1][0] - at), start=(0, 1.0))
                return c, (past, future, *pair, rlfx.mean(at), rlfx.series(at, start=0.3)[t - 1])

            for make in (rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False)):
                out = make(f, length=3)(None, None)[1]
                assert [o.dtype for o in out] == [jnp.dtype(dtype)] * 6
            np.testing.assert_allclose(np.asarray(out[1], np.float64), [0.625, 1.25, 1.5], rtol=1e-2)


#: What jax gives a strong dtype, also of what has none of its own: sums, products, functions with a derivative of their own.
STRONG = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "prod": jnp.prod,
    "cumsum": lambda s: jnp.cumsum(s)[-1:].sum(),
    "sort": lambda s: jnp.sum(jnp.sort(s)),
    "dot": lambda s: jnp.dot(s, s),
    "logsumexp": lambda s: jax.nn.logsumexp(s),
    "stack": lambda s: jnp.stack([s, s]).sum(),
    "a derivative of its own": lambda s: jnp.sum(identity(s)),
}
WAYS = {
    "before": lambda f, x, t: rlfx.solve(lambda a: x - 0.1 * f(a.window(-2, 0, fill=0)), start=0.0),
    "after": lambda f, x, t: rlfx.solve(lambda a: x - 0.1 * f(a.window(1, 3, fill=1)), end=1),
}


@jax.custom_jvp
def identity(x):
    return x


identity.defjvps(lambda dx, out, x: dx)


def before_by_hand(x):
    """A loop over the timesteps of two of them."""
    found = {}
    for name, f in (("sum", np.sum), ("prod", np.prod)):
        past = [0.0, 0.0]
        for at in x:
            past.append(at - 0.1 * f(past[-2:]))
        found[name] = past[2:]
    return found


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_nor_does_it_where_jax_gives_the_boundary_a_dtype(x64, promotion):
    """20 recurrences of two or three dtypes, with each kind of promotion: 200."""
    assert len(STRONG) * len(WAYS) * 10 >= 50
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
        for dtype in (jnp.bfloat16, jnp.float32, *([jnp.float64] if x64 else [])):
            x = jnp.linspace(0, 1, 3).astype(dtype)

            def f(_, c, t, x=x):
                at = rlfx.inputs(x)[t]
                return c, {(way, name): WAYS[way](fn, at, t) for way in WAYS for name, fn in STRONG.items()}

            out = rlfx.unroll(f, length=3)(None, None)[1]
            assert {k: o.dtype for k, o in out.items()} == dict.fromkeys(out, jnp.dtype(dtype))
            loop = before_by_hand(np.linspace(0, 1, 3))
            for name, values in loop.items():
                np.testing.assert_allclose(np.asarray(out["before", name], np.float64), values, rtol=2e-2, err_msg=name)
