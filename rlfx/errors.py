"""The errors that rlfx raises. A message states the fact in the user's notation, the user's source line, and the fix."""

from __future__ import annotations

from typing import Any


class RlfxError(Exception):
    """Base of every error that rlfx raises on purpose."""


class ProgramError(RlfxError, ValueError):
    """A per-timestep program, or an argument of a compiled one, is not well formed."""


class ProgramTypeError(ProgramError, TypeError):
    """A value is used as what it is not: a series as an array, a compiled program in forward mode."""


class CausalityError(ProgramError):
    """Values depend on each other through both the past and the future: no order of timesteps exists."""


class DomainError(ProgramError):
    """An index, length or axis does not describe a set of timesteps."""


class BoundaryError(ProgramError):
    """A read leaves ``[0, T)`` and its value there is not defined."""


class UnsupportedSliceOp(RlfxError, NotImplementedError):
    """An operation has no meaning, or no rule, on an axis whose length depends on the timestep."""


class ScheduleError(RlfxError):
    """A requested schedule or plan is not legal for the program."""


class MemoryBudgetError(RlfxError):
    """No plan fits the memory budget."""


class TargetError(RlfxError):
    """A program can't be compiled for a machine that is not here. ``needed``: its bytes, if they are more than that has."""

    def __init__(self, message: str, needed: int | None = None):
        super().__init__(message)
        self.needed = needed


class PlacementError(RlfxError):
    """A function cannot be placed on the devices given."""


class PartError(PlacementError):
    """A part of a running composition raised, hung or was killed. ``part``: its name."""

    def __init__(self, message: str, part: str = ""):
        super().__init__(message)
        self.part = part


class ProfileError(RlfxError):
    """A trace cannot be captured, read or attributed."""


class TrainingError(RlfxError):
    """A training loop cannot begin, go on, or resume."""


class NotFiniteError(TrainingError):
    """An update gave NaN. ``agent`` is the state before it, ``done`` the number of updates that led there."""

    def __init__(self, message: str, agent: object = None, done: int = 0):
        super().__init__(message)
        self.agent: Any = agent
        self.done: int = done


class EnvError(RlfxError):
    """An environment, its name or its arguments are not usable."""


def located(fact: str, *, where: str | None = None, fix: str | None = None) -> str:
    """Compose an error message: the fact, the user's source line, the fix.

    Example:
      >>> print(located("x[t + 1] has no value at t = 9.", where="agent.py:3 (loss)", fix="Give series(x, end=...)."))
      x[t + 1] has no value at t = 9.
        at agent.py:3 (loss)
        Fix: Give series(x, end=...).
    """
    lines = [fact]
    if where:
        lines.append(f"  at {where}")
    if fix:
        lines.append(f"  Fix: {fix}")
    return "\n".join(lines)
