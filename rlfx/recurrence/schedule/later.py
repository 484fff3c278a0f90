"""What a loss that counts nothing before some timestep needs from then on alone: ``where(t >= 40, loss, 0)``, a burn-in.

Blocks of timesteps that are not counted are skipped (``gradient/counted.py``). Where all timesteps are evaluated at once, or in
one pass, a burn-in would have its heads computed, and its layers differentiated, for nothing: most of that work is outside of
loops, and is left out here. A policy with a memory needs its encoder before, for the state, but no derivative of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import multiplies
from rlfx.recurrence.analysis.graph import Graph, first_operands
from rlfx.recurrence.ir.program import Atom, Equation, Var, users_of
from rlfx.recurrence.language.index import Point
from rlfx.recurrence.schedule.schedule import Loop
from rlfx.recurrence.schedule.truncated import BurnIn, Truncated

#: The least part of T that it is worth to leave out.
LEAST = 1 / 8

_ADDED = frozenset(map(J.primitive, ("add", "sub", "neg", "convert_element_type")))


@dataclass(frozen=True, eq=False)
class Later:
    """Equations of a stage of all timesteps that the first of these need not have, or whose derivative they need not.

    Attributes:
      equations: in order.
      first: the timestep from which on they are needed, or differentiated.
      before: whether they are computed before, without a derivative; zeros are there if not.
      outputs: what others than these equations read.
    """

    equations: tuple[Equation, ...]
    first: int
    before: bool
    outputs: tuple[Var, ...]

    def __str__(self) -> str:
        what = "have no derivative" if self.before else "are not computed"
        return f"{len(self.equations)} equations {what} before t = {self.first}: the loss counts nothing there"


@dataclass(frozen=True)
class Counted:
    """At which timesteps the loss may be other than 0, if ``t0`` is 0.

    Attributes:
      first: the first of them.
      zero_before: returned values that are 0 before it.
      begins: whether ``t0`` is 0, whatever is traced.
    """

    first: int = 0
    zero_before: frozenset[Var] = frozenset()
    begins: bool = False


def needed_later(
    stages: Sequence[tuple[Sequence[Any], Truncated | None]], graph: Graph, active: AbstractSet[Equation], counted: Counted
) -> Callable[[tuple[Equation, ...]], list]:
    """What splits consecutive equations of a stage of all timesteps into those that run so, and others, each in order.

    Args:
      stages: in order, the parts of each: equations that run for all timesteps at once, as tuples, or others, which are taken as
        they are; and of a loop, where no derivative goes back further.
      active: the equations that are differentiated.
    """
    length, first = graph.program.domain.length, counted.first
    if not counted.begins or not LEAST * length <= first < length or graph.program.domain.until:
        return lambda equations: [equations]
    wanted = graph.complete - counted.zero_before
    sooner = _before(stages, graph, wanted, active)
    skipped = _spared(stages, {e for e in _split(stages) if _is_local(e, graph) and sooner.isdisjoint(e.outputs)}, active)
    burnt = [end.timesteps for _, end in stages if isinstance(end, BurnIn)]
    back = min(burnt, default=0)
    lasting: set[Equation] = set()
    if back >= LEAST * length:
        sooner = _before(stages, graph, frozenset(), active, back)
        rest = (e for e in _split(stages) if e in active and e not in skipped)
        lasting = {e for e in rest if _is_local(e, graph) and sooner.isdisjoint(e.outputs)}
    lasting = lasting if multiplies(lasting) else set()
    users = users_of(e for parts, _ in stages for part in parts for e in _equations(part))

    ways = [(skipped, first, False), (lasting, back, True)]
    kinds = {e: i for i, (chosen, *_) in enumerate(ways) for e in chosen}

    def split(equations: tuple[Equation, ...]) -> list:
        def part(i: int | None, run: tuple[Equation, ...]) -> Any:
            if i is None:
                return run
            own = frozenset(run)
            outputs = (v for e in run for v in e.outputs if v in graph.complete or not own.issuperset(users.get(v, ())))
            return Later(run, *ways[i][1:], tuple(outputs))

        return [part(*run) for run in _runs(equations, kinds.get)]

    return split


def _spared(
    stages: Iterable[tuple[Sequence[Any], Any]], local: AbstractSet[Equation], active: AbstractSet[Equation]
) -> set[Equation]:
    """Those of ``local`` equations that multiply; and what is computed of them and differentiated: of zeros it is infinite."""
    found: set[Equation] = set()
    zeros: set[Var] = set()
    for group in (group for parts, _ in stages for part in parts for group in _groups(part)):
        of_zeros = not all(zeros.isdisjoint(_values(e.inputs)) for e in group)
        found.update(e for e in group if e in local and (multiplies((e,)) or (of_zeros and e in active)))
        if of_zeros or not found.isdisjoint(group):
            zeros.update(v for e in group for v in e.outputs)
    return found


def _groups(part: Any) -> Iterable[tuple[Equation, ...]]:
    """Equations one by one, or those of a part that is taken as it is."""
    return ((e,) for e in part) if isinstance(part, tuple) else (_equations(part),)


def _split(stages: Iterable[tuple[Sequence[Any], Any]]) -> Iterator[Equation]:
    """The equations that run for all timesteps at once, not in a way of their own."""
    return (e for parts, _ in stages for part in parts if isinstance(part, tuple) for e in part)


def _equations(part: Any) -> tuple[Equation, ...]:
    return part if isinstance(part, tuple) else part.equations


def _is_local(e: Equation, graph: Graph) -> bool:
    """Whether what it gives at a timestep is of that timestep's values alone, and of no other use."""
    moves = "t" in graph.program.dims_of(e.outputs[0])
    return moves and e.is_pointwise and not e.is_ragged and not e.has_effects


def _looks_ahead(e: Equation) -> bool:
    """Whether it reads ``x[t + k]``: the same numbers, of later timesteps; beyond the end what there is at the last."""
    if not e.is_read or not isinstance(e.access, Point):
        return False
    ahead = e.access.index.offset
    return ahead is not None and ahead >= 0


def _before(
    stages: Sequence[tuple[Sequence[Any], Any]],
    graph: Graph,
    wanted: AbstractSet[Var],
    active: AbstractSet[Equation],
    back: int | None = None,
) -> set[Var]:
    """Values that are needed (``back``: whose derivatives are needed) before those timesteps.

    Args:
      wanted: those that are so in any case.
      active: the equations that are differentiated.
      back: no derivative goes back further through loops that say so.

    Loops need all that they read, but those against time of which no derivative is taken (returns): what they compute of zeros
    is behind what is needed.
    """
    found: set[Var] = set(wanted)
    for parts, end in reversed(stages):
        for part in reversed(parts):
            equations = _equations(part)
            if not isinstance(part, tuple):
                later = isinstance(end, BurnIn) if back is not None else _goes_back(part, active)
                if not (later and all(found.isdisjoint(e.outputs) for e in equations)):
                    found.update(v for e in equations if back is None or e in active for v in _values(e.inputs))
                continue
            for e in (e for e in reversed(equations) if back is None or e in active):
                if not (found.isdisjoint(e.outputs) and (_is_local(e, graph) or _looks_ahead(e))):
                    found.update(_values(e.inputs))
    return found if back is not None else found | _of_first(stages, graph)


def _goes_back(part: Any, active: AbstractSet[Equation]) -> bool:
    """Whether it is a loop against time, without effect, which reads nothing but its own later timesteps, none with a derivative.

    What is added to such a return inside of it (an error, that the loss squares) has a derivative, whatever the values are.
    """
    if not isinstance(part, Loop) or part.direction != "backward":
        return False
    moves = (e.is_read or e.op not in _ADDED for e in part.body if e in active)
    return not any(moves) and not any(e.has_effects or (e.is_read and e not in part.reads) for e in part.body)


def _values(atoms: Iterable[Atom]) -> Iterator[Var]:
    return (v for v in atoms if isinstance(v, Var))


def _of_first(stages: Iterable[tuple[Sequence[Any], Any]], graph: Graph) -> set[Var]:
    """What is needed at t = 0 for what is read before it."""
    reads = (e for parts, _ in stages for part in parts for e in _equations(part) if e.is_read)
    todo, found = [v for e in reads if e.start is not None for v in _values((e.start,))], set()
    while todo:
        v = todo.pop()
        if v not in found:
            found.add(v)
            made_by = graph.definition.get(v)
            todo += [] if made_by is None else _values(first_operands(made_by))
    return found


def _runs(equations: Sequence[Equation], kind: Callable[[Equation], Any]) -> list[tuple[Any, tuple[Equation, ...]]]:
    """Equations in an order that has as many of a kind side by side as there may be."""
    todo, found = list(equations), []
    while todo:
        which, run, rest = kind(todo[0]), [], []
        waits: set[Var] = set()
        for e in todo:
            if kind(e) == which and waits.isdisjoint(_values(e.inputs)):
                run.append(e)
            else:
                rest.append(e)
                waits.update(e.outputs)
        found.append((which, tuple(run)))
        todo = rest
    return found
