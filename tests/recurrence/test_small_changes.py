"""What a small change of the compiler broke and no other test saw (``tests/mutation/sampled.json``), by file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.envs.base import Step
from rlfx.errors import BoundaryError, ProgramError, UnsupportedSliceOp
from rlfx.recurrence.cpu.convolution import CONVOLUTION, channels_last
from rlfx.recurrence.execute.ragged.tree_reduction import reduced
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.gradient.stream import find_stream
from rlfx.recurrence.ir.hoist import _hoist_by_tracing, hoist
from rlfx.recurrence.ir.interpret import evaluate
from rlfx.recurrence.language.index import LENGTH, TIME, Slice, extreme
from rlfx.recurrence.language.shuffle import shuffle
from rlfx.recurrence.plan.budget import _largest_that_fits
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.schedule import Loop, Parallel

T = 6
XS = np.random.default_rng(0).uniform(-1, 1, T)


def close(x, y, **more):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, **more)


def unroll(f, **options):
    return jax.jit(rlfx.unroll(f, **options), static_argnames="t0")


def compiled(f, **options):
    return jax.jit(rlfx.compile(f, **options))


def along(read, length=T, **options):
    """``read(x, t)`` at all timesteps, with x the series of XS."""
    data = jnp.asarray(XS[:length], jnp.float32)
    run = unroll(lambda p, c, t: (c, read(rlfx.inputs(p, axes="t"), t)), length=length, **options)
    return run(data, None)[1]


def learner(f, *arguments, **options):
    program = rlfx.trace(f, *arguments, **options)
    return GradientRule(program, Options(), rlfx.target("cpu")).learner(frozenset(program.params))


# -- language ---------------------------------------------------------------------------------------------------------


def test_boundary_values_of_python_fit():
    for dtype, value in ((jnp.uint8, 300), (jnp.uint8, -1), (jnp.int8, 128), (jnp.bool_, 2)):
        with pytest.raises(BoundaryError, match="the series' dtype"):
            rlfx.trace(
                lambda p, c, t: (rlfx.series(c, start=value)[t - 1], c),
                None,
                jnp.zeros((), dtype),
                length=2,
                loss=False,
            )


def test_an_index_is_written_as_it_is_meant():
    """Each text, evaluated, is the expression; and the texts of some are these."""
    minimum, maximum = min, max
    expressions = [
        (TIME // n) * k + (TIME % n) * m + TIME * c + d
        for k in (-3, -1, 0, 2) for n in (2, 3) for m in (-1, 0, 1) for c in (0, 1) for d in (-2, 0, 1)
    ]  # fmt: skip
    expressions += [extreme("min", e, 3) for e in expressions[:8]] + [
        extreme("max", e, TIME - 2) for e in expressions[:8]
    ]
    assert len(set(map(str, expressions))) >= 50
    for e in expressions:
        text = str(e).replace("rlfx.", "")
        for t in range(9):
            assert eval(text, {"t": t, "minimum": minimum, "maximum": maximum}) == e.evaluate(
                t, 9, low=min, high=max
            ), text
    assert str(TIME - (TIME // 3) * 3) == "t % 3"
    assert "%" not in str((TIME // 3) * -3)


def test_a_slice_begins_where_it_is_written_if_that_is_never_negative():
    for lo in (TIME, TIME // 2, TIME - TIME % 3, TIME * 0, TIME * 2 + 1, TIME % 4):
        assert Slice(lo, LENGTH).first == lo
    assert Slice(TIME - 1, LENGTH).first != TIME - 1


def test_shapes_of_a_return_go_together():
    for gamma, value in (
        (jnp.ones(3, jnp.float32), jnp.ones(2, jnp.float32)),
        (jnp.ones((2, 2), jnp.float32), jnp.ones(3, jnp.float32)),
        (jnp.ones(2, jnp.float32), jnp.ones((2, 3), jnp.float32)),
    ):

        def program(p, c, t, gamma=gamma, value=value):
            step = Step(reward=value, terminated=c > 0, truncated=c < 0, final_obs=c, info={})
            return rlfx.gae(step, value, value, gamma=gamma, lam=0.9).sum(), c

        with pytest.raises(ProgramError, match="The shapes of the arguments of gae do not go together"):
            rlfx.trace(program, None, jnp.float32(1), length=3)


@pytest.mark.parametrize("outside", ["fill", "clip"])
def test_a_history_of_every_environment(outside: str):
    """Environment 0 too, and those that are not there."""
    capacity, batch = 3, 3
    kept = np.arange(1.0, 10.0).reshape(batch, capacity)

    def program(p, c, t):
        x = rlfx.series(rlfx.inputs(p)[t], history=c)
        return x.history, jnp.stack([x.lookup(t.now - 1, jnp.int32(b), outside=outside) for b in range(-1, batch + 1)])

    data = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (2, batch)), jnp.float32)
    history = rlfx.History(capacity, data=jnp.asarray(kept, jnp.float32))
    found = unroll(program, length=2, batch=batch)(data, history, t0=3)[1]
    before = {2: kept[:, 2], 3: np.asarray(data[0])}
    for t in (3, 4):
        for b in range(batch):
            want = [
                before[t - 1][min(max(b, 0), batch - 1)] if outside == "clip" or 0 <= b < batch else np.nan
                for b in range(-1, batch + 1)
            ]
            close(found[t - 3, b], want)


def test_a_lookup_at_a_time_that_all_environments_share():
    """Its index depends on a parameter alone: each environment reads its own value there."""
    data = np.random.default_rng(2).uniform(-1, 1, (T, 3))

    def program(p, c, t):
        x = rlfx.series(rlfx.inputs(p["x"])[t])[p["i"] * jnp.ones((), jnp.int32)]
        return jnp.nan_to_num(x), c, x

    run = compiled(program, length=T, batch=3, reduce="sum")
    for i in range(3):
        loss, (_, found) = run({"x": jnp.asarray(data, jnp.float32), "i": jnp.int32(i)}, None)
        close(found, [data[i] if i <= t else np.full(3, np.nan) for t in range(T)])
        close(loss, (T - i) * data[i].sum())


def test_slices_from_t_to_where_another_slope_leads():
    """Thirty windows whose lengths change with t, summed: none of them is a sliding window."""
    slopes = [
        lambda t, k, low, high: 2 * t + k,
        lambda t, k, low, high: t + t // 2 + k,
        lambda t, k, low, high: t + t % 3 + k,
        lambda t, k, low, high: 4 - t + k,
        lambda t, k, low, high: high(t, k),
        lambda t, k, low, high: low(2 * t + 1, k + t),
    ]
    members = [(f, k) for f in slopes for k in range(5)]
    found = along(lambda x, t: tuple(x[t : f(t, k, rlfx.minimum, rlfx.maximum)].sum() for f, k in members))
    for (f, k), x in zip(members, found, strict=True):
        close(x, [XS[t : max(f(t, k, min, max), t)].sum() for t in range(T)])


def test_sums_of_functions_of_vector_slices():
    """Lifted to recurrences and sliding windows of the vector's own shape."""
    data = np.random.default_rng(3).uniform(-1, 1, (T, 3))
    for cut, by_hand in ((lambda x, t: x[t:], lambda t: slice(t, None)), (lambda x, t: x[t : t + 2], lambda t: slice(t, t + 2)),
                         (lambda x, t: x[: t + 1], lambda t: slice(0, t + 1))):  # fmt: skip
        for f, g in (
            (jnp.sin, np.sin),
            (lambda s: s * s, np.square),
            (lambda s: jnp.tanh(s) + 1, lambda s: np.tanh(s) + 1),
        ):
            run = unroll(
                lambda p, c, t, cut=cut, f=f: (c, jnp.sum(f(cut(rlfx.inputs(p, axes="t"), t)), axis=0)), length=T
            )
            close(run(jnp.asarray(data, jnp.float32), None)[1], [g(data[by_hand(t)]).sum(0) for t in range(T)])


def test_calls_on_slices_are_opened():
    for wrap in (jax.checkpoint, jax.jit, lambda f: jax.jit(jax.checkpoint(f))):
        found = along(lambda x, t, wrap=wrap: wrap(lambda s: jnp.tanh(s * 2.0))(x[: t + 1]).sum())
        close(found, [np.tanh(2 * XS[: t + 1]).sum() for t in range(T)])
    program = rlfx.trace(lambda p, c, t: (c, jax.jit(jnp.cos)(jnp.sin(c))), None, jnp.float32(1), length=2, loss=False)
    assert {e.op.name for e in program.equations} >= {"cos", "sin"}


def test_an_end_that_no_read_reaches_makes_no_circle():
    """Without a start beside it, and the other way round."""

    def program(p, c, t):
        now = rlfx.series(c, end=c)[t] + rlfx.series(c, end=2 * c)[rlfx.minimum(t + 0, t)]
        return now, 0.5 * jnp.sin(now)

    loss, (final, _) = compiled(program, length=3, reduce="sum")(None, jnp.float32(1.0))
    c, total = 1.0, 0.0
    for _ in range(3):
        total, c = total + 2 * c, 0.5 * np.sin(2 * c)
    close(loss, total)
    close(final, c)


def test_the_first_timestep_is_number_0():
    program = rlfx.trace(lambda p, c, t: (1.0 * t * p, c, t.now), 2.0, None, length=3)
    loss, (_, aux) = rlfx.lower(program)(2.0, None)
    assert aux.tolist() == [0, 1, 2]
    close(loss, 2.0)


def test_lengths_beyond_the_present_end_with_the_episode():
    def program(p, c, t):
        x = rlfx.series(1.0 * t)
        return (c[0] + 1, c[1]), (x[: t + 2].sum(), x[: t + 1].sum(), jnp.asarray(x[: t + 2].shape[0], jnp.int32))

    run = unroll(program, length=5, until=lambda c: c[0] >= c[1])
    for n in range(1, 6):
        _, (two, one, size), *_ = run(None, (jnp.int32(0), jnp.int32(n)))
        close(two[:n], [sum(range(min(t + 2, n))) for t in range(n)])
        close(one[:n], [sum(range(t + 1)) for t in range(n)])
        assert size[:n].tolist() == [min(t + 2, n) for t in range(n)]


def test_windows_of_the_past_have_no_axis_of_environments():
    """Under until= too: what environments share is given once."""

    def program(p, c, t):
        x = rlfx.inputs(p, axes="t")
        return c + 1, (x.window(-2, 1, fill=0.0).sum(), x.window(-1, 2, fill=0.0).sum())

    out = unroll(program, length=T, batch=2, until=lambda c: c >= 4)(jnp.asarray(XS, jnp.float32), jnp.arange(2))
    past, ahead = out[1]
    assert ahead.shape == (T, 2)
    whole = np.broadcast_to(past[:, None] if past.ndim == 1 else past, (T, 2))
    for b, n in enumerate((4, 3)):
        close(whole[:n, b], [XS[max(t - 2, 0) : t + 1].sum() for t in range(n)])
        close(ahead[:n, b], [XS[max(t - 1, 0) : min(t + 2, n)].sum() for t in range(n)])


# -- slices ---------------------------------------------------------------------------------------------------------


def test_vector_slices_in_products_and_shapes():
    data = np.random.default_rng(4).uniform(-1, 1, (T, 6))
    uses = {
        "gram": (lambda s: jnp.tanh(s @ s.T).sum(), lambda s: np.tanh(s @ s.T).sum()),
        "rows": (lambda s: jnp.tanh(s.T @ s).sum(), lambda s: np.tanh(s.T @ s).sum()),
        "merged": (lambda s: jnp.cumsum(s.reshape(-1, 2)[:, 0]).sum(), lambda s: np.cumsum(s.reshape(-1, 2)[:, 0]).sum()),
        "pad after": (
            lambda s: jnp.cumsum(jnp.pad(s, ((0, 2), (0, 0))), 0).sum(),
            lambda s: np.cumsum(np.pad(s, ((0, 2), (0, 0))), 0).sum(),
        ),
        "pad across": (
            lambda s: jnp.cumsum(jnp.pad(s.T, ((0, 0), (1, 2)), constant_values=0.5), 1).sum(),
            lambda s: np.cumsum(np.pad(s.T, ((0, 0), (1, 2)), constant_values=0.5), 1).sum(),
        ),
        "argmax": (lambda s: s[:, 1][jnp.argmax(s[:, 0])], lambda s: s[:, 1][np.argmax(s[:, 0])]),
        "argmin": (lambda s: s[:, 1][jnp.argmin(s[:, 0])], lambda s: s[:, 1][np.argmin(s[:, 0])]),
    }  # fmt: skip
    cuts = {":t + 1": (lambda x, t: x[: t + 1], lambda t: slice(0, t + 1)), "t:": (lambda x, t: x[t:], lambda t: slice(t, None)),
            "t // 2:t + 1": (lambda x, t: x[t // 2 : t + 1], lambda t: slice(t // 2, t + 1))}  # fmt: skip
    for cut, by_hand in cuts.values():
        run = lambda p, c, t, cut=cut: (c, tuple(f(cut(rlfx.inputs(p, axes="t"), t)) for f, _ in uses.values()))  # noqa: E731
        found = unroll(run, length=T)(jnp.asarray(data, jnp.float32), None)[1]
        for (name, (_, g)), x in zip(uses.items(), found, strict=True):
            np.testing.assert_allclose(x, [g(data[by_hand(t)]) for t in range(T)], rtol=1e-4, atol=1e-5, err_msg=name)


def test_reshapes_that_mix_time_with_others_are_refused():
    for f in (
        lambda s: s.reshape(2, -1, 3),
        lambda s: s.T.reshape(-1, 6),
        lambda s: s.reshape(-1, 4),
        lambda s: s.T.reshape(3, 2, -1).T.reshape(-1),
    ):
        try:
            found = along(lambda x, t, f=f: jnp.cumsum(f(jnp.stack([x[: t + 1]] * 6, -1)).ravel()).sum())
        except UnsupportedSliceOp:
            continue
        close(found, [np.cumsum(np.asarray(f(np.stack([XS[: t + 1]] * 6, -1))).ravel()).sum() for t in range(T)])


def test_a_rule_of_ones_own_on_the_past_of_a_long_loop():
    """Its operands are in pieces there (T > 128)."""

    @jax.custom_vjp
    def half(x):
        return 0.5 * x

    half.defvjp(lambda x: (0.5 * x, None), lambda _, g: (0.25 * g,))
    length = 300

    def program(p, c, t):
        s = rlfx.solve(lambda s: jnp.tanh(0.1 * p * half(s[:t]).sum() + c), start=0.0)
        return s, 0.99 * c

    loss = compiled(program, length=length, reduce="sum")(jnp.float32(0.5), jnp.float32(1.0))[0]
    s, c = [], 1.0
    for _ in range(length):
        s.append(np.tanh(0.1 * 0.5 * 0.5 * sum(s) + c))
        c *= 0.99
    np.testing.assert_allclose(loss, sum(s), rtol=1e-4)


def test_cotangents_of_ones_own_rule_are_zero_outside_of_a_slice():
    @jax.custom_vjp
    def shifted(x):
        return x

    # its derivative sees all of its cotangent
    shifted.defvjp(lambda x: (x, None), lambda _, g: (g + jnp.cumsum(g),))
    data = jnp.asarray(XS, jnp.float32)
    for cut, by_hand in ((lambda x, t: x[: t + 1], lambda t: range(t + 1)), (lambda x, t: x[t:], lambda t: range(t, T)),
                         (lambda x, t: x[t // 2 : t + 1], lambda t: range(t // 2, t + 1))):  # fmt: skip
        program = lambda p, c, t, cut=cut: (shifted(cut(rlfx.inputs(p, axes="t"), t)).sum(), c)  # noqa: E731
        run = compiled(program, length=T, reduce="sum")
        want = np.zeros(T)
        for t in range(T):
            for place, i in enumerate(by_hand(t)):
                want[i] += 1 + place + 1
        close(jax.grad(lambda p, run=run: run(p, None)[0])(data), want)


# -- infinities -------------------------------------------------------------------------------------------------------


def test_the_derivative_of_a_product_with_what_is_infinite_outside():
    """Data of other timesteps on either side; one of them is infinite, and in no slice."""

    def program(p, c, t):
        s = rlfx.series(jnp.where(t.now == 3, jnp.inf, c))[: rlfx.minimum(t + 1, 3)]
        return jnp.full_like(s, p) @ s + 2.0 * (s @ jnp.full_like(s, p * p)), c + 1.0

    run = rlfx.compile(program, length=4, reduce="sum")
    gradient = jax.jit(jax.grad(lambda p: run(p, jnp.float32(1.0))[0]))(jnp.float32(0.7))
    close(gradient, (1 + 4 * 0.7) * sum(sum(range(1, min(t + 1, 3) + 1)) for t in range(4)))


# -- intermediate representation, schedules, plans --------------------------------------------------------------------


def test_reads_are_hoisted_alike_in_every_jax():
    """By parameters and by tracing again."""
    sin = J.primitive("sin")

    def f(a, b, init, xs):
        def body(s, x):
            return s * jnp.sin(a) + x + jnp.sin(b), s - x

        return jax.lax.scan(body, init, xs)

    arguments = (jnp.float32(0.3), jnp.float32(0.6), jnp.float32(1.0), jnp.arange(4.0, dtype=jnp.float32))
    jaxpr = jax.make_jaxpr(f)(*arguments)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is J.SCAN]
    values = [
        jnp.asarray(v.val) if J.is_literal(v) else dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))[v]
        for v in eqn.invars
    ]
    found = _hoist_by_tracing(eqn, lambda op: op is sin)
    assert found is not None
    assert len(found.equations) == 2
    early = [op.bind(*(values[i] for i in where), **params) for op, params, where, _ in found.equations]
    outs = evaluate(*found.body, found.place(values, early), lambda *_: None)
    for x, y in zip(outs, f(*arguments), strict=True):
        close(x, y)
    if "linear" in eqn.params:
        assert not any(hoist(eqn, lambda op: op is sin).params["linear"])


def test_reads_in_branches_with_operands():
    """The operands of a branch stand behind its index."""

    def program(p, c, t):
        x = rlfx.inputs(p, axes="t")
        return c + 1, jax.lax.cond(c % 2 == 0, lambda a, b: a * x[t // 2] + b, lambda a, b: b * a - x[0],
                                   x[t] * 3, jnp.float32(2.0) + x[t])  # fmt: skip

    found = unroll(program, length=T)(jnp.asarray(XS, jnp.float32), jnp.int32(0))[1]
    close(
        found, [3 * XS[t] * XS[t // 2] + 2 + XS[t] if t % 2 == 0 else (2 + XS[t]) * 3 * XS[t] - XS[0] for t in range(T)]
    )


def test_two_recurrences_in_one_direction_are_one_loop():
    def program(p, c, t):
        x = rlfx.solve(lambda x: 0.5 * x[t - 1] + c, start=0.0)
        y = rlfx.solve(lambda y: 0.5 * y[t - 1] + jnp.sin(x), start=0.0)
        z = rlfx.solve(lambda z: 0.5 * z[t - 1] + y, start=0.0)
        return z, 0.9 * c

    stages = learner(program, None, jnp.float32(1), length=8).acting.stages
    assert sum(isinstance(s, Loop) for s in stages) == 1


def test_draws_of_a_loop_are_made_in_it():
    def program(p, c, t):
        return c, c + jnp.sin(jax.random.normal(t.key, (100,), dtype=jnp.float32)).sum()

    traced = rlfx.trace(program, None, jnp.float32(1), jax.random.key(0), length=8)
    stages = GradientRule(traced, Options(), rlfx.target("cpu")).forward.stages
    outside = {e.op.name for s in stages if isinstance(s, Parallel) for e in s.equations}
    assert not outside & {"random_bits", "sin"}


def test_a_start_that_follows_from_all_timesteps():
    """A mean over t comes before the loop that begins with it."""

    def program(p, c, t):
        mean = rlfx.mean(rlfx.inputs(p, axes="t")[t], "t")
        return rlfx.solve(lambda s: 0.3 * s[t - 1] + 1.0, start=jnp.sin(2.0 * mean) + c), c + 1.0

    found = compiled(program, length=T, reduce="sum")(jnp.asarray(XS, jnp.float32), jnp.float32(0.5))[0]
    s, total = np.sin(2 * XS.mean()) + 0.5, 0.0
    for _ in range(T):
        s = 0.3 * s + 1
        total += s
    close(found, total)


def test_acting_leaves_the_loss_to_the_learner():
    def program(p, c, t):
        return p * jnp.sin(c) ** 2, 0.9 * c

    found = learner(program, jnp.float32(1), jnp.float32(1), length=8)
    acted = {
        v for s in found.acting.stages for e in (s.body if isinstance(s, Loop) else s.equations) for v in e.outputs
    }
    assert found.program.loss not in acted


def test_a_stream_knows_how_far_it_reads():
    """The delay is that of the longest chain of reads; a loop with one deep series cannot be streamed."""

    def ahead(p, c, t, n):
        x = rlfx.series(jax.lax.stop_gradient(jnp.tanh(c)), end=0.0)
        y = rlfx.series(jnp.tanh(x[t + n] + x[t]), end=0.0)
        return p * jnp.tanh(y[t + 2] + x[t + 1] + y[t]), jax.lax.stop_gradient(0.9 * c)

    for n in (1, 2, 3):
        found = find_stream(learner(lambda p, c, t, n=n: ahead(p, c, t, n), jnp.float32(1), jnp.float32(1), length=12))
        assert getattr(found, "delay", found) == n + 2

    def deep(p, c, t):
        x = rlfx.solve(lambda x: 0.5 * x[t - 1] - 0.1 * x[t - 3] + c, start=0.0)
        return p * jax.lax.stop_gradient(x), 0.9 * c

    assert (
        find_stream(learner(deep, jnp.float32(1), jnp.float32(1), length=12))
        == "the actor reads further back than the previous timestep"
    )


@pytest.mark.parametrize(("length", "chunk"), [(7, 3), (8, 3), (5, 4), (9, 2)])
def test_a_stream_that_its_chunks_do_not_fill(length: int, chunk: int):
    data = jnp.asarray(np.random.default_rng(5).uniform(-1, 1, (length, 2)), jnp.float32)

    def program(p, c, t):
        x = rlfx.inputs(p["x"])[t]
        reward = rlfx.series(jax.lax.stop_gradient(jnp.tanh(c * x)), end=0.0)
        return p["w"] * (reward[t + 1] + reward[t] * x), jax.lax.stop_gradient(0.7 * c + x)

    grads = []
    for make in (lambda: compiled(program, length=length, batch=2, plan=rlfx.Plan("stream", chunk)),
                 lambda: rlfx.reference(program, length=length, batch=2)):  # fmt: skip
        run = make()
        grads.append(
            jax.value_and_grad(lambda w, run=run: run({"x": data, "w": w}, jnp.ones(2, jnp.float32))[0])(
                jnp.float32(0.4)
            )
        )
    close(grads[0], grads[1])


def test_the_first_plan_that_fits_may_fill_the_room():
    needed = {"a": 90, "b": 50, "c": 50, "d": 20}
    for room, plan in ((90, "a"), (89, "b"), (50, "b"), (49, "d"), (20, "d"), (19, None)):
        assert _largest_that_fits(needed.__getitem__, list(needed), room) == plan


def test_data_that_is_also_used_whole_stays_whole_on_a_mesh():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    data = jnp.asarray(np.random.default_rng(6).uniform(-1, 1, (3, 4)), jnp.float32)

    def program(p, c, t):
        return p["w"] * rlfx.inputs(p["x"])[t] + p["x"].sum() + rlfx.inputs(p["y"], axes="b")[t], c

    arguments = {"w": jnp.float32(2.0), "x": data, "y": data[0]}
    one, two = (compiled(program, length=3, batch=4, mesh=m)(arguments, None)[0] for m in (None, mesh))
    close(one, two)
    close(one, np.mean(2 * np.asarray(data) + np.asarray(data).sum() + np.asarray(data)[0]))


# -- convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NCHW"), ("CHWN", "IHWO", "HWNC"), ("HNWC", "OHWI", "NWHC")]
)
def test_a_convolution_of_any_layout(numbers: tuple[str, str, str]):
    sizes = {"N": 2, "C": 3, "H": 5, "W": 6, "I": 3, "O": 4}
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.uniform(-1, 1, [sizes[k] for k in numbers[0]]), jnp.float32)
    w = jnp.asarray(rng.uniform(-1, 1, [{"H": 2, "W": 3}.get(k, sizes[k]) for k in numbers[1]]), jnp.float32)
    f = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 2), [(1, 0), (2, 1)], dimension_numbers=numbers)  # noqa: E731
    (eqn,) = [e for e in jax.make_jaxpr(f)(x, w).eqns if e.primitive is CONVOLUTION]
    close(channels_last(x, w, eqn.params), f(x, w))


def test_convolutions_of_any_layout_while_acting():
    """In the carry and in the loss, with groups: as the reference, which leaves them as they are."""
    layouts = [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("CNHW", "IOHW", "NHWC"), ("NCHW", "HWIO", "CNHW")]
    sizes = {"N": 2, "C": 4, "H": 5, "W": 6, "I": 4, "O": 4}

    def program(p, x, t):
        total, y = 0.0, x
        for i, (numbers, groups) in enumerate((n, g) for n in layouts for g in (1, 2)):
            shape = [{"H": 2, "W": 3, "I": 4 // groups}.get(k, sizes[k]) for k in numbers[1]]
            w = jnp.sin(p[i] * (1.0 + jnp.arange(np.prod(shape, dtype=np.int32), dtype=jnp.float32))).reshape(shape)
            given = jnp.transpose(y, ["NCHW".index(k) for k in numbers[0]])
            out = jax.lax.conv_general_dilated(
                given, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
            )
            y = jnp.tanh(0.3 * jnp.transpose(out, [numbers[2].index(k) for k in "NCHW"]))
            total += (y**2).sum()
        return total, jax.lax.stop_gradient(y), y[0, 0]

    rng = np.random.default_rng(2)
    p, x = jnp.asarray(rng.uniform(0.2, 1, 8), jnp.float32), jnp.asarray(rng.uniform(-1, 1, (2, 4, 5, 6)), jnp.float32)
    ours, reference = (make(program, length=2) for make in (rlfx.compile, rlfx.reference))
    found, expected = (jax.value_and_grad(lambda p, f=f: f(p, x), has_aux=True)(p) for f in (ours, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)
    text = str(ours.trace(p, x))
    assert text.count("conv_general_dilated") == 8
    assert text.count("transpose") > str(rlfx.trace(program, p, x, length=2)).count("transpose")


@pytest.mark.parametrize("plan", [rlfx.Plan("blocks", 2), rlfx.Plan("blocks", 2, cached=True)], ids=["again", "kept"])
def test_a_learner_has_its_convolutions_channels_last_whatever_is_kept(plan):
    """Those of derivatives, too: in a loop any other layout is an order of magnitude slower on a CPU."""

    def program(p, x, t):
        y = jax.nn.relu(jax.lax.conv_general_dilated(x[None], p["w"], (1, 1), "SAME"))
        y = jax.lax.conv_general_dilated(y, p["v"], (1, 1), "SAME")
        return (y**2).sum(), jax.lax.stop_gradient(0.9 * x)

    draw = lambda i, *shape: 0.1 * jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    p, x = {"w": draw(0, 16, 16, 3, 3), "v": draw(1, 16, 16, 3, 3)}, draw(2, 2, 16, 6, 6)
    fn = rlfx.compile(program, length=4, batch=2, plan=plan)
    found = []

    def look(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive is CONVOLUTION:
                found.append(e.params["dimension_numbers"])
            for body, _ in J.sub_jaxprs(e.params):
                look(body)

    differentiated = jax.make_jaxpr(jax.grad(lambda p: fn(p, x)[0]))(p)
    look(differentiated.jaxpr)
    assert len(found) >= 5  # two forwards, two for weights, one for what is between
    assert {tuple(map(int, n.lhs_spec)) for n in found} == {(0, 3, 1, 2)}


# -- schedules --------------------------------------------------------------------------------------------------------


def test_what_is_kept_for_the_learner_is_the_smallest():
    """Of what follows from the carry alone the carry is kept, and not the vector made of it."""
    found = learner(lambda p, c, t: ((p * jnp.tanh(c * jnp.ones(64))).sum(), 0.9 * c), jnp.ones(64), 1.0, length=8)
    assert [v.shape for v in found.stored if "t" in found.program.dims_of(v)] == [()]


def test_an_acting_pass_ends_with_its_loop():
    """Of the values at the end only those of its own loop are picked there: no stage for the others comes after it."""

    def program(p, c, t):
        x = rlfx.series(jnp.tanh(c * jnp.ones(5)))
        return p * x[t].sum(), c + 1.0

    found = learner(program, jnp.float32(1), jnp.float32(0), length=8, until=lambda c: c >= 3)
    assert isinstance(found.acting.stages[-1], Loop)
    assert len(found.acting.stages[-1].stacked) == 2  # what the loss needs, and who is alive


def test_slices_that_no_recurrence_needs_are_outside_of_its_loop():
    def program(p, c, t):
        x = rlfx.solve(lambda x: c + 0.9 * x[t + 1], end=0.0)
        return p * jax.nn.logsumexp(rlfx.series(x)[t:]) * jax.nn.logsumexp(rlfx.series(c)[t:]), 0.9 * c

    traced = rlfx.trace(program, jnp.float32(1), jnp.float32(0), length=8)
    stages = GradientRule(traced, Options(), rlfx.target("cpu")).forward.stages
    assert [s.direction for s in stages if isinstance(s, Loop)] == ["forward", "backward"]
    assert not any(e.is_ragged for s in stages if isinstance(s, Loop) for e in s.body)


# -- other -------------------------------------------------------------------------------------------------------------


def test_a_lookup_of_what_is_shared_by_an_index_of_ones_own():
    def program(p, c, t):
        total, i, step = c
        found = rlfx.series(p * (1.0 * t + 1.0)).lookup(i)
        return (total + found, i + step, step), found

    run = unroll(program, length=3, batch=2)
    (total, *_), found, *_ = run(jnp.float32(2), (jnp.zeros(2), jnp.array([0, 0]), jnp.array([1, 0])))
    close(found, [[2, 2], [4, 2], [6, 2]])
    close(total, [12, 6])


def test_a_product_of_what_is_infinite_outside_of_a_slice():
    """What is not valid counts nothing, and the first position as much as the others."""
    data = jnp.asarray(np.where(np.arange(T) == 3, np.inf, 1.0), jnp.float32)
    for read in (
        lambda x, t: jnp.ones_like(x[: t + 1]) @ x[: t + 1],
        lambda x, t: x[: t + 1] @ jnp.ones_like(x[: t + 1]),
    ):
        run = unroll(lambda p, c, t, read=read: (c, read(rlfx.inputs(p, axes="t"), t)), length=T)
        close(run(data, None)[1], [1, 2, 3, np.inf, np.inf, np.inf])


def test_an_episode_that_ends_before_what_a_slice_of_two_reads():
    def program(p, c, t):
        x = rlfx.series(1.0 * t + 1.0)
        return (c[0] + 1, c[1]), (x[: t + 2].sum(), jnp.asarray(x[: t + 2].shape[0], jnp.int32))

    run = unroll(program, length=2, until=lambda c: c[0] >= c[1])
    for n in (1, 2):
        _, (total, size), *_ = run(None, (jnp.int32(0), jnp.int32(n)))
        close(total[:n], [3.0 if n == 2 else 1.0] * n)
        assert size[:n].tolist() == [n] * n


def test_an_order_is_that_of_other_versions():
    """Training runs are repeated with the orders they had."""
    assert shuffle(jax.random.key(0), 10).tolist() == [8, 4, 0, 2, 5, 7, 9, 1, 3, 6]
    assert shuffle(jax.random.key(1), 1000)[:6].tolist() == [958, 543, 419, 337, 539, 809]


@pytest.mark.parametrize("halves", [True, False])
def test_a_reduction_of_pieces_along_any_axis(halves: bool):
    rng = np.random.default_rng(3)
    for axis in (0, 1):
        pieces = [jnp.asarray(rng.uniform(-1, 1, (n, 40) if axis == 0 else (40, n)), jnp.float32) for n in (48, 20)]
        whole = np.concatenate(pieces, axis)
        close(reduced(jnp.add, jnp.sum, pieces, axis, halves=halves), whole.sum(axis))
        close(reduced(jnp.maximum, jnp.max, pieces, axis, halves=halves), whole.max(axis))


def test_a_slice_that_has_a_name_in_a_long_loop():
    def program(p, c, t):
        x = rlfx.series(rlfx.series(c)[: t + 1])[t]
        return p * x.sum(), 0.99 * c + 1e-3 * jnp.tanh(x.sum())

    loss = compiled(program, length=300)(jnp.float32(0.5), jnp.float32(1.0))[0]
    total, xs, c = 0.0, [], 1.0
    for _ in range(300):
        xs.append(c)
        total += 0.5 * sum(xs)
        c = 0.99 * c + 1e-3 * np.tanh(sum(xs))
    np.testing.assert_allclose(loss, total / 300, rtol=1e-4)
