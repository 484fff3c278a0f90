"""Numbers with a derivative, and derivatives of those: forward mode on Python's floats, for loops that share nothing with jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_tags = itertools.count(1)


@dataclass(frozen=True)
class Dual:
    """``value + slope * epsilon[tag]``; a derivative inside another has the larger tag."""

    tag: int
    value: Any
    slope: Any

    def __add__(self, other):
        return _both(self, other, lambda a, b: a + b, lambda a, b, da, db: da + db)

    def __mul__(self, other):
        return _both(self, other, lambda a, b: a * b, lambda a, b, da, db: da * b + a * db)

    def __sub__(self, other):
        return self + -1.0 * other

    def __rsub__(self, other):
        return -1.0 * self + other

    def __truediv__(self, number):
        return self * (1.0 / number)

    __radd__, __rmul__ = __add__, __mul__


def _parts(x: Any, tag: int) -> tuple[Any, Any]:
    return (x.value, x.slope) if isinstance(x, Dual) and x.tag == tag else (x, 0.0)


def _both(x: Any, y: Any, of: Callable, slope: Callable) -> Dual:
    tag = max(n.tag for n in (x, y) if isinstance(n, Dual))
    (a, da), (b, db) = _parts(x, tag), _parts(y, tag)
    return Dual(tag, of(a, b), slope(a, b, da, db))


def sin(x: Any) -> Any:
    return Dual(x.tag, sin(x.value), x.slope * cos(x.value)) if isinstance(x, Dual) else math.sin(x)


def cos(x: Any) -> Any:
    return Dual(x.tag, cos(x.value), -1.0 * x.slope * sin(x.value)) if isinstance(x, Dual) else math.cos(x)


def tanh(x: Any) -> Any:
    if not isinstance(x, Dual):
        return math.tanh(x)
    y = tanh(x.value)
    return Dual(x.tag, y, x.slope * (1.0 - y * y))


def number(x: Any) -> float:
    """The number alone."""
    return number(x.value) if isinstance(x, Dual) else float(x)


def value_and_slope(f: Callable, x: Any) -> tuple[Any, Any, Any]:
    """``f(x) -> (y, rest)``: y, its derivative, and the rest as a constant of it (numbers in lists and tuples)."""
    tag = next(_tags)
    y, rest = f(Dual(tag, x, 1.0))
    return *_parts(y, tag), without(rest, tag)


def without(x: Any, tag: int) -> Any:
    """What a value is to the derivatives around this one."""
    return [without(each, tag) for each in x] if isinstance(x, list | tuple) else _parts(x, tag)[0]
