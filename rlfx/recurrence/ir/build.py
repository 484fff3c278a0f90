"""Equations that rewrites add to a program, or put in the place of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, with_equations
from rlfx.recurrence.language.index import Index, Point
from rlfx.recurrence.language.primitives import read_p, series_p


class Builder:
    """Appends equations to a program."""

    def __init__(self, program: Program):
        self.program = program
        used = [v.id for e in program.equations for v in e.outputs] + [v.id for v in program.inputs]
        self.ids = itertools.count(max(used, default=0) + 1)
        self.equations: list[Equation] = []

    def var(self, shape: tuple, dtype: Any) -> Var:
        return Var(next(self.ids), tuple(shape), dtype)

    def read(self, source: Var, index: Index, like: Equation, *, boundary: Any = None) -> Var:
        """``source[index]``; ``boundary`` is what it gives outside of the domain."""
        ahead = (index.offset or 0) > 0
        edges = () if boundary is None else (Lit(np.broadcast_to(np.asarray(boundary, source.dtype), source.shape)),)
        params = {
            "access": Point(index),
            "size": None,
            "start": boundary is not None and not ahead,
            "end": boundary is not None and ahead,
        }
        out = self.var(source.shape, source.dtype)
        self.equations.append(Equation(read_p, params, (source, *edges), (out,), like.where, like.scope))
        return out

    def call(self, fn: Callable, inputs: Iterable[Atom], like: Equation) -> Atom:
        """Trace ``fn`` at one point and append its equations; returns its one output."""
        (out,) = self.calls(fn, inputs, like)
        return out

    def calls(self, fn: Callable, inputs: Iterable[Atom], like: Equation) -> list[Atom]:
        """As :meth:`call`, of any number of outputs."""
        inputs = list(inputs)
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
        jaxpr, consts = J.make_jaxpr(fn)(*structs)

        def visit(eqn: Any, ins: list[Atom], within: tuple) -> tuple[Var, ...]:
            outs = tuple(self.var(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
            self.equations.append(Equation(eqn.primitive, eqn.params, tuple(ins), outs, like.where, like.scope))
            return outs

        as_it_is, literal = (lambda eqn: False), (lambda atom: Lit(atom.val))
        return J.walk(jaxpr, [Lit(c) for c in consts], inputs, visit, inlines=as_it_is, literal=literal)

    def instead(self, fn: Callable, inputs: Iterable[Atom], equation: Equation) -> list[Equation]:
        """The equations of ``fn`` at one point, in place of an equation with one output; none is appended."""
        self.equations = []
        self.call(fn, inputs, equation)
        *before, last = self.equations
        return [*before, replace(last, outputs=equation.outputs)]

    def name(self, value: Atom, like: Equation, op: Any = series_p) -> Var:
        """The value once more; ``op``: an identity."""
        out = self.var(value.shape, value.dtype)
        self.equations.append(Equation(op, {}, (value,), (out,), like.where, like.scope))
        return out


def live(equations: tuple[Equation, ...], program: Program) -> tuple[Equation, ...]:
    """The equations on which the program's outputs depend."""
    definition = {v: e for e in equations for v in e.outputs}
    seen: set[Equation] = set()
    seen.update(e for e in equations if e.has_effects)
    todo = [v for e in seen for v in e.inputs if isinstance(v, Var)]
    todo += [v for v in program.returned if isinstance(v, Var)]
    while todo:
        equation = definition.get(todo.pop())
        if equation is not None and equation not in seen:
            seen.add(equation)
            todo += [v for v in equation.inputs if isinstance(v, Var)]
    return tuple(e for e in equations if e in seen)


def exchanged(program: Program, instead: Callable[[Equation], tuple[Callable, Sequence[Atom]] | None]) -> Program:
    """The program with other equations for some of its own, each of one output, and without those that nothing needs then.

    If none is exchanged, it is ``program``.

    Args:
      instead: of an equation, a function of values at one point that computes its output, and these; None: it stays.
    """
    found = {e: other for e in program.equations if (other := instead(e)) is not None}
    if not found:
        return program
    build = Builder(program)
    others = [build.instead(*found[e], e) if e in found else [e] for e in program.equations]
    return with_equations(program, live(tuple(itertools.chain.from_iterable(others)), program))


def with_calls(program: Program, instead: Callable[[Equation], Callable | None]) -> Program:
    """The program with other equations for some of its own, of any number of outputs; if none is exchanged, it is ``program``.

    Args:
      instead: of an equation, a function of its inputs at one point that computes its outputs; None: it stays.
    """
    build, equations, other = Builder(program), [], {}
    for e in program.equations:
        fn = instead(e)
        if fn is not None:
            build.equations = []
            outs = build.calls(fn, e.inputs, e)
            equations += build.equations
            found = (other.get(out, out) if isinstance(out, Var) else out for out in outs)
            other |= dict(zip(e.outputs, found, strict=True))
        equations.append(e)
    return substituted(with_equations(program, equations), other) if other else program


def substituted(program: Program, instead: Mapping[Var, Atom]) -> Program:
    """The program without the equations that give some values, and with others in place of these; without any ``program``."""
    if not instead:
        return program

    def of(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(instead.get(a, a) if isinstance(a, Var) else a for a in atoms)

    kept = [replace(e, inputs=of(e.inputs)) for e in program.equations if instead.keys().isdisjoint(e.outputs)]
    (loss,), next_carry, aux = of((program.loss,)), of(program.next_carry), of(program.aux)
    return replace(with_equations(program, kept), loss=loss, next_carry=next_carry, aux=aux)
