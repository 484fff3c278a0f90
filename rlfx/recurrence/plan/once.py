"""What the loss evaluates, and a stopped value reads, is evaluated once: all timesteps, of as many environments as fit a cache.

A critic's values are learned from, and make advantages. Blocks of timesteps need advantages before they begin, so that acting
evaluates the critic, and the learner again. All timesteps at once, one evaluation serves both (``Learner.whole``). Environments
can be taken a few at a time then: each tile has all timesteps of them, so that nothing has to be known before.

So can those of a recurrence that multiplies nothing (traces, gates that depend on inputs alone): a few environments go through
all of its timesteps, in a core's cache, in a fraction of the time, where blocks would run it twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlfx._target import Target
from rlfx.recurrence.analysis.cost import multiplies, multiplies_weights
from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.analysis.storage import work_of
from rlfx.recurrence.gradient.counted import conditions
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.plan.choose import (
    ROWS_OF_BLOCK,
    ROWS_OF_LOOP,
    seconds_of_loops,
    why_not_environments,
)
from rlfx.recurrence.plan.rows import mean_rows
from rlfx.recurrence.schedule.learner import Learner, activation_bytes, temporaries
from rlfx.recurrence.schedule.plan import Plan

#: The least part of all products that pays: products are about half of the time.
LEAST = 1 / 16

#: How many times a core's own cache activations may take, of all environments or of one, and nobody looks closer. (About half of
#: the values that are counted exist at a time.)
CACHES = 8

#: How many times the machine's cache those of a few environments of a recurrence may take: most are fused with what uses them.
MOST = 2

#: Environments at a time, at least, of a recurrence with products of each one's own values.
ROWS_OF_PRODUCTS = 8

#: How many times that of a tile of environments: each tile runs the loops over time again, and adds to the gradients of weights.
TILE = 4

#: The same of a recurrence: what its loops write they read again, and back once more.
TILE_OF_LOOPS = 2


def evaluated_once(
    plan: Plan,
    learner: Learner,
    order: Sequence[Var],
    batch: int,
    target: Target,
    estimated: Callable[[Plan], int],
    copies: int = 1,
) -> Plan:
    """The plan, or one for all timesteps that evaluates once if that pays.

    Environments at a time where none needs others (advantages that are normalised over them do); all of them where what exists
    at a time stays in the machine's cache.

    Args:
      estimated: temporary bytes under a plan, by an estimate that takes a trace.
      copies: how many of the program ``jax.vmap`` makes.
    """
    tile = target.room.tile
    if tile is None or plan.environments is not None:
        return plan
    if learner.region.loops:
        count = _tile_of_recurrence(plan, learner, order, batch, target, copies)
        return plan if count is None else Plan(environments=count)
    if plan.form != "blocks":
        return plan
    program = learner.program
    learned = sum(work_of(e, program) for e in learner.region.equations)
    least = LEAST * (3 * learned + sum(work_of(e, program) for e in learner.products))
    both = learner.products & frozenset(learner.region.equations)
    if sum(work_of(e, program) for e in both) <= least:  # whatever the whole cut would spare
        return plan
    spared = sum(work_of(e, program) for e in both - learner.whole.products)
    if spared <= least:
        return plan
    needed = temporaries(Plan(), learner, batch * copies)
    if needed <= CACHES * tile:
        return Plan()
    if target.rewrites.branches and conditions(learner):  # blocks that the loss does not count are skipped
        return plan
    count = _tile_of_environments(learner, order, batch, target, copies, spared)
    if count is not None:
        return Plan(environments=count)
    cache = target.room.cache
    return Plan() if needed <= 2 * cache and estimated(Plan()) <= cache else plan


def _tile_of_environments(
    learner: Learner, order: Sequence[Var], batch: int, target: Target, copies: int, spared: float
) -> int | None:
    """How many environments are taken at a time; None: all timesteps of one are too many, or it costs more than is spared.

    Loops over time run once for each tile, so that they must not multiply weights, with fewer rows, nor take long to start.
    """
    program, whole = learner.program, learner.whole
    tile, cache = target.room.tile or math.inf, target.room.cache
    each = activation_bytes(whole, 1) * program.domain.length * copies
    rows = math.ceil(ROWS_OF_BLOCK / (mean_rows(learner, 1) * program.domain.length))
    count = divisor_near(batch, max(1, int(TILE * tile // each), min(int(cache // each), rows)))
    if each > CACHES * tile or count == batch or why_not_environments(whole, order) is not None:
        return None
    if _multiplies(whole):
        return None
    again = seconds_of_loops(whole, target) * (batch / count - 1)
    part = copies * batch / (program.domain.batch or 1)
    return count if again <= spared * part / target.rates.flops else None


def _tile_of_recurrence(
    plan: Plan, learner: Learner, order: Sequence[Var], batch: int, target: Target, copies: int
) -> int | None:
    """How many environments of a recurrence are taken at a time; None: it multiplies weights, or all of them fit a cache."""
    if plan.form not in ("blocks", "one pass", "at once") or _multiplies(learner) or _multiplies(learner.whole):
        return None
    products = any(multiplies(loop.body) for loop in learner.region.loops)  # of each environment's own
    if products and plan.form == "blocks":
        return None
    each = max(1, activation_bytes(learner, 1)) * learner.program.domain.length * copies
    fewest = ROWS_OF_PRODUCTS if products else ROWS_OF_LOOP
    count = divisor_near(batch, max(fewest, int(TILE_OF_LOOPS * (target.room.tile or math.inf) // each)))
    if (
        not 1 < count < batch
        or count * each > MOST * target.room.cache
        or why_not_environments(learner, order) is not None
    ):
        return None
    return count


def _multiplies(learner: Learner) -> bool:
    return any(multiplies_weights(loop.body, learner.program) for loop in learner.region.loops)
