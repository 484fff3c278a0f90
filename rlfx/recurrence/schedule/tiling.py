"""Which equations on slices of symbolic length run in blocks of timesteps, so that no array of ``[T, T]`` exists.

``softmax(keys[:t + 1] @ q)`` for all t at once is a masked ``[T, T]`` array. Where that is large, the equations between
the slice and what it is reduced to run in blocks of t (``execute/tiling.py`` runs them). Blocks are grouped into sections, in
each of which a slice is as wide as its readers can see: the past of ``t < 1024`` is 1024 positions, whatever T is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rlfx import _jaxpr as J
from rlfx._target import Room
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_in_all
from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.domain import widest
from rlfx.recurrence.language.index import Slice, Window
from rlfx.recurrence.language.primitives import series_p
from rlfx.recurrence.schedule.bands import MOST_COPIES, NARROWEST, Band, band_of, is_window
from rlfx.recurrence.schedule.positions import followed, positions
from rlfx.recurrence.schedule.windows import PositionsLast, positions_last

#: Each section is compiled by itself; with n of them the past that is read is (n + 1) / 2n of T.
MOST_SECTIONS = 8
#: A section of one block is no loop: its derivative keeps what a block needs next to that of all others, and nothing of it is
#: shared by blocks when it is compiled.
FEWEST_BLOCKS = 4
#: Timesteps. Shorter ones save a tenth of the time at most, and are compiled one by one.
SMALLEST_SECTION = 256
SMALLEST_BLOCK = 8
#: Rows that a block multiplies its weights with, at least: each block reads them, and a learner's adds to their gradients.
ROWS_OF_BLOCK = 256
#: Reductions that are the same of those of blocks, which are of one length.
PARTIAL = frozenset({"sum", "mean", "max", "min"})
#: What acts on positions one by one, alike at every t.
POSITIONWISE = (J.ELEMENTWISE | J.STACKING) | {
    series_p,
    J.primitive("name"),
    J.SPLIT,
    *(J.primitive(n) for n in ("transpose", "squeeze", "reshape", "broadcast_in_dim")),
}


@dataclass(frozen=True, eq=False)
class Blocked:
    """Equations that run in blocks of timesteps.

    Attributes:
      equations: in order.
      outputs: what is needed of them elsewhere.
      block: timesteps in a block.
      sections: each a number of blocks (the last one may end with a shorter block).
      largest: bytes of their largest value, if it were computed for all timesteps at once; without slices, of all of them.
      bands: what each block sees of windows that move with t, by the equations that read them.
      last: which of them have positions last, where blocks are of one timestep.
      sums: reductions over all timesteps of what they give: each block's part, put together afterwards.
    """

    equations: tuple[Equation, ...]
    outputs: tuple[Var, ...]
    block: int
    sections: tuple[tuple[int, int], ...]
    largest: int
    bands: Mapping[Equation, Band] = field(default_factory=dict)
    last: PositionsLast | None = None
    sums: tuple[Equation, ...] = ()

    def __str__(self) -> str:
        slices = ", ".join(dict.fromkeys(f"x[{e.access}]" for e in self.equations if e.is_read))
        steps = f"{self.block} timestep" + "s" * (self.block > 1)
        if not slices:
            return f"blocks of {steps}, their values of all would be {self.largest / 2**20:.3g} MiB"
        sections = f" in {len(self.sections)} sections" if len(self.sections) > 1 else ""
        size = f"{self.largest / 2**20:.3g} MiB"
        rows = dict.fromkeys(b.width for b in self.bands.values())
        seen = f" that each see {' or '.join(map(str, rows))} rows" if rows else ", positions last" if self.last else ""
        return f"{slices}: blocks of {steps}{seen}{sections}, a value of all of them would be {size}"


def divide(
    equations: Sequence[Equation],
    graph: Graph,
    batch: int,
    room: Room,
    wide: frozenset[Equation],
    differentiated: AbstractSet[Equation],
) -> list[tuple | Blocked]:
    """The equations of a stage, in an order in which those that run in blocks stand together.

    ``wide``: the program's (``wide_equations``); ``differentiated``: those with a derivative.
    """
    if wide.isdisjoint(equations):
        return [tuple(equations)]
    levels = _levels(equations, wide, graph)
    parts: list[tuple | Blocked] = []
    for level in sorted(set(levels.values())):
        members = tuple(e for e in equations if levels[e] == level)
        parts.append(members if level % 2 == 0 else _blocked(members, differentiated, graph, batch, room) or members)
    if not any(isinstance(p, Blocked) for p in parts):
        return [tuple(equations)]
    return parts


def in_tiles(equations: Sequence[Equation], graph: Graph, batch: int, room: Room) -> list[tuple | Blocked]:
    """The equations of a stage of which no derivative is taken: pointwise ones in blocks whose values fit a core's cache.

    Where acting is no loop (networks on data of ``inputs``), their values for all timesteps would go to memory and back. As long
    as they stay in the machine's cache, one pass is as fast, and compiles in two thirds of the time. What ends in another
    timestep stands between such parts; so does what is reduced over all of them, but for reductions of a part's own values.
    """
    if room.tile is None:
        return [tuple(equations)]
    program = graph.program
    tiled = frozenset(e for e in equations if e.is_pointwise and not e.is_ragged and _varies(e, program))
    levels = _levels(equations, tiled, graph)
    by_level = {n: tuple(e for e in equations if levels[e] == n) for n in sorted(set(levels.values()))}
    parts: list[tuple | Blocked] = []
    summed: set[Equation] = set()
    for n, members in by_level.items():
        tiles = _tiles(members, by_level.get(n + 1, ()), graph, batch, room) if n % 2 else None
        summed.update(() if tiles is None else tiles.sums)
        parts.append(tiles or tuple(e for e in members if e not in summed))
    return parts if any(isinstance(p, Blocked) for p in parts) else [tuple(equations)]


def _sums(own: AbstractSet[Var], later: Iterable[Equation], program: Program) -> tuple[Equation, ...]:
    """What reduces some values over timesteps, and none that blocks of these do not have."""

    def fits(e: Equation) -> bool:
        if not e.is_over_time or e.params["op"] not in PARTIAL or program.domain.until:
            return False
        return all(v in own or "t" not in program.dims_of(v) for v in e.inputs) and not own.isdisjoint(e.inputs)

    return tuple(filter(fits, later))


def _varies(e: Equation, program: Program) -> bool:
    return bool(e.outputs) and all("t" in program.dims_of(v) for v in e.outputs)


def _tiles(
    members: tuple[Equation, ...], later: Iterable[Equation], graph: Graph, batch: int, room: Room
) -> Blocked | None:
    """How pointwise equations run in blocks; None if the cache has room for all, or if there is no product among them.

    Args:
      later: those of the next level: what reduces their values does so in blocks, if they are of one length.
    """
    program, length = graph.program, graph.program.domain.length
    largest = sum(bytes_in_all(v, program, batch) for e in members for v in e.outputs)
    if room.tile is None or largest <= room.cache or not any(e.op in PRODUCTS for e in members):
        return None
    step = largest / length
    enough = min(room.cache // (2 * step), math.ceil(ROWS_OF_BLOCK / batch))
    block = divisor_near(length, max(1, int(room.tile // step), int(enough)))
    sums = () if length % block else _sums({v for e in members for v in e.outputs}, later, program)
    outputs = _outputs(members, graph, _used((*members, *sums), graph))
    return Blocked(members, outputs, block, ((0, length),), largest, sums=sums) if block < length else None


def _used(members: tuple[Equation, ...], graph: Graph) -> set[Var]:
    """What all other equations use."""
    own = set(members)
    return {v for e in graph.equations if e not in own for v in e.inputs if isinstance(v, Var)}


def _outputs(members: tuple[Equation, ...], graph: Graph, used: AbstractSet[Var]) -> tuple[Var, ...]:
    """What other equations use of some, or the graph is there for."""
    return tuple(v for e in members for v in e.outputs if v in used or v in graph.complete)


def wide_equations(
    program: Program, batch: int, room: Room, differentiated: AbstractSet[Equation] = frozenset()
) -> frozenset[Equation]:
    """The equations of which a value has an axis for many other timesteps at every timestep.

    Windows are many copies of what they read. Those that take more than there is ``room`` for are wide, with what reduces them,
    if no derivative is taken of the copies: it would be added up for one block after the other.
    """
    over = positions(program)
    large = [
        e for e in filled_windows(program, differentiated) if bytes_in_all(e.outputs[0], program, batch) > room.in_block
    ]
    of_windows = followed(program, large)

    def is_wide(e: Equation) -> bool:
        if not e.is_pointwise or "t" not in frozenset().union(*map(program.dims_of, e.outputs)):
            return False
        windows = any(v in of_windows for v in (*e.inputs, *e.outputs) if isinstance(v, Var))
        return e.is_ragged or windows or any(v in over for v in e.outputs)

    return frozenset((*filter(is_wide, program.equations), *large))


def filled_windows(program: Program, differentiated: AbstractSet[Equation]) -> tuple[Equation, ...]:
    """The equations that read ``x.window(lo, hi)``, not of few timesteps, of which no derivative is taken."""

    def found(e: Equation) -> bool:
        return e.is_read and isinstance(e.access, Window) and e.access.hi - e.access.lo >= NARROWEST

    reads = () if program.domain.until else filter(found, program.equations)
    return tuple(e for e in reads if e not in differentiated)


def _levels(equations: Sequence[Equation], wide: frozenset[Equation], graph: Graph) -> dict[Equation, int]:
    """Odd levels run in blocks; a level needs nothing of later ones, and an odd one no other timesteps of its own."""
    level: dict[Equation, int] = {}
    owner = {v: e for e in equations for v in e.outputs}
    for e in equations:  # what is read at T by demand extension is a dependence, too
        producers = [owner[edge.value] for edge in graph.edges(e) if edge.value in owner]
        base = max((level[p] for p in producers if p in level), default=0)
        if _is_slice(e) or (e.is_read and e in wide):
            level[e] = base + 1 if base % 2 == 0 else base + 2
        elif e in wide and not e.has_effects:
            level[e] = base | 1
        elif e.is_pointwise and not e.has_effects:
            level[e] = base
        else:
            level[e] = base + base % 2
    # What follows the last wide value of a level needs no blocks.
    needed: set[Equation] = set()
    for e in reversed(equations):
        if level[e] % 2 and not (e in needed or _is_slice(e) or e in wide):
            level[e] += 1
        else:
            needed |= {p for v in e.inputs if (p := owner.get(v)) is not None and level[p] == level[e]}
    return level


def _is_slice(equation: Equation) -> bool:
    return equation.is_read and isinstance(equation.access, Slice) and J.is_symbolic(equation.params["size"])


def _blocked(
    members: tuple[Equation, ...], differentiated: AbstractSet[Equation], graph: Graph, batch: int, room: Room
) -> Blocked | None:
    """How equations run in blocks; None if there is no need to."""
    program, length = graph.program, graph.program.domain.length
    own = {v for e in members for v in e.outputs}
    used = _used(members, graph)
    outputs = _outputs(members, graph, used)
    shared = _shared(members, program)
    windows = [e for e in members if e.is_read and is_window(e, program.domain)]
    layers = bool(windows) and differentiated.isdisjoint(windows) and _has_layers(members, shared, program)
    if layers:
        windows = []
    filled = [e for e in members if e.is_read and isinstance(e.access, Window)]
    copied = max((bytes_in_all(e.outputs[0], program, batch) for e in (*windows, *filled)), default=0)
    wide = [v for v in own - shared if "t" in program.dims_of(v)]
    sizes = (bytes_in_all(v, program, batch) for v in wide)
    largest = max(sizes, default=0)
    if largest <= room.at_once and copied <= room.in_block:
        return None
    if any(J.symbolic_axes(v.shape) for v in outputs) or any(
        v in outputs for e in members if e.is_read for v in e.outputs
    ):
        return None
    if windows:  # values on them are about twice as wide as a window
        most = min(widest(program.domain, e.params["size"]) for e in windows)
        block = min(most, _block_size(2 * largest / length, length, room.in_block))
        block = _block_size(1, length, max(block, -(-most // (MOST_COPIES - 1))))
    elif layers and room.tile is not None:  # as networks of one timestep's data are: what a layer makes stays in the cache
        block = divisor_near(length, min(length, max(1, int(room.tile * length // largest))))
    else:
        block = _block_size(largest / length, length, room.in_block)
    if filled:  # a few timesteps of them fit the cache
        fitting = min(room.in_block, room.tile or room.in_block) * length // (2 * copied)
        block = divisor_near(length, min(block, max(1, int(fitting))))
    last = positions_last(members, outputs, program, batch) if filled and room.tile is not None else None
    block = block if last is None else 1
    found = {e: band_of(e, program.domain, block) for e in windows}
    bands = {e: band for e, band in found.items() if band is not None}
    # An environment that has ended sees what its last timestep saw, which may lie in an earlier section.
    whole = program.domain.until or all(e in bands for e in members if _is_slice(e))
    sections = ((0, length),) if whole else _sections(length, block)
    return Blocked(members, outputs, block, sections, max(largest, copied), bands, last)


def _has_layers(members: Iterable[Equation], shared: AbstractSet[Var], program: Program) -> bool:
    """Whether weights multiply what each timestep makes of the rows that it sees: they would of all that its block sees.

    Networks of a state and a goal, of the timesteps before one; scores of keys are products of two that vary with t.
    """

    def is_layer(e: Equation) -> bool:
        moving = [v for v in e.inputs if isinstance(v, Var) and "t" in program.dims_of(v)]
        return e.op in PRODUCTS and e.is_ragged and len(moving) == 1 and moving[0] not in shared

    return any(map(is_layer, members))


def _shared(equations: Iterable[Equation], program: Program) -> set[Var]:
    """Slices, and functions of them position by position: all timesteps see one array."""
    shared: set[Var] = set()
    for e in equations:
        steady = all(v in shared or "t" not in program.dims_of(v) for v in e.inputs)
        if _is_slice(e) or (e.op in POSITIONWISE and steady):
            shared.update(e.outputs)
    return shared


def _block_size(per_step: float, length: int, room: int) -> int:
    """The divisor of T, or the power of two, that comes closest to what there is room for."""
    fitting = min(length, max(SMALLEST_BLOCK, int(room // per_step)))
    divisor = max(d for d in range(1, fitting + 1) if length % d == 0)
    return divisor if 2 * divisor >= fitting else 1 << (fitting.bit_length() - 1)


def _sections(length: int, block: int) -> tuple[tuple[int, int], ...]:
    blocks = -(-length // block)
    size = block * max(FEWEST_BLOCKS, -(-SMALLEST_SECTION // block), -(-blocks // MOST_SECTIONS))
    return tuple((first, min(first + size, length)) for first in range(0, length, size))
