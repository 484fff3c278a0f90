"""What is done alike to many small arrays, as one: the same numbers, and fewer equations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlfx
import rlfx.epochs
from rlfx.errors import ProgramError
from rlfx.recurrence.ir.interpret import inlined
from rlfx.recurrence.rewrite.packed import packed

MOST = 1 << 16


@pytest.fixture(autouse=True)
def loose():
    """optax's Adam needs it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def network():
    sizes = {"a": (3, 16), "b": (16,), "c": (16, 16), "d": (16,), "e": (16, 1), "f": (1,)}
    return {k: 0.3 * numbers(i, *s) for i, (k, s) in enumerate(sizes.items())}


def loss(p, x):
    h = jnp.tanh(x @ p["a"] + p["b"][None])
    h = jnp.tanh(h @ p["c"] + p["d"][None])
    return jnp.mean((h @ p["e"] + p["f"][None]) ** 2)


def descend(optimizer):
    def update(learner, x):
        params, state = learner
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return update


def by_hand(learner, x):
    """All that is done to one array after another, and a copy of the weights that follows them."""
    params, slow, steps = learner
    value, grads = jax.value_and_grad(loss)(params, x)
    new = {k: params[k] - 0.1 * jnp.sign(grads[k]) * jnp.abs(grads[k]) ** 0.5 for k in params}
    slow = jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, slow, new)
    return (new, slow, steps + 1), value


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-3),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clipped values": optax.chain(optax.clip(0.01), optax.rmsprop(1e-2)),
}
CASES = {
    **{name: (descend(o), lambda o=o: (network(), o.init(network()))) for name, o in OPTIMIZERS.items()},
    "by hand": (by_hand, lambda: (network(), network(), jnp.int32(0))),
}


def three(fn, carry, x):
    for _ in range(3):
        carry, value = fn(carry, x)
    return carry, value


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_with_fewer_equations(case):
    """Equation by equation, as written; a norm over all arrays alone is added up in another order."""
    update, init = CASES[case]
    carry, x = init(), numbers(9, 16, 3)  # activations happen to have a shape of the carry
    found = packed(update, carry, x, MOST)
    assert all(len(group) == 6 for group in found.groups)
    expected = three(inlined(update), carry, x)  # a call that is compiled as a whole rounds in another way
    state, value = three(found, found.pack(carry), x)
    actual = found.unpack(state), value
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if case == "clipped adam":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)
    arithmetic = ("mul", "add", "sub", "div", "sqrt", "square", "sign", "integer_pow", "select_n")

    def count(fn, carry):
        return sum(e.primitive.name in arithmetic for e in jax.make_jaxpr(fn)(carry, x).eqns)

    assert count(found, found.pack(carry)) < count(inlined(update), carry)


def test_what_is_not_alike_stays_apart():
    """Types, constants and shapes; booleans, counters and keys; arrays that are too large."""

    def update(c, x):
        return {
            "x": c["x"] * 2.0, "y": c["y"] * 2.0, "z": c["z"] * 3.0, "n": c["n"] + 1, "k": jax.random.split(c["k"])[0],
            "flag": ~c["flag"], "wide": c["wide"] * 2.0, "half": c["half"] * jnp.bfloat16(2),
        }, x  # fmt: skip

    carry = {
        "x": numbers(0, 4), "y": numbers(1, 2, 3), "z": numbers(2, 4), "n": jnp.zeros(4, jnp.int32), "k": jax.random.key(0),
        "flag": jnp.zeros(4, bool), "wide": numbers(3, 200), "half": jnp.ones((4,), jnp.bfloat16),
    }  # fmt: skip
    found = packed(update, carry, jnp.float32(1.0), 100)
    assert [found.shapes[i] for i in found.groups[0]] == [(4,), (2, 3)]
    assert len(found.groups) == 1
    new = found.unpack(found(found.pack(carry), jnp.float32(1.0))[0])
    expected, _ = update(carry, None)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(new), strict=True):
        assert a.dtype == b.dtype
        if a is not expected["k"]:
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(jax.random.key_data(expected["k"]), jax.random.key_data(new["k"]))


def test_where_nothing_is_alike_there_is_nothing():
    assert packed(lambda c, x: (c @ c, x), jnp.ones((3, 3)), jnp.float32(1.0), MOST) is None

    def prints(c, x):
        jax.debug.print("{}", x)
        return jax.tree.map(lambda v: v * 2.0, c), x

    assert packed(prints, [jnp.ones(3), jnp.ones(4)], jnp.float32(1.0), MOST) is None


# -- in minibatch_epochs


@pytest.fixture
def launching(monkeypatch):
    """As on a machine where starting an operation is dear."""
    here = rlfx.target("cpu")
    dear = dataclasses.replace(here, rewrites=dataclasses.replace(here.rewrites, packed=MOST))
    monkeypatch.setattr(rlfx.epochs, "target", lambda: dear)


def epochs(update, carry, data):
    return jax.jit(
        lambda c: rlfx.minibatch_epochs(update, c, data, epochs=2, minibatches=4, key=jax.random.key(3))
    )(carry)


def both_ways(case, request):
    update, init = CASES[case]
    data = numbers(5, 8, 4, 3)
    plain = epochs(update, init(), data)
    request.getfixturevalue("launching")
    return plain, epochs(update, init(), data)


@pytest.mark.parametrize("case", ["clipped adam", "by hand"])
def test_epochs_give_the_same(case, request):
    plain, found = both_ways(case, request)
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_carry_of_the_loops_is_a_vector(launching):
    update, init = CASES["adam"]
    text = str(jax.make_jaxpr(lambda c: epochs(update, c, numbers(5, 8, 4, 3)))(init()))
    total = sum(v.size for v in network().values())
    assert f"f32[{total}]" in text


def test_gradients_go_through(request):
    data = numbers(5, 8, 4, 3)

    def reached(rate):
        def update(p, x):
            return jax.tree.map(lambda a, g: a - rate * g, p, jax.grad(loss)(p, x)), None

        final, _ = rlfx.minibatch_epochs(update, network(), data, epochs=1, minibatches=4, key=jax.random.key(3))
        return loss(final, data.reshape(-1, 3))

    plain = jax.grad(reached)(0.1)
    request.getfixturevalue("launching")
    np.testing.assert_allclose(jax.grad(reached)(0.1), plain, rtol=1e-4)


def test_what_update_must_return_is_still_said(launching):
    with pytest.raises(ProgramError, match=r"update returned .*, not \(carry, aux\)"):
        epochs(lambda c, x: c, network(), numbers(5, 8, 4, 3))


def test_few_steps_are_not_packed(launching):
    update, init = CASES["adam"]
    run = lambda c: rlfx.minibatch_epochs(  # noqa: E731
        update, c, numbers(5, 8, 4, 3), epochs=1, minibatches=2, key=jax.random.key(3)
    )
    assert f"f32[{sum(v.size for v in network().values())}]" not in str(jax.make_jaxpr(run)(init()))
