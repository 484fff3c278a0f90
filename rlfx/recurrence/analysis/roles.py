"""Which operations of a program could run at the same time, as an actor and a learner do: its two roles.

What one role makes reaches the other an iteration later. So a circle of reads that goes through both, which crosses at least
twice, spans two iterations or more. Operations on a shorter circle are one role: with ``rollout(params)`` an actor needs what
was learned in the iteration before, and the learner what the actor has just seen, a circle of one. With
``rollout(policy[i - 1])`` it is one of two.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlfx import _jaxpr as J
from rlfx._lazy import nx
from rlfx.recurrence.analysis.check import whole_graph
from rlfx.recurrence.analysis.cost import flops_of, points
from rlfx.recurrence.analysis.graph import FUTURE
from rlfx.recurrence.ir.access import lag
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.language.index import TIME, Point

#: An operation with a smaller share of all belongs to no role: either can compute it.
_LEAST = 1e-2

#: Why a program that may end has one role.
_ENDS = "with until= what acts ahead has already acted for a timestep that is not there"

#: Partitions of so many groups of operations are tried.
_GROUPS = 8

#: Operations that move values, and compute none.
_FREE = frozenset(
    J.primitive(name)
    for name in ("broadcast_in_dim", "select_n", "reshape", "concatenate", "convert_element_type", "squeeze", "slice")
)


@dataclass(frozen=True)
class Roles:
    """What could run at once.

    Attributes:
      parts: the operations of each role, the larger share first.
      shares: of all floating-point operations, by role.
      circle: where there is one role: the shortest circle of reads through its largest operation, else ().
      because: why there is one, if it is no circle.
    """

    parts: tuple[tuple[Equation, ...], ...]
    shares: tuple[float, ...]
    circle: tuple[Equation, ...] = ()
    because: str = ""

    def lines(self, program: Program) -> list[str]:
        """As text."""
        text = program.domain.names.text
        if len(self.parts) > 1:
            each = [
                f"{100 * s:.0f}% of the operations ({_count(p)})" for p, s in zip(self.parts, self.shares, strict=True)
            ]
            return [f"two roles could run at once: {'; '.join(each)}"]
        if self.because:
            return [text(f"one role: {self.because}")]
        shown = [f"x[{text(str(e.access))}]" if e.is_read else _name(e) for e in self.circle]
        places = [f" at {e.where}" if e.is_read and ":" in e.where else "" for e in self.circle]
        around = " -> ".join(f"{what}{place}" for what, place in zip(shown, places, strict=True))
        several = sum(not e.is_read for e in self.circle) > 1
        dim = program.domain.names.dim
        fix = f"; it is one {dim} long, and two roles need two, as with policy[{dim} - 1]" if several else ""
        return ["one role" + (f", by the circle {around} -> {shown[0]}{fix}" if shown else "")]


def roles(program: Program) -> Roles | None:
    """The two best balanced roles of a program, or its only one; None: what runs when is not iteration by iteration."""
    graph = whole_graph(program)
    after: dict[Equation, dict[Equation, int]] = {}
    for reader in graph.equations:
        for edge in graph.edges(reader):
            source = graph.definition.get(edge.value)
            if source is None:
                continue
            if FUTURE in edge.signs:
                return None
            known = after.setdefault(source, {})
            known[reader] = min(_distance(reader, edge.value, program), known.get(reader, program.domain.length))

    cost = {e: _cost(e, program) for e in graph.equations}
    total = sum(cost.values())
    heavy = [e for e in graph.equations if cost[e] > _LEAST * total]
    if not heavy:
        return None
    if program.domain.until:
        return Roles((tuple(heavy),), (1.0,), because=_ENDS)
    reached = {e: _reached(e, after) for e in heavy}
    apart = {e: {r: reached[e][r][0] for r in heavy if r in reached[e]} for e in heavy}
    share = lambda part: sum(cost[e] for e in part) / total  # noqa: E731

    groups = sorted(_groups(heavy, apart), key=share, reverse=True)
    found = [part for part in _unions(groups[:_GROUPS]) if _can_shift(heavy, apart, part)]
    balance = lambda part: min(share(part), share(set(heavy) - part))  # noqa: E731
    best = max(found, key=balance, default=frozenset())
    place = program.places
    if not best or balance(best) <= _LEAST:
        largest = max(heavy, key=cost.__getitem__)
        return Roles((tuple(heavy),), (1.0,), _circle(largest, heavy, reached, cost))
    parts = sorted((best, frozenset(heavy) - best), key=share, reverse=True)
    return Roles(tuple(tuple(sorted(p, key=place.__getitem__)) for p in parts), tuple(map(share, parts)))


def _cost(equation: Equation, program: Program) -> float:
    """Floating-point operations in an iteration; what does not vary with it is computed before."""
    dims = frozenset().union(*map(program.dims_of, equation.outputs))
    if "t" not in dims or equation.is_read or equation.op in _FREE:
        return 0.0
    return flops_of(equation, program.domain) * points(dims - {"t"}, program.domain)


def _distance(reader: Equation, value: object, program: Program) -> int:
    """The least number of iterations between an operation and what it reads."""
    return max(lag(reader.access, program.domain.length), 0) if reader.is_read and value is reader.source else 0


def _reached(start: Equation, after: Mapping) -> dict[Equation, tuple[int, Equation]]:
    """Of all operations that need this one: the least number of iterations later, and from which one it is reached."""
    best: dict[Equation, tuple[int, Equation]] = {}
    order = itertools.count()
    queue = [(0, next(order), start)]
    while queue:
        n, _, source = heapq.heappop(queue)
        for reader, d in after.get(source, {}).items():
            if reader not in best or n + d < best[reader][0]:
                best[reader] = n + d, source
                heapq.heappush(queue, (n + d, next(order), reader))
    return best


def _groups(heavy: list[Equation], apart: Mapping) -> Iterator[frozenset[Equation]]:
    """Operations on a circle of at most one iteration are in one role."""
    same = nx.Graph()
    same.add_nodes_from(heavy)
    both = ((u, v) for u, v in itertools.combinations(heavy, 2) if v in apart[u] and u in apart[v])
    same.add_edges_from((u, v) for u, v in both if apart[u][v] + apart[v][u] <= 1)
    return map(frozenset, nx.connected_components(same))


def _unions(groups: list[frozenset]) -> Iterator[frozenset[Equation]]:
    """One of each two complementary choices."""
    for n in range(1, len(groups)):
        for chosen in itertools.combinations(groups, n):
            yield frozenset().union(*chosen)


def _can_shift(heavy: Iterable[Equation], apart: Mapping, part: frozenset) -> bool:
    """Whether each role can start some iterations late, so that what it needs of the other was there one before."""
    delays = nx.DiGraph()
    for u in heavy:
        delays.add_weighted_edges_from(
            (u, v, n - ((u in part) != (v in part))) for v, n in apart[u].items() if u is not v
        )
    return not nx.negative_edge_cycle(delays)


def _circle(largest: Equation, heavy: list, reached: Mapping, cost: Mapping) -> tuple[Equation, ...]:
    """From the largest operation through the largest other that it shares a role with, and back: what counts of it."""
    if largest not in reached[largest]:
        return ()
    both = [e for e in heavy if e is not largest and e in reached[largest] and largest in reached[e]]
    near = [e for e in both if reached[largest][e][0] + reached[e][largest][0] <= 1]
    stops = [largest, *sorted(near, key=cost.__getitem__, reverse=True)[:1]]
    path: list[Equation] = []
    for here, there in zip(stops, [*stops[1:], largest], strict=True):
        back = [there]
        while (previous := reached[here][back[-1]][1]) is not here:
            back.append(previous)
        path += [here, *reversed(back[1:])]
    return tuple(e for e in path if e in stops or (e.is_read and e.access != Point(TIME)))


def _name(equation: Equation) -> str:
    if "of" in equation.params and equation.calls:
        return f"call[{equation.params['of']}]"
    return equation.op.name + (f" ({equation.scope.rsplit('/', 1)[-1]})" if equation.scope else "")


def _count(equations: Iterable[Equation]) -> str:
    names = [_name(e) for e in equations]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
