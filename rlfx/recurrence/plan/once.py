"""What the loss evaluates, and a stopped value reads, is evaluated once: at once, where that takes little memory.

A critic's values are learned from, and make advantages. Blocks of timesteps need advantages before they begin, so that acting
evaluates the critic, and the learner again. All at once, one evaluation serves both (``Learner.whole``).
"""

from __future__ import annotations

from rlfx._target import Target
from rlfx.recurrence.analysis.storage import work_of
from rlfx.recurrence.schedule.learner import Learner, temporaries
from rlfx.recurrence.schedule.plan import Plan

#: The least part of all products that pays.
LEAST = 0.05

#: How many times a core's own cache all activations may take. Beyond that blocks, which stay in it, are as fast.
CACHES = 8


def evaluated_once(plan: Plan, learner: Learner, batch: int, target: Target) -> Plan:
    """A plan in blocks, or all at once if that pays; ``batch``: environments on a device, in all copies of the program."""
    tile = target.room.tile
    if tile is None or plan.form != "blocks" or plan.cached or plan.environments is not None or learner.region.loops:
        return plan
    if temporaries(Plan(), learner, batch) > CACHES * tile:
        return plan
    program = learner.program
    spared = sum(work_of(e, program) for e in learner.products - learner.whole.products)
    learned = sum(work_of(e, program) for e in learner.region.equations)
    return Plan() if spared > LEAST * (3 * learned + sum(work_of(e, program) for e in learner.products)) else plan
