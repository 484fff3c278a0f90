"""What is taken of computed values, computed of what is taken: of memories, as they are searched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.rewrite.taken import with_taken_first

KEY = jax.random.key(0)
LENGTH, BATCH, ENTRIES, WIDTH, NEAREST = 4, 3, 40, 5, 3


def nearest(far):
    return jax.lax.top_k(-jax.lax.stop_gradient(far), NEAREST)[1]


def read(keys, values, h):
    far = ((keys - h[None]) ** 2).sum(-1)
    near = nearest(far)
    weight = 1.0 / (far[near] + 0.1)
    return (weight * values[near]).sum() / weight.sum()


def memory(p, h, t):
    """One memory."""
    q = read(p["keys"][0], p["values"][0], h)
    return (q - 1.0) ** 2, h * 0.9


def memories(p, h, t):
    """One for each of two actions."""
    q = jax.vmap(read, (0, 0, None))(p["keys"], p["values"], h)
    return jnp.sum((q - 1.0) ** 2), h * 0.9


def along(p, h, t):
    """By ``take_along_axis``, which says what is outside; entries are an axis in the middle."""
    keys = jnp.swapaxes(p["keys"], 1, 2)  # [2, WIDTH, ENTRIES]
    far = jnp.sum(jnp.abs(keys - h[None, :, None]) * jnp.arange(1.0, WIDTH + 1)[None, :, None], 1)
    near = jax.vmap(nearest)(far)
    return jnp.sum(jnp.exp(-jnp.take_along_axis(far, near, 1))), h * 0.9


def outside(p, h, t):
    """Some places are beyond the entries: what is read there is no number, and has no derivative."""
    far = ((p["keys"][0] - h[None]) ** 2).sum(-1)
    found = jnp.take_along_axis(far, jnp.array([1, ENTRIES + 3, 2]), 0)
    return jnp.sum(jnp.where(jnp.isnan(found), 0.0, found)), h * 0.9


def from_the_end(p, h, t):
    far = ((p["keys"][0] - h[None]) ** 2).sum(-1)
    return jnp.sum(far[jnp.array([-1, 0, -3])]), h * 0.9


def shares(p, h, t):
    """What depends on all entries beside."""
    far = ((p["keys"][0] - h[None]) ** 2).sum(-1)
    return jnp.sum(jax.nn.softmax(-far)[nearest(far)]), h * 0.9


def params():
    k = jax.random.split(KEY, 2)
    return {"keys": jax.random.normal(k[0], (2, ENTRIES, WIDTH)), "values": jax.random.normal(k[1], (2, ENTRIES))}


START = 0.5 * jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
TAKEN = [memory, memories, along, outside, from_the_end, shares]


def program_of(fn):
    return rlfx.trace(fn, params(), START, length=LENGTH, batch=BATCH)


def gathers(program):
    """The shapes of what is gathered from."""
    return [e.inputs[0].shape for e in program.equations if e.op.name == "gather"]


def gradient(make, fn, **how):
    f = make(fn, length=LENGTH, batch=BATCH, **how)
    return jax.jit(jax.value_and_grad(lambda p, x: f(p, x, KEY)[0], (0, 1)))(params(), START)


@pytest.mark.parametrize("fn", TAKEN, ids=lambda fn: fn.__name__)
def test_values_and_gradients_are_those_of_the_reference(fn):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6),
        gradient(rlfx.compile, fn), gradient(rlfx.reference, fn),
    )  # fmt: skip


def test_as_by_hand():
    """By loops, and finite differences."""

    def loss(p, x):
        total = 0.0
        for b in range(BATCH):
            h = x[b]
            for _ in range(LENGTH):
                for keys, values in zip(p["keys"], p["values"], strict=True):
                    far = ((keys - h) ** 2).sum(-1)
                    near = np.argsort(far)[:NEAREST]
                    weight = 1.0 / (far[near] + 0.1)
                    total += ((weight * values[near]).sum() / weight.sum() - 1.0) ** 2
                h = h * 0.9
        return total / (BATCH * LENGTH)

    p, x = jax.tree.map(lambda v: np.asarray(v, np.float64), (params(), START))
    value, (of_p, of_x) = gradient(rlfx.compile, memories)
    np.testing.assert_allclose(value, loss(p, x), rtol=1e-5)
    rng, step = np.random.default_rng(0), 1e-5
    moved = jax.tree.map(lambda v: rng.normal(size=v.shape), (p, x))
    ends = [loss(*jax.tree.map(lambda v, d, s=s: v + s * step * d, (p, x), moved)) for s in (1, -1)]
    slopes = jax.tree.map(lambda g, d: np.sum(np.asarray(g, np.float64) * d), (of_p, of_x), moved)
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), (ends[0] - ends[1]) / (2 * step), rtol=1e-3)


@pytest.mark.parametrize("fn", TAKEN, ids=lambda fn: fn.__name__)
def test_entries_are_taken_first_and_once(fn):
    program = program_of(fn)
    found = with_taken_first(program)
    assert (ENTRIES,) in gathers(program) or (2, ENTRIES) in gathers(program)
    assert any(WIDTH in shape for shape in gathers(found))
    assert with_taken_first(found) is found


def many(p, h, t):
    """A quarter of the entries."""
    far = ((p["keys"][0] - h[None]) ** 2).sum(-1)
    return jnp.sum(far[jnp.arange(ENTRIES // 4)]), h * 0.9


def given(p, h, t):
    """What is not computed."""
    return jnp.sum(p["values"][0][jnp.array([3, 4])]) * jnp.sum(h), h * 0.9


def pointwise(p, h, t):
    """Of as many numbers as there are entries."""
    return jnp.sum(jnp.exp(p["values"][0] * jnp.sum(h))[jnp.array([3, 4])]), h * 0.9


def one(p, h, t):
    """By its number, which has no axis."""
    far = ((p["keys"][0] - h[None]) ** 2).sum(-1)
    return jnp.take(far, 3) + far.at[jnp.argmin(far)].get(mode="fill"), h * 0.9


def product(p, h, t):
    return jnp.sum((p["keys"][0] @ h)[jnp.array([3, 4])]), h * 0.9


def stopped(p, h, t):
    far = jax.lax.stop_gradient((p["keys"][0] - h[None]) ** 2).sum(-1)
    return jnp.sum(far[jnp.array([3, 4])]) * jnp.sum(h), h * 0.9


@pytest.mark.parametrize("fn", [many, given, pointwise, one, product, stopped], ids=lambda fn: fn.__name__)
def test_what_stays(fn):
    program = program_of(fn)
    assert gathers(program)
    assert with_taken_first(program) is program
    test_values_and_gradients_are_those_of_the_reference(fn)
