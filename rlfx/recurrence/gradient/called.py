"""A program as one equation of what calls it: ``jax.vmap`` maps its forward pass, and a derivative is made when one is taken.

``jax.custom_vjp`` in a jaxpr that jax keeps (of a jitted function) remembers what its forward rule returned last; a rule that
returns something else for other perturbed inputs, as ours does, is then taken for the one it was before. Here every derivative
is that of a ``custom_vjp`` of its own, made where it is known which inputs are perturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.gradient.replanned import Added, mapped


def called(forward: Callable, differentiable: Callable[[], Callable], *args: Any) -> Any:
    """``forward(*args)`` as one equation, with the derivative of ``differentiable()``: the same function, with its own rule."""
    leaves, structure = jax.tree.flatten(args)

    def fn(*leaves: Any) -> list:
        return jax.tree.leaves(differentiable()(*jax.tree.unflatten(structure, leaves)))

    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    outs = _program_p.call(*leaves, jaxpr=jaxpr, body=jaxpr, fn=fn, axes=())
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _again(args: Sequence, added: tuple, *, jaxpr: Any, body: Any, fn: Callable, axes: tuple[Added, ...]) -> dict:
    """The parameters of the call with one axis more."""
    axes = (*axes, Added(*added))
    forward = jax.make_jaxpr(mapped(J.jaxpr_as_fun(body.jaxpr, body.consts), axes))(*args)
    return {"jaxpr": forward, "body": body, "fn": fn, "axes": axes}


_program_p = J.Staged("rlfx_program", _again, lambda *, fn, axes, **_: mapped(fn, axes))
