"""How a learner runs under a plan: the executable plans of its acting pass and of its differentiated region."""

from __future__ import annotations

from dataclasses import dataclass

from rlfx._target import Target
from rlfx.recurrence.gradient.forms import acting_plan, learning_plan
from rlfx.recurrence.gradient.replay import Replay, acting_kept, find_replay
from rlfx.recurrence.gradient.through_time import acting_in_blocks
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan
from rlfx.recurrence.schedule.plan import Plan


@dataclass(frozen=True, eq=False)
class Passes:
    """What runs. Prints as text.

    Attributes:
      acting: without derivatives.
      learning: of each block, with them; None if there is nothing to differentiate.
    """

    acting: ExecutablePlan
    learning: ExecutablePlan | None

    def __str__(self) -> str:
        lines = [f"acting on {self.acting.target}", str(self.acting)]
        return "\n".join(lines if self.learning is None else [*lines, "learning", str(self.learning)])


def passes(learner: Learner, plan: Plan, target: Target, batch: int) -> Passes:
    """The passes of a learner under a plan, on a device that has ``batch`` environments."""
    learning = learning_plan(learner.region, target, None, plan.environments or batch, plan.block)
    return Passes(_acting(learner, plan, target, batch), learning if learning.nodes else None)


def _acting(learner: Learner, plan: Plan, target: Target, batch: int) -> ExecutablePlan:
    if plan.form == "blocks" and learner.region.loops:
        return acting_in_blocks(learner, plan, target, batch)[0]
    replay = find_replay(learner) if plan.form == "replay" else None
    if isinstance(replay, Replay):
        return acting_kept(replay, plan, target, batch)[0]
    return acting_plan(learner.acting, target, batch)
