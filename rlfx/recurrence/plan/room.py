"""Default plans that fit a device: the plan that costs least, or the fastest that its free memory holds.

A budget that nobody gave. Only where memory may be short is a program traced to bound its bytes, and only where the bound
is near to what is free is anything compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx.errors import TargetError
from rlfx.recurrence.analysis.cost import bytes_of, points
from rlfx.recurrence.execute.outputs import output_dims, outputs_of
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.language.primitives import series_p
from rlfx.recurrence.plan.budget import least, nearest, search
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan

#: What part of a device's memory programs may fill: an allocator loses some to alignment and to holes.
USABLE = 0.9

#: What gives a value another name.
_NAMES = frozenset({J.primitive("name"), series_p})

#: A bound up to this part of what is free needs no compiler to be believed.
PLENTY = 0.5


def free_bytes(target: Target, devices: Iterable[Any] = ()) -> int | None:
    """Bytes of one device that nothing holds; None where that is not known.

    Of ``devices``, if they are here and their allocator says, the fullest counts; else the target's memory. Processes that
    run one program must plan alike, so that of several none asks its own devices.
    """
    here = target.is_here and jax.process_count() == 1
    stats = [(d.memory_stats() or {}) for d in devices] if here else []
    known = [s for s in stats if "bytes_limit" in s]
    limits = [s["bytes_limit"] for s in known] + [n for n in [target.room.memory] if n is not None]
    if not limits:
        return None
    used = max((s.get("bytes_in_use", 0) for s in known), default=0)
    return max(0, int(USABLE * min(limits)) - used)


def free_on(rule: GradientRule) -> int | None:
    """Bytes that are free on what a rule's program runs on; None where that is not known."""
    return free_bytes(rule.target, rule.split.own_devices)


def with_room(evaluator: PlanEvaluator, learner: Learner, fastest: Plan, free: int) -> Plan:
    """The fastest plan whose temporary bytes fit beside what a call returns; if none does, the one that needs least.

    Args:
      evaluator: the program, for one device.
      fastest: the plan if memory is no matter.
      free: bytes of that device.
    """
    room = free - _returned(evaluator) - (0 if evaluator.target.is_here else _given(evaluator))
    bound = lambda: evaluator.estimated(fastest) + _copied(evaluator, learner, fastest)  # noqa: E731
    if _all_values(evaluator) <= PLENTY * room or bound() <= PLENTY * room:
        return fastest
    try:
        return nearest(evaluator, learner, fastest, room)
    except TargetError:  # nothing here compiles for it: the bound decides
        return search(evaluator, learner, fastest, room) or least(evaluator, fastest)


def _copies(evaluator: PlanEvaluator) -> int:
    return math.prod(axis.size for axis in evaluator.axes)


def _bytes(evaluator: PlanEvaluator, var: Var, dims: frozenset) -> int:
    domain = evaluator.program.domain
    return bytes_of(var, domain) * points(dims, domain, evaluator.batch) * _copies(evaluator)


def _given(evaluator: PlanEvaluator) -> int:
    """Bytes of the arguments; where a device is here they are in use when a plan is made."""
    p = evaluator.program
    return sum(_bytes(evaluator, v, p.dims_of(v)) for v in (*p.params, *p.consts, *p.carry))


def _returned(evaluator: PlanEvaluator) -> int:
    """Bytes of what a call returns, and of the gradient."""
    p = evaluator.program
    outputs = [(v, output_dims(p, v)) for v in outputs_of(p) if isinstance(v, Var)]
    gradient = [(v, p.dims_of(v)) for v in evaluator.order]
    return sum(_bytes(evaluator, v, dims) for v, dims in (*outputs, *gradient))


def _copied(evaluator: PlanEvaluator, learner: Learner, plan: Plan) -> int:
    """Bytes of what a call returns and the learner reads, perhaps by another name: XLA may keep it twice."""
    p, definition = evaluator.program, evaluator.program.definitions()

    def named(v: Any) -> Any:
        while (e := definition.get(v)) is not None and e.op in _NAMES:
            v = e.inputs[0]
        return v

    returned = set(map(named, outputs_of(p)))
    return sum(_bytes(evaluator, v, p.dims_of(v)) for v in learner.under(plan).stored if named(v) in returned)


def _all_values(evaluator: PlanEvaluator) -> float:
    """Bytes of every value at every point, and of its cotangent: more than a plan has at a time."""
    p = evaluator.program
    if any(J.sub_jaxprs(dict(e.params)) for e in p.equations):  # values within loops of the user's
        return math.inf
    return 2.0 * sum(_bytes(evaluator, v, p.dims_of(v)) for e in p.equations for v in e.outputs)
