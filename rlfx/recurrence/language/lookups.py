"""Random access by traced integers: which indices are allowed, and what is outside of what is there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, expect, one_of, optional
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import Index
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.time import Time, as_integer

_LEAST, _LARGEST = -(2**31), 2**31 - 1
#: What a lookup outside gives: NaN (0 for integers and booleans), or the nearest that is there.
OUTSIDE = ("fill", "clip")


def check_outside(outside: Any) -> None:
    """Raise a DomainError unless it is one of :data:`OUTSIDE`."""
    expect("outside", outside, one_of(*OUTSIDE), of="lookup")


def filled(inside: Any, value: Any) -> Any:
    """``value`` where ``inside`` (its leading axes), else NaN, or 0 where the dtype has no NaN.

    Example:
      >>> filled(jnp.array([True, False]), jnp.array([1.0, 2.0]))
      Array([ 1., nan], dtype=float32)
    """
    if J.is_key(value):
        fill = J.zero_keys(value.shape, value.dtype)
    else:
        fill = jnp.full_like(value, jnp.nan if jnp.issubdtype(value.dtype, jnp.inexact) else 0)
    return jnp.where(mask_like(inside, value), value, fill)


def check_window(window: Any, history: Any) -> None:
    """Raise a DomainError unless it is a promise how far back a series is read."""
    expect("window", window, optional(POSITIVE), of="rlfx.series")
    if window is not None and history is not None:
        fact = "rlfx.series(v, window=, history=) says twice how far back it is read."
        raise DomainError(located(fact, where=J.here(), fix="Give the History alone: its capacity says it."))


def check_promise(window: int, lo: Index, hi: Index, read: str, domain: Domain) -> None:
    """Raise a DomainError if a read of [lo, hi) reaches further back than ``window`` timesteps, this one included."""
    first, stop = np.maximum(domain.evaluate(lo), 0), np.minimum(domain.evaluate(hi), domain.length)
    back = int(np.max(domain.times() - first, where=first < stop, initial=0))
    if back >= window:
        raise DomainError(
            located(
                f"A read {read} reaches {back} timesteps back, and the series was promised to be read at most {window - 1} back.",
                where=J.here(),
                fix=f"Name it with rlfx.series(v, window={back + 1}), or without window=.",
            )
        )


def times(i: Any) -> Any:
    """The absolute times of a lookup, int32 of any shape; what an int32 can't hold is outside as its ends are.

    Raises:
      DomainError: if ``i`` is no integer or array of integers.
    """
    return _int32(i, "i")


def environments(b: Any, domain: Domain) -> Any:
    """The environments of a lookup, int32 of any shape.

    Raises:
      DomainError: if they are no integers, the program has no batch, or an integer names none of its environments.
    """
    if domain.batch is None:
        raise DomainError(
            located(
                "x[i, b] reads another environment, and this program has no batch.", where=J.here(), fix="Use x[i]."
            )
        )
    number = as_integer(b)
    if number is not None and not 0 <= number < domain.batch:
        raise DomainError(
            located(
                f"x[i, b] reads environment {number}, and there are {domain.batch}, numbered from 0 to {domain.batch - 1}.",
                where=J.here(),
                fix="Negative numbers do not count from the end: give one of these.",
            )
        )
    return _int32(b, "b")


def _int32(value: Any, name: str) -> Any:
    dtype = getattr(value, "dtype", None)
    if isinstance(value, str):
        fact = f"A series is indexed by time first; it was asked for {value!r}."
        raise DomainError(located(fact, where=J.here(), fix=f"Read it, and then the leaf: x[t][{value!r}]."))
    if isinstance(value, (bool, np.bool_)) or dtype == np.dtype(bool):
        fact = f"{name} is a boolean, and a series is indexed by time: a mask says nothing of which timesteps there are."
        fix = "Read a slice and choose from it, jnp.where(mask, x[t:], 0.0).sum(); of one timestep jnp.where(here, x[t], 0.0)."
        raise DomainError(located(fact, where=J.here(), fix=fix))
    if as_integer(value) is None and (dtype is None or not jnp.issubdtype(dtype, jnp.integer)):
        raise DomainError(
            located(
                f"A series is indexed by expressions affine in t, or by traced integers; {name} is {value!r}.",
                where=J.here(),
                fix="Use t, integers, //, % by a constant, rlfx.minimum and rlfx.maximum; or an integer array.",
            )
        )
    if dtype is None:
        return jnp.int32(max(_LEAST, min(value, _LARGEST)))
    value = jnp.asarray(value.now if isinstance(value, Time) else value)
    info = jnp.iinfo(value.dtype)
    if info.min < _LEAST or info.max > _LARGEST:
        value = jnp.clip(value, max(info.min, _LEAST), min(info.max, _LARGEST))
    return value.astype(jnp.int32)
