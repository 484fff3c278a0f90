"""The loss and its gradient in one pass: for all timesteps at once, or in tiles of timesteps and environments.

TimeRL section 5.3 (incrementalization) trades speed for memory; on a CPU tiles that fit the cache are faster, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._target import Target
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.cpu import convolution, dense
from rlfx.recurrence.cpu.contractions import FAST, MATRICES
from rlfx.recurrence.cpu.convolution import CONVOLUTION
from rlfx.recurrence.execute.affine import AffineScan
from rlfx.recurrence.execute.executor import Execution, execute, prepared
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.held import first_of, hold
from rlfx.recurrence.execute.host import fetched, fetched_times
from rlfx.recurrence.execute.loops import WhileGoing
from rlfx.recurrence.execute.outputs import Objective, returned
from rlfx.recurrence.execute.values import Value, cut_environments, cut_times, expand
from rlfx.recurrence.gradient.counted import any_of, conditions, counted, if_needed
from rlfx.recurrence.gradient.deferred import Deferring
from rlfx.recurrence.gradient.following import behind, find_following, reads_of_next
from rlfx.recurrence.ir.interpret import rewritten
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.language.precision import wide, widened
from rlfx.recurrence.memory.timeline import LEARNING
from rlfx.recurrence.schedule.later import Counted
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan, Iteration, Runner, physical
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import Schedule, schedule


def acting_plan(schedule: Schedule, target: Target, batch: int, runner: Runner | None = None) -> ExecutablePlan:
    """How a schedule runs of which no derivative is taken: by ``runner``, or by what a transform has asked for."""
    iteration = _on(target, WhileGoing(target.rewrites.unroll))
    return physical(schedule, target, iteration, runner or schedule.graph.program.directives.loops, batch=batch)


def learning_plan(
    schedule: Schedule,
    target: Target,
    runner: Runner | None = None,
    batch: int = 1,
    steps: int | None = None,
    acting: Schedule | None = None,
    counted: Counted = Counted(),
) -> ExecutablePlan:
    """How a schedule runs that is differentiated; its stages are counted on from those of ``acting``.

    Args:
      counted: where the loss may be other than 0.
    """
    iteration = _on(target, Deferring(target.rewrites.unroll, most_rows=target.rewrites.deferred_rows, near=target.room.tile))
    first = 1 if acting is None else 1 + len(acting.stages)
    return physical(schedule, target, iteration, runner, batch=batch, steps=steps, first=first, counted=counted)


def _on(target: Target, iteration: Iteration) -> Iteration:
    """How iterations run on a machine."""
    return AffineScan(iteration) if target.rewrites.affine else iteration


@dataclass(frozen=True, eq=False)
class Pass:
    """One evaluation of the loss and its gradient.

    Attributes:
      learner: what is differentiated.
      order: the inputs with respect to which it is.
      env: values of all inputs.
      objective: what is differentiated.
      target: the machine.
      on_host: values that the acting pass stores in host memory.
      begins: whether ``t0`` is 0, whatever is traced.
    """

    learner: Learner
    order: Sequence[Var]
    env: Mapping[Var, Value]
    t0: Any
    extent: Extent
    objective: Objective
    target: Target
    on_host: frozenset[Var] = frozenset()
    begins: bool = False

    @property
    def leaves(self) -> list:
        """The perturbed inputs."""
        return [self.env[v].data for v in self.order]

    @property
    def zero(self) -> tuple:
        """A value and a gradient to add to, in at least float32."""
        return jnp.zeros((), self.objective.dtype), [jnp.zeros(x.shape, wide(x.dtype)) for x in self.leaves]

    @property
    def acting(self) -> ExecutablePlan:
        """How acting runs, where a form has no way of its own."""
        return acting_plan(self.learner.acting, self.target, self.extent.batch)

    def act(self, plan: ExecutablePlan | None = None) -> Execution:
        """The acting pass."""
        return execute(plan or self.acting, self.env, self.t0, extent=self.extent, on_host=self.on_host)

    def beyond(self, acted: Execution) -> dict[Var, Value]:
        """What the region needs at t = T."""
        return {v: acted.value_beyond(v) for v in self.learner.beyond}

    def gradient(self, stored: Mapping[Var, Value], beyond: Mapping[Var, Value], part: Extent, share: Any) -> tuple:
        """Loss and gradient of one part of the domain, for which ``stored`` has the values; in at least float32."""

        def loss(leaves: Sequence) -> Any:
            own = {**self.env, **stored}
            own |= {v: Value(x, self.env[v].dims) for v, x in zip(self.order, leaves, strict=True)}
            return self.objective(self.region(own, beyond, part).run(), share)

        rules = MATRICES if self.target.rewrites.matrices else {}
        return jax.tree.map(widened, self.learning(jax.value_and_grad(rewritten(loss, rules)))(self.leaves))

    def region(
        self, env: Mapping[Var, Value], beyond: Mapping[Var, Value], part: Extent, runner: Runner | None = None
    ) -> Execution:
        """The execution of the learner's region on a part of the domain, not run yet."""
        steps, acting = part.times.shape[0], self.learner.acting
        region = self.learner.region_of(steps, part.batch)
        plan = learning_plan(region, self.target, runner, part.batch, steps, acting, counted(self.learner, self.begins))
        return prepared(plan, env, self.t0, beyond, part)

    def counted(self) -> Any:
        """At which timesteps the loss may be other than 0, bool [T]; None if that is any, or nothing would be gained by it."""
        found = conditions(self.learner) if self.target.rewrites.branches and self.objective.cotangents is None else ()
        if not found:
            return None
        graph = Graph(self.learner.program, frozenset(v for v, _ in found))
        run = self.act(acting_plan(schedule(graph), self.target, self.extent.batch))
        return jnp.any(
            jnp.stack([expand(run.env[v], frozenset("t"), run.sizes).data == which for v, which in found]), axis=0
        )

    def learning(self, fn: Callable) -> Callable:
        """A function that takes derivatives of the region, as this platform does them best."""
        pays = self.target.rewrites
        rules = FAST if pays.contractions else {}
        if pays.channels_last and any(e.op is CONVOLUTION for e in self.learner.program.equations):  # kept ones, too
            rules = rules | {CONVOLUTION: (dense if pays.dense else convolution).of_derivative}

        def learn(*args: Any) -> Any:
            with jax.named_scope(LEARNING):
                return rewritten(fn, rules)(*args)

        return learn

    def tile_gradient(
        self, stored: Mapping[Var, Value], beyond: Mapping[Var, Value], times: Any, share: Any, environments: int | None
    ) -> tuple:
        """As :meth:`gradient` for consecutive timesteps, ``environments`` at a time."""
        extent = self.extent
        if environments is None or environments >= extent.batch:
            return self.gradient(stored, beyond, replace(extent, times=times), share)
        given = {**{v: x for v, x in self.env.items() if "b" in x.dims}, **stored}
        whole = extent.batch // environments
        # Numbers of one environment lie side by side: slices of a tile are made of them, and would else take every B-th.
        numbers = {v: x for v, x in given.items() if x.data.ndim == len(x.dims) == 2}
        sides = [jnp.reshape(jnp.swapaxes(x.data, 0, 1), (whole, environments, -1)) for x in numbers.values()]

        def add(total, tile):
            first, own = tile
            part = {v: cut_environments(x, first, environments) for v, x in given.items() if v not in numbers}
            part |= {v: replace(numbers[v], data=jnp.swapaxes(x, 0, 1)) for v, x in zip(numbers, own, strict=True)}
            ends = {v: cut_environments(x, first, environments) for v, x in beyond.items()}
            mine = replace(extent, times=times, batch=environments, first=extent.first + first)
            return jax.tree.map(jnp.add, total, self.gradient(part, ends, mine, share)), None

        total, _ = jax.lax.scan(add, self.zero, (jnp.arange(whole, dtype=jnp.int32) * environments, sides))
        return total


def at_once(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """``(what a call returns, loss on this device, gradient)``, every timestep at once."""
    acted = p.act()
    stored = fetched({v: acted.env[v] for v in p.learner.stored}, p.on_host)
    stored = hold(p.learner.region.graph, stored, p.extent)
    share = p.objective.share(acted)
    return returned(acted), *p.tile_gradient(stored, p.beyond(acted), p.extent.times, share, plan.environments)


def in_blocks(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """As :func:`at_once`, accumulated over blocks of timesteps: the activations of one tile exist at a time.

    What is in host memory is fetched one block ahead.
    """
    acted = p.act()
    stored, beyond, share = {v: acted.env[v] for v in p.learner.stored}, p.beyond(acted), p.objective.share(acted)
    near = {v: x for v, x in stored.items() if v not in p.on_host}
    far = {v: x for v, x in stored.items() if v in p.on_host}

    firsts, mask = {}, p.counted()
    following = find_following(p.learner)
    assert not isinstance(following, str)
    if reads_of_next(p.learner):
        p = replace(p, extent=replace(p.extent, goes_on=True))
    if p.learner.program.domain.until:
        firsts = first_of({**near, **{v: replace(x, data=fetched_times(x, 0, 1)) for v, x in far.items()}})

    def fetch(first, count):
        return [fetched_times(x, first, count) for x in far.values()]

    def computed(first, count, loaded):
        part = {v: cut_times(x, first, count) for v, x in near.items()}
        part |= {v: replace(x, data=y) for (v, x), y in zip(far.items(), loaded, strict=True)}
        part = hold(p.learner.region.graph, part, p.extent, firsts)
        times = jax.lax.dynamic_slice_in_dim(p.extent.times, first, count)
        ends = behind(stored, following, beyond, p.on_host, first + count)
        return p.tile_gradient(part, ends, times, share, plan.environments)

    def block(first, count, loaded):
        return if_needed(any_of(mask, first, count), lambda: computed(first, count, loaded), lambda: p.zero)

    return returned(acted), *accumulate(block, p.extent.times.shape[0], plan.block, p.zero, fetch if far else None)


def accumulate(
    block: Callable[[Any, int, list], Any],
    length: int,
    size: int,
    zero: Any,
    fetch: Callable[[Any, int], list] | None = None,
) -> Any:
    """``sum of block(first, count, fetch(first, count))`` over blocks of ``size`` timesteps; the last may be shorter.

    While a block is computed with, the next one is fetched: nothing in an iteration waits for what it fetches.
    """
    whole, rest = divmod(length, size)

    def load(first, count):
        return [] if fetch is None else fetch(first, count)

    def add(state, first):
        total, loaded = state
        later = load(jnp.minimum(first + size, (whole - 1) * size), size) if loaded else []
        return (jax.tree.map(jnp.add, total, block(first, size, loaded)), later), None

    (total, _), _ = jax.lax.scan(add, (zero, load(0, size)), jnp.arange(whole, dtype=jnp.int32) * size)
    return jax.tree.map(jnp.add, total, block(whole * size, rest, load(whole * size, rest))) if rest else total
