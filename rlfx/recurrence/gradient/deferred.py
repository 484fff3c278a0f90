"""How loops over time run that are differentiated: by a derivative of their own, where they multiply values with weights.

``own.py`` says how, and what is better by it than by the derivative of a ``jax.lax.scan``. TimeRL has no counterpart: its
backward pass is a program of its own, scheduled like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from rlfx.recurrence.execute.loops import Scan
from rlfx.recurrence.gradient.directions import without_constants
from rlfx.recurrence.gradient.own import OwnDerivative, Truncation, products_of
from rlfx.recurrence.ir.interpret import inlined_body
from rlfx.recurrence.language.precision import widened
from rlfx.recurrence.schedule.truncated import InWindows, Truncated

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Deferring(Scan):
    """As :class:`Scan`; in reverse mode with a derivative of its own, where the loop multiplies weights: what it only reads.

    Gradients of weights that are multiplied with few rows are contracted after the loop, and those of all that it only reads are
    added up in at least float32. Where nothing of that makes a difference, it is a ``Scan``.

    Attributes:
      most_rows: a timestep, at most, for which a contraction at the end is faster.
      near: bytes that a core has near it: the way back goes through blocks of timesteps that fit; None: through all.
      truncation: where no derivative goes back further, or None.
    """

    most_rows: int = 0
    near: float | None = None
    truncation: Truncation | None = None

    def truncated(self, at: Truncated, holds: Any, agreed: Callable) -> Self:
        return replace(self, truncation=Truncation(at, holds, agreed))

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple[Any, Any]:
        found = _with_own_derivative(self, step, init, xs, backward)
        return super().__call__(step, init, xs, backward, going) if found is None else found


def _with_own_derivative(by: Deferring, step: Callable, init: Any, xs: Any, backward: bool) -> tuple | None:
    """What the loop gives; None if its derivative is no better than that of a ``jax.lax.scan``."""
    leaves, structure = tree.tree_flatten((init, xs))
    split = len(tree.tree_leaves(init))
    at_t = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves[split:]]
    one = tree.tree_unflatten(structure, [*map(jax.typeof, leaves[:split]), *at_t])
    closed, outs = jax.make_jaxpr(step, return_shape=True)(*one)
    body, consts = without_constants(inlined_body(closed))
    products = products_of(body)
    if not products and all(widened(c) is c for c in consts):
        return None
    in_windows = by.truncation is not None and isinstance(by.truncation.at, InWindows)
    few = tuple(p for p in products if p.rows <= by.most_rows or in_windows)
    loop = OwnDerivative(body, few, split, backward, by.together(xs), by.truncation, by.near)
    return tree.tree_unflatten(tree.tree_structure(outs), loop(list(map(widened, consts)), leaves[:split], leaves[split:]))
