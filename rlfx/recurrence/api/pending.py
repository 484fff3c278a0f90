"""Per-timestep functions with transforms: what is asked of the program while there is only its function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.verify import rewritten


@dataclasses.dataclass(frozen=True)
class Directed:
    """A per-timestep function whose program is transformed once it has been traced.

    Called, it is the function: transforms preserve the meaning.

    Attributes:
      f: the per-timestep function.
      transforms: program to program, in the order in which they are applied.
    """

    f: Callable
    transforms: tuple[Callable[[Program], Program], ...]

    def __call__(self, *args: Any) -> Any:
        return self.f(*args)

    @property
    def __wrapped__(self) -> Callable:
        return self.f

    @property
    def __name__(self) -> str:
        return getattr(self.f, "__name__", "program")


def directed(f: Callable, transform: Callable[[Program], Program]) -> Directed:
    """``f`` with one more transform."""
    known = f if isinstance(f, Directed) else Directed(f, ())
    return Directed(known.f, (*known.transforms, transform))


def transformed(f: Callable, program: Program) -> Program:
    """The program of ``f``, after the transforms that were asked of it."""
    for transform in f.transforms if isinstance(f, Directed) else ():
        program = rewritten(transform, program)
    return program
