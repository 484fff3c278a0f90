"""The time index ``t`` that a per-timestep program receives: symbolic in an index, an int32 in arithmetic."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ProgramError, located
from rlfx.recurrence.index import TIME, Index, as_index, extreme

_SHARED = 0x7FFFFFFF  # where b would stand in the key of a value shared by all environments


@jax.tree_util.register_pytree_node_class
class Time:
    """The timestep of a program: ``t``, ``t + 1``, ``t // 2``, ``t.length - 1 - t``, ...

    Inside ``x[...]`` it is an index expression. In any other arithmetic, and for every jnp function, it is the absolute
    time ``t0 + t`` as an int32 scalar; comparisons give traced booleans.

    Attributes:
      now: the int32 value of the expression in absolute time.
      length: T, a Python integer.
    """

    def __init__(self, now: Any, expr: Index = TIME, context: Any = None):
        self.now, self.expr, self._context = now, expr, context

    def tree_flatten(self):
        return (self.now,), (self.expr, self._context)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux[0], aux[1])

    @property
    def length(self) -> int:
        """T, the number of timesteps."""
        return self._context.length

    # -- random numbers
    @property
    def key(self) -> jax.Array:
        """The key of this timestep of this environment: a function of (key, b, t0 + t) only."""
        return self._context.key(self.now, None, shared=False)

    def key_for(self, name: str) -> jax.Array:
        """One key per named use, independent of ``t.key`` and of every other name."""
        return self._context.key(self.now, name, shared=False)

    @property
    def shared_key(self) -> jax.Array:
        """The key of this timestep, the same for all environments."""
        return self._context.key(self.now, None, shared=True)

    # -- as an array
    def __jax_array__(self) -> jax.Array:
        return self.now

    shape, ndim, size, dtype = (), 0, 1, jnp.dtype("int32")

    def _affine(self, other: Any, symbolic: Callable, plain: Callable) -> Any:
        if isinstance(other, Time):
            return Time(plain(self.now, other.now), symbolic(self.expr, other.expr), self._context)
        if isinstance(other, int) and not isinstance(other, bool):
            return Time(plain(self.now, other), symbolic(self.expr, other), self._context)
        return plain(self.now, other)

    def __add__(self, other):
        return self._affine(other, operator.add, operator.add)

    def __sub__(self, other):
        return self._affine(other, operator.sub, operator.sub)

    def __rsub__(self, other):
        return self._affine(other, lambda a, b: as_index(b) - a, lambda a, b: b - a)

    def _scaled(self, other: Any, symbolic: Callable, plain: Callable) -> Any:
        if isinstance(other, int) and not isinstance(other, bool):
            return Time(plain(self.now, other), symbolic(self.expr, other), self._context)
        return plain(self.now, other.now if isinstance(other, Time) else other)

    def __mul__(self, other):
        return self._scaled(other, operator.mul, operator.mul)

    def _divided(self, other: Any, op: Callable) -> Any:
        if isinstance(other, int) and not isinstance(other, bool) and other <= 0:
            raise DomainError(
                located(
                    f"The divisor of t must be a positive integer, got {other}.",
                    where=J.here(),
                    fix="Write t // n or t % n with n >= 1.",
                )
            )
        return self._scaled(other, op, op)

    def __floordiv__(self, other):
        return self._divided(other, operator.floordiv)

    def __mod__(self, other):
        return self._divided(other, operator.mod)

    def __neg__(self):
        return self * -1

    def __pos__(self):
        return self

    __radd__, __rmul__ = __add__, __mul__

    def __repr__(self) -> str:
        return f"Time({self.expr})"


def _delegate(name: str) -> Callable:
    op = getattr(operator, name)

    def method(self, other):
        return op(self.now, other.now if isinstance(other, Time) else other)

    return method


def _delegate_reflected(name: str) -> Callable:
    op = getattr(operator, name)

    def method(self, other):
        return op(other, self.now)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "truediv", "pow"):
    setattr(Time, f"__{_name}__", _delegate(_name))
for _name in ("truediv", "pow", "floordiv", "mod"):
    setattr(Time, f"__r{_name}__", _delegate_reflected(_name))
Time.__hash__ = None  # type: ignore[assignment]  # like an array: == is elementwise


class Context:
    """What a Time needs of its program: its length and its keys."""

    def __init__(self, length: int, base_key: Any, b: Any):
        self.length, self._base_key, self._b = length, base_key, b
        self._names: dict[tuple[int, int], str | None] = {}

    # Programs are traced once: two contexts are the same only if they are one object, which is what a pytree's static
    # part needs.
    def key(self, now: Any, name: str | None, *, shared: bool) -> jax.Array:
        if self._base_key is None:
            raise ProgramError(
                located(
                    "The program uses random keys, but no key was given.",
                    where=J.here(),
                    fix="Call the compiled function with a key: loss_fn(params, carry, jax.random.key(0)).",
                )
            )
        if name is not None and not isinstance(name, str):
            raise ProgramError(
                located(f"t.key_for takes a name (str), got {name!r}.", where=J.here(), fix="Name the use.")
            )
        # Generators whose folds commute (unsafe_rbg) tell b and t apart as well: one is folded in as an odd number, the other
        # as an even one. Only the last fold depends on t: the others are computed once.
        named = functools.reduce(jax.random.fold_in, self._words(name), self._base_key)
        at_b = jax.random.fold_in(named, _twice(_SHARED if shared else self._b) + np.uint32(1))
        return jax.random.fold_in(at_b, _twice(now))

    def _words(self, name: str | None) -> tuple[int, int]:
        """What stands for a name in this program, and for no other."""
        words = name_words(name)
        known = self._names.setdefault(words, name)
        if known != name:
            raise ProgramError(
                located(
                    f"t.key_for({known!r}) and t.key_for({name!r}) would be the same key: their names have the same hash.",
                    where=J.here(),
                    fix="Rename one of them.",
                )
            )
        return words


def name_words(name: str | None) -> tuple[int, int]:
    """A hash of the name of a use of keys, in two words of 32 bits; ``t.key`` has no name, which is not the empty one."""
    text = b"t.key" if name is None else b"t.key_for:" + name.encode("utf8", "surrogatepass")
    low, high = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4")
    return int(low), int(high)


def _twice(x: Any) -> Any:
    """``2 x`` as a word of 32 bits, for x from 0 to 2**31 - 1."""
    return jnp.asarray(x).astype(jnp.uint32) * np.uint32(2)


def without_time(value: Any) -> Any:
    """A pytree in which every Time is the array of its absolute time."""
    is_time = lambda x: isinstance(x, Time)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x.now) if is_time(x) else x, value, is_leaf=is_time)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two index expressions (or integers): ``x[rlfx.minimum(t + 1, t.length - 1)]``.

    Arrays are passed to ``jnp.minimum``.

    Example:
      >>> minimum(2, 3)
      2
    """
    return _extreme("min", a, b, jnp.minimum)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two index expressions (or integers); see :func:`minimum`."""
    return _extreme("max", a, b, jnp.maximum)


def _extreme(kind: str, a: Any, b: Any, plain: Callable) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if kind == "min" else max(a, b)
    times = [x for x in (a, b) if isinstance(x, Time)]
    if times and all(isinstance(x, (Time, int)) for x in (a, b)):
        exprs = [x.expr if isinstance(x, Time) else x for x in (a, b)]
        values = [x.now if isinstance(x, Time) else jnp.asarray(x, jnp.int32) for x in (a, b)]
        return Time(plain(*values), extreme(kind, *exprs), times[0]._context)
    return plain(a, b)


def index_of(value: Any) -> Index | None:
    """The index expression of a Time or an integer; None for anything else."""
    if isinstance(value, Time):
        return value.expr
    if isinstance(value, int) and not isinstance(value, bool):
        return as_index(value)
    return None
