"""A memory budget: the fastest plan whose temporary bytes fit.

Plans are listed from fast to slow; for each form, tiles shrink until the static bound fits. The plan that is found is
compiled: XLA's own number decides. If that is over, it corrects the bounds of its form, and the next plan is looked for, in
the same form or a slower one; three plans are compiled at most, the last one that which needs least. TimeRL section 5.4
decides tensor by tensor when to swap; here whole plans are compared, and simulating again is one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlfx._checks import expect, number
from rlfx.errors import MemoryBudgetError, located
from rlfx.recurrence.analysis.cost import bytes_of, points, show_bytes
from rlfx.recurrence.analysis.divisors import divisor_near, divisors
from rlfx.recurrence.execute.host import JAXLIB, Hosting, hosted, is_right
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.memory.estimate import largest_values
from rlfx.recurrence.plan.choose import why_not, why_not_environments
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.schedule.learner import Learner, activation_bytes
from rlfx.recurrence.schedule.plan import WHOLE, Plan

#: What part of the budget the bound may fill.
MARGIN = 0.85

#: How many plans are compiled at most.
COMPILATIONS = 3

#: The planner offloads values of at least so many bytes: smaller ones cost more in transfers than they free.
OFFLOADED = 1 << 20

_BYTES = replace(number(1), words="a number of bytes", example="2 * 2**30")


def validate_budget(budget: Any) -> int:
    """A budget in bytes.

    Raises:
      DomainError: if it is no positive number.
    """
    return int(expect("memory_budget", budget, _BYTES, fix="Give bytes per device: 2 * 2**30."))


def expected(evaluator: PlanEvaluator, plan: Plan) -> float:
    """Temporary bytes: XLA's number, or at most the bound; of a form that was compiled, as far off as it was there."""
    alike = [(p, exact) for p, exact in evaluator.compiled.items() if (p.form, p.cached) == (plan.form, plan.cached)]
    errors = [exact / max(1, evaluator.estimated(p)) for p, exact in alike]
    return evaluator.compiled.get(plan, evaluator.estimated(plan) * max(errors, default=1.0) / MARGIN)


def nearest(evaluator: PlanEvaluator, learner: Learner, fastest: Plan, budget: int) -> Plan:
    """The fastest plan that fits by XLA's number; if none does, the one that is expected to need least, compiled.

    Args:
      evaluator: the program, for one device.
      fastest: the plan without a budget.
      budget: temporary bytes of one device.
    """
    for _ in range(COMPILATIONS - 1):
        found = search(evaluator, learner, fastest, budget)
        if found is None:
            break
        if evaluator.measured(found) <= budget:
            return found
    smallest = least(evaluator, fastest)
    evaluator.measured(smallest)
    return smallest


def least(evaluator: PlanEvaluator, fastest: Plan) -> Plan:
    """The plan that is expected to need least, of those that were looked at."""
    return min(evaluator.looked_at, key=lambda plan: expected(evaluator, plan), default=fastest)


def fit(evaluator: PlanEvaluator, learner: Learner, fastest: Plan, budget: int) -> Plan:
    """The fastest plan that fits: ``nearest``.

    Raises:
      MemoryBudgetError: if none does. It names the smallest budget that would do, and what does not shrink.
    """
    program, smallest = evaluator.program, nearest(evaluator, learner, fastest, budget)
    needed = evaluator.measured(smallest)
    if needed <= budget:
        return smallest
    kept = [str(v) for v in largest_values(evaluator.jaxpr(smallest), 3)]
    mapped = (
        f", mapped {' x '.join(str(axis.size) for axis in evaluator.axes)} times by jax.vmap," if evaluator.axes else ""
    )
    raise MemoryBudgetError(
        located(
            f"{program.name}{mapped} does not fit into memory_budget={budget} ({show_bytes(budget)}). The smallest plan needs "
            f"{needed} bytes ({show_bytes(needed)}): {smallest}. What does not shrink: {'; '.join(kept)}."
            + _if_offloaded(evaluator, learner, smallest, budget),
            where=program.where,
            fix=f"Give memory_budget={math.ceil(needed)}, fewer environments, or more devices (mesh=).",
        )
    )


def within(evaluator: PlanEvaluator, plan: Plan, budget: int) -> bool:
    """Whether a plan fits, by the estimate and then by XLA's number."""
    return evaluator.estimated(plan) <= budget and evaluator.measured(plan) <= budget


def _if_offloaded(evaluator: PlanEvaluator, learner: Learner, smallest: Plan, budget: int) -> str:
    """What a device with host memory of its own could do."""
    if evaluator.target.room.host or not offloads(evaluator, learner):
        return ""
    plan = Plan("blocks", 1, smallest.environments, OFFLOADED)
    device = evaluator.timeline(plan).peak_device
    if device > budget:
        return ""
    return (
        f" With the stored values in host memory {show_bytes(device)} would do, but on {evaluator.target.name} that is the same "
        "memory."
    )


def search(evaluator: PlanEvaluator, learner: Learner, fastest: Plan, budget: int) -> Plan | None:
    """The first plan, from fast to slow, that is expected to fit; None if there is none."""
    less = [replace(fastest, cached=False)] if fastest.cached else []
    families = ([fastest], less, *_families(evaluator, learner, fastest))
    found = (_largest_that_fits(functools.partial(expected, evaluator), list(plans), budget) for plans in families)
    return next((plan for plan in found if plan is not None), None)


def _largest_that_fits(needed: Callable[[Plan], float], plans: list[Plan], budget: int) -> Plan | None:
    """Of plans whose memory falls, the first that is expected to fit."""
    if not plans or needed(plans[-1]) > budget:
        return None
    low, high = 0, len(plans) - 1  # plans[high] fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needed(plans[middle]) <= budget else (middle + 1, high)
    return plans[high]


def _families(evaluator: PlanEvaluator, learner: Learner, fastest: Plan) -> Iterator[Iterable[Plan]]:
    """Lists of plans, each from large to small tiles; faster lists first."""
    program, batch = evaluator.program, evaluator.batch
    length = program.domain.length
    split = why_not_environments(learner, evaluator.order) is None
    start = fastest.block or length
    blocks = why_not("blocks", learner) is None
    if split and fastest.form in WHOLE and (fastest.environments is not None or not blocks):
        yield [Plan(environments=n) for n in divisors(batch)[::-1] if n < (fastest.environments or batch)]
    for form in ("stream", "blocks"):
        if why_not(form, learner) is None:
            yield list(_tiles(form, start, length, batch if split else 1, _least(learner)))
    if offloads(evaluator, learner) and evaluator.target.room.host and is_right(evaluator.target.platform, JAXLIB):
        yield [
            replace(plan, offload=OFFLOADED)
            for plan in _tiles("blocks", start, length, batch if split else 1, _least(learner))
        ]
    if why_not("replay", learner) is None:
        # A tile larger than that of the fastest plan, which fits the caches, only costs memory.
        in_tile = length * batch if fastest.block is None else fastest.block * (fastest.environments or batch)
        for block in _replay_blocks(program, learner):
            smaller = [m for m in divisors(batch)[::-1] if m <= max(1, in_tile // block)] if split else [batch]
            yield [Plan("replay", block, None if m == batch else m) for m in smaller]


def offloads(evaluator: PlanEvaluator, learner: Learner) -> bool:
    """Whether there is something to keep in host memory."""
    return why_not("blocks", learner) is None and bool(hosted(learner, Hosting(min_bytes=OFFLOADED)))


def _tiles(form: str, start: int, length: int, batch: int, least: Callable[[int], int]) -> Iterator[Plan]:
    """Tiles of falling memory: from blocks of ``start`` timesteps to those that need least, then fewer environments.

    Blocks that fit the cache may be shorter than those that need least: then longer ones, between which fewer states are kept,
    need less.

    Args:
      least: of how many tiles environments take turns, the block that needs least.
    """
    low, high = sorted((start, least(1)))
    halved = {divisor_near(length, max(1, high >> i)) for i in range(high.bit_length())}  # of a prime T, too
    sizes = sorted(d for d in {start, *divisors(length), *halved} if low <= d <= high)
    for block in reversed(sizes) if least(1) < start else sizes:
        yield Plan(form, block)
    for environments in reversed(divisors(batch)[:-1]):
        yield Plan(form, divisor_near(length, least(batch // environments)), environments)


def _least(learner: Learner) -> Callable[[int], int]:
    """The block that needs least: between shorter ones, the states of a recurrence grow faster than activations fall.

    States are kept of all environments, activations of one tile of them.
    """
    domain = learner.program.domain
    states = sum(bytes_of(v, domain) for loop in learner.region.loops for v in loop.depth)
    activations = max(1, activation_bytes(learner, 1))

    def least(tiles: int) -> int:
        return min(domain.length, max(1, math.floor(math.sqrt(domain.length * states * tiles / activations))))

    return least


def _replay_blocks(program: Program, learner: Learner) -> list[int]:
    """Block lengths to try: where what is kept between blocks and what is acted again within one are in balance.

    The nearest first: it needs least, and longer blocks were not faster (benchmarks/results/memory_images.json).
    """
    domain, length = program.domain, program.domain.length
    state = sum(bytes_of(v, domain) for v in program.carry)
    per_step = max(bytes_of(v, domain) for v in learner.stored if points(program.dims_of(v), domain) >= length)
    balance = math.sqrt(length * max(state, 1) / max(per_step, 1))
    near = sorted(divisors(length), key=lambda d: abs(math.log(d / max(balance, 1.0))))
    return near[:3]
