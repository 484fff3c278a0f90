"""What an observation or an action may be: a set of integers, a box of numbers, or a tree of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import KEY, POSITIVE, Kind, each, expect, integer
from rlfx.errors import EnvError, located

_INT32, _FLOAT32 = np.dtype("int32"), np.dtype("float32")
_SHAPE = each(integer(0), "a shape", "(3,)")


def _dtype(words: str, example: str, *kinds: type) -> Kind:
    def take(value: Any) -> Any:
        if not isinstance(value, (str, type, np.dtype)) or not any(jnp.issubdtype(np.dtype(value), k) for k in kinds):
            raise TypeError
        return value

    return Kind(words, example, take)


_INTEGERS = _dtype("an integer dtype", "jnp.int32", np.integer)
_NUMBERS = _dtype("a dtype of real numbers", "jnp.float32", np.integer, np.floating, np.bool_)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """The integers ``0, ..., n - 1``; with a ``shape``, an array of them: so many choices, each of n.

    Example:
      >>> space = Discrete(3)
      >>> bool(space.contains(space.sample(jax.random.key(0)))), bool(space.contains(jnp.int32(3)))
      (True, False)
    """

    n: int
    dtype: Any = _INT32
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, kind in (("n", POSITIVE), ("dtype", _INTEGERS), ("shape", _SHAPE)):
            object.__setattr__(self, field, expect(field, getattr(self, field), kind, EnvError, of="Discrete"))
        if self.n - 1 > np.iinfo(self.dtype).max:
            fact = f"Discrete(n={self.n}): {np.dtype(self.dtype).name} holds no number above {np.iinfo(self.dtype).max}."
            raise EnvError(located(fact, fix="Give a wider dtype, or none: it is int32 then."))

    def sample(self, key: jax.Array) -> jax.Array:
        """One value, uniformly (for ``n > 1``, from one 32-bit draw: probabilities differ by at most ``n / 2^16``)."""
        if self.n > 1 << 8:
            return jax.random.randint(key, self.shape, 0, self.n, dtype=self.dtype)
        # randint costs two draws, a split and divisions.
        return (((jax.random.bits(key, self.shape, jnp.uint32) >> 16) * jnp.uint32(self.n)) >> 16).astype(self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Whether ``x`` lies in the space; ``bool[()]``."""
        return jnp.all((x >= 0) & (x <= self.n - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays of ``shape`` and ``dtype`` between ``low`` and ``high``, inclusive (numbers, or arrays of ``shape``).

    Example:
      >>> space = Box(-2.0, 2.0, (1,))
      >>> space.sample(jax.random.key(0)).shape, bool(space.contains(jnp.array([2.5])))
      ((1,), False)
    """

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any = _FLOAT32

    def __post_init__(self) -> None:
        for field, kind in (("shape", _SHAPE), ("dtype", _NUMBERS)):
            object.__setattr__(self, field, expect(field, getattr(self, field), kind, EnvError, of="Box"))
        bound = Kind(f"numbers that broadcast to {self.shape}", "0.0", self._bound)
        for field in ("low", "high"):
            object.__setattr__(self, field, expect(field, getattr(self, field), bound, EnvError, of="Box"))
        if not (self.low <= self.high).all():
            raise EnvError(located(f"{self!r} holds nothing: low exceeds high.", fix="Give low <= high."))

    def _bound(self, value: Any) -> np.ndarray:
        x = np.asarray(value)
        if (x.dtype.kind not in "bifu" and not jnp.issubdtype(x.dtype, jnp.floating)) or np.isnan(x).any():
            raise TypeError
        return np.broadcast_to(x.astype(self.dtype), self.shape)

    def sample(self, key: jax.Array) -> jax.Array:
        """One value: uniform where both bounds are finite, else standard normal, clipped to the bounds."""
        if not np.issubdtype(self.dtype, np.floating):
            # The bound above the highest value has to be a number of the type that is drawn.
            small = np.dtype(self.dtype).itemsize < 4
            kind = np.dtype("int32") if small else self.dtype
            above = np.minimum(self.high.astype(np.int64) + 1, np.iinfo(kind).max).astype(kind)
            return jax.random.randint(key, self.shape, self.low.astype(kind), above, kind).astype(self.dtype)
        wide = np.isinf(self.high) | np.isinf(self.low) | (self.high > 1e6) | (self.low < -1e6)
        low, high = np.where(wide, 0, self.low), np.where(wide, 1, self.high)
        uniform = jax.random.uniform(key, self.shape, self.dtype, low, high)
        if not wide.any():
            return uniform
        normal = jnp.clip(jax.random.normal(key, self.shape, self.dtype), self.low, self.high)
        return jnp.where(wide, normal, uniform)

    def contains(self, x: jax.Array) -> jax.Array:
        """Whether ``x`` lies in the space; ``bool[()]``."""
        return jnp.all((x >= self.low) & (x <= self.high))

    def __repr__(self) -> str:
        low, high = (v.flat[0] if v.size and (v == v.flat[0]).all() else v.tolist() for v in (self.low, self.high))
        return f"Box({low}, {high}, shape={self.shape}, dtype={np.dtype(self.dtype).name})"


Space = Any
"""A :class:`Discrete`, a :class:`Box`, or a pytree (tuple, dict, ...) of them."""


def is_space(x: Any) -> bool:
    """Whether ``x`` is a leaf of a tree of spaces."""
    return isinstance(x, (Discrete, Box))


def _tree(value: Any) -> Any:
    leaves = jax.tree.leaves(value, is_leaf=is_space)
    if not leaves or not all(map(is_space, leaves)):
        raise TypeError
    return value


SPACE = Kind("a Discrete, a Box or a pytree of them", "env.action_space", _tree)


def sample(space: Space, key: jax.Array) -> Any:
    """One value of a space, or of each space of a tree, with a key per leaf.

    Example:
      >>> sample({"gas": Box(0.0, 1.0, ()), "gear": Discrete(5)}, jax.random.key(0))["gear"].dtype
      dtype('int32')
    """
    leaves, tree = jax.tree.flatten(expect("space", space, SPACE, EnvError, of="sample"), is_leaf=is_space)
    key = expect("key", key, KEY, EnvError, of="sample")
    keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
    return jax.tree.unflatten(tree, [leaf.sample(k) for leaf, k in zip(leaves, keys, strict=True)])


def size(space: Space) -> int:
    """How many numbers a policy's output layer needs: categories of each discrete choice, elements of a box, summed."""
    leaves = jax.tree.leaves(expect("space", space, SPACE, EnvError, of="size"), is_leaf=is_space)
    return sum((leaf.n if isinstance(leaf, Discrete) else 1) * math.prod(leaf.shape) for leaf in leaves)
