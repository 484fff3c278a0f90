"""What acting keeps so that the learner computes less: the values of wide products, where the memory for it costs less.

Memory above what an allocator keeps is mapped anew in each call, page by page, which takes about as long as wide products do.
So products are kept as long as all temporaries stay below that, or if these were above it anyway and do not grow much (images).
Those of a recurrence that the learner runs again are no reason to keep any: of a step from one timestep to the next they are the
smaller part (GRU of 128 units: 0.97x the time, 2 to 5 times the memory). A plan that keeps others keeps them, too: they count.
Of plans for all timesteps at once three quarters of what is counted exist at a time. Where a few environments would be taken, for
a recurrence that multiplies nothing, all of them are, with what acting gave, if that has room: their layers have rows enough.
"""

from __future__ import annotations

from dataclasses import replace

from rlfx._target import Target
from rlfx.recurrence.plan.choose import AT_A_TIME
from rlfx.recurrence.rewrite.caching import sums_that_know
from rlfx.recurrence.schedule.learner import Learner, temporaries
from rlfx.recurrence.schedule.plan import Plan

#: What is mapped anew in each call may grow so much.
MORE = 1.5


def keeping(plan: Plan, learner: Learner, batch: int, target: Target) -> Plan:
    """A plan that keeps wide products if that pays; ``batch``: environments on a device, in all copies of the program."""
    room, program = target.room.unmapped, learner.program
    if room is None or plan.form == "one pass":  # which evaluates nothing twice
        return plan
    wide = learner.twice
    if wide <= frozenset(learner.region.in_loops):
        return plan
    found = plan
    if plan.environments is not None and learner.region.loops:
        plan, learner = Plan(), learner.under(Plan())
    kept = [v for one in sums_that_know(program, wide).values() for v in one.outputs]
    before, after = (temporaries(plan, learner, batch, values) for values in ([], kept))
    if plan.form == "at once":
        before, after = AT_A_TIME * before, AT_A_TIME * after
    fits = after <= room or (plan is found and room < before and after <= MORE * before)
    return replace(plan, cached=True) if fits else found
