"""Streaming: the learner follows some timesteps behind the actor, inside the rollout, over buffers of a few points.

TimeRL section 5.2 (a consumer that reads at most n steps ahead is fused with a delay of n). Here a chunk of timesteps is
acted, and then a chunk is learned from: products stay large, and memory does not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.execute.executor import Execution, prepared
from rlfx.recurrence.execute.loops import RunningLoop
from rlfx.recurrence.execute.outputs import returned
from rlfx.recurrence.execute.values import Value, cut_times, zeros
from rlfx.recurrence.gradient.forms import Pass, accumulate
from rlfx.recurrence.ir.access import is_shift, reach_in
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.index import Point, Window
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import Repeated
from rlfx.recurrence.schedule.plan import Plan
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
    if program.domain.until:
        return "environments end at different timesteps"
    if len(loops) != 1 or loops[0].direction != "forward":
        return "there is more than one loop over time" if loops else "there is no loop over time"
    (loop,) = loops
    if any(depth for depth in loop.depth.values()):
        return "the actor reads further back than the previous timestep"
    at = stages.index(loop)
    before = [e for s in stages[:at] if isinstance(s, Parallel) for e in s.equations]
    early = {*program.inputs, *(v for e in before for v in e.outputs)}
    if not all(v in early for v in program.aux if isinstance(v, Var)):
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


def streamed(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """``(what a call returns, loss on this device, gradient)``, acting and learning in turns."""
    stream = find_stream(p.learner)
    assert isinstance(stream, Stream)
    assert plan.block is not None
    length, delay, chunk = p.extent.times.shape[0], stream.delay, plan.block
    acting = p.acting
    run = prepared(acting, p.env, p.t0, extent=p.extent)
    run.sequence(stream.before, run.env, run.times, run.read_complete)
    running = RunningLoop(run, next(node for node in acting.nodes if isinstance(node, Repeated)))
    run.join(running.node)
    moving, _ = running.operands
    given = {v: run.now() if v is run.program.now else run.env[v] for v in moving}
    share = p.objective.share(run)

    def act(state, first, count):
        """Act ``count`` timesteps; the new state, and the values to buffer."""
        times = jax.lax.dynamic_slice_in_dim(p.extent.times, first, count)
        state, ys = running.advance(state, times, [cut_times(x, first, count).data for x in given.values()])
        part = part_of(run, first, count)
        part.env |= {v: run.stacked(v, y) for v, y in zip(stream.loop.stacked, ys, strict=True)}
        part.sequence(stream.prompt, part.env, part.times, part.read_complete)
        return state, [part.env[v].data for v in stream.buffered]

    def learn(first, window, count, tails, beyond):
        """The gradient of ``count`` timesteps from ``first`` on; ``window`` has ``delay`` more, or ends at T."""
        part = part_of(run, first, window[0].shape[0] if window else count)
        part.env |= {v: run.stacked(v, x) for v, x in zip(stream.buffered, window, strict=True)}
        part.tails |= beyond
        part.sequence(stream.delayed, part.env, part.times, part.read_complete)

        def tile(begin, size, _):
            stored = {v: cut_times(part.env[v], begin, size) for v in p.learner.stored}
            times = jax.lax.dynamic_slice_in_dim(p.extent.times, first + begin, size)
            return p.tile_gradient(stored, tails, times, share, plan.environments)

        # What is left at the end is longer than a chunk if the delay is.
        return tile(0, count, []) if count <= chunk else accumulate(tile, count, divisor_near(count, chunk), p.zero)

    extended = [e.source for e in stream.delayed if _extends(e, run.program)]
    # In the middle the points beyond a window belong to readers that are not learned from yet: any value will do.
    anything = {v: nothing_at_end(v, run) for v in extended}

    def step(total, first):
        state, buffer, sums = total
        state, fresh = act(state, first + delay, chunk)
        window = [jnp.concatenate([x, y]) for x, y in zip(buffer, fresh, strict=True)]
        sums = jax.tree.map(jnp.add, sums, learn(first, window, chunk, {}, anything))
        return (state, [x[chunk:] for x in window], sums), None

    state, buffer = act(running.initial(), 0, delay) if delay else (running.initial(), None)
    if buffer is None:
        shapes = jax.eval_shape(lambda s: act(s, 0, 1)[1], state)
        buffer = [jnp.zeros((0, *x.shape[1:]), x.dtype) for x in shapes]
    whole, rest = divmod(length - delay, chunk)
    sums = p.zero
    if whole:  # else the first window would reach beyond T
        firsts = jnp.arange(whole, dtype=jnp.int32) * chunk
        (state, buffer, sums), _ = jax.lax.scan(step, (state, buffer, sums), firsts)
    if rest:
        state, fresh = act(state, length - rest, rest)
        buffer = [jnp.concatenate([x, y]) for x, y in zip(buffer, fresh, strict=True)]
    for v in stream.loop.last:
        run.finals[v] = running.last_of(v, state)
    if rest + delay:
        beyond = {v: run.tail(v) for v in extended}
        last = learn(length - rest - delay, buffer, rest + delay, p.tails(run), beyond)
        sums = jax.tree.map(jnp.add, sums, last)
    return returned(run), *sums


def part_of(run: Execution, first: Any, count: int) -> Execution:
    """Consecutive timesteps as an execution of their own: the same program, started later, and shorter.

    Reads a fixed number of timesteps away mean the same there, wherever they stay inside.
    """
    program = replace(run.program, domain=replace(run.domain, length=count))
    extent = run.extent.at(jnp.arange(count, dtype=jnp.int32))
    env = {v: cut_times(x, first, count) for v, x in run.env.items()}
    plan = replace(run.plan, graph=replace(run.graph, program=program), nodes=())
    return prepared(plan, env, run.t0 + first, extent=extent)


def _extends(equation: Equation, program: Program) -> bool:
    """Whether a read beyond the end needs its source at t = T."""
    ahead = equation.is_read and isinstance(equation.access, Point) and equation.end is None
    return ahead and reach_in(equation.access, program.domain).after_end


def nothing_at_end(var: Var, run: Execution) -> Value:
    """Stands for a value at t = T that nobody uses."""
    dims = run.program.dims_of(var) - {"t"}
    return Value(zeros((*(run.sizes[d] for d in dims), *var.shape), var.dtype), dims)
