"""Functions of one number that mean what one of jax's means, and are computed by other operations on CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def elementwise_like(like: Primitive, on_cpu: Callable[[Any], Any | None]) -> Primitive:
    """A primitive under the name of another that takes one array, with the same parameters and types.

    It stays one equation under ``jax.vmap``, so that what is computed may hang on all elements at once (``jax.lax.cond``).

    Args:
      like: what it means, and what it is off CPUs.
      on_cpu: the operations by which it is computed on CPUs; None: as ``like``.
    """
    primitive = Primitive(like.name)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(like.abstract_eval)
    batching.defvectorized(primitive)

    def computed(x: Any, **params: Any) -> Any:
        found = on_cpu(x)
        return like.bind(x, **params) if found is None else found

    mlir.register_lowering(primitive, mlir.lower_fun(like.bind, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=False), platform="cpu")
    return primitive


def define_slope(primitive: Primitive, slope: Callable[..., Any]) -> None:
    """Its derivative: ``slope(dx, y, x, **params) -> dy``."""
    ad.defjvp2(primitive, slope)
