"""Products of what is put together from parts that vary less: the same values and gradients; apart where that is less work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.apart import with_parts_apart

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, apart=on)) for on in (True, False))
DOT = J.primitive("dot_general")
T, B, Z, X, N, H = 5, 3, 4, 6, 7, 8
K = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "w": jax.random.normal(K[0], (2 * X + 5, H)) / 3.0,
    "v": jax.random.normal(K[1], (H,)),
    "x": jax.random.normal(K[2], (T, B, X)),
    "many": jax.random.normal(K[3], (N, X)),
    "task": jax.random.normal(K[4], (5,)),
}
CARRY = jax.random.normal(K[5], (B, Z))


def told(p, *parts):
    return jnp.tanh(jnp.concatenate(parts) @ p["w"][: sum(map(len, parts))]) @ p["v"]


def one_and_many(p, x, z):
    """A state beside many points that are the same at every timestep."""
    return jax.vmap(lambda y: told(p, z, y))(p["many"]).sum()


def many_of_this_timestep(p, x, z):
    """A state beside many actions of its own; the state comes last."""
    return jax.vmap(lambda y: told(p, jnp.sin(y * x[0]), z))(p["many"]).sum()


def of_the_task(p, x, z):
    """What is the same at every point, between what is not."""
    return told(p, z, p["task"], x)


def of_weights_first(p, x, z):
    """``w.T @ x``, and many columns."""
    columns = jnp.concatenate([jnp.broadcast_to(z[:, None], (Z, N)), p["many"].T * x[0]])
    return (p["v"] @ jnp.tanh(p["w"][: Z + X].T @ columns)).sum()


def all_pairs(p, x, z):
    """Two axes, each of another part; nothing is left of the product."""
    pair = lambda y, u: told(p, y, u)  # noqa: E731
    return jax.vmap(lambda y: jax.vmap(lambda u: pair(y, u))(p["many"]))(p["many"] * z[0]).sum()


def of_rows(p, x, z):
    """A matrix of weights for each row, so many products in one."""
    both = jnp.concatenate([jnp.broadcast_to(z, (N, Z)), p["many"] * x[0]], 1)
    return jnp.tanh(jnp.einsum("nk,kha->nha", both, p["w"][: Z + X].reshape(Z + X, 2, 4))).sum()


EDGES = np.array([[0, 2], [1, 0], [2, 1], [3, 2], [3, 3], [1, 3], [0, 1], [2, 2], [1, 1], [0, 3]])


def messages(p, x, z):
    """Of every edge, its two nodes, of which there are fewer."""
    nodes = jnp.sin(p["many"][:4] * z[0])
    to, of = nodes[EDGES[:, 0]], nodes[EDGES[:, 1]]
    return jnp.tanh(jnp.concatenate([to, of], 1) @ p["w"][: 2 * X]).sum()


def messages_of_columns(p, x, z):
    """``w.T @ x.T``, of nodes that are picked anew at every timestep."""
    nodes, last = jnp.sin(p["many"][:4] * z[0]), t_of(x)
    rows = jnp.concatenate([nodes[(EDGES[:, 0] + last) % 4], nodes[EDGES[:, 1]]], 1)
    return jax.lax.dot_general(p["w"][: 2 * X], rows, (((0,), (1,)), ((), ()))).sum(1) @ p["v"]


def t_of(x):
    return (jnp.abs(x[0]) * 10.0).astype(jnp.int32)


def messages_of_two_graphs(p, x, z):
    """The same numbers pick rows of matrices of different sizes."""
    to, taken = jnp.asarray(EDGES[:, 0]), {"mode": "clip", "axis": 0}
    rows = jnp.take(p["many"][:4] * z[0], to, **taken), jnp.take(p["many"][:5] * z[1], to, **taken)
    return jnp.tanh(jnp.concatenate(rows, 1) @ p["w"][: 2 * X]).sum()


def of_a_row(p, x, z):
    """A row that the data picks, beside what is not picked."""
    return told(p, z, p["many"][t_of(x) % 4], x[:2])


def of_the_last_row(p, x, z):
    """A slice that would begin beyond the matrix takes its last row; the weights come first, and have two axes."""
    row = jax.lax.dynamic_index_in_dim(p["many"][:5], 3 + t_of(x) % 4, keepdims=False)
    weights = p["w"][:X].T.reshape(2, 4, X)
    return jnp.tanh(jax.lax.dot_general(weights, row, (((2,), (0,)), ((), ())))).sum() * z[0]


def of_a_row_by_a_gather(p, x, z):
    return jnp.tanh(jnp.take(jnp.sin(p["many"][:4]), t_of(x) % 4, axis=0, mode="clip") @ p["w"][:X]) @ p["v"] * z[0]


PROGRAMS = [
    one_and_many, many_of_this_timestep, of_the_task, of_weights_first, all_pairs, of_rows, messages, messages_of_columns,
    messages_of_two_graphs, of_a_row, of_the_last_row, of_a_row_by_a_gather,
]  # fmt: skip


def timestep(f, p, z, t):
    x = rlfx.inputs(p["x"])[t]
    return f(p, x, z), 0.9 * jnp.roll(z, 1) + 0.1 * x[:Z]


def gradient(f, target, wrt, **how):
    fn = rlfx.compile(functools.partial(timestep, f), length=T, batch=B, target=target, **how)
    return jax.jit(jax.value_and_grad(lambda p, z: fn(p, z)[0], argnums=wrt))


def by_hand(f, wrt):
    def loss(p, carry):
        total = 0.0
        for b in range(B):
            z = carry[b]
            for t in range(T):
                total += f(p, p["x"][t, b], z)
                z = 0.9 * jnp.roll(z, 1) + 0.1 * p["x"][t, b][:Z]
        return total / (T * B)

    return jax.value_and_grad(loss, argnums=wrt)


@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize(("plan", "wrt"), [(None, (0, 1)), (rlfx.Plan(), (0, 1)), (rlfx.Plan(environments=1), 0)])
def test_values_and_gradients_are_those_of_one_product(f, plan, wrt):
    found, expected = gradient(f, ALWAYS, wrt, plan=plan)(PARAMS, CARRY), by_hand(f, wrt)(PARAMS, CARRY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def products(f):
    traced = rlfx.trace(functools.partial(timestep, f), PARAMS, CARRY, length=T, batch=B)
    apart = with_parts_apart(traced)
    count = lambda program: sum(e.op is DOT for e in program.equations)  # noqa: E731
    return traced, apart, count(apart) - count(traced)


@pytest.mark.parametrize("f", PROGRAMS)
def test_each_group_of_parts_has_a_product(f):
    traced, apart, more = products(f)
    assert apart is not traced
    assert more == (0 if f in (of_the_last_row, of_a_row_by_a_gather) else 1)  # a row alone has its product elsewhere
    assert with_parts_apart(apart) is apart
    assert not rlfx.target("h200").rewrites.apart


def test_what_varies_less_is_computed_less_often():
    _, apart, _ = products(one_and_many)
    dims = [apart.dims_of(e.outputs[0]) for e in apart.equations if e.op is DOT and e.outputs[0].shape[-1:] == (H,)]
    assert frozenset() in dims  # the product of the points: once
    assert frozenset("tb") in dims


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda p, x, z: told(p, z, x), id="parts that vary alike"),
        pytest.param(lambda p, x, z: told(p, z, x, jnp.ones(3)), id="few rows"),
        pytest.param(lambda p, x, z: (jnp.concatenate([z, p["task"]]) * p["w"][:9, 0]).sum(), id="no product"),
        pytest.param(
            lambda p, x, z: (
                jnp.concatenate([z, p["task"]]).astype(jnp.bfloat16) @ p["w"][:9].astype(jnp.bfloat16)
            ).astype(jnp.float32).sum(), id="half precision"),
        pytest.param(
            lambda p, x, z: jnp.tanh(jnp.concatenate([z[None], p["many"][:, :Z]]) @ p["w"][:Z]).sum(), id="rows, not columns"
        ),
    ],
)  # fmt: skip
def test_others_stay_as_they_are(f):
    traced, apart, _ = products(f)
    assert apart is traced


def halves_of_an_episode(w, series, t):
    """A vector of all timesteps, of two slices whose lengths depend on t."""
    both = jnp.concatenate([series[: t + 1], 2.0 * series[t + 1 :]])
    return w[:T] @ jnp.sin(both[:, 0]) + both[:, 1] @ both[:, 0]


def rows_of_a_slice(w, series, t):
    """Rows picked of a slice, beside one that is the same for all."""
    rows = series[: t + 1][jnp.minimum(jnp.array([0, 1, 0, 2, 1, 0]), t.now)]
    return jnp.tanh(jnp.concatenate([rows, jnp.broadcast_to(series[t], rows.shape)], 1) @ w[: 2 * X].reshape(2 * X, 1)).sum()


@pytest.mark.parametrize("f", [halves_of_an_episode, rows_of_a_slice])
def test_parts_of_slices_that_depend_on_t(f):
    def program(p, z, t):
        return f(p["w"][:, 0], rlfx.series(rlfx.inputs(p["x"])[t]), t), z

    traced = rlfx.trace(program, PARAMS, CARRY, length=T, batch=B)
    assert any(e.op is DOT for e in traced.equations)
    assert (with_parts_apart(traced) is traced) == (f is halves_of_an_episode)  # what is the same for all rows may leave them

    def gradient(make, **how):
        fn = make(program, length=T, batch=B, **how)
        return jax.value_and_grad(lambda p: fn(p, CARRY)[0])(PARAMS)

    found, expected = gradient(rlfx.compile, target=ALWAYS), gradient(rlfx.reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def aims_from_a_window(p, x, rows):
    """A network of each timestep of a window, and of where each of many aims is from there."""
    near = lambda aim: jnp.concatenate([rows, (x + aim)[None] - rows], 1)  # noqa: E731
    return jax.vmap(lambda aim: (jnp.tanh(near(aim) @ p["w"][: 2 * X]) @ p["v"]).sum())(p["many"]).sum()


def the_past_from_here(p, x, rows):
    """What is spread along the slice itself, beside it."""
    both = jnp.concatenate([jnp.broadcast_to(x, rows.shape), jnp.sin(rows)], 1)
    return (jnp.tanh(both @ p["w"][: 2 * X]) @ p["v"]).sum()


def of_columns(p, x, rows):
    """``w.T @ columns``, of the past and of what is the same at all timesteps."""
    same = jnp.broadcast_to(p["task"][:, None], (5, rows.shape[0]))
    return (p["v"] @ jnp.tanh(p["w"][: X + 5].T @ jnp.concatenate([rows.T, same]))).sum()


def picked_by_a_slice(p, x, rows):
    """Embeddings of tokens so far: there are fewer tokens than points."""
    tokens = jnp.argmax(rows[:, :3], 1)
    return (jnp.tanh(p["many"][tokens] @ p["w"][:X]) @ p["v"]).sum()


SLICES = {
    "window": (lambda series, t: series[t : t + 3], lambda xs, t: xs[t : t + 3]),
    "future, at last empty": (lambda series, t: series[t + 1 :], lambda xs, t: xs[t + 1 :]),
}


@pytest.mark.parametrize("f", [aims_from_a_window, the_past_from_here, of_columns, picked_by_a_slice])
@pytest.mark.parametrize("read", SLICES)
def test_products_of_slices_fall_apart_too(f, read):
    """Their rows are as many as t says; values and gradients are those of plain loops."""
    sliced, plain = SLICES[read]

    def program(p, z, t):
        x = rlfx.inputs(p["x"])[t]
        return f(p, x, sliced(rlfx.series(jnp.sin(x)), t)), z

    def by_loops(p):
        x = p["x"]
        return sum(f(p, x[t, b], plain(jnp.sin(x[:, b]), t)) for t in range(T) for b in range(B)) / (T * B)

    traced = rlfx.trace(program, PARAMS, CARRY, length=T, batch=B)
    apart = with_parts_apart(traced)
    assert apart is not traced
    assert with_parts_apart(apart) is apart
    expected = jax.value_and_grad(by_loops)(PARAMS)
    in_blocks = dataclasses.replace(ALWAYS, room=dataclasses.replace(CPU.room, at_once=0, in_block=1, tile=1 << 10))
    for target in (ALWAYS, in_blocks):
        fn = rlfx.compile(program, length=T, batch=B, target=target)
        found = jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, CARRY)[0]))(PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


@pytest.mark.parametrize("f", [of_a_row, of_the_last_row, of_a_row_by_a_gather])
def test_the_product_of_rows_that_are_picked_is_computed_once_for_each_row(f):
    _, apart, _ = products(f)
    taken = lambda shape: {4, 5, N}.intersection(shape[:1] + shape[-1:])  # noqa: E731
    rows = [e for e in apart.equations if e.op is DOT and taken(e.outputs[0].shape)]
    assert [apart.dims_of(e.outputs[0]) for e in rows] == [frozenset()]


def test_rows_of_many_or_with_weights_of_their_own_stay():
    def many(p, x, z):
        return jnp.tanh(p["many"][t_of(x) % 4] @ p["w"][:X]) @ p["v"]

    def own(p, x, z):  # each point has other weights: a product of each of its rows would be more work
        return jnp.tanh(p["many"][t_of(x) % 4] @ (p["w"][:X] * z[0])) @ p["v"]

    for f, length in ((many, 1), (own, T)):
        params = PARAMS | {"x": PARAMS["x"][:length]}
        program = rlfx.trace(functools.partial(timestep, f), params, CARRY, length=length, batch=B)
        assert with_parts_apart(program) is program


def test_sums_of_nothing_stay():
    def nothing(p, x, z):
        return (x[:0] @ p["w"][:0]).sum() + jnp.concatenate([x[:0], z[:0]]) @ p["v"][:0] + z[0]

    traced, apart, _ = products(nothing)
    assert apart is traced
    found, expected = gradient(nothing, ALWAYS, (0, 1))(PARAMS, CARRY), by_hand(nothing, (0, 1))(PARAMS, CARRY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
