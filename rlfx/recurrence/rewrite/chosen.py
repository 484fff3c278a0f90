"""What one index chooses is computed of what it chooses: ``q[action]``, where a network computes values action by action.

A tree of what every action leads to, a critic that judges all actions, a goal for each of some heads: the loss is of what was
done, and as it is written, all of it is computed and differentiated. Before and after, with z of every action:

    q = relu(z @ w) @ v; q[a]   ->   relu(z[a] @ w) @ v

So is what a number chooses: of all tokens of a transformer's last layer the first one, say, or the last; of twin critics the one
that the actor asks. As far back as each operation computes the entries of the axis one by one, and nothing else needs them; where
a product has weights of its own for each entry, an index takes one of its result, since it would take weights for each point; a
number takes weights. Only what leaves out products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import Nest, resized
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.picks import DYNAMIC_SLICE, axes_of_one
from rlfx.recurrence.rewrite.spread import is_relu, loops_of, relu

_SLICE = J.primitive("slice")


@dataclass(frozen=True)
class _Step:
    """An equation that computes entries of the axis one by one.

    Attributes:
      loop: that of the entries.
      along: of each operand, its axis of the entries; None if it has none.
    """

    equation: Equation
    nest: Nest
    loop: int
    along: tuple[int | None, ...]


@dataclass(frozen=True)
class _Chosen:
    """What leads to a value of which one entry is chosen, or some that follow one another.

    Attributes:
      size: how many.
      steps: in order; the last one gives the value.
      taken: where an entry is taken instead, and along which axis.
      whole: what the steps read besides.
    """

    size: int
    steps: tuple[_Step, ...]
    taken: tuple[tuple[Var, int], ...]
    whole: tuple[Var, ...]

    def __call__(self, start: Any, *values: Any) -> Any:
        """The entries from a number on, or the one at an index, of all that is given: the axis stays."""
        given, whole = values[: len(self.taken)], dict(zip(self.whole, values[len(self.taken) :], strict=True))
        known = {v: self._entries(x, start, axis) for (v, axis), x in zip(self.taken, given, strict=True)}

        def of(u: Atom, axis: int | None) -> Any:
            if isinstance(u, Var):
                return whole[u] if axis is None else known[u]
            return u.value if axis is None else self._entries(jnp.asarray(u.value), start, axis)

        out = None
        for step in self.steps:
            e = step.equation
            operands = [of(u, axis) for u, axis in zip(e.inputs, step.along, strict=True)]
            if is_relu(e):
                out = relu(*operands)
            else:
                (out,) = J.bind(e.op, resized(e.op, e.params, step.nest, {step.loop: self.size}), *operands)
            known[e.outputs[0]] = out
        return out

    def _entries(self, x: Any, start: Any, axis: int) -> Any:
        """Those of an axis, which stays. Before the first it is the first: what counts from the end was counted already."""
        if isinstance(start, int):
            return jax.lax.slice_in_dim(x, start, start + self.size, axis=axis)
        sizes = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
        starts = (start if a == axis else jnp.zeros_like(start) for a in range(x.ndim))
        (out,) = J.bind(DYNAMIC_SLICE, {"slice_sizes": sizes}, x, *starts)
        return out


def _sliced(e: Equation) -> tuple[int, int, int] | None:
    """``(axis, start, size)`` of an equation that reads at most half of one axis, and all of the others; None of any other."""
    if e.op is not _SLICE or e.is_ragged or any(stride != 1 for stride in e.params["strides"] or ()):
        return None
    starts, limits = e.params["start_indices"], e.params["limit_indices"]
    short = [axis for axis, n in enumerate(e.inputs[0].shape) if limits[axis] - starts[axis] != n]
    if len(short) != 1:
        return None
    (axis,) = short
    size = limits[axis] - starts[axis]
    return (axis, starts[axis], size) if 2 * size <= e.inputs[0].shape[axis] else None


def with_chosen_first(program: Program) -> Program:
    """The program with such choices; without any ``program``. Meaning-preserving; idempotent."""

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        x, sliced = e.inputs[0] if e.inputs else None, _sliced(e)
        if not isinstance(x, Var):
            return None
        if sliced is not None:
            axis, start, size = sliced
            found = _leading_to(e, x, axis, program, size, of_weights=True)
            return found and (functools.partial(found, start), [*(v for v, _ in found.taken), *found.whole])
        axes = axes_of_one(e)
        found = _leading_to(e, x, axes[0], program) if len(axes) == 1 else None
        return found and (found, [e.inputs[1 + axes[0]], *(v for v, _ in found.taken), *found.whole])

    return exchanged(program, instead)


def _leading_to(
    choice: Equation, value: Var, axis: int, program: Program, size: int = 1, of_weights: bool = False
) -> _Chosen | None:
    """What computes a value entry by entry, of which one is chosen; None if no products are left out.

    Args:
      of_weights: whether those of weights may be taken, too.
    """
    returned, at = frozenset(program.returned), {value: axis}
    group: dict[Equation, _Step] = {}
    for e in reversed(program.equations[: program.places[choice]]):
        if len(e.outputs) != 1 or (v := e.outputs[0]) not in at or v in returned:
            continue
        alone = all(u is choice or u in group for u in program.users.get(v, ()))
        if alone and (step := _step(e, at[v], program, of_weights)) is not None:
            group[e] = step
            for u, along in zip(e.inputs, step.along, strict=True):
                if along is not None and isinstance(u, Var) and at.setdefault(u, along) != along:
                    return None
    computed = {e.outputs[0] for e in group}
    steps = tuple(reversed(group.values()))
    operands = [(u, along) for s in steps for u, along in zip(s.equation.inputs, s.along, strict=True) if isinstance(u, Var)]
    if any(u in computed and along is None for u, along in operands):
        return None
    if not any(s.equation.op in PRODUCTS for s in steps):
        return None
    taken = {u: along for u, along in operands if along is not None and u not in computed}
    return _Chosen(size, steps, tuple(taken.items()), tuple(dict.fromkeys(u for u, along in operands if along is None)))


def _step(e: Equation, axis: int, program: Program, of_weights: bool) -> _Step | None:
    """How an equation computes the entries of an axis of its result one by one; None if it does not."""
    if not e.is_pointwise or e.has_effects or e.calls:
        return None
    it = loops_of(e)
    if it is None:
        return None
    (axes,) = it.results
    loop = axes[axis]
    if loop is None or loop not in it.free:
        return None
    along = tuple(theirs.index(loop) if loop in theirs else None for theirs in it.operands)
    excluded = not of_weights and e.op in PRODUCTS and any(
        a is not None and not program.dims_of(v) for v, a in zip(e.inputs, along, strict=True)
    )
    return None if excluded or any(theirs.count(loop) > 1 for theirs in it.operands) else _Step(e, it, loop, along)
