"""A traced timestep as a list of equations: calls inlined, declared series tied to their definitions, reads hoisted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, UnsupportedSliceOp, located
from rlfx.recurrence.ir.derivatives import Custom, Function
from rlfx.recurrence.ir.hoist import hoist, why_not
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Var
from rlfx.recurrence.language.context import told_together
from rlfx.recurrence.language.effects import effect_p, inside
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.language.primitives import (
    ACCESS_PRIMITIVES,
    EVENT,
    custom_p,
    declare_p,
    define_p,
    now_p,
    read_p,
    series_p,
)


@dataclass
class Flattener:
    """Builds the equation list: inlines calls, ties declared series to their definitions, hoists reads.

    Attributes:
      events: computed times that stand alone as bounds of slices, each with the user's line.
      values_only: whether no derivative will be taken.
    """

    now: Var
    ids: Any = field(default_factory=itertools.count)
    equations: list[Equation] = field(default_factory=list)
    knots: dict[Var, Var] = field(default_factory=dict)
    events: list[tuple[Atom, str]] = field(default_factory=list)
    values_only: bool = False

    def var(self, aval: Any) -> Var:
        """A new value."""
        return Var(next(self.ids), tuple(aval.shape), aval.dtype)

    def emit(self, op, params, inputs, avals, where="", scope="", effects=False) -> tuple[Var, ...]:
        """Append an equation; its outputs."""
        outputs = tuple(self.var(a) for a in avals)
        self.equations.append(Equation(op, dict(params), tuple(inputs), outputs, where, scope, effects))
        return outputs

    def run(self, jaxpr: Any, consts: Sequence[Atom], args: Sequence[Atom], caller: str = "") -> list[Atom]:
        """Flatten a body. Calls are cached by jax with the lines of their first use: ``caller`` is the line of this one."""

        def visit(eqn: Any, inputs: list[Atom], within: tuple) -> Sequence[Atom]:
            return self._equation(eqn, inputs, caller or next(filter(None, map(J.source_of, within)), ""))

        return J.walk(jaxpr, consts, args, visit, inlines=self._inlines, literal=lambda a: Lit(a.val), constant=Lit)

    def _inlines(self, eqn: Any) -> bool:
        """Whether a call has no meaning of its own, or would hide reads or slices of symbolic length."""
        if eqn.primitive in J.INLINED:
            return True
        return J.is_call(eqn.primitive) and _is_about_slices(eqn) and not self._is_custom(eqn)

    def _is_custom(self, eqn: Any) -> bool:
        """Whether a call has a derivative of its own, of slices."""
        return not self.values_only and J.has_own_derivative(eqn) and _is_about_slices(eqn)

    def _equation(self, eqn: Any, inputs: list[Atom], caller: str) -> Sequence[Atom]:
        where, scope, avals = caller or J.source_of(eqn), J.scope_of(eqn), [v.aval for v in eqn.outvars]
        op, params = eqn.primitive, eqn.params
        if op is now_p:
            return [self.now]
        if op is declare_p:
            return [self.var(avals[0])]
        if op is define_p:
            declared, value = inputs
            (named,) = self.emit(series_p, {}, [value], avals, where, scope)
            self.knots[declared] = named  # type: ignore[index]
            return [named]
        if op is read_p and params["access"] == Point(TIME) and _is_ragged(eqn) and self._is_defined(inputs[0]):
            return [inputs[0]]  # its length is that of its own timestep: it is kept for no other
        if op.name == "name" and params["name"] == EVENT:
            self.events.append((inputs[0], where))
            return inputs
        if self._is_custom(eqn):
            return self._custom(eqn, inputs, where, scope)
        for e in (eqn, *J.equations_in(params)):
            if e.primitive is effect_p and e is not eqn:
                raise inside(f"{op.name} of jax", where)
            if together := J.draws_together(e):
                raise told_together("A random number of a key that the program was not called with", together, where)
        if _reaches_out(params):
            return self._hoist(eqn, inputs, where, scope)
        return self.emit(op, J.with_own_cotangents(op, params), inputs, avals, where, scope, bool(eqn.effects))

    def _is_defined(self, value: Atom) -> bool:
        return any(value in e.outputs for e in self.equations)

    def _custom(self, eqn: Any, inputs: list[Atom], where: str, scope: str) -> Sequence[Atom]:
        """A call with a derivative of its own, of slices: its equations, and those of its derivative."""
        closed = any(J.is_inexact(v.aval) for v in eqn.invars[: J.closure_count(eqn.params)])
        if closed or _reaches_out(eqn.params):
            raise _closes_over(where)
        body, consts = J.call_body(eqn.primitive, eqn.params)

        def derive() -> Function:
            try:
                return self._function(*J.backward_of(eqn), where)
            except J.UnexpectedTracerError as error:
                raise _closes_over(where) from error
            except (TypeError, ValueError, NotImplementedError, *J.InconclusiveDimension) as error:
                raise UnsupportedSliceOp(
                    located(
                        "The derivative that this function is given has no meaning on a slice whose length depends on t: "
                        + str(error).splitlines()[0],
                        where=where,
                        fix="Call it on a window of fixed length, x.window(lo, hi, fill=v), or on x[t] before x is named.",
                    )
                ) from error

        primal = self._function(body, consts, where, values_only=True)
        custom = Custom(primal, eqn.primitive is J.CUSTOM_JVP, derive)
        avals = [v.aval for v in eqn.outvars]
        return self.emit(custom_p, {"custom": custom}, inputs, avals, where, scope, bool(eqn.effects))

    def _function(self, jaxpr: Any, consts: Sequence, where: str, values_only: bool = False) -> Function:
        inner = Flattener(self.now, self.ids, values_only=values_only)
        args = [inner.var(v.aval) for v in jaxpr.invars]
        outs = inner.run(jaxpr, [Lit(c) for c in consts], args, where)
        return Function(tuple(args), inner.tied(), tuple(outs))

    def _hoist(self, eqn: Any, inputs: list[Atom], where: str, scope: str) -> Sequence[Atom]:
        """Move the reads inside a cond or scan before it: their values become operands."""
        hoisted = hoist(eqn, lambda p: p in ACCESS_PRIMITIVES)
        if hoisted is None:
            fact, fix = why_not(eqn, lambda p: p in ACCESS_PRIMITIVES)
            raise ProgramError(located(fact, where=where, fix=fix))
        early: list[Atom] = []
        for op, params, positions, aval in hoisted.equations:
            args = [inputs[p] if isinstance(p, int) else Lit(p.val) for p in positions]
            early += [self.now] if op is now_p else self.emit(op, params, args, [aval], where, scope)
        if hoisted.body is not None:
            jaxpr, consts = hoisted.body
            return self.run(jaxpr, [Lit(c) for c in consts], hoisted.place(inputs, early), where)
        avals = [v.aval for v in eqn.outvars]
        params = J.with_own_cotangents(eqn.primitive, hoisted.params)
        return self.emit(eqn.primitive, params, hoisted.place(inputs, early), avals, where, scope)

    def tied(self) -> tuple[Equation, ...]:
        """The equations, with every read of a declared series reading its definition."""
        definition = {v: e for e in self.equations for v in e.outputs}

        def tie(e: Equation) -> Equation:
            source = self.knots.get(e.inputs[0]) if e.is_read else None
            return e if source is None else replace(e, inputs=(source, *e.inputs[1:]))

        return tuple(_with_static_index(tie(e), definition) for e in self.equations)


def _with_static_index(equation: Equation, definition: dict[Var, Equation]) -> Equation:
    """Note the constant position of a slice of a slice (``x[t:][1:]``), which jax hands over as an array."""
    if equation.op is not J.primitive("gather") or not equation.is_ragged:
        return equation
    index = equation.inputs[1]
    source = definition.get(index) if isinstance(index, Var) else None
    if source is not None and source.op is J.primitive("broadcast_in_dim") and isinstance(source.inputs[0], Lit):
        index = Lit(np.broadcast_to(np.asarray(source.inputs[0].value), source.outputs[0].shape))
    if not isinstance(index, Lit):
        return equation
    params = {**equation.params, "rlfx_static_indices": np.asarray(index.value)}
    return replace(equation, params=params)


def _closes_over(where: str) -> ProgramError:
    return ProgramError(
        located(
            "A function with a derivative of its own (jax.custom_vjp, jax.custom_jvp) closes over a value of the program, or "
            "reads another timestep: its derivative knows nothing of that.",
            where=where,
            fix="Read the series before, and pass the value as an argument: f(y, x[t]).",
        )
    )


def _reaches_out(params: dict) -> bool:
    return any(eqn.primitive in ACCESS_PRIMITIVES for eqn in J.equations_in(params))


def _is_about_slices(eqn: Any) -> bool:
    return _is_ragged(eqn) or _reaches_out(eqn.params)


def _is_ragged(eqn: Any) -> bool:
    return any(J.symbolic_axes(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars))
