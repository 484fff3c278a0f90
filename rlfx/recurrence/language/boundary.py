"""Values that are given for a series, and must fit it: before its start, after its end, in a window, in a history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import BoundaryError, RlfxError, located
from rlfx.recurrence.language.domain import levels
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.operands import NoArray
from rlfx.recurrence.language.time import without_time

tree = jax.tree_util
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def boundary(value: Any, treedef: Any, avals: list, name: str) -> tuple:
    """A boundary value (a pytree prefix) as one array per leaf, of its shape and dtype.

    Raises:
      BoundaryError: if its structure, a shape or a dtype does not fit.
    """
    like, value = tree.tree_unflatten(treedef, avals), without_time(value)
    try:
        spread = tree.tree_leaves(tree.tree_map(lambda v, sub: [v] * tree.tree_structure(sub).num_leaves, value, like))
        pairs = zip(spread, avals, strict=True)
        return tuple(jnp.broadcast_to(fitted(v, aval.dtype), aval.shape) for v, aval in pairs)
    except RlfxError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(value, Mapping) and value and set(value) <= {level.names.dim for level in levels()}:
            raise _by_no_dimension(value, name) from None
        raise BoundaryError(
            located(
                f"{name}= does not fit the series: {error}",
                where=J.here(),
                fix=f"Give a value (or a prefix of the pytree) that broadcasts to {like}.",
            )
        ) from None


def _by_no_dimension(value: Mapping, name: str) -> RlfxError:
    """Why ``{"i": 0.0}`` is no boundary along the dimension of the program around this one."""
    *_, around, here = (None, *levels())
    given = f"{name}={{{', '.join(f'{dim!r}: ...' for dim in value)}}}"
    if around is None:
        fact, fix = f"{given} names the dimension of {here}, which is called by no other.", f"Give {name}=v."
    elif around.names.dim == here.names.dim:
        fact = f"{given} names the dimension of two programs, {around} and {here}."
        fix = 'Give one of them a name of its own, dim="i".'
    else:
        fact = f"{given} names dimensions that are further outside than that of {around}, which calls {here.program}."
        fix = f"Name those of these two, {name}={{{around.names.dim!r}: ..., {here.names.dim!r}: ...}}."
    return told(BoundaryError(located(fact, where=J.here(), fix=fix)))


def fitted(value: Any, dtype: Any) -> Any:
    """An array in another dtype, if that keeps its values; floats are rounded to the precision of the other.

    Raises:
      TypeError: for what is no array, a complex number in floats, a float in integers, an integer out of the range of the
        other dtype, and one that is traced if the other dtype does not hold all values of its own.
    """
    if isinstance(value, NoArray):
        raise value.refusal()
    x = jnp.asarray(value)
    if x.dtype == dtype and hasattr(value, "dtype"):
        return x
    mine, other = _kind(x.dtype), _kind(dtype)
    known = None if isinstance(value, J.Tracer) else value
    if mine is None or other is None or (mine > other and (known is None or mine != 1)):
        raise TypeError(f"its dtype is {x.dtype}, the series' is {jnp.dtype(dtype).name}")
    if known is None:
        if mine <= 1 and other <= 1 and not _held(x, dtype):
            raise TypeError(
                f"its dtype is {x.dtype}, and {jnp.dtype(dtype).name}, the series', does not hold all of that"
            )
        return x.astype(dtype)
    known = np.asarray(known)
    with np.errstate(over="ignore"):
        there = known.astype(dtype)
    if (mine <= 1 and other <= 1 and (there != known).any()) or (np.isfinite(known) & ~np.isfinite(there)).any():
        raise TypeError(f"{value} is no {jnp.dtype(dtype).name}, the series' dtype")
    return jnp.asarray(there)


def _kind(dtype: Any) -> int | None:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def _held(x: Any, dtype: Any) -> bool:
    """Whether a dtype of integers or booleans holds all values of a traced one; a Python number takes any dtype."""
    return x.weak_type or (_range(x.dtype)[0] >= _range(dtype)[0] and _range(x.dtype)[1] <= _range(dtype)[1])


def _range(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype == jnp.bool_ else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))
