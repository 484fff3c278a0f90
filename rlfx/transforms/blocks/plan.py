"""A plan: which equations run for the whole batch, which in blocks, and in which loop over the blocks.

A value that needs a reduction over the batch is available only when a loop over the blocks is complete: batch statistics
divide a program into *phases*, one loop each. What a later loop needs of an earlier one is computed again where that is
cheap (elementwise operations, broadcasts) and kept for the whole batch where it is not (contractions, loops). An equation
without a rule is a *barrier*: its operands are kept for the whole batch, and it runs on them as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.transforms.blocks import scan, scatter
from rlfx.transforms.blocks.flat import SAME, Array, Atom, Axis, Block, Blockwise, Const, Equation, Flat
from rlfx.transforms.blocks.rules import RULES, along, loops_of

#: The modules that register rules.
RULE_MODULES = (scatter, scan)

_BROADCAST = J.primitive("broadcast_in_dim")
#: Computed again in every loop that needs them.
CHEAP = (
    J.ELEMENTWISE
    | {J.SPLIT}
    | {
        J.primitive(name)
        for name in (
            "broadcast_in_dim", "iota", "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "concatenate",
            "pad", "rev", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_and", "reduce_or",
        )
    }
)  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """All of a value."""

    value: Array


@dataclass(frozen=True)
class Part:
    """A block of a value along an axis."""

    value: Array
    axis: Axis


@dataclass(frozen=True)
class Sum:
    """What a block contributes to a sum over blocks; or, if ``same``, the value that every block has."""

    value: Array
    same: bool = False


Slot = Whole | Part | Sum


@dataclass(frozen=True, eq=False)
class Step:
    """One equation in a loop: ``outs = run(block, ins)``; without a rule, its operand, or a slice of it."""

    rule: Blockwise | None
    ins: tuple[Slot | Const, ...]
    outs: tuple[Any, ...]
    equation: Equation | None = None


@dataclass(eq=False)
class Loop:
    """One pass over the blocks.

    Attributes:
      steps: what is computed, in order.
      folds: reductions over the batch that are no sums.
      sums: contributions that are added up.
      kept: values whose blocks are put together.
    """

    steps: list[Step] = field(default_factory=list)
    folds: list[Step] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    kept: list[Array] = field(default_factory=list)
    made: set[Slot] = field(default_factory=set)

    def is_empty(self) -> bool:
        """Whether it completes nothing."""
        return not (self.folds or self.sums or self.kept)

    def wholes(self) -> list[Whole]:
        """What every block reads as a whole, and not sliced."""
        sliced = [step for step in self.steps if step.rule is None and isinstance(step.outs[0], Part)]
        found = (s for step in (*self.steps, *self.folds) if step not in sliced for s in step.ins)
        return list(dict.fromkeys(s for s in found if isinstance(s, Whole)))


@dataclass(frozen=True)
class Plan:
    """What runs when: ``whole[0], loops[0], whole[1], loops[1], ...``."""

    flat: Flat
    n: int
    axes: dict[Array, Axis | None]
    whole: tuple[tuple[Equation, ...], ...]
    loops: tuple[Loop, ...]
    barriers: tuple[Equation, ...]

    def read_whole(self) -> set[Array]:
        """What is read as a whole: by equations outside of the loops, in every block, or as a result."""
        inside = {s.value for loop in self.loops for s in loop.wholes()}
        outside = {v for equations in self.whole for e in equations for v in e.ins if isinstance(v, Array)}
        return inside | outside | {v for v in self.flat.outputs if isinstance(v, Array)}

    def kept(self) -> list[Array]:
        """What is kept for the whole batch between loops or as a result, inputs apart."""
        return [v for loop in self.loops for v in loop.kept]


class Analysis:
    """Where the batch is in every value, and how many loops must be complete before it is available."""

    def __init__(self, flat: Flat, axes: Sequence[Axis | None], n: int):
        self.flat, self.n = flat, n
        self.axes: dict[Array, Axis | None] = dict(zip(flat.inputs, axes, strict=True))
        self.rules: dict[Equation, Blockwise | None] = {}
        self.maker: dict[Array, Equation] = {}
        self.barriers: list[Equation] = []
        self.levels: dict[Slot, int] = {}
        self.reemitted: dict[Part, Blockwise | None] = {}
        self.same: set[Array] = set()  # results of steps that every block computes alike
        for equation in flat.equations:
            self.propagate(equation)
        for equation in flat.equations:  # in program order, so that levels never recurse deeply
            for value in equation.outs:
                self.level(Whole(value))

    def propagate(self, equation: Equation) -> None:
        axes = [self.axes.get(v) if isinstance(v, Array) else None for v in equation.ins]
        found = None
        if any(axes):
            apply = RULES.get(equation.op)
            if apply is not None and not equation.made_by.effects:
                found = apply(equation, axes, self.n)
            if found is None:
                self.barriers.append(equation)
        self.rules[equation] = found
        outs = found.outs if found is not None and found.fold is None else (None,) * len(equation.outs)
        for value, kind in zip(equation.outs, outs, strict=True):
            self.axes[value] = kind if isinstance(kind, Axis) else None
            self.maker[value] = equation
            if kind is SAME:
                self.same.add(value)

    # -- when a value is available

    def slots(self, equation: Equation, rule: Blockwise) -> tuple[Slot | Const, ...]:
        """What an equation reads on a block."""
        early = rule.fold is not None  # a fold may need it before the first block

        def slot(atom: Atom, demand: Any) -> Slot | Const:
            if isinstance(atom, Const):
                return atom
            if isinstance(demand, Axis):
                return Part(atom, demand)
            return Sum(atom, True) if atom in self.same and not early else Whole(atom)

        return tuple(slot(v, demand) for v, demand in zip(equation.ins, rule.demands, strict=True))

    def level(self, slot: Slot | Const) -> int:
        """How many loops are complete before a value can be read (whole), or the loop in which it is computed (part)."""
        todo = [slot]
        while todo:
            one = todo[-1]
            if isinstance(one, Const) or one in self.levels:
                todo.pop()
                continue
            reads, more = self._reads(one)
            known = [self.levels.get(r) for r in reads if not isinstance(r, Const)]
            if None in known:
                todo += [r for r in reads if r not in self.levels]
            else:
                self.levels[one] = max((n for n in known if n is not None), default=0) + more
        return 0 if isinstance(slot, Const) else self.levels[slot]

    def _reads(self, slot: Slot) -> tuple[Sequence[Slot | Const], int]:
        """What a value is computed from, and how many loops that takes."""
        equation = self.maker.get(slot.value)
        if equation is None:
            return (), 0
        rule, own = self.rules[equation], self.axes[slot.value]
        if isinstance(slot, Sum):
            assert rule is not None
            return self.slots(equation, rule), 0
        if isinstance(slot, Whole):
            if own is not None:
                return (Part(slot.value, own),), 1
            return (_wholes(equation), 0) if rule is None else (self.slots(equation, rule), 1)
        if slot.axis == own and rule is not None:
            return self.slots(equation, rule), 0
        if slot.value in self.same:
            return (Sum(slot.value, True),), 0
        again = self.again(slot)
        return ((Whole(slot.value),), 0) if again is None else (self.slots(equation, again), 0)

    def again(self, slot: Part) -> Blockwise | None:
        """A rule that computes a block of a value without the batch, instead of slicing it."""
        if slot not in self.reemitted:
            equation = self.maker.get(slot.value)
            whole = equation is not None and self.rules[equation] is None and equation not in self.barriers
            self.reemitted[slot] = _again(equation, slot.axis, self.n) if whole and equation is not None else None
        return self.reemitted[slot]


def _wholes(equation: Equation) -> list[Whole]:
    return [Whole(v) for v in equation.ins if isinstance(v, Array)]


def _again(equation: Equation, axis: Axis, n: int) -> Blockwise | None:
    """How a block of a broadcast, an iota, or what is computed from them is made without the whole."""
    op, params = equation.op, equation.params
    if op is _BROADCAST or op in J.ELEMENTWISE:
        loops = loops_of(equation)
        found = along(equation, loops, axis.dim, axis) if loops else None  # the loops are the axes of the result
        return found if op is _BROADCAST or (found and any(found.demands)) else None
    if op is J.primitive("iota") and (axis.dim != params["dimension"] or axis.outer == 1):

        def run(block: Block, ins: Sequence) -> list:
            shape = (*params["shape"][: axis.dim], axis.size(block.size), *params["shape"][axis.dim + 1 :])
            (made,) = equation.bind(ins, shape=shape)
            if axis.dim == params["dimension"]:
                made = made + jnp.asarray(block.start * axis.inner).astype(made.dtype)
            return [made]

        return Blockwise((), (axis,), run)
    return None
