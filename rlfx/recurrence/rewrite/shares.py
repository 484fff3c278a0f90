"""What the loss makes of sums over all timesteps, with a derivative of which each point has its share.

A penalty on the mean of gates, the entropy of the mean policy, a multiplier times a mean divergence, the preference between two
whole trajectories: as they are written, their gradients need all timesteps at once. But that of ``y(mean x)`` is the mean of
``y'(mean x) dx[t, b]``: the slope is known when learning begins, since acting finds the mean, and any part of the domain can be
learned from on its own. ``loss = l + y(mean x)`` becomes ``l + z``, whose value is y and whose derivative is
``y'(mean x) dx``. Where y is another function at each point, the slope is the mean of its slopes.

A sum of what depends on another such sum (a variance about a mean) stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, differentiated, float_inputs
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.derivatives import Function
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, with_equations
from rlfx.recurrence.language.primitives import aside_p, series_p

_SUMMED = frozenset({J.ADD_ANY, series_p, *map(J.primitive, ("add", "sub", "neg", "convert_element_type"))})
_SCALED = frozenset(map(J.primitive, ("mul", "div")))
_BODIES = frozenset({J.SCAN, J.WHILE, J.COND, J.REMAT, J.CUSTOM_VJP})


def with_shares(program: Program) -> Program:
    """The program whose loss has a derivative at each point of what it makes of sums over time; it itself if that is not so.

    Meaning-preserving: values and derivatives of any order are those of the program.
    """
    if not isinstance(program.loss, Var) or not any(e.is_over_time for e in program.equations):
        return program
    chain, terms = _terms(program)
    found = {v: one for v in terms if (one := _find(program, v)) is not None}
    if not found:
        return program
    build = Builder(program)
    instead = {v: one.shared(build) for v, one in found.items()}
    for e in chain:
        if not instead.keys().isdisjoint(e.inputs):
            (out,) = e.outputs
            instead[out] = build.var(out.shape, out.dtype)
            inputs = tuple(instead.get(v, v) if isinstance(v, Var) else v for v in e.inputs)
            build.equations.append(replace(e, inputs=inputs, outputs=(instead[out],)))
    equations = (*program.equations, *build.equations)
    other = replace(program, loss=instead[program.loss], equations=equations)
    other = with_equations(other, live(equations, other))
    return program if any(e.is_over_time for e in _active(other, other.loss)) else other


@dataclass(frozen=True, eq=False)
class _Made:
    """A term of the loss, and how it is made of sums over time.

    Attributes:
      sums: over time, of what moves.
      others: what else it is made of.
      term: of the sums and the others.
    """

    sums: tuple[Equation, ...]
    others: tuple[Var, ...]
    term: Function

    def shared(self, build: Builder) -> Var:
        """Append what is this term at each point, with the derivative that the point has a share of."""
        like = build.program.definitions()[self._value]
        known = [build.name(e.outputs[0], like, aside_p) for e in self.sums]
        slopes = build.calls(self._slopes, (*known, *self.others), like)
        weights = [self._weight(build, e, v, like) for e, v in zip(self.sums, slopes, strict=True)]
        elements = [v for e in self.sums for v in e.inputs]
        found = build.call(self._at_a_point, (*known, *self.others, *weights, *elements), like)
        assert isinstance(found, Var)
        return found

    @property
    def _value(self) -> Var:
        (value,) = self.term.outputs
        assert isinstance(value, Var)
        return value

    def _slopes(self, *values: Any) -> list:
        """The term's derivatives with respect to the sums."""
        n = len(self.sums)
        return list(jax.grad(lambda *sums: self._of(*sums, *values[n:]), tuple(range(n)))(*values[:n]))

    def _weight(self, build: Builder, e: Equation, slope: Atom, like: Equation) -> Atom:
        """What an element of a sum weighs: the mean of the slopes at all points that have this sum, times the count of a sum."""
        if not {"t", "b"}.isdisjoint(build.program.dims_of(self._value) & set(e.params["over"])):
            slope, given = build.var(slope.shape, slope.dtype), slope
            params = {"op": "mean", "over": e.params["over"]}
            build.equations.append(replace(e, params=params, inputs=(given,), outputs=(slope,)))
        if e.params["op"] == "sum":
            count = build.var((), slope.dtype)
            params = {"op": "sum", "over": e.params["over"]}
            build.equations.append(replace(e, params=params, inputs=(Lit(np.ones((), slope.dtype)),), outputs=(count,)))
            slope = build.call(jnp.multiply, (slope, count), like)
        return build.name(slope, like, aside_p)

    def _at_a_point(self, *values: Any) -> Any:
        """The term; what elements weigh, and elements, are needed by its derivative alone."""
        n, m = len(self.sums), len(self.others)

        @jax.custom_jvp
        def term(*values: Any) -> Any:
            return _at(values[2 * n + m :], self._of(*values[: n + m]))

        def derivative(values: tuple, tangents: tuple) -> tuple:
            others, by = values[n : n + m], tangents[n : n + m]
            moving = [i for i, x in enumerate(by) if not isinstance(x, _Zero)]

            def of(*some: Any) -> Any:
                at = dict(enumerate(others)) | dict(zip(moving, some, strict=True))
                return self._of(*values[:n], *at.values())

            found, moved = jax.jvp(of, [others[i] for i in moving], [by[i] for i in moving])
            at = 2 * n + m
            for weight, e in zip(values[n + m : at], self.sums, strict=True):
                last = at + len(e.inputs)
                for i, x in enumerate(tangents[at:last]):
                    if not isinstance(x, _Zero):
                        moved += jnp.sum(_weight_of(e, i, weight, values[at:last]) * x).astype(moved.dtype)
                at = last
            return _at(values[2 * n + m :], found), moved

        term.defjvp(derivative, symbolic_zeros=True)
        return term(*values)

    def _of(self, *values: Any) -> Any:
        """The term, of the sums and the others."""
        (found,) = self.term.run(values, jnp.asarray, _evaluate)
        return found


def _weight_of(e: Equation, i: int, weight: Any, factors: Sequence) -> Any:
    """What an element of a sum weighs, or, of an outer product, one of its factors."""
    outer = e.params.get("outer")
    return weight if outer is None else outer.slope(i, weight, factors)


def _evaluate(e: Equation, operands: Sequence) -> Sequence:
    return operands if e.op is series_p else J.bind(e.op, dict(e.params), *operands)


_Zero = jax.custom_derivatives.SymbolicZero


def _at(elements: Sequence, value: Any) -> Any:
    """The value, varying with what its derivative varies with: under ``jax.vmap`` jax 0.11 counts on that. (XLA removes it.)"""
    here = functools.reduce(jnp.logical_and, ((x == x).all() for x in elements))
    return jnp.where(here, value, value)


def _terms(program: Program) -> tuple[list[Equation], list[Var]]:
    """What the loss adds up, at each point: the equations that do, in program order, and the terms."""
    definition, chain, terms = program.definitions(), set(), []
    todo, seen = [program.loss], set()
    while todo:
        v = todo.pop()
        if not isinstance(v, Var) or v in seen:
            continue
        seen.add(v)
        e = definition.get(v)
        if "t" not in program.dims_of(v):
            terms.append(v)
        elif e is not None and (e.op in _SUMMED or (e.op in _SCALED and isinstance(e.inputs[-1], Lit))):
            chain.add(e)
            todo += e.inputs
        else:
            terms.append(v)
    return sorted(chain, key=program.places.__getitem__), terms


def _find(program: Program, value: Var) -> _Made | None:
    """How a term is made of sums over time that its derivative goes through; None if it is not, or not of shares."""
    active = _active(program, value)
    sums = tuple(e for e in program.equations if e in active and e.is_over_time)
    if not sums or any(e.params["op"] not in ("sum", "mean") for e in sums):
        return None
    given = tuple(v for e in sums for v in e.outputs)
    made, between = set(given), []
    for e in program.equations:
        if e in active and not e.is_over_time and not made.isdisjoint(differentiated(e)):
            made.update(e.outputs)
            between.append(e)
    others = tuple(dict.fromkeys(v for e in between for v in e.inputs if isinstance(v, Var) and v not in made))
    plain = all(_is_plain(e, program) for e in between) and not any(_is_complex(v) for v in (*made, *others))
    if value not in made or not plain or any(not made.isdisjoint(differentiated(e)) for e in sums):
        return None  # (Where it depends on them by what other timesteps carry alone, it is no function of theirs.)
    return _Made(sums, others, Function((*given, *others), tuple(between), (value,)))


def _is_complex(v: Var) -> bool:
    return jnp.issubdtype(v.dtype, jnp.complexfloating)


def _is_plain(e: Equation, program: Program) -> bool:
    """Whether an equation can be evaluated, and differentiated in reverse, at a point; at each timestep for little."""
    heavy = e.op in PRODUCTS and "t" in program.dims_of(e.outputs[0])
    return e.is_pointwise and not (e.has_effects or e.is_ragged or e.calls or e.op in _BODIES or heavy)


def _active(program: Program, value: Atom) -> frozenset[Equation]:
    """The equations on a way from an input of the program to a value, by which it has a derivative."""
    return active_equations(program, float_inputs(program), [v for v in (value,) if isinstance(v, Var)])
