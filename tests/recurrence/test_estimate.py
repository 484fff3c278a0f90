"""The static estimate of temporary bytes against XLA's own count."""

import importlib.metadata
import time

import jax
import jax.numpy as jnp
import pytest

from rlfx.recurrence.estimate import estimate_temp_bytes, largest_values

N = 256


def mlp_gradient():
    params = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(32, 64), (64, 64), (64, 1)])]

    def loss(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params[-1]) ** 2)

    return jax.value_and_grad(loss), (params, jnp.ones((N, 32)))


def scan_gradient():
    def loss(w, xs):
        def cell(h, x):
            h = jnp.tanh(h @ w + x)
            return h, h

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((N, 32)), xs)[1] ** 2)

    return jax.grad(loss), (jnp.ones((32, 32)), jnp.ones((40, N, 32)))


def accumulated_gradient():
    step, (params, _) = mlp_gradient()

    def accumulate(params, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, step(params, part)), None

        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(step, params, x[0]))
        return jax.lax.scan(add, zero, x)[0]

    return accumulate, (params, jnp.ones((8, N, 32)))


def softmax_of_a_gather():
    def loss(table, tokens):
        return jax.nn.logsumexp(table[tokens] @ table.T, axis=-1).mean()

    return jax.grad(loss), (jnp.ones((512, 32)), jnp.zeros((N, 4), jnp.int32))


def random_numbers():
    def draw(key):
        return jnp.sum(jax.random.normal(key, (512, 256)) ** 2, axis=1)

    return draw, (jax.random.key(0),)


@pytest.mark.skipif(
    not importlib.metadata.version("jaxlib").startswith("0.10."), reason="the estimate models XLA:CPU of jaxlib 0.10"
)
@pytest.mark.parametrize(
    "program", [mlp_gradient, scan_gradient, accumulated_gradient, softmax_of_a_gather, random_numbers]
)
def test_within_a_fifth_of_what_xla_needs(program):
    fn, args = program()
    jaxpr = jax.make_jaxpr(fn)(*args)
    begin = time.process_time()
    estimated = estimate_temp_bytes(jaxpr)
    assert time.process_time() - begin < 0.5
    exact = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert exact > 2**16
    assert 0.8 < estimated / exact < 1.2, (estimated, exact)


def test_arguments_and_results_are_no_temporaries():
    assert estimate_temp_bytes(jax.make_jaxpr(lambda x: x + 1.0)(jnp.ones((1024, 1024)))) == 0


def test_both_branches_are_not_counted_together():
    def branch(n):
        return lambda x: (jnp.ones((n, 64)) @ x).sum()

    def run(p, x):
        return jax.lax.cond(p, branch(64), branch(1024), x)

    wide = estimate_temp_bytes(jax.make_jaxpr(branch(1024))(jnp.ones((64, 64))))
    assert estimate_temp_bytes(jax.make_jaxpr(run)(True, jnp.ones((64, 64)))) == pytest.approx(wide, abs=64)


def test_the_largest_values_come_with_shape_and_source_line():
    def loss(w, x):
        h = x @ w  # the largest
        return jnp.sum(jnp.sin(h) @ w.T)

    found = largest_values(jax.make_jaxpr(loss)(jnp.ones((8, 512)), jnp.ones((N, 8))), 1)
    assert found[0].bytes == 4 * N * 512
    assert found[0].shape == (N, 512)
    assert "test_estimate.py" in found[0].source
    assert str(found[0]).startswith("512 KiB  f32[256,512]  test_estimate.py:")
