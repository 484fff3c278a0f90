"""Fused steps lower to Mosaic's TPU kernels without a TPU, with 64-bit types too: what has 64 bits is refused in our words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.envs import fast_prng
from rlfx.errors import RlfxError
from rlfx.transforms.fuse_steps import fuse_scan, fuse_steps
from tests.sampling import slow
from tests.transforms.test_fuse_steps import CLASSIC, start


def lowered_for_tpu(run, *args):
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("name", ["CartPole-v1", *map(slow, [*CLASSIC[1:], "Breakout-MinAtar", "gymnax/CartPole-v1"])])
def test_lowers_for_tpu(name):
    """With 64-bit types (``make test-x64``), too: what a kernel counts in has 32."""
    env = rlfx.envs.make(name)
    key, states = start(env, 1024, fast_prng)
    run = fuse_steps(env, 25, policy="random", outputs="statistics", backend="tpu")
    assert "tpu_custom_call" in lowered_for_tpu(run, key, states)


def halved(n, start):
    return lambda shared, t, b, c, x: (
        jax.lax.fori_loop(start(0), start(n), lambda i, v: 0.5 * v + i.astype(v.dtype), c),
        None,
    )


#: What has 64 bits, and what is said of it.
WIDE = {
    "a carry": (lambda shared, t, b, c, x: (c + 1, None), jnp.int64, "the carry has int64"),
    "a carry of floats": (lambda shared, t, b, c, x: (0.5 * c, None), jnp.float64, "the carry has float64"),
    "inputs": (lambda shared, t, b, c, x: (c + x.astype(c.dtype), None), jnp.float32, "xs has float64"),
    "outputs": (lambda shared, t, b, c, x: (c, 1.0), jnp.float32, "ys has float64"),
    "inside": (
        lambda shared, t, b, c, x: ((c.astype(jnp.float64) * 1.5).astype(c.dtype), None),
        jnp.float32,
        "the primitive 'convert_element_type' makes float64",
    ),
    "what a loop counts in": (halved(40, int), jnp.float32, "the primitive 'add' makes int64"),
}
#: What has 32 only: loops that are unrolled, count in int32 or in nothing.
NARROW = {
    "few iterations": halved(4, int),
    "int32": halved(40, jnp.int32),
    "unused": lambda shared, t, b, c, x: (jax.lax.fori_loop(0, 40, lambda _, v: 0.5 * v + c, c), None),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_tpu_has_numbers_of_32_bits(name):
    (body, dtype, fact), xs = WIDE[name], name == "inputs"
    with jax.enable_x64(True), pytest.raises(RlfxError) as caught:
        lowered_for_tpu(
            fuse_scan(body, 5, backend="tpu"), None, jnp.ones(1024, dtype), np.ones((5, 1024)) if xs else None
        )
    assert f"fuse_steps: {fact}, and this backend has numbers of 32 bits." in str(caught.value)
    assert (
        "Fix: Give it, or the bounds of its loop, a dtype of 32 bits (jnp.float32, jnp.int32), or use another backend."
        in str(caught.value)
    )


@pytest.mark.parametrize("name", NARROW)
def test_loops_of_a_tpu_with_64_bit_types(name):
    with jax.enable_x64(True):
        text = lowered_for_tpu(fuse_scan(NARROW[name], 5, backend="tpu"), None, jnp.ones(1024, jnp.float32))
    assert "tpu_custom_call" in text
