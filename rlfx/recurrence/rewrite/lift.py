"""Lifting: reductions of slices that are recurrences or sliding windows in disguise.

===========================================  =====================================================================
``discounted_sum(r[t:], d[t:])``             ``g = r + d * g[t + 1]``, one backward loop
``sum(x[t:])``, ``sum(x[:t + 1])``           ``g = x + g[t + 1]``, ``g = x + g[t - 1]``
the same over ``[t:t + n]``, ``[t - n + 1:t + 1]``  log2(n) doublings: ``w2k[t] = wk[t] + pk[t] * wk[t + k]``
``max(x[t:])``, ``min(x[:t + 1])``           ``m = max(x, m[t + 1])``, and how many timesteps attain it
===========================================  =====================================================================

Unlifted, each would be a masked ``[T, T]`` or ``[T, n]`` array. The slice may be an elementwise function of slices of the
same timesteps (``gamma * (1 - done[t:])``), as long as it does not depend on the reader's own time otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, with_equations
from rlfx.recurrence.language.index import LENGTH, TIME, Index, Slice
from rlfx.recurrence.language.primitives import discounted_sum_p, series_p

_SUM = J.primitive("reduce_sum")
#: Reductions to an extreme: whether a value comes before another, and which of two does.
_EXTREMES = {
    J.primitive("reduce_max"): (jax.lax.gt, jax.lax.max),
    J.primitive("reduce_min"): (jax.lax.lt, jax.lax.min),
}
_BROADCAST = J.primitive("broadcast_in_dim")


@dataclasses.dataclass(frozen=True)
class Span:
    """Which timesteps a slice holds, relative to its reader: ``sign`` +1 from t on, -1 up to t; ``count`` None is all."""

    sign: int
    count: int | None


def span_of(access: Any, length: int) -> Span | None:
    """The span of a slice access, if lifting knows it."""
    if not isinstance(access, Slice):
        return None
    if access.lo == TIME:
        if access.hi == LENGTH:
            return Span(+1, None)
        n = (access.hi - TIME).constant if access.hi.offset is not None else 0
        return Span(+1, n) if 1 <= n < length else Span(+1, None) if n >= length else None
    if access.hi == TIME + 1:
        if access.lo == Index():
            return Span(-1, None)
        n = 1 - access.lo.offset if access.lo.offset is not None else 0
        return Span(-1, n) if 1 <= n < length else Span(-1, None) if n >= length else None
    return None


def lift(program: Program) -> Program:
    """Rewrite the reductions of the table above. Meaning-preserving up to reassociation; idempotent."""
    spans = _spans(program)
    rewritten: list[Equation] = []
    changed = False
    builder = Builder(program)
    points = _Points(program, builder)
    for equation in program.equations:
        builder.equations = []
        result = _lift_one(equation, spans, points, builder)
        if result is None:
            rewritten.append(equation)
            continue
        changed = True
        (out,) = equation.outputs
        rewritten += builder.equations
        rewritten.append(Equation(series_p, {}, (result,), (out,), equation.where, equation.scope))
    if not changed:
        return program
    return with_equations(program, live(tuple(rewritten), program))


def reaches(
    equation: Equation,
    goal: Equation,
    definition: Mapping[Atom, Equation],
    inputs: Callable[[Equation], Iterable[Atom]] = lambda e: e.inputs,
) -> bool:
    """Whether an equation depends on what another one computes, at this or any other timestep, by those ``inputs`` of each."""
    return goal in ancestors(equation, definition, inputs)


def ancestors(
    equation: Equation, definition: Mapping[Atom, Equation], inputs: Callable[[Equation], Iterable[Atom]] = lambda e: e.inputs
) -> set[Equation]:
    """What an equation depends on, at this or any other timestep; itself, if it is part of a recurrence."""
    todo, seen = [equation], set()
    while todo:
        found = (definition.get(v) for v in inputs(todo.pop()))
        new = {e for e in found if e is not None} - seen
        seen |= new
        todo += new
    return seen


def _lift_one(equation: Equation, spans_of: Mapping, points_of: _Points, build: Builder) -> Atom | None:
    """The value of a reduction at one point, from equations that ``build`` received; None if it is not lifted."""
    if equation.op is discounted_sum_p:
        operands = equation.inputs
    elif (
        equation.op is _SUM and 0 in equation.params["axes"] and jnp.issubdtype(equation.outputs[0].dtype, jnp.inexact)
    ):
        operands = equation.inputs[:1]
    elif equation.op in _EXTREMES and equation.params["axes"] == (0,):
        operands = equation.inputs
    else:
        return None
    if not all(o in spans_of for o in operands):
        return None
    spans = frozenset().union(*(spans_of[o] for o in operands))
    if len(spans) != 1:
        return None
    (span,) = spans
    extreme = equation.op in _EXTREMES
    if (equation.op is discounted_sum_p and span.sign < 0) or (extreme and span.count is not None):
        return None
    points = [points_of(o) for o in operands]
    if extreme:
        return _extreme(points[0], span, equation, build)
    if equation.op is discounted_sum_p and not _is_finite(operands[1], points_of.definition):
        points[1] = _unless_last(points[1], equation, build)
    if equation.op is _SUM:
        axes = tuple(a - 1 for a in equation.params["axes"] if a)
        points = [build.call(lambda x: jnp.sum(x, axis=axes), points, equation)] if axes else points
    scanned = _recurrence if span.count is None else _doubling
    return scanned(points, span, equation, build)


def _spans(program: Program) -> dict[Var, frozenset[Span]]:
    """The values that are, position by position, functions of slices, with the spans of these slices."""
    found: dict[Var, frozenset[Span]] = {}
    for e in program.equations:
        if e.is_read:
            span = span_of(e.access, program.domain.length)
            spans = None if span is None else frozenset({span})
        elif e.op is _BROADCAST:
            source, *more = e.inputs
            kept = 0 not in e.params["broadcast_dimensions"]
            spans = frozenset() if kept and not more and "t" not in program.dims_of(source) else None
        elif e.op in J.ELEMENTWISE or e.op is series_p:
            spans = _joint_spans(e, program, found)
        else:
            spans = None
        if spans is not None:
            found.update(dict.fromkeys(e.outputs, spans))
    return found


def _joint_spans(equation: Equation, program: Program, known: Mapping[Any, frozenset]) -> frozenset[Span] | None:
    """The spans of an elementwise operation on slices, and on scalars that are the same at every timestep."""
    rank = len(equation.outputs[0].shape)
    wide = [o for o in equation.inputs if len(o.shape) == rank and isinstance(o, Var)]
    others = [o for o in equation.inputs if not (len(o.shape) == rank and isinstance(o, Var))]
    if any(len(o.shape) or "t" in program.dims_of(o) for o in others) or not all(o in known for o in wide):
        return None
    return frozenset().union(*(known[o] for o in wide))


class _Points:
    """The elements of position-wise slices at the reader's own time, each of them made once."""

    def __init__(self, program: Program, build: Builder):
        self.definition, self.order, self.build = program.definitions(), program.places, build
        self.made: dict[Atom, Atom] = {}

    def __call__(self, atom: Atom) -> Atom:
        needed: set[Equation] = set()
        todo = [atom]
        while todo:
            v = todo.pop()
            if v not in self.made and (equation := self.definition[v]) not in needed:
                needed.add(equation)
                todo += self._elementwise(equation)
        for equation in sorted(needed, key=self.order.__getitem__):
            self.made[equation.outputs[0]] = self._make(equation)
        return self.made[atom]

    def _elementwise(self, equation: Equation) -> list[Var]:
        """The operands of which an element is the operand of the element."""
        if equation.is_read or equation.op is _BROADCAST:
            return []
        rank = len(equation.outputs[0].shape)
        return [a for a in equation.inputs if isinstance(a, Var) and len(a.shape) == rank]

    def _make(self, equation: Equation) -> Atom:
        build = self.build
        if equation.is_read:
            return build.read(equation.source, TIME, equation)
        if equation.op is _BROADCAST:
            shape = tuple(equation.params["shape"][1:])
            where = tuple(d - 1 for d in equation.params["broadcast_dimensions"])
            return build.call(lambda x: jax.lax.broadcast_in_dim(x, shape, where), equation.inputs, equation)
        own = set(self._elementwise(equation))
        inputs = tuple(self.made[a] if a in own else a for a in equation.inputs)
        result = build.var(equation.outputs[0].shape[1:], equation.outputs[0].dtype)
        made = Equation(equation.op, equation.params, inputs, (result,), equation.where, equation.scope)
        build.equations.append(made)
        return result


def _is_finite(discount: Atom, definition: dict) -> bool:
    """Whether a slice holds one finite constant."""
    value = definition[discount].inputs[0]
    return isinstance(value, Lit) and bool(np.all(np.isfinite(value.value)))


def _unless_last(discount: Atom, equation: Equation, build: Builder) -> Atom:
    """The discount, 0 at the last timestep: nothing follows, and whatever it is there must not be multiplied with that."""
    inside = build.read(build.name(Lit(np.asarray(True)), equation), TIME + 1, equation, boundary=False)
    return build.call(lambda i, d: jax.lax.select(i, d, jnp.zeros_like(d)), [inside, discount], equation)


def _carried(
    step: Callable, others: Sequence[Atom], boundary: Any, span: Span, equation: Equation, build: Builder
) -> tuple[Var, Var]:
    """``(g, its neighbour)`` of ``g = step(*others, g[t +- 1])``, of the shape of the first of the others."""
    total = build.var(others[0].shape, equation.outputs[0].dtype)
    neighbour = build.read(total, TIME + span.sign, equation, boundary=boundary)
    value = build.call(step, [*others, neighbour], equation)
    build.equations.append(Equation(series_p, {}, (value,), (total,), equation.where, equation.scope))
    return total, neighbour


def _recurrence(points: list[Atom], span: Span, equation: Equation, build: Builder) -> Atom:
    """``g = r + d * g[t +- 1]``."""
    step = (lambda r, d, g: r + d * g) if len(points) == 2 else (lambda x, g: x + g)
    return _carried(step, points, 0, span, equation, build)[0]


def _extreme(x: Atom, span: Span, equation: Equation, build: Builder) -> Atom:
    """``m = max(x, m[t +- 1])``.

    Its derivative is shared evenly by the timesteps that attain it, as that of a reduction is: the recurrences of how many
    they are, and of the sum of their derivatives, go beside it.
    """
    before, chosen = _EXTREMES[equation.op]
    select, stop = jax.lax.select, jax.lax.stop_gradient

    def count(x, m, n):
        x, one = stop(x), jnp.ones_like(n)
        return select(before(x, m), one, select(before(m, x), n, select(x == m, n + one, jnp.zeros_like(n))))

    def derivative(x, m, d):
        own, x = _derivative(x), stop(x)
        return select(before(x, m), own, select(x == m, own + d, d))

    identity = _identity(equation)
    extreme, neighbour = _carried(lambda x, m: chosen(stop(x), m), [x], identity, span, equation, build)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return extreme
    attained, _ = _carried(count, [x, neighbour], 0, span, equation, build)
    slopes, _ = _carried(derivative, [x, neighbour], 0, span, equation, build)
    return build.call(_with_derivative, [extreme, slopes, attained], equation)


def _identity(equation: Equation) -> Any:
    """What an extreme of nothing is."""
    dtype, lowest = equation.outputs[0].dtype, equation.op is J.primitive("reduce_max")
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf if lowest else np.inf
    if dtype == np.bool_:
        return not lowest
    return jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max


@jax.custom_jvp
def _derivative(x: Any) -> Any:
    """Zero, with the derivative of ``x``: what is added up of it stays exact, whatever ``x`` is."""
    zero = jnp.zeros_like(x)
    return jax.lax.select(x == x, zero, zero)  # a constant would not be mapped over the axes of its derivative


_derivative.defjvp(lambda primals, tangents: (_derivative(primals[0]), tangents[0]))


@jax.custom_jvp
def _with_derivative(value: Any, slopes: Any, count: Any) -> Any:
    """``value``, with the derivative of ``slopes / count``."""
    return value


_with_derivative.defjvp(lambda primals, tangents: (primals[0], tangents[1] / primals[2]))


def _doubling(points: list[Atom], span: Span, equation: Equation, build: Builder) -> Atom:
    """Windows of n from windows of powers of two; beyond the domain there is nothing to add."""
    assert span.count is not None
    weight = points[1] if len(points) == 2 else None
    power, width = points[0], 1  # the window of `width` timesteps from t on, and the product of its discounts
    total: Atom | None = None
    done, reach = 0, None
    remaining = span.count

    def ahead(value: Atom, by: int, boundary: float) -> Atom:
        return (
            value
            if by == 0
            else build.read(build.name(value, equation), TIME + span.sign * by, equation, boundary=boundary)
        )

    while remaining:
        if remaining & 1:
            piece, product = ahead(power, done, 0.0), weight if weight is None else ahead(weight, done, 1.0)
            if total is None:
                total, reach = piece, product
            elif reach is None:
                total = build.call(lambda a, b: a + b, [total, piece], equation)
            else:
                total = build.call(lambda a, p, b: a + p * b, [total, reach, piece], equation)
                reach = build.call(lambda p, q: p * q, [reach, product], equation)
            done += width
        remaining >>= 1
        if not remaining:
            break
        later = ahead(power, width, 0.0)
        if weight is None:
            power = build.call(lambda a, b: a + b, [power, later], equation)
        else:
            power = build.call(lambda a, p, b: a + p * b, [power, weight, later], equation)
            weight = build.call(lambda p, q: p * q, [weight, ahead(weight, width, 1.0)], equation)
        width *= 2
    assert total is not None
    return total
