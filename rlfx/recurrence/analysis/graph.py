"""The polyhedral dependence graph: nodes are equations, edges are labelled with the distances that they span."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlfx._lazy import nx
from rlfx.errors import BoundaryError, CausalityError, located
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.behind import SAME, extends, why_not_behind
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.language.index import TIME, Point, written
from rlfx.recurrence.language.primitives import inputs_p, reduce_p

_PREVIOUS = Point(TIME - 1)
HERE, PAST, FUTURE = "0", "-", "+"
_EVERYWHERE = frozenset({HERE, PAST, FUTURE})


@dataclass(frozen=True)
class Edge:
    """A dependence of one equation on a value.

    Attributes:
      value: what is depended on.
      signs: whether points before ("-"), at ("0") or after ("+") the reader's own time are needed.
    """

    value: Var
    signs: frozenset[str]

    @property
    def is_pointwise(self) -> bool:
        return self.signs == {HERE}


@dataclass(frozen=True)
class Extension:
    """How a value is evaluated at t = T: equations in order, from the last values of carried series.

    Attributes:
      equations: of that timestep alone, in program order.
      last: series of which the value at T - 1 is needed.
      beyond: given values of which the value at T is needed from elsewhere.
    """

    equations: tuple[Equation, ...]
    last: frozenset[Var]
    beyond: frozenset[Var]


@dataclass(frozen=True)
class Graph:
    """The part of a program that computes some values from others.

    Attributes:
      program: the program.
      given: values that are available at every point, computed elsewhere.
      roots: equations that run in any case, for their effects.
      wanted: values needed at every point.
      wanted_last: series of which only the value at the last timestep is needed.
      wanted_beyond: values needed at t = T.
    """

    program: Program
    wanted: frozenset[Var]
    wanted_last: frozenset[Var] = frozenset()
    wanted_beyond: frozenset[Var] = frozenset()
    given: frozenset[Var] = frozenset()
    roots: frozenset[Equation] = frozenset()

    @cached_property
    def definition(self) -> Mapping[Var, Equation]:
        return {v: e for v, e in self.program.definitions().items() if v not in self.given}

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """What is needed, in program order."""
        needed: set[Equation] = set(self.roots)
        todo: list[Var] = [*self.wanted, *self.wanted_last]
        todo += [edge.value for e in self.roots for edge in self.edges(e)]
        for v in self.wanted_beyond:
            todo += self.extension(v, None).last
        while todo:
            equation = self.definition.get(todo.pop())
            if equation is None or equation in needed:
                continue
            needed.add(equation)
            todo += [edge.value for edge in self.edges(equation)]
        return tuple(e for e in self.program.equations if e in needed)

    @cached_property
    def complete(self) -> frozenset[Var]:
        """Values that must be there after the last stage, at all points or at the last."""
        lasts = [self.extension(v, None).last for v in self.wanted_beyond]
        return self.wanted | self.wanted_last | frozenset().union(*lasts)

    def edges(self, equation: Equation) -> list[Edge]:
        """The dependences of an equation, boundary values and demand extension included."""
        if equation not in self._known_edges:
            self._known_edges[equation] = self._find_edges(equation)
        return self._known_edges[equation]

    @cached_property
    def _known_edges(self) -> dict[Equation, list[Edge]]:
        return {}

    def _find_edges(self, equation: Equation) -> list[Edge]:
        domain = self.program.domain
        if not equation.is_read:
            signs = _EVERYWHERE if equation.is_over_time else frozenset({HERE})
            edges = [Edge(v, signs) for v in equation.inputs if isinstance(v, Var)]
            if domain.until and equation.op is reduce_p:
                # Points after an environment's end do not count.
                edges.append(Edge(self.program.alive, signs))
            if domain.until and (equation.needs_length or equation.params.get("op") == "last"):
                edges += self._length_edge()
            return edges
        found = reach_in(equation.access, domain)
        signs = frozenset(s for s, on in ((PAST, found.past), (HERE, found.now), (FUTURE, found.future)) if on)
        edges = [Edge(equation.source, signs)] if signs else []
        rest = [a for a in equation.operands if a is not equation.start and a is not equation.end]
        edges += [Edge(v, frozenset({HERE})) for v in rest if isinstance(v, Var)]
        if isinstance(equation.start, Var):
            edges += self._first_edges(equation.start)
        if isinstance(equation.end, Var):
            varies = "t" in self.program.dims_of(equation.end)
            edges.append(Edge(equation.end, _EVERYWHERE if varies else frozenset({HERE})))
        if extends(equation, domain):
            if "t" not in self.program.dims_of(equation.source):
                edges.append(Edge(equation.source, frozenset({HERE})))
            extension = self.extension(equation.source, equation)
            edges += [Edge(v, _EVERYWHERE) for v in extension.last]
            edges += [Edge(v, frozenset({HERE})) for v in self.invariant_inputs(extension)]
        if domain.until and (found.future or found.after_end):
            edges += self._length_edge()
        return edges

    def _length_edge(self) -> list[Edge]:
        assert isinstance(self.program.ends, Var)
        return (
            [Edge(self.definition[self.program.ends].source, _EVERYWHERE)]
            if self.program.ends in self.definition
            else []
        )

    def _first_edges(self, start: Var) -> list[Edge]:
        """What a start value needs: itself where it does not vary with t, else what its value at t = 0 needs."""
        if "t" not in self.program.dims_of(start):
            return [Edge(start, frozenset({HERE}))]
        if start in self.given:
            return []
        found, todo = [], [start]
        seen: set[Var] = set()
        while todo:
            var = todo.pop()
            if var in seen or var in self.given:
                continue
            seen.add(var)
            if "t" not in self.program.dims_of(var):
                found.append(Edge(var, frozenset({HERE})))
            elif (equation := self.definition.get(var)) is not None:
                todo += [v for v in first_operands(equation) if isinstance(v, Var)]
        return found

    def invariant_inputs(self, extension: Extension) -> list[Var]:
        """Values that do not vary with t on which an extension's equations depend."""
        defined = {v for e in extension.equations for v in e.outputs}
        inputs = {v for e in extension.equations for v in e.inputs if isinstance(v, Var)}
        return [v for v in inputs if v not in defined and "t" not in self.program.dims_of(v) and v in self.definition]

    # -- demand extension

    def extension(self, value: Atom, reader: Equation | None) -> Extension:
        """How ``value`` is evaluated at t = T (TimeRL's conditional definitions at the boundary).

        Raises:
          BoundaryError: if its equation needs another timestep, data from outside, or a step of the environment.
        """
        equations: set[Equation] = set()
        last: set[Var] = set()
        beyond: set[Var] = set()
        todo = [value]
        while todo:
            var = todo.pop()
            if not isinstance(var, Var) or "t" not in self.program.dims_of(var):
                continue
            if var in self.given:
                beyond.add(var)
                continue
            equation = self.definition.get(var)
            if equation is None or equation in equations:
                continue
            if equation.is_read and equation.access == _PREVIOUS:
                last.add(equation.source)
                continue
            reason = why_not_behind(equation, self.program.domain)
            if reason:
                raise self._unbounded(reader, equation, reason)
            equations.add(equation)
            todo += equation.inputs
        order = tuple(e for e in self.program.equations if e in equations)
        return Extension(order, frozenset(last), frozenset(beyond))

    def _unbounded(self, reader: Equation | None, equation: Equation, reason: str) -> BoundaryError:
        access = f"x[{reader.access}]" if reader is not None else "The value"
        index = written(reader.access.index) if reader is not None else "t + 1"
        domain, fix = self.program.domain, "Give the series a value there, rlfx.series(v, end=...)"
        # No index stays inside of an environment that ends at a time of its own.
        fix += "." if domain.until else f", or keep the index inside, x[rlfx.minimum({index}, t.length - 1)]."
        last = "the end of an environment (until=)" if domain.until else f"the last timestep, T = {domain.length}"
        fact = f"{access} is read beyond {last}, and cannot be evaluated there: {reason} ({equation.where})."
        return BoundaryError(located(fact, where=reader.where if reader is not None else equation.where, fix=fix))

    @cached_property
    def users(self) -> Mapping[Var, list[Equation]]:
        """The equations that depend on each value."""
        users: dict[Var, list[Equation]] = {}
        for e in self.equations:
            for edge in self.edges(e):
                users.setdefault(edge.value, []).append(e)
        return users

    # -- order

    @cached_property
    def nx(self) -> nx.DiGraph:
        """The graph over equations; an edge from definition to reader has the union of their edges' ``signs``."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.equations)
        for reader in self.equations:
            for edge in self.edges(reader):
                source = self.definition.get(edge.value)
                if source is None:
                    continue
                known = graph.get_edge_data(source, reader, {"signs": frozenset()})["signs"]
                graph.add_edge(source, reader, signs=known | edge.signs)
        return graph

    @cached_property
    def components(self) -> list[tuple[Equation, ...]]:
        """Strongly connected components in an order of execution, members in program order."""
        place = self.program.places
        condensed = nx.condensation(self.nx)
        members = nx.get_node_attributes(condensed, "members")
        order = nx.lexicographical_topological_sort(condensed, key=lambda c: min(place[e] for e in members[c]))
        return [tuple(sorted(members[c], key=place.__getitem__)) for c in order]

    def direction(self, component: Iterable[Equation]) -> str | None:
        """``"forward"``, ``"backward"``, or None if the component is no recurrence.

        Raises:
          CausalityError: if its reads point both ways, or a point depends on itself.
        """
        component = list(component)
        if len(component) == 1 and not self.nx.has_edge(*component, *component):
            return None
        inside = self.nx.subgraph(component)
        signs = frozenset().union(*(s for *_, s in inside.edges(data="signs")))
        if {PAST, FUTURE} <= signs:
            raise _mixed(inside, self)
        now = nx.DiGraph((u, v) for u, v, s in inside.edges(data="signs") if HERE in s)
        if not nx.is_directed_acyclic_graph(now):
            raise _immediate(nx.find_cycle(now))
        return "forward" if PAST in signs else "backward"


def first_operands(equation: Equation) -> tuple[Atom, ...]:
    """What an equation's value at t = 0 depends on, at t = 0.

    Raises:
      BoundaryError: if it depends on another timestep.
    """
    if equation.is_pointwise:
        return equation.inputs
    if equation.is_read and equation.access == _PREVIOUS and equation.start is not None:
        return (equation.start,)
    if equation.is_read and equation.access == SAME:
        return (equation.source,)
    if equation.op is inputs_p:
        return equation.inputs
    raise BoundaryError(
        located(
            "A start value depends on other timesteps or environments; it is taken at the first timestep, and cannot be "
            f"evaluated there ({equation.where}).",
            where=equation.where,
            fix="Compute start= from the carry, params, t and keys alone.",
        )
    )


def in_order(equations: Collection[Equation], operands: Callable, program: Program) -> tuple[Equation, ...]:
    """Equations of one timestep, each after those whose outputs are among its ``operands``."""
    definition = program.definitions()
    found = nx.DiGraph()
    found.add_nodes_from(equations)
    for e in equations:
        sources = (definition.get(v) for v in operands(e))
        found.add_edges_from((source, e) for source in sources if source in found)
    return tuple(nx.lexicographical_topological_sort(found, key=program.places.__getitem__))


def _chain(cycle_edges: Iterable[tuple[Equation, Equation, Any]]) -> str:
    lines = []
    for _, reader, *_ in cycle_edges:
        if reader.is_read:
            lines.append(f"    x[{reader.access}]   at {reader.where}")
    return "\n".join(lines)


def _mixed(inside: nx.DiGraph, graph: Graph) -> CausalityError:
    reads = [e for e in graph.program.equations if e in inside and e.is_read]
    lines = []
    for read in reads:
        found = reach_in(read.access, graph.program.domain)
        lines.append(
            f"    x[{read.access}] reads the {found.kind if found.kind != 'both' else 'past and the future'}   at {read.where}"
        )
    reduced = [e for e in graph.program.equations if e in inside and e.is_over_time]
    lines += [f"    rlfx.{e.params['op']} over t needs every timestep   at {e.where}" for e in reduced]
    where = next((e.where for e in (*reduced, *reads) if e.where not in ("carry", "until")), None)
    return CausalityError(
        located(
            "These reads depend on each other in a circle that needs both the past and the future of t:\n"
            + "\n".join(lines),
            where=where,
            fix="Break the circle: read only one way inside a recurrence, or stop carrying a value computed from the future.",
        )
    )


def _immediate(cycle: list) -> CausalityError:
    where = next((e.where for _, e, *_ in cycle if e.is_read), cycle[0][1].where)
    return CausalityError(
        located(
            "A value at time t depends on itself at the same time:\n" + _chain(cycle),
            where=where,
            fix="Read a strictly earlier or later timestep, x[t - 1] or x[t + 1].",
        )
    )


def cyclic(graph: nx.DiGraph) -> frozenset[Equation]:
    """The equations that depend on themselves at other timesteps, of a graph from definitions to readers."""
    return frozenset(e for c in nx.strongly_connected_components(graph) if len(c) > 1 for e in c)
