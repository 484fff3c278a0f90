"""Functions of one or two numbers that mean what one of jax's means, and are computed by other operations on CPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import core, dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def elementwise_like(like: Primitive, on_cpu: Callable[..., Any | None], operands: int = 1, fewest: int = 0) -> Primitive:
    """A primitive under the name of another, of arrays element by element, with the same parameters and types.

    It stays one equation under ``jax.vmap``, so that what is computed may hang on all elements at once (``jax.lax.cond``).

    Args:
      like: what it means, and what it is off CPUs.
      on_cpu: the operations by which it is computed on CPUs; None: as ``like``.
      fewest: of fewer elements, or of a length that is not known, it is as ``like``.
      operands: of two, each has the other's shape, or 1 in the place of a length.
    """
    primitive = Primitive(like.name)
    primitive.like = like  # type: ignore[attr-defined]
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(like.abstract_eval)
    (batching.defvectorized if operands == 1 else batching.defbroadcasting)(primitive)

    def computed(*xs: Any, **params: Any) -> Any:
        sizes = np.broadcast_shapes(*(x.shape for x in xs)) if all(core.is_constant_shape(x.shape) for x in xs) else None
        found = None if sizes is None or math.prod(sizes) < fewest else on_cpu(*xs)
        return like.bind(*xs, **params) if found is None else found

    mlir.register_lowering(primitive, mlir.lower_fun(like.bind, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=False), platform="cpu")
    return primitive


def define_slopes(primitive: Primitive, *slopes: Callable[..., Any]) -> None:
    """Its derivative by each operand: ``slope(dx, y, *operands, **params) -> dy``."""
    ad.defjvp2(primitive, *slopes)


def of_jax(value: Any) -> Any:
    """A closed jaxpr with the primitives that others are like in their place, for who knows jax's only.

    Example:
      >>> import jax
      >>> halved = elementwise_like(jax.lax.sin_p, lambda x: None)
      >>> closed = jax.make_jaxpr(lambda x: halved.bind(x, accuracy=None))(1.0)
      >>> closed.eqns[0].primitive is jax.lax.sin_p, of_jax(closed).eqns[0].primitive is jax.lax.sin_p
      (False, True)
    """
    if isinstance(value, (tuple, list)):
        found = [of_jax(x) for x in value]
        return value if all(x is y for x, y in zip(found, value, strict=True)) else type(value)(found)
    if isinstance(value, core.Jaxpr):  # closed ones, too, from jax 0.11 on
        eqns = [_equation(e) for e in value.eqns]
        return value if all(x is y for x, y in zip(eqns, value.eqns, strict=True)) else value.replace(eqns=eqns)
    if isinstance(value, core.ClosedJaxpr):
        body = of_jax(value.jaxpr)
        return value if body is value.jaxpr else core.ClosedJaxpr(body, value.consts)
    return value


def _equation(eqn: Any) -> Any:
    params = {name: of_jax(x) for name, x in eqn.params.items()}
    primitive = getattr(eqn.primitive, "like", eqn.primitive)
    if primitive is eqn.primitive and all(params[name] is x for name, x in eqn.params.items()):
        return eqn
    return eqn.replace(primitive=primitive, params=params)
