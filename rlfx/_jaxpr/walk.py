"""A jaxpr gone through equation by equation, with calls as what they call: the one inliner of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlfx._jaxpr.jaxprs import call_body, is_literal, sub_jaxprs
from rlfx._jaxpr.kinds import is_call


def is_named_call(equation: Any) -> bool:
    """Whether an equation calls a body on its own inputs, whatever special rule the call has."""
    return is_call(equation.primitive)


def walk(
    jaxpr: Any,
    consts: Sequence,
    args: Sequence,
    visit: Callable[[Any, list, tuple], Sequence],
    *,
    inlines: Callable[[Any], bool] = is_named_call,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    constant: Callable[[Any], Any] = lambda value: value,
    within: tuple = (),
) -> list:
    """The outputs of a jaxpr, whatever stands for its values: arrays, names of values, numbers of bytes.

    Args:
      consts, args: what stands for its constants and inputs.
      visit: ``visit(equation, operands, within)`` returns the outputs of an equation.
      inlines: which equations are calls whose body is gone through in their place; the others are visited.
      literal: what stands for a literal, by default its value.
      constant: what stands for a constant of a body that is called.
      within: the calls around the jaxpr, the outermost first.

    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(lambda x: jax.nn.relu(x) + 1.0)(2.0)
      >>> seen = []
      >>> walk(closed.jaxpr, [], [2.0], lambda e, operands, _: [seen.append(e.primitive.name)])
      [None]
      >>> seen
      ['max', 'add']
    """
    env: dict = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if inlines(eqn):
            body, values = call_body(eqn.primitive, eqn.params)
            options = {"inlines": inlines, "literal": literal, "constant": constant, "within": (*within, eqn)}
            outs: Sequence = walk(body, [constant(c) for c in values], operands, visit, **options)
        else:
            outs = visit(eqn, operands, within)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def equations_in(params: dict) -> Iterator[Any]:
    """Every equation of the jaxprs among an equation's parameters, and of those inside."""
    for jaxpr, _ in sub_jaxprs(params):
        for eqn in jaxpr.eqns:
            yield eqn
            yield from equations_in(eqn.params)


def contains(op: Any, params: dict, primitives: frozenset) -> bool:
    """Whether an equation is one of some primitives, or has a body in which one is."""
    return op in primitives or any(eqn.primitive in primitives for eqn in equations_in(params))
