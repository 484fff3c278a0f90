"""Calls of Python functions for what they do, ordered by what they are given: in any loop and condition, also under ``jax.vmap``.

jax's own ``io_callback`` has no meaning in a condition, or in a loop of members that end apart, under ``jax.vmap``: how often it
should run there jax can't know. Here the function is told whether it is to act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import effects
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


class HostEffect(effects.Effect):
    """That of a call on the host."""

    def __str__(self) -> str:
        return "Host"


HOST_EFFECT = HostEffect()
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _allowed.add_type(HostEffect)


def host_call(fn: Callable, order: Any, acts: Any, *args: Any) -> Any:
    """``fn(*args)`` on the host if ``acts``; ``order``, int32, is given back when it is done.

    Under ``jax.vmap`` it is called for one member after the other.
    """
    return _host_p.bind(order, acts, *args, fn=fn)


def _run(order: Any, acts: Any, *args: Any, fn: Callable) -> Any:
    def called(order: Any, acts: Any, *args: Any) -> np.ndarray:
        if acts:
            fn(*(np.asarray(x) for x in args))
        return np.asarray(order, np.int32)

    return io_callback(called, jax.ShapeDtypeStruct((), jnp.int32), order, acts, *args)


def _batch(args: Sequence, dims: Sequence, *, fn: Callable) -> tuple[Any, int]:
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = [x for x, d in zip(moved, dims, strict=True) if d is not None]

    def one(mine: Sequence) -> Any:
        left = iter(mine)
        return _host_p.bind(*(x if d is None else next(left) for x, d in zip(moved, dims, strict=True)), fn=fn)

    return jax.lax.map(one, mapped), 0


_host_p = Primitive("host_call")
_host_p.def_effectful_abstract_eval(lambda order, *_, fn: (order, {HOST_EFFECT}))
_host_p.def_impl(_run)
mlir.register_lowering(_host_p, mlir.lower_fun(_run, multiple_results=False))
batching.primitive_batchers[_host_p] = _batch
