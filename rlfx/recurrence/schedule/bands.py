"""Windows that move with t: a block of timesteps reads what all of its windows see as one array of consecutive rows.

``x[t - w + 1:t + 1]`` of all t is ``[T, w]`` rows, each of them w times. A block of S timesteps sees S + w - 1 consecutive
ones, of which each timestep masks all but its own (local attention as Beltagy et al. 2020 compute it, section 3.1): products
with them are products of matrices, ``[S, S + w]``, and rows are copied (S + w) / S times. ``execute/bands.py`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.domain import Domain, widest
from rlfx.recurrence.language.index import TIME, Index, Slice

#: Of a shorter window the rows of a block would be mostly those of others.
NARROWEST = 8
#: How often the rows of a series are copied at most, for the blocks that see them.
MOST_COPIES = 4

#: A block's rows are a multiple of so many: XLA:CPU takes as many numbers at once along them (of 63 rows, one by one).
AT_ONCE = 8


@dataclass(frozen=True)
class Band:
    """What a block of timesteps sees: rows ``first + i * block <= p < first + i * block + width`` of block i.

    Attributes:
      first: negative where windows reach back; rows outside of the domain stand for nothing.
      width: rows of a block.
      block: timesteps of a block.
    """

    first: int
    width: int
    block: int

    @property
    def base(self) -> Index:
        """The first row that the block of t sees."""
        return TIME // self.block * self.block + self.first


def in_vectors(rows: int) -> int:
    """So many rows, or as many more as fill the last vector."""
    return -(-rows // AT_ONCE) * AT_ONCE


def is_window(equation: Equation, domain: Domain) -> bool:
    """Whether an equation reads windows, short against T, of which all timesteps would read copies.

    After its end an environment sees what its last timestep saw, which may be of an earlier block.
    """
    access = equation.access
    if not (equation.is_read and isinstance(access, Slice) and J.is_symbolic(equation.params["size"])) or domain.until:
        return False
    width = widest(domain, equation.params["size"])
    return width >= NARROWEST and 2 * width < domain.length and band_of(equation, domain, width) is not None


def band_of(equation: Equation, domain: Domain, block: int) -> Band | None:
    """What blocks of this many timesteps see of what an equation reads; None if that is too much."""
    assert isinstance(equation.access, Slice)
    lo, stop = (np.clip(domain.evaluate(e), 0, domain.length) for e in (equation.access.first, equation.access.stop))
    begins = domain.times() // block * block
    first = int((lo - begins).min())
    width = in_vectors(max(1, int((np.maximum(stop, lo) - begins).max()) - first))
    return Band(first, width, block) if width <= MOST_COPIES * block else None
