"""Which networks are narrow: their arrays have features first, and rows last (``execute/features.py``)."""

from __future__ import annotations

from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.schedule.schedule import Loop, Schedule

#: Fewer rows, or fewer for each column of the widest weight, are faster with rows first (16 rows of 64: 1.4x).
LEAST_ROWS, ROWS_A_COLUMN = 32, 2

#: A vector of a CPU. Where every vector of a network fills it, features first gain nothing (benchmarks/results/rewrites.json).
VECTOR = 16


def is_narrow(schedule: Schedule, batch: int, steps: int, most: int) -> bool:
    """Whether all products are of vectors with weights of at most ``most`` rows and columns, some shorter than a CPU's vector,
    each for many rows.

    Args:
      batch, steps: environments, and timesteps of what is evaluated at once.
    """
    program = schedule.graph.program
    products = [(e, isinstance(s, Loop)) for s in schedule.stages for e in s.equations if e.op in PRODUCTS]
    sizes = {e: _weight(e, program) for e, _ in products}
    return (
        bool(most and products)
        and all(
            0 < (widest := max(sizes[e], default=0)) <= most
            and (batch if in_loop else batch * steps) >= max(LEAST_ROWS, ROWS_A_COLUMN * widest)
            for e, in_loop in products
        )
        and min(map(min, sizes.values())) < VECTOR
    )


def _weight(e: Equation, program: Program) -> tuple[int, ...]:
    """Rows and columns of the weight that a vector is multiplied with; nothing of other products."""
    weights = [x for x in e.inputs if not isinstance(x, Var) or program.dims_of(x) == NO_DIMS]
    vectors = [x for x in e.inputs if x not in weights]
    plain = len(weights) == len(vectors) == 1 and not e.is_ragged
    return weights[0].shape if plain and len(vectors[0].shape) == 1 and len(weights[0].shape) == 2 else ()
