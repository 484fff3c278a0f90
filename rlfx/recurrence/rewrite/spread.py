"""What is the same along an axis is computed once and spread after it: ``broadcast_to(x, (n, d)) @ w`` is ``x @ w``, spread.

Rollouts of several models, or of several plans, all begin at one state. As they are written, the policy is evaluated for each of
them, though at the first timestep they see the same. Under ``jax.vmap`` jax knows what has no such axis; what is spread by hand
it does not, nor does XLA. Before and after, for x[d]:

    y = broadcast(x, [4, d]); z = tanh(y @ w)   ->   y = broadcast(x, [1, d]); z = broadcast(tanh(y @ w), [4, n])

Only what leads to such a product, or follows from one, is computed once: anything else XLA spreads for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import Nest, elementwise, nest_of, resized
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations

_BROADCAST, _DOT, _MAX = map(J.primitive, ("broadcast_in_dim", "dot_general", "max"))

#: For each value the axes along which it is the same, where there are such.
Same = Mapping[Var, frozenset[int]]


def with_spread_after(program: Program) -> Program:
    """The program with products of what is spread computed once; without any ``program``. Meaning-preserving; idempotent."""
    same: dict[Var, frozenset[int]] = {}
    for e in program.equations:
        same |= {v: axes for v, axes in _same(e, same).items() if axes}
    once = _worth(program, same)
    if not once:
        return program
    spreading = _Spreading(program, same)
    for e in program.equations:
        spreading.add(e, once=e in once)
    return with_equations(program, live(tuple(spreading.build.equations), program))


def loops_of(e: Equation) -> Nest | None:
    """The loops of an equation, of ``jax.nn.relu`` too; None if it has no place in the table."""
    shapes = [v.shape for v in e.inputs], [v.shape for v in e.outputs]
    return elementwise(e.params, *shapes) if is_relu(e) else nest_of(e.op, e.params, *shapes)


def is_relu(e: Equation) -> bool:
    """Whether it is ``jax.nn.relu``, whose own derivative has the shape with which it was traced."""
    if e.op is not J.CUSTOM_JVP or len(e.inputs) != 1:
        return False
    inside = [q for q in J.equations_in(e.params) if q.primitive not in J.INLINED]
    return [q.primitive for q in inside] == [_MAX] and any(J.is_literal(v) and v.val == 0 for v in inside[0].invars)


def relu(x: Any) -> Any:
    """As ``jax.nn.relu``, with its derivative at 0."""
    return jax.lax.select_n(x <= 0, x, jnp.zeros_like(x))  # no call, as `jnp.where` is one


def _same(e: Equation, same: Same) -> dict[Var, frozenset[int]]:
    """The axes along which the outputs of an equation are the same: so are all operands that have them."""
    could = e.op is _BROADCAST or not same.keys().isdisjoint(v for v in e.inputs if isinstance(v, Var))
    if not could or not e.is_pointwise or e.is_ragged or e.has_effects or (it := loops_of(e)) is None:
        return {}

    def alike(loop: int) -> bool:
        given = [
            isinstance(v, Var) and axis in same.get(v, ())
            for v, axes in zip(e.inputs, it.operands, strict=True)
            for axis, mine in enumerate(axes)
            if mine == loop
        ]
        return all(given) and (bool(given) or e.op is _BROADCAST) and loop not in it.reduced | it.pinned

    return {
        v: frozenset(a for a, loop in enumerate(axes) if loop is not None and v.shape[a] != 1 and alike(loop))
        for v, axes in zip(e.outputs, it.results, strict=True)
    }


def _worth(program: Program, same: Same) -> frozenset[Equation]:
    """The equations of what is spread that lead to a product, or follow from one."""
    spread = [e for e in program.equations if e.op is not _BROADCAST and not same.keys().isdisjoint(e.outputs)]
    found = {e for e in spread if e.op is _DOT}
    for equations, of, gives in ((spread[::-1], "outputs", "inputs"), (spread, "inputs", "outputs")):
        known = {v for e in found for v in getattr(e, gives) if isinstance(v, Var)}
        for e in equations:
            if not known.isdisjoint(v for v in getattr(e, of) if isinstance(v, Var)):
                found.add(e)
                known.update(v for v in getattr(e, gives) if isinstance(v, Var))
    return frozenset(found)


class _Spreading:
    """The equations so far.

    Attributes:
      short: values with one number along the axes along which they are the same.
    """

    def __init__(self, program: Program, same: Same):
        self.build, self.same = Builder(program), same
        self.definition = program.definitions()
        self.short: dict[Var, Var] = {}

    def add(self, e: Equation, once: bool) -> None:
        """Append an equation, or one that computes its outputs once, and their broadcasts."""
        if not once:
            self.build.equations.append(e)
            return
        self._shorten(e)
        for v in e.outputs:
            if v in self.short:
                self._broadcast(self.short[v], v.shape, e, v)

    def _shorten(self, e: Equation) -> None:
        """Compute an equation once."""
        it = loops_of(e)
        assert it is not None
        loops = {it.results[i][a] for i, v in enumerate(e.outputs) for a in self.same.get(v, ())}
        inputs = [
            self._along(v, frozenset(a for a, loop in enumerate(axes) if loop in loops))
            for v, axes in zip(e.inputs, it.operands, strict=True)
        ]
        outputs = []
        for v, axes in zip(e.outputs, it.results, strict=True):
            shape = tuple(1 if loop in loops else n for n, loop in zip(v.shape, axes, strict=True))
            outputs.append(self.build.var(shape, v.dtype))
        if is_relu(e):
            self.short[e.outputs[0]] = self.build.call(relu, inputs, e)
            return
        params = resized(e.op, e.params, it, {loop: 1 for loop in loops if loop is not None})
        self.build.equations.append(dataclasses.replace(e, params=params, inputs=tuple(inputs), outputs=tuple(outputs)))
        self.short |= dict(zip(e.outputs, outputs, strict=True))

    def _along(self, v: Atom, axes: frozenset[int]) -> Atom:
        """A value with one number along some of the axes along which it is the same."""
        if not axes:
            return v
        assert isinstance(v, Var)
        e = self.definition[v]
        if v not in self.short:
            self._shorten(e)
        if axes == self.same[v]:
            return self.short[v]
        shape = tuple(1 if a in axes else n for a, n in enumerate(v.shape))
        return self._broadcast(self.short[v], shape, e, self.build.var(shape, v.dtype))

    def _broadcast(self, short: Var, shape: tuple, like: Equation, out: Var) -> Var:
        params = {"shape": tuple(shape), "broadcast_dimensions": tuple(range(len(shape))), "sharding": None}
        self.build.equations.append(Equation(_BROADCAST, params, (short,), (out,), like.where, like.scope))
        return out
