"""How equations are cut: the index space of each class of primitives, and what is a view rather than work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.place import jaxpr as jp
from rlfx.place import tensors as tn


@dataclass(frozen=True)
class Iteration:
    """The index space of an equation.

    ``operands[i][a]`` is the iteration axis that axis ``a`` of operand ``i`` follows (None: read it whole); ``out``
    likewise for results; ``reduced`` axes appear in no result and are combined by ``combine``.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[int | None, ...], ...]
    out: tuple[int, ...]
    reduced: tuple[int, ...]
    pinned: frozenset[int]
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None
    kind: str
    flops: Callable[[tuple[int, ...]], float]


def _aligned(operand: tuple[int, ...], out: tuple[int, ...]) -> tuple[int | None, ...]:
    """The output axis that each operand axis follows; scalars have none, axes of size one may be stretched."""
    return tuple(None if n == 1 != out[a] else a for a, n in enumerate(operand))


def _elementwise(eqn: jp.JaxprEqn) -> Iteration:
    shape = eqn.outvars[0].aval.shape
    axes = tuple(range(len(shape)))
    operands = tuple(_aligned(v.aval.shape, shape) for v in eqn.invars)
    return Iteration(shape, operands, axes, (), frozenset(), None, "elementwise", math.prod)


def _dot(eqn: jp.JaxprEqn) -> Iteration:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    lhs_free = [i for i in range(len(lhs)) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(len(rhs)) if i not in (*rhs_contract, *rhs_batch)]
    sizes = [lhs[i] for i in (*lhs_batch, *lhs_free, *lhs_contract)] + [rhs[i] for i in rhs_free]
    batch, rows, inner = len(lhs_batch), len(lhs_free), len(lhs_contract)
    lhs_map, rhs_map = [0] * len(lhs), [0] * len(rhs)
    for axis, i in enumerate((*lhs_batch, *lhs_free, *lhs_contract)):
        lhs_map[i] = axis
    for axis, i in enumerate(rhs_batch):
        rhs_map[i] = axis
    for axis, i in enumerate(rhs_contract):
        rhs_map[i] = batch + rows + axis
    for axis, i in enumerate(rhs_free):
        rhs_map[i] = batch + rows + inner + axis
    reduced = tuple(range(batch + rows, batch + rows + inner))
    out = tuple(i for i in range(len(sizes)) if i not in reduced)
    return Iteration(
        tuple(sizes), (tuple(lhs_map), tuple(rhs_map)), out, reduced, frozenset(), jnp.add, "matmul",
        lambda n: 2.0 * math.prod(n),
    )  # fmt: skip


def _reduction(eqn: jp.JaxprEqn) -> Iteration:
    shape, axes = eqn.invars[0].aval.shape, tuple(eqn.params["axes"])
    out = tuple(i for i in range(len(shape)) if i not in axes)
    combine = jp.REDUCTIONS[eqn.primitive]
    return Iteration(shape, (tuple(range(len(shape))),), out, axes, frozenset(), combine, "reduction", math.prod)


def _along(eqn: jp.JaxprEqn) -> Iteration:
    shape, named = eqn.invars[0].aval.shape, eqn.params[jp.ALONG[eqn.primitive]]
    pinned = frozenset((named,) if isinstance(named, int) else named)
    gone = pinned if len(eqn.outvars[0].aval.shape) < len(shape) else frozenset()
    out = tuple(i for i in range(len(shape)) if i not in gone)
    return Iteration(shape, (tuple(range(len(shape))),), out, (), pinned, None, "reduction", math.prod)


def _opaque(eqn: jp.JaxprEqn) -> Iteration:
    def flops(_: tuple[int, ...]) -> float:
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        cost = jax.jit(lambda *xs: jp.evaluate(eqn, *xs)).lower(*avals).cost_analysis() or {}
        return max(float(cost.get("flops", 0.0)), float(sum(v.aval.size for v in eqn.outvars)))

    operands = tuple(tuple(None for _ in v.aval.shape) for v in eqn.invars)
    return Iteration((), operands, (), (), frozenset(), None, "opaque", flops)


def iteration(eqn: jp.JaxprEqn) -> Iteration:
    """The index space of an equation; primitives without a rule are opaque: one shard that reads its operands whole."""
    if eqn.primitive in jp.ELEMENTWISE:
        return _elementwise(eqn)
    if eqn.primitive is jp.dot_general_p:
        return _dot(eqn)
    if eqn.primitive in jp.REDUCTIONS:
        return _reduction(eqn)
    if eqn.primitive in jp.ALONG:
        return _along(eqn)
    return _opaque(eqn)


def _slice_view(eqn: jp.JaxprEqn, x: tn.Tensor) -> tn.Tensor | None:
    strides = eqn.params["strides"]
    if strides is not None and any(s != 1 for s in strides):
        return None
    return tn.shift(x, tuple(eqn.params["start_indices"]), tuple(eqn.params["limit_indices"]))


VIEWS: Mapping[Any, Callable[[jp.JaxprEqn, tn.Tensor], tn.Tensor | None]] = {
    **{
        prim: lambda eqn, x: tn.cast(x, eqn.outvars[0].aval.shape, lambda a: jp.evaluate(eqn, a)[0])
        for prim in jp.CASTS
    },
    jp.transpose_p: lambda eqn, x: tn.transpose(x, tuple(eqn.params["permutation"])),
    jp.broadcast_in_dim_p: lambda eqn, x: tn.broadcast(
        x, tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    ),
    jp.reshape_p: lambda eqn, x: (
        None if eqn.params["dimensions"] is not None else tn.reshape(x, tuple(eqn.params["new_sizes"]))
    ),
    jp.squeeze_p: lambda eqn, x: tn.squeeze(x, tuple(eqn.params["dimensions"])),
    jp.slice_p: _slice_view,
}


def view(eqn: jp.JaxprEqn, operands: Sequence[tn.Tensor]) -> tn.Tensor | None:
    """The result as a lazy view of its operands, or None if it must be computed by a node."""
    if eqn.primitive in VIEWS and len(operands) == 1:
        return VIEWS[eqn.primitive](eqn, operands[0])
    if eqn.primitive is jp.concatenate_p:
        return tn.Joined(tuple(operands), eqn.params["dimension"], eqn.outvars[0].aval.shape)
    shape = eqn.outvars[0].aval.shape
    if eqn.primitive is jp.iota_p:
        axis, dtype = eqn.params["dimension"], eqn.params["dtype"]
        return tn.Synthetic(
            shape,
            lambda region: (
                jax.lax.broadcasted_iota(dtype, tn.region_shape(region), axis) + jnp.asarray(region[axis][0], dtype)
            ),
        )
    if eqn.primitive in jp.ELEMENTWISE and all(map(tn.synthetic, operands)):

        def make(region: tn.Region) -> jax.Array:
            aligned = [tuple((0, 1) if a is None else region[a] for a in _aligned(x.shape, shape)) for x in operands]
            parts = [x.read(r).run({}) for x, r in zip(operands, aligned, strict=True)]
            return jp.evaluate(eqn, *parts)[0]

        return tn.Synthetic(shape, make)
    return None
