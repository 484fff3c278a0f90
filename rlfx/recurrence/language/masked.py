"""Slices that end, or begin, at a time that the program computes: ``x[t:end]`` is of ``x[t:]`` what comes before ``end``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.index import Index
from rlfx.recurrence.language.lookups import times
from rlfx.recurrence.language.operands import NoArray, mask_like
from rlfx.recurrence.language.primitives import EVENT
from rlfx.recurrence.language.time import Time, index_of

tree = jax.tree_util


@dataclass(frozen=True)
class Bound:
    """A bound of a slice: an index expression, and a computed time that may come before it, or after it for a lower bound."""

    index: Index
    event: Any = None


def bound_of(bound: Any, default: Index, slices: slice) -> Bound:
    """What is written as a bound: nothing, an index expression, a traced integer, or a pair of the last two.

    Raises:
      DomainError: if it is something else.
    """
    if bound is None:
        return Bound(default)
    index, event = bound if isinstance(bound, tuple) and len(bound) == 2 else (bound, None)
    expr, explicit = index_of(index), event is not None
    if expr is None and not explicit:
        expr, event = default, index
    if expr is None or (event is not None and not _is_time(event)):
        raise DomainError(
            located(
                f"A slice bound must be affine in t (also //, %, rlfx.minimum, rlfx.maximum), a traced integer, or a pair "
                f"of them, got {bound!r}.",
                where=J.here(),
                fix="Write x[t:t + 5], x[t:end], or x[t:(t + 5, end)] for the first of both; mask a static slice for others.",
            )
        )
    if event is not None and slices.step is not None and bound is slices.start:
        fact = "A slice with a step begins at an index expression: which timesteps it takes is known before it runs."
        raise DomainError(
            located(fact, where=J.here(), fix="Read x[t - 8:t + 1:2], and mask what comes before the event.")
        )
    if event is None:
        return Bound(expr)
    return Bound(expr, times(event) if explicit else checkpoint_name(times(event), EVENT))


def _is_time(x: Any) -> bool:
    """Whether it is one integer."""
    if isinstance(x, (int, np.integer, Time)):
        return not isinstance(x, bool)
    return getattr(x, "shape", None) == () and jnp.issubdtype(x.dtype, jnp.integer)


def inside_of(now: Any, first: Any, stop: Any) -> Any:
    """Which of the absolute times ``now`` are in [first, stop), either of them None for no such bound."""
    after = jnp.ones(now.shape, bool) if first is None else now >= first
    return after if stop is None else after & (now < stop)


def _lowest(dtype: Any) -> Any:
    return (
        False
        if jnp.issubdtype(dtype, jnp.bool_)
        else -jnp.inf
        if jnp.issubdtype(dtype, jnp.inexact)
        else jnp.iinfo(dtype).min
    )


def _highest(dtype: Any) -> Any:
    return (
        True
        if jnp.issubdtype(dtype, jnp.bool_)
        else jnp.inf
        if jnp.issubdtype(dtype, jnp.inexact)
        else jnp.iinfo(dtype).max
    )


@dataclass(frozen=True, eq=False)
class Masked(NoArray):
    """``x[t:end]`` with a computed ``end``: a slice of which only the timesteps before ``end`` count.

    ==============================  ==================================================================
    ``x[t:end]``                    from t to before ``end``, an integer that the program computes
    ``x[begin:t + 1]``              since ``begin``
    ``x[t:(t + 5, end)]``           to the first of both bounds; ``x[(t - 5, begin):t + 1]`` from the last of both
    ==============================  ==================================================================

    ``end`` and ``begin`` are absolute times (``t.now``, ``t0`` included), as the indices of a lookup are; what is outside of
    the domain, or after an environment's end, is not read. How many timesteps there are is known when the program runs, so
    this is no array: it has reductions along time, and :meth:`filled`. They are those of an array of the timesteps that
    count: the others have no part in values or gradients.

    Attributes:
      inside: bool, which timesteps of the static slice count; [n].

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def f(xs, carry, t):
      ...     reward, done = rlfx.inputs(xs)[t]
      ...     end = rlfx.solve(lambda e: jnp.where(done, t.now + 1, e[t + 1]), end=t.now + 1)
      ...     return carry, rlfx.series(reward)[t:end].sum()
      >>> xs = jnp.arange(1.0, 6.0), jnp.array([False, True, False, False, False])
      >>> rlfx.unroll(f, length=5)(xs, None)[1]
      Array([ 3.,  2., 12.,  9.,  5.], dtype=float32)
    """

    name = "slice to a computed time"
    because = "its length is known when the program runs"
    fix = "Reduce it, x[t:end].sum(), or give the other timesteps a value, x[t:end].filled(0.0)."

    _values: Any
    inside: Any

    def filled(self, value: Any) -> Any:
        """The static slice, with ``value`` (a scalar) at the timesteps that do not count: arrays [n, ...]."""
        fill = lambda x: jnp.where(mask_like(self.inside, x), x, jnp.asarray(value).astype(x.dtype))  # noqa: E731
        return tree.tree_map(fill, self._values)

    @property
    def count(self) -> jax.Array:
        """How many timesteps count, int32."""
        return jnp.sum(self.inside, dtype=jnp.int32)

    def sum(self) -> Any:
        """Their sum; of none 0."""
        return self._reduced(jnp.sum, lambda _: 0)

    def prod(self) -> Any:
        """Their product; of none 1."""
        return self._reduced(jnp.prod, lambda _: 1)

    def max(self) -> Any:
        """The largest; of none the lowest there is, -inf for floats."""
        return self._extreme(jnp.max, _lowest)

    def min(self) -> Any:
        """The smallest; of none the highest there is, inf for floats."""
        return self._extreme(jnp.min, _highest)

    def any(self) -> Any:
        """Whether one of them is true; of none False."""
        return self._reduced(jnp.any, lambda _: 0)

    def all(self) -> Any:
        """Whether all of them are; of none True."""
        return self._reduced(jnp.all, lambda _: 1)

    def mean(self) -> Any:
        """Their mean, a float; of none NaN."""

        def one(total: Any) -> Any:
            dtype = jnp.result_type(total / 1)
            mean = total.astype(dtype) / jnp.maximum(self.count, 1).astype(dtype)  # of none no derivative is infinite
            return jnp.where(self.count > 0, mean, jnp.nan)

        return tree.tree_map(one, self.sum())

    def _extreme(self, reduce: Callable, neutral: Callable) -> Any:
        return self._reduced(lambda x, axis: reduce(x, axis, initial=neutral(x.dtype)), neutral)

    def _reduced(self, reduce: Callable, neutral: Callable) -> Any:
        def one(x: Any) -> Any:
            fill = jnp.asarray(neutral(x.dtype)).astype(x.dtype)
            return reduce(jnp.where(mask_like(self.inside, x), x, fill), axis=0)

        return tree.tree_map(one, self._values)
