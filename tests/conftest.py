"""Strict numerics for every test: no implicit dtype or rank promotion; warnings are errors (pyproject.toml)."""

import os

# Tests compile thousands of small programs: compile time, not speed, is what they pay for. Two host devices let the
# multi-device tests run; programs that do not ask for a mesh stay on the first one.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
