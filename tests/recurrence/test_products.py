"""Products of one value with several weights as one product, while acting: the same results, fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.language.primitives import products_p
from rlfx.recurrence.schedule import physical
from tests.sampling import met

T, B, D = 5, 3, 4
DOT = J.primitive("dot_general")


def weights(*sizes):
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, sizes, strict=True)]


def actor_and_critic(params, x, t):
    w, v, u = params
    with jax.named_scope("nets/actor"):
        hidden = jnp.tanh(x @ w)
    with jax.named_scope("nets/critic"):
        value = jnp.sum(jnp.tanh(x @ v))
    new = jnp.sin(x + hidden @ u)
    return jnp.sum(value * new), new


def gates(params, x, t):
    """Three products of x, and three of what they lead to, of which one is a series that is read."""
    z = jax.nn.sigmoid(x @ params[0]) * jnp.tanh(x @ params[1]) + x @ params[2]
    named = rlfx.series(z @ params[3], start=0.5)
    following = jnp.tanh(z @ params[4] + z @ params[1] + named[t - 1])
    return jnp.sum(following), following


def wide(params, x, t):
    """More rows than one product is faster for."""
    w, v, u = params
    new = jnp.sin(jnp.tanh(x @ w) @ u + 0.1 * jnp.tanh(x @ v) @ u)
    return jnp.sum(new), new


def of_each_environment(params, x, t):
    """Weights that are computed: one with the environment, one with the timestep."""
    w, v, u = params
    mine = w * jnp.sum(x)
    now = v * (0.1 + 0.1 * t)  # small, or the steps amplify rounding
    new = jnp.sin(jnp.tanh(x @ mine) @ u + jnp.sum(x @ now))
    return jnp.sum(new), new


def both_sides(params, x, t):
    """``w @ x`` is a product of rows, too."""
    w, v, u = params
    new = jnp.sin(jnp.tanh(x @ w) @ u + jnp.tanh(v.T @ x) @ u)
    return jnp.sum(new), new


SQUARE = weights((D, D), (D, D), (D, D), (D, D), (D, D))
CASES = {
    "actor and critic": (actor_and_critic, weights((D, 6), (D, 5), (6, D)), D, [(6, 5)]),
    "gates": (gates, SQUARE, D, [(D, D, D), (D, D, D)]),
    "wide": (wide, weights((200, 6), (200, 6), (6, 200)), 200, []),
    "of each environment": (of_each_environment, weights((D, 6), (D, 5), (6, D)), D, []),
    "both sides": (both_sides, weights((D, 6), (D, 6), (6, D)), D, [(6, 6)]),
}


@pytest.fixture
def shared(monkeypatch):
    """The loops that were rewritten, each as ``(before, after)``."""
    loops, own = [], physical.share_products

    def recorded(loop, *args):
        after, together = own(loop, *args)
        loops.append((loop, after))
        return after, together

    monkeypatch.setattr(physical, "share_products", recorded)
    return loops


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is measured and done on CPUs")
@pytest.mark.parametrize(("case", "batch"), met(CASES, [B, None]))
def test_the_same_results(case, batch, shared):
    f, params, size, expected = CASES[case]
    x = jnp.linspace(-1.0, 1.0, size * (batch or 1)).reshape((size,) if batch is None else (batch, size))
    options = {"length": T, "batch": batch}
    run, reference = rlfx.compile(f, **options), rlfx.reference(f, **options)
    got, wanted = run(params, x), reference(params, x)
    ((before, after),) = shared
    columns = [e.params["columns"] for e in after.body if e.op is products_p]
    assert columns == expected
    count = lambda loop: sum(e.op is DOT for e in loop.body)  # noqa: E731
    assert count(after) == count(before) - sum(map(len, columns))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6), got, wanted)

    gradient = lambda fn: jax.grad(lambda p, x: fn(p, x)[0], (0, 1))(params, x)  # noqa: E731
    got, wanted = gradient(jax.jit(run)), gradient(reference)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), got, wanted)


@pytest.mark.parametrize(("batch", "columns"), [(None, []), (B, [(70, 70)])])
def test_of_a_single_environment_large_weights_are_not_copied(batch, columns, shared):
    def f(params, x, t):
        new = jnp.sin((jnp.tanh(x @ params[0]) + jnp.tanh(x @ params[1])) @ params[2])
        return new, new

    rlfx.unroll(f, length=2, batch=batch)(
        weights((64, 70), (64, 70), (70, 64)), jnp.ones((64,) if batch is None else (B, 64))
    )
    ((_, after),) = shared
    assert [e.params["columns"] for e in after.body if e.op is products_p] == columns


def test_under_vmap_and_its_scope(shared):
    f, params, size, _ = CASES["actor and critic"]
    run = rlfx.compile(f, length=T, batch=B)
    x = jnp.linspace(-1.0, 1.0, B * size).reshape(B, size)
    seeds = [jnp.stack([w, 2 * w]) for w in params]
    losses = jax.vmap(lambda p: run(p, x)[0])(seeds)
    ((_, after),) = shared
    assert [e.scope for e in after.body if e.op is products_p] == ["nets"]
    for i, loss in enumerate(losses):
        np.testing.assert_allclose(loss, rlfx.reference(f, length=T, batch=B)([w[i] for w in seeds], x)[0], rtol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is measured and done on CPUs")
def test_in_loops_that_are_differentiated(shared):
    """A cell that multiplies gate by gate, learnt through time: as by loops of numpy's kind, with two products for six."""
    of_state, of_input = weights((D, D), (D, D), (D, D)), weights((3, D), (3, D), (3, D))
    data = jnp.sin(jnp.arange(T * B * 3.0)).reshape(T, B, 3)

    def cell(p, h, x):
        (a, b, c), (i, j, k) = p
        reset, update = jax.nn.sigmoid(x @ i + h @ a), jax.nn.sigmoid(x @ j + h @ b)
        return update * h + (1.0 - update) * jnp.tanh(x @ k + reset * (h @ c))

    def f(p, h, t):
        h = cell(p, h, rlfx.inputs(data)[t])
        return jnp.sum(h**2), h

    def by_hand(p, h):
        total = 0.0
        for t in range(T):
            h = cell(p, h, data[t])
            total += (h**2).sum() / (T * B)
        return total

    h = jnp.linspace(-1.0, 1.0, B * D).reshape(B, D)
    run = rlfx.compile(f, length=T, batch=B)
    got = jax.jit(jax.grad(lambda p, h: run(p, h)[0], (0, 1)))((of_state, of_input), h)
    wanted = jax.grad(by_hand, (0, 1))((of_state, of_input), h)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-6), got, wanted)
    assert shared
    assert all((D, D, D) in [e.params["columns"] for e in after.body if e.op is products_p] for _, after in shared)


def assert_gradients_of_a_loop(step, params, carry, data, plan):
    """Of a program of ``step(params, carry, x) -> (carry, loss)`` under a plan: those of a plain loop over ``data``."""

    def f(p, carry, t):
        carry, loss = step(p, carry, rlfx.inputs(data)[t])
        return loss, carry

    def by_hand(p, carry):
        total = 0.0
        for t in range(T):
            carry, loss = step(p, carry, data[t])
            total += loss / (T * B)
        return total

    run = rlfx.compile(f, length=T, batch=B, plan=plan)
    got = jax.jit(jax.grad(lambda p: run(p, carry)[0]))(params)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-6), got, jax.grad(by_hand)(params, carry))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is measured and done on CPUs")
@pytest.mark.parametrize(
    ("plan", "columns"), [(rlfx.Plan("one pass"), [(D, D), (D, D)]), (rlfx.Plan(), [(D, D, D, D)])]
)
def test_what_has_no_derivative_is_no_part_of_a_product_that_has_one(plan, columns, shared):
    """A target network sees what the online one sees: all that is made of their one product was differentiated."""
    data = jnp.sin(jnp.arange(T * B * 3.0)).reshape(T, B, 3)
    online, target = (dict(zip("xyh", weights((3, D), (3, D), (D, D)), strict=True)) for _ in range(2))

    def step(p, carry, x):
        cell = lambda p, h: jax.nn.sigmoid(x @ p["x"]) * jnp.tanh(x @ p["y"] + h @ p["h"])  # noqa: E731
        x = jnp.sin(x + carry[1][..., :3])
        mine, theirs = cell(p, carry[0]), jax.lax.stop_gradient(cell(jax.tree.map(jnp.sin, target), carry[1]))
        return (mine, theirs), jnp.sum((mine - theirs) ** 2)

    carry = (jnp.linspace(-1.0, 1.0, B * D).reshape(B, D), jnp.zeros((B, D)))
    assert_gradients_of_a_loop(step, online, carry, data, plan)
    (_, first), *_ = shared
    assert [e.params["columns"] for e in first.body if e.op is products_p] == columns


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is measured and done on CPUs")
def test_a_weight_without_a_derivative_is_no_part_of_one_with_one(shared):
    """Adapters of layers that stay as they are: the gradient of all that is in one weight would be made."""
    fixed = dict(zip("hg", weights((D, D), (D, D)), strict=True))
    adapters = dict(zip("ud", weights((D, 2), (2, D)), strict=True))
    data = jnp.sin(jnp.arange(T * B * D * 1.0)).reshape(T, B, D)

    def step(p, h, x):
        new = jnp.tanh(x + h @ fixed["h"] + (h @ p["u"]) @ p["d"]) * jax.nn.sigmoid(h @ fixed["g"])
        return new, jnp.sum(new**2)

    h = jnp.linspace(-1.0, 1.0, B * D).reshape(B, D)
    assert_gradients_of_a_loop(step, adapters, h, data, rlfx.Plan("one pass"))
    (_, body), *_ = shared
    assert [e.params["columns"] for e in body.body if e.op is products_p] == [(D, D)]  # those that are fixed
