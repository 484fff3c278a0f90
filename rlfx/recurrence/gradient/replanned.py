"""A plan that knows of ``jax.vmap``: a call whose body is made anew, by another plan, when an axis is added around it.

``jax.vmap`` over seeds multiplies what a program holds, and a budget with it. It may come long after the program was
traced (around ``jax.jit``, or around a training loop in ``jax.lax.scan``), so the call remembers how it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.bodies import with_rules_in_bodies
from rlfx.recurrence.ir.interpret import rewritten


@dataclass(frozen=True)
class Added:
    """An axis that ``jax.vmap`` adds around a program.

    Attributes:
      size: its length.
      varies: which inputs have it, as their leading axis.
      name: its name for collectives, or None.
    """

    size: int
    varies: tuple[bool, ...]
    name: Any = None


#: From the axes that were added so far, innermost first, to what is computed for one index of each of them.
Make = Callable[[tuple[Added, ...]], Callable]


@dataclass(frozen=True)
class Turns:
    """Up to how many copies under ``jax.vmap`` are one call; more of them are made in turn. None: all are one.

    Attributes:
      computed: of what is computed.
      differentiated: of what is differentiated.
    """

    computed: int | None = None
    differentiated: int | None = None


def planned(
    make: Make, of: Any, *args: Any, once: Callable | None = None, moved: Make | None = None,
    together: Callable[[Callable], Callable] | None = None, turns: Callable[[], Turns] = Turns,
) -> Any:
    """``make(())(*args)``, or under ``jax.vmap`` ``make(axes)(*args)`` mapped over the axes.

    A body with effects is not made anew: its effects would be traced again. ``of``: which call it is, for those who look into
    the program that makes it. ``once(types, make)`` keeps what is made for arguments of these types. ``moved``: what is
    differentiated, with the same results; None: what is computed. ``together``: what becomes of that, a function of the leaves,
    where it is of several copies. ``turns``: asked where ``jax.vmap`` adds an axis.
    """
    leaves, types = typed(args)
    structure = types[0]

    def flattened(make: Make) -> Make:
        return lambda axes: lambda *leaves: make(axes)(*jax.tree.unflatten(structure, leaves))

    flat, other = flattened(make), None if moved is None else flattened(moved)

    def body() -> tuple:
        return jax.make_jaxpr(flat(()), return_shape=True)(*leaves)

    jaxpr, shapes = body() if once is None else once(types, body)
    outs = J.jaxpr_as_fun(jaxpr.jaxpr, jaxpr.consts)(*leaves) if jaxpr.effects else _planned_p.call(
        *leaves, jaxpr=jaxpr, of=of, make=flat, moved=other, together=together, turns=turns, axes=()
    )  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def typed(args: tuple) -> tuple[list, tuple]:
    """The leaves of arguments, and what a jaxpr that is made for them depends on."""
    leaves, structure = jax.tree.flatten(args)
    return leaves, (structure, tuple(map(jax.typeof, leaves)), J.surroundings())


def mapped(fn: Callable, axes: Sequence[Added]) -> Callable:
    """``fn`` over its axes, the last one outermost; every result has all of them."""
    for axis in axes:
        fn = J.mapped(fn, (axis.size, axis.varies, axis.name))
    return fn


def _again(
    args: Sequence, added: tuple, *, jaxpr: Any, make: Make, turns: Callable[[], Turns], axes: tuple[Added, ...], **params: Any
) -> dict:
    """The parameters of the call with one axis more."""
    axes = (*axes, Added(*added))
    new = jax.make_jaxpr(_over(make, axes, turns().computed))(*args)
    return {"jaxpr": new, "make": make, "turns": turns, "axes": axes, **params}


def _moved(
    *, moved: Make | None, together: Callable | None, turns: Callable[[], Turns], axes: tuple[Added, ...], **_: Any
) -> Callable | None:
    """What is differentiated in place of the call."""
    if moved is None:
        return None
    fn = _over(moved, axes, turns().differentiated, again=True)
    if axes and together is not None:
        fn = together(fn)
    return lambda *leaves: jax.tree.leaves(fn(*leaves))


def _over(make: Make, axes: tuple[Added, ...], together: int | None, *, again: bool = False) -> Callable:
    """What is made over its axes, in turn along the outer ones if there are more copies than those; ``again``: each of them is
    computed again for its derivative."""
    rest, turned = list(axes), []
    while together is not None and rest and rest[-1].name is None and math.prod(axis.size for axis in rest) > together:
        turned.append(rest.pop())
    fn = mapped(make(tuple(rest)), rest)
    for axis in reversed(turned):
        fn = _in_turn(fn, axis.varies, again)
    return fn


def _in_turn(fn: Callable, varies: Sequence[bool], again: bool) -> Callable:
    """``fn`` over the leading axis of the arguments that vary, one index after the other."""

    def run(*args: Any) -> Any:
        def of_one(own: list) -> Any:
            left = iter(own)
            return fn(*(next(left) if v else x for x, v in zip(args, varies, strict=True)))

        each = jax.checkpoint(of_one, prevent_cse=False) if again else of_one
        return jax.lax.map(each, [x for x, v in zip(args, varies, strict=True) if v])

    return run


def _by_forward_rules(fn: Callable) -> Callable:
    """``fn``, a gradient that is differentiated, with the forward rules of what has a ``jax.custom_vjp`` of its own.

    What a gradient goes through has left its rules behind. What is stopped is still a call, which jax refuses to push tangents
    through; under ``jax.grad`` jax evaluates such calls by their forward rules, too.
    """

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        rules = _FORWARD_RULES if any(map(_has_own_rule, J.equations_in({"jaxpr": closed}))) else {}
        return jax.tree.unflatten(jax.tree.structure(out), rewritten(J.jaxpr_as_fun(closed.jaxpr, closed.consts), rules)(*args))

    return run


def _has_own_rule(eqn: Any) -> bool:
    return eqn.primitive is J.CUSTOM_VJP


def _forward_rule(eqn: Any, operands: list) -> list:
    moving = [i for i, x in enumerate(operands) if J.is_inexact(x)]

    def call(*new: Any) -> list:
        return J.bind(eqn.primitive, eqn.params, *(dict(enumerate(operands)) | dict(zip(moving, new, strict=True))).values())

    return list(jax.vjp(call, *(operands[i] for i in moving))[0])


_FORWARD_RULES = with_rules_in_bodies({J.CUSTOM_VJP: _forward_rule}, _has_own_rule)

_planned_p = J.Staged("rlfx_planned", _again, _moved, _by_forward_rules)
