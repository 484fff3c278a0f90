"""What public functions take: an argument is of a kind, or the error names it, the user's line and the fix.

A :class:`Kind` says in words what it takes. A public function declares the kind of each argument where it receives it:

    length = expect("length", length, POSITIVE)
    plan = expect("plan", plan, optional(instance(Plan, "a Plan", 'rlfx.Plan("blocks", 25)')), ScheduleError)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, RlfxError, located


@dataclass(frozen=True)
class Kind:
    """A kind of argument.

    Attributes:
      words: what it is, to follow "must be": "a positive integer".
      example: an argument of this kind, as the user would write it.
      take: the argument in its usual form; raises TypeError or ValueError for one of another kind.
    """

    words: str
    example: str
    take: Callable[[Any], Any]


def expect(
    name: str, value: Any, kind: Kind, error: type[RlfxError] = DomainError, *, fix: str | None = None, of: str = ""
) -> Any:
    """``value`` in the usual form of its kind.

    Args:
      name: of the argument.
      error: the class of the error.
      fix: what to do instead; by default the kind's example.
      of: the function whose argument it is, where the name alone does not tell.

    Raises:
      ``error``: if it is of another kind.

    Example:
      >>> expect("length", 3, POSITIVE)
      3
    """
    try:
        return kind.take(value)
    except RlfxError:  # the value's own refusal: a time index is no integer
        raise
    except (TypeError, ValueError, OverflowError) as unfit:
        more = " (no int32)" if isinstance(unfit, OverflowError) else ""
        fact = f"{of + ': ' if of else ''}{name} must be {kind.words}, got {shown(value)}{more}."
        raise error(located(fact, where=J.here(), fix=fix or f"Give {name}={kind.example}.")) from None


def shown(value: Any) -> str:
    """A value in at most a line; a function by its name, arguments and source.

    Example:
      >>> shown("12"), len(shown(list(range(100))))
      ("'12'", 83)
    """
    if inspect.isfunction(value):
        names = ", ".join(inspect.signature(value).parameters)
        return f"{value.__name__}({names}) at {J.function_source(value).split(' ')[0]}"
    text = repr(value).splitlines() or [""]
    return text[0] if len(text) == 1 and len(text[0]) <= 80 else text[0][:80].rstrip(", ") + "..."


# -- numbers ---------------------------------------------------------------------------------------------------------


INT32 = 2**31 - 1


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """Integers of Python, NumPy or jax (where their value is known) in ``[least, most]``, as ``int``; no booleans."""

    def take(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        n = operator.index(value)
        if most == INT32 and n > most:
            raise OverflowError
        if (least is not None and n < least) or (most is not None and n > most):
            raise ValueError
        return n

    open_ended = most in (None, INT32)
    words = f"an integer >= {least}" if open_ended else f"an integer from {least} to {most}"
    if open_ended:
        words = {None: "an integer", -INT32 - 1: "an integer", 1: "a positive integer"}.get(least, words)
    return Kind(words, str(max(least or 0, 0)), take)


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, infinite: bool = False
) -> Kind:
    """Real numbers of Python or NumPy in ``[least, most]``, finite unless said otherwise, as ``float``; no booleans."""

    def take(value: Any) -> float:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError
        x = float(value)
        known = not math.isnan(x) if infinite else math.isfinite(x)
        if not (known and least <= x <= most) or (math.isfinite(above) and x <= above):
            raise ValueError
        return x

    if math.isfinite(least) and math.isfinite(most):
        words = f"a number from {least:g} to {most:g}"
    else:
        bounds = [f">= {least:g}"] * math.isfinite(least) + [f"> {above:g}"] * math.isfinite(above)
        bounds += [f"<= {most:g}"] * math.isfinite(most)
        words = " ".join(["a number" if infinite else "a finite number", " and ".join(bounds)]).strip()
    return Kind(words, f"{max(least, above + 1, min(1.0, most)):g}", take)


def scalar(*, above: float = -math.inf, whole: bool = False) -> Kind:
    """Finite real numbers, whole ones if asked for, and scalars of jax: where they are traced, their value is not known."""
    known = integer(-INT32 - 1, INT32) if whole else number(above=above)
    kinds = (np.integer,) if whole else (np.integer, np.floating)

    def take(value: Any) -> Any:
        if not isinstance(value, (jax.Array, np.ndarray)):
            return known.take(value)
        if value.shape != () or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            raise TypeError
        return value if isinstance(value, J.Tracer) else known.take(value.item())

    return dataclasses.replace(known, take=take)


def _boolean(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


POSITIVE = integer(1, INT32)
NATURAL = integer(0)
BYTES = integer(1)
BOOLEAN = Kind("True or False", "True", _boolean)


# -- names -----------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not value:
        raise ValueError
    return value


TEXT = Kind("a non-empty string", '"name"', _text)


def _path(value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise TypeError
    return value


PATH = Kind("a path", '"directory"', _path)


def one_of(*options: str) -> Kind:
    """One of a few names."""

    def take(value: Any) -> str:
        if _text(value) not in options:
            raise ValueError
        return value

    listed = [f'"{option}"' for option in options]
    return Kind(" or ".join(filter(None, [", ".join(listed[:-1]), listed[-1]])), listed[0], take)


def each(kind: Kind, words: str, example: str) -> Kind:
    """A list or tuple of arguments of a kind, as a tuple."""

    def take(value: Any) -> tuple:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
            raise TypeError
        return tuple(map(kind.take, value))

    return Kind(words, example, take)


# -- arrays ----------------------------------------------------------------------------------------------------------


def array(dims: int, what: str, *kinds: type, example: str = "jnp.arange(3)") -> Kind:
    """Arrays of so many axes, of numbers of one of some kinds; lists of such numbers, too."""

    def take(value: Any) -> Any:
        if value is None:
            raise TypeError
        x = value if isinstance(value, (jax.Array, np.ndarray)) else jnp.asarray(value)
        if x.ndim != dims or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
            raise TypeError
        return x

    return Kind(what, example, take)


def integers(dims: int, shape: str) -> Kind:
    """Integer arrays."""
    return array(dims, f"an array {shape} of integers", np.integer)


def reals(dims: int, shape: str) -> Kind:
    """Arrays of real numbers."""
    return array(dims, f"an array {shape} of real numbers", np.integer, np.floating, example="jnp.ones(3)")


def _arrays(value: Any) -> Any:
    leaves = jax.tree.leaves(value)
    known = [hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex)) for x in leaves]
    if not leaves or not all(known) or any(isinstance(x, type) for x in leaves):
        raise TypeError
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in leaves):
        raise TypeError
    for x in leaves:
        if isinstance(x, int):
            jnp.asarray(x)  # not every integer is one of jax's
    return value


ARRAYS = Kind("a pytree of arrays of numbers", '{"obs": jnp.zeros(4), "reward": jnp.float32(0)}', _arrays)


def is_array(value: Any) -> bool:
    """Whether jax takes it for an array, a number or a key, by its shape and type."""
    try:
        if isinstance(value, (bool, int, float, complex)):
            jax.typeof(value)
            return True
        known = jnp.issubdtype(value.dtype, jax.dtypes.extended) or np.dtype(value.dtype).kind not in "OSU"
        return known and hasattr(value, "shape")
    except (AttributeError, OverflowError, TypeError):
        return False


def _key(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, np.generic):
        raise TypeError
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed or dtype == np.uint32) or np.shape(value) != (() if typed else (2,)):
        raise TypeError
    return value


KEY = Kind("one key", "jax.random.key(0)", _key)


# -- packages --------------------------------------------------------------------------------------------------------


def installed(user: str, package: str, extra: str, error: type[RlfxError]) -> None:
    """Raise ``error``, with the line that installs it, if ``user``, a function, needs a package that is not there."""
    if importlib.util.find_spec(package) is None:
        fix = f"pip install 'rlfx[{extra}]'"
        raise error(located(f"{user} needs {package}, which is not installed.", fix=fix))


# -- functions and objects -------------------------------------------------------------------------------------------


def function(*arguments: str) -> Kind:
    """What can be called with these positional arguments."""

    def take(value: Any) -> Callable[..., Any]:
        if not callable(value):
            raise TypeError
        if not accepts(value, len(arguments)):
            raise ValueError
        return value

    listed = f"({', '.join(arguments)})"
    words = f"a function of {listed}" if arguments else "a function without arguments"
    return Kind(words, f"lambda {', '.join(arguments)}: ...".replace("lambda :", "lambda:"), take)


def accepts(fn: Callable[..., Any], count: int) -> bool:
    """Whether ``fn`` can be called with so many positional arguments; True if Python does not know.

    Example:
      >>> accepts(lambda a, b=0: a, 1), accepts(lambda a, b=0: a, 3), accepts(max, 7)
      (True, False, True)
    """
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may take more than what it wraps
    except (TypeError, ValueError):  # some builtins
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


CALLABLE = Kind("a function", "lambda x: ...", lambda value: value if callable(value) else _wrong())


def _wrong() -> Any:
    raise TypeError


def instance(cls: type | tuple[type, ...], words: str, example: str) -> Kind:
    """An object of a class."""
    return Kind(words, example, lambda value: value if isinstance(value, cls) else _wrong())


def optional(kind: Kind) -> Kind:
    """The kind, or None."""
    return Kind(f"{kind.words} or None", kind.example, lambda value: None if value is None else kind.take(value))
