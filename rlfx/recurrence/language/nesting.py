"""A program that is called in another: whose series, whose time and whose axes stand together."""

from __future__ import annotations

from typing import Any

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.domain import Level, depth, levels
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.time import Time


def this_level() -> Level | None:
    """The program that is being traced here; None outside of all."""
    around = levels()
    return around[-1] if around else None


def check_program(level: Level | None, index: Any = None) -> None:
    """A series is read in the program that it is a series of, at times of that program.

    Args:
      level: the program of the series.
      index: what stands in ``x[...]``.

    Raises:
      DomainError: otherwise.
    """
    here = this_level()
    own = 0 if level is None else level.depth
    if own < depth():
        raise _foreign(
            f"A series of {level} is read in {here}, which is called inside of it.",
            f"Read it before the inner program is called, p = x[{_past(level)}], and use p there.",
        )
    if own > depth():
        raise _foreign(
            f"A series of {level} is read in {here or 'what called it'}, where it has no value.",
            "Return its values from the inner program, and name what comes back with rlfx.series.",
        )
    parts = (index.start, index.stop) if isinstance(index, slice) else index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, Time) and part.depth != own:
            other = part.level
            raise _foreign(
                f"A series of {here} is read at the time of another program, {other}.",
                f"Index it with the {level.names.dim if level else 't'} that the function around it receives; "
                f"of the other program use the number, {other.names.dim}.now.",
            )


def check_axis(over: Any) -> None:
    """What is no axis of this program may be one of a program around it.

    Raises:
      DomainError: then.
    """
    *around, here = levels()
    for level in around:
        if over in (level.names.dim, level.names.axis):
            what = "the dimension" if over == level.names.dim else "an axis"
            raise _foreign(
                f"over={over!r} in {here}: {over} is {what} of {level}, which calls it.",
                f"Reduce there: return the values from {here.program}, and reduce what came back.",
            )


def _past(level: Level | None) -> str:
    return f"{level.names.dim if level else 't'} - 1"


def _foreign(fact: str, fix: str) -> Exception:
    return told(DomainError(located(fact, where=J.here(), fix=fix)))
