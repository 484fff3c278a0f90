"""A program as one equation of what calls it: ``jax.vmap`` maps its forward pass, and a derivative is made when one is taken.

``jax.custom_vjp`` in a jaxpr that jax keeps (of a jitted function) remembers what its forward rule returned last; a rule that
returns something else for other perturbed inputs, as ours does, is then taken for the one it was before. Here every derivative
is that of a ``custom_vjp`` of its own, made where it is known which inputs are perturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.gradient.replanned import Added, mapped
from rlfx.recurrence.ir.program import Program, Var


@dataclass(frozen=True, eq=False)
class Call:
    """Which program an equation is a call of, and what of it: so that one sees into it.

    Attributes:
      rule: the program with its schedules and plans.
      what: "value", "value and gradient", or "pullback".
      perturbed: the inputs with respect to which the derivative is taken.
      targets: what is differentiated; None: the loss, or else all outputs.
      body: the forward pass, from which calls under ``jax.vmap`` are made.
    """

    rule: Any
    what: str = "value"
    perturbed: frozenset[Var] = frozenset()
    targets: tuple[Var, ...] | None = None
    body: Any = None

    @property
    def program(self) -> Program:
        return self.rule.program

    def __str__(self) -> str:
        return self.program.name if self.what == "value" else f"{self.program.name}: {self.what}"


def called(rule: Any, forward: Callable, differentiable: Callable[[], Callable], *args: Any) -> Any:
    """``forward(*args)`` as one equation, with the derivative of ``differentiable()``: the same function, with its own rule.

    An eager derivative needs no equation, whose forward pass would be traced for nothing.
    """
    leaves, structure = jax.tree.flatten(args)
    if J.linearizes(leaves):
        return differentiable()(*args)

    def fn(*leaves: Any) -> list:
        return jax.tree.leaves(differentiable()(*jax.tree.unflatten(structure, leaves)))

    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    outs = _program_p.call(*leaves, jaxpr=jaxpr, of=Call(rule, body=jaxpr), fn=fn, axes=())
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _again(args: Sequence, added: tuple, *, jaxpr: Any, of: Call, fn: Callable, axes: tuple[Added, ...]) -> dict:
    """The parameters of the call with one axis more."""
    axes = (*axes, Added(*added))
    forward = jax.make_jaxpr(mapped(J.jaxpr_as_fun(of.body.jaxpr, of.body.consts), axes))(*args)
    return {"jaxpr": forward, "of": of, "fn": fn, "axes": axes}


_program_p = J.Staged("rlfx_program", _again, lambda *, fn, axes, **_: mapped(fn, axes))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A Python value that travels among residuals."""

    value: Any
