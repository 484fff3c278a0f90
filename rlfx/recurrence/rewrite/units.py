"""Axes of length one are none around products: ``x[None] @ w``, and attention with an axis of a batch.

Libraries' layers take a batch, and ``jax.nn.dot_product_attention`` adds one where there is none. Such an axis is one more axis
of all that products lead to: XLA:CPU takes half as long again for softmaxes with it, and rewrites of products of rows do not see
through it. What it leads to without a rule here, a convolution of a batch above all, keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS
from rlfx._lazy import nx
from rlfx.recurrence.ir.build import Builder, live, substituted
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.rewrite.spread import is_relu, loops_of, relu

_DOT, _BROADCAST, _TRANSPOSE = map(J.primitive, ("dot_general", "broadcast_in_dim", "transpose"))
_RESHAPE, _SQUEEZE, _CONVOLUTION = map(J.primitive, ("reshape", "squeeze", "conv_general_dilated"))
_ELEMENTS = J.ELEMENTWISE | J.STOP_GRADIENT

#: What may begin or end an axis.
_SHAPES = frozenset({_BROADCAST, _RESHAPE, _SQUEEZE})

#: An axis of a value.
_Axis = tuple[Any, int]
#: Axes of the operands and of the result that are gone, from the first one.
_Gone = Sequence[Sequence[int]]


def without_unit_axes(program: Program) -> Program:
    """The program without such axes; without them it is ``program``. Meaning-preserving; idempotent."""
    gone = _axes_gone(program)
    if not gone:
        return program
    build, equations = Builder(program), []
    bare: dict[Atom, Atom] = {}
    same: dict[Var, Atom] = {}
    for e in program.equations:
        of = [gone.get(v, ()) for v in (*e.inputs, *e.outputs)]
        rule = _rule_of(e) if any(of) else None
        if rule is None:
            equations.append(e)
            continue
        build.equations, (out,) = [], e.outputs
        given = [bare.get(v, v) for v in e.inputs]
        dropped = [axes if v not in bare else () for v, axes in zip(e.inputs, of, strict=False)]
        found = build.call(functools.partial(_evaluated, rule, e, of, dropped), given, e)
        if of[-1]:
            bare[out] = found
            build.call(lambda y, shape=out.shape: lax.reshape(y, shape), [found], e)
        if build.equations:
            *before, last = build.equations
            equations += [*before, replace(last, outputs=(out,))]
        else:  # of all its axes none is left to go
            equations.append(e)
            same[out] = found
    program = substituted(with_equations(program, equations), same)
    return with_equations(program, live(program.equations, program))


def _rule_of(e: Equation) -> Callable | None:
    """``rule(e, gone, *operands)`` computes an equation of operands without axes that are gone; None: they stay."""
    if not e.is_pointwise or e.is_ragged or e.has_effects or len(e.outputs) != 1:
        return None
    if e.op in REDUCTIONS:
        return _reduced
    return _acted if e.op in _ELEMENTS or is_relu(e) else _RULES.get(e.op)


def _axes_gone(program: Program) -> dict[Atom, tuple[int, ...]]:
    """Of values, the axes of length one that a product has, and nothing has as another length."""
    products = [e for e in program.equations if e.op is _DOT]
    if not any(1 in v.shape and program.dims_of(v) for e in products for v in (*e.inputs, *e.outputs)):
        return {}
    one, stay, lead = nx.Graph(), set(), set()
    for e in program.equations:
        values = [v for v in (*e.inputs, *e.outputs) if isinstance(v, Var)]
        axes = [(v, a) for v in values for a, n in enumerate(v.shape) if not J.is_symbolic(n) and n == 1]
        if not axes:
            continue
        one.add_nodes_from(axes)
        it = None if _rule_of(e) is None else loops_of(e)
        if it is None:
            stay.update(axes if e.op is _CONVOLUTION or J.sub_jaxprs(dict(e.params)) else ())
            continue
        loops: dict[int, list[_Axis]] = {}
        for v, follows in zip((*e.inputs, *e.outputs), (*it.operands, *it.results), strict=True):
            for a, loop in enumerate(follows):
                if loop is not None and (v, a) in one:
                    loops.setdefault(loop, []).append((v, a))
                elif loop is None and e.op not in _SHAPES:  # it meets another length
                    stay.add((v, a))
        for loop, members in loops.items():
            one.add_edges_from(zip(members, members[1:], strict=False))
            if it.sizes[loop] != 1 or (e.op is _DOT and loop in it.reduced):
                stay.update(members)
        if e.op is _DOT:
            lead.update(axes)
            stay.update(_outputs_of_one(e, program))
    found: dict[Atom, list[int]] = {}
    for component in nx.connected_components(one):
        if stay.isdisjoint(component) and not lead.isdisjoint(component):
            for v, a in component:
                found.setdefault(v, []).append(a)
    return {v: tuple(sorted(axes)) for v, axes in found.items()}


def _outputs_of_one(e: Equation, program: Program) -> Iterator[_Axis]:
    """Those of weights with one output, a critic's last layer: such layers are products of matrices as others are."""
    contracted, batched = e.params["dimension_numbers"]
    for side, v in enumerate(e.inputs):
        if isinstance(v, Var) and not program.dims_of(v):
            yield from ((v, a) for a, n in enumerate(v.shape) if n == 1 and a not in (*contracted[side], *batched[side]))


def _evaluated(rule: Callable, e: Equation, gone: _Gone, dropped: _Gone, *operands: Any) -> Any:
    """An equation at one point, without axes that are gone; ``dropped``: those that its operands still have."""
    return rule(e, gone, *(lax.squeeze(x, axes) if axes else x for x, axes in zip(operands, dropped, strict=True)))


def _left(axes: Sequence[int], gone: Sequence[int]) -> tuple[int, ...]:
    """Axes, as they are counted where some have gone."""
    return tuple(a - sum(b < a for b in gone) for a in axes if a not in gone)


def _without(shape: Sequence[int], gone: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for a, n in enumerate(shape) if a not in gone)


def _acted(e: Equation, gone: _Gone, *operands: Any) -> Any:
    return relu(*operands) if is_relu(e) else J.bind(e.op, dict(e.params), *operands)[0]


def _multiplied(e: Equation, gone: _Gone, x: Any, y: Any) -> Any:
    numbers = [tuple(_left(axes, of) for axes, of in zip(kind, gone, strict=False)) for kind in e.params["dimension_numbers"]]
    return J.bind(_DOT, {**e.params, "dimension_numbers": tuple(numbers)}, x, y)[0]


def _reduced(e: Equation, gone: _Gone, x: Any) -> Any:
    axes = _left(e.params["axes"], gone[0])
    return J.bind(e.op, {**e.params, "axes": axes}, x)[0] if axes else x


def _spread(e: Equation, gone: _Gone, x: Any) -> Any:
    where = [b for a, b in enumerate(e.params["broadcast_dimensions"]) if a not in gone[0]]  # each stays in the result
    return lax.broadcast_in_dim(x, _without(e.outputs[0].shape, gone[1]), _left(where, gone[1]))


def _turned(e: Equation, gone: _Gone, x: Any) -> Any:
    return lax.transpose(x, _left([a for a in e.params["permutation"] if a not in gone[0]], gone[0]))


def _in_shape(e: Equation, gone: _Gone, x: Any) -> Any:
    shape = _without(e.outputs[0].shape, gone[-1])
    return x if x.shape == shape else lax.reshape(x, shape)


_RULES: Mapping[Any, Callable] = {
    _DOT: _multiplied, _BROADCAST: _spread, _TRANSPOSE: _turned, _RESHAPE: _in_shape, _SQUEEZE: _in_shape,
}  # fmt: skip
