"""Streaming: a chunk of timesteps is acted, and then a chunk is learned from, some timesteps behind.

Products stay large, and memory does not grow with T. Under ``until=`` the ends that are known when a chunk has been acted
are all that its learner can meet; when all environments have ended, nothing more runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.execute.executor import Execution, prepared
from rlfx.recurrence.execute.held import first_of, hold
from rlfx.recurrence.execute.loops import RunningLoop
from rlfx.recurrence.execute.outputs import returned
from rlfx.recurrence.execute.values import Value, cut_times, expand, zeros
from rlfx.recurrence.gradient.forms import Pass, accumulate
from rlfx.recurrence.gradient.stream import Stream, find_stream
from rlfx.recurrence.ir.behind import extends
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.schedule.physical import Repeated
from rlfx.recurrence.schedule.plan import Plan


def streamed(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """``(what a call returns, loss on this device, gradient)``, acting and learning in turns."""
    stream = find_stream(p.learner)
    assert isinstance(stream, Stream)
    assert plan.block is not None
    acting, delay, chunk = p.acting, stream.delay, plan.block
    run = prepared(acting, p.env, p.t0, extent=p.extent)
    run.sequence(stream.before, run.env, run.times, run.read_complete)
    running = RunningLoop(run, next(node for node in acting.nodes if isinstance(node, Repeated)))
    run.join(running.node)
    turns = _Turns(p, plan, stream, chunk, running)

    length = p.extent.times.shape[0]
    whole, rest = divmod(length - delay, chunk)
    state, buffer = turns.begin()
    sums, firsts = p.zero, {}
    if whole:  # else the first window would reach beyond T
        starts = jnp.arange(whole, dtype=jnp.int32) * chunk
        total = (state, buffer, sums, turns.nothing_at_start(state, buffer))
        (state, buffer, sums, firsts), _ = jax.lax.scan(turns.step, total, starts)
    if rest:
        state, buffer = turns.act(state, buffer, length - rest, rest)
    run.finals.update(turns.ended(state).finals)
    if rest + delay:
        first = length - rest - delay
        given = turns.given(first, buffer, rest + delay, run)
        found = turns.learn(first, given, rest + delay, p.beyond(run), turns.at_start(first, given, firsts))
        sums = jax.tree.map(jnp.add, sums, found)
    if run.domain.until:
        sums = jax.tree.map(lambda x: x * p.objective.share(run).astype(x.dtype), sums)
    return returned(run), *sums


@dataclass(frozen=True, eq=False)
class _Turns:
    """What streaming does in turns.

    Attributes:
      chunk: how many timesteps are acted, and learned from, at a time.
      running: the acting loop.
    """

    p: Pass
    plan: Plan
    stream: Stream
    chunk: int
    running: RunningLoop

    @property
    def run(self) -> Execution:
        """The acting pass, of which what does not depend on the loop is known."""
        return self.running.run

    @property
    def _until(self) -> bool:
        return self.run.domain.until

    @property
    def _share(self) -> Any:
        """What a point weighs. In a mean under ``until=`` that is known at the end, by which the sums are weighed then."""
        return jnp.ones((), self.p.objective.dtype) if self._until else self.p.objective.share(self.run)

    @property
    def _width(self) -> int:
        """Timesteps of which values are buffered when a chunk has been acted."""
        return self.chunk + self.stream.delay

    @cached_property
    def _extended(self) -> list[Var]:
        """Series that are read beyond the end."""
        return [e.source for e in self.stream.delayed if extends(e, self.run.program.domain)]

    # -- acting

    def begin(self) -> tuple[list, list]:
        """The state and the buffers when nothing but the delay has been acted."""
        state, delay = self.running.initial(), self.stream.delay
        shapes = jax.eval_shape(lambda s: self._act(s, 0, 1)[1], state)
        nothing = [jnp.zeros((0, *x.shape[1:]), x.dtype) for x in shapes]
        return self.act(state, nothing, 0, delay) if delay else (state, nothing)

    def act(self, state: list, buffer: list, first: Any, count: int) -> tuple[list, list]:
        """Act ``count`` timesteps: the new state, and the buffers with what was acted behind them."""
        state, fresh = self._act(state, first, count)
        return state, [jnp.concatenate([x, y]) for x, y in zip(buffer, fresh, strict=True)]

    def _act(self, state: list, first: Any, count: int) -> tuple[list, list]:
        run, stream = self.run, self.stream
        moving, _ = self.running.operands
        given = [run.now() if v is run.program.now else run.env[v] for v in moving]
        times = jax.lax.dynamic_slice_in_dim(self.p.extent.times, first, count)
        state, ys = self.running.advance(state, times, [cut_times(x, first, count).data for x in given])
        part = self._part(first, count, self.ended(state))
        part.env |= {v: run.stacked(v, y) for v, y in zip(stream.loop.stacked, ys, strict=True)}
        part.sequence(stream.prompt, part.env, part.times, part.read_complete)
        return state, [part.env[v].data for v in stream.buffered]

    def ended(self, state: list) -> Execution:
        """The acting pass as if it ended with this state: for environments that have ended it does."""
        found = prepared(self.run.plan, self.run.env, self.run.t0, extent=self.run.extent)
        found.finals |= {v: self.running.last_of(v, state) for v in self.stream.loop.last}
        return found

    def _part(self, first: Any, count: int, so_far: Execution) -> Execution:
        """Consecutive timesteps as an execution of their own: the same program, started later, and shorter.

        Reads a fixed number of timesteps away mean the same there, wherever they stay inside. ``so_far`` knows the ends:
        an environment that goes on has as many timesteps as were acted.
        """
        run = self.run
        program = replace(run.program, domain=replace(run.domain, length=count))
        extent = run.extent.at(jnp.arange(count, dtype=jnp.int32))
        env = {v: cut_times(x, first, count) for v, x in run.env.items()}
        plan = replace(run.plan, graph=replace(run.graph, program=program), nodes=())
        n = so_far.length
        ends = {program.ends: replace(n, data=n.data - first)} if program.ends is not None else {}
        return prepared(plan, env, run.t0 + first, beyond=ends, extent=extent)

    # -- learning

    def given(self, first: Any, window: list, count: int, so_far: Execution | None) -> dict[Var, Value]:
        """What the learner is given of timesteps; of those whose future is not acted yet it may be anything.

        ``so_far``: what is known of the end; None: nothing, in the middle.
        """
        part = self._part(first, count, self.run if so_far is None else so_far)
        part.env |= {v: self.run.stacked(v, x) for v, x in zip(self.stream.buffered, window, strict=True)}
        part.beyond |= {v: self._anything(v) if so_far is None else so_far.value_beyond(v) for v in self._extended}
        part.sequence(self.stream.delayed, part.env, part.times, part.read_complete)
        # At the end of all, reads may give boundary values alone, which need not vary with the environment.
        return {v: expand(part.env[v], self.run.program.dims_of(v), part.sizes) for v in self.p.learner.stored}

    def _anything(self, var: Var) -> Value:
        """Stands for a value at t = T that nobody uses."""
        dims = self.run.program.dims_of(var) - {"t"}
        return Value(zeros((*(self.run.sizes[d] for d in dims), *var.shape), var.dtype), dims)

    def at_start(self, first: Any, given: Mapping[Var, Value], known: Mapping[str, Any]) -> dict[str, Any]:
        """Under ``until=``, what the learner is given of the first timestep: of the first window's."""
        if not self._until:
            return {}
        found = {str(i): x.data for i, x in enumerate(first_of(given).values())}
        return {i: jnp.where(first == 0, x, known[i]) for i, x in found.items()} if known else found

    def nothing_at_start(self, state: list, buffer: list) -> dict[str, Any]:
        """Stands for what the first window finds."""

        def found(state, buffer):
            state, window = self.act(state, buffer, 0, self.chunk)
            return self.at_start(0, self.given(0, window, self._width, self.ended(state)), {})

        shapes = jax.eval_shape(found, state, buffer) if self._until else {}
        return {i: zeros(x.shape, x.dtype) for i, x in shapes.items()}

    def learn(
        self, first: Any, given: Mapping[Var, Value], count: int, beyond: Mapping[Var, Value], firsts: Mapping
    ) -> Any:
        """The gradient of ``count`` timesteps from ``first`` on."""
        p, chunk = self.p, self.chunk
        edge = (
            {v: replace(x, data=firsts[str(i)]) for i, (v, x) in enumerate(first_of(given).items())} if firsts else {}
        )

        def tile(begin, size, _):
            stored = {v: cut_times(x, begin, size) for v, x in given.items()}
            stored = hold(p.learner.region.graph, stored, p.extent, edge)
            times = jax.lax.dynamic_slice_in_dim(p.extent.times, first + begin, size)
            return p.tile_gradient(stored, beyond, times, self._share, self.plan.environments)

        # What is left at the end is longer than a chunk if the delay is.
        return tile(0, count, []) if count <= chunk else accumulate(tile, count, divisor_near(count, chunk), p.zero)

    # -- in turns

    def step(self, total: tuple, first: Any) -> tuple[tuple, None]:
        """A chunk is acted, and one is learned from; nothing is done for a window that all environments ended before."""
        going = self.running.going()
        if going is None:
            return self._step(total, first), None
        some = self.run.extent.over_devices("max", jnp.any(self.ended(total[0]).length.data > first))
        return jax.lax.cond(going(total[0]) | some, self._step, lambda total, _: total, total, first), None

    def _step(self, total: tuple, first: Any) -> tuple:
        state, buffer, sums, firsts = total
        state, window = self.act(state, buffer, first + self.stream.delay, self.chunk)
        so_far = self.ended(state) if self._until else None
        given = self.given(first, window, self._width, so_far)
        beyond = {} if so_far is None else self.p.beyond(so_far)
        firsts = self.at_start(first, given, firsts)
        found = self.learn(first, given, self.chunk, beyond, firsts)
        return state, [x[self.chunk :] for x in window], jax.tree.map(jnp.add, sums, found), firsts
