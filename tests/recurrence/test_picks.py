"""One element of a short axis as a masked sum: the same values and gradients, without gathers and scatters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

CPU = rlfx.target("cpu")
WIDE = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, picks=64))
T, B, N = 4, 3, 5

#: What is read of ``x`` [5, 2] at ``i``, an int32.
PICKS = {
    "row": lambda x, i: x[i].sum(),
    "element": lambda x, i: x[:, 0][i],
    "of columns": lambda x, i: x[:, i % 2].sum(),
    "from the end": lambda x, i: x[-1 - i, 0],
    "beyond": lambda x, i: x[i + 3, 1],
    "log-probability": lambda x, i: jax.nn.log_softmax(jnp.where(jnp.arange(N) < 4, x[:, 0], -jnp.inf))[i % 4],
    "dynamic": lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False).prod(),
    "integers": lambda x, i: jnp.arange(N)[i].astype(jnp.float32) * x[0, 0],
    "two": lambda x, i: x[i].sum() * x[(i + 1) % N, 0],
}


def program_of(pick):
    def program(p, c, t):
        i = jax.random.randint(t.key_for("i"), (), 0, N)
        return pick(p["x"] * c, i) ** 2, 0.9 * c, i

    return program


def arguments():
    x = np.random.default_rng(0).uniform(0.5, 1.5, (N, 2)).astype(np.float32)
    return {"x": jnp.asarray(x)}, jnp.linspace(0.5, 1.0, B)


def jaxpr_of(fn):
    return str(jax.make_jaxpr(jax.grad(lambda p, c: fn(p, c, jax.random.key(0))[0]))(*arguments()))


@pytest.mark.parametrize("name", PICKS)
def test_values_and_gradients_are_those_of_loops(name):
    fn = rlfx.compile(program_of(PICKS[name]), length=T, batch=B, target=WIDE)
    (loss, (_, drawn)), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(*arguments(), jax.random.key(0))

    def by_hand(p, c):
        total = 0.0
        for t in range(T):
            total += sum(PICKS[name](p["x"] * c[b] * 0.9**t, drawn[t, b]) ** 2 for b in range(B))
        return total / (T * B)

    expected, slopes = jax.value_and_grad(by_hand)(*arguments())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["x"], slopes["x"], rtol=1e-4, atol=1e-6)
    assert "gather" not in jaxpr_of(fn)
    assert "scatter" not in jaxpr_of(fn)


def test_where_it_does_not_pay_a_gather_stays():
    for target in (CPU, dataclasses.replace(WIDE, rewrites=dataclasses.replace(WIDE.rewrites, picks=9))):
        fn = rlfx.compile(program_of(PICKS["row"]), length=T, batch=B, target=target)
        assert "gather" in jaxpr_of(fn)


def test_accelerators_do():
    for name in ("h200", "t4", "v5e"):
        fn = rlfx.compile(program_of(PICKS["element"]), length=T, batch=B, target=name)
        assert "gather" not in str(fn.trace(*arguments(), jax.random.key(0)))
        assert rlfx.target(name).rewrites.picks
