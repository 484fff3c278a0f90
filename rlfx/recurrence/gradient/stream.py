"""Which learners can follow some timesteps behind the actor, inside the rollout, over buffers of a few points.

TimeRL section 5.2 (a consumer that reads at most n steps ahead is fused with a delay of n). How it runs: ``turns.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlfx.recurrence.ir.access import is_shift, reach_in
from rlfx.recurrence.ir.behind import extends
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.index import Window
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.schedule import Loop, Parallel


@dataclass(frozen=True, eq=False)
class Stream:
    """How a program is streamed.

    Attributes:
      before: equations that do not depend on the loop.
      loop: the acting loop.
      prompt: pointwise equations on what it stacks: evaluated for a chunk as soon as it has been acted.
      delayed: those that need points further on.
      delay: how many.
      buffered: values that are carried from chunk to chunk, for the delayed equations and the learner.
    """

    before: tuple[Equation, ...]
    loop: Loop
    prompt: tuple[Equation, ...]
    delayed: tuple[Equation, ...]
    delay: int
    buffered: tuple[Var, ...]


def find_stream(learner: Learner) -> Stream | str:
    """The streaming form of a learner without reads, or why there is none."""
    program, stages = learner.program, learner.acting.stages
    loops = [s for s in stages if isinstance(s, Loop)]
    if len(loops) != 1 or loops[0].direction != "forward":
        return "there is more than one loop over time" if loops else "there is no loop over time"
    (loop,) = loops
    if any(depth for depth in loop.depth.values()):
        return "the actor reads further back than the previous timestep"
    at = stages.index(loop)
    before = [e for s in stages[:at] if isinstance(s, Parallel) for e in s.equations]
    early = {*program.inputs, *(v for e in before for v in e.outputs)}
    # What is returned of a timestep is zero where the environment has ended, also what is the same at all of them.
    ends = program.domain.until and any("t" in dims for dims in program.aux_dims)
    if ends or not all(v in early for v in program.aux if isinstance(v, Var)):
        return "aux is returned for every timestep"
    after = [e for s in stages[at + 1 :] if isinstance(s, Parallel) for e in s.equations]
    refused = next((why for e in after if (why := _refused(e, program))), None)
    if refused:
        return refused
    delayed = _delayed(after, program)
    if any(reach_in(e.access, program.domain).past for e in after if e.is_read):
        return "what is learned from reads the past after the loop"
    delay = _delay(delayed, program)
    if delay >= program.domain.length:
        return f"what is learned from is {delay} timesteps ahead, and there are {program.domain.length}"
    if program.domain.until and (why := _unknown_before_the_end(learner, delayed)):
        return why
    prompt = tuple(e for e in after if e not in delayed)
    produced = {*loop.stacked, *(v for e in prompt for v in e.outputs)}
    used = {v for e in delayed for v in e.inputs if isinstance(v, Var)} | set(learner.stored)
    order = [v for e in program.equations for v in e.outputs]
    return Stream(
        tuple(before),
        loop,
        prompt,
        tuple(e for e in after if e in delayed),
        delay,
        tuple(v for v in order if v in produced and v in used and "t" in program.dims_of(v)),
    )


def _refused(equation: Equation, program: Program) -> str | None:
    """Why an equation after the loop cannot be evaluated for a part of the timesteps; None if it can."""
    if equation.is_ragged:
        return f"{equation.op.name} is applied to a slice whose length depends on t ({equation.where})"
    if equation.is_read:
        shifts = isinstance(equation.access, Window) or is_shift(equation.access) is not None
        return None if shifts else f"x[{equation.access}] is not a fixed number of timesteps away ({equation.where})"
    if not equation.is_simultaneous or equation.has_effects:
        return f"{equation.op.name} needs all timesteps ({equation.where})"
    return None


def _unknown_before_the_end(learner: Learner, delayed: Iterable[Equation]) -> str | None:
    """Under ``until=``, why an environment's end can't be learned from while others go on; None if it can."""
    program, graph = learner.program, learner.acting.graph
    if program.reduce == "mean" and set(learner.targets) - {program.loss}:
        return "aux is differentiated beside a mean over timesteps whose number is not known yet"
    beyond = [*learner.beyond, *(e.source for e in delayed if extends(e, program.domain))]
    late = [v for var in beyond for v in graph.extension(var, None).last if program.ends_apart(v)]
    return "what is read beyond an end needs more of the last timestep than the carry" if late else None


def _delayed(after: Iterable[Equation], program: Program) -> frozenset[Equation]:
    """The equations that need points later than their own."""
    late: set[Var] = set()
    found: set[Equation] = set()
    for e in after:
        ahead = e.is_read and (
            reach_in(e.access, program.domain).future or reach_in(e.access, program.domain).after_end
        )
        if ahead or any(v in late for v in e.inputs if isinstance(v, Var)):
            found.add(e)
            late.update(e.outputs)
    return frozenset(found)


def _delay(delayed: frozenset[Equation], program: Program) -> int:
    """How many later points the delayed equations need: the longest chain of reads."""
    ahead: dict[Var, int] = {}
    longest = 0
    for e in program.equations:
        if e not in delayed:
            continue
        own = max((ahead.get(v, 0) for v in e.inputs if isinstance(v, Var)), default=0)
        if e.is_read:
            step = e.access.hi - 1 if isinstance(e.access, Window) else is_shift(e.access) or 0
            own += max(step, 0)
        ahead.update(dict.fromkeys(e.outputs, own))
        longest = max(longest, own)
    return longest
