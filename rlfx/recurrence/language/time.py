"""The time index ``t`` that a per-timestep program receives: symbolic in an index, an int32 in arithmetic."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import Kind, expect
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.domain import Domain, Level
from rlfx.recurrence.language.index import TIME, Index, as_index, extreme
from rlfx.recurrence.language.python_use import NOT_PYTHON, refusal_of

_INT32 = range(-(2**31), 2**31)


@jax.tree_util.register_pytree_node_class
class Time:
    """The timestep of a program: ``t``, ``t + 1``, ``t // 2``, ``t.length - 1 - t``, ...

    Inside ``x[...]`` it is an index expression. In any other arithmetic, and for every jnp function, it is the absolute
    time ``t0 + t`` as an int32 scalar; comparisons give traced booleans.

    Attributes:
      now: the int32 value of the expression in absolute time.
      expr: the index expression; None where only the value is known.
      length: T, a Python integer.
    """

    def __init__(self, now: Any, expr: Index | None = TIME, context: Any = None):
        self.now, self.expr, self._context = now, expr, context

    # As a pytree it is one int32, and what comes back has the expression only if it is this very value: any other may have
    # been computed from it, by jax.tree.map or by the rounds of a loop.
    def tree_flatten(self):
        return (self.now,), _Form(self.expr, self._context, self.now)

    @classmethod
    def tree_unflatten(cls, form, children):
        (now,) = children
        return cls(now, form.expr if form.is_of(now) else None, form.context)

    @property
    def length(self) -> int:
        """T, the number of timesteps."""
        return self._context.domain.length

    @property
    def domain(self) -> Domain:
        """The program's."""
        return self._context.domain

    @property
    def depth(self) -> int:
        """How many programs are around the one whose time this is, itself included."""
        return self._context.level.depth

    @property
    def level(self) -> Level:
        """The program whose time this is."""
        return self._context.level

    def index(self, axis: str) -> jax.Array:
        """The position on the program's parallel axis, int32: which environment this is, ``t.index("b")``.

        Args:
          axis: its name, ``"b"`` unless ``batch={"p": 8}`` gives it another.

        Raises:
          DomainError: the program has no parallel axis of this name.

        Example:
          >>> import jax.numpy as jnp, rlfx
          >>> f = rlfx.unroll(lambda p, c, i: (c, i.index("p")), length=1, dim="i", batch={"p": 3})
          >>> f(None, jnp.zeros(3))[1]
          Array([[0, 1, 2]], dtype=int32)
        """
        return self._context.position(axis)

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
    __array_ufunc__ = None  # NumPy's operators leave theirs to ours

    def astype(self, dtype: Any) -> jax.Array:
        """The absolute time in another dtype."""
        return self.now.astype(dtype)

    def _with(self, other: Any, symbolic: Callable[[Index, Index], Index | None], plain: Callable[..., Any]) -> Any:
        """An index expression, where ``symbolic`` has one for ``other``; else arithmetic on the absolute time."""
        expr = _operand(self, other)
        if self.expr is not None and expr is not None and (found := symbolic(self.expr, expr)) is not None:
            return Time(_plain(plain, self.now, other), found, self._context)
        return _plain(plain, self.now, other)

    def __add__(self, other):
        return self._with(other, operator.add, operator.add)

    def __sub__(self, other):
        return self._with(other, operator.sub, operator.sub)

    def __rsub__(self, other):
        return self._with(other, lambda a, b: b - a, lambda a, b: b - a)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b.constant if b.is_constant else None, operator.mul)

    def __floordiv__(self, other):
        return self._with(_divisor(other), lambda a, b: a // b.constant if b.is_constant else None, operator.floordiv)

    def __mod__(self, other):
        return self._with(_divisor(other), lambda a, b: a % b.constant if b.is_constant else None, operator.mod)

    def __divmod__(self, other):
        return self // other, self % other

    def __and__(self, other):
        return self._with(other, _masked, operator.and_)

    def __lshift__(self, other):
        return self._with(other, lambda a, b: a * 2**b.constant if _is_shift(b) else None, operator.lshift)

    def __rshift__(self, other):
        return self._with(other, lambda a, b: a // 2**b.constant if _is_shift(b) else None, operator.rshift)

    def __neg__(self):
        return self * -1

    def __invert__(self):
        return -self - 1

    def __abs__(self):
        return maximum(self, -self)

    def __pos__(self):
        return self

    def __round__(self, digits: int = 0):
        return self

    __trunc__ = __floor__ = __ceil__ = __pos__
    __radd__, __rmul__, __rand__ = __add__, __mul__, __and__

    def __repr__(self) -> str:
        return f"Time({self.now if self.expr is None else self.expr})"


class _Form:
    """The static part of a Time as a pytree: two are equal if they are of one program, whatever the expressions."""

    def __init__(self, expr: Index | None, context: Any, now: Any):
        self.expr, self.context, self._now = expr, context, J.weakly(now)

    def is_of(self, now: Any) -> bool:
        return now is not None and self._now() is now

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self.context is other.context

    def __hash__(self) -> int:
        return id(self.context)


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _operand(time: Time, other: Any) -> Index | None:
    """The other operand as an index expression, or None."""
    if isinstance(other, Time):
        if other.depth != time.depth:
            outer, inner = sorted((time.level, other.level), key=lambda level: level.depth)
            raise DomainError(
                located(
                    f"The indices of two programs, {outer} and {inner}, are combined: the result is the index of neither.",
                    where=J.here(),
                    fix=f"Combine their values, {outer.names.dim}.now * n + {inner.names.dim}.now, where a number is meant.",
                )
            )
        return other.expr
    number = as_integer(other)
    if number is not None and number not in _INT32:
        raise DomainError(
            located(f"t is an int32, and {number} is none.", where=J.here(), fix="Give a smaller integer.")
        )
    return None if number is None else as_index(number)


def _plain(op: Callable[..., Any], now: Any, other: Any) -> Any:
    """Arithmetic of the absolute time with a number, an array or another time."""
    integer = as_integer(other)
    if integer is not None and integer in _INT32 and op is not operator.pow:
        other = np.int32(integer)
    number = isinstance(other, (bool, int, float, complex))
    # Python's numbers are those of every dtype, also where the promotion of arrays is strict.
    with jax.numpy_dtype_promotion("standard") if number else contextlib.nullcontext():
        return op(now, other.now if isinstance(other, Time) else other)


def _divisor(other: Any) -> Any:
    number = as_integer(other)
    if number is not None and number <= 0:
        raise DomainError(
            located(
                f"The divisor of t must be a positive integer, got {number}.",
                where=J.here(),
                fix="Write t // n or t % n with n >= 1.",
            )
        )
    return other


def _masked(expr: Index, mask: Index) -> Index | None:
    """``t & (2**k - 1)`` is ``t % 2**k``."""
    n = mask.constant + 1
    return expr % n if mask.is_constant and n > 0 and n & (n - 1) == 0 else None


def _is_shift(by: Index) -> bool:
    return by.is_constant and 0 <= by.constant < 31


def _delegate(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    op = getattr(operator, name)

    def method(self, other):
        return _plain((lambda a, b: op(b, a)) if reflected else op, self.now, other)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "truediv", "pow", "or_", "xor"):
    setattr(Time, f"__{_name.rstrip('_')}__", _delegate(_name))
for _name in ("truediv", "pow", "floordiv", "mod", "lshift", "rshift", "or_", "xor"):
    setattr(Time, f"__r{_name.rstrip('_')}__", _delegate(_name, reflected=True))


for _name in NOT_PYTHON:
    setattr(Time, f"__{_name}__", refusal_of(_name))


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
    """The larger of two index expressions (or integers): ``x[rlfx.maximum(t - 1, 0)]``.

    Arrays are passed to ``jnp.maximum``.

    Example:
      >>> maximum(2, 3)
      3
    """
    return _extreme("max", a, b, jnp.maximum)


def _operated(kind: str, value: Any) -> Any:
    """What is compared: an index expression, a number or an array of numbers."""
    return value if isinstance(value, Time) else expect("an argument", value, _OPERAND, of=f"{kind}imum")


def _operand_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex)):
        return value
    dtype = getattr(value, "dtype", object)
    if isinstance(value, type) or not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError
    return value


_OPERAND = Kind("an index expression, a number or an array of numbers", "t + 1", _operand_of)


def _extreme(kind: str, a: Any, b: Any, plain: Callable[..., Any]) -> Any:
    if isinstance(b, Time):
        a, b = b, a
    if isinstance(a, Time):
        b = _operated(kind, b)
        return a._with(b, lambda x, y: extreme(kind, x, y), plain)
    x, y = as_integer(a), as_integer(b)
    if x is None or y is None:
        return plain(_operated(kind, a), _operated(kind, b))
    return min(x, y) if kind == "min" else max(x, y)


def index_of(value: Any) -> Index | None:
    """The index expression of a Time or an integer; None for anything else."""
    if isinstance(value, Time):
        if value.expr is None:
            raise DomainError(
                located(
                    "This index was t, and what a transformation of jax (cond, scan, jit, tree.map) made of it is a number.",
                    where=J.here(),
                    fix="Write the index with the program's own t, x[t + 1]; functions may close over t.",
                )
            )
        return value.expr
    number = as_integer(value)
    return None if number is None else as_index(number)


def as_integer(value: Any) -> int | None:
    """The Python integer that an integer scalar of Python, NumPy or jax is, if it is known; else None."""
    if isinstance(value, (int, np.integer)):
        return None if isinstance(value, bool) else operator.index(value)
    if not isinstance(value, (np.ndarray, jax.Array)) or isinstance(value, J.Tracer) or value.shape != ():
        return None
    return operator.index(value) if jnp.issubdtype(value.dtype, jnp.integer) else None
