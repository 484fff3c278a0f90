"""The plan of a gradient: the one that was given, one that fits a budget, the fastest that was timed, or what costs least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlfx.recurrence.gradient.replanned import Added
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.plan.budget import fit, within
from rlfx.recurrence.plan.choose import checked, choose, why_not
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.plan.keep import keeping
from rlfx.recurrence.plan.once import evaluated_once
from rlfx.recurrence.plan.room import free_on, with_room
from rlfx.recurrence.plan.tune import tune
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan


@dataclass(frozen=True)
class Options:
    """What the user asked of the plan, and so a planner.

    Attributes:
      plan: this one.
      memory_budget: one that takes so many temporary bytes of a device.
      autotune: the fastest of the best few, which are timed.
    """

    plan: Plan | None = None
    memory_budget: int | None = None
    autotune: bool = False

    def replans(self, rule: GradientRule, learner: Learner) -> bool:
        """Whether another plan may be needed under ``jax.vmap``: one that fits, or whose tiles fit the cache."""
        if self.plan is not None:
            return False
        limited = self.memory_budget is not None or free_on(rule) is not None
        return limited or (rule.target.room.tile is not None and _in_blocks(rule, learner))

    def is_free(self, learner: Learner) -> bool:
        """Whether nobody asks for a plan, or for less memory."""
        return self.plan is None and self.memory_budget is None and not learner.program.directives.less_memory

    def __call__(
        self, rule: GradientRule, learner: Learner, order: Sequence[Var], batch: int, axes: tuple[Added, ...] = ()
    ) -> Plan:
        """The plan of a learner.

        Raises:
          ScheduleError: if the one that was given is not legal for it.
          MemoryBudgetError: if none fits.
        """
        if self.plan is not None:
            return checked(self.plan, learner, order, batch, rule.target)
        copies = math.prod(axis.size for axis in axes)
        best = choose(learner, order, batch, rule.target, _in_blocks(rule, learner), copies)
        if learner.program.loss is not None and not learner.program.directives.less_memory:
            estimated = lambda plan: evaluator_of(rule, order, axes, learner).estimated(plan)  # noqa: E731
            best = evaluated_once(best, learner, order, batch, rule.target, estimated, copies)
            best = keeping(best, learner.under(best), batch * copies, rule.target)
        free = free_on(rule)
        if self.memory_budget is None and free is None and not self.autotune:
            return best
        evaluator = evaluator_of(rule, order, axes, learner)
        return rule.once(("planned", learner.targets, evaluator), lambda: self._found(evaluator, learner, best, free))

    def _found(self, evaluator: PlanEvaluator, learner: Learner, best: Plan, free: int | None) -> Plan:
        budget = self.memory_budget
        if budget is not None:
            fitting = fit(evaluator, learner, best, budget)
        else:
            fitting = best if free is None else with_room(evaluator, learner, best, free)
        if not self.autotune:
            return fitting
        return tune(evaluator, learner, fitting, lambda plan: budget is None or within(evaluator, plan, budget))


def _in_blocks(rule: GradientRule, learner: Learner) -> bool:
    """Whether the learner of a loss may take a block of timesteps at a time."""
    if learner.program.loss is None:
        return False
    return rule.once(("in blocks", learner), lambda: why_not("blocks", learner) is None)


def evaluator_of(
    rule: GradientRule, order: Sequence[Var], axes: tuple[Added, ...] = (), learner: Learner | None = None
) -> PlanEvaluator:
    """The loss of a rule's program and its gradient with respect to ``order``, for one device, under any plan.

    Of a ``learner`` with other targets than the loss: the program, and the pullback of these.
    """
    targets = None if learner is None or learner.targets == (rule.program.loss,) else learner.targets
    mine = rule if rule.sharding is None else None
    make = lambda: PlanEvaluator(rule.program, tuple(order), rule.split.batch, rule.target, axes, targets, mine)  # noqa: E731
    return rule.once(("evaluator", tuple(order), axes, targets), make)
