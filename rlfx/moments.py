"""Running moments of values, shared by a batch: observations and returns on a common scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.recurrence.language import reductions
from rlfx.recurrence.language.domain import current_domain
from rlfx.recurrence.language.operands import as_array

tree = jax.tree_util

_LEAST = 1e-8  # variance, so that what never changes is divided by something


@tree.register_dataclass
@dataclass(frozen=True)
class Moments:
    """The mean and the variance of all values so far, elementwise.

    The variance is kept, not the sum of squares: once ``count`` is beyond the integers of a float32 the moments become
    those of the last many values, and stay right.

    Attributes:
      count: how many values there were, float32[()].
      mean: a pytree like a value, of float32.
      variance: the same (biased, as ``jnp.var``); 1 before the first value.
    """

    count: Any
    mean: Any
    variance: Any

    @classmethod
    def of(cls, like: Any) -> Moments:
        """The moments of no value yet; ``like`` is one value of one environment, a pytree of arrays.

        Example:
          >>> Moments.of(jnp.zeros(3))(jnp.array([1.0, 2.0, 30.0]))
          Array([ 1.,  2., 10.], dtype=float32)
        """
        zeros = tree.tree_map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), like)
        return cls(jnp.zeros((), jnp.float32), zeros, tree.tree_map(jnp.ones_like, zeros))

    def __call__(self, x: Any, clip: float = 10.0) -> Any:
        """``(x - mean) / deviation`` in ``[-clip, clip]``, float32, of ``x[...]`` or ``x[N, ...]``: nothing is counted."""

        def one(x, mean, variance):
            mean, variance = jax.lax.stop_gradient((mean, variance))
            mean, deviation = _aligned(mean, x), _aligned(jnp.sqrt(variance + _LEAST), x)
            return jnp.clip((x.astype(jnp.float32) - mean) / deviation, -clip, clip)

        return tree.tree_map(one, _like("Moments", x, self.mean), self.mean, self.variance)

    def scale(self, x: Any) -> Any:
        """``x / deviation``, float32: a reward by the moments of its discounted sum."""

        def one(x, variance):
            return x.astype(jnp.float32) / _aligned(jnp.sqrt(jax.lax.stop_gradient(variance) + _LEAST), x)

        return tree.tree_map(one, _like("Moments.scale", x, self.variance), self.variance)

    def after(self, count: Any, mean: Any, variance: Any) -> Moments:
        """With ``count`` more values of this mean and variance (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count, mean, variance = tree.tree_map(lambda x: jnp.asarray(x).astype(jnp.float32), (count, mean, variance))
        total = self.count + count
        share = count / jnp.maximum(total, 1.0)
        gap = tree.tree_map(lambda new, old: new - old, mean, self.mean)
        return Moments(
            total,
            tree.tree_map(lambda old, gap: old + share * gap, self.mean, gap),
            tree.tree_map(
                lambda old, new, gap: old + share * (new - old) + share * (1 - share) * gap**2,
                self.variance,
                variance,
                gap,
            ),
        )


def normalize(x: Any, moments: Moments, clip: float = 10.0) -> tuple[Any, Moments]:
    """``x`` by the moments of all values so far, its own and those of the other environments included.

    Every timestep counts its batch once, so that the moments are the same for all environments: keep them in a
    ``Shared`` carry. In evaluation ``moments(x)`` uses them and counts nothing; so do a critic on ``final_obs``, and a
    learner on stored observations.

    Args:
      x: a value of one environment at one timestep, a pytree of arrays of numbers.
      moments: from ``Moments.of(x)``, and then what this function returned.
      clip: results lie in ``[-clip, clip]``.

    Returns:
      ``(normalised x in float32, the next moments)``. Moments are constants for gradients.

    Raises:
      ProgramError: ``x`` is no value like those that the moments are of.

    Example:
      >>> import rlfx
      >>> def f(_, moments, t):
      ...     x, moments = rlfx.normalize(1.0 * t, moments)
      ...     return moments, x
      >>> moments, x = rlfx.unroll(f, length=3)(None, rlfx.Shared(rlfx.Moments.of(0.0)))
      >>> float(moments.value.mean), x.round(2)
      (1.0, Array([0.  , 1.  , 1.22], dtype=float32))
    """
    current_domain("rlfx.normalize")
    if not isinstance(moments, Moments):
        fact = f"rlfx.normalize takes rlfx.Moments, got {type(moments).__name__}."
        raise ProgramError(located(fact, where=J.here(), fix="Begin with rlfx.Moments.of(x), as Shared in the carry."))
    x = _like("rlfx.normalize", x, moments.mean, exactly=True)
    wide = tree.tree_map(lambda leaf: jax.lax.stop_gradient(leaf).astype(jnp.float32), x)
    count = reductions.reduced("sum", jnp.ones((), jnp.float32), "b")
    mean = reductions.reduced("mean", wide, "b")
    variance = reductions.reduced("mean", tree.tree_map(lambda leaf, m: (leaf - m) ** 2, wide, mean), "b")
    moments = moments.after(count, mean, variance)
    return moments(x, clip), moments


def _aligned(moment: Any, x: Any) -> Any:
    """With leading axes of one, as many as ``x`` has more."""
    return moment.reshape((1,) * (x.ndim - moment.ndim) + moment.shape)


def _like(user: str, x: Any, moment: Any, exactly: bool = False) -> Any:
    """``x`` as arrays, if it is a value (or, unless ``exactly``, several) of those that the moments are of."""
    if tree.tree_structure(x) != tree.tree_structure(moment):
        fact = f"{user}: the value is {tree.tree_structure(x)}, the moments are of {tree.tree_structure(moment)}."
        raise ProgramError(located(fact, where=J.here(), fix="Begin with the moments of such a value: Moments.of(x)."))

    def one(leaf, mean):
        leaf = as_array(leaf, user)
        number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
        rank = jnp.ndim(mean)
        fits = leaf.shape[leaf.ndim - rank :] == jnp.shape(mean) and (leaf.ndim == rank or not exactly)
        if not (number and fits):
            found = f"{J.short_dtype(leaf.dtype)}{list(leaf.shape)}"
            fact = f"{user}: the value is {found}, the moments are of f32{list(jnp.shape(mean))}."
            fix = "Give one value of one environment, of numbers, and begin with Moments.of(x)."
            raise ProgramError(located(fact, where=J.here(), fix=fix))
        return leaf

    return tree.tree_map(one, x, moment)
