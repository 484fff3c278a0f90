"""The executable plan: everything that is decided about how a schedule runs on a target, as values.

``physical`` decides; the executor and ``explain`` only read: which equations of a stage run in blocks of timesteps, which
products of a loop are one, in which sections it runs, what runs its iterations, and whether a derivative is taken of them.
TimeRL (section 6) has its runtime decide the like while it interprets a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlfx._target import Target
from rlfx.recurrence.analysis.cost import multiplies, show_bytes
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.schedule.later import Counted, Later, needed_later
from rlfx.recurrence.schedule.narrow import is_narrow
from rlfx.recurrence.schedule.postponed import Postponed, postponed
from rlfx.recurrence.schedule.products import Joined, share_products
from rlfx.recurrence.schedule.restarted import Restarted, restarted
from rlfx.recurrence.schedule.schedule import REGISTER, Loop, Schedule
from rlfx.recurrence.schedule.sections import sections_of, tiled_series
from rlfx.recurrence.schedule.strided import Strided, strided
from rlfx.recurrence.schedule.tiling import Blocked, divide, in_tiles, wide_equations
from rlfx.recurrence.schedule.truncated import Truncated, truncated
from rlfx.recurrence.schedule.window_products import WindowProduct, window_products


class Iteration(Protocol):
    """How consecutive iterations run, as ``lax.scan``: ``(step, init, xs, backward, going) -> (state, ys)``.

    ``going(state)`` says whether any environment takes the next timestep; it is None where all take all of them.

    Attributes:
      differentiable: whether a derivative may be taken of it. Where none is, equations may run as it pleases acting.
    """

    @property
    def differentiable(self) -> bool: ...

    def of(self, loop: Loop) -> Iteration:
        """How the iterations of this loop run: so, or another way."""
        ...

    def rolled(self) -> Iteration:
        """One iteration of the program for each of the loop."""
        ...

    def truncated(self, at: Truncated, holds: Any, agreed: Callable) -> Iteration:
        """Where it ``holds`` that no derivative goes back further; ``agreed``: a condition, on whichever device it holds."""
        ...

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple: ...


class Runner(Protocol):
    """What runs a loop in place of its iterations one after another: in blocks, from a state, as fused steps.

    Attributes:
      rewritable: whether the loops it runs may have other equations than the schedule's, with the same meaning.
      whole: whether it runs all timesteps of the execution in one piece.
    """

    @property
    def rewritable(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    def of(self, program: Program, loop: Loop, target: Target) -> tuple[Runner | None, str | None]:
        """What runs this loop, None if its iterations do; and what is to be said of that: that it runs so, or why not."""
        ...

    def run(self, running: Any, state: Any, times: Any, slices: Any) -> tuple:
        """As ``RunningLoop.advance`` (``execute/loops.py``)."""
        ...


#: What runs of a stage of all timesteps, one after another.
Part = tuple[Equation, ...] | Blocked | Strided | WindowProduct | Later


@dataclass(frozen=True, eq=False)
class Together:
    """Equations that run for all timesteps at once, part by part.

    Attributes:
      parts: equations in order; those that run in blocks; one that runs at every n-th timestep; a product with a window, which is
        not made; those that the loss needs only of later timesteps.
    """

    parts: tuple[Part, ...]

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Those of all parts."""
        return tuple(e for part in self.parts for e in _equations(part))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is special about it."""
        return tuple(str(part) for part in self.parts if not isinstance(part, tuple))

    def __str__(self) -> str:
        return f"all t: {len(self.equations)} equations"


def _equations(part: Part) -> tuple[Equation, ...]:
    match part:
        case Blocked():
            return (*part.equations, *part.sums)
        case Strided() | WindowProduct():
            return (part.equation,)
        case Later():
            return part.equations
        case _:
            return part


@dataclass(frozen=True, eq=False)
class Repeated:
    """A loop, and how it runs.

    Attributes:
      loop: what its iterations compute, and keep.
      iteration: how consecutive ones run.
      runner: what runs it in their place, or None.
      joined: weights that are put together before it.
      tiled: series over whose own past it runs in sections, each with how many of its own axes come before time there; none:
        it does not.
      sections: these, as (first, end).
      said: what the runner that was asked for says of it.
      truncated: where no derivative goes back further, or None.
      restarted: windows that run side by side, or None.
      postponed: registers that are kept as what they would be if they did not begin anew.
    """

    loop: Loop
    iteration: Iteration
    runner: Runner | None = None
    joined: tuple[Joined, ...] = ()
    tiled: Mapping[Var, int] = field(default_factory=dict)
    sections: tuple[tuple[int, int], ...] = ()
    said: str | None = None
    truncated: Truncated | None = None
    restarted: Restarted | None = None
    postponed: Mapping[Var, Postponed] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``forward scan``, ``backward associative scan``: what ``explain`` and the profiler's scopes call it."""
        return f"{self.loop.direction} {self.iteration if self.runner is None else 'scan'}"

    @property
    def equations(self) -> tuple[Equation, ...]:
        """The body of the loop."""
        return self.loop.body

    @property
    def notes(self) -> tuple[str, ...]:
        """What is special about it."""
        rings = [f"{v!r}: ring of {n}" for v, n in self.loop.depth.items() if n != REGISTER]
        found = [f"keeps earlier iterations, {', '.join(rings)}"] if rings else []
        if self.loop.spared:
            what = "products" if multiplies(self.loop.body) else "large values of small ones"
            found.append(
                f"computes {what} itself that would be {show_bytes(self.loop.spared)} if they were given to it"
            )
        if self.said is not None:
            found.append(self.said)
        if len(self.sections) > 1:
            read = dict.fromkeys(f"x[{e.access}]" for e in self.loop.reads if e.source in self.tiled)
            size = self.sections[0][1] - self.sections[0][0]
            count = f"{len(self.sections)} sections of {size} timesteps"
            found.append(f"{', '.join(read)}: {count}, each reads only the past that is there")
        found += [str(at) for at in (self.truncated, self.restarted) if at is not None]
        if self.postponed:
            what = "state begins anew where it is" if len(self.postponed) == 1 else "states begin anew where they are"
            found.append(f"{len(self.postponed)} {what} read")
        return (*found, *map(str, self.joined))

    def __str__(self) -> str:
        return f"{self.loop.direction} {self.runner or self.iteration}: {len(self.loop.body)} equations"


Node = Together | Repeated


@dataclass(frozen=True, eq=False)
class ExecutablePlan:
    """A schedule as it runs. Prints as text.

    Attributes:
      graph: of the program.
      target: the machine.
      nodes: one a stage, in order.
      differentiated: whether derivatives are taken of it.
      first: the number of its first stage in `explain`, and so in profiles.
      features_first: whether arrays have rows last (``execute/features.py``).
    """

    graph: Graph
    target: Target
    nodes: tuple[Node, ...]
    differentiated: bool
    first: int = 1
    features_first: bool = False

    def __str__(self) -> str:
        lines = []
        for n, node in enumerate(self.nodes):
            lines.append(f"{n}  {node}")
            lines += [f"   - {note}" for note in node.notes]
        return "\n".join(lines)


def physical(
    schedule: Schedule,
    target: Target,
    iteration: Iteration,
    runner: Runner | None = None,
    *,
    batch: int = 1,
    steps: int | None = None,
    first: int = 1,
    counted: Counted = Counted(),
) -> ExecutablePlan:
    """Decide how a schedule runs.

    Args:
      iteration: how the iterations of its loops run.
      runner: what runs loops in their place, where it applies.
      batch: environments of the execution.
      steps: its timesteps; None: all. Blocks and sections are for all of them.
      first: the number of its first stage.
      counted: where the loss may be other than 0.
    """
    graph = schedule.graph
    whole = steps is None or steps == graph.program.domain.length
    wide = wide_equations(graph.program, batch, target.room, schedule.differentiated) if whole else frozenset()

    def node(stage: Any) -> Node:
        if isinstance(stage, Loop):
            return _repeated(stage, schedule, target, iteration, runner, whole, counted)
        parts = divide(stage.equations, graph, batch, target.room, wide, schedule.differentiated) if whole else [stage.equations]
        if whole and parts == [stage.equations] and not iteration.differentiable:
            parts = in_tiles(stage.equations, graph, batch, target.room)
        if whole and target.rewrites.windows and not narrow:
            parts = _apart(parts, lambda equations: window_products(equations, graph, target.rewrites.windows))
        return Together(tuple(_apart(parts, lambda equations: strided(equations, graph.program))))

    narrow = is_narrow(schedule, batch, steps or graph.program.domain.length, target.rewrites.narrow)
    nodes = tuple(map(node, schedule.stages))
    if whole and iteration.differentiable and not narrow and target.rewrites.branches:
        nodes = _later(nodes, schedule, counted)
    return ExecutablePlan(graph, target, nodes, iteration.differentiable, first, narrow)


def _apart(parts: Iterable, divide: Callable[[tuple[Equation, ...]], Iterable]) -> list:
    """The parts of a stage, those that are equations in order divided further."""
    return [p for part in parts for p in (divide(part) if isinstance(part, tuple) else [part])]


def _later(nodes: tuple[Node, ...], schedule: Schedule, counted: Counted) -> tuple[Node, ...]:
    """Stages, of which what the loss needs of later timesteps alone is apart."""
    stages = [(x.parts, None) if isinstance(x, Together) else ((x.loop,), x.truncated) for x in nodes]
    split = needed_later(stages, schedule.graph, schedule.differentiated or frozenset(schedule.equations), counted)
    return tuple(replace(x, parts=tuple(_apart(x.parts, split))) if isinstance(x, Together) else x for x in nodes)


def _repeated(
    loop: Loop,
    schedule: Schedule,
    target: Target,
    iteration: Iteration,
    runner: Runner | None,
    whole: bool,
    counted: Counted,
) -> Repeated:
    program, ending, anew = schedule.graph.program, None, None
    mine, said = (None, None) if runner is None else runner.of(program, loop, target)
    joined: tuple[Joined, ...] = ()
    active = (schedule.differentiated or frozenset(schedule.equations)) if iteration.differentiable else frozenset()
    if target.rewrites.shared_rows and (mine is None or mine.rewritable):
        loop, joined = share_products(loop, program, target.rewrites.shared_rows, active, schedule.perturbed)
    tiled = tiled_series(loop) if whole and (mine is None or mine.whole) else {}
    sections = sections_of(program.domain.length) if tiled else ()
    if whole and iteration.differentiable and mine is None:
        anew = restarted(program, loop) if counted.begins and not sections else None
        ending = None if anew else truncated(program, loop, active, counted.first if target.rewrites.branches else 0)
    fewest, alone = target.rewrites.postponed, mine is None and ending is None and anew is None and not sections
    later = postponed(program, loop, fewest) if fewest and alone else {}
    return Repeated(loop, iteration.of(loop), mine, joined, tiled, sections, said, ending, anew, later)
