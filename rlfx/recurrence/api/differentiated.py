"""``wrt=``: which leaves of ``params`` a plan, and what is said of it, takes for differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import shown
from rlfx.errors import ProgramError, located
from rlfx.recurrence.analysis.active import data_of, is_float
from rlfx.recurrence.analysis.cost import bytes_of, show_bytes
from rlfx.recurrence.ir.program import Program, Var

tree = jax.tree_util


def differentiated(program: Program, params: Any, wrt: Any) -> tuple[Var, ...]:
    """The leaves of ``params`` with a derivative: those that ``wrt`` marks, or all floats that are no data.

    Data are what ``rlfx.inputs`` alone reads: a call seldom differentiates those. Where there is nothing else, they count.

    Args:
      wrt: None, or a pytree of bools, a prefix of ``params``: one for each leaf, or for a whole subtree.

    Raises:
      ProgramError: it is no such prefix, or marks no float.
    """
    if wrt is None:
        floats, data = tuple(v for v in program.params if is_float(v)), data_of(program)
        return tuple(v for v in floats if v not in data) or floats
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
    """What to say where data are among the ``params``, and do not count as differentiated."""
    left = data_of(program).difference(order)
    size = sum(bytes_of(v, program.domain) for v in program.params if v in left and is_float(v))
    if not size:
        return None
    return f"what rlfx.inputs alone reads of params ({show_bytes(size)}) is not differentiated. If your call does: wrt=True"
