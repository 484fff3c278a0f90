"""What is chosen at every n-th timestep alone is computed there alone: ``where(t % 32 == 31, value(state), 0.0)``.

A window ends with a critic's value, a manager chooses at every tenth timestep. Written with ``jnp.where``, networks are evaluated
at all timesteps, and what they give is thrown away at most. Before and after:

    y = net(x); z = select(t % n == k, 0.0, y)   ->   z = cond(t % n == k, lambda: net(x), lambda: 0.0)

which is what ``rlfx.every`` makes: in a loop over time a branch, of all timesteps at once every n-th (``schedule/strided.py``).
Where a recurrence begins anew with it, ``where(t % 8 == 0, encoder(obs), state)``, the branch gives nothing at other timesteps,
and the choice stays: the loop is given what all timesteps at once have computed, and its windows may run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._lazy import nx
from rlfx.recurrence.analysis.check import whole_graph
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.analysis.timed import every_nth, of_one
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.language.primitives import ACCESS_PRIMITIVES, aside_p, attend_p, custom_p, products_p

_SELECT = J.primitive("select_n")
_APART = J.RANDOM | ACCESS_PRIMITIVES | {aside_p, attend_p, custom_p, products_p}


class _Case(NamedTuple):
    """What is computed at every n-th timestep alone.

    Attributes:
      value: the case that is chosen there.
      group: the equations, in order, that it alone needs.
      given: what these read of others.
    """

    value: Atom
    group: tuple[Equation, ...]
    given: tuple[Var, ...]


def with_now_and_then(program: Program) -> Program:
    """The program with branches for such choices; without any ``program``. Meaning-preserving; idempotent."""

    needed_by = functools.cache(lambda: whole_graph(program).nx)

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not _SELECT or len(e.inputs) != 3 or e.is_ragged:
            return None
        condition, *cases = of_one(e.inputs[0], program), *e.inputs[1:]
        for holds in every_nth(condition, program):
            case = _case(e, cases[holds], program)
            if case is not None:
                apart = _is_before(case, e, needed_by())
                return functools.partial(_branched, case, holds, apart), [condition, cases[not holds], *case.given]
        return None

    return exchanged(program, instead)


def _case(select: Equation, value: Atom, program: Program) -> _Case | None:
    """What one case of a choice needs, and nothing else does; None if no products of what varies with t are in it."""
    if not isinstance(value, Var) or select.inputs.count(value) > 1:
        return None
    returned, users, group = set(program.returned), program.users, set()
    wanted = {value}
    for e in reversed(program.equations):
        if wanted.isdisjoint(e.outputs) or not moves(e):
            continue
        read = [(u, v) for v in e.outputs for u in users.get(v, ())]
        if returned.isdisjoint(e.outputs) and all(u in group or (u is select and v is value) for u, v in read):
            group.add(e)
            wanted.update(v for v in e.inputs if isinstance(v, Var))
    if not any(e.op in PRODUCTS and "t" in program.dims_of(e.outputs[0]) for e in group):
        return None
    made = {v for e in group for v in e.outputs}
    ordered = tuple(e for e in program.equations if e in group)
    given = dict.fromkeys(v for e in ordered for v in e.inputs if isinstance(v, Var) and v not in made)
    return _Case(value, ordered, tuple(given))


def _is_before(case: _Case, choice: Equation, graph: nx.DiGraph) -> bool:
    """Whether a recurrence makes the choice, and none of what is computed for it depends on that."""
    if choice not in graph:
        return False
    later = {*nx.descendants(graph, choice)}
    return any(e in later for e in graph.predecessors(choice)) and later.isdisjoint(case.group)


def moves(e: Equation) -> bool:
    """Whether an equation may be evaluated in a branch: it is of this timestep alone, and draws no numbers.

    What is read elsewhere, at other timesteps say, is there for all of them.
    """
    apart = e.has_effects or e.is_ragged or e.calls or e.op in _APART
    return e.is_pointwise and not apart and not J.contains(e.op, dict(e.params), J.CALLBACKS)


def _branched(case: _Case, holds: bool, apart: bool, condition: Any, other: Any, *given: Any) -> Any:
    """The choice, at one point; ``apart``: made of what the branch gives, which is nothing elsewhere."""

    def taken() -> Any:
        known: dict[Atom, Any] = dict(zip(case.given, given, strict=True))
        for e in case.group:
            values = J.bind(e.op, dict(e.params), *(known[v] if isinstance(v, Var) else v.value for v in e.inputs))
            known.update(zip(e.outputs, values, strict=True))
        return known[case.value]

    taking = condition if holds else ~condition
    if not apart:
        return jax.lax.cond(taking, taken, lambda: other)
    return jax.lax.select_n(taking, other, jax.lax.cond(taking, taken, lambda: jnp.zeros_like(other)))
