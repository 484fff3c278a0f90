"""Gradients of weights as sums over parts of the rows, added up at once: the same numbers.

Numbers are small integers where bits are compared: their sums are exact in any order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlfx
import rlfx.epochs
from rlfx.recurrence.ir.interpret import inlined
from rlfx.recurrence.rewrite.alike import nodes
from rlfx.recurrence.rewrite.packed import packed
from rlfx.recurrence.rewrite.partial_sums import ROWS, PartialSums, added, has_parts, in_parts, is_move, moved

MOST, ENOUGH = 1 << 16, 8 * ROWS


def integers(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, size=shape), dtype)


def only(fn, *arguments):
    """The one equation of a function."""
    (eqn,) = jax.make_jaxpr(fn)(*arguments).eqns
    return eqn


def product(left, right):
    return lambda x, y: jax.lax.dot_general(x, y, ((left, right), ((), ())))


SUMS = {
    "rows first": (lambda x: x.sum(0), [(ENOUGH, 5)]),
    "rows last": (lambda x: x.sum(-1), [(3, ENOUGH)]),
    "time and environments": (lambda x: x.sum((0, 1)), [(64, 32, 3)]),
    "apart": (lambda x: x.sum((0, 2)), [(16, 3, ENOUGH)]),
    "all": (lambda x: x.sum(), [(ENOUGH, 5)]),
    "weights": (product((0,), (0,)), [(ENOUGH, 5), (ENOUGH, 2)]),
    "weights the other way": (product((1,), (0,)), [(5, ENOUGH), (ENOUGH, 2)]),
    "sequences": (product((0, 1), (0, 1)), [(64, 32, 3), (64, 32, 4)]),
    "sequences the other way": (product((0, 2), (2, 0)), [(64, 3, 32), (32, 4, 64)]),
    "a vector": (product((0,), (0,)), [(ENOUGH,), (ENOUGH, 2)]),
    "heads": (product((0,), (1,)), [(ENOUGH, 2, 3), (4, ENOUGH, 2)]),
}


@pytest.mark.parametrize("case", SUMS)
def test_the_sum_of_the_parts_is_the_sum(case):
    fn, shapes = SUMS[case]
    operands = [integers(i, *shape) for i, shape in enumerate(shapes)]
    eqn = only(fn, *operands)
    found = in_parts(eqn, operands)
    assert len(found.array) > 1
    np.testing.assert_array_equal(found.whole(), fn(*operands))


@pytest.mark.parametrize("rows", [ENOUGH, 3 * ENOUGH, 1000 * ENOUGH, 5 * 7 * 11 * 13])
def test_parts_are_neither_small_nor_many(rows):
    parts = jax.eval_shape(
        lambda x: in_parts(only(SUMS["rows first"][0], x), [x]).array, jax.ShapeDtypeStruct((rows, 2), "float32")
    ).shape[0]
    assert 1 < parts <= 128
    assert rows // parts >= ROWS


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (lambda x: x.sum(0), [jnp.ones((ROWS, 5))]),
        (lambda x: x.sum(0), [jnp.ones((ENOUGH - 1, 5))]),  # 1,023 rows: 3 * 11 * 31, of which the parts are 3
        (lambda x: x.max(0), [jnp.ones((ENOUGH, 5))]),
        (lambda x: jax.lax.reduce(x, np.int32(0), jax.lax.add, (0,)), [jnp.ones((ENOUGH, 5), jnp.int32)]),
        (lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((), ()))), [jnp.ones((ENOUGH, 5), jnp.bfloat16)]),
        (
            lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
            [jnp.ones((2, ENOUGH, 3)), jnp.ones((2, ENOUGH, 3))],
        ),
    ],
    ids=["few rows", "3 parts", "a maximum", "integers", "bfloat16", "a batch of products"],
)
def test_what_has_no_parts(fn, arguments, request):
    assert has_parts(only(fn, *arguments)) == ("3 parts" in request.node.name)


MOVES = {
    "transpose": (lambda x: jax.lax.transpose(x, (1, 0)), (3, 4)),
    "transpose of three": (lambda x: jax.lax.transpose(x, (2, 0, 1)), (3, 4, 2)),
    "reshape": (lambda x: jax.lax.reshape(x, (12,)), (3, 4)),
    "squeeze": (lambda x: jax.lax.squeeze(x, (1,)), (3, 1)),
    "a sum of one": (lambda x: x.sum(0), (1, 4)),
    "one of one": (lambda x: jax.lax.broadcast_in_dim(x, (1, 1), ()), ()),
}


@pytest.mark.parametrize("case", MOVES)
def test_moves(case):
    fn, shape = MOVES[case]
    parts = PartialSums(integers(0, 4, *shape))
    eqn = only(fn, parts.whole())
    assert is_move(eqn)
    np.testing.assert_array_equal(moved(eqn, parts).whole(), fn(parts.whole()))


def test_no_moves():
    for fn in (lambda x: x.sum(0), lambda x: jax.lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), jnp.tanh):
        assert not is_move(only(fn, jnp.ones((3, 4))))


def test_all_at_once():
    parts = [PartialSums(integers(i, n, *shape)) for i, (n, shape) in enumerate([(4, (3, 2)), (1, (5,)), (7, ())])]
    expected = jnp.concatenate([p.whole().reshape(-1) for p in parts])
    np.testing.assert_array_equal(added(parts), expected)


# -- in updates


def network():
    sizes = {"a": (3, 16), "b": (16,), "c": (16, 2), "d": (2,), "e": (16, 1), "f": (1,)}
    return {k: integers(i, *s) for i, (k, s) in enumerate(sizes.items())}


def loss(p, x):
    """Of integers: biases with an axis of their own, a value of one column."""
    h = jax.nn.relu(x @ p["a"] + p["b"][None])
    scores, value = h @ p["c"] + p["d"][None], (h @ p["e"] + p["f"][None])[:, 0]
    return jnp.sum(jnp.where(x[:, 0] > 2, scores[:, 0], 0.0)) + jnp.sum(jnp.where(x[:, 1] > 2, value, 0.0))


def descend(p, x):
    return jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p, x)), None


def test_one_sum_for_all_gradients():
    x = integers(9, ENOUGH, 3)
    found = packed(descend, network(), x, MOST)
    jaxpr = jax.make_jaxpr(found)(found.pack(network()), x).jaxpr
    total = sum(v.size for v in network().values())
    sums = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and e.outvars[0].aval.shape == (total,)]
    assert [e.invars[0].aval.shape for e in sums] == [(ENOUGH // ROWS, total)]


def test_the_same_bits():
    x = integers(9, ENOUGH, 3)
    found = packed(descend, network(), x, MOST)
    state, _ = found(found.pack(network()), x)
    expected, _ = descend(network(), x)
    assert all(np.abs(v).max() < 2**24 for v in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, found.unpack(state), expected)


def normalised(p, x):
    """A mean of all rows that every row is divided by is no gradient that waits."""
    h = x @ p["a"]
    scale = 1.0 + jnp.abs(h).sum(0)
    return jnp.sum((h / scale[None]) @ p["c"]) * 1e-2


def test_what_the_network_reads_is_summed_at_once():
    x, p = integers(9, ENOUGH, 3), network()
    descends = lambda p, x: (jax.tree.map(lambda a, g: a - g, p, jax.grad(normalised)(p, x)), None)  # noqa: E731
    closed = jax.make_jaxpr(inlined(descends))(p, x)
    late = [node.eqn for node in nodes(closed.jaxpr, {tuple(v.shape) for v in p.values()}) if node.in_parts]
    assert sorted(e.outvars[0].aval.size for e in late) == [32, 48]  # of "c" and of "a", and not of the scale
    found = packed(descends, p, x, MOST)
    state, _ = found(found.pack(p), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found.unpack(state), descends(p, x)[0])


OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adamw, weights alone": optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda v: v.ndim > 1, p)),
    "momentum": optax.sgd(0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_epochs_give_the_same(name, monkeypatch):
    """Values of three epochs, and their derivative with respect to the data."""
    optimizer = OPTIMIZERS[name]

    def smooth(p, x):
        h = jnp.tanh(x @ p["a"] + p["b"][None])
        return jnp.mean((h @ p["c"] + p["d"][None]).sum(-1) ** 2 + (h @ p["e"] + p["f"][None])[:, 0])

    def update(learner, x):
        params, state = learner
        updates, state = optimizer.update(jax.grad(smooth)(params, x), state, params)
        return (optax.apply_updates(params, updates), state), smooth(params, x)

    def run(data):
        params = jax.tree.map(lambda v: 0.1 * v, network())
        return rlfx.minibatch_epochs(
            update, (params, optimizer.init(params)), data, epochs=2, minibatches=2, key=jax.random.key(3)
        )

    def reached(data):
        return run(data)[1].sum()

    data = 0.3 * jnp.asarray(np.random.default_rng(5).normal(size=(ENOUGH, 2, 3)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        plain, slope = jax.jit(run)(data), jax.jit(jax.grad(reached))(data)
        here = rlfx.target("cpu")
        dear = dataclasses.replace(here, rewrites=dataclasses.replace(here.rewrites, packed=MOST))
        monkeypatch.setattr(rlfx.epochs, "target", lambda: dear)
        assert f",{sum(v.size for v in network().values())}]" in str(jax.make_jaxpr(lambda d: run(d))(data))
        found, other = jax.jit(lambda d: run(d))(data), jax.jit(jax.grad(lambda d: reached(d)))(data)
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, plain)
    np.testing.assert_allclose(other, slope, rtol=1e-3, atol=1e-6 * float(np.abs(slope).max()) + 1e-9)
    assert np.abs(slope).max() > 0
