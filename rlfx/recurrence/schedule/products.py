"""Products of one value with several weights as one product, in loops over time.

An actor and a critic that see one observation, the gates of a recurrent cell, queries, keys and values: each is a product of
its own with the same few rows. On a CPU one product with all the columns takes up to a third less time, the fewer rows the less,
as long as the weights are small; they are put together once, before the loop. So it is in the loops of a learner (of cells that
multiply gate by gate, as flax's do: 0.90 to 0.95 of the time), but not in what it computes for all timesteps: of many rows there
is nothing to gain.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.contractions import DOT, OVER_ROWS
from rlfx.recurrence.ir.build import Builder
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.language.primitives import products_p
from rlfx.recurrence.schedule.schedule import Loop

#: Of a single environment the weights are most of what is read, and larger ones are not worth a copy.
MOST_OF_ONE = 8192


@dataclass(frozen=True, eq=False)
class Joined:
    """Weights that are put together before a loop.

    Attributes:
      weights: in order, [k, n], [k, m], ...
      together: [k, n + m + ...].
    """

    weights: tuple[Var, ...]
    together: Var

    def __str__(self) -> str:
        k, n = self.together.shape
        return f"products with {len(self.weights)} weights are one, with [{k}, {n}]"


def share_products(
    loop: Loop,
    program: Program,
    most_rows: int,
    active: frozenset[Equation] = frozenset(),
    perturbed: frozenset[Var] = frozenset(),
) -> tuple[Loop, tuple[Joined, ...]]:
    """A loop in which products of one value are one product.

    Args:
      most_rows: of the weights: with more, two products were as fast as one, or faster.
      active: what a derivative goes through. Others (of a target network) are no part of a product with one: all that is made of
        them would be differentiated, too.
      perturbed: inputs with a derivative. Those without (of a layer that adapters are added to) are no part of a weight with one:
        the gradient of all of it would be made.

    Returns:
      The loop, and the weights that it uses instead of its own.
    """
    build, instead, joined = Builder(program), {}, []
    for members in _alike(loop, program, most_rows, active, perturbed):
        first, columns = members[0], tuple(e.outputs[0].shape[0] for e in members)
        weights = tuple(e.inputs[1] for e in members)
        together = build.var((first.inputs[1].shape[0], sum(columns)), first.inputs[1].dtype)
        joined.append(Joined(weights, together))
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
    return replace(loop, body=body), tuple(joined)


def _alike(
    loop: Loop, program: Program, most_rows: int, active: frozenset[Equation], perturbed: frozenset[Var]
) -> Sequence[list[Equation]]:
    """The products of each value that can be one."""
    inside, made_by = {v for e in loop.body for v in e.outputs}, program.definitions()
    found: dict[tuple, list[Equation]] = {}
    for e in loop.body:
        if e.op is DOT and e.outputs[0] not in loop.depth and _is_row_by_weights(e, program, inside, most_rows):
            x, w = e.inputs
            moves = e in active, w in perturbed or made_by.get(w) in active
            key = (moves, x, w.dtype, tuple(sorted((k, str(p)) for k, p in e.params.items())))
            found.setdefault(key, []).append(e)
    return [members for members in found.values() if len(members) > 1 and _is_worth_it(members, program)]


def _is_worth_it(members: Sequence[Equation], program: Program) -> bool:
    size = sum(math.prod(e.inputs[1].shape) for e in members)
    return size <= MOST_OF_ONE or "b" in program.dims_of(members[0].inputs[0])


def _is_row_by_weights(e: Equation, program: Program, inside: set[Var], most_rows: int) -> bool:
    x, w = e.inputs
    weight = isinstance(w, Var) and w not in inside and program.dims_of(w) == NO_DIMS
    if not weight or not isinstance(x, Var) or J.symbolic_axes((*x.shape, *w.shape)):
        return False
    by_rows = len(x.shape) == 1 and len(w.shape) == 2 and e.params["dimension_numbers"] == OVER_ROWS
    return by_rows and x.shape[0] <= most_rows
