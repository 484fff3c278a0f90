"""Products of one value with several weights as one product, while acting.

An actor and a critic that see one observation, the gates of a recurrent cell, queries, keys and values: each is a product of
its own with the same few rows. On a CPU one product with all the columns takes up to a third less time, the fewer rows the less,
as long as the weights are small; they are put together once, before the loop. Where derivatives are taken there are many
rows, and nothing to gain.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.contractions import DOT, OVER_ROWS
from rlfx.recurrence.lift import Builder
from rlfx.recurrence.primitives import products_p
from rlfx.recurrence.program import NO_DIMS, Equation, Var
from rlfx.recurrence.schedule import Loop
from rlfx.recurrence.values import Value, of_atom

#: With weights of more rows, 256 for one, two products were as fast as one, or faster.
MOST_ROWS = 128
#: Of a single environment the weights are most of what is read, and larger ones are not worth a copy.
MOST_OF_ONE = 8192


def share_products(loop: Loop, program: Any, env: Mapping[Var, Value]) -> tuple[Loop, dict[Var, Value]]:
    """A loop in which products of one value are one product.

    Args:
      env: what is known before the loop: its weights.

    Returns:
      The loop, and the weights that it uses instead of these, [k, n + m + ...] each.
    """
    if jax.default_backend() != "cpu":
        return loop, {}
    build, instead, weights = Builder(program), {}, {}
    for members in _alike(loop, program, env):
        first, columns = members[0], tuple(e.outputs[0].shape[0] for e in members)
        value = jnp.concatenate([of_atom(e.inputs[1], env).data for e in members], axis=1)
        together = build.var(value.shape, value.dtype)
        weights[together] = Value(value)
        one = replace(
            first,
            op=products_p,
            params={"product": dict(first.params), "columns": columns},
            inputs=(first.inputs[0], together),
            outputs=tuple(e.outputs[0] for e in members),
            scope=posixpath.commonpath([e.scope for e in members]),
        )
        instead |= dict.fromkeys(members, ()) | {first: (one,)}
    body = tuple(new for e in loop.body for new in instead.get(e, (e,)))
    return replace(loop, body=body), weights


def _alike(loop: Loop, program: Any, env: Mapping[Var, Value]) -> Sequence[list[Equation]]:
    """The products of each value that can be one."""
    found: dict[Any, list[Equation]] = {}
    for e in loop.body:
        if e.op is DOT and _is_row_by_weights(e, env) and e.outputs[0] not in loop.depth:
            key = (e.inputs[0], e.inputs[1].dtype, tuple(sorted((k, str(p)) for k, p in e.params.items())))
            found.setdefault(key, []).append(e)
    return [members for members in found.values() if len(members) > 1 and _is_worth_it(members, program)]


def _is_worth_it(members: Sequence[Equation], program: Any) -> bool:
    size = sum(math.prod(e.inputs[1].shape) for e in members)
    return size <= MOST_OF_ONE or "b" in program.dims_of(members[0].inputs[0])


def _is_row_by_weights(e: Equation, env: Mapping[Var, Value]) -> bool:
    x, w = e.inputs
    known = env.get(w) if isinstance(w, Var) else None
    if known is None or known.dims != NO_DIMS or not isinstance(x, Var) or J.symbolic_axes((*x.shape, *w.shape)):
        return False
    by_rows = len(x.shape) == 1 and len(w.shape) == 2 and e.params["dimension_numbers"] == OVER_ROWS
    return by_rows and x.shape[0] <= MOST_ROWS
