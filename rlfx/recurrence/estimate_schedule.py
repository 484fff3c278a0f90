"""In which order the loops of a program run: XLA:CPU's schedule, which favours concurrency over memory."""

from __future__ import annotations

from collections import deque

from rlfx import _jaxpr as J
from rlfx.recurrence.estimate_flat import LOOPS
from rlfx.recurrence.estimate_fusion import Unit

def schedule(units: list[Unit]) -> list[Unit]:
    """First come, first served: XLA:CPU's order, which favours concurrency over memory."""
    owner = {id(v): unit for unit in units for v in unit.node.outs}
    waiting: dict[int, int] = {}
    users: dict[int, list[Unit]] = {}
    for unit in units:
        needs = {id(o): o for v in unit.reads if (o := owner.get(id(v))) is not None and o is not unit}
        waiting[id(unit)] = len(needs)
        for key in needs:
            users.setdefault(key, []).append(unit)
    for later in users.values():
        later.sort(key=_is_weight_gradient)
    ready = deque((u, _STEPS[_is_loop(u)]) for u in units if waiting[id(u)] == 0)
    order = []
    while ready:
        unit, (step, *steps) = ready.popleft()
        if step == "run":
            order.append(unit)
        if steps:
            ready.append((unit, steps))
            continue
        for user in users.get(id(unit), ()):
            waiting[id(user)] -= 1
            if waiting[id(user)] == 0:
                ready.append((user, _STEPS[_is_loop(user)]))
    return order


#: A loop takes a tuple, and its results are taken out of one: operations of their own.
_STEPS = {False: ("run",), True: ("pack", "run", "unpack")}


def _is_loop(unit: Unit) -> bool:
    return unit.node.op in LOOPS


def _is_weight_gradient(unit: Unit) -> bool:
    """Contractions over leading axes: XLA makes them anew when it folds transposes, so they come last."""
    if unit.node.op is not J.primitive("dot_general"):
        return False
    (contract, _), batch = unit.node.equation.params["dimension_numbers"]
    return not any(batch) and 0 in contract
