"""Shifts and whole-number divisions are defined for all numbers in a kernel, as they are for XLA: LLVM has no result for some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx import _jaxpr as J
from rlfx.transforms.fuse_steps import fuse_scan
from rlfx.transforms.steps.defined import DEFINED

EDGES = np.array([0, 1, -1, 5, -7, 31, 32, 33, 100, 2**31 - 1, -(2**31)], np.int64)
NAMES = "shift_left", "shift_right_logical", "shift_right_arithmetic", "div", "rem"
WIDTHS = {"shift_left", "shift_right_logical", "shift_right_arithmetic"}


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("name", NAMES)
def test_each_is_what_xla_says(name, dtype):
    edges = EDGES.astype(dtype)
    x, y = np.meshgrid(edges, edges)
    expected = getattr(lax, name)(x, y)
    fn = DEFINED[J.primitive(name)]
    np.testing.assert_array_equal(fn(jnp.asarray(x), jnp.asarray(y)), expected)
    for i, known in enumerate(edges):
        np.testing.assert_array_equal(fn(jnp.asarray(edges), known), expected[i])


@pytest.mark.parametrize("wide", [False, True], ids=["scalars", "tiles"])
def test_in_a_kernel(wide):
    """Numbers that only the loop knows, and some that are known before."""

    def body(shared, t, b, carry, x):
        n = (b + t) % 40
        if wide:
            carry = jnp.tanh(carry @ shared)
        found = n << (n - 4), n // (n - 5), n % (n - 6), n >> 32, lax.shift_right_logical(n, 32), n << n
        return carry, (found, carry.sum() if wide else carry)

    carry = jnp.ones((24, 16) if wide else 24)
    run = lambda backend: fuse_scan(body, 5, backend=backend)(jnp.eye(16), carry, None)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, run("interpret")[1][0], run("vmap")[1][0])


def test_of_wide_draws():
    """Whole numbers that are a tile, on either side."""

    def body(shared, t, b, carry, x):
        carry = jnp.tanh(carry @ shared)
        n = jax.random.randint(jax.random.fold_in(jax.random.key(0), b + t), (16,), 0, 40)
        return carry, ((7 << n).sum(), (100 // n).sum(), (n % 7).sum(), (n >> 32).sum(), (n // (n - 3)).sum())

    run = lambda backend: fuse_scan(body, 3, backend=backend)(jnp.eye(16), jnp.ones((24, 16)), None)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, run("interpret")[1], run("vmap")[1])


def test_no_kernel_shifts_by_the_width_of_a_number():
    """jax's threefry does, wherever a key takes in a number of 32 bits: whole kernels were removed as undefined."""

    def act(p, x, t):
        key = jax.random.fold_in(t.key_for("a"), x[0].astype(jnp.int32))
        return 0.9 * x + 0.1 * jax.random.uniform(key, x.shape), x[1]

    kernel = rlfx.unroll(
        act, length=4, batch=8, target="h200", transform=lambda p: rlfx.fuse_steps(p, backend="triton")
    )
    traced = jax.make_jaxpr(kernel)({}, jnp.ones((8, 3)), jax.random.key(0))
    (call,) = [e for e in J.equations_in({"jaxpr": traced.jaxpr}) if e.primitive.name == "pallas_call"]
    known, amounts = {}, []
    for e in J.equations_in(call.params):
        operands = [x.val if hasattr(x, "val") else known.get(x) for x in e.invars]
        if e.primitive.name in ("broadcast_in_dim", "convert_element_type") and operands[0] is not None:
            known[e.outvars[0]] = operands[0]
        if e.primitive.name in WIDTHS:
            amounts.append(operands[1])
    assert len(amounts) > 100
    assert all(n is not None and n < 32 for n in amounts)
