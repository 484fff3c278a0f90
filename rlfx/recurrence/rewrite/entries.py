"""What is computed of one entry of a table is computed of all entries once: ``log_softmax(w[action])``.

Transitions that actions move, logits of every state of a small world, a scale for each task: a per-timestep program takes the
entry of its point and computes of it. Where points are many times as many as entries, they compute the same again and again:

    y = f(w[a])   ->   y = f(w)[a]

with ``f`` of each entry by itself, before any loop over time. Only what is more than arithmetic, which is fused with the reading,
and gives no more numbers than an entry has, which are read in its place. An entry that no point takes must not matter: its
cotangent is zero, and zero times infinity is not. So only what is finite, with its derivatives, wherever numbers are: of
logarithms, exponentials and quotients those of ``softmax``, ``log_softmax`` and ``logsumexp``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS
from rlfx.recurrence.analysis.cost import PRODUCTS, points
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.picks import DYNAMIC_SLICE, axes_of_one

_EXP, _LOG, _DIV, _SUB, _MAX, _SELECT, _SUM, _POWER, _BROADCAST, _RESHAPE, _SQUEEZE, _DOT, _LARGEST, _FINITE, _ABS = map(
    J.primitive,
    ("exp", "log", "div", "sub", "max", "select_n", "reduce_sum", "integer_pow", "broadcast_in_dim", "reshape", "squeeze",
     "dot_general", "reduce_max", "is_finite", "abs"),
)  # fmt: skip
_TAKEN_AS_IT_IS = frozenset({_SQUEEZE, _RESHAPE})
#: What takes longer than to read a number, and is finite of all finite numbers; softmax and its kin beside it.
_BOUNDED = frozenset(map(J.primitive, ("tanh", "logistic", "sin", "cos", "erf", "atan")))
_COMPUTED = J.ARITHMETIC | _BOUNDED | REDUCTIONS.keys() | J.LAYOUTS | {_DOT}
_WORTH = _BOUNDED | PRODUCTS | {_EXP}


@dataclass(frozen=True, eq=False)
class _Entry:
    """An entry that a point takes, and what is computed of it alone.

    Attributes:
      read: the equation that takes it.
      axis: of the table, that of the entries.
      steps: the equations, in order.
      fixed: what these read besides, the same at all points.
    """

    read: Equation
    axis: int
    steps: tuple[Equation, ...]
    fixed: tuple[Var, ...]

    @property
    def operands(self) -> tuple[Atom, ...]:
        """The table, the index, and the fixed values."""
        return self.read.inputs[0], self.read.inputs[1 + self.axis], *self.fixed

    def of(self, wanted: Var, table: Any, index: Any, *fixed: Any) -> Any:
        """A value that the steps compute, of the entry at an index."""
        given = dict(zip(self.fixed, fixed, strict=True))

        def computed(entry: Any) -> Any:
            known: dict[Atom, Any] = {**given, self.read.outputs[0]: jnp.expand_dims(entry, self.axis)}
            for e in self.steps:
                values = (known[v] if isinstance(v, Var) else v.value for v in e.inputs)
                known.update(zip(e.outputs, J.bind(e.op, dict(e.params), *values), strict=True))
            return known[wanted]

        values = jax.vmap(computed, self.axis)(table)
        starts = (index, *(jnp.zeros_like(index) for _ in values.shape[1:]))  # before the first it is the first
        (out,) = J.bind(DYNAMIC_SLICE, {"slice_sizes": (1, *values.shape[1:])}, values, *starts)
        return jnp.squeeze(out, 0)


def with_entries_first(program: Program, times: int) -> Program:
    """The program with such tables; without any ``program``. Meaning-preserving, of finite tables; idempotent.

    Args:
      times: so many times as many points as entries, at least.
    """
    found: dict[Equation, _Entry] = {}
    for e in program.equations:
        entry = _entry(e, program, times) if e not in found else None
        if entry is not None:
            found |= dict.fromkeys(_wanted(entry, program), entry)

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        entry = found.get(e)
        return None if entry is None else (functools.partial(entry.of, e.outputs[0]), entry.operands)

    return exchanged(program, instead)


def _entry(read: Equation, program: Program, times: int) -> _Entry | None:
    """What is computed of an entry that an equation takes; None if that is better done at each point."""
    axes, dims = axes_of_one(read), program.dims_of
    table = read.inputs[0] if axes else None
    if len(axes) != 1 or not isinstance(table, Var) or dims(table) or not J.is_inexact(table):
        return None
    (axis,) = axes
    many = points(dims(read.outputs[0]), program.domain)
    if times * table.shape[axis] > many or read.has_effects:
        return None
    steps, fixed, known, shares = [], {}, {*read.outputs}, _Shares()
    for e in program.equations[program.places[read] + 1 :]:
        of = [v for v in e.inputs if isinstance(v, Var)]
        others = [v for v in of if v not in known]
        if len(others) < len(of) and _is_computed(e, shares) and not any(dims(v) for v in others):
            shares.add(e)
            steps.append(e)
            known.update(e.outputs)
            fixed |= dict.fromkeys(others)
    entry = _Entry(read, axis, tuple(steps), tuple(fixed))
    size, wanted = math.prod(read.outputs[0].shape), _wanted(entry, program)
    raw = {*read.outputs}
    raw.update(v for e in steps if e.op in _TAKEN_AS_IT_IS and not raw.isdisjoint(e.inputs) for v in e.outputs)
    whole = not any(e.op in _TAKEN_AS_IT_IS and e.outputs[0] in raw for e in wanted)
    little = sum(math.prod(e.outputs[0].shape) for e in wanted) <= size and not _is_read(read, entry, program)
    dear = any(e.op in _WORTH and 2 * math.prod(e.outputs[0].shape) >= size for e in steps)
    return entry if wanted and whole and little and dear else None


def _is_computed(e: Equation, shares: _Shares) -> bool:
    finite = e.params["y"] >= 0 if e.op is _POWER else e.op in _COMPUTED or shares.allow(e)
    return finite and e.is_pointwise and len(e.outputs) == 1 and not (e.is_ragged or e.has_effects)


class _Shares:
    """What softmax is made of: the largest numbers along axes, numbers less these, their exponentials, and the sums of those."""

    def __init__(self) -> None:
        self._largest: dict[Var, tuple[Var, tuple[int, ...]]] = {}
        self._below: dict[Var, tuple[int, ...]] = {}
        self._shares: dict[Var, tuple[int, ...]] = {}
        self._totals: set[Var] = set()
        self._finite: dict[Var, Var] = {}

    def allow(self, e: Equation) -> bool:
        """Whether an exponential is of numbers that are at most 0; a logarithm, or a quotient, of a sum that is at least 1."""
        of = e.inputs[-1] if e.inputs else None
        return (e.op is _EXP and of in self._below) or (e.op in (_LOG, _DIV) and of in self._totals)

    def add(self, e: Equation) -> None:
        """An equation that is allowed."""
        (out,), of = e.outputs, [v for v in e.inputs if isinstance(v, Var)]
        if e.op is _LARGEST:
            self._largest[out] = e.inputs[0], tuple(e.params["axes"])
        elif e.op is _SUB and len(of) == 2 and self._is_largest_of(of[1], of[0]):
            self._below[out] = self._largest[of[1]][1]
        elif e.op is _EXP:
            self._shares[out] = self._below[of[0]]
        elif e.op is _SUM and self._shares.get(of[0]) == tuple(e.params["axes"]):
            self._totals.add(out)
        elif e.op is _FINITE and of[0] in self._largest:
            self._finite[out] = of[0]
        elif e.op in (_BROADCAST, _SQUEEZE, _RESHAPE, _ABS) and of[0] in self._totals:
            self._totals.add(out)
        elif (same := self._same_largest(e)) in self._largest:
            self._largest[out] = self._largest[same]

    def _is_largest_of(self, largest: Var, values: Var) -> bool:
        """Whether a value has the largest of some values, each in its place: of all of them, or along axes that are kept."""
        of, axes = self._largest.get(largest, (None, ()))
        return of is values and (len(largest.shape) == len(values.shape) or len(axes) == len(values.shape))

    def _same_largest(self, e: Equation) -> Atom | None:
        """Of an equation that gives the same largest numbers, in the same places, without a derivative perhaps: these."""
        if e.op is _SELECT:  # where they are finite
            return e.inputs[2] if self._finite.get(e.inputs[0]) is e.inputs[2] else None
        if e.op is _MAX:  # and -inf
            return next((v for v, other in (e.inputs, e.inputs[::-1]) if _is_least(other)), None)
        if e.op is not _BROADCAST or e.inputs[0] not in self._largest:
            return e.inputs[0] if e.op in J.STOP_GRADIENT else None
        (x,), (of, axes) = e.inputs, self._largest[e.inputs[0]]
        places = range(len(of.shape))
        kept = tuple(places) if len(x.shape) == len(of.shape) else tuple(a for a in places if a not in axes)
        return x if tuple(e.params["broadcast_dimensions"]) == kept else None


def _is_least(v: Atom) -> bool:
    """Whether a number is -inf."""
    return not isinstance(v, Var) and bool(np.all(np.isneginf(v.value)))


def _is_read(e: Equation, entry: _Entry, program: Program) -> bool:
    """Whether others than the steps need what an equation gives."""
    inside, returned = frozenset(entry.steps), frozenset(program.returned)
    return any(v in returned or not inside.issuperset(program.users.get(v, ())) for v in e.outputs)


def _wanted(entry: _Entry, program: Program) -> list[Equation]:
    """The steps whose values others need."""
    return [e for e in entry.steps if _is_read(e, entry, program)]
