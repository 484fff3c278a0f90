"""Sums over points of outer products as one product of matrices (``rewrite/outer.py``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.execute.extent import Extent, over_devices
from rlfx.recurrence.execute.values import AXES, Value, axis_of, expand
from rlfx.recurrence.ir.outer import Axes, Outer, lettered
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.precision import wide


def reduce_outer(
    outer: Outer, values: Sequence[Value], op: str, over: Sequence[str], sizes: Mapping[str, int], valid: Value | None,
    extent: Extent,
) -> Value:  # fmt: skip
    """The sum, or the mean, over ``over`` of a product at each point, which is not made.

    Args:
      values: of its factors.
      valid: which points count; None: all.
    """
    left, right, *scales = zip(values, outer.axes, strict=True)
    for i, (scale, theirs) in enumerate(scales, 2):
        if outer.at(i) <= outer.at(0):
            left = _scaled(*left, scale, theirs, sizes)
        else:
            right = _scaled(*right, scale, theirs, sizes)
    if valid is not None:
        left, right = ((_of_valid(value, valid, sizes), theirs) for value, theirs in (left, right))
    left = expand(left[0], left[0].dims | (set(over) - right[0].dims), sizes), left[1]
    dims = left[0].dims | right[0].dims
    (x, of_x), (y, of_y) = (_lettered(*side) for side in (left, right))
    result = "".join(d for d in AXES if d in dims and d not in over) + outer.result
    precision = jax.lax.Precision.HIGHEST if outer.exact else None
    total = jnp.einsum(f"{of_x},{of_y}->{result}", x, y, precision=precision, preferred_element_type=wide(x.dtype))
    mesh = extent.mesh_axis if "b" in over else None
    if op == "mean" and valid is None:
        total = over_devices(mesh, "mean", total / math.prod(sizes[d] for d in over))
    else:
        total = over_devices(mesh, "sum", total)
    if op == "mean" and valid is not None:
        total = total / _count(valid, dims, over, sizes, mesh, total)
    return Value(total.astype(left[0].data.dtype), dims - set(over))


def _lettered(value: Value, axes: Axes) -> tuple[Any, str]:
    """A factor without axes of length one that are stretched, and what its axes are called."""
    first = len(value.dims)
    data = jnp.squeeze(value.data, tuple(first + i for i, a in enumerate(axes) if a is None))
    return data, "".join(d for d in AXES if d in value.dims) + lettered(axes)


def _scaled(value: Value, axes: Axes, scale: Value, theirs: Axes, sizes: Mapping[str, int]) -> tuple[Value, Axes]:
    """A factor times another one, all of whose axes it has."""
    dims = value.dims | scale.dims
    value, scale = expand(value, dims, sizes), expand(scale, dims, sizes)
    data, _ = _lettered(scale, theirs)
    own = [a for a in theirs if a is not None]
    kept = [i for i, a in enumerate(axes) if a in own]
    order = [own.index(axes[i]) for i in kept]
    data = jnp.transpose(data, (*range(len(dims)), *(len(dims) + i for i in order)))
    data = jnp.expand_dims(data, tuple(len(dims) + i for i in range(len(axes)) if i not in kept))
    return Value(value.data * data, dims), axes


def _of_valid(value: Value, valid: Value, sizes: Mapping[str, int]) -> Value:
    """Zeros at points that do not count."""
    wider = expand(value, value.dims | valid.dims, sizes)
    mask = mask_like(expand(valid, wider.dims, sizes).data, wider.data)
    return Value(jnp.where(mask, wider.data, jnp.zeros_like(wider.data)), wider.dims)


def _count(
    valid: Value, dims: frozenset, over: Sequence[str], sizes: Mapping[str, int], mesh: str | None, like: Any
) -> Any:
    """How many points count, as the sum has axes."""
    mask = expand(valid, dims, sizes).data
    number = jnp.sum(mask, axis=tuple(axis_of(dims, d) for d in over))
    return mask_like(over_devices(mesh, "sum", number.astype(like.dtype)), like)
