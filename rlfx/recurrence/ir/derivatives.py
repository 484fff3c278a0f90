"""Functions with a derivative of their own, ``jax.custom_vjp`` and the like, as equations: what they compute, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Atom, Equation, Var


@dataclass(frozen=True, eq=False)
class Function:
    """Equations in order, as a function of ``inputs``."""

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]

    def run(self, arguments: Sequence, literal: Callable[[Any], Any], evaluate: Callable[..., Sequence]) -> list:
        """The outputs; ``evaluate(equation, operands)`` gives those of one equation, ``literal(value)`` a constant."""
        known: dict[Atom, Any] = dict(zip(self.inputs, arguments, strict=True))

        def of(atom: Atom) -> Any:
            return known[atom] if isinstance(atom, Var) else literal(atom.value)

        for e in self.equations:
            known.update(zip(e.outputs, evaluate(e, [of(a) for a in e.inputs]), strict=True))
        return [of(a) for a in self.outputs]


@dataclass(frozen=True, eq=False)
class Custom:
    """A call with a derivative of its own.

    Attributes:
      primal: what it computes.
      linear: whether its derivative is surely linear in the cotangent, as that of a ``custom_jvp`` is.
      derive: traces the derivative, ``(*operands, *cotangents of inexact outputs) -> cotangents of inexact operands``.
    """

    primal: Function
    linear: bool
    derive: Callable[[], Function]

    @functools.cached_property
    def backward(self) -> Function:
        """The derivative; traced when it is first needed, since it may hold calls of the same kind."""
        return self.derive()

    def only(self, ops: frozenset) -> bool:
        """Whether call and derivative are made of these operations, and the latter is linear."""
        return self.linear and all(e.op in ops for f in (self.primal, self.backward) for e in f.equations)

    def mapped(self, change: Callable[[Function], Function]) -> Custom:
        """The call with other equations."""
        return replace(self, primal=change(self.primal), derive=lambda: change(self.backward))


def with_derivative(forward: Callable, backward: Callable, context: Any, operands: Sequence) -> list:
    """``forward(context, *operands)``, whose derivative is ``backward(context, operands, cotangents)``.

    Args:
      context: what both need and has no derivative, any pytree.
      backward: takes the cotangents of inexact outputs, and returns those of inexact operands.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reversed_ = lambda x: with_derivative(lambda _, x: [x], lambda _, xs, cts: [-cts[0]], None, [x])[0]
      >>> jax.grad(reversed_)(2.0).item()
      -1.0
    """

    def outputs(context, operands):  # each point has a cotangent of its own, also of what is the same at all points
        others = (*jax.tree.leaves(context), *operands)
        return tuple(J.varies_with.bind(o, *others) for o in forward(context, *operands))

    @jax.custom_vjp
    def call(context, *operands):
        return outputs(context, operands)

    def call_forward(context, *operands):
        return outputs(context, operands), (context, operands)

    def call_backward(saved, cotangents):
        context, operands = saved
        found = iter(backward(context, operands, [c for c in cotangents if J.is_inexact(c)]))
        return (None, *(next(found) if J.is_inexact(x) else None for x in operands))

    call.defvjp(call_forward, call_backward)
    return list(call(context, *operands))
