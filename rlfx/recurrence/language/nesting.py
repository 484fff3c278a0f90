"""A program that is called in another: whose series and whose time stand together."""

from __future__ import annotations

from typing import Any

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.domain import depth
from rlfx.recurrence.language.time import Time


def check_program(series_depth: int, index: Any = None) -> None:
    """A series is read in the program that it is a series of, at times of that program.

    Args:
      series_depth: how many programs are around the series, its own included.
      index: what stands in ``x[...]``.

    Raises:
      DomainError: otherwise.
    """
    here = depth()
    if series_depth < here:
        raise DomainError(
            located(
                "A series of an enclosing program is read in a program that is called inside of it.",
                where=J.here(),
                fix="Read it before the inner program is called, p = x[t - 1], and use p there.",
            )
        )
    if series_depth > here:
        raise DomainError(
            located(
                "A series of an inner program is read in the program that called it, where it has no value.",
                where=J.here(),
                fix="Return its values from the inner program, and name what comes back with rlfx.series.",
            )
        )
    parts = (index.start, index.stop) if isinstance(index, slice) else index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Time) and part.depth != here for part in parts):
        raise DomainError(
            located(
                "A series is read at the time of another program than its own.",
                where=J.here(),
                fix="Index it with the t that the function around it receives; of the other program use the number, i.now.",
            )
        )
