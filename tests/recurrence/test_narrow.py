"""Convolutions of few features: against jax's own, plain loops and finite differences; in bodies, and in iterations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.narrow import is_narrow, narrow_convolution, narrowly
from rlfx.recurrence.rewrite.merged import merged
from rlfx.recurrence.rewrite.narrow import with_narrow

LAYOUTS = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW")}
LAST = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC")}
SHAPES = [
    (2, 8, (5, 6), (3, 3), ((1, 1), (1, 1))),
    (8, 2, (5, 6), (3, 3), ((1, 1), (1, 1))),
    (3, 3, (4, 5), (2, 3), ((0, 1), (2, 0))),
    (5, 1, (4, 4), (1, 1), ((0, 0), (0, 0))),
    (1, 5, (4, 4), (1, 1), ((0, 0), (0, 0))),
    (2, 4, (9,), (4,), ((3, 0),)),
    (4, 2, (9,), (4,), ((5, 4),)),
    (2, 3, (6, 6), (3, 3), ((0, 0), (0, 0))),
    (3, 2, (6, 6), (5, 1), ((0, 0), (2, 2))),
]  # fmt: skip


def given(features, out, places, taps, batch=3):
    k = jax.random.split(jax.random.key(sum(places)), 2)
    return jax.random.normal(k[0], (batch, features, *places)), jax.random.normal(k[1], (out, features, *taps))


def native(x, w, padding):
    return jax.lax.conv_general_dilated(x, w, (1,) * len(padding), padding, dimension_numbers=LAYOUTS[len(padding)])


def ours(x, w, padding):
    return jax.vmap(lambda x: narrow_convolution(x, w, padding))(x)


def by_loops(x, w, padding):
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), *padding))
    taps, rows = w.shape[2:], np.asarray(w, np.float64).reshape(len(w), -1)
    sizes = [n - k + 1 for n, k in zip(x.shape[2:], taps, strict=True)]
    out = np.zeros((len(x), len(w), *sizes))
    for at in itertools.product(*map(range, sizes)):
        near = x[(slice(None), slice(None), *(slice(i, i + k) for i, k in zip(at, taps, strict=True)))]
        out[(slice(None), slice(None), *at)] = near.reshape(len(x), -1) @ rows.T
    return out


def close(found, wanted, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.parametrize(("features", "out", "places", "taps", "padding"), SHAPES)
def test_values_are_those_of_plain_loops_and_derivatives_those_of_jax(features, out, places, taps, padding):
    x, w = given(features, out, places, taps)
    np.testing.assert_allclose(jax.jit(ours, static_argnums=2)(x, w, padding), by_loops(x, w, padding), rtol=1e-4, atol=1e-4)
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w, padding)))  # noqa: E731
    close(jax.jit(jax.grad(loss(ours), (0, 1)))(x, w), jax.grad(loss(native), (0, 1))(x, w))


@pytest.mark.parametrize(("features", "out", "places", "taps", "padding"), SHAPES[:4])
def test_second_derivatives_and_forward_ones(features, out, places, taps, padding):
    x, w = given(features, out, places, taps)

    def twice(f):
        inner = lambda x, w: jnp.sum(jnp.sin(f(x, w, padding)))  # noqa: E731
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.square(g)) for g in jax.grad(inner, (0, 1))(x, w)), (0, 1))

    close(jax.jit(twice(ours))(x, w), twice(native)(x, w), 1e-4)
    moved = [jax.jvp(lambda x, w, f=f: f(x, w, padding), (x, w), (x + 1.0, 2.0 * w)) for f in (ours, native)]
    close(*moved)
    only = [jax.jvp(lambda w, f=f: f(x, w, padding), (w,), (2.0 * w,)) for f in (ours, native)]
    close(*only)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_every_axis_of_vmap(dims):
    x, w = given(2, 3, (5, 6), (3, 3))
    many = [
        y if d is None else jnp.moveaxis(jnp.stack([y, 2.0 * y, 1.0 - y]), 0, d) for y, d in zip((x, w), dims, strict=True)
    ]
    padding = ((1, 1), (1, 1))
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(jax.vmap(lambda x, w: f(x, w, padding), dims)(x, w)))  # noqa: E731
    close(jax.value_and_grad(loss(ours), (0, 1))(*many), jax.value_and_grad(loss(native), (0, 1))(*many))
    each = lambda f: jax.vmap(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w, padding))), (0, 1)), dims)  # noqa: E731
    close(each(ours)(*many), each(native)(*many))


def equation_of(x, w, padding, numbers, **how):
    fn = lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, padding=padding, **how)  # noqa: E731
    (eqn,) = jax.make_jaxpr(fn)(x, w).eqns
    return fn, eqn


@pytest.mark.parametrize("numbers", [LAYOUTS[2], LAST[2], ("CHWN", "IHWO", "CHWN"), ("NHCW", "HOWI", "WNHC")])
def test_any_layout(numbers):
    x, w = given(2, 5, (5, 6), (3, 3))
    x, w = (jnp.transpose(y, ["NCHW".index(c) if i == 0 else "OIHW".index(c) for c in numbers[i]]) for i, y in enumerate((x, w)))
    fn, eqn = equation_of(x, w, "SAME", numbers, window_strides=(1, 1))
    assert is_narrow(eqn.params, x, w)
    close(narrowly(eqn.params, x, w), fn(x, w))


@pytest.mark.parametrize(
    ("features", "how"),
    [
        (2, {"window_strides": (2, 1)}), (2, {"window_strides": (1, 1), "rhs_dilation": (2, 1)}),
        (4, {"window_strides": (1, 1), "feature_group_count": 2}), (16, {"window_strides": (1, 1)}),
    ],
)  # fmt: skip
def test_what_stays_as_it_is(features, how):
    x, w = given(features, 16, (8, 8), (3, 3))
    w = w[:, : features // how.get("feature_group_count", 1)]
    assert not is_narrow(equation_of(x, w, "SAME", LAYOUTS[2], **how)[1].params, x, w)


def test_what_is_added_up_in_another_type_stays():
    x, w = given(2, 4, (5, 6), (3, 3))
    params = equation_of(x, w, "SAME", LAYOUTS[2], window_strides=(1, 1))[1].params
    assert is_narrow(params, x, w)
    assert not is_narrow({**params, "preferred_element_type": np.dtype("float16")}, x, w)


def test_large_images_stay_as_they_are():
    x, w = given(2, 4, (64, 64), (3, 3), batch=1)
    assert not is_narrow(equation_of(x, w, "SAME", LAYOUTS[2], window_strides=(1, 1))[1].params, x, w)


# -- programs

LENGTH, BATCH, SIDE, MOVES, KEY = 3, 4, 5, 4, jax.random.key(1)


def convolved(x, w, last=False):
    if last:
        y = jax.lax.conv_general_dilated(
            jnp.moveaxis(x, 0, -1)[None], jnp.transpose(w, (2, 3, 1, 0)), (1, 1), "SAME", dimension_numbers=LAST[2]
        )
        return jnp.moveaxis(y[0], -1, 0)
    return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]


def planning(iterations=4, unroll=1, last=False, reverse=False):
    """A value that is iterated beside a reward; what each iteration gives is kept."""

    def program(p, h, t):
        now = jax.lax.stop_gradient(rlfx.inputs(p["maps"])[t])
        reward = jax.nn.relu(convolved(now, p["first"], last) + p["bias"])

        def iteration(value, scale):
            q = convolved(jnp.concatenate([reward, value]), p["q"], last)
            return q.max(0, keepdims=True), scale * jnp.tanh(q.mean())

        scales = jnp.arange(1.0, iterations + 1)
        value, kept = jax.lax.scan(iteration, jnp.zeros_like(reward), scales, unroll=unroll, reverse=reverse)
        q = convolved(jnp.concatenate([reward, value]), p["q"], last)[:, 1, 2]
        return jnp.sum(jnp.sin(q) * h) + jnp.sum(jnp.arange(1.0, iterations + 1) * kept), 0.9 * h

    return program


def params():
    k = jax.random.split(jax.random.key(3), 4)
    return {
        "first": 0.3 * jax.random.normal(k[0], (1, 2, 3, 3)), "q": 0.2 * jax.random.normal(k[1], (MOVES, 2, 3, 3)),
        "bias": 0.1 * jax.random.normal(k[2], (1, 1, 1)),
        "maps": jax.random.normal(k[3], (LENGTH, BATCH, 2, SIDE, SIDE)),
    }  # fmt: skip


START = jax.random.normal(jax.random.key(2), (BATCH, MOVES))


def gradient(make, fn, **how):
    f = make(fn, length=LENGTH, batch=BATCH, **how)
    return jax.jit(jax.value_and_grad(lambda p, x: f(p, x, KEY)[0], (0, 1)))(params(), START)


HOW = {
    "features first": {}, "features last": {"last": True}, "the user's unrolling": {"unroll": 2},
    "a long loop": {"iterations": 80}, "backwards": {"reverse": True},
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_values_and_gradients_are_those_of_the_reference(how):
    fn = planning(**HOW[how])
    close(gradient(rlfx.compile, fn), gradient(rlfx.reference, fn), 1e-4)


def test_as_by_hand():
    """By loops, and finite differences."""

    def loss(p, x):
        total = 0.0
        for t, b in itertools.product(range(LENGTH), range(BATCH)):
            reward = np.maximum(by_loops(p["maps"][t, b][None], p["first"], ((1, 1), (1, 1)))[0] + p["bias"], 0.0)
            value = np.zeros_like(reward)
            for i in range(1, 5):
                q = by_loops(np.concatenate([reward, value])[None], p["q"], ((1, 1), (1, 1)))[0]
                value = q.max(0, keepdims=True)
                total += i * i * np.tanh(q.mean())
            q = by_loops(np.concatenate([reward, value])[None], p["q"], ((1, 1), (1, 1)))[0][:, 1, 2]
            total += np.sum(np.sin(q) * x[b] * 0.9**t)
        return total / (BATCH * LENGTH)

    p, x = jax.tree.map(lambda v: np.asarray(v, np.float64), (params(), START))
    value, (of_p, of_x) = gradient(rlfx.compile, planning())
    np.testing.assert_allclose(value, loss(p, x), rtol=1e-4)
    rng, step = np.random.default_rng(0), 1e-6
    moved = jax.tree.map(lambda v: rng.normal(size=v.shape), (p, x))
    moved[0]["maps"] *= 0.0
    ends = [loss(*jax.tree.map(lambda v, d, s=s: v + s * step * d, (p, x), moved)) for s in (1, -1)]
    slopes = jax.tree.map(lambda g, d: np.sum(np.asarray(g, np.float64) * d), (of_p, of_x), moved)
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), (ends[0] - ends[1]) / (2 * step), rtol=1e-3)


def program_of(**how):
    return rlfx.trace(planning(**how), params(), START, length=LENGTH, batch=BATCH)


def features_of(program):
    return sorted(e.inputs[1].shape[1] for e in program.equations if e.op.name == "narrow_convolution")


def test_what_iterations_have_in_common_is_convolved_once():
    program = merged(with_narrow(program_of(), 512))
    assert not any(e.op is J.SCAN for e in program.equations)
    # The first layer; then the reward once, and the value in four iterations and after them (the first is of zeros).
    assert features_of(program) == [1] * 6 + [2]


def test_loops_that_give_what_they_were_given_or_constants():
    def program(p, h, t):
        def iteration(carry, _):
            value, same, _ = carry
            return (convolved(value, p["first"])[:1] * jnp.ones_like(value), same, 2.0), same

        start = rlfx.inputs(p["maps"])[t], p["bias"], jnp.asarray(1.0)
        (value, same, two), kept = jax.lax.scan(iteration, start, None, length=3)
        (again, *_), _ = jax.lax.scan(iteration, (value, same, two), None, length=2)
        return jnp.sum(jnp.sin(again)) * two + jnp.sum(same) + jnp.sum(kept) + h.sum(), 0.9 * h

    traced = with_narrow(rlfx.trace(program, params(), START, length=LENGTH, batch=BATCH), 512)
    assert not any(e.op is J.SCAN for e in traced.equations)
    close(gradient(rlfx.compile, program), gradient(rlfx.reference, program), 1e-4)


def test_a_long_loop_has_them_inside():
    program = with_narrow(program_of(iterations=80), 512)
    (scan,) = (e for e in program.equations if e.op is J.SCAN)
    assert "narrow_convolution" in str(scan.params["jaxpr"])
    assert "conv_general_dilated" not in str(scan.params["jaxpr"])


def test_programs_that_do_not_iterate_stay():
    def program(p, h, t):
        return jnp.sum(convolved(rlfx.inputs(p["maps"])[t], p["first"])), 0.9 * h

    traced = rlfx.trace(program, params(), START, length=LENGTH, batch=BATCH)
    assert with_narrow(traced, 512) is traced
    once = with_narrow(program_of(), 512)
    assert with_narrow(once, 512) is once  # idempotent
