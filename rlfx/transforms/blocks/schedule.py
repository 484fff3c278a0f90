"""Which loop computes what: everything as late as possible, and nothing costly twice.

A sum that needs no statistic of the batch could be computed in the first loop over the blocks; in the last one, it shares
what the other results need. So every value that a loop completes has a *deadline*, the first loop that reads it, and is
computed in the loop before. What is costly and needed in several loops all the same is kept by the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfx.transforms.blocks.extremes import placed
from rlfx.transforms.blocks.flat import SAME, Array, Atom, Axis, Const, Equation, Flat
from rlfx.transforms.blocks.plan import CHEAP, Analysis, Loop, Part, Plan, Slot, Step, Sum, Whole


def make_plan(flat: Flat, axes: Sequence[Axis | None], n: int) -> Plan:
    """The plan of a program whose inputs have the batch (of size ``n``) at ``axes``."""
    analysis = Analysis(placed(flat), axes, n)
    deadlines: dict[Array, int] = {}
    keepers: dict[Equation, int] = {}
    while True:  # every round moves something to an earlier loop, or is the last
        schedule = _Schedule(analysis, dict(deadlines), keepers)
        schedule.build()
        shared = {**keepers, **schedule.computed_twice()}
        if schedule.deadlines == deadlines and shared == keepers:
            return schedule.plan()
        deadlines, keepers = schedule.deadlines, shared


class _Schedule:
    """One round.

    Attributes:
      deadlines: the loop before which a value must be complete; may become earlier, for the next round.
      keepers: the loop that keeps the results of an equation for later loops.
    """

    def __init__(self, analysis: Analysis, deadlines: dict[Array, int], keepers: dict[Equation, int]):
        self.found, self.deadlines, self.keepers = analysis, deadlines, keepers
        self.placed: set[Array] = set()
        self.computed: dict[Equation, set[int]] = {}
        self.positions: dict[Equation, int] = {}
        self.loops: list[Loop] = []

    def build(self) -> None:
        found = self.found
        outputs = [v for v in found.flat.outputs if isinstance(v, Array)]
        effects = [e for e in found.flat.equations if e.made_by.effects]
        reads = [*outputs, *(v for e in effects for v in e.ins if isinstance(v, Array))]
        last = max((found.level(Whole(v)) for v in reads), default=0)
        self.loops = [Loop() for _ in range(last)]
        for value in outputs:
            self.need_whole(value, last)
        for equation in effects:
            self.need_equation(equation, last)
        for i in reversed(range(last)):
            loop = self.loops[i]
            for value in loop.kept:
                axis = found.axes[value]
                assert axis is not None
                self.need_part(Part(value, axis), i)
            for contribution in loop.sums:
                self.need_part(contribution, i)
            for step in loop.folds:
                for slot in step.ins:
                    if isinstance(slot, Part | Sum):
                        self.need_part(slot, i)
                    elif isinstance(slot, Whole):
                        self.need_whole(slot.value, i)

    def plan(self) -> Plan:
        flat = self.found.flat
        whole: list[list[Equation]] = [[]]
        loops = []
        for i in range(len(self.loops) + 1):
            whole[-1] += [e for e in flat.equations if self.positions.get(e) == i]
            if i < len(self.loops) and not self.loops[i].is_empty():
                loops.append(self.loops[i])
                whole.append([])
        barriers = tuple(self.found.barriers)
        return Plan(flat, self.found.n, self.found.axes, tuple(map(tuple, whole)), tuple(loops), barriers)

    def computed_twice(self) -> dict[Equation, int]:
        """Costly equations that run in several loops, with the first of them."""
        return {e: min(loops) for e, loops in self.computed.items() if len(loops) > 1 and e.op not in CHEAP}

    # -- what is needed

    def need_whole(self, atom: Atom, before: int) -> None:
        todo = [(atom, before)]
        while todo:
            value, deadline = todo.pop()
            equation = self.completed(value, deadline)
            if equation is not None:
                todo += self.operands(equation, self.deadlines[value])

    def need_equation(self, equation: Equation, before: int) -> None:
        for value, deadline in reversed(self.operands(equation, before)):
            self.need_whole(value, deadline)

    def operands(self, equation: Equation, before: int) -> list[tuple[Atom, int]]:
        """What an equation on whole values needs before a loop, the first operand last."""
        self.positions[equation] = min(before, self.positions.get(equation, before))
        return [(value, before) for value in reversed(equation.ins)]

    def completed(self, atom: Atom, before: int) -> Equation | None:
        """Have a value completed by the loop before; the equation that makes it, if that takes no loop."""
        found = self.found
        if isinstance(atom, Const) or atom not in found.maker:
            return None
        deadline = self.deadlines[atom] = min(before, self.deadlines.get(atom, before))
        if atom in self.placed:
            return None
        self.placed.add(atom)
        equation = found.maker[atom]
        rule = found.rules[equation]
        if found.axes[atom] is None and rule is None:
            return equation
        loop = self.loops[deadline - 1]
        if found.axes[atom] is not None:
            loop.kept.append(atom)
        elif rule is not None and rule.fold is None:
            loop.sums.append(Sum(atom, rule.outs[equation.outs.index(atom)] is SAME))
        elif rule is not None and not any(step.equation is equation for step in loop.folds):
            loop.folds.append(Step(rule, found.slots(equation, rule), tuple(map(Whole, equation.outs)), equation))
        return None

    def need_part(self, slot: Part | Sum, i: int) -> None:
        """Add to loop ``i`` the steps that compute a block."""
        loop = self.loops[i]
        stack: list[tuple[Part | Sum, Step | None]] = [(slot, None)]
        while stack:
            slot, step = stack.pop()
            if step is not None:  # its operands are there
                if slot not in loop.made:
                    loop.made.update(step.outs)
                    loop.steps.append(step)
                continue
            if slot in loop.made:
                continue
            step = self.step_for(slot, i)
            stack.append((slot, step))
            for operand in step.ins:
                if isinstance(operand, Part | Sum):
                    stack.append((operand, None))
                elif isinstance(operand, Whole):
                    self.need_whole(operand.value, i)

    def step_for(self, slot: Part | Sum, i: int) -> Step:
        found = self.found
        equation = found.maker.get(slot.value)
        source: Slot = Whole(slot.value)
        if equation is None:
            return Step(None, (source,), (slot,))
        rule = found.rules[equation]
        if rule is not None and (isinstance(slot, Sum) or found.axes[slot.value] == slot.axis):
            keeper = self.keepers.get(equation, i)
            if keeper < i and (isinstance(slot, Part) or slot.same):
                self.need_whole(slot.value, keeper + 1)
                return Step(None, (source,), (slot,))
            outs = tuple(
                Part(v, kind) if isinstance(kind, Axis) else Sum(v, kind is SAME)
                for v, kind in zip(equation.outs, rule.outs, strict=True)
            )
            self.computed.setdefault(equation, set()).add(i)
            return Step(rule, found.slots(equation, rule), outs, equation)
        assert isinstance(slot, Part)
        if slot.value in found.same:
            return Step(None, (Sum(slot.value, True),), (slot,))
        again = found.again(slot)
        if again is None:
            return Step(None, (source,), (slot,))
        return Step(again, found.slots(equation, again), (slot,), equation)
