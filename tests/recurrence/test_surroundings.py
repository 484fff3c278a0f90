"""Programs inside of other things: meshes, scans, other programs, host memory; what environments share as they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rlfx
from rlfx.errors import ScheduleError
from tests.recurrence.test_legal import refused

KEY = jax.random.key(0)
S = rlfx.series
ONE = jnp.float32(1.0)
AUTO = jax.sharding.AxisType.Auto
MESH, PAIR = jax.make_mesh((2, 2), ("p", "b"), axis_types=(AUTO, AUTO)), jax.make_mesh((2,), ("b",), axis_types=(AUTO,))


# -- jax.shard_map of the user's -------------------------------------------------------------------------------------


def draws(p, c, t):
    return p * c + 0.1 * jax.random.normal(t.key), 0.9 * c


def inner_loops(p, c, t):
    c = jax.lax.scan(lambda c, x: (c * p + x, None), c, jnp.ones(2))[0]
    c = jax.lax.cond(c > 3.0, lambda c: c - 3.0, lambda c: c, c)
    return jnp.sin(c) * p, jax.lax.fori_loop(0, 2, lambda _, c: 0.9 * c, c)


def slices(p, c, t):
    x = S(jnp.sin(p * c), end=0.5)
    return x[: t + 1].sum() * x[t + 1] + jax.nn.softmax(x[: t + 1]) @ x[: t + 1], 0.9 * c


def together(p, c, t):
    return p * c * rlfx.mean(c, "b") + rlfx.shared(lambda c: c.sum(), c), 0.9 * c


def recurrences(p, c, t):
    g = rlfx.solve(lambda g: c + 0.9 * g[t + 1], end=0.0)
    return p * jax.lax.stop_gradient(g) * c, p * 0.5 * c


PROGRAMS = {
    "draws": (draws, {}),
    "inner loops": (inner_loops, {}),
    "slices": (slices, {}),
    "together": (together, {}),
    "recurrences": (recurrences, {}),
    "until": (draws, {"until": lambda c: c < 0.8}),
    "a budget": (draws, {"memory_budget": 1 << 24}),
    "blocks": (draws, {"plan": rlfx.Plan("blocks", 2)}),
    "a stream": (draws, {"plan": rlfx.Plan("stream", 2)}),
    "acting again": (draws, {"plan": rlfx.Plan("replay", 2)}),
}


def test_programs_inside_shard_map():
    """With its default check of what varies: values, gradients of what devices share (summed) and of what they do not."""
    fns = {name: rlfx.compile(f, length=4, batch=2, **options) for name, (f, options) in PROGRAMS.items()}
    c, keys, p = 1.0 + jnp.arange(4.0), jax.random.split(KEY, 2), jnp.float32(0.7)

    def results(p, c, key):
        def all_of(name):
            own = lambda p, c: fns[name](p, c, key)[0]  # noqa: E731
            value, by_p = jax.value_and_grad(own)(p, c)
            of_parameters_alone = "plan" in PROGRAMS[name][1]
            return value, by_p, jnp.zeros_like(c) if of_parameters_alone else jax.grad(own, 1)(p, c)

        return {name: all_of(name) for name in fns}

    def inside(p, c, keys):
        return jax.tree.map(lambda x: x[None], results(p, c, keys[0]))

    specs = {"mesh": PAIR, "in_specs": (P(), P("b"), P("b")), "out_specs": P("b")}
    found = jax.jit(jax.shard_map(inside, **specs))(p, c, keys)
    alone = jax.jit(jax.vmap(results, (None, 0, 0)))(p, c.reshape(2, 2), keys)
    for name, (value, by_p, by_c) in alone.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[name][1], np.full(2, by_p.sum()), rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found[name][2], by_c, rtol=1e-4, err_msg=name)


def test_second_derivatives_inside_shard_map():
    fn = rlfx.compile(lambda p, c, t: (jnp.sin(p * c), 0.9 * c), length=3, batch=2)
    second = lambda p, c: jax.grad(jax.grad(lambda p: fn(p, c)[0]))(p)  # noqa: E731
    varying = lambda p, c: second(jax.lax.pcast(p, "b", to="varying"), c)[None]  # noqa: E731
    c = 1.0 + jnp.arange(4.0)
    found = jax.jit(jax.shard_map(varying, mesh=PAIR, in_specs=(P(), P("b")), out_specs=P("b")))(ONE, c)
    np.testing.assert_allclose(found, [second(ONE, c[:2]), second(ONE, c[2:])], rtol=1e-5)


# -- meshes in meshes ------------------------------------------------------------------------------------------------


def make(mesh):
    f = lambda p, c, t: (jnp.sin(p * c) * rlfx.mean(c, "b"), 0.9 * c)  # noqa: E731
    return rlfx.compile(f, length=3, batch=4, mesh=mesh, **({} if mesh is None else {"mesh_axis": "b"}))


@pytest.mark.parametrize("axes", [{"p"}, {"b"}, {"p", "b"}])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mesh_inside_shard_map(axes, check_vma):
    fn = make(MESH)
    options = {"mesh": MESH, "in_specs": P(), "out_specs": P(), "axis_names": axes, "check_vma": check_vma}
    inside = jax.shard_map(lambda x: fn(2.0, x)[0], **options)
    fact = "is split over the mesh axis 'b', but is called inside a jax.shard_map over ["
    refused(ScheduleError, [fact, "Compile it without mesh="], lambda: jax.jit(inside)(jnp.arange(4.0)))
    assert np.isfinite(fn(2.0, jnp.arange(4.0))[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mesh_of_an_inner_program_inside_shard_map(check_vma):
    """An axis that the shard_map leaves alone is not enough; without mesh= it is right, and so are meshes for both."""

    def run(mesh):
        inner = make(mesh)

        def outer(p, c, i):
            (loss, (c, _)), slope = jax.value_and_grad(lambda p: inner(p, c), has_aux=True)(p)
            return loss + slope, c

        return rlfx.compile(outer, length=2, dim="i")

    def found(mesh):
        inside = lambda p, c: jax.value_and_grad(lambda p: run(mesh)(p[0], c[0])[0])(p)  # noqa: E731
        specs = {
            "mesh": MESH,
            "in_specs": P("p"),
            "out_specs": (P(), P("p")),
            "axis_names": {"p"},
            "check_vma": check_vma,
        }
        summed = lambda p, c: (lambda loss, slope: (jax.lax.psum(loss, "p"), slope))(*inside(p, c))  # noqa: E731
        return jax.jit(jax.shard_map(summed, **specs))(p, c)

    p, c = jnp.array([0.5, 2.0]), jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    fact = "is split over the mesh axis 'b', but is called inside a jax.shard_map over ['p']"
    refused(ScheduleError, [fact, "a program with mesh= and an axis"], lambda: found(MESH))
    alone = [jax.value_and_grad(lambda p, c=c: run(None)(p, c)[0])(p) for p, c in zip(p, c, strict=True)]
    loss, slopes = found(None)
    np.testing.assert_allclose(loss, sum(value for value, _ in alone), rtol=1e-5)
    np.testing.assert_allclose(slopes, [slope for _, slope in alone], rtol=1e-5)


def test_an_outer_and_an_inner_mesh():
    """Of one axis, both; or what is split by hand."""
    inner = make(MESH)
    by_hand = jax.shard_map(lambda x: jax.lax.psum(x, "p"), mesh=MESH, in_specs=P("p"), out_specs=P(), check_vma=False)
    options = {"length": 2, "batch": 2}
    for of, axis in (
        (lambda x: inner(x, jnp.arange(4.0) + x)[0], "b"),
        (lambda x: by_hand(x + jnp.arange(2.0)).sum(), "p"),
    ):
        f = lambda p, c, t, of=of: (of(p * c), 0.8 * c)  # noqa: E731
        fact = f"is split over the mesh axis {axis!r}, and calls what is itself split over a mesh"
        both = rlfx.compile(f, mesh=MESH, mesh_axis=axis, **options)
        for call in (lambda p: both(p, jnp.ones(2))[0], jax.grad(lambda p: both(p, jnp.ones(2))[0])):
            refused(ScheduleError, [fact, "one mesh, and to each an axis of its own"], lambda call=call: call(2.0))


@pytest.mark.skipif(jax.device_count() < 4, reason="two by two devices")
def test_two_by_two_devices_are_one():
    """Members on two, their environments on two: values, and derivatives of updates with a gradient inside."""

    def inner(w, x, t):
        return (w * x + 0.1 * jax.random.normal(t.key) - rlfx.mean(x, over="b")) ** 2, 0.9 * x

    def results(mesh):
        split = lambda axis: {} if mesh is None else {"mesh": mesh, "mesh_axis": axis}  # noqa: E731
        loss_fn = rlfx.compile(inner, length=3, batch=4, **split("b"))

        def member(_, c, i):
            w, x = c
            (loss, (x, _)), g = jax.value_and_grad(lambda w: loss_fn(w, x, i.key), has_aux=True)(w)
            return (w - 0.1 * g - 0.05 * rlfx.mean(w, over="p"), x), loss

        run = rlfx.unroll(member, length=3, dim="i", batch={"p": 2}, **split("p"))
        x = jnp.stack([jnp.linspace(-1.0, 1.0, 4)] * 2)
        total = lambda w: (lambda out: (out[1].sum(), out))(run(None, (w, x), KEY))  # noqa: E731
        return jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.array([0.5, 1.0]))

    four = jax.make_mesh((2, 2), ("p", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results(four), results(None))


def test_what_is_traced_among_named_axes_is_traced_again_without():
    fn = rlfx.compile(lambda p, c, t: (p * c * jax.lax.axis_size("n"), c), length=2)
    sizes = [jax.vmap(lambda p: fn(p, ONE)[0], axis_name="n")(jnp.ones(n)) for n in (2, 3)]
    np.testing.assert_array_equal(jnp.concatenate(sizes), [2, 2, 3, 3, 3])
    with pytest.raises(NameError, match="unbound axis name"):
        fn(1.0, ONE)


# -- second order under a budget -------------------------------------------------------------------------------------


def test_second_order_through_a_program_with_a_budget():
    f = lambda p, c, t: (jnp.sin(p * c) * p + 0.1 * jax.random.normal(t.key), 0.9 * c)  # noqa: E731
    c = jnp.array([1.0, 2.0])

    def orders(fn):
        loss = lambda p: fn(p, c, KEY)[0]  # noqa: E731
        step = lambda p: p - 0.1 * jax.grad(loss)(p)  # noqa: E731
        updated = lambda p: jax.lax.scan(lambda p, _: (step(p), None), p, None, length=3)[0]  # noqa: E731
        outer = rlfx.compile(lambda p, c, t: (step(p) * c, 0.9 * c), length=2)
        return {
            "twice": jax.grad(jax.grad(loss))(2.0),
            "scan": jax.grad(updated)(2.0),
            "vmap": jax.grad(lambda p: jax.vmap(jax.grad(loss))(p * jnp.arange(1.0, 3.0)).sum())(2.0),
            "forward over reverse": jax.jvp(jax.grad(loss), (2.0,), (1.0,))[1],
            "program": jax.grad(lambda p: outer(p, ONE)[0])(2.0),
        }

    plain = jax.jit(lambda: orders(rlfx.compile(f, length=4, batch=2)))()
    budget = jax.jit(lambda: orders(rlfx.compile(f, length=4, batch=2, memory_budget=1 << 24)))()
    for name, value in plain.items():
        np.testing.assert_allclose(budget[name], value, rtol=1e-5, err_msg=name)


# -- host memory -----------------------------------------------------------------------------------------------------


def attention(p, c, t):
    g = rlfx.solve(lambda g: jax.nn.logsumexp(jnp.stack([0.5 * g[t + 1], p * c, c])), end=0.0)
    return (jnp.sin(p * c) * g).sum(), 0.9 * c


def smoothed(p, c, t):
    g = rlfx.solve(lambda g: jnp.logaddexp(g[t - 1], jnp.sin(c)), start=0.0)
    return p * g * jnp.sin(p * c), 0.9 * c


def bootstrapped(p, c, t):
    v = S(jnp.sin(p * c))
    return (v[t] - 0.9 * jax.lax.stop_gradient(v[t + 1]) - c) ** 2, 0.9 * c


def last(p, c, t):
    x = S(jnp.sin(c * 2.0))
    return p * x[t] * rlfx.last(jnp.cos(c)) + jax.random.normal(t.key), 0.9 * c


@pytest.mark.parametrize("until", [None, lambda c: c < 0.8], ids=["all", "until"])
def test_offloading_changes_no_result(until):
    c = jnp.array([1.0, 2.0, 0.7])

    def results(transform):
        found = {}
        for f in (attention, smoothed, bootstrapped, last):
            fn = rlfx.compile(transform(f), length=6, batch=3, until=until)
            found[f.__name__] = jax.value_and_grad(lambda p, fn=fn: fn(p, c, KEY)[0])(jnp.float32(1.3))
        return found

    here, far = (jax.jit(lambda t=t: results(t))() for t in (lambda f: f, lambda f: rlfx.offload(f, min_bytes=1)))
    for name, (value, gradient) in here.items():
        np.testing.assert_allclose(far[name], (value, gradient), rtol=1e-5, err_msg=name)


# -- what environments share as they end ----------------------------------------------------------------------------


def test_what_environments_share_goes_on_until_the_last_of_them_ends():
    T, ends = 7, 3.0
    start = np.array([0.0, 2.0, 1.0])

    def f(p, c, t):
        n, total, x = c["n"], c["total"], c["x"]
        v = S(p * x * n)
        following = {"n": n + 1.0, "total": 0.5 * total + rlfx.mean(x, "b"), "x": x + 1.0}
        return v[t] - 0.5 * v[t + 1] + total, following, (n, total)

    lengths = (ends + 1.0 - start).astype(int)
    n, total, loss, gradient, seen = 0.0, 1.0, 0.0, 0.0, []
    for t in range(lengths.max()):
        going = [b for b in range(3) if t < lengths[b]]
        seen.append((n, total))
        for b in going:
            x = start[b] + t
            gradient += x * n - 0.5 * (x + 1.0) * (n + 1.0)
            loss += total
        n, total = n + 1.0, 0.5 * total + np.mean([start[b] + t for b in going])
    loss, gradient = (loss + 2.0 * gradient) / lengths.sum(), gradient / lengths.sum()

    carry = {"n": rlfx.Shared(jnp.float32(0.0)), "total": rlfx.Shared(ONE), "x": jnp.asarray(start, jnp.float32)}
    until = lambda c: c["x"] > ends  # noqa: E731
    for make in (rlfx.compile, rlfx.reference):
        fn = make(f, length=T, batch=3, until=until)
        both = lambda p, fn=fn: jax.value_and_grad(lambda p: fn(p, carry), has_aux=True)(p)  # noqa: E731
        alone = lambda p, fn=fn: (fn(p, carry), gradient)  # noqa: E731
        (value, (after, aux, found)), by_p = jax.jit(both)(2.0) if make is rlfx.compile else alone(2.0)
        np.testing.assert_array_equal(found, lengths)
        np.testing.assert_allclose([value, by_p], [loss, gradient], rtol=1e-5)
        np.testing.assert_allclose([after["n"].value, after["total"].value], [n, total], rtol=1e-6)
        np.testing.assert_array_equal(after["x"], start + lengths)
        for b in range(3):
            of_b = [x[: lengths[b], b] for x in aux]
            np.testing.assert_allclose(np.stack(of_b, 1), seen[: lengths[b]], rtol=1e-6)


#: What may be shared: ``(first, next)``, given the carry of one environment.
SHARED = {
    "a counter": (jnp.int32(3), lambda n, x: n + 1),
    "a flag": (jnp.bool_(True), lambda n, x: ~n),
    "a tree": ({"a": ONE, "b": [jnp.zeros(2)]}, lambda n, x: jax.tree.map(lambda v: 0.5 * v + 1.0, n)),
    "half precision": (jnp.bfloat16(1), lambda n, x: n * jnp.bfloat16(0.5)),
    "what never changes": (jnp.arange(3.0), lambda n, x: n),
    "a mean": (ONE, lambda n, x: n + rlfx.mean(x, "b")),
    "a maximum": (ONE, lambda n, x: jnp.maximum(n, rlfx.max(x, "b"))),
    "a call for all": (ONE, lambda n, x: rlfx.shared(lambda x, n: n[0] + x.sum(), x, n)),
    "a key": (KEY, lambda n, x: jax.random.split(n)[0]),
}


@pytest.mark.parametrize("mesh", [None, PAIR], ids=["one device", "two devices"])
def test_every_kind_of_shared_carry_under_until(mesh):
    def f(p, c, t):
        shared = {name: step(c["n"][name], c["x"]) for name, (_, step) in SHARED.items()}
        return p * c["x"], {"n": shared, "x": c["x"] + 1.0}

    start = jnp.array([0.0, 2.0, 1.0, 1.0])
    carry = {"n": rlfx.Shared({name: first for name, (first, _) in SHARED.items()}), "x": start}
    options = {"length": 6, "batch": 4, "until": lambda c: c["x"] > 3.0}
    _, (found, _, _) = jax.jit(rlfx.compile(f, mesh=mesh, **options))(2.0, carry)
    _, (expected, _, _) = (
        rlfx.reference(f, **options)(2.0, carry) if mesh is None else rlfx.compile(f, **options)(2.0, carry)
    )
    of_key = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    for name in SHARED:
        for x, y in zip(*(jax.tree.leaves(c["n"].value[name]) for c in (found, expected)), strict=True):
            np.testing.assert_allclose(*(np.asarray(of_key(v), np.float64) for v in (x, y)), rtol=1e-5, err_msg=name)
    assert found["n"].value["a counter"] == 3 + 4


def test_a_function_may_change_its_carry_in_place():
    """As brax's environments do with their metrics."""

    def f(w, c, t):
        c["x"] = c["x"] * w
        c.update(reward=c["x"] + 1.0)
        return c["reward"], c

    def g(w, c, t):
        x = c["x"] * w
        return x + 1.0, {"x": x, "reward": x + 1.0}

    start = {"x": jnp.float32(2.0), "reward": jnp.float32(0.0)}
    got, want = (rlfx.compile(h, length=3)(0.5, start) for h in (f, g))
    jax.tree.map(np.testing.assert_array_equal, got, want)
