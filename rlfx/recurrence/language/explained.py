"""What Python and jax ask of a program while it is traced and can't get, in the user's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass

import jax

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, ProgramTypeError, RlfxError, UnsupportedSliceOp, located
from rlfx.recurrence.language.masked import Masked
from rlfx.recurrence.language.python_use import CHOOSE, COUNT, NOT_PYTHON, ONCE, TRUTH
from rlfx.recurrence.language.series import Series
from rlfx.recurrence.language.time import Time

_WINDOW = "Read a window of fixed length instead, x.window(lo, hi, fill=v), or a slice that is never empty."

#: Two shapes that do not fit, both with a length that depends on t.
_TWO_LENGTHS = r"(?i)incompatible shapes.*: [\[(].*\btau\b.*[\])], [\[(].*\btau\b.*[\])]"


@dataclass(frozen=True)
class Rule:
    """An error that jax raises while a program is traced, and what to say instead.

    Attributes:
      of: exception types.
      text: what its message contains.
      raised: the type of ours; None for the error's own.
    """

    of: tuple[type, ...]
    text: str
    fact: Callable[[Exception], str]
    fix: str
    raised: type | None = ProgramError

    def matches(self, error: Exception) -> bool:
        return isinstance(error, self.of) and re.search(self.text, str(error)) is not None


def _says(fact: str) -> Callable[[Exception], str]:
    return lambda error: fact


_TYPE = (TypeError, ValueError, AttributeError)
#: In order: the first that matches.
RULES = (
    Rule(
        J.InconclusiveDimension,
        "",
        lambda e: "An operation needs the length of a slice that depends on t, or an identity for a slice that may be "
        f"empty: {_in_t(e)}",
        _WINDOW,
        UnsupportedSliceOp,
    ),
    Rule(
        (J.UnexpectedTracerError,),
        "",
        _says(
            "A value leaked out of the traced program (it was stored outside of the function, in a list or an "
            "attribute, and used in another trace)."
        ),
        "Return it from the program as aux instead of storing it.",
    ),
    Rule(
        (jax.errors.TracerBoolConversionError,),
        "",
        _says(f"{TRUTH} ask whether a value is true, {ONCE}"),
        CHOOSE,
    ),
    Rule(
        (jax.errors.TracerIntegerConversionError,),
        "",
        _says(f"range, a shape, or an index of a list asks for a value as a Python integer, {ONCE}"),
        COUNT,
    ),
    Rule(
        (jax.errors.ConcretizationTypeError,),
        r"(?s)with shape float\d+\[\].*It arose in the jnp.arange argument",
        _says("jnp.arange takes integers where a length depends on t: n + 1.0 is a traced float."),
        "Write jnp.arange(1, n + 1).astype(float).",
        UnsupportedSliceOp,
    ),
    Rule(
        (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError),
        "",
        lambda e: f"{_asks(e)} asks for the value of an array, {ONCE}",
        "Use jnp in the place of np, and lengths that are Python integers, as t.length is.",
    ),
    Rule(_TYPE, r"(?s)Shapes must be.*Time", _says(NOT_PYTHON["index"][0]), COUNT),
    Rule(
        _TYPE,
        r"__jax_array__|'Time'|not Time\b|time\.Time\b|\bTime\(|Time\.__",
        lambda e: "t is given to an operation that takes an array or a number, or comes back from one that computes with it"
        f"{_of(e)}.",
        "Give its value, t.now; to read a value at another time, name it: rlfx.series(v)[t + 1].",
    ),
    Rule(
        _TYPE,
        "Series",
        _says("A Series is not an array: it stands for its values at all timesteps."),
        "Write x[t].",
        ProgramTypeError,
    ),
    Rule(
        _TYPE,
        r"masked\.Masked",
        _says(f"A {Masked.name} is not an array: {Masked.because}."),
        Masked.fix,
        ProgramTypeError,
    ),
    Rule(_TYPE, r"(?s)\btau\b.*rank_promotion", lambda e: _in_t(e), "Give both as many axes, x[None] for x for example.", None),
    Rule(
        (jax.errors.NonConcreteBooleanIndexError,),
        "",
        _says(f"A boolean mask as an index selects as many elements as it has True, {ONCE}"),
        "Keep all, and choose: x.sum(where=mask), jnp.where(mask, x, 0.0).",
    ),
    Rule(
        (TypeError,),
        "_DimExpr.*cannot be interpreted as an integer",
        _says(f"len, range or int asks for the length of a slice as a Python integer: it depends on t, {ONCE}"),
        "In arithmetic the length of x[t:] is x[t:].shape[0]; the slice is reduced as a whole, x[t:].sum(), and is no loop's. "
        "Of a fixed length is a window, x.window(lo, hi, fill=v).",
        UnsupportedSliceOp,
    ),
    Rule(
        _TYPE,
        _TWO_LENGTHS,
        lambda e: f"Two slices of other timesteps meet, whose lengths depend on t each in its own way: {_in_t(e)}",
        "Cut both alike, x[t:] + y[t:]; reduce one of them first, x[t:] + y[:t + 1].sum(); or read windows of one fixed length, "
        "x.window(lo, hi, fill=v).",
        UnsupportedSliceOp,
    ),
    # jax 0.11 iterates over an array of symbolic length until it trips over itself.
    Rule(
        _TYPE,
        r"\btau\b|_DimExpr|process_primitive",
        lambda e: f"An operation has no meaning on a slice whose length depends on t: {_in_t(e)}",
        _WINDOW,
        UnsupportedSliceOp,
    ),
)  # fmt: skip


def explained(error: Exception, frame: str) -> Exception:
    """An error that was raised while a program was traced, in the user's words where it has them; else as it is.

    Args:
      frame: the line to name, if there is none of the user's in the traceback.
    """
    if isinstance(error, RlfxError):
        return error
    where = J.source_in_traceback(error) or frame
    found = _indexed_with_time(error)
    if found is not None:
        value, index = found
        fact = f"{value}[{index}] indexes an array with t, and only a series has other timesteps."
        fix = f"Name the value, rlfx.series({_named(value)})[{index}]; for an element of the array write t.now for t."
        return ProgramError(located(fact, where=where, fix=fix))
    rule = next((r for r in RULES if r.matches(error)), None)
    if rule is None:
        return error
    return (rule.raised or type(error))(located(rule.fact(error), where=where, fix=rule.fix))


def _indexed_with_time(error: Exception) -> tuple[str, str] | None:
    """``("obs", "t + 1")`` where the user's expression that raised an error is ``obs[t + 1]`` of an array, with a Time in it."""
    anywhere = "__jax_array__" in str(error)
    exactly = isinstance(error, jax.errors.TracerBoolConversionError) or "valid indices" in str(error)
    if not (anywhere or exactly):
        return None
    source, names = J.expression_in_traceback(error)
    try:
        root = ast.parse(source, mode="eval").body
    except SyntaxError:
        return None
    for node in ast.walk(root) if anywhere else (root,):
        if isinstance(node, ast.Subscript) and _has_time(node.slice, names) and not _is_series(node.value, names):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return ast.unparse(node.value), ", ".join(map(ast.unparse, parts))
    return None


def _has_time(node: ast.AST, names: dict) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(names.get(n.id), Time) for n in ast.walk(node))


def _is_series(node: ast.expr, names: dict) -> bool:
    """Whether an expression is surely a Series: a name, an attribute of one, or a call that makes a Series."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call):
        return not path and ast.unparse(node.func).split(".")[-1] in ("series", "inputs")
    value = names.get(node.id) if isinstance(node, ast.Name) else None
    for attribute in reversed(path):
        value = getattr(value, attribute, None)
    return isinstance(value, Series)


def _named(value: str) -> str:
    return value.removesuffix(".at")


def _in_t(error: Exception) -> str:
    """The first line of one of jax's messages, with lengths as functions of t."""
    return re.sub(r"\bnu\b", "N", re.sub(r"\btau\b", "(t + 1)", str(error).splitlines()[0]))


def _asks(error: Exception) -> str:
    """Which argument of which function, where the message says so."""
    found = re.search(r"[Tt]he (\S+ argument (?:of \S+|'\w+'))", str(error))
    return f"The {found[1]}" if found else "NumPy, a shape, int or float"


def _of(error: Exception) -> str:
    """Which operation, where the message says so."""
    found = re.match(r"(cond|switch|scan|while_loop)\b", str(error))
    return f" ({found[1]}: what it returns must be a number wherever it is one elsewhere)" if found else ""
