"""The call of a program that reads its own series at other indices of the program around it: ``x[i - 1, t + 1]``.

Each such series becomes a result of the call, over t; outside, a series over i, declared before the call and defined by it; each
read of it there is an operand of the call, which is read at t + 1 inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.errors import ProgramError, located
from rlfx.recurrence.api.pending import Directed
from rlfx.recurrence.ir.returned import split_result
from rlfx.recurrence.language.crossing import Crossing, Field
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import TIME
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.solve import declare, define

tree = jax.tree_util


def curried(
    call: Callable[[Callable, Crossing, Any], Any],
    f: Callable,
    noted: Crossing,
    domain: Domain,
    has_loss: bool,
    params: Any,
) -> Any:
    """What the call gives.

    Args:
      call: ``call(f, crossing, params)``, of a function whose aux is ``(aux, fields)``.
      f: the per-timestep function.
      noted: what it reads of other iterations.
    """
    if domain.until:
        raise told(
            ProgramError(
                located(
                    "A program with until= is read at other iterations: each of them ends at a time of its own.",
                    where=noted.reads[0].where,
                    fix="Return the series from it, and read what came back, which is zero after each end.",
                )
            )
        )
    axes = (domain.length, *(() if domain.batch is None else (domain.batch,)))
    like = lambda leaf: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype)  # noqa: E731
    series = []
    for own in noted.fields:
        leaves = tree.tree_unflatten(own.structure, [like(aval) for aval in own.avals])
        series.append(declare(leaves, *(_spread(edge, own, axes) for edge in own.around)))
    operands = tuple(series[read.field].at(read.outer) for read in noted.reads)
    crossing = Crossing(operands=())

    def with_fields(both: Any, carry: Any, t: Any) -> Any:
        crossing.begin()
        crossing.operands = both[1]
        loss, carry, aux = split_result(getattr(f, "f", f)(both[0], carry, t), has_loss, f)
        values = tuple(_everywhere(own.at(TIME), t) for own in crossing.series)
        results = carry, (aux, values)
        return (loss, *results) if has_loss else results

    function = functools.wraps(getattr(f, "f", f))(with_fields)
    out = call(Directed(function, f.transforms) if isinstance(f, Directed) else function, crossing, (params, operands))
    loss, (carry, (aux, fields)) = out if has_loss else (None, out)
    # What the call gives is the definition; its results go on from there, so that nothing is computed twice.
    for known, value in zip(series, fields, strict=True):
        define(known, value, outer=True)
    return (loss, (carry, aux)) if has_loss else (carry, aux)


def _everywhere(value: Any, t: Any) -> Any:
    """The value with an entry for each t and b, of what may vary with neither."""
    b = 0 if t.domain.batch is None else t.index(t.domain.names.axis)
    always = t.now + b >= jnp.iinfo(jnp.int32).min
    return tree.tree_map(lambda leaf: jnp.where(always, leaf, leaf), value)


def _spread(edge: Any, own: Field, axes: tuple[int, ...]) -> Any:
    """A value over i, for all t and b; of each leaf."""
    if edge is None:
        return None
    lead = (1,) * len(axes)
    avals = tree.tree_unflatten(own.structure, own.avals)
    each = lambda v, a: jnp.broadcast_to(jnp.asarray(v, a.dtype), a.shape).reshape(lead + a.shape)  # noqa: E731
    return tree.tree_map(lambda v, part: tree.tree_map(lambda a: each(v, a), part), edge, avals)
