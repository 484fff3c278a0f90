"""Which elements attain an extreme: by where it is, and not by comparing alone.

jax's derivative of a maximum compares every element to it. A maximum of the batch comes out of one loop over the blocks, and the
elements are computed again in a later one, where XLA may round them differently (a product and a sum in one instruction, or in
two); within one loop it may compute them twice, too. Then none is equal, and the derivative is 0 / 0. So what finds the extreme
finds its place, too:

    x == max(x)   ->   x == max(x) | place of x == argmax(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.transforms.blocks.flat import Array, Atom, Equation, Flat, flatten

_EQUAL, _RESHAPE, _BROADCAST = map(J.primitive, ("eq", "reshape", "broadcast_in_dim"))
#: Reduction: (itself, where it is attained).
_EXTREMES = {
    J.primitive("reduce_max"): (jnp.max, jax.lax.argmax),
    J.primitive("reduce_min"): (jnp.min, jax.lax.argmin),
}

Makers = Mapping[Array, Equation]


def placed(flat: Flat) -> Flat:
    """The program with places where it compares computed values with their extremes; without such comparisons ``flat``."""
    makers = {v: e for e in flat.equations for v in e.outs}
    found = [new for e in flat.equations for new in _with_places(e, makers)]
    return flat if len(found) == len(flat.equations) else replace(flat, equations=tuple(found))


def _with_places(e: Equation, makers: Makers) -> Iterator[Equation]:
    """The equations in the place of one."""
    for x, other in (e.ins, e.ins[::-1]) if e.op is _EQUAL else ():
        if x in makers and jnp.issubdtype(x.aval.dtype, jnp.floating):  # what is given is not computed again
            reduction = _reduction_of(x, other, makers)
            if reduction is not None:
                yield from _spliced(_attained(reduction), e, (x, other))
                return
    yield e


def _reduction_of(x: Array, other: Atom, makers: Makers) -> Equation | None:
    """The reduction of ``x`` to the extremes that another value has, each beside the elements that it is of."""
    views: list[Equation] = []
    while isinstance(other, Array) and other in makers:
        e = makers[other]
        if e.op in _EXTREMES:
            kept = tuple(i for i in range(len(x.shape)) if i not in e.params["axes"])
            return e if e.ins[0] is x and _stays(kept, views[::-1], x.shape) else None
        if e.op not in (_RESHAPE, _BROADCAST):
            return None
        views.append(e)
        other = e.ins[0]
    return None


def _stays(axes: tuple[int | None, ...], views: list[Equation], shape: tuple[int, ...]) -> bool:
    """Whether axes are where they were, of all axes of ``shape``, after reshapes and broadcasts."""
    kept = {a for a in axes if a is not None and shape[a] != 1}
    for e in views:
        sizes = e.outs[0].shape
        if e.op is _BROADCAST:
            at = dict(zip(e.params["broadcast_dimensions"], axes, strict=True))
            axes = tuple(at.get(i) for i in range(len(sizes)))
        else:
            wide = [a for a, n in zip(axes, e.ins[0].shape, strict=True) if n != 1]
            if [n for n in sizes if n != 1] != [n for n in e.ins[0].shape if n != 1]:
                return False
            axes = tuple(wide.pop(0) if n != 1 else None for n in sizes)
    return len(axes) == len(shape) and all(axes[a] == a for a in kept)


def _attained(reduction: Equation) -> Callable[[Any, Any], Any]:
    """``(x, extreme) -> x == extreme``, and where it is first attained; the batch, mostly the first axis, is searched last."""
    extreme_of, place_of = _EXTREMES[reduction.op]
    axes = sorted(reduction.params["axes"], reverse=True)

    def attained(x: Any, extreme: Any) -> Any:
        first, rest = extreme == extreme, x  # of what is not a number there is no place
        for axis in axes:
            place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
            first = first & (place == jnp.expand_dims(place_of(rest, axis, jnp.int32), axis))
            rest = extreme_of(rest, axis=axis, keepdims=True)
        return (x == extreme) | first

    return attained


def _spliced(fn: Callable, e: Equation, ins: tuple[Atom, ...]) -> Iterator[Equation]:
    """The equations of ``fn(*ins)``, instead of one that has the same result."""
    jaxpr, consts = J.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in ins))
    assert not consts
    part = flatten(jaxpr)
    known: dict[Any, Atom] = {**dict(zip(part.inputs, ins, strict=True)), part.outputs[0]: e.outs[0]}
    for new in part.equations:
        yield replace(
            new,
            ins=tuple(known.get(v, v) for v in new.ins),
            outs=tuple(known.get(v, v) for v in new.outs),
            made_by=e.made_by,
            within=e.within,
        )
