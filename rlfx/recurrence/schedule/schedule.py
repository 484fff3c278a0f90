"""From the dependence graph to stages: loops over t where a recurrence needs one, everything else at once.

Allen and Kennedy's distribution. Each equation gets a level: ``2 i`` if it depends on loop ``i`` at its own timestep (it
can run inside the loop), ``2 i - 1`` if it only needs what is complete before loop ``i``. TimeRL section 6.1 solves an
integer program instead; for one time axis, levels give the same structure at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlfx._lazy import nx
from rlfx.recurrence.analysis.active import keeps_operands
from rlfx.recurrence.analysis.cost import bytes_in_all, multiplies_weights
from rlfx.recurrence.analysis.graph import FUTURE, PAST, Graph
from rlfx.recurrence.analysis.storage import minimum_cut
from rlfx.recurrence.ir.access import is_shift, reach_in
from rlfx.recurrence.ir.behind import extends
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.index import Lookup
from rlfx.recurrence.schedule.fission import in_one_launch, nested_loops, products_of_few_rows, worth
from rlfx.recurrence.schedule.fusion import bytes_spared, fused


@dataclass(frozen=True)
class Parallel:
    """Equations that are evaluated for all timesteps at once, in order."""

    equations: tuple[Equation, ...]


@dataclass(frozen=True)
class Loop:
    """A sequential loop over t.

    Attributes:
      direction: "forward" or "backward".
      body: equations in order of execution.
      reads: those of the body that read what the body computed at other iterations, in its order.
      depth: for each series read in the loop, how it is kept: REGISTER, the value of the previous iteration, or the
        number of iterations in a ring.
      stacked: values that later stages need at every timestep.
      last: series of which the value of the last iteration is needed.
      spared: bytes, at all timesteps, of what it computes itself of what it could be given.
    """

    direction: str
    body: tuple[Equation, ...]
    reads: tuple[Equation, ...]
    depth: dict[Var, int]
    stacked: tuple[Var, ...]
    last: tuple[Var, ...]
    spared: int = 0

    @property
    def equations(self) -> tuple[Equation, ...]:
        """The body: every kind of stage has its equations under this name."""
        return self.body


Stage = Parallel | Loop
REGISTER = 0


@dataclass(frozen=True)
class Schedule:
    """The stages of a graph, in order.

    Attributes:
      differentiated: the equations of which a derivative is taken.
      perturbed: the inputs with respect to which it is.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    differentiated: frozenset[Equation] = frozenset()
    perturbed: frozenset[Var] = frozenset()

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(s for s in self.stages if isinstance(s, Loop))

    @property
    def in_loops(self) -> tuple[Equation, ...]:
        """What loops over time evaluate."""
        return tuple(e for loop in self.loops for e in loop.body)

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Those of all stages; one that is computed twice is there twice."""
        return tuple(e for s in self.stages for e in s.equations)


def schedule(
    graph: Graph,
    *,
    barred: frozenset[Var] = frozenset(),
    differentiated: frozenset[Equation] = frozenset(),
    perturbed: frozenset[Var] = frozenset(),
    fuses: bool = True,
) -> Schedule:
    """Stages for a dependence graph.

    Args:
      barred: values that no loop may stack, whatever it costs to do without.
      differentiated: equations whose operands are kept for every timestep anyway: they stay in no loop that can do
        without them.
      perturbed: the inputs with respect to which the others are.
      fuses: whether loops compute products themselves that it costs more to give them (``fusion.py``).

    Raises:
      CausalityError: if no order of timesteps exists.
    """
    levels, loops = _levels(graph)
    recurrent = [frozenset(e for c in loop.components for e in c) for loop in loops]
    inside = _fused(graph, levels, recurrent, fuses)
    for i, equations in enumerate(inside):
        levels |= dict.fromkeys(equations, 2 * i)
    in_loop = [frozenset(e for e, l in levels.items() if l == 2 * i) for i in range(len(loops))]
    stages: list[Stage] = []
    done: set[Equation] = set()

    def parallel(equations: Iterable[Equation], again: bool = False) -> None:
        chosen = set(equations) if again else set(equations) - done
        ordered = tuple(e for c in graph.components for e in c if e in chosen)
        if ordered:
            stages.append(Parallel(ordered))
            done.update(ordered)

    inline = _inlined(graph, levels)
    only_in_loops = _only_in_loops(graph, inline, frozenset().union(*recurrent, *inside))
    for i, loop in enumerate(loops):
        parallel(e for e, l in levels.items() if l == 2 * i - 1 and e not in only_in_loops)
        made, after = _loop(graph, loop.direction, recurrent[i], in_loop[i], inline, barred, differentiated)
        stages.append(replace(made, spared=bytes_spared(inside[i], graph)) if inside[i] else made)
        done.update(recurrent[i])
        parallel(after, again=True)  # what the loop has computed may be computed again, for all t at once
    parallel(e for e, l in levels.items() if l == 2 * len(loops) - 1)
    return Schedule(graph, tuple(stages), differentiated, perturbed)


def _fused(graph: Graph, levels: dict[Equation, int], recurrent: list[frozenset], fuses: bool) -> list[frozenset[Equation]]:
    """For each loop, the equations of earlier stages that it computes itself; the last loop is asked first."""
    levels, found = dict(levels), []
    for i in reversed(range(len(recurrent))):
        body: set[Equation] = set()
        in_loop = {e for e, l in levels.items() if l == 2 * i}
        for e in recurrent[i]:
            _pull(e, graph, in_loop, (), body)
        found.append(fused(graph, levels, 2 * i, body, fuses))
        levels |= dict.fromkeys(found[-1], 2 * i)
    return found[::-1]


@dataclass
class _Group:
    direction: str
    components: list[tuple[Equation, ...]]
    heavy: bool = False  # whether it multiplies weights


def _levels(graph: Graph) -> tuple[dict[Equation, int], list[_Group]]:
    """The level of each equation, and the loops.

    A recurrence joins a loop that it follows, unless neither multiplies weights and what is between them does: layers of traces,
    or of selective state spaces. Products between two loops are of all timesteps at once, and each loop is one function.
    """
    levels: dict[Equation, int] = {}
    loops: list[_Group] = []
    behind: set[Equation] = set()  # products of what the loop of their level computes, and what follows from them
    for component in graph.components:
        members = set(component)
        edges = (edge for reader in component for edge in graph.nx.in_edges(reader, data="signs"))
        least = [(_after(levels[source], signs, loops), source) for source, _, signs in edges if source not in members]
        base = max((level for level, _ in least), default=-1)
        follows = any(level == levels[e] == base and e in behind for level, e in least)
        direction = graph.direction(component)
        if direction is not None:
            heavy = multiplies_weights(component, graph.program)
            first = (base + 1) // 2
            first += follows and not heavy and not loops[first].heavy
            index = next((i for i in range(first, len(loops)) if loops[i].direction == direction), len(loops))
            if index == len(loops):
                loops.append(_Group(direction, []))
            loops[index].components.append(component)
            loops[index].heavy |= heavy
            base = 2 * index
        elif follows or (base % 2 == 0 and multiplies_weights(component, graph.program)):
            behind.update(component)
        levels.update(dict.fromkeys(component, base))
    return levels, loops


def _after(level: int, signs: frozenset[str], loops: list[_Group]) -> int:
    """The least level of a reader, given the level of what it reads and where it reads it."""
    if level % 2 or not signs & {PAST, FUTURE}:
        return level
    ahead = {"forward": FUTURE, "backward": PAST}[loops[level // 2].direction]
    return level + 1 if ahead in signs else level


def _inlined(graph: Graph, levels: dict) -> frozenset[Equation]:
    """Equations that depend on t, b and keys alone (random numbers): loops evaluate them where they use them.

    Stacking them for the loop would cost memory and gain nothing, unless operations are slow to start: then a program asks
    for them ahead, as long as they are small.
    """
    program = graph.program
    inline: set[Equation] = set()
    for e in graph.equations:
        varying = [v for v in e.inputs if isinstance(v, Var) and "t" in program.dims_of(v)]
        simple = e.is_pointwise and not (e.is_ragged or e.has_effects) and levels.get(e) == -1
        if simple and varying and all(v is program.now or graph.definition.get(v) in inline for v in varying):
            inline.add(e)
    ahead = program.directives.ahead
    if ahead is not None and _stacked_bytes(graph, inline) <= ahead:
        return frozenset()
    return frozenset(inline)


def _stacked_bytes(graph: Graph, inline: set[Equation]) -> int:
    """Bytes of what other equations use of those that could be inlined, at all points."""
    program = graph.program
    used = {v for e in graph.equations if e not in inline for v in e.inputs if isinstance(v, Var)}
    values = [v for e in inline for v in e.outputs if v in used]
    return sum(bytes_in_all(v, program) for v in values)


def _only_in_loops(graph: Graph, inline: frozenset, recurrent: frozenset) -> frozenset[Equation]:
    """The inlined equations of which every use is by a loop, or by another such equation: loops evaluate them."""
    users = graph.users
    found: set[Equation] = set()

    def stays(v: Var) -> bool:
        # A boundary value is taken at the last timestep, when the loop may not have got there.
        mine = users.get(v, ())
        return v not in graph.complete and all(
            (e in recurrent or e in found) and not (e.is_read and e.end is v) for e in mine
        )

    for e in reversed(graph.equations):  # the users of one that is inlined come later in the program
        if e in inline and all(map(stays, e.outputs)):
            found.add(e)
    return frozenset(found)


def _loop(
    graph: Graph, direction: str, recurrent, in_loop, inline, barred, differentiated
) -> tuple[Loop, list[Equation]]:
    """The loop around ``recurrent``, and the equations of its level that run after it."""
    program = graph.program
    body: set[Equation] = set()
    for e in recurrent:  # and what the recurrence needs at its own timestep
        _pull(e, graph, in_loop, inline, body)
    movable = {e for e in in_loop - body if e.is_simultaneous and not e.is_ragged}
    movable = _closed(movable, in_loop - body - movable, graph)
    outside = in_loop - body - movable
    last = {v for e in in_loop for v in e.outputs if v in graph.wanted_last}
    needed = needed_last(graph, in_loop)
    picked = {v for v in needed if program.ends_apart(v)}  # from the values at all timesteps
    last |= needed - picked
    if direction == "backward":  # which ends at the first timestep
        last, picked = set(), last | picked
    for v in list(last):  # a series whose last value is needed is computed in the loop
        _pull(graph.definition[v], graph, in_loop, inline, body)
    for e in in_loop:
        if e.has_effects and e.is_simultaneous:  # once an iteration, in order
            _pull(e, graph, in_loop, inline, body)
    movable -= body
    outside -= body
    owned = {v for e in (*body, *movable) for v in e.outputs}
    wanted = _wanted_outside(graph, body | movable, owned, inline) | picked
    leaving = nested_loops(movable, graph) | products_of_few_rows(movable, program)
    free = movable if "t" in program.directives.vectorize else {e for e in movable & differentiated if keeps_operands(e)}
    equations = [e for e in program.equations if e in body or e in movable]
    together = in_one_launch(equations, body, program)
    cut = minimum_cut(
        program,
        equations,
        wanted,
        fixed=lambda e: not e.is_simultaneous or e.is_ragged or e.has_effects,
        free=free.__contains__,
        kept=lambda v: "t" not in program.dims_of(v),
        barred=barred,
        stays=lambda e: worth(e, program, leaving | free, together) if e in movable else 0.0,
        leaves=lambda e: float(program.directives.start or 0) if e in together else 0.0,
    )
    stored = cut.stored
    for v in stored:
        _pull(graph.definition[v], graph, in_loop, inline, body)
    again = [e for e in cut.again if not any(v in stored for v in e.outputs) or e not in body]
    after = [*again, *outside]
    ordered = _order(graph, body, {e for e in body if e.is_read and graph.definition.get(e.source) in body})
    reads = tuple(e for e in ordered if e.is_read and graph.definition.get(e.source) in body)
    series = {e.source for e in reads} | last
    loop = Loop(
        direction,
        ordered,
        reads,
        {v: _depth(v, reads, program) for e in ordered for v in e.outputs if v in series},
        tuple(v for e in ordered for v in e.outputs if v in stored),
        tuple(v for e in ordered for v in e.outputs if v in last),
    )
    return loop, after


def _closed(movable: set, outside: set, graph: Graph) -> set:
    """``movable`` without what depends at its own timestep on equations that run after the loop."""
    outside = set(outside)
    for e in (e for component in graph.components for e in component):
        if e in movable and any(graph.definition.get(edge.value) in outside for edge in graph.edges(e)):
            outside.add(e)
    return movable - outside


def _pull(equation: Equation, graph: Graph, in_loop, inline, body: set) -> None:
    """Move an equation, and what it needs at its own timestep, into the loop."""
    todo = [equation]
    while todo:
        e = todo.pop()
        if e in body or not (e in in_loop or e in inline):
            continue
        body.add(e)
        todo += [d for edge in graph.edges(e) if (d := graph.definition.get(edge.value)) is not None]


def needed_last(graph: Graph, equations: Iterable[Equation]) -> set[Var]:
    """Series of some equations of which the value at T - 1 is needed, by a read beyond the end or for the final carry."""
    found: set[Var] = set()
    mine = {v for e in equations for v in e.outputs}
    for v in graph.wanted_beyond:
        found |= graph.extension(v, None).last & mine
    for e in graph.equations:
        if extends(e, graph.program.domain):
            found |= graph.extension(e.source, e).last & mine
    if graph.program.ends is not None:
        read = graph.definition.get(graph.program.ends)
        if read is not None and read.source in mine:
            found.add(read.source)
    return found


def _wanted_outside(graph: Graph, producers: set, owned: set[Var], inline) -> set[Var]:
    wanted = {v for v in graph.wanted if v in owned}
    for e in graph.equations:
        if e in producers:
            continue
        wanted |= {v for v in e.inputs if isinstance(v, Var) and v in owned}
    # Random numbers and the like are evaluated again outside, never stored.
    return {v for v in wanted if graph.definition[v] not in inline}


def _order(graph: Graph, body: set, reads: set) -> tuple[Equation, ...]:
    """Execution order inside one iteration: reads of earlier iterations first, then by dependence."""
    now = nx.DiGraph()
    now.add_nodes_from(body)
    for reader in body:
        for edge in graph.edges(reader):
            source = graph.definition.get(edge.value)
            if (
                source in body
                and source is not reader
                and "0" in edge.signs
                and not (reader in reads and len(edge.signs) == 3)
            ):
                now.add_edge(source, reader)
    return tuple(nx.lexicographical_topological_sort(now, key=graph.program.places.__getitem__))


def _depth(var: Var, reads: Iterable[Equation], program: Program) -> int:
    """How a series is kept in the loop: a register where every read has lag one, else a ring."""
    mine = [e for e in reads if e.source is var]
    if all(is_shift(e.access) in (-1, 1) for e in mine):
        return REGISTER
    distances = []
    for e in mine:
        if isinstance(e.access, Lookup):
            distances.append((e.access.back or program.domain.length) - 1)
            continue
        found = reach_in(e.access, program.domain)
        distances.append(max(found.behind, found.ahead))
    return min(max(distances) + 1, program.domain.length)
