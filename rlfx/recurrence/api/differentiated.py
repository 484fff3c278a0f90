"""``wrt=``: which leaves of ``params`` a plan, and what is said of it, takes for differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import shown
from rlfx.errors import ProgramError, located
from rlfx.recurrence.analysis.cost import bytes_of, show_bytes
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.language.primitives import inputs_p
from rlfx.recurrence.schedule.learner import is_float

tree = jax.tree_util


def differentiated(program: Program, params: Any, wrt: Any) -> tuple[Var, ...]:
    """The leaves of ``params`` with a derivative: all floats, or those that ``wrt`` marks.

    Args:
      wrt: None, or a pytree of bools, a prefix of ``params``: one for each leaf, or for a whole subtree.

    Raises:
      ProgramError: it is no such prefix, or marks no float.
    """
    if wrt is None:
        return tuple(v for v in program.params if is_float(v))
    marks = [mark for mark, part in _subtrees(params, wrt) for _ in tree.tree_leaves(part)]
    chosen = tuple(v for v, marked in zip(program.params, marks, strict=True) if marked and is_float(v))
    if not chosen:
        raise _error(f"wrt={shown(wrt)} marks no leaf of params that is a float: there is nothing to differentiate.")
    return chosen


def _subtrees(params: Any, wrt: Any) -> list[tuple[bool, Any]]:
    """Every bool of ``wrt``, and the part of ``params`` that it marks."""
    marks, prefix = tree.tree_flatten(wrt)
    if not marks or not all(isinstance(mark, (bool, np.bool_)) for mark in marks):
        raise _error(f"wrt must be a pytree of bools, a prefix of params, got {shown(wrt)}.")
    try:
        parts = prefix.flatten_up_to(params)
    except ValueError:
        structure = tree.tree_structure(params)
        raise _error(f"wrt={shown(wrt)} is no prefix of params, whose structure is {structure}.") from None
    return list(zip(marks, parts, strict=True))


def _error(fact: str) -> ProgramError:
    fix = "Mark what jax.grad differentiates: wrt=(True, False) of params=(weights, data)."
    return ProgramError(located(fact, where=J.here(), fix=fix))


def data_note(program: Program, order: Sequence[Var]) -> str | None:
    """What to say where most of what counts as differentiated is data: leaves that ``rlfx.inputs`` reads."""
    data = _data(program)
    given, rest = (sum(bytes_of(v, program.domain) for v in order if (v in data) is side) for side in (True, False))
    if given <= rest:
        return None
    return (
        f"all floats of params count as differentiated: {show_bytes(given)} that rlfx.inputs reads, {show_bytes(rest)} of other "
        "leaves. Say which are: wrt=(True, False) of (weights, data)"
    )


def _data(program: Program) -> set[Var]:
    """What data of ``rlfx.inputs`` is computed from."""
    definition = program.definitions()
    found: set[Var] = set()
    todo = [v for e in program.equations if e.op is inputs_p for v in e.inputs if isinstance(v, Var)]
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            equation = definition.get(value)
            todo += [] if equation is None else [v for v in equation.inputs if isinstance(v, Var)]
    return found
