"""Functions with a derivative of their own, of slices: equation by equation, and the same for the derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.ragged.part import Here, Part
from rlfx.recurrence.execute.values import evaluate
from rlfx.recurrence.ir.derivatives import Custom, Function, with_derivative
from rlfx.recurrence.ir.program import Equation


def custom_rule(rule_of: Callable[[Equation], Callable[..., list[Part]]]) -> Callable[..., list[Part]]:
    """The rule of ``custom_p``; ``rule_of`` gives those of the equations inside."""

    def run(point: Here, function: Function, parts: Sequence[Part]) -> list[Part]:
        def one(equation: Equation, operands: list[Part]) -> list[Part]:
            if equation.is_ragged:
                return rule_of(equation)(point, equation, *operands)
            return [Part(x, (None,) * jnp.ndim(x)) for x in evaluate(equation, [p.data for p in operands])]

        return function.run(parts, lambda value: Part(jnp.asarray(value), (None,) * jnp.ndim(value)), one)

    def apply(point: Here, equation: Equation, *parts: Part) -> list[Part]:
        custom: Custom = equation.params["custom"]
        operands = [point.settled(p, v.shape) for p, v in zip(parts, equation.inputs, strict=True)]
        if not point.perturbed:
            return run(point, custom.primal, operands)
        data, where = [p.data for p in operands], (point.t, point.n)
        # What the derivative remembers belongs to no trace: not the point, and not the data of its parts.
        nowhere = replace(point, t=None, n=None)
        bare, found = [replace(p, data=None) for p in operands], []

        def at(where: tuple) -> Here:
            return replace(nowhere, t=where[0], n=where[1])

        def of(data: Sequence) -> list[Part]:
            return [replace(p, data=x) for p, x in zip(bare, data, strict=True)]

        def forward(where: tuple, *data: Any) -> list:
            outs = run(at(where), custom.primal, of(data))
            found[:] = [replace(o, data=None) for o in outs]
            return [o.data for o in outs]

        def backward(where: tuple, data: Sequence, cotangents: Sequence) -> list:
            here = at(where)
            shapes = [(o, v.shape) for o, v in zip(found, equation.outputs, strict=True) if J.is_inexact(v)]
            cts = [
                _only_valid(here, Part(ct, o.starts, False), shape)
                for ct, (o, shape) in zip(cotangents, shapes, strict=True)
            ]
            moving = [(p, v.shape) for p, v in zip(of(data), equation.inputs, strict=True) if J.is_inexact(v)]
            results = run(here, custom.backward, [*of(data), *cts])
            return [_like(here, g, p, shape) for g, (p, shape) in zip(results, moving, strict=True)]

        outs = with_derivative(forward, backward, where, data)
        return [replace(o, data=x) for o, x in zip(found, outs, strict=True)]

    return apply


def _only_valid(point: Here, part: Part, shape: Sequence) -> Part:
    """A cotangent that is zero where the part is not valid. (Of what all timesteps share, it is so already.)"""
    return part if point.t is None else replace(part, data=point.masked(part, shape, 0))


def _like(point: Here, cotangent: Part, part: Part, shape: Sequence) -> Any:
    """A cotangent of a part, at its positions."""
    cotangent = point.settled(cotangent, shape)
    for axis in part.ragged:
        cotangent = point.aligned(cotangent, axis, part.starts[axis], part.data.shape[axis])
    return _only_valid(point, cotangent, shape).data
