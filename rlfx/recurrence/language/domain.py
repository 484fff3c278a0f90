"""The iteration domain of the program that is being traced: which timesteps, how many environments.

The domain travels as named axes of the trace, jax's own scoping for such facts: it nests, it is restored on error, and
there is no state of ours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ProgramError, located
from rlfx.recurrence.language.index import Index, Slice
from rlfx.recurrence.language.names import USUAL, Names

_T, _B, _UNTIL, _AT, _STOP = "rlfx.t", "rlfx.b", "rlfx.until", "rlfx.at", "rlfx.stop"


@dataclass(frozen=True)
class Level:
    """A program that is being traced, one of those around a place. It travels as the name of an axis.

    Attributes:
      depth: how many programs are around it, itself included: the identity of its dimension.
      program: the user's function.
      length: its number of timesteps.
      by_reference: whether it is interpreted; so are the programs that it calls.
      crossing: what notes its reads with two indices.
    """

    depth: int
    names: Names
    program: str
    length: int
    by_reference: bool = False
    crossing: Any = None

    def __str__(self) -> str:
        return f"{self.program} (over {self.names.dim})"


@dataclass(frozen=True)
class Domain:
    """``{(t, b) : 0 <= t < length, 0 <= b < batch}``.

    Attributes:
      length: the number of timesteps T (its bound, when episodes end by themselves).
      batch: the number of environments, or None without a batch axis.
      until: whether every environment ends at its own time N <= T.
      at: the one concrete timestep for which the program is traced (the reference interpreter), else None.
      stop: where the environment of that trace ends, if before ``length``.
      names: what its dimension and its parallel axis are called.
      by_reference: whether it is interpreted.
      crossing: what notes the reads with two indices, of a program that is called in another.
    """

    length: int
    batch: int | None = None
    until: bool = False
    at: int | None = None
    stop: int | None = None
    names: Names = USUAL
    by_reference: bool = False
    crossing: Any = field(default=None, compare=False)

    def axes(self, program: str = "program") -> list[tuple[Any, int]]:
        """The named axes that carry this domain, of a function, through a trace."""
        level = Level(depth() + 1, self.names, program, self.length, self.by_reference or interpreting(), self.crossing)
        return [
            (_T, self.length),
            (_B, 0 if self.batch is None else self.batch),
            (_UNTIL, int(self.until)),
            (_AT, 0 if self.at is None else self.at + 1),
            (_STOP, 0 if self.stop is None else self.stop),
            (level, level.depth),
        ]

    def times(self) -> np.ndarray:
        """Every timestep, int32 [T]."""
        return np.arange(self.length, dtype=np.int32)

    def evaluate(self, index: Index, t: Any = None) -> Any:
        """An index expression at integer times ``t`` (all of them by default), with N = T."""
        t = self.times() if t is None else t
        return np.broadcast_to(index.evaluate(t, self.length, low=np.minimum, high=np.maximum), np.shape(t))

    def size_of(self, access: Slice) -> Any:
        """The length of the slice that a reader at t sees: an integer where it is the same at every t, else a symbol."""
        lo, hi = access.first, access.stop
        if self.at is not None:
            end = self.stop or self.length
            first, stop = (int(e.evaluate(self.at, end, low=min, high=max)) for e in (lo, hi))
            return max(stop - first, 0)
        sizes = np.maximum(self.evaluate(hi) - self.evaluate(lo), 0)
        if sizes.min() == sizes.max() and not (self.until and not _before_now(access)):
            return int(sizes[0])
        never_crossed = bool((self.evaluate(hi) >= self.evaluate(lo)).all())
        if lo.operations + hi.operations > (8 if never_crossed else 5):
            raise DomainError(
                located(
                    f"The length of the slice x[{access}] has too many //, %, minimum and maximum: lengths are compared as "
                    "functions of t, and that takes longer with each.",
                    where=J.here(),
                    fix="Read the timesteps and choose: x[:][i] with an array of integers, or jnp.where(mask, x[:], v).",
                )
            )
        tau, nu = J.time_dims(self.length, self.until)
        # No more than there is: jax then knows that no length is negative, and adds up those of adjacent slices.
        stop = hi.as_dim(tau, nu)
        return stop - J.minimum_dim(lo.as_dim(tau, nu), stop)


def _before_now(access: Slice) -> bool:
    """Whether a slice surely ends at or before t: then an episode's own end does not shorten it."""
    return access.hi.offset is not None and access.hi.offset <= 1


def depth() -> int:
    """How many programs are being traced here, each called in the one before: 0 outside of all."""
    return len(levels())


def levels() -> tuple[Level, ...]:
    """The programs that are being traced here, from the outermost to this one."""
    return tuple(sorted((axis for axis in J.named_axes() if isinstance(axis, Level)), key=lambda level: level.depth))


def interpreting() -> bool:
    """Whether the program around this place is interpreted by reference: then so are those that it calls."""
    return any(level.by_reference for level in levels())


def current_domain(what: str) -> Domain:
    """The domain of the program being traced; ``what`` names the caller in the error when there is none."""
    length = J.axis_size(_T)
    if length is None:
        raise ProgramError(
            located(
                f"{what} has a meaning only inside a per-timestep program, and none is being traced here.",
                where=J.here(),
                fix="Call it in the function that you give to rlfx.compile, rlfx.unroll or rlfx.reference.",
            )
        )
    at = J.axis_size(_AT) or 0
    until, stop = bool(J.axis_size(_UNTIL)), J.axis_size(_STOP) or None
    here = levels()[-1]
    return Domain(length, J.axis_size(_B) or None, until, at - 1 if at else None, stop, here.names, here.by_reference)


def widest(domain: Domain, dim: Any) -> int:
    """The largest value of a dimension over the domain."""
    return _widest(domain, dim) if J.is_symbolic(dim) else int(dim)


#: Timesteps, at most, of which a dimension is evaluated one by one: an operation of arrays would be compiled first.
_BY_NUMBER = 4096


def _widest(domain: Domain, dim: Any) -> int:
    return max(1, int(_values(domain, dim).max()))


def may_be_empty(domain: Domain, dim: Any) -> bool:
    """Whether a dimension is 0 (or less, after an episode's end) at a timestep."""
    if not J.is_symbolic(dim):
        return dim == 0
    return (domain.until and J.mentions_end(dim)) or bool(_values(domain, dim).min() <= 0)


@functools.lru_cache(maxsize=1024)
def _values(domain: Domain, dim: Any) -> np.ndarray:
    """A symbolic dimension at all timesteps."""
    if domain.length <= _BY_NUMBER:
        return np.array([J.evaluate_dim(dim, tau, domain.length) for tau in (domain.times() + 1).tolist()])
    with jax.ensure_compile_time_eval():  # min and max in a dimension are evaluated by jnp
        return np.asarray(J.evaluate_dim(dim, domain.times() + 1, np.int32(domain.length)))
