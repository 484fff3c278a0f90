"""Which networks are narrow: their arrays have features first, and rows last (``execute/features.py``).

So are those of agents that see each their own, with weights of their own (``jax.vmap`` over both), if these are narrow: with rows
first ``[rows, agents, n]`` is turned to ``[agents, rows, n]`` for every product, and back.
"""

from __future__ import annotations

from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.cpu.contractions import DOT
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.schedule.schedule import Loop, Schedule

#: Fewer rows, or fewer for each column of the widest weight, are faster with rows first (16 rows of 64: 1.4x).
LEAST_ROWS, ROWS_A_COLUMN = 32, 2

#: A vector of a CPU. Where every vector of a network fills it, features first gain nothing (benchmarks/results/rewrites.json).
VECTOR = 16

#: How many times as wide the networks of agents may be, of as many rows as columns.
MEMBERS = 4


def is_narrow(schedule: Schedule, batch: int, steps: int, most: int) -> bool:
    """Whether all products are of vectors with weights of at most ``most`` rows and columns, some shorter than a CPU's vector,
    each for many rows; with those of agents, of four times as many.

    Args:
      batch, steps: environments, and timesteps of what is evaluated at once.
    """
    program = schedule.graph.program
    products = [(e, isinstance(s, Loop)) for s in schedule.stages for e in s.equations if e.op in PRODUCTS]
    sizes = {e: _weight(e, program) for e, _ in products}
    ensemble = any(len(v.shape) == 3 for e in sizes for v in e.inputs)
    if ensemble and not _each_sees_its_own(schedule):
        return False
    most, rows = (MEMBERS * most, 1) if ensemble else (most, ROWS_A_COLUMN)
    return (
        bool(most and products)
        and all(
            0 < (widest := max(sizes[e], default=0)) <= most
            and (batch if in_loop else batch * steps) >= max(LEAST_ROWS, rows * widest)
            for e, in_loop in products
        )
        and min(map(min, sizes.values())) < VECTOR
    )


def _each_sees_its_own(schedule: Schedule) -> bool:
    """Whether members multiply what they are given: agents, each with its observation. (Critics that see one are slower so.)"""
    made: set[Var] = set()  # of products
    for e in (e for s in schedule.stages for e in s.equations):
        follows = not made.isdisjoint(v for v in e.inputs if isinstance(v, Var))
        if e.op is DOT and e.params["dimension_numbers"][1][0] and not follows:
            return True
        if follows or e.op in PRODUCTS:
            made.update(e.outputs)
    return False


def _weight(e: Equation, program: Program) -> tuple[int, ...]:
    """Rows and columns of the weight that a vector is multiplied with, of a member's; nothing of other products."""
    weights = [i for i, x in enumerate(e.inputs) if not isinstance(x, Var) or program.dims_of(x) == NO_DIMS]
    if e.op is not DOT or e.is_ragged or len(weights) != 1:
        return ()
    (contracted, members), (side,) = e.params["dimension_numbers"], weights
    w, x = e.inputs[side], e.inputs[1 - side]
    if len(contracted[0]) != 1 or len(x.shape) != 1 + len(members[0]) or len(w.shape) not in (2, 3):
        return ()
    (over,) = contracted[side]
    columns = [n for i, n in enumerate(w.shape) if i != over and i not in members[side]]
    return w.shape[over], columns[-1] if columns else 1
