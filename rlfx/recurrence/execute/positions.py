"""Windows with positions last, ``[features, environments, positions]`` at one timestep (``schedule/windows.py`` says which).

Each equation runs at one position, for rows that are environments and positions, by the rules for rows last (``features.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import nest_of, resized
from rlfx.recurrence.execute.features import evaluate_mapped
from rlfx.recurrence.execute.values import Value, expand, meaning, of_atom, scope_of
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.index import Window
from rlfx.recurrence.schedule.windows import MOST, PositionsLast

_SUM = J.primitive("reduce_sum")
#: What rows are called in ``features.py``: environments come first there, positions last.
_ROWS, _POSITIONS = "t", "b"


def times_last(source: Value, e: Equation, fill: Value, sizes: Mapping[str, int]) -> Any:
    """``[features, B?, times]`` of a series, with what windows have outside of the domain."""
    assert isinstance(e.access, Window)
    data = expand(source, source.dims | {"t"}, sizes).data
    data = jnp.moveaxis(data, 0, -1)
    data = jnp.moveaxis(data, 0, -2) if "b" in source.dims else data
    point = jnp.reshape(fill.data, (*fill.data.shape, *(1 for _ in source.dims | {"t"})))
    before, after = (
        jnp.broadcast_to(point, (*data.shape[:-1], n)) for n in (max(0, -e.access.lo), max(0, e.access.hi - 1))
    )
    return jnp.concatenate([before, data, after], -1)


def run_positions_last(last: PositionsLast, series: Mapping[Equation, Any], env: dict[Var, Value], t: Any) -> None:
    """Evaluate the equations at timestep t, and add what is needed of them to ``env``, whose values have that timestep alone.

    Args:
      series: what is read, by ``times_last``.
    """
    local: dict[Var, Value] = {}
    for e in last.reads:
        assert isinstance(e.access, Window)
        lo, width = e.access.lo, e.access.hi - e.access.lo
        rows = jax.lax.dynamic_slice_in_dim(series[e], t + max(lo, 0), width, axis=-1)
        batched = rows.ndim - len(e.outputs[0].shape)  # features, environments, positions
        local[e.outputs[0]] = Value(rows[None], frozenset((_ROWS, _POSITIONS) if batched else (_POSITIONS,)))
    for e in last.equations:
        for v in e.inputs:
            if isinstance(v, Var) and v not in local:
                local[v] = _turned(env[v], last.axis.get(v))
        with scope_of(e):
            local |= zip(e.outputs, _evaluated(e, [of_atom(u, local) for u in e.inputs], last.loop[e]), strict=True)
    for v in last.needed:
        env[v] = _turned_back(local[v], v, last.axis[v])


def _evaluated(e: Equation, operands: list[Value], loop: int) -> list[Value]:
    """An equation at one position, for all of them."""
    it = nest_of(e.op, e.params, *([v.shape for v in side] for side in (e.inputs, e.outputs)))
    assert it is not None
    params = resized(e.op, e.params, it, {loop: 1})
    if e.op is _SUM and all(operands[0].data.shape[a] <= MOST for a in params["axes"]):
        data = operands[0].data
        for a in sorted(params["axes"], reverse=True):
            parts = (jax.lax.index_in_dim(data, i, a, keepdims=False) for i in range(data.shape[a]))
            data = functools.reduce(jnp.add, parts)
        return [Value(data, operands[0].dims)]
    return evaluate_mapped(e.op, params, operands, lambda *xs: meaning(e.op, params, *xs))


def _turned(value: Value, axis: int | None) -> Value:
    """A value of one timestep, ``[t?, B?, ...]``, with rows last; ``axis``: of a point, along positions."""
    data = value.data[0] if "t" in value.dims else value.data
    rows = frozenset(_ROWS) if "b" in value.dims else frozenset()
    if axis is not None:
        data = jnp.moveaxis(jnp.expand_dims(data, -1), -1, axis + len(rows))  # one position, ...
        data = jnp.moveaxis(data, axis + 1 + len(rows), -1)  # ... of these
    data = jnp.moveaxis(data, 0, data.ndim - 1 - (axis is not None)) if rows else data
    return Value(data, rows | (frozenset() if axis is None else frozenset(_POSITIONS)))


def _turned_back(value: Value, v: Var, axis: int) -> Value:
    """As :func:`_turned`, back."""
    data, rows = value.data, _ROWS in value.dims
    if _POSITIONS not in value.dims:
        data = jnp.broadcast_to(data[..., None], (*data.shape, v.shape[axis]))
    data = jnp.squeeze(data, axis)
    data = jnp.moveaxis(data, -2, 0) if rows else data
    data = jnp.moveaxis(data, -1, axis + rows)
    return Value(data[None], frozenset("tb") if rows else frozenset("t"))
