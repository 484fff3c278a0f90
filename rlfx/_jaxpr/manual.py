"""Inside ``jax.shard_map``: over which axes of a mesh a value varies by its type."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core, custom_derivatives
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def varying_axes(values: Sequence) -> tuple:
    """The axes of a mesh over which any of the values varies by its type: inside ``jax.shard_map`` with ``check_vma``."""
    types = [core.typeof(x) for x in values]  # under another name before jax 0.10.2
    found = (t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", frozenset()) for t in types)
    return tuple(sorted(frozenset().union(*found)))


def varying(values: Any, axes: tuple) -> Any:
    """The values with types that vary over ``axes``: then the gradient of what all devices share is summed over them."""
    missing = lambda x: tuple(a for a in axes if a not in varying_axes([x]))  # noqa: E731
    return jax.tree.map(lambda x: core.pvary(x, missing(x)), values)


def unchecked(fn: Callable, axes: tuple) -> Callable:
    """``fn`` without jax's check of what varies over a mesh; with any ``axes``, all of its results vary over these.

    What is traced once, for one timestep, has no such types.
    """
    if not axes:
        return fn

    def untyped(x: Any) -> Any:
        if isinstance(x, custom_derivatives.CustomVJPPrimal):
            return dataclasses.replace(x, value=untyped(x.value))
        return x if isinstance(x, jax.custom_derivatives.SymbolicZero) else _retyped(x, ())

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        args = jax.tree.map(untyped, args)
        with config._check_vma(False):
            outs = fn(*args)
        return jax.tree.map(lambda x: _retyped(x, axes), outs)

    return call


def _retyped(x: Any, axes: tuple) -> Any:
    """The value with a type that varies over exactly ``axes``. Unlike ``jax.lax.pvary``, it means nothing."""
    before = varying_axes([x])
    return x if before == axes else _retype_p.bind(x, before=before, axes=axes)


def _retype_aval(aval: Any, *, before: tuple, axes: tuple) -> Any:
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=core.ManualAxisType(varying=frozenset(axes)))
    return aval.update(vma=frozenset(axes))


_retype_p = Primitive("retype")
_retype_p.def_impl(lambda x, **_: x)
_retype_p.def_abstract_eval(_retype_aval)
mlir.register_lowering(_retype_p, lambda ctx, x, **_: [x])
ad.deflinear(_retype_p, lambda t, *, before, axes: [_retyped(t, before)])
batching.primitive_batchers[_retype_p] = lambda args, dims, **params: (_retype_p.bind(*args, **params), dims[0])
