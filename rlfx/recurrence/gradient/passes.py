"""How a learner runs under a plan: the executable plans of its acting pass and of its differentiated region."""

from __future__ import annotations

from dataclasses import dataclass

from rlfx._target import Target
from rlfx.recurrence.gradient.counted import counted
from rlfx.recurrence.gradient.forms import learning_plan
from rlfx.recurrence.gradient.table import FORMS
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan
from rlfx.recurrence.schedule.plan import Plan


@dataclass(frozen=True, eq=False)
class Passes:
    """What runs. Prints as text.

    Attributes:
      acting: without derivatives; in one pass with them.
      learning: of each block, with them; None if there is nothing to differentiate, or nothing more.
    """

    acting: ExecutablePlan
    learning: ExecutablePlan | None

    def __str__(self) -> str:
        both = " and learning" if self.acting.differentiated else ""
        lines = [f"acting{both} on {self.acting.target}", *self._written(self.acting)]
        return "\n".join(lines if self.learning is None else [*lines, "learning", *self._written(self.learning)])

    @staticmethod
    def _written(plan: ExecutablePlan) -> list[str]:
        names = plan.graph.program.domain.names
        return [line if line.startswith(" ") else names.text(line) for line in str(plan).splitlines()]


def passes(learner: Learner, plan: Plan, target: Target, batch: int) -> Passes:
    """The passes of a learner under a plan, on a device that has ``batch`` environments; of a call with ``t0 = 0``."""
    learner = learner.under(plan)
    acting = FORMS[plan.form].acting(learner, plan, target, batch)
    count = plan.environments or batch
    region, domain = learner.region_of(plan.block, count), counted(learner, True)
    learning = learning_plan(region, target, None, count, plan.block, learner.acting, domain)
    return Passes(acting, learning if learning.nodes and not acting.differentiated else None)
