"""Gradients that are differentiated: products with Hessians are those of the same loss in jnp, of all timesteps at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx import _jaxpr as J
from rlfx.recurrence.gradient import rule
from rlfx.recurrence.gradient.rule import Fixed
from tests.recurrence.test_contractions import products_with_weights

T, B, D, H = 12, 4, 3, 5
K = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(K[0], (T, B, D))
P = {
    "in": jax.random.normal(K[1], (D, H)),
    "h": jax.random.normal(K[2], (H, H)) / 2.0,
    "out": jax.random.normal(K[3], (H, 2)),
}
V = jax.tree.map(lambda w: jnp.cos(3.0 * w), P)


def network(p, x, h, t):
    return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["h"]) @ p["out"], h


def recurrence(p, x, h, t):
    h = jnp.tanh(x @ p["in"] + h @ p["h"])
    return h @ p["out"], h


def of_next(p, x, h, t):
    """Through reads of the next timestep, and a mean."""
    z = jnp.tanh(x @ p["in"])
    after = rlfx.series(z, end=jnp.zeros(H))[t + 1]
    return (z @ p["h"] - after) @ p["out"] * rlfx.mean(z[:2]), h


def compiled(step, **how):
    def f(p, h, t):
        y, h = step(p, rlfx.inputs(X)[t], h, t)
        return (y**2).sum() + jnp.sin(y[0]), h

    fn = rlfx.compile(f, length=T, batch=B, **how)
    return lambda p: fn(p, jnp.zeros((B, H)))[0]


def by_jnp(step):
    def loss(p):
        if step is of_next:
            z = jnp.tanh(X @ p["in"])
            after = jnp.concatenate([z[1:], jnp.zeros((1, B, H))])
            y = (z @ p["h"] - after) @ p["out"] * z[..., :2].mean((0, 1))[None, None]
        elif step is recurrence:
            body = lambda h, x: recurrence(p, x, h, 0)[::-1]  # noqa: E731
            y = jax.lax.scan(body, jnp.zeros((B, H)), X)[1]
        else:
            y = network(p, X, None, 0)[0]
        return ((y**2).sum(-1) + jnp.sin(y[..., 0])).mean()

    return loss


def product(loss, p=P, v=V):
    """Backwards twice."""
    dot = lambda g: sum(map(jnp.vdot, jax.tree.leaves(g), jax.tree.leaves(v)))  # noqa: E731
    return jax.grad(lambda p: dot(jax.grad(loss)(p)))(p)


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("step", [network, recurrence, of_next])
def test_products_with_the_hessian(step):
    expected = product(by_jnp(step))
    for how in ({}, {"plan": Plan("blocks", 4)}, {"memory_budget": 1 << 20}):
        close(jax.jit(lambda how=how: product(compiled(step, **how)))(), expected)
    loss = compiled(step)
    close(product(loss), expected)  # without jit
    close(jax.jvp(jax.grad(loss), (P,), (V,))[1], expected)  # forwards over backwards
    some = jax.vmap(lambda v: product(loss, v=v))(jax.tree.map(lambda v: jnp.stack([v, 2.0 * v]), V))
    close(jax.tree.map(lambda w: w[1], some), jax.tree.map(lambda w: 2.0 * w, expected))


def test_the_hessian_and_third_derivatives():
    mine, theirs = compiled(network), by_jnp(network)
    small = lambda loss: lambda x: loss(P | {"out": x})  # noqa: E731
    close(jax.hessian(small(mine))(P["out"]), jax.hessian(small(theirs))(P["out"]))
    third = lambda loss: jax.grad(lambda p: sum((g**2).sum() for g in jax.tree.leaves(product(loss, p))))(P)  # noqa: E731
    close(jax.jit(third, static_argnums=0)(mine), third(theirs))


@jax.custom_vjp
def own(x):
    return jnp.sin(x)


own.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (c * g,))


@pytest.mark.parametrize("how", [{}, {"plan": Plan("blocks", 4)}, {"plan": Plan()}], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_stopped_may_have_a_derivative_of_its_own(how, nested):
    """In a loop of the program's, or in one of the user's."""
    loop = lambda x: jax.lax.scan(lambda c, _: (own(c), None), x, None, length=2)[0]  # noqa: E731
    value = loop if nested else own

    data = X[:, 0, 0]

    def f(w, carry, t):
        y = rlfx.series(value(w * rlfx.inputs(data)[t]), end=w)
        return (y[t] - jax.lax.stop_gradient(y[t + 1])) ** 2, carry

    def theirs(w):
        y = value(w * data)
        return ((y - jax.lax.stop_gradient(jnp.append(y[1:], w))) ** 2).mean()

    fn, w = rlfx.compile(f, length=T, **how), jnp.float32(0.5)
    loss = lambda w: fn(w, ())[0]  # noqa: E731
    expected = jax.jacrev(jax.grad(theirs))(w)
    close(jax.hessian(loss)(w), expected)
    close(jax.jit(jax.hessian(loss))(w), expected)
    close(jax.vmap(jax.hessian(loss))(jnp.stack([w, 2.0 * w]))[0], expected)
    close(jax.grad(jax.grad(loss))(w), expected)


def test_other_outputs():
    """The pullback of aux is differentiated, too."""

    def f(p, h, t):
        y, h = network(p, rlfx.inputs(X)[t], h, t)
        return (y**2).sum(), h, jnp.sin(y)

    def mine(p):
        loss, (_, aux) = rlfx.compile(f, length=T, batch=B)(p, jnp.zeros((B, H)))
        return loss + (aux**2).sum()

    def theirs(p):
        y, _ = network(p, X, None, 0)
        return (y**2).sum(-1).mean() + (jnp.sin(y) ** 2).sum()

    close(product(mine), product(theirs))


def test_devices_share_the_environments():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    close(jax.jit(lambda: product(compiled(network, mesh=mesh)))(), product(by_jnp(network)))


# -- copies under jax.vmap, a few at a time

TASKS = 5
TASK_DATA = jax.random.normal(K[4], (TASKS, T, B, D))
CPU = rlfx.target("cpu")


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(J, "has_one_device", lambda: True)


def with_tile(tile):
    """A cache of so many bytes."""
    return dataclasses.replace(CPU, room=dataclasses.replace(CPU.room, tile=tile))


def adapted(loss):
    """The loss of what one step on a task leads to."""

    def of_task(p, data):
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, data)), jnp.cos(data))

    return of_task


def of_data(step, **how):
    def f(given, h, t):
        p, data = given
        y, h = step(p, rlfx.inputs(data)[t], h, t)
        return (y**2).sum() + jnp.sin(y[0]), h

    fn = rlfx.compile(f, length=T, batch=B, **how)
    return lambda p, data: fn((p, data), jnp.zeros((B, H)))[0]


def data_in_jnp(step):
    def loss(p, data):
        body = lambda h, x: step(p, x, h, 0)[::-1]  # noqa: E731
        y = jax.lax.scan(body, jnp.zeros((B, H)), data)[1]
        return ((y**2).sum(-1) + jnp.sin(y[..., 0])).mean()

    return loss


def meta_gradient(loss, data=TASK_DATA, **how):
    """Of weights, which tasks share, and of the data, which they don't."""
    mean = lambda p, data: jax.vmap(adapted(loss), (None, 0), **how)(p, data).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(mean, (0, 1)))(P, data)


@pytest.mark.parametrize("step", [network, recurrence])
@pytest.mark.parametrize("tile", [1, 1 << 30])
def test_gradients_through_steps_of_many_tasks(one_device, monkeypatch, step, tile):
    """In turn, and all together."""
    monkeypatch.setattr(rule, "_ROWS", 1)
    expected = meta_gradient(data_in_jnp(step))
    close(meta_gradient(of_data(step, target=with_tile(tile))), expected)


def picked(p, x, h, t):
    """A state that follows from what is picked, by products with weights that nothing goes back through."""
    scores = jnp.tanh(x @ p["in"] + h) @ p["h"]
    return scores[:3] @ p["h"][:3] @ p["out"], jax.nn.one_hot(jnp.argmax(scores), H)


@pytest.mark.parametrize(("step", "in_turn"), [(network, True), (picked, True), (recurrence, False)])
def test_tasks_with_few_rows_are_one_call_where_their_derivative_is_a_recurrence(one_device, step, in_turn):
    """A loop that multiplies few rows serves all tasks; one that only acts is not differentiated."""
    both = [of_data(step, target=with_tile(tile)) for tile in (1, 1 << 30)]
    found = [meta_gradient(loss) for loss in both]
    mean = lambda loss: lambda p: jax.vmap(adapted(loss), (None, 0))(p, TASK_DATA).mean()  # noqa: E731
    loops = [jax.jit(jax.grad(mean(loss))).lower(P).as_text().count("stablehlo.while") for loss in both]
    assert (loops[0] > loops[1]) == in_turn
    close(*found)


def test_rows_of_all_tasks_are_those_of_one_matrix(one_device):
    """Products with the weights that tasks share, and those of its derivative."""
    loss = of_data(recurrence, target=with_tile(1 << 30))
    mean = lambda p: jax.vmap(adapted(loss), (None, 0))(p, TASK_DATA).mean()  # noqa: E731
    assert set(products_with_weights(jax.make_jaxpr(jax.grad(mean))(P).jaxpr)) == {2}


def test_a_named_axis_stays_one(one_device):
    close(meta_gradient(of_data(network, target=with_tile(1)), axis_name="tasks"), meta_gradient(data_in_jnp(network)))


def test_copies_of_copies(one_device):
    data = jnp.stack([TASK_DATA, jnp.sin(TASK_DATA)])

    def found(loss):
        mean = lambda p: jax.vmap(jax.vmap(adapted(loss), (None, 0)), (None, 0))(p, data).mean()  # noqa: E731
        return jax.jit(jax.grad(mean))(P)

    for tile in (1, 100_000):
        close(found(of_data(network, target=with_tile(tile))), found(data_in_jnp(network)))


def test_gradients_of_tasks_forwards(one_device):
    def pushed(loss):
        gradients = lambda p: jax.vmap(jax.grad(loss), (None, 0))(p, TASK_DATA)  # noqa: E731
        return jax.jit(lambda: jax.jvp(gradients, (P,), (V,)))()

    close(pushed(of_data(recurrence, target=with_tile(1))), pushed(data_in_jnp(recurrence)))


def test_tasks_in_turn_take_the_memory_of_one(one_device):
    tasks, length, batch, width = 16, 16, 16, 64
    p = {"in": jnp.ones((width, width)) / width, "out": jnp.ones((width, 2)) / width}
    data = jnp.ones((tasks, length, batch, width))

    def f(given, h, t):
        p, data = given
        return ((jnp.tanh(jnp.tanh(rlfx.inputs(data)[t] @ p["in"]) @ p["in"]) @ p["out"]) ** 2).sum(), h

    def taken(tile):
        fn = rlfx.compile(f, length=length, batch=batch, target=with_tile(tile))
        loss = lambda p, data: fn((p, data), jnp.zeros(batch))[0]  # noqa: E731
        mean = lambda p: jax.vmap(adapted(loss), (None, 0))(p, data).mean()  # noqa: E731
        return jax.jit(jax.grad(mean)).lower(p).compile().memory_analysis().temp_size_in_bytes

    assert taken(1 << 19) < 0.4 * taken(1 << 30)


@pytest.mark.parametrize("step", [network, recurrence])
def test_gradients_of_copies_in_turn(one_device, monkeypatch, step):
    """Each with weights of its own, under one axis and under two; loops that multiply few rows serve all copies."""
    p = jax.tree.map(lambda w: jnp.stack([w * (1.0 + 0.1 * i) for i in range(TASKS)]), P)
    data, loss = TASK_DATA, data_in_jnp(step)
    gradient = lambda loss: jax.vmap(jax.value_and_grad(loss, (0, 1)))  # noqa: E731
    mine = lambda tile: of_data(step, target=with_tile(tile))  # noqa: E731
    loops = lambda fn: jax.jit(fn).lower(p, data).as_text().count("stablehlo.while")  # noqa: E731
    for rows, in_turn in ((1, True), (32, step is network)):
        monkeypatch.setattr(rule, "_ROWS", rows)
        close(gradient(mine(1))(p, data), gradient(loss)(p, data))
        assert (loops(gradient(mine(1))) > loops(gradient(mine(1 << 30)))) == in_turn
    both = lambda loss: jax.vmap(jax.vmap(jax.value_and_grad(loss), (None, 0)), (0, None))  # noqa: E731
    close(both(mine(1))(p, data), both(loss)(p, data))


def test_devices_may_share_the_copies():
    """jax may split the axis over them: it stays one."""
    p = jax.tree.map(lambda w: jnp.stack([w] * 2), P)
    loss = of_data(network, target=with_tile(1))
    text = jax.jit(jax.vmap(jax.grad(loss))).lower(p, TASK_DATA[:2]).as_text()
    assert ("stablehlo.while" in text) == (jax.device_count() == 1)


def wide(length=256, batch=32, width=64):
    data, p = jnp.ones((length, batch, width)), {"in": jnp.ones((width, width)), "out": jnp.ones((width, 2))}

    def f(p, h, t):
        return ((jnp.tanh(rlfx.inputs(data)[t] @ p["in"]) @ p["out"]) ** 2).sum(), h

    return f, p, jnp.zeros(batch), {"length": length, "batch": batch}


def test_blocks_are_left_where_a_gradient_is_differentiated():
    f, p, h, sizes = wide()
    loops = lambda fn: jax.jit(fn).lower(p).as_text().count("stablehlo.while")  # noqa: E731
    loss = lambda p: rlfx.compile(f, **sizes)(p, h)[0]  # noqa: E731
    assert loops(jax.grad(loss)) == 1
    assert loops(lambda p: product(loss, p, p)) == 0
    asked = lambda p: rlfx.compile(f, **sizes, plan=Plan("blocks", 16))(p, h)[0]  # noqa: E731
    assert loops(lambda p: product(asked, p, p)) > 0
    less = lambda p: rlfx.compile(rlfx.incrementalize(f, over="t", block_size=16), **sizes)(p, h)[0]  # noqa: E731
    assert loops(lambda p: product(less, p, p)) > 0


def test_a_fixed_plan_is_kept():
    assert not Fixed(Plan()).is_free(None)
