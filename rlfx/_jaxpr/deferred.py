"""Calls that a trace records, and that run on values: what a function may do only when it knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from rlfx._jaxpr.context import ShapedArray


def deferred(fn: Callable, avals: Sequence[Any]) -> Callable:
    """``fn`` as one equation of a trace: it runs, as Python, when the equation is evaluated on values.

    It has derivatives of any order, in reverse mode, deferred as well; under ``jax.vmap`` it runs once for each element, and
    inside what XLA compiles (a loop, a branch) it is traced.

    Args:
      fn: a function of arrays, that gives a list of arrays.
      avals: what has their shapes and dtypes.
    """
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)

    @jax.custom_vjp
    def call(*args: Any) -> list:
        return DEFERRED.bind(*args, fn=fn, avals=avals)

    def backward(args: Sequence, cotangents: Sequence) -> tuple:
        moving = [i for i, x in enumerate(args) if _is_inexact(x)]
        given = [i for i, aval in enumerate(avals) if _is_inexact(aval)]

        def pull(*args_and_cotangents: Any) -> list:
            args, cotangents = args_and_cotangents[: -len(given)], args_and_cotangents[-len(given) :]

            def of(*new: Any) -> list:
                outs = fn(*(dict(enumerate(args)) | dict(zip(moving, new, strict=True))).values())
                return [outs[i] for i in given]

            return list(jax.vjp(of, *(args[i] for i in moving))[1](list(cotangents)))

        if not moving or not given:
            return (None,) * len(args)
        grads = deferred(pull, [args[i] for i in moving])(*args, *(cotangents[i] for i in given))
        found = dict(zip(moving, grads, strict=True))
        return tuple(found.get(i) for i in range(len(args)))

    call.defvjp(lambda *args: (call(*args), args), backward)
    return call


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _run(*args: Any, fn: Callable, avals: Sequence[Any]) -> list:
    return [jnp.asarray(x).astype(aval.dtype) for x, aval in zip(fn(*args), avals, strict=True)]


def _batch(args: Sequence, dims: Sequence, *, fn: Callable, avals: Sequence[Any]) -> tuple:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]

    def each(*args: Any) -> list:
        at = lambda k: fn(*(x if d is None else x[k] for x, d in zip(args, dims, strict=True)))  # noqa: E731
        return [jnp.stack(outs) for outs in zip(*map(at, range(size)), strict=True)]

    wider = tuple(jax.ShapeDtypeStruct((size, *aval.shape), aval.dtype) for aval in avals)
    return DEFERRED.bind(*leading, fn=each, avals=wider), [0] * len(avals)


DEFERRED = Primitive("rlfx_deferred")
DEFERRED.multiple_results = True
DEFERRED.def_impl(_run)
DEFERRED.def_abstract_eval(lambda *_, avals, **__: [ShapedArray(a.shape, a.dtype) for a in avals])
mlir.register_lowering(DEFERRED, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[DEFERRED] = _batch
