"""A plan that knows of ``jax.vmap``: a call whose body is made anew, by another plan, when an axis is added around it.

``jax.vmap`` over seeds multiplies what a program holds, and a budget with it. It may come long after the program was
traced (around ``jax.jit``, or around a training loop in ``jax.lax.scan``), so the call remembers how it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rlfx import _jaxpr as J


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
class Moved:
    """What is differentiated where a call is, with the same results.

    Attributes:
      make: it.
      together: up to so many copies under ``jax.vmap`` are one; more are made in turn. None: all are one.
    """

    make: Make
    together: int | None = None


def planned(make: Make, of: Any, *args: Any, once: Callable | None = None, moved: Moved | None = None) -> Any:
    """``make(())(*args)``, or under ``jax.vmap`` ``make(axes)(*args)`` mapped over the axes.

    A body with effects is not made anew: its effects would be traced again. ``of``: which call it is, for those who look into
    the program that makes it. ``once(types, make)`` keeps what is made for arguments of these types. ``moved``: what is
    differentiated; None: what is computed.
    """
    leaves, types = typed(args)
    structure = types[0]

    def flattened(make: Make) -> Make:
        return lambda axes: lambda *leaves: make(axes)(*jax.tree.unflatten(structure, leaves))

    flat, other = flattened(make), None if moved is None else replace(moved, make=flattened(moved.make))

    def body() -> tuple:
        return jax.make_jaxpr(flat(()), return_shape=True)(*leaves)

    jaxpr, shapes = body() if once is None else once(types, body)
    outs = J.jaxpr_as_fun(jaxpr.jaxpr, jaxpr.consts)(*leaves) if jaxpr.effects else _planned_p.call(
        *leaves, jaxpr=jaxpr, of=of, make=flat, moved=other, axes=()
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


def _again(args: Sequence, added: tuple, *, jaxpr: Any, make: Make, axes: tuple[Added, ...], **params: Any) -> dict:
    """The parameters of the call with one axis more."""
    axes = (*axes, Added(*added))
    return {"jaxpr": jax.make_jaxpr(mapped(make(axes), axes))(*args), "make": make, "axes": axes, **params}


def _moved(*, moved: Moved | None, axes: tuple[Added, ...], **_: Any) -> Callable | None:
    """What is differentiated in place of the call."""
    if moved is None:
        return None
    fn = _in_turn(moved.make(axes), axes, moved.together)
    return lambda *leaves: jax.tree.leaves(fn(*leaves))


def _in_turn(fn: Callable, axes: tuple[Added, ...], together: int | None) -> Callable:
    """``fn`` over its axes; of many copies those of the outermost one in turn, computed again for their derivative."""
    *inner, outer = axes or (None,)
    few = together is None or math.prod(axis.size for axis in axes) <= together
    if few or outer is None or outer.name is not None:
        return mapped(fn, axes)
    of_all = mapped(fn, inner)

    def run(*args: Any) -> Any:
        def of_one(own: list) -> Any:
            left = iter(own)
            return of_all(*(next(left) if v else x for x, v in zip(args, outer.varies, strict=True)))

        own = [x for x, v in zip(args, outer.varies, strict=True) if v]
        return jax.lax.map(jax.checkpoint(of_one, prevent_cse=False), own)

    return run


_planned_p = J.Staged("rlfx_planned", _again, _moved)
