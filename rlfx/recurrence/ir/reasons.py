"""Why a trace failed, where the reason is not where it failed: ``batch=`` was forgotten, or a slice met all timesteps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import jax

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, RlfxError, UnsupportedSliceOp, located
from rlfx.recurrence.ir.arguments import Arguments
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.trace import Signature, trace_program


def trace_arguments(f: Callable, sig: Signature, arguments: Arguments) -> Program:
    """The program that ``f`` is on these arguments.

    Raises:
      ProgramError and its subclasses, UnsupportedSliceOp: if it is none, with the reason.
    """
    try:
        return trace_program(f, sig, arguments.point_avals, arguments.key_aval)
    except (TypeError, ValueError, NotImplementedError) as error:
        found = (
            _without_batch(error, f, sig, arguments)
            or _with_all_timesteps(error, sig.domain.length)
            or _unheard_of(error)
        )
        if found is None:
            raise
        raise found from error.__cause__ or error


def _without_batch(error: Exception, f: Callable, sig: Signature, arguments: Arguments) -> Exception | None:
    """The error of a program that fails without ``batch=``, and does not with it; None of another one."""
    params = len(arguments.point_avals) - len(arguments.carry)
    carry = [*zip(arguments.point_avals[params:], sig.shared, strict=True)]
    leads = {a.shape[:1] for a, shared in carry if not shared}
    (batch,) = min(leads, default=()) or (1,)
    strict = "rank_promotion" in str(error)  # which the user has asked for, and says what it is
    if sig.domain.batch is not None or len(leads) != 1 or J.is_symbolic(batch) or batch == 1 or strict:
        return None
    point = [a if shared else jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a, shared in carry]
    batched = replace(sig, domain=replace(sig.domain, batch=batch))
    try:
        trace_program(f, batched, [*arguments.point_avals[:params], *point], arguments.key_aval)
    except Exception:
        return None
    said, _, fix = str(error).partition("\n  Fix: ")
    fact, *rest = said.splitlines()[0], *said.partition("\n  at ")[2].splitlines()[:1]
    fact = f"Every leaf of the carry has a leading axis of {batch}, which without batch= is no axis of environments: {fact}"
    fix = f"Give batch={batch}, if they are environments." + (f" If not: {fix}" if fix else "")
    return ProgramError(located(fact, where=rest[0] if rest else J.source_in_traceback(error), fix=fix))


def _unheard_of(error: Exception) -> Exception | None:
    """jax's refusal of an axis of symbolic length, which is no error of a type or value, as ours."""
    text = str(error).partition("\n")[0]
    if isinstance(error, RlfxError) or not isinstance(error, NotImplementedError) or "non-constant size" not in text:
        return None
    fact = f"An operation has no meaning on a slice whose length depends on t: {text.partition(':')[0]}."
    fix = "Read a window of fixed length instead, x.window(lo, hi, fill=v), or reduce the slice first."
    return UnsupportedSliceOp(located(fact, where=J.source_in_traceback(error), fix=fix))


def _with_all_timesteps(error: Exception, length: int) -> Exception | None:
    """The error where a slice of symbolic length met an array of T elements; None of another one."""
    text = str(error.__cause__ or "").partition("\n")[0]
    shapes = re.findall(r"[\[(]([\d, ]+)[\])]", text)
    if "tau" not in text or not any(str(length) in shape.replace(" ", "").split(",") for shape in shapes):
        return None
    said, *rest = str(error).partition("\n  Fix: ")[0].split("\n  at ")
    fact = f"A slice whose length depends on t meets an array of the fixed length T={length}: {said.partition(': ')[2]}"
    fix = (
        f'An array of the T={length} timesteps is cut as the series is: rlfx.inputs(w, axes="t")[:t + 1] for w. Positions '
        "are rlfx.series(t.now)[:t + 1], less t where they are counted from here."
    )
    return UnsupportedSliceOp(located(fact, where=" ".join(rest) or None, fix=fix))
