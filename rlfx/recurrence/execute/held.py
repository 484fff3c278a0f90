"""What the learner computes for environments that have ended: their first timestep once more.

Nobody asks for it, so its cotangent is zero; but zero times an infinite derivative is NaN, and what the carry of the last
timestep, padded data or a mean over nothing give there may be anything. The first timestep is one that every environment
has: where the learner is right on the domain, it is right there. The reference evaluates no such points at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.values import Value, axis_of, expand
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.index import Lookup
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.primitives import across_p, whole_p


def seen_after_ends(graph: Graph) -> frozenset[Var]:
    """Values that other environments see after an environment has ended, and what they depend on: they stay as they are."""
    seen: set[Var] = set()
    todo = [v for e in graph.equations for v in _shown(e)]
    while todo:
        var = todo.pop()
        if var not in seen:
            seen.add(var)
            equation = graph.definition.get(var)
            todo += [edge.value for edge in graph.edges(equation)] if equation is not None else []
    return frozenset(seen)


def _shown(equation: Equation) -> list[Var]:
    """What an equation takes of all environments, ended or not."""
    if equation.op is whole_p:
        shown = equation.inputs[equation.params["num_consts"] :]
    elif equation.op is across_p or (
        equation.is_read and isinstance(equation.access, Lookup) and equation.access.across_batch
    ):
        shown = equation.inputs[:1]
    else:
        return []
    return [v for v in shown if isinstance(v, Var)]


def somewhere(alive: Value, extent: Extent) -> Value:
    """Whether any environment has not ended."""
    axis = axis_of(alive.dims, "b")
    if axis is None:
        return alive
    return Value(extent.over_devices("max", jnp.any(alive.data, axis=axis)), alive.dims - {"b"})


def counted(alive: Value, over: tuple[str, ...], extent: Extent) -> Value:
    """Which points a reduction counts: those of environments that have not ended; all of them after the last end."""
    if "t" in over:
        return alive
    none = expand(somewhere(alive, extent), alive.dims, {"b": extent.batch})
    return Value(alive.data | ~none.data, alive.dims)


def first_of(values: Mapping[Var, Value]) -> dict[Var, Value]:
    """The values at the first timestep."""
    return {v: Value(x.data[0], x.dims - {"t"}) if "t" in x.dims else x for v, x in values.items()}


def hold(
    graph: Graph, stored: Mapping[Var, Value], extent: Extent, firsts: Mapping[Var, Value] | None = None
) -> Mapping[Var, Value]:
    """What the learner is given of consecutive timesteps, held where nobody else sees it.

    Args:
      graph: the learner's.
      firsts: the values at the first timestep of all, where it is not the first of these.
    """
    if not graph.program.domain.until:
        return stored
    alive = stored[graph.program.alive]  # type: ignore[index]
    firsts = first_of(stored) if firsts is None else firsts
    as_it_is = seen_after_ends(graph) | {graph.program.alive}
    sizes = {"t": alive.data.shape[0], "b": extent.batch}
    return {
        v: held(x, firsts[v], alive, extent, sizes) if "t" in x.dims and v not in as_it_is else x
        for v, x in stored.items()
    }


def held(value: Value, first: Value, alive: Value, extent: Extent, sizes: Mapping[str, int]) -> Value:
    """The value while the environment (any, if all share it) has not ended; after that ``first``."""
    mask = alive if "b" in value.dims | first.dims else somewhere(alive, extent)
    dims = value.dims | first.dims | mask.dims
    m, x, y = (expand(v, dims, sizes).data for v in (mask, value, first))
    return replace(value, data=jnp.where(mask_like(m, x), x, y), dims=dims)
