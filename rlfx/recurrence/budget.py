"""A memory budget: the fastest plan whose temporary bytes fit.

Plans are listed from fast to slow; for each form, tiles shrink until the static estimate fits. The plan that is found is
compiled, compared with XLA's own number, and found again once if that is over. TimeRL section 5.4 decides tensor by tensor
when to swap; here whole plans are compared, and simulating again is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, MemoryBudgetError, located
from rlfx.recurrence.choose import why_not, why_not_environments
from rlfx.recurrence.cost import bytes_of, points, show_bytes
from rlfx.recurrence.estimate import estimate_temp_bytes, largest_values
from rlfx.recurrence.learner import Learner
from rlfx.recurrence.plan import Plan
from rlfx.recurrence.program import Program, Var

#: What part of the budget an estimate may fill: estimates are within a fifth of what XLA allocates.
MARGIN = 0.85


@dataclass(frozen=True)
class Fitted:
    """A plan within a budget.

    Attributes:
      plan: the plan.
      estimated, measured: temporary bytes, by the static estimate and by XLA.
    """

    plan: Plan
    estimated: int
    measured: int


def validate_budget(budget: Any) -> int:
    """A budget in bytes.

    Raises:
      DomainError: if it is no positive number.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 1:
        raise DomainError(
            located(f"memory_budget={budget!r} is not a number of bytes.", fix="Give bytes per device: 2 * 2**30.")
        )
    return int(budget)


def fit(program: Program, learner: Learner, order: Sequence[Var], fastest: Plan, batch: int, budget: int) -> Fitted:
    """The fastest plan that fits.

    Args:
      order: the inputs with respect to which the gradient is taken.
      fastest: the plan without a budget.
      batch: the environments of one device.
      budget: temporary bytes of one device.

    Raises:
      MemoryBudgetError: if none does. It names the smallest budget that would do, and what does not shrink.
    """
    trial = _Trial(program, tuple(order), batch)
    room = MARGIN * budget
    fallback = None
    for _ in range(2):  # plan, compile, compare; plan once more if XLA needs more than was estimated
        found = _search(trial, learner, order, fastest, batch, room)
        if found is None:
            break
        measured = trial.measured(found)
        if measured <= budget:
            return Fitted(found, trial.estimated(found), measured)
        fallback = found
        room *= MARGIN * budget / measured
    smallest = trial.smallest or fallback or fastest
    needed = trial.measured(smallest)
    if needed <= budget:
        return Fitted(smallest, trial.estimated(smallest), needed)
    kept = [str(v) for v in largest_values(trial.jaxpr(smallest), 3)]
    raise MemoryBudgetError(
        located(
            f"{program.name} does not fit into memory_budget={budget} ({show_bytes(budget)}). The smallest plan needs "
            f"{needed} bytes ({show_bytes(needed)}): {smallest}. What does not shrink: {'; '.join(kept)}.",
            where=program.where,
            fix=f"Give memory_budget={math.ceil(needed)}, fewer environments, or more devices (mesh=).",
        )
    )


class _Trial:
    """The gradient of a program under one plan after another: its jaxpr, the estimate, XLA's number."""

    def __init__(self, program: Program, order: tuple[Var, ...], batch: int):
        self.program, self.order, self.batch = program, order, batch
        self.estimates: dict[Plan, int] = {}
        self.jaxprs: dict[Plan, Any] = {}

    @property
    def smallest(self) -> Plan | None:
        """The plan with the least estimate so far."""
        return min(self.estimates, key=self.estimates.__getitem__, default=None)

    def _function(self, plan: Plan) -> tuple:
        from rlfx.recurrence.lowered import Lowered  # the planner compares what the lowering makes of its plans

        domain = self.program.domain
        local = replace(domain, batch=None if domain.batch is None else self.batch)
        directives = {k: v for k, v in self.program.directives.items() if k not in ("memory_budget", "block_size")}
        lowered = Lowered(replace(self.program, domain=local, directives={**directives, "plan": plan}))
        inputs = lowered.flat_inputs

        def gradient(flat, t0):
            def loss(leaves):
                mine = dict(zip(self.order, leaves, strict=True))
                value, *rest = lowered([mine.get(v, x) for v, x in zip(inputs, flat, strict=True)], t0)
                return value, rest

            return jax.value_and_grad(loss, has_aux=True)(
                [x for v, x in zip(inputs, flat, strict=True) if v in self.order]
            )

        def struct(v: Var):
            lead = (self.batch,) if "b" in self.program.dims_of(v) else ()
            return jax.ShapeDtypeStruct((*lead, *v.shape), v.dtype)

        return gradient, ([struct(v) for v in inputs], jax.ShapeDtypeStruct((), jnp.int32))

    def jaxpr(self, plan: Plan) -> Any:
        """Of the loss and its gradient."""
        if plan not in self.jaxprs:
            fn, arguments = self._function(plan)
            self.jaxprs[plan] = J.without_dead_code(jax.make_jaxpr(fn)(*arguments))
        return self.jaxprs[plan]

    def estimated(self, plan: Plan) -> int:
        """Temporary bytes by the static estimate."""
        if plan not in self.estimates:
            self.estimates[plan] = int(estimate_temp_bytes(self.jaxpr(plan)))
        return self.estimates[plan]

    def measured(self, plan: Plan) -> int:
        """Temporary bytes by XLA."""
        fn, arguments = self._function(plan)
        analysis = jax.jit(fn).lower(*arguments).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)


def _search(trial: _Trial, learner: Learner, order, fastest: Plan, batch: int, room: float) -> Plan | None:
    """The first plan, from fast to slow, whose estimate fits."""
    if trial.estimated(fastest) <= room:
        return fastest
    for plans in _families(trial.program, learner, order, fastest, batch):
        found = _largest_that_fits(trial, list(plans), room)
        if found is not None:
            return found
    return None


def _largest_that_fits(trial: _Trial, plans: list[Plan], room: float) -> Plan | None:
    """Of plans whose memory falls, the first that fits."""
    if not plans or trial.estimated(plans[-1]) > room:
        return None
    low, high = 0, len(plans) - 1  # plans[high] fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if trial.estimated(plans[middle]) <= room else (middle + 1, high)
    return plans[high]


def _families(program: Program, learner: Learner, order, fastest: Plan, batch: int) -> Iterator[Iterable[Plan]]:
    """Lists of plans, each from large to small tiles; faster lists first."""
    length = program.domain.length
    split = why_not_environments(learner, order) is None
    start = fastest.block or length
    for form in ("stream", "blocks"):
        if why_not(form, learner) is None:
            yield list(_tiles(form, start, length, batch if split else 1))
    if why_not("replay", learner) is None:
        # A tile larger than that of the fastest plan, which fits the caches, only costs memory.
        in_tile = length * batch if fastest.block is None else fastest.block * (fastest.environments or batch)
        for block in _replay_blocks(program, learner):
            smaller = [m for m in _divisors(batch)[::-1] if m <= max(1, in_tile // block)] if split else [batch]
            yield [Plan("replay", block, None if m == batch else m) for m in smaller]


def _tiles(form: str, start: int, length: int, batch: int) -> Iterator[Plan]:
    for block in reversed([d for d in _divisors(length) if d <= start] or [1]):
        yield Plan(form, block)
    for environments in reversed(_divisors(batch)[:-1]):
        yield Plan(form, 1, environments)


def _replay_blocks(program: Program, learner: Learner) -> list[int]:
    """Block lengths to try: where what is kept between blocks and what is acted again within one are in balance."""
    domain, length = program.domain, program.domain.length
    state = sum(bytes_of(v, domain) for v in program.carry)
    per_step = max(bytes_of(v, domain) for v in learner.stored if points(program.dims_of(v), domain) >= length)
    balance = math.sqrt(length * max(state, 1) / max(per_step, 1))
    near = sorted(_divisors(length), key=lambda d: abs(math.log(d / max(balance, 1.0))))
    return sorted(near[:3], reverse=True)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
