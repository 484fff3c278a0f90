"""Functions of one or two numbers that mean what one of jax's means, and are computed by other operations on CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def elementwise_like(like: Primitive, on_cpu: Callable[..., Any | None], operands: int = 1) -> Primitive:
    """A primitive under the name of another, of arrays element by element, with the same parameters and types.

    It stays one equation under ``jax.vmap``, so that what is computed may hang on all elements at once (``jax.lax.cond``).

    Args:
      like: what it means, and what it is off CPUs.
      on_cpu: the operations by which it is computed on CPUs; None: as ``like``.
      operands: of two, each has the other's shape, or 1 in the place of a length.
    """
    primitive = Primitive(like.name)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(like.abstract_eval)
    (batching.defvectorized if operands == 1 else batching.defbroadcasting)(primitive)

    def computed(*xs: Any, **params: Any) -> Any:
        found = on_cpu(*xs)
        return like.bind(*xs, **params) if found is None else found

    mlir.register_lowering(primitive, mlir.lower_fun(like.bind, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=False), platform="cpu")
    return primitive


def define_slopes(primitive: Primitive, *slopes: Callable[..., Any]) -> None:
    """Its derivative by each operand: ``slope(dx, y, *operands, **params) -> dy``."""
    ad.defjvp2(primitive, *slopes)
