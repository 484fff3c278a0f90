"""Symbolic dimensions: lengths that depend on the timestep."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.export import shape_poly

InconclusiveDimension = (shape_poly.InconclusiveDimensionOperation, core.InconclusiveDimensionOperation)

DIM_AS_VALUE = shape_poly.dim_as_value_p if hasattr(shape_poly, "dim_as_value_p") else core.dim_as_value_p


@functools.cache
def time_dims(length: int, ragged_end: bool) -> tuple[Any, Any]:
    """``(tau, nu)``: ``tau = t + 1`` (jax assumes dimensions >= 1), and the length of the time axis.

    ``nu`` is the integer ``length``, or a symbol bounded by it when every environment ends at its own time.
    """
    if ragged_end:
        scope = shape_poly.SymbolicScope(["tau <= nu", f"nu <= {length}"])
        tau, nu = shape_poly.symbolic_shape("tau, nu", scope=scope)
        return tau, nu
    scope = shape_poly.SymbolicScope([f"tau <= {length}"])
    return shape_poly.symbolic_shape("tau", scope=scope)[0], length


def is_symbolic(dim: Any) -> bool:
    """Whether a dimension depends on the timestep."""
    return isinstance(dim, shape_poly._DimExpr)


def mentions_end(dim: Any) -> bool:
    """Whether a dimension depends on the length of the time axis."""
    return is_symbolic(dim) and "nu" in dim._get_vars()


def symbolic_axes(shape: Sequence) -> tuple[int, ...]:
    """The axes of a shape whose length depends on the timestep."""
    return tuple(i for i, d in enumerate(shape) if is_symbolic(d))


def minimum_dim(a: Any, b: Any) -> Any:
    """``min`` of dimensions."""
    return core.min_dim(a, b)


def maximum_dim(a: Any, b: Any) -> Any:
    """``max`` of dimensions."""
    return core.max_dim(a, b)


def equal_dims(a: Any, b: Any) -> bool:
    """Whether two dimensions are surely equal."""
    return core.definitely_equal(a, b)


def evaluate_dim(dim: Any, tau: Any, nu: Any) -> Any:
    """The value of a dimension at ``tau``, ``nu``: integers, or arrays of their dtype."""
    if not is_symbolic(dim):
        return int(dim) if isinstance(dim, np.integer) else dim  # jnp.pad's are int64
    own = [x.dtype for x in (tau, nu) if hasattr(x, "dtype")]
    if own:  # jax's constants are int64 where that is enabled, and its minima want one dtype
        tau, nu = (x.astype(core.dim_value_dtype()) if hasattr(x, "astype") else x for x in (tau, nu))
    with jax.numpy_dtype_promotion("standard"):
        value = dim._evaluate({"tau": tau, "nu": nu})
    return value.astype(own[0]) if own and hasattr(value, "astype") else value


def evaluate_dims(value: Any, tau: int, nu: int) -> Any:
    """An equation's parameter with integers in place of symbolic dimensions."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(evaluate_dims(v, tau, nu) for v in value)
    return int(evaluate_dim(value, tau, nu)) if is_symbolic(value) else value
