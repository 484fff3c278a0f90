"""Every public function of the language, against what it says it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

KEY = jax.random.key(0)


def values(f, length, *, params=None, carry=None, batch=None, key=None, t0=0, until=None):
    """What the program puts out at every point."""
    return rlfx.unroll(f, length=length, batch=batch, until=until)(params, carry, key, t0=t0)[1]


def close(got, expected, **tolerance):
    np.testing.assert_allclose(got, expected, **{"rtol": 1e-6, "atol": 1e-6, **tolerance})


# -- programs ---------------------------------------------------------------------------------------------------------


def test_compile_returns_loss_carry_and_aux_with_the_axes_of_their_domains():
    def f(p, c, t):
        per_point = rlfx.inputs(p)[t]
        aux = {"both": per_point, "t": t.now, "b": rlfx.sum(per_point, "t"), "none": rlfx.sum(per_point)}
        return per_point, c + per_point, aux

    data = jnp.arange(6.0).reshape(3, 2)
    loss, (final, aux) = rlfx.compile(f, length=3, batch=2)(data, jnp.zeros(2))
    close(loss, 2.5)
    close(final, data.sum(0))
    assert {k: v.shape for k, v in aux.items()} == {"both": (3, 2), "t": (3,), "b": (2,), "none": ()}
    close(aux["both"], data)
    close(aux["b"], [6, 9])
    close(aux["none"], 15.0)


@pytest.mark.parametrize("until", [None, lambda c: c["n"] >= 2], ids=["until T", "until"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_loss_may_be_a_result_too(reduce, until):
    """As a loss it is reduced, as aux it is there at every point: each has a derivative of its own."""

    def program(as_result):
        def f(p, c, t):
            loss = p * c["x"]
            return loss, {"x": 0.9 * c["x"], "n": c["n"] + 1}, as_result(loss)

        return rlfx.compile(f, length=3, batch=2, reduce=reduce, until=until)

    def total(p, fn):
        loss, (_, aux, *_) = fn(p, {"x": jnp.array([1.0, 2.0], jnp.float32), "n": jnp.zeros(2, jnp.int32)})
        return loss + jnp.sum(jnp.arange(6, dtype=jnp.float32).reshape(3, 2) * aux)

    same, other = program(lambda loss: loss), program(lambda loss: 1.0 * loss)
    close(jax.grad(total)(jnp.float32(2.0), same), jax.grad(total)(jnp.float32(2.0), other))


def test_absent_aux_is_none():
    assert rlfx.compile(lambda p, c, t: (p, c), length=2)(1.0, None) == (1.0, (None, None))


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 3.0), ("sum", 18.0)])
@pytest.mark.parametrize("batch", [None, 2])
def test_reduce_broadcasts_the_loss_to_all_points(reduce, expected, batch):
    loss, _ = rlfx.compile(lambda p, c, t: (p, c), length=6 if batch is None else 3, batch=batch, reduce=reduce)(
        3.0, None
    )
    close(loss, expected)


def test_unroll_broadcasts_every_output_to_all_points():
    out = values(lambda p, c, t: (c, {"const": p, "t": t.now}), 3, params=jnp.float32(2.0), batch=2)
    assert out["const"].shape == (3, 2)
    close(out["t"], [[0, 0], [1, 1], [2, 2]])


@pytest.mark.parametrize("length", [1, 2, 5])
def test_any_scan_body_is_a_program(length):
    def body(c, x):
        h = jnp.tanh(c["h"] + x["a"] @ jnp.array([[0.3, -0.1], [0.2, 0.5]]))
        return {"h": h, "n": c["n"] + x["i"]}, {"h2": h**2, "const": jnp.float32(3.0), "n": c["n"]}

    carry = {"h": jnp.array([0.1, -0.2]), "n": jnp.int32(3)}
    xs = {"a": jax.random.normal(KEY, (length, 2)), "i": jnp.arange(length, dtype=jnp.int32)}
    unrolled = rlfx.unroll(lambda p, c, t: body(c, rlfx.inputs(p)[t]), length=length)
    jax.tree.map(close, unrolled(xs, carry), jax.lax.scan(body, carry, xs))

    def total(fn):
        return lambda h: sum(x.sum() for x in jax.tree.leaves(fn({**carry, "h": h})) if x.dtype == jnp.float32)

    close(
        jax.grad(total(lambda c: unrolled(xs, c)))(carry["h"]),
        jax.grad(total(lambda c: jax.lax.scan(body, c, xs)))(carry["h"]),
        rtol=1e-5,
    )


def test_time_is_an_int32_in_arithmetic():
    def f(p, c, t):
        return c, (
            p * t.astype(p.dtype),
            0.5 * t,
            t**2,
            t / 2,
            -t,
            3 - t,
            t % 2 == 0,
            t >= 1,
            t.length,
            jnp.sin(0.1 * t),
            t + t,
        )

    out = values(f, 3, params=jnp.float32(2.0))
    for got, expected in zip(
        out, ([0, 2, 4], [0, 0.5, 1], [0, 1, 4], [0, 0.5, 1], [0, -1, -2], [3, 2, 1]), strict=False
    ):
        close(got, expected)
    assert out[0].dtype == jnp.float32
    np.testing.assert_array_equal(out[6], [True, False, True])
    np.testing.assert_array_equal(out[7], [False, True, True])
    close(out[8], [3, 3, 3])
    close(out[9], np.sin([0, 0.1, 0.2]))


def test_t0_shifts_time_but_not_indices():
    data = jnp.arange(4.0)
    now, x = values(lambda p, c, t: (c, (t.now, rlfx.inputs(p)[t])), 4, params=data, t0=10)
    close(now, [10, 11, 12, 13])
    close(x, data)


def test_a_traced_t0():
    program = rlfx.unroll(lambda p, c, t: (c, 2.0 * t), length=2)
    close(jax.jit(lambda t0: program(None, None, t0=t0)[1])(5), [10, 12])


# -- reading ----------------------------------------------------------------------------------------------------------


def test_every_form_of_the_indexing_table():
    data = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0])

    def f(p, c, t):
        x = rlfx.series(rlfx.inputs(p)[t], start=-1.0, end=-2.0)
        i = jnp.int32(0)
        return c, (
            x[t], x[t + 1], x[t - 1], x[t:].sum(), x[: t + 1].sum(), x[t : t + 2].sum(), x[t - 1 : t + 1].sum(),
            x[t - t % 2 : t - t % 2 + 2].sum(), x[:].sum(), x.window(-1, 2, fill=0.5), x.lookup(i),
        )  # fmt: skip

    out = values(f, 5, params=data)
    expected = (
        data, [2, 4, 8, 16, -2], [-1, 1, 2, 4, 8], [31, 30, 28, 24, 16], [1, 3, 7, 15, 31], [3, 6, 12, 24, 16],
        [1, 3, 6, 12, 24], [3, 3, 12, 12, 16], [31] * 5,
        [[0.5, 1, 2], [1, 2, 4], [2, 4, 8], [4, 8, 16], [8, 16, 0.5]], [1] * 5,
    )  # fmt: skip
    for got, want in zip(out, expected, strict=True):
        close(got, want)


def test_reads_far_outside_take_the_boundary_values():
    def f(p, c, t):
        x = rlfx.series(1.0 * t, start=-1.0, end=-2.0)
        return c, (x[t - 9], x[t + 9], x[2 * t - 3], x[t.length + 2], x[t - t.length])

    out = values(f, 3)
    for got, want in zip(out, ([-1] * 3, [-2] * 3, [-1, -1, 1], [-2] * 3, [-1] * 3), strict=True):
        close(got, want)


def test_a_series_is_any_pytree_and_boundaries_are_prefixes():
    def f(p, c, t):
        x = rlfx.series(
            {"a": 1.0 * t, "b": (t.now, jnp.full(2, 1.0 * t))}, start=0, end={"a": 5.0, "b": (6, jnp.array([7.0, 8.0]))}
        )
        return c, (x[t - 1], x[t + 1])

    before, after = values(f, 2)
    close(before["a"], [0, 0])
    close(before["b"][1], [[0, 0], [0, 0]])
    assert before["b"][0].dtype == jnp.int32
    close(after["a"], [1, 5])
    close(after["b"][0], [1, 6])
    close(after["b"][1], [[1, 1], [7, 8]])


def test_boundary_values_that_vary_with_time_are_taken_at_the_first_and_last_timestep():
    def f(p, c, t):
        x = rlfx.series(10.0 * t, start=t + 1.5, end=t + 2.5)
        return c, (x[t - 1], x[t + 1])

    before, after = values(f, 3)
    close(before, [1.5, 0, 10])
    close(after, [10, 20, 4.5])


def test_demand_extension_evaluates_the_value_on_the_final_carry():
    def f(w, c, t):
        value = rlfx.series(w * c + 0.1 * t)
        return c + 1.0, (value[t + 1], value[t + 2] if t.length > 9 else value[t + 1])

    close(values(f, 3, params=jnp.float32(2.0), carry=jnp.float32(5.0))[0], [12.1, 14.2, 16.3])

    def loss(w, c, t):
        value = rlfx.series(w * c)
        return value[t + 1], c * w

    # carry = 5 w^t; loss = mean over t = 0, 1 of 5 w^(t + 2)
    fn = rlfx.compile(loss, length=2)
    close(fn(jnp.float32(2.0), jnp.float32(5.0))[0], (20 + 40) / 2)
    close(jax.grad(lambda w: fn(w, jnp.float32(5.0))[0])(jnp.float32(2.0)), (5 * 2 * 2 + 5 * 3 * 4) / 2)


def test_demand_extension_with_keys_is_the_key_of_the_next_call():
    noise = lambda p, c, t: (c, rlfx.series(jax.random.normal(t.key_for("n")))[t + 1])  # noqa: E731
    first = values(noise, 3, key=KEY)
    second = values(noise, 3, key=KEY, t0=1)
    close(first[1:], second[:2])


def test_a_value_of_previous_steps_extends_too():
    def f(p, c, t):
        x = rlfx.series(1.0 * t, start=7.0)
        y = rlfx.series(x[t - 1] * 10)
        return c, y[t + 1]

    close(values(f, 3), [0, 10, 20])


def test_slices_clip_to_the_domain_and_may_be_empty():
    def f(p, c, t):
        x = rlfx.inputs(p)
        return c, (
            x[t + 1 :].sum(),
            x[:t].sum(),
            x[2 * t : 2 * t + 2].sum(),
            x[t - 5 : t - 2].sum(),
            x[2:].sum(),
            x[: t.length - 1].sum(),
        )

    out = values(f, 4, params=jnp.array([1.0, 2.0, 4.0, 8.0]))
    expected = ([14, 12, 8, 0], [0, 1, 3, 7], [3, 12, 0, 0], [0, 0, 0, 1], [12] * 4, [7] * 4)
    for got, want in zip(out, expected, strict=True):
        close(got, want)


def test_ordinary_jnp_on_slices_of_symbolic_length():
    data = jax.random.normal(KEY, (5, 3), jnp.float32)
    query = jnp.array([0.5, -1.0, 0.3], jnp.float32)

    def f(p, c, t):
        past = rlfx.inputs(p)[: t + 1]
        scores = past @ query
        return c, {
            "attention": jax.nn.softmax(scores) @ past,
            "cumsum": jnp.cumsum(scores)[-1],
            "max": past.max(0),
            "argmax": jnp.argmax(scores),
            "mean": past.mean(),
            "std": past.std(),
            "any": jnp.any(scores > 1.0),
            "sorted": jnp.sort(scores)[0],
            "outer": jnp.sum(past @ past.T),
            "reversed": (scores[::-1] * scores).sum(),
            "tail": past[-1] + past[0],
            "where": jnp.where(scores > 0, scores, 0.0).sum(),
            "einsum": jnp.einsum("ni,nj->ij", past, past),
            "norm": jnp.linalg.norm(past),
            "length": past.shape[0] * jnp.float32(1.0),
            "scan": jax.lax.scan(lambda a, x: (0.5 * a + x.sum(), None), jnp.float32(0.0), past)[0],
            "concatenate": jnp.concatenate([past, query[None]]).sum(0),
            "vmap": jax.vmap(jnp.dot, (0, None))(past, query).min(),
            "stack": jnp.stack([scores, 2 * scores], 1).sum(0),
            "stack first": jnp.stack([past, past[::-1]]).max((0, 1)),
            "unstack": jnp.unstack(past, axis=1)[2].sum(),
            "columns": sum(column.max() for column in jnp.moveaxis(past, 1, 0)),
            "split": [part.sum() for part in jnp.split(past, [2], axis=1)],
            "tile": jnp.tile(past, (1, 2)).sum(0),
            "log2": jnp.log2(jnp.abs(scores)).sum(),
            "derivative": jax.vmap(jax.grad(jnp.tanh))(scores).sum(),
        }

    out = values(f, 5, params=data)
    for t in range(5):
        past = np.asarray(data[: t + 1])
        scores = past @ np.asarray(query)
        weights = np.exp(scores) / np.exp(scores).sum()
        total = 0.0
        for row in past:
            total = 0.5 * total + row.sum()
        expected = {
            "attention": weights @ past, "cumsum": scores.sum(), "max": past.max(0), "argmax": scores.argmax(),
            "mean": past.mean(), "std": past.std(), "any": (scores > 1).any(), "sorted": scores.min(),
            "outer": (past @ past.T).sum(), "reversed": (scores[::-1] * scores).sum(), "tail": past[-1] + past[0],
            "where": scores[scores > 0].sum(), "einsum": past.T @ past, "norm": np.linalg.norm(past), "length": t + 1,
            "scan": total, "concatenate": past.sum(0) + query, "vmap": scores.min(),
            "stack": [scores.sum(), 2 * scores.sum()], "stack first": past.max(0), "unstack": past[:, 2].sum(),
            "columns": past.max(0).sum(), "split": [past[:, :2].sum(), past[:, 2].sum()], "tile": [*past.sum(0)] * 2,
            "log2": np.log2(np.abs(scores)).sum(), "derivative": (1 - np.tanh(scores) ** 2).sum(),
        }  # fmt: skip
        assert out.keys() == expected.keys()
        for name, want in expected.items():
            got = jax.tree.map(lambda x, t=t: x[t], out[name])
            close(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5, err_msg=name)


def test_no_nan_leaks_from_padding():
    def f(w, c, t):
        past = rlfx.inputs(w)[: t + 1]
        return jax.nn.softmax(300.0 * past) @ past + jnp.sqrt(rlfx.inputs(w)[t:]).sum(), c

    w = jnp.array([0.1, 3.0, 0.2, 40.0])
    grad = jax.grad(lambda w: rlfx.compile(f, length=4)(w, None)[0])(w)
    assert np.isfinite(grad).all()
    expected = jax.grad(lambda w: rlfx.reference(f, length=4)(w, None)[0])(w)
    close(grad, expected, rtol=1e-5)


# -- random access ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["fill", "clip"])
def test_random_access_outside_of_the_past_fills_or_clips(outside):
    def f(p, c, t):
        x = rlfx.inputs(p["x"])
        i = rlfx.inputs(p["i"])[t]
        return c, (x.lookup(i, outside=outside), x.lookup(jnp.stack([i, t.now]), outside=outside))

    p = {"x": jnp.array([1.0, 2.0, 4.0, 8.0]), "i": jnp.array([0, 7, -3, 2], jnp.int32)}
    one, two = values(f, 4, params=p)
    late, early = (
        (2, 1) if outside == "clip" else (np.nan, np.nan)
    )  # 7 is in the future of t = 1, and -3 before the start
    close(one, [1, late, early, 4])
    close(two, [[1, 1], [late, 2], [early, 4], [4, 8]])
    scale = jnp.array([1.0, 10.0, 100.0, 1000.0])
    grad = jax.grad(lambda x: (values(f, 4, params={**p, "x": x})[0] * scale).sum())(p["x"])
    close(grad, [101, 10, 1000, 0] if outside == "clip" else [1, 0, 1000, 0])


def test_random_access_is_in_absolute_time():
    f = lambda p, c, t: (c, rlfx.inputs(p).lookup(t.now - 1))  # noqa: E731
    close(values(f, 3, params=jnp.array([1.0, 2.0, 3.0]), t0=100), [np.nan, 1, 2])


def test_random_access_across_environments():
    def f(p, c, t):
        x = rlfx.inputs(p["x"])
        return c, x[rlfx.inputs(p["i"])[t], rlfx.inputs(p["b"])[t]]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    i, b = np.minimum(rng.integers(0, 4, (4, 3)), np.arange(4)[:, None]), rng.integers(0, 3, (4, 3))
    p = {"x": jnp.asarray(x), "i": jnp.asarray(i), "b": jnp.asarray(b)}
    close(values(f, 4, params=p, batch=3), x[i, b])
    grad = jax.grad(lambda x: (values(f, 4, params={**p, "x": x}, batch=3) ** 2).sum() / 2)(p["x"])
    expected = np.zeros_like(x)
    np.add.at(expected, (i, b), x[i, b])
    close(grad, expected, rtol=1e-5)


def test_history_outlives_the_call():
    def f(p, buffer, t):
        x = rlfx.series(1.0 * t, history=buffer)
        return x.history, (x[t.now - 2], x[jnp.stack([t.now, t.now - 99])])

    program = rlfx.unroll(f, length=3)
    buffer = rlfx.History(capacity=4, like=jnp.float32(0.0))
    buffer, (first, _) = program(None, buffer)
    close(first, [np.nan, np.nan, 0])  # before time 0 there is nothing
    close(buffer.data, [0, 1, 2, 0])
    buffer, (second, both) = program(None, buffer, t0=3)
    close(second, [1, 2, 3])
    close(both, [[3, np.nan], [4, np.nan], [5, np.nan]])  # four are kept
    close(buffer.data, [4, 5, 2, 3])


def test_history_with_a_batch_and_replay_across_environments():
    def f(p, c, t):
        x = rlfx.series({"v": c["x"], "n": t.now}, history=c["buffer"])
        i = jnp.maximum(t.now - 1, 0)
        return {"x": c["x"] + 1.0, "buffer": x.history}, x[i, jnp.int32(1)]

    carry = {
        "x": jnp.array([10.0, 20.0]),
        "buffer": rlfx.History(3, {"v": jnp.float32(0.0), "n": jnp.int32(0)}, batch=2),
    }
    final, out = rlfx.unroll(f, length=4, batch=2)(None, carry)
    close(out["v"], [[20, 20], [20, 20], [21, 21], [22, 22]])
    close(out["n"][:, 0], [0, 0, 1, 2])
    close(final["buffer"].data["v"], [[13, 11, 12], [23, 21, 22]])


def test_gradients_flow_through_a_history():
    def f(w, buffer, t):
        x = rlfx.series(w * (1.0 + t), history=buffer)
        return x.lookup(t - 1, outside="clip"), x.history

    fn = rlfx.compile(f, length=3, reduce="sum")
    buffer = rlfx.History(capacity=2, like=jnp.float32(0.0))
    close(fn(2.0, buffer)[0], 2 + 2 + 4)
    close(jax.grad(lambda w: fn(w, buffer)[0])(2.0), 1 + 1 + 2)
    older = rlfx.History(2, data=jnp.array([5.0, 7.0]))
    close(fn(2.0, older, t0=4)[0], 7 + 10 + 12)
    close(jax.grad(lambda d: fn(2.0, rlfx.History(2, data=d), t0=4)[0])(older.data), [0, 1])


# -- recursion --------------------------------------------------------------------------------------------------------


def test_solve_forwards_and_backwards():
    x = jnp.array([1.0, 2.0, 4.0])
    out = values(
        lambda p, c, t: (
            c,
            (
                rlfx.solve(lambda s: 0.5 * s[t - 1] + rlfx.inputs(p)[t], start=8.0),
                rlfx.solve(lambda s: 0.5 * s[t + 1] + rlfx.inputs(p)[t], end=8.0),
            ),
        ),
        3,
        params=x,
    )
    close(out[0], [5, 4.5, 6.25])
    close(out[1], [4, 6, 8])


def test_solve_of_a_pytree_and_its_use_at_other_times():
    def f(p, c, t):
        fib = rlfx.solve(lambda f: {"a": f[t - 1]["b"], "b": f[t - 1]["a"] + f[t - 1]["b"]}, start={"a": 0, "b": 1})
        s = rlfx.series(fib, end=0)
        return c, (fib["a"], s[t + 1]["a"])

    a, following = values(f, 5)
    close(a, [1, 1, 2, 3, 5])
    close(following, [1, 2, 3, 5, 0])


def test_solve_inside_solve():
    def f(p, c, t):
        outer = rlfx.solve(lambda y: y[t - 1] + rlfx.solve(lambda x: 2 * x[t - 1], start=1), start=0)
        return c, outer

    close(values(f, 4), [2, 6, 14, 30])


def test_solve_reads_windows_and_pasts_of_itself():
    def f(p, c, t):
        tribonacci = rlfx.solve(lambda x: x.window(-3, 0, fill=0).sum() + jnp.where(t == 0, 1, 0), start=0)
        doubling = rlfx.solve(lambda x: 1 + x[:t].sum(), start=0)
        halving = rlfx.solve(lambda x: 1 + x[t // 2 - 1], start=10)
        return c, (tribonacci, doubling, halving)

    a, b, h = values(f, 6)
    close(a, [1, 1, 2, 4, 7, 13])
    close(b, [1, 2, 4, 8, 16, 32])
    close(h, [11, 11, 12, 12, 12, 12])


def test_a_recurrent_cell_with_backpropagation_through_time():
    def f(w, h, t):
        new = jnp.tanh(w["h"] @ h + w["x"] * rlfx.inputs(w["data"])[t])
        return jnp.sum(new**2), new

    k = jax.random.split(KEY, 3)
    w = {"h": jax.random.normal(k[0], (3, 3)), "x": jax.random.normal(k[1], 3), "data": jax.random.normal(k[2], (5, 2))}
    h0 = jnp.ones((2, 3))

    def by_scan(w, h0):
        def step(h, x):
            h = jnp.tanh(h @ w["h"].T + x[:, None] * w["x"][None])
            return h, jnp.mean(jnp.sum(h**2, -1))

        return jax.lax.scan(step, h0, w["data"])[1].mean()

    fn = rlfx.compile(f, length=5, batch=2)
    got = jax.value_and_grad(lambda w, h: fn(w, h)[0], (0, 1))(w, h0)
    jax.tree.map(lambda g, e: close(g, e, rtol=1e-5), got, jax.value_and_grad(by_scan, (0, 1))(w, h0))


# -- reductions and conditions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["t", "b", ("t", "b"), ("b", "t"), ("b",)])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "std"])
def test_reductions(op, over):
    data = jax.random.normal(KEY, (4, 3))
    axes = tuple("tb".index(a) for a in over)

    def f(p, c, t):
        return c, getattr(rlfx, op)({"x": rlfx.inputs(p)[t]}, over=over)["x"]

    expected = np.broadcast_to(getattr(np, op)(data, axis=axes, keepdims=True), (4, 3))
    close(values(f, 4, params=data, batch=3), expected, rtol=1e-5)
    weights = jnp.arange(12.0).reshape(4, 3)
    got = jax.grad(lambda d: (weights * values(f, 4, params=d, batch=3)).sum())(data)
    want = jax.grad(lambda d: (weights * getattr(jnp, op)(d, axis=axes, keepdims=True)).sum())(data)
    close(got, want, rtol=1e-4, atol=1e-5)


def test_last_and_normalisation():
    data = jax.random.normal(KEY, (4, 3))

    def f(p, c, t):
        x = rlfx.inputs(p)[t]
        return c, (rlfx.last(x), (x - rlfx.mean(x)) / rlfx.std(x))

    last, normal = values(f, 4, params=data, batch=3)
    close(last, np.broadcast_to(data[-1], (4, 3)))
    close(normal, (data - data.mean()) / data.std(), rtol=1e-5, atol=1e-5)


def test_a_reduction_over_the_batch_inside_a_recurrence():
    def f(p, c, t):
        return c + rlfx.mean(c, "b"), c

    close(values(f, 3, carry=jnp.array([1.0, 3.0]), batch=2), [[1, 3], [3, 5], [7, 9]])


def test_reductions_without_a_batch_and_of_integers():
    def f(p, c, t):
        return c, (rlfx.sum(t.now), rlfx.mean(t.now), rlfx.max(1.0 * t, "b"), rlfx.sum(t > 0, "t"))

    total, mean, same, count = values(f, 4)
    close(total, [6] * 4)
    close(mean, [1.5] * 4)
    close(same, [0, 1, 2, 3])
    close(count, [3] * 4)


def test_every_counts_in_absolute_time():
    def f(p, target, t):
        target = rlfx.every(3, lambda: p * t.astype(p.dtype), otherwise=target)
        return target, target

    close(values(f, 7, params=jnp.float32(2.0), carry=jnp.float32(-1.0)), [0, 0, 0, 6, 6, 6, 12])
    close(values(f, 4, params=jnp.float32(2.0), carry=jnp.float32(-1.0), t0=2), [-1, 6, 6, 6])


def test_every_does_not_execute_in_between(capfd):
    def f(p, c, t):
        def seen():
            jax.debug.callback(lambda now: counted.append(int(now)), t.now)
            return c + 1.0

        c = rlfx.every(2, seen, otherwise=c)
        return c, c

    counted = []
    close(values(f, 5, carry=jnp.float32(0.0)), [1, 1, 2, 2, 3])
    jax.effects_barrier()
    assert sorted(counted) == [0, 2, 4]


def test_until_freezes_each_environment_and_pads():
    def f(p, c, t):
        return (c["x"] * p, {"x": c["x"] + 1.0, "stop": c["stop"]}, c["x"])

    fn = rlfx.compile(f, length=5, batch=3, until=lambda c: c["x"] >= c["stop"], reduce="sum")
    carry = {"x": jnp.zeros(3), "stop": jnp.array([2.0, 99.0, 0.5])}
    loss, (final, aux, lengths) = fn(2.0, carry)
    close(lengths, [2, 5, 1])
    close(final["x"], [2, 5, 1])
    close(aux.T, [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    close(loss, 2 * (1 + 10 + 0))
    close(jax.grad(lambda p: fn(p, carry)[0])(2.0), 11)
    grad = jax.grad(lambda x: fn(2.0, {**carry, "x": x})[0])(carry["x"])
    close(grad, [4, 10, 2])


def test_until_means_over_the_points_that_exist():
    fn = rlfx.compile(lambda p, c, t: (p * (1.0 + t), c + 1), length=6, batch=2, until=lambda c: c >= 3)
    loss, (_, _, lengths) = fn(1.0, jnp.array([0, 2]))
    close(lengths, [3, 1])
    close(loss, (1 + 2 + 3 + 1) / 4)


def test_until_with_reads_of_the_future_and_reductions():
    def f(p, c, t):
        x = rlfx.series(c + 0.0, end=-1.0)
        return c + 1.0, (x[t + 1], x[t:].sum(), rlfx.sum(x[t], "t"), rlfx.last(x[t]), x.window(0, 2, fill=9.0))

    program = rlfx.unroll(f, length=4, until=lambda c: c >= 3)
    _, (following, future, total, last, window), length = program(None, jnp.float32(0.0))
    assert length == 3
    close(following, [1, 2, -1, 0])
    close(future, [3, 3, 2, 0])
    close(total, [3, 3, 3, 0])
    close(last, [2, 2, 2, 0])
    close(window, [[0, 1], [1, 2], [2, 9], [0, 0]])


def test_until_without_an_end_runs_to_the_bound():
    _, out, length = rlfx.unroll(lambda p, c, t: (c, c), length=3, until=lambda c: c > 5)(None, jnp.int32(1))
    assert length == 3
    close(out, [1, 1, 1])


# -- the batch --------------------------------------------------------------------------------------------------------


def test_inputs_with_each_of_the_axes():
    p = {"tb": jnp.arange(6.0).reshape(3, 2), "t": jnp.array([10.0, 20.0, 30.0]), "b": jnp.array([100.0, 200.0])}

    def f(p, c, t):
        x = {a: rlfx.inputs(p[a], axes=a) for a in ("tb", "t", "b")}
        return c, (x["tb"][t] + x["t"][t] + x["b"][t], x["t"][t.length - 1 - t], x["tb"][0])

    out, reverse, first = values(f, 3, params=p, batch=2)
    close(out, p["tb"] + p["t"][:, None] + p["b"][None])
    close(reverse[:, 0], [30, 20, 10])
    close(first, [[0, 1]] * 3)


@pytest.mark.parametrize("batch", [2, None])
def test_inputs_whose_leaves_have_different_axes(batch):
    """A batch of replayed sequences: of every timestep, of every sequence, and of both; a part's axes are those of its leaves."""
    lead = () if batch is None else (batch,)
    data = {
        "steps": (jnp.arange(6.0)[: 3 * (batch or 1)].reshape(3, *lead), jnp.ones((3, *lead))), "clock": jnp.arange(3.0),
        "weight": jnp.full(lead, 10.0), "names": [jnp.ones((3, *lead))],
    }  # fmt: skip
    axes = {"steps": "tb", "clock": ("t",), "weight": "b", "names": ["t", "b"]}

    def f(p, c, t):
        x = rlfx.inputs(p, axes=axes)
        now = x[t]
        return c, (now["steps"][0] * now["weight"] + now["clock"], x[0]["steps"][1] + now["names"][0])

    out, ones = values(f, 3, params=data, batch=batch)
    clock = data["clock"].reshape(3, *(1,) * len(lead))
    close(out, data["steps"][0] * 10.0 + clock)
    close(ones, jnp.full((3, *lead), 2.0))


def test_shared_carry_has_no_batch_axis():
    def f(p, c, t):
        total = c["total"] + rlfx.sum(c["x"], "b")
        return {"total": total, "x": c["x"] + 1.0}, total

    carry = {"total": rlfx.Shared(jnp.float32(0.0)), "x": jnp.array([1.0, 2.0], jnp.float32)}
    final, out = rlfx.unroll(f, length=3, batch=2)(None, carry)
    assert isinstance(final["total"], rlfx.Shared)
    close(final["total"].value, 3 + 5 + 7)
    close(out, [[3, 3], [8, 8], [15, 15]])


def test_a_shared_pytree_and_shared_calls():
    def f(p, c, t):
        stats = rlfx.shared(
            lambda s, x: {"mean": 0.5 * s["mean"][0] + x.mean(0), "n": s["n"][0] + x.shape[0]}, c["stats"], c["x"]
        )
        return {"stats": stats, "x": c["x"] * 2.0}, stats["mean"]

    carry = {"stats": rlfx.Shared({"mean": jnp.zeros(2), "n": jnp.int32(0)}), "x": jnp.array([[1.0, 2.0], [3.0, 6.0]])}
    final, out = rlfx.unroll(f, length=2, batch=2)(None, carry)
    close(final["stats"].value["n"], 4)
    close(out[:, 0], [[2, 4], [5, 10]])


def test_shared_calls_without_a_batch():
    close(values(lambda p, c, t: (c, rlfx.shared(lambda x: x * 2.0, c)), 2, carry=jnp.float32(3.0)), [6, 6])


def test_learning_at_every_timestep_with_jax_grad_inside():
    def f(p, c, t):
        x, y = rlfx.inputs(p["x"])[t], rlfx.inputs(p["y"])[t]
        grad = jax.grad(lambda w: 0.5 * (w @ x - y) ** 2)(c)
        return c - 0.1 * rlfx.mean(grad, "b"), c

    k = jax.random.split(KEY, 2)
    p = {"x": jax.random.normal(k[0], (4, 3, 2)), "y": jax.random.normal(k[1], (4, 3))}
    w = np.array([0.5, -0.5])
    expected = []
    for x, y in zip(np.asarray(p["x"]), np.asarray(p["y"]), strict=True):
        expected.append(w)
        w = w - 0.1 * ((x @ w - y)[:, None] * x).mean(0)
    final, out = rlfx.unroll(f, length=4, batch=3)(p, rlfx.Shared(jnp.array([0.5, -0.5])))
    close(out[:, 0], np.stack(expected), rtol=1e-5)
    close(final.value, w, rtol=1e-5)


# -- reads inside control flow ------------------------------------------------------------------------------------


def test_reads_inside_cond_scan_vmap_and_counted_loops_are_moved_out():
    def f(p, c, t):
        x = rlfx.series(rlfx.inputs(p)[t], start=0.0)
        branch = jax.lax.cond(t % 2 == 0, lambda: x[t - 1], lambda: -x[t])
        scanned = jax.lax.scan(lambda a, k: (a + k * x[t], None), jnp.float32(0.0), jnp.arange(3, dtype=jnp.float32))[0]
        looped = jax.lax.fori_loop(0, 3, lambda i, a: a + x[t - 1], jnp.float32(0.0))
        mapped = jax.vmap(lambda k: k * x[t])(jnp.arange(3, dtype=jnp.float32)).sum()
        return c, (branch, scanned, looped, mapped)

    x = jnp.array([1.0, 2.0, 4.0], jnp.float32)
    branch, scanned, looped, mapped = values(f, 3, params=x)
    close(branch, [0, -2, 2])
    close(scanned, 3 * x)
    close(looped, [0, 3, 6])
    close(mapped, 3 * x)


def test_until_stops_the_loop_when_every_environment_has_ended():
    """At most one iteration runs beyond the last end, with and without gradients."""
    seen = []

    def f(p, c, t):
        jax.debug.callback(lambda now, c: seen.append(int(now)), jnp.maximum(t, 0), c)
        return p * c, c + 1.0

    fn = rlfx.compile(f, length=1000, batch=2, until=lambda c: c >= 3.0)
    carry = jnp.array([0.0, 1.0], jnp.float32)
    for call in (fn, jax.value_and_grad(lambda p, c: fn(p, c)[0])):
        seen.clear()
        out = jax.jit(call)(jnp.float32(2.0), carry)
        jax.block_until_ready(out)
        jax.effects_barrier()
        assert max(seen) <= 3
    assert fn(jnp.float32(2.0), carry)[1][2].tolist() == [3, 2]
    np.testing.assert_allclose(out[0], 2.0 * (0 + 1 + 2 + 1 + 2) / 5)


def test_under_until_a_sum_over_environments_counts_those_that_go_on_even_of_a_constant():
    """The ends of some decide what the others see, hence when they end: in the reference, too."""

    def f(p, c, t):
        going = rlfx.sum(jnp.float32(1.0), "b")
        return p * going, jnp.tanh(0.1 * going + 0.5 * c), going

    options = {"length": 4, "batch": 3, "until": lambda c: c > 0.35, "reduce": "sum"}
    carry = jnp.array([-0.4, 0.5, 0.0], jnp.float32)
    for fn in (rlfx.compile(f, **options), rlfx.reference(f, **options)):
        loss, (last, going, lengths) = fn(jnp.float32(1.0), carry)
        assert lengths.tolist() == [4, 1, 3]
        close(going, [[3, 3, 3], [2, 0, 2], [2, 0, 2], [1, 0, 0]])
        close(loss, 3 * 3 + 2 * 2 + 2 * 2 + 1)
        h = -0.4
        for n in (3, 2, 2, 1):
            h = np.tanh(0.1 * n + 0.5 * h)
        close(last[0], h)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_reduction_over_environments_is_extended_beyond_the_end(ahead):
    def f(p, c, t):
        return rlfx.series(rlfx.max(p * c, "b"))[t + ahead], jnp.tanh(c + 0.3)

    args = jnp.float32(0.7), jnp.array([0.1, 0.2], jnp.float32)
    got, expected = (
        jax.value_and_grad(lambda p, c, g=make(f, length=3, batch=2): g(p, c)[0], (0, 1))(*args)
        for make in (rlfx.compile, rlfx.reference)
    )
    highest = [0.2]
    for _ in range(3):
        highest.append(np.tanh(highest[-1] + 0.3))
    close(got[0], 0.7 * np.mean([highest[min(t + ahead, 3)] for t in range(3)]))
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-5), got, expected)


def forward(index):
    def f(p, c, t):
        read = rlfx.series(jnp.tanh(p * c), start=p + 0.1, end=p - 0.2)[index(t)]
        return read, jnp.tanh(read + 0.5 * c)

    return f


def backward(index):
    def f(p, c, t):
        def equation(x):
            y = rlfx.series(jnp.tanh(0.5 * x[t + 1] + c), start=0.3 + p, end=0.7 * p)
            return jnp.tanh(0.6 * x[t + 1] + y[index(t)])

        return rlfx.solve(equation, end=0.1), c + 0.3

    return f


@pytest.mark.parametrize(
    ("direction", "index", "length"),
    [
        (forward, lambda t: 2 * t, 2),  # of three, it would read the future
        (forward, lambda t: 2 * t - t.length, 2),
        (forward, lambda t: 2 * t - t.length, 3),
        (backward, lambda t: 2 * t - 1, 2),
        (backward, lambda t: 2 * t - 1, 3),
    ],
)
def test_a_loop_reads_both_boundaries_whichever_way_it_runs(direction, index, length):
    """``x[2 * t]`` of two timesteps is the present at 0 and the end at 1: it belongs into a forward loop."""
    got, expected = (
        jax.value_and_grad(lambda p, c, fn=make(direction(index), length=length): fn(p, c)[0], (0, 1))(
            jnp.float32(0.8), jnp.float32(0.4)
        )
        for make in (rlfx.compile, rlfx.reference)
    )
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-5), got, expected)


def test_a_value_that_a_loop_computes_but_that_does_not_vary_with_time_has_no_axis_of_time():
    """``x[0]`` of a series of the loop itself, as aux, in the loss, and in the gradient."""

    def f(p, c, t):
        x = rlfx.series(p * c + 0.1, end=0.0)
        return x[0] * x[t + 1], jnp.tanh(x[0] + 0.5 * c), x[0]

    args = jnp.float32(0.7), jnp.array([0.3, -0.2], jnp.float32)
    for length in (1, 2, 5):
        fn, reference = (make(f, length=length, batch=2) for make in (rlfx.compile, rlfx.reference))
        got, expected = (jax.value_and_grad(g, (0, 1), has_aux=True)(*args) for g in (fn, reference))
        assert got[0][1][1].shape == (2,)
        jax.tree.map(lambda a, b: close(a, b, rtol=1e-5), got, expected)


def test_until_under_vmap_over_seeds_ends_with_the_last_seed():
    fn = rlfx.compile(lambda p, c, t: (p * c, c + 1.0), length=50, until=lambda c: c >= 4.0)
    starts = jnp.array([0.0, 3.0, 10.0])
    losses = jax.vmap(lambda c: fn(2.0, c)[0])(starts)
    alone = jnp.stack([fn(2.0, c)[0] for c in starts])
    np.testing.assert_allclose(losses, alone)
