"""Slices with a step: ``x[t:t + 20:4]`` is t, t + 4, ..., as far as they are inside of the domain."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.domain import Domain, may_be_empty
from rlfx.recurrence.language.index import Slice, extreme
from rlfx.recurrence.language.time import as_integer, index_of


def step_of(index: slice) -> int:
    """The step of a slice, a positive integer.

    Raises:
      DomainError: if it is something else.
    """
    if index.step is None:
        return 1
    step = as_integer(index.step)
    if step is not None and step > 0:
        return step
    text = ":".join("" if i is None else str(index_of(i) or i) for i in (index.start, index.stop))
    fix = f"Give a number, x[{text}:4]; a part that is computed is chosen, x[:][i] with an array of integers."
    if step is not None:
        fix = f"Give a positive step, and reverse what was read: jnp.flip(x[{text}{f':{-step}' if step < -1 else ''}])."
    fact = (
        f"The step of a slice of a series is a positive integer, got {index.step!r}: timesteps are read in their order."
    )
    raise DomainError(located(fact, where=J.here(), fix=fix))


def stepped(access: Slice, step: int) -> Slice:
    """A slice that begins at the first position inside of the domain that a step from its lower bound meets."""
    first = access.first
    if step == 1 or first == access.lo:
        return access
    return Slice(extreme("max", access.lo, access.lo % step), access.hi)


def strided(values: Any, step: int, domain: Domain) -> Any:
    """Every ``step``-th row."""
    if not may_be_empty(domain, values.shape[0]) or not J.is_symbolic(values.shape[0]):
        return values[::step]
    # jax takes rows of what surely has one.
    length = values.shape[0]
    padded = jnp.concatenate([values, jnp.zeros((1, *values.shape[1:]), values.dtype)])
    rows = lax.iota(np.int32, (length + step - 1) // step) * np.int32(step)
    numbers = lax.GatherDimensionNumbers(tuple(range(1, values.ndim)), (0,), (0,))
    return lax.gather(padded, rows[:, None], numbers, (1, *values.shape[1:]), mode="clip")
