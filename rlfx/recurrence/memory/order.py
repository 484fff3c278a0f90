"""In which order the loops of a program run: XLA:CPU's schedule, which favours concurrency over memory."""

from __future__ import annotations

from collections import deque

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.fusion import Unit
from rlfx.recurrence.memory.sizes import LOOPS


def schedule(units: list[Unit]) -> list[Unit]:
    """First come, first served: a queue, that an operation joins when the last one of its operands is computed."""
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
    loops = [unit for unit in units if _is_loop(unit)]
    for loop in loops:
        waiting[id(loop)] += 1
    first = sorted((u for u in units if waiting[id(u)] == 0), key=lambda u: not u.reads)  # arguments before constants
    ready: deque = deque([*((u, _STEPS[False]) for u in first), *((u, _COUNTER) for u in loops)])
    order = []
    while ready:
        unit, (step, *steps) = ready.popleft()
        if step == "run":
            order.append(unit)
        if steps:
            ready.append((unit, steps))
            continue
        for user in [unit] if step == "count" else users.get(id(unit), ()):
            waiting[id(user)] -= 1
            if waiting[id(user)] == 0:
                ready.append((user, _STEPS[_is_loop(user)]))
    return order


#: A loop takes a tuple, and its results are taken out of one: operations of their own.
_STEPS = {False: ("run",), True: ("pack", "run", "unpack")}
#: The zero that it counts from is copied, after all that begins with arguments and constants of the program.
_COUNTER = ("count",)


def _is_loop(unit: Unit) -> bool:
    return unit.node.op in LOOPS


def _is_weight_gradient(unit: Unit) -> bool:
    """Contractions over leading axes: XLA makes them anew when it folds transposes, so they come last."""
    if unit.node.op is not J.primitive("dot_general"):
        return False
    (contract, _), batch = unit.node.equation.params["dimension_numbers"]
    return not any(batch) and 0 in contract
