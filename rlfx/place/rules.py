"""How equations are cut: the index space of each class of primitives, and what is a view rather than work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import ARGUMENTS, CUMULATIVE, REDUCTIONS, Nest, elementwise, nest_of
from rlfx.place import jaxpr as jp
from rlfx.place import tensors as tn


@dataclass(frozen=True)
class Work:
    """The loops of an equation, which a grid cuts, and what running some of each costs."""

    loops: Nest
    kind: str
    flops: Callable[[tuple[int, ...]], float]


#: What is cut: the kind of its nodes, and operations for each point of the loops.
_KINDS: dict[Any, tuple[str, float]] = {
    **dict.fromkeys(J.ELEMENTWISE, ("elementwise", 1.0)),
    **dict.fromkeys((jp.dot_general_p, J.primitive("conv_general_dilated")), ("matmul", 2.0)),
    **dict.fromkeys(
        (*REDUCTIONS, *CUMULATIVE, *ARGUMENTS, J.primitive("sort"), J.primitive("top_k")), ("reduction", 1.0)
    ),
}


def work(eqn: jp.JaxprEqn) -> Work:
    """How an equation is cut; what has no place in the table is opaque: one shard that reads its operands whole."""
    ins, outs = ([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars))
    loops = nest_of(eqn.primitive, eqn.params, ins, outs) if eqn.primitive in _KINDS else None
    if loops is not None:
        kind, each = _KINDS[eqn.primitive]
        return Work(loops, kind, lambda sizes: each * math.prod(sizes))

    def flops(_: tuple[int, ...]) -> float:
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        cost = jax.jit(lambda *xs: jp.evaluate(eqn, *xs)).lower(*avals).cost_analysis() or {}
        return max(float(cost.get("flops", 0.0)), float(sum(v.aval.size for v in eqn.outvars)))

    operands, results = (tuple((None,) * len(shape) for shape in shapes) for shapes in (ins, outs))
    return Work(Nest((), operands, results), "opaque", flops)


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
    if eqn.primitive in J.ELEMENTWISE and all(map(tn.synthetic, operands)):

        def make(region: tn.Region) -> jax.Array:
            axes = elementwise(eqn.params, [x.shape for x in operands], [shape]).operands
            aligned = [tuple((0, 1) if a is None else region[a] for a in of) for of in axes]
            parts = [x.read(r).run({}) for x, r in zip(operands, aligned, strict=True)]
            return jp.evaluate(eqn, *parts)[0]

        return tn.Synthetic(shape, make)
    return None
