"""The rows that blocks of timesteps see of a series, put side by side by slices and reshapes alone: so is their derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rlfx.recurrence.execute.reads import windows_of
from rlfx.recurrence.execute.values import Value, expand, zeros
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.schedule.bands import Band


def rows_of_blocks(source: Value, band: Band, sizes: Mapping[str, int]) -> Any:
    """``[blocks, width, B?, ...]`` of a series; zeros stand outside of the domain."""
    return blocks_of(expand(source, source.dims | {"t"}, sizes).data, band)


def blocks_of(data: Any, band: Band, fill: Any = None) -> Any:
    """``[blocks, width, ...]`` of rows ``[T, ...]``; outside of them there is ``fill``, or zeros."""
    blocks, size = -(-len(data) // band.block), band.block
    needed_blocks = -(-band.width // size)
    needed = (blocks + needed_blocks - 1) * size
    padded = rows_between(data, band.first, band.first + needed, fill)
    shifted = [padded[i * size : (i + blocks) * size].reshape(blocks, size, *data.shape[1:]) for i in range(needed_blocks)]
    return jnp.concatenate(shifted, axis=1)[:, : band.width]


def rows_between(data: Any, begin: int, end: int, fill: Any = None) -> Any:
    """The rows ``begin <= p < end``, which may be outside, where there is ``fill``, or zeros."""
    shapes = ((max(0, n), *data.shape[1:]) for n in (-begin, end - len(data)))
    before, after = (zeros(s, data.dtype) if fill is None else jnp.full(s, fill, data.dtype) for s in shapes)
    return jnp.concatenate([before, data[max(0, begin) : max(0, end)], after])[: end - begin]


def seen_by_block(source: Value, rows: Any, equation: Equation, band: Band, domain: Domain) -> Value:
    """The slices of the timesteps of one block, of the rows that it sees."""
    return windows_of(rows, source.dims - {"t"}, equation, domain, band.base)
