"""Past values of several heads: how they lie in memory follows their products, and changes no result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.schedule.physical import Repeated
from tests.sampling import met

H, W = 2, 3


def attention(keys, values, query):
    weights = jax.nn.softmax(jnp.einsum("thw,hw->th", keys, query), axis=0)
    return jnp.einsum("th,thw->hw", weights, values).ravel()


def heads_last(keys, values, query):
    """The same, of what is read as [W, H]."""
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # noqa: E731
    weights = jax.nn.softmax(jnp.einsum("twh,wh->th", swap(keys), query.T), axis=0)
    return jnp.einsum("th,twh->hw", weights, swap(values)).ravel()


def scaled(keys, values, query):
    """Positions one by one before the product."""
    weights = jnp.einsum("thw,hw->ht", jnp.tanh(0.5 * keys), query)
    return jnp.einsum("ht,thw->hw", weights, values * values).ravel() / keys.shape[0]


def two_kinds(keys, values, query):
    """A product for each head, and one over all of them."""
    each = jnp.einsum("thw,hw->th", keys, query)
    return jnp.einsum("th,thw->hw", each, values).ravel() / keys.shape[0] + jnp.einsum("thw,hw->t", keys, query).max()


def elements(keys, values, query):
    """No product at all."""
    return (keys * query[None] * values).sum(0).ravel() / keys.shape[0]


def one_head(keys, values, query):
    """Products of a part of what is read."""
    return jnp.tile(jax.nn.softmax(keys[:, 0] @ query[0]) @ values[:, 1], 2)


USES = {f.__name__: f for f in (attention, heads_last, scaled, two_kinds, elements, one_head)}
#: How many own axes come before time: of the series that has the fewer, and of the other.
BEFORE = {
    "attention": [1, 1], "heads_last": [1, 1], "scaled": [1, 1], "two_kinds": [0, 1], "elements": [0, 0], "one_head": [0, 0],
}  # fmt: skip


def program_of(use, last=1):
    """The past until now, or until the timestep before, after a first value that is there anyway."""

    def program(p, x, t):
        made = jnp.tanh(jnp.einsum("khwd,d->khw", p["w"], x))
        keys, values = (rlfx.series(made[i])[: t + last] for i in (0, 1))
        out = use(keys, values, made[2])
        new = jnp.tanh(x + 0.5 * out)
        return (p["u"] @ new) ** 2, new, new

    return program


def by_hand(use, length, last=1):
    def loss(p, x):
        made, total, out = [], 0.0, []
        for t in range(length):
            made.append(jnp.tanh(jnp.einsum("khwd,d->khw", p["w"], x)))
            past = jnp.stack(made)[: t + last]
            x = jnp.tanh(x + 0.5 * use(past[:, 0], past[:, 1], made[-1][2]))
            total += (p["u"] @ x) ** 2
            out.append(x)
        return total / length, jnp.stack(out)

    return loss


def arguments():
    k = jax.random.split(jax.random.key(3), 3)
    return {"w": jax.random.normal(k[0], (3, H, W, H * W)) * 0.5, "u": jax.random.normal(k[1], (H * W,))}, k[2]


@pytest.mark.parametrize(("use", "batch"), met(USES, [3, None]))
def test_values_and_gradients(use: str, batch: int | None):
    p, key = arguments()
    shape = (H * W,) if batch is None else (batch, H * W)
    x, length = jax.random.normal(key, shape), 5
    compiled = rlfx.compile(program_of(USES[use]), length=length, batch=batch)
    loss = by_hand(USES[use], length)
    if batch is not None:
        one = loss
        loss = lambda p, x: jax.tree.map(  # noqa: E731
            lambda *y: sum(y) / batch if jnp.ndim(y[0]) == 0 else jnp.stack(y, 1), *(one(p, x[b]) for b in range(batch))
        )

    def ours(p, x):
        value, (_, out) = compiled(p, x)
        return value, out

    found = jax.jit(jax.value_and_grad(ours, has_aux=True))(p, x)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(p, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize("use", USES)
def test_the_axes_of_separate_products_come_before_time(use: str):
    p, key = arguments()
    compiled = rlfx.compile(program_of(USES[use]), length=6)
    plan = compiled.physical(p, jax.random.normal(key, (H * W,)))
    (loop,) = (node for node in plan.acting.nodes if isinstance(node, Repeated))
    assert sorted(loop.tiled.values()) == BEFORE[use]


@pytest.mark.parametrize("use", ["attention", "scaled", "two_kinds"])
@pytest.mark.parametrize("until", [False, True])
def test_sections(use: str, until: bool):
    """A long loop, of several tiles: as many short ones by hand."""
    p, key = arguments()
    x, length = jax.random.normal(key, (2, H * W)), 150
    options = {"until": lambda x: x.sum() > 1e9} if until else {}

    def program(p, x, t):
        _, new, out = program_of(USES[use])(p, x, t)
        return new, out

    found = jax.jit(rlfx.unroll(program, length=length, batch=2, **options))(p, x)[1]

    past = np.zeros((2, 0, 3, H, W), np.float32)
    weights = {n: np.asarray(v) for n, v in p.items()}
    state = np.asarray(x)
    for t in range(length):
        made = np.tanh(np.einsum("khwd,bd->bkhw", weights["w"], state))
        past = np.concatenate([past, made[:, None]], 1)
        out = np.stack([numbers(use, past[b, :, 0], past[b, :, 1], made[b, 2]) for b in range(2)])
        state = np.tanh(state + 0.5 * out)
        np.testing.assert_allclose(found[t], state, rtol=2e-3, atol=2e-4)


def numbers(use: str, keys, values, query):
    """The uses in NumPy."""
    each = np.einsum("thw,hw->th", np.tanh(0.5 * keys) if use == "scaled" else keys, query)
    if use == "attention":
        weights = np.exp(each - each.max(0))
        return np.einsum("th,thw->hw", weights / weights.sum(0), values).ravel()
    if use == "scaled":
        return np.einsum("th,thw->hw", each, values * values).ravel() / len(keys)
    return np.einsum("th,thw->hw", each, values).ravel() / len(keys) + np.einsum("thw,hw->t", keys, query).max()
