"""``explain``: what runs where and what is kept, as text and as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlfx.recurrence.learner import Learner
from rlfx.recurrence.program import Program


@dataclass(frozen=True, eq=False)
class Explanation:
    """The plan of a compiled program, for people."""

    program: Program
    learner: Learner

    def __str__(self) -> str:
        return str(self.program)

    def plot(self, axes: Any = None) -> Any:
        return axes
