"""The forms of gradient, a row each: how it is evaluated, which learners have it, and how they act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlfx._target import Target
from rlfx.recurrence.gradient.counted import counted
from rlfx.recurrence.gradient.following import find_following, timesteps_together
from rlfx.recurrence.gradient.forms import Pass, acting_plan, at_once, in_blocks, learning_plan
from rlfx.recurrence.gradient.one_pass import find_one_pass, one_pass, one_pass_of
from rlfx.recurrence.gradient.replay import Replay, acting_kept, find_replay, replayed
from rlfx.recurrence.gradient.stream import find_stream
from rlfx.recurrence.gradient.through_time import acting_in_blocks, find_acting, through_time
from rlfx.recurrence.gradient.turns import streamed
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan
from rlfx.recurrence.schedule.plan import Plan


@dataclass(frozen=True)
class Form:
    """A form of gradient. (Its name and words are in ``schedule/plan.py``.)

    Attributes:
      evaluate: ``(pass, plan) -> (what a call returns, loss on this device, gradient)``.
      why_not: why a learner has no such gradient; None if it has.
      acting: ``(learner, plan, target, batch)``: how its acting pass runs.
    """

    evaluate: Callable[[Pass, Plan], tuple]
    why_not: Callable[[Learner], str | None]
    acting: Callable[[Learner, Plan, Target, int], ExecutablePlan]


def _found(find: Callable[[Learner], object]) -> Callable[[Learner], str | None]:
    """What a form needs is looked for; why there is none, as text, is why a learner has no such form."""

    def why_not(learner: Learner) -> str | None:
        found = find(learner)
        return found if isinstance(found, str) else None

    return why_not


def _all(*reasons: Callable[[Learner], str | None]) -> Callable[[Learner], str | None]:
    """The first reason that there is."""
    return lambda learner: next((why for reason in reasons if (why := reason(learner)) is not None), None)


def _is_recurrent(learner: Learner) -> bool:
    return bool(learner.region.loops)


def _blocks(p: Pass, plan: Plan) -> tuple:
    """Block by block: in any order, or against time where the gradient flows through it."""
    return (through_time if _is_recurrent(p.learner) else in_blocks)(p, plan)


def _why_no_blocks(learner: Learner) -> str | None:
    return _found(find_acting if _is_recurrent(learner) else find_following)(learner)


def _acting(learner: Learner, plan: Plan, target: Target, batch: int) -> ExecutablePlan:
    return acting_plan(learner.acting, target, batch)


def _acting_for_blocks(learner: Learner, plan: Plan, target: Target, batch: int) -> ExecutablePlan:
    if _is_recurrent(learner):
        return acting_in_blocks(learner, plan, target, batch)[0]
    return _acting(learner, plan, target, batch)


def _acting_for_replay(learner: Learner, plan: Plan, target: Target, batch: int) -> ExecutablePlan:
    if isinstance(replay := find_replay(learner), Replay):
        return acting_kept(replay, plan, target, batch)[0]
    return _acting(learner, plan, target, batch)


def _acting_in_one_pass(learner: Learner, plan: Plan, target: Target, batch: int) -> ExecutablePlan:
    return learning_plan(one_pass_of(learner), target, batch=batch, counted=counted(learner, True))


FORMS: dict[str, Form] = {
    "at once": Form(at_once, lambda learner: None, _acting),
    "blocks": Form(_blocks, _why_no_blocks, _acting_for_blocks),
    "stream": Form(streamed, _all(timesteps_together, _found(find_stream)), _acting),
    "replay": Form(replayed, _all(timesteps_together, _found(find_replay)), _acting_for_replay),
    "one pass": Form(one_pass, _found(find_one_pass), _acting_in_one_pass),
}
