"""Blocks of timesteps that the loss does not count are skipped: ``where(t + n < T, loss, 0)``, burn-in.

A loss that is 0 under a condition on ``t`` alone has no gradient there. What stands between such timesteps and the others is the
cotangent of a recurrence's state: where that is 0 as well (``where(t == k, stop_gradient(s), s)``), a block is not computed. The
condition is evaluated when the program runs, since ``t`` counts from ``t0``. TimeRL keeps such conditions as the domains of its
tensors, and so fixes them when it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.timed import Timed
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Var
from rlfx.recurrence.schedule.later import Counted
from rlfx.recurrence.schedule.learner import Learner

_SELECT, _ADD, _SUB, _MUL, _DIV = map(J.primitive, ("select_n", "add", "sub", "mul", "div"))
#: What gives 0 for 0.
_LINEAR = frozenset(map(J.primitive, ("convert_element_type", "neg", "reshape", "broadcast_in_dim", "copy")))

#: A condition and what it is where a value may be other than 0.
Condition = tuple[Var, bool]


def conditions(learner: Learner) -> frozenset[Condition]:
    """Where none of these holds the loss is 0, whatever else there is: each is on t alone. Empty: nothing is known."""
    loss = learner.program.loss
    return _conditions(learner).get(loss, frozenset()) if isinstance(loss, Var) else frozenset()


def _conditions(learner: Learner) -> dict[Var, frozenset[Condition]]:
    """Of values that are 0 where none of some conditions holds, these; nothing if it differentiates anything but the loss."""
    program = learner.program
    if not isinstance(program.loss, Var) or learner.targets != (program.loss,):
        return {}
    where: dict[Var, frozenset[Condition]] = {}  # of values that are 0 but there
    timed = {program.now}  # what follows from t and constants
    for e in program.equations:
        if not e.is_pointwise or e.is_ragged or e.has_effects or len(e.outputs) != 1:
            continue
        (out,) = e.outputs
        if not out.shape and timed.issuperset(v for v in e.inputs if isinstance(v, Var)):
            timed.add(out)
        found = _where(e, where, timed)
        if found is not None:
            where[out] = found
    return where


def counted(learner: Learner, begins: bool) -> Counted:
    """Where the loss may be other than 0, of a program that ``begins`` at ``t0 = 0``; or that may, if a call knows no more."""
    program, where, timed = learner.program, _conditions(learner), Timed(learner.program)
    returned = {v for v in (program.loss, *program.aux) if isinstance(v, Var) and v in where}
    firsts = {v: _first(where[v], timed, program.domain.length) for v in returned}
    first = firsts.get(program.loss, 0) if isinstance(program.loss, Var) else 0
    return Counted(first, frozenset(v for v, known in firsts.items() if 0 < first <= known), begins)


def _first(conditions: Iterable[Condition], timed: Timed, length: int) -> int:
    """The first timestep at which one of some conditions holds, if ``t0`` is 0; T if none does, and 0 if nothing is known."""
    known = [(timed.of(v), which) for v, which in conditions]
    if not known or any(numbers is None for numbers, _ in known):
        return 0
    holds = np.any([np.broadcast_to(numbers == which, length) for numbers, which in known], axis=0)
    return int(np.argmax(holds)) if holds.any() else length


def _where(e: Equation, where: dict, timed: set[Var]) -> frozenset[Condition] | None:
    """Under which conditions an equation may give something other than 0; None: under any."""

    def of(atom: Atom) -> frozenset[Condition] | None:
        return where.get(atom) if isinstance(atom, Var) else None if np.any(np.asarray(atom.value)) else frozenset()

    if e.op in _LINEAR or (e.op is _DIV and _is_number(e.inputs[1])):
        return of(e.inputs[0])
    if e.op is _MUL and any(map(_is_number, e.inputs)):
        return of(e.inputs[_is_number(e.inputs[0])])
    if e.op not in (_ADD, _SUB, _SELECT):
        return None
    which, *cases = e.inputs if e.op is _SELECT else (None, *e.inputs)
    found = [of(case) for case in cases]
    if which in timed and len(cases) == 2 and frozenset() in found and found[0] != found[1]:
        return frozenset({(which, found[0] == frozenset())})  # select_n gives the second case where it is true
    return None if None in found else frozenset().union(*found)  # type: ignore[arg-type]


def _is_number(atom: Atom) -> bool:
    """Whether it is a constant other than 0, times which, and by which, 0 is 0."""
    return isinstance(atom, Lit) and bool(np.all(np.isfinite(atom.value)) and np.all(atom.value))


def if_needed(needed: Any, compute: Callable[[], Any], zero: Callable[[], Any]) -> Any:
    """``compute()`` if it is needed, else ``zero()``; None: it is."""
    return compute() if needed is None else jax.lax.cond(needed, compute, zero)


def any_of(mask: Any, first: Any, count: int) -> Any:
    """Whether one of consecutive timesteps is counted; None if nothing is known."""
    return None if mask is None else jnp.any(jax.lax.dynamic_slice_in_dim(mask, first, count))


def not_zero(cotangents: Sequence) -> Any:
    """Whether one of some cotangents is not 0 anywhere."""
    return jnp.any(jnp.stack([jnp.any(x != 0) for x in cotangents])) if cotangents else jnp.bool_(False)
