"""Index expressions: frozen, canonical quasi-affine functions of ``t``, and the forms in which a series is read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located

#: The longest index expression that is analysed: the time that it takes grows with what is written out.
MOST = 64


@dataclass(frozen=True)
class Symbol:
    """A leaf of an index expression: ``t``, or ``N``, the number of timesteps."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Floor:
    """``expr // divisor``."""

    expr: Index
    divisor: int

    def __str__(self) -> str:
        return f"{_grouped(self.expr)} // {self.divisor}"


@dataclass(frozen=True)
class Extreme:
    """``minimum(left, right)`` or ``maximum(left, right)``."""

    kind: str  # "min" | "max"
    left: Index
    right: Index

    def __str__(self) -> str:
        return f"{self.kind}imum({self.left}, {self.right})"


Atom = Symbol | Floor | Extreme


@dataclass(frozen=True)
class Index:
    """``constant + sum(coefficient * atom)``, atoms sorted: equal functions written alike are equal values.

    Example:
      >>> str((TIME + 3) - TIME % 4)
      't - t % 4 + 3'
      >>> (TIME + 1) - 1 == TIME
      True
    """

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @functools.cached_property
    def operations(self) -> int:
        """How many ``//``, ``minimum`` and ``maximum`` the expression has when it is written out."""
        return sum(_operations(a) for a, _ in self.terms)

    def __add__(self, other: Index | int) -> Index:
        other = as_index(other)
        return _combine({**dict(self.terms)}, other, 1, self.constant)

    def __sub__(self, other: Index | int) -> Index:
        return self + as_index(other) * -1

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        return Index(tuple((a, c * factor) for a, c in self.terms), self.constant * factor)

    def __floordiv__(self, divisor: int) -> Index:
        if divisor == 1:
            return self
        if not self.terms:
            return Index((), self.constant // divisor)
        return _checked(Index(((Floor(self, divisor), 1),)))

    def __mod__(self, divisor: int) -> Index:
        return self - (self // divisor) * divisor

    def __str__(self) -> str:
        return _show(self)

    @property
    def offset(self) -> int | None:
        """``c`` if the expression is ``t + c``, else None."""
        return self.constant if self.terms == TIME.terms else None

    @property
    def is_constant(self) -> bool:
        """Whether the expression is an integer."""
        return not self.terms

    @property
    def depends_on_time(self) -> bool:
        """Whether ``t`` occurs in the expression."""
        return any(_mentions_time(a) for a, _ in self.terms)

    def evaluate(self, t: Any, n: Any, *, low: Callable, high: Callable) -> Any:
        """The value at ``t`` of a domain of length ``n``; ``low`` and ``high`` are binary min and max of that type."""
        total: Any = self.constant
        for atom, coefficient in self.terms:
            total = total + coefficient * _evaluate_atom(atom, t, n, low, high)
        return total

    def as_dim(self, tau: Any, nu: Any) -> Any:
        """The expression as a dimension of jax, where ``tau`` is the dimension ``t + 1`` and ``nu`` the length."""
        return self.evaluate(tau - 1, nu, low=J.minimum_dim, high=J.maximum_dim)

    def as_isl(self) -> str:
        """The expression in isl's notation."""
        parts = [str(self.constant)] + [f"{c}*{_atom_isl(a)}" for a, c in self.terms]
        return "(" + " + ".join(parts) + ")"


def _operations(atom: Atom) -> int:
    if isinstance(atom, Symbol):
        return 0
    return 1 + sum(e.operations for e in ((atom.expr,) if isinstance(atom, Floor) else (atom.left, atom.right)))


def _mentions_time(atom: Atom) -> bool:
    if isinstance(atom, Symbol):
        return atom.name == "t"
    parts = (atom.expr,) if isinstance(atom, Floor) else (atom.left, atom.right)
    return any(p.depends_on_time for p in parts)


def _evaluate_atom(atom: Atom, t: Any, n: Any, low: Callable, high: Callable) -> Any:
    if isinstance(atom, Symbol):
        return t if atom.name == "t" else n
    if isinstance(atom, Floor):
        return atom.expr.evaluate(t, n, low=low, high=high) // atom.divisor
    left, right = (e.evaluate(t, n, low=low, high=high) for e in (atom.left, atom.right))
    return low(left, right) if atom.kind == "min" else high(left, right)


def _atom_isl(atom: Atom) -> str:
    if isinstance(atom, Symbol):
        return atom.name
    if isinstance(atom, Floor):
        return f"floor({atom.expr.as_isl()}/{atom.divisor})"
    return f"{atom.kind}({atom.left.as_isl()}, {atom.right.as_isl()})"


def _combine(terms: dict[Atom, int], other: Index, sign: int, constant: int) -> Index:
    for atom, coefficient in other.terms:
        terms[atom] = terms.get(atom, 0) + sign * coefficient
    kept = sorted(((a, c) for a, c in terms.items() if c), key=lambda ac: (not isinstance(ac[0], Symbol), str(ac[0])))
    return _checked(Index(tuple(kept), constant + sign * other.constant))


def _checked(expr: Index) -> Index:
    if expr.operations > MOST:
        raise DomainError(
            located(
                f"An index expression has {expr.operations} operations (//, %, minimum and maximum, counted as often as they "
                f"are written out); at most {MOST} are analysed.",
                where=J.here(),
                fix="Choose from a slice with an array of integers: x[:][i], with i computed from t.now.",
            )
        )
    return expr


def _grouped(expr: Index) -> str:
    text = str(expr)
    return text if len(expr.terms) <= 1 and " " not in text else f"({text})"


def _show(expr: Index) -> str:
    """Print ``e - n * (e // n)`` as ``e % n``, whatever else stands beside it."""
    pieces: list[tuple[int, str]] = []
    terms = dict(expr.terms)
    for atom, coefficient in expr.terms:
        if isinstance(atom, Floor) and coefficient % atom.divisor == 0 and coefficient != 0:
            times = -coefficient // atom.divisor
            rest = {a: terms.get(a, 0) - times * c for a, c in atom.expr.terms}
            if atom.expr.constant == 0 and all(abs(v) <= abs(terms.get(a, 0)) or times < 0 for a, v in rest.items()):
                terms.update(rest)
                del terms[atom]
                pieces.append((times, f"{_grouped(atom.expr)} % {atom.divisor}"))
    pieces = [(c, str(a)) for a, c in terms.items() if c] + pieces
    text = ""
    for coefficient, piece in pieces:
        sign = " - " if coefficient < 0 else " + "
        whole = piece if " " not in piece else f"({piece})"
        body = f"{abs(coefficient)} * {whole}" if abs(coefficient) != 1 else piece if text or coefficient > 0 else whole
        text += (sign if text else ("-" if coefficient < 0 else "")) + body
    if expr.constant or not text:
        text += f" {'-' if expr.constant < 0 else '+'} {abs(expr.constant)}" if text else str(expr.constant)
    return text


TIME = Index(((Symbol("t"), 1),))
#: The length of the time axis: T, or the episode's own length under ``until=``.
LENGTH = Index(((Symbol("N"), 1),))


def as_index(value: Index | int) -> Index:
    """An integer or an index expression as an index expression."""
    return value if isinstance(value, Index) else Index((), int(value))


def extreme(kind: str, left: Index | int, right: Index | int) -> Index:
    """``minimum`` or ``maximum`` of two index expressions, folded where both differ by a constant."""
    left, right = as_index(left), as_index(right)
    difference = left - right
    if difference.is_constant:
        smaller, larger = (left, right) if difference.constant <= 0 else (right, left)
        return smaller if kind == "min" else larger
    return _checked(Index(((Extreme(kind, left, right), 1),)))


def written(expr: Index) -> str:
    """The expression as a program writes it.

    Example:
      >>> written(extreme("min", TIME + 3, TIME * -1 + LENGTH))
      'rlfx.minimum(t + 3, t.length - t)'
    """
    return re.sub(r"\b(minimum|maximum)\(", r"rlfx.\1(", re.sub(r"\bN\b", "t.length", str(expr)))


# -- how a series is read --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """``x[index]``: one other timestep."""

    index: Index

    def __str__(self) -> str:
        return str(self.index)


@dataclass(frozen=True)
class Slice:
    """``x[lo:hi]``, clipped to the domain; the result has a leading axis of length ``size``."""

    lo: Index
    hi: Index

    def __str__(self) -> str:
        lo = "" if self.lo == Index() else str(self.lo)
        hi = "" if self.hi == LENGTH else str(self.hi)
        return f"{lo}:{hi}"

    @property
    def first(self) -> Index:
        """The first position read, inside the domain."""
        return extreme("max", self.lo, 0) if not _never_negative(self.lo) else self.lo

    @property
    def stop(self) -> Index:
        """One past the last position read, inside the domain."""
        return self.hi if self.hi == LENGTH else extreme("min", self.hi, LENGTH)


@dataclass(frozen=True)
class Window:
    """``x.window(lo, hi, fill=v)``: the fixed window ``t + lo .. t + hi``, filled outside the domain."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"t + {self.lo} : t + {self.hi}, filled"


@dataclass(frozen=True)
class Lookup:
    """``x[i]`` or ``x[i, b]`` with traced integers: random access into the past.

    Attributes:
      outside: "fill" or "clip", for what is not in the past or no environment.
      explicit: whether it was written ``x.lookup(i)``: then ``i`` may depend on t alone.
      back: how many timesteps there are to look at, this one included; None: all since the first.
    """

    across_batch: bool
    outside: str = "fill"
    explicit: bool = False
    back: int | None = None

    def __str__(self) -> str:
        return "i, b" if self.across_batch else "i"


Access = Point | Slice | Window | Lookup


def _never_negative(expr: Index) -> bool:
    """A sufficient test that an expression is >= 0 wherever t >= 0."""
    return (
        expr.constant >= 0
        and all(c >= 0 or _is_mod_of(expr, a, c) for a, c in expr.terms)
        and all(_atom_never_negative(a) for a, c in expr.terms if c > 0)
    )


def _is_mod_of(expr: Index, atom: Atom, coefficient: int) -> bool:
    """Whether ``coefficient * atom`` is the negative part of ``e % n`` or of ``e - e % n`` inside ``expr``."""
    if not isinstance(atom, Floor):
        return False
    rest = Index(tuple((a, c) for a, c in expr.terms if a != atom), 0)
    return rest == atom.expr and -coefficient <= atom.divisor


def _atom_never_negative(atom: Atom) -> bool:
    if isinstance(atom, Symbol):
        return True
    if isinstance(atom, Floor):
        return _never_negative(atom.expr)
    test = any if atom.kind == "max" else all
    return test(_never_negative(e) for e in (atom.left, atom.right))
