"""Replay: the actor keeps its state now and then, and the learner acts each block again instead of storing it.

What is large at every timestep (observations, mostly) is never stacked: it is simulated again from the stored actions
and keys. No paper's plan goes below the size of the stored observations; this one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from rlfx._target import Target
from rlfx.recurrence.analysis.cost import bytes_of
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.analysis.storage import minimum_cut
from rlfx.recurrence.execute.executor import execute
from rlfx.recurrence.execute.held import first_of, hold, seen_after_ends
from rlfx.recurrence.execute.loops import WhileGoing
from rlfx.recurrence.execute.outputs import returned
from rlfx.recurrence.execute.values import Value, cut_times
from rlfx.recurrence.gradient.forms import Pass, accumulate, acting_plan
from rlfx.recurrence.gradient.runners import Kept, Resumed
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan, physical
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import REGISTER, Loop, Parallel, Schedule, schedule

#: Bytes at every timestep that one floating-point operation less is worth. A plan that acts again does so because memory
#: is short: random numbers are drawn again, a policy's actions are kept.
WORTH = 1 / 32


@dataclass(frozen=True, eq=False)
class Replay:
    """How a program is replayed.

    Attributes:
      kept: values that the acting pass stores for the learner.
      large: those that are acted again.
      acting: the acting pass, which stacks nothing of the size of ``large``.
      again: the schedule that gives ``large`` from what is kept.
      state: the series that its loop advances; none if all comes from what is kept at the same timestep.
    """

    kept: tuple[Var, ...]
    large: tuple[Var, ...]
    acting: Schedule
    again: Schedule
    state: tuple[Var, ...]


def find_replay(learner: Learner) -> Replay | str:
    """The replayed form of a learner without reads, or why there is none."""
    program, domain = learner.program, learner.program.domain
    moving = [v for v in learner.stored if program.dims_of(v) >= {"t"} and v is not program.alive]
    if not moving:
        return "nothing is stored for the learner at every timestep"
    largest = max(bytes_of(v, domain) for v in moving)
    large = tuple(v for v in moving if 8 * bytes_of(v, domain) > largest)
    if domain.until and seen_after_ends(learner.region.graph) & set(large):
        return "environments see others after these have ended"
    kept = tuple(v for v in learner.stored if v not in large)
    barred = frozenset(
        v
        for e in program.equations
        for v in e.outputs
        if "t" in program.dims_of(v) and bytes_of(v, domain) >= min(bytes_of(u, domain) for u in large)
    )
    spared = _sparing(learner, large, kept, barred)
    found = _with(learner, large, (*kept, *spared), barred)
    return _with(learner, large, kept, barred) if spared and isinstance(found, str) else found


def _sparing(learner: Learner, large: tuple[Var, ...], kept: tuple[Var, ...], barred: frozenset) -> list[Var]:
    """Small values that are kept as well, because acting again would compute the policy for them: actions, mostly."""
    program = learner.program
    equations = Graph(program, frozenset(large), frozenset(), given=frozenset(kept)).equations
    barred |= {e.source for e in equations if e.is_read}  # a block does not have what it reads before its start
    cut = minimum_cut(
        program,
        equations,
        large,
        fixed=lambda e: e.has_effects,
        free=lambda e: False,
        kept=lambda v: "t" not in program.dims_of(v),
        barred=barred,
        follows=lambda e: True,
        bytes_per_flop=WORTH,
    )
    return [v for e in program.equations for v in e.outputs if v in cut.stored - barred and "t" in program.dims_of(v)]


def _with(learner: Learner, large: tuple[Var, ...], kept: tuple[Var, ...], barred: frozenset) -> Replay | str:
    """The replayed form that keeps these values."""
    program = learner.program
    whole = learner.acting.graph
    acting = schedule(
        Graph(
            program, (whole.wanted - set(large)) | set(kept), whole.wanted_last, whole.wanted_beyond, roots=whole.roots
        ),
        barred=barred,
    )
    again = schedule(Graph(program, frozenset(large), frozenset(), given=frozenset(kept)))
    loops = [s for s in again.stages if isinstance(s, Loop)]
    first = [s for s in acting.stages if isinstance(s, Loop)]
    if len(loops) > 1 or any(loop.direction != "forward" for loop in loops) or not first:
        return "what is stored does not come from one loop over time"
    main, state = first[0], loops[0].depth if loops else {}
    if any(v in barred for v in main.stacked):
        return "a later stage needs a value of that size at every timestep"
    if any(depth != REGISTER or main.depth.get(v) != REGISTER for v, depth in state.items()):
        return "the actor reads further back than the previous timestep"
    if any(e.has_effects for e in again.equations):
        return "acting has effects, which must happen once"
    outside = [e for s in again.stages if isinstance(s, Parallel) for e in s.equations]
    if not all(e.is_pointwise and not e.is_ragged for e in outside):
        return "what is stored needs reads outside of the loop"
    return Replay(kept, large, acting, again, tuple(state))


def acting_kept(replay: Replay, plan: Plan, target: Target, batch: int) -> tuple[ExecutablePlan, Kept]:
    """How the acting pass runs, and what will have the states before the blocks."""
    main = next(s for s in replay.acting.stages if isinstance(s, Loop))
    kept = Kept(plan.block or 1, replay.acting.graph.program.directives.loops, main)
    return acting_plan(replay.acting, target, batch, kept), kept


def replayed(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """``(what a call returns, loss on this device, gradient)``, acting every block again before it is learned from."""
    replay = find_replay(p.learner)
    assert isinstance(replay, Replay)
    assert plan.block is not None
    acting, points = acting_kept(replay, plan, p.target, p.extent.batch)
    acted = p.act(acting)
    stored, beyond, share = {v: acted.env[v] for v in replay.kept}, p.beyond(acted), p.objective.share(acted)

    def again(first, count, block):
        """What the learner is given of consecutive timesteps, from the state before a block (None: the last, shorter one)."""
        kept = {v: cut_times(x, first, count) for v, x in stored.items()}
        times = jax.lax.dynamic_slice_in_dim(p.extent.times, first, count)
        states = {v: points.before(v, block) for v in replay.state}
        return times, {**kept, **act_again(p, replay, kept, beyond, times, states)}

    firsts = first_of(again(0, 1, 0)[1]) if p.learner.program.domain.until else {}

    def block(first, count, _):
        times, part = again(first, count, None if count < plan.block else first // plan.block)
        part = hold(p.learner.region.graph, part, p.extent, firsts)
        return p.tile_gradient(part, beyond, times, share, plan.environments)

    return returned(acted), *accumulate(block, p.extent.times.shape[0], plan.block, p.zero)


def act_again(p: Pass, replay: Replay, kept: dict, beyond: dict, times: Any, state: dict[Var, Value]) -> dict:
    """The large values of consecutive timesteps, from what is kept of them and the state before them."""
    runner = Resumed({v: x.data for v, x in state.items()})
    iteration = WhileGoing(p.target.rewrites.unroll)
    plan = physical(replay.again, p.target, iteration, runner, batch=p.extent.batch, steps=times.shape[0])
    run = execute(plan, {**p.env, **kept}, p.t0, beyond, p.extent.at(times))
    return {v: run.env[v] for v in replay.large}
