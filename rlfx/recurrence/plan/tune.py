"""Autotuning: the best few plans by the cost model are compiled and timed, and the fastest is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.plan.choose import why_not, why_not_environments
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.plan.predict import predict
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan

#: How many plans are timed.
FINALISTS = 5

#: A plan that takes this much of the time of the one that needs no measurement is not worth the change.
WORTH = 0.97


def tune(
    evaluator: PlanEvaluator, learner: Learner, best: Plan, fits: Callable[[Plan], bool] = lambda plan: True
) -> Plan:
    """The fastest of the best few plans, which ``evaluator`` times.

    Args:
      best: the plan that is taken without measurement; it stays unless another is clearly faster.
      fits: whether a plan is within the memory budget.

    Callbacks would see made-up numbers: a program that has any, or another effect, keeps its ``best`` plan, and nothing is run.
    """
    if any(e.has_effects or J.contains(e.op, dict(e.params), J.CALLBACKS) for e in learner.program.equations):
        return best
    target = evaluator.target
    others = sorted(
        set(neighbours(learner, evaluator.order, best, evaluator.batch)) - {best},
        key=lambda p: predict(learner, p, evaluator.batch, target).seconds(target),
    )
    finalists = [best, *itertools.islice((p for p in others if fits(p)), FINALISTS - 1)]
    seconds = evaluator.time(finalists)
    fastest = min(finalists, key=seconds.__getitem__)
    return fastest if seconds[fastest] < WORTH * seconds[best] else best


def neighbours(learner: Learner, order: Sequence[Var], best: Plan, batch: int) -> Iterator[Plan]:
    """Plans like ``best``: larger and smaller tiles, other forms, wide products kept."""
    length = learner.program.domain.length
    found = [best]
    if why_not("blocks", learner) is None:
        sizes = {best.block or length} | {
            min(length, max(1, int((best.block or length) * f))) for f in (0.25, 0.5, 2, 4)
        }
        several = best.environments if best.block else None
        found += [Plan("blocks", divisor_near(length, n), several) for n in sizes if n < length]
        found.append(Plan())
        if best.form == "stream":
            found += [replace(best, block=divisor_near(length, n)) for n in sizes if n < length]
        if best.environments is None and batch % 2 == 0 and why_not_environments(learner, order) is None:
            found.append(Plan("blocks", best.block or length, batch // 2))
    if best.form == "at once" and why_not_environments(learner, order) is None:
        several = {divisor_near(batch, max(1, int((best.environments or batch) * f))) for f in (0.25, 0.5, 2)}
        found += [Plan(environments=n) for n in several if n < batch]
    if why_not("one pass", learner) is None:
        yield Plan("one pass")
    yield from found
    if learner.twice:
        yield from (replace(plan, cached=True) for plan in found)
