"""Which equations of an update are alike: on small arrays, one for each array of weights, and before nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.partial_sums import has_parts, is_move


@dataclass(frozen=True, eq=False)
class Work:
    """An equation; or a sum of sums.

    Attributes:
      key: of equations on small arrays: those with the same one are alike. None: it runs by itself.
      terms: of a sum of sums of several arrays: the equations that are its parts, the last one last.
      in_parts: it sums rows, for equations on small arrays alone (``partial_sums.py``).
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    eqn: Any
    key: Any = None
    terms: tuple[Any, ...] = ()
    in_parts: bool = False


def nodes(jaxpr: Any, small: set[tuple[int, ...]]) -> list[Work]:
    """The equations of a jaxpr, sums of the sums of several arrays as one.

    Args:
      small: shapes of arrays that may be put together.
    """
    sums, same = _sums_of_sums(jaxpr, small), _same_scalars(jaxpr)
    inside = {id(e): root for root, parts in sums.items() for e in parts}
    keys = {id(e): _key(e, small, same) for e in jaxpr.eqns}
    summed, moves = _summed(jaxpr, keys)
    before = _before_others(jaxpr, {i for i, key in keys.items() if key is not None} | set(inside) | moves)
    found = []
    for e in jaxpr.eqns:
        root = inside.get(id(e))
        if root is None:
            key = None if before.issuperset(e.outvars) or id(e) in moves else keys[id(e)]
            parts = id(e) in summed and before.isdisjoint(e.outvars)
            found.append(Work(J.variables(e.invars), tuple(e.outvars), e, key, in_parts=parts))
        elif root == id(e):
            made = {v for part in sums[root] for v in part.outvars}
            outer = [v for part in sums[root] for v in J.variables(part.invars) if v not in made]
            found.append(Work(tuple(dict.fromkeys(outer)), tuple(e.outvars), e, terms=tuple(sums[root])))
    return found


def _before_others(jaxpr: Any, ours: set[int]) -> set[Any]:
    """What other equations on arrays follow from: layers of a network that happen to have a shape of the carry."""
    found: set[Any] = set()
    for e in reversed(jaxpr.eqns):
        other = id(e) not in ours and any(v.aval.shape for v in (*e.invars, *e.outvars))
        if other or not found.isdisjoint(e.outvars):
            found.update(J.variables(e.invars))
    return found


def _summed(jaxpr: Any, keys: Mapping[int, Any]) -> tuple[set[int], set[int]]:
    """Sums over many rows that equations on small arrays read, and what only changes the shape of such a sum in between."""
    read: set[Any] = set()
    for e in reversed(jaxpr.eqns):
        if keys[id(e)] is not None or (is_move(e) and not read.isdisjoint(e.outvars)):
            read.update(J.variables(e.invars))
    sums, moves, late = set(), set(), set()
    for e in jaxpr.eqns:
        if read.isdisjoint(e.outvars):
            continue
        if is_move(e) and not late.isdisjoint(J.variables(e.invars)):
            moves.add(id(e))
            late.update(e.outvars)
        elif has_parts(e):
            sums.add(id(e))
            late.update(e.outvars)
    return sums, moves


def _same_scalars(jaxpr: Any) -> dict[Any, Any]:
    """Scalars that are made alike, or copied: each by the first of them."""
    same: dict[Any, Any] = {}
    first: dict[Any, Any] = {}
    for e in jaxpr.eqns:
        if (
            len(e.outvars) != 1
            or e.outvars[0].aval.shape
            or any(v.aval.shape for v in e.invars)
            or J.sub_jaxprs(e.params)
        ):
            continue
        operands = tuple((str(v.val), v.aval.dtype) if J.is_literal(v) else same.get(v, v) for v in e.invars)
        if e.primitive.name.startswith("copy"):
            same[e.outvars[0]] = operands[0]
        elif e.primitive in J.ELEMENTWISE:
            same[e.outvars[0]] = first.setdefault((e.primitive, str(sorted(e.params.items())), operands), e.outvars[0])
    return same


def _key(e: Any, small: set[tuple[int, ...]], same: dict[Any, Any]) -> Any:
    """What equations on small arrays have in common that can be one; None if this is no such equation."""
    if len(e.outvars) != 1 or J.is_key(e.outvars[0].aval) or tuple(e.outvars[0].aval.shape) not in small:
        return None
    shape, dtype = tuple(e.outvars[0].aval.shape), e.outvars[0].aval.dtype
    spread = e.primitive is J.primitive("broadcast_in_dim") and not e.invars[0].aval.shape
    if not spread and e.primitive not in J.ELEMENTWISE and e.primitive is not J.primitive("select_n"):
        return None
    operands = []
    for v in e.invars:
        if (v.aval.shape and tuple(v.aval.shape) != shape) or J.is_key(v.aval):
            return None
        scalar = (str(v.val) if J.is_literal(v) else same.get(v, v)) if not v.aval.shape else None
        operands.append((v.aval.dtype, scalar))
    return (e.primitive, "" if spread else str(sorted(e.params.items())), dtype, tuple(operands))


def _sums_of_sums(jaxpr: Any, small: set[tuple[int, ...]]) -> dict[int, list[Any]]:
    """By the last equation (its ``id``), the equations that add up the sums of several small arrays."""
    uses: dict[Any, int] = {}
    for v in [v for e in jaxpr.eqns for v in J.variables(e.invars)] + list(J.variables(jaxpr.outvars)):
        uses[v] = uses.get(v, 0) + 1
    parts: dict[Any, list[Any]] = {}
    for e in jaxpr.eqns:
        (out, *more) = e.outvars
        if e.primitive is J.primitive("reduce_sum") and not out.aval.shape and tuple(e.invars[0].aval.shape) in small:
            parts[out] = [e]
        elif e.primitive is J.primitive("add") and not out.aval.shape and not more:
            ours = [v for v in J.variables(e.invars) if v in parts and uses[v] == 1]
            if ours:
                parts[out] = [p for v in dict.fromkeys(ours) for p in parts.pop(v)] + [e]
    return {id(es[-1]): es for es in parts.values() if sum(e.primitive is J.primitive("reduce_sum") for e in es) > 1}
