"""Threefry's rounds as one equation, which is lowered to straight arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import dispatch
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from jax._src.random import threefry2x32
from jax.extend.core import Primitive
from jax.interpreters import batching

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def rounds(add: Callable, xor: Callable, turned: Callable, k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011), of whatever these functions are of; constants are ``np.uint32``.

    Args:
      turned: ``(x, r)``, the bits moved left by r, and around.
    """
    keys = (k0, k1, xor(xor(k0, k1), _PARITY))
    x0, x1 = add(x0, k0), add(x1, k1)
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = add(x0, x1)
            x1 = xor(turned(x1, r), x0)
        x0, x1 = add(x0, keys[(i + 1) % 3]), add(x1, add(keys[(i + 2) % 3], np.uint32(i + 1)))
    return x0, x1


threefry_block = Primitive("threefry2x32_unrolled")
"""``bind(k0, k1, x0, x1)``: the rounds, of operands that are broadcast.

One equation however many axes ``jax.vmap`` adds, as jax's own: to trace its hundred operations under every axis, and to lower
them one by one from a jaxpr, took longer than all else about a draw.
"""
threefry_block.multiple_results = True
threefry_block.like = threefry2x32.threefry2x32_p  # type: ignore[attr-defined]  # for `of_jax`
threefry_block.def_impl(functools.partial(dispatch.apply_primitive, threefry_block))
threefry_block.def_abstract_eval(threefry2x32._threefry2x32_abstract_eval)
batching.defbroadcasting(threefry_block)


def _lowered(ctx: Any, *operands: Any) -> tuple[Any, Any]:
    aval = ctx.avals_out[0]
    rank = len(aval.shape)

    @functools.cache
    def constant(value: int) -> Any:
        return mlir.full_like_aval(ctx, np.uint32(value), aval)

    def word(x: Any) -> Any:
        return constant(int(x)) if isinstance(x, np.uint32) else x

    def whole(x: Any, of: Any) -> Any:
        return mlir.broadcast_in_dim(ctx, x, aval, broadcast_dimensions=range(rank - len(of.shape), rank))

    add, xor = (lambda a, b, op=op: op(a, word(b)) for op in (hlo.add, hlo.xor))
    turned = lambda x, r: hlo.or_(hlo.shift_left(x, constant(r)), hlo.shift_right_logical(x, constant(32 - r)))  # noqa: E731
    return rounds(add, xor, turned, *map(whole, operands, ctx.avals_in))


mlir.register_lowering(threefry_block, _lowered, inline=False)
