"""Strict numerics for every test: no implicit dtype or rank promotion; warnings are errors (pyproject.toml)."""

import os

# Tests compile thousands of small programs: compile time, not speed, is what they pay for. Four host devices let the
# multi-device tests run; programs that do not ask for a mesh stay on the first one. Examples ask for all the cores.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    devices = max(4, os.cpu_count() or 1)
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
