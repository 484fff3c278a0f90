"""Gradients through time in blocks: the state before each block is kept, and the gradient flows back block by block.

Backpropagation through T timesteps holds the activations of all of them. Acting, which computes the recurrence anyway, keeps
the state before every block; then the learner takes the blocks from the last to the first, each with the cotangent of the state
that the block after it began with. So one block's activations exist at a time, and nothing is computed more often than at once.
(Checkpointing, as of Griewank and Walther, runs the recurrence forward once more. TimeRL holds all activations.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._target import Target
from rlfx.recurrence.analysis.active import is_float
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.execute.executor import Execution
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.held import first_of, hold
from rlfx.recurrence.execute.host import fetched_times
from rlfx.recurrence.execute.loops import RunningLoop, state_dims
from rlfx.recurrence.execute.outputs import returned
from rlfx.recurrence.execute.values import Value, cut_environments, cut_times
from rlfx.recurrence.gradient.counted import any_of, if_needed, not_zero
from rlfx.recurrence.gradient.forms import Pass, acting_plan
from rlfx.recurrence.gradient.runners import Kept, Resumed, registers
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.language.precision import narrowed, widened
from rlfx.recurrence.language.primitives import inputs_p
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan, Repeated, Runner
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import REGISTER, Loop, Schedule, schedule


def find_acting(learner: Learner) -> Schedule | str:
    """The acting pass of a learner whose recurrences run in blocks: it computes them, too. Or why there are no blocks."""
    program, acting = learner.program, learner.acting
    missing = {v for loop in learner.region.loops for v in loop.depth} - set(_forward(acting))
    if missing:
        whole = acting.graph
        acting = schedule(
            Graph(program, whole.wanted, whole.wanted_last | missing, whole.wanted_beyond, roots=whole.roots)
        )
    kept = _forward(acting)
    for stage in learner.region.stages:
        if isinstance(stage, Loop) and stage.direction != "forward":
            return f"the gradient flows through a recurrence that runs backwards ({stage.body[-1].where})"
        for e in stage.equations:
            if isinstance(stage, Loop) and e in stage.reads:
                v = e.source
                if stage.depth[v] != REGISTER or v not in kept:
                    return f"the gradient flows through reads further back than the previous timestep ({e.where})"
                if not state_dims(program, kept[v], v) <= state_dims(program, stage, v):
                    return f"acting keeps for each environment what the learner has once ({e.where})"
            elif e.op is inputs_p:
                return f"the gradient with respect to data is asked for ({e.where})"
            elif not e.is_simultaneous or e.is_ragged:
                return f"the gradient flows through reads of other timesteps ({e.where})"
            if e.has_effects:
                return f"{e.op.name} has an effect, which happens once ({e.where})"
    return acting


def _forward(acting: Schedule) -> dict[Var, Loop]:
    """The registers of the acting pass' forward loops."""
    return {v: loop for loop in acting.loops if loop.direction == "forward" for v in registers(loop)}


def acting_in_blocks(learner: Learner, plan: Plan, target: Target, batch: int) -> tuple[ExecutablePlan, Kept]:
    """How the acting pass runs, and what will have the states before the blocks."""
    acting, kept = find_acting(learner), Kept(plan.block or 1, learner.program.directives.loops)
    assert isinstance(acting, Schedule)
    return acting_plan(acting, target, batch, kept), kept


def through_time(p: Pass, plan: Plan) -> tuple[tuple, Any, list]:
    """``(what a call returns, loss on this device, gradient)``, learning block by block from the last to the first."""
    assert plan.block is not None
    acting, kept = acting_in_blocks(p.learner, plan, p.target, p.extent.batch)
    acted = p.act(acting)
    stored = {v: acted.env[v] for v in p.learner.stored}
    blocks = _Blocks(
        p, plan.block, stored, p.beyond(acted), p.objective.share(acted), kept.states, kept.last, p.extent, p.counted()
    )
    count = p.extent.batch if plan.environments is None else plan.environments
    if count >= p.extent.batch:
        return returned(acted), *blocks.gradient()

    def add(total, first):
        return jax.tree.map(jnp.add, total, blocks.some(first, count).gradient()), None

    firsts = jnp.arange(p.extent.batch // count, dtype=jnp.int32) * count
    total, _ = jax.lax.scan(add, p.zero, firsts)
    return returned(acted), *total


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The blocks of a learner.

    Attributes:
      size: timesteps in a block; the last one may be shorter.
      stored, beyond: what the acting pass gives.
      share: what one point weighs in the loss.
      states, last: of each register before the whole blocks, and before what is left.
      mask: the timesteps that the loss counts, or None.
    """

    p: Pass
    size: int
    stored: Mapping[Var, Value]
    beyond: Mapping[Var, Value]
    share: Any
    states: Mapping[Var, Value]
    last: Mapping[Var, Value]
    extent: Extent
    mask: Any = None

    def some(self, first: Any, count: int) -> _Blocks:
        """Of consecutive environments."""
        cut = lambda values: {v: cut_environments(x, first, count) for v, x in values.items()}  # noqa: E731
        parts = {name: cut(getattr(self, name)) for name in ("stored", "beyond", "states", "last")}
        extent = Extent(self.extent.times, count, self.extent.first + first, self.extent.mesh_axis)
        return replace(self, p=replace(self.p, env=cut(self.p.env)), extent=extent, **parts)

    def gradient(self) -> tuple:
        """The loss and its gradient, in at least float32."""
        length, size = self.extent.times.shape[0], self.size
        whole, rest = divmod(length, size)
        far = {v: x for v, x in self.stored.items() if v in self.p.on_host}
        fetch = lambda first, count: [fetched_times(x, first, count) for x in far.values()]  # noqa: E731
        firsts = self._firsts(far)
        begin = self._begin(self.p.leaves, firsts)
        state = dict.fromkeys(begin)  # of the registers that the learner has
        total = self.p.zero
        later = [jnp.zeros(begin[v].shape, begin[v].dtype) for v in state if is_float(v)]
        if rest:
            start = {v: self.last[v] for v in state}
            total, later = self._block(
                total, later, start, whole * size, rest, fetch(whole * size, rest), firsts, begin
            )

        def one(carry, i):
            total, later, loaded = carry
            start = {v: Value(self.states[v].data[i], self.states[v].dims - {"t"}) for v in state}
            sooner = fetch(jnp.maximum(i - 1, 0) * size, size) if far else []
            total, later = self._block(total, later, start, i * size, size, loaded, firsts, begin)
            return (total, later, sooner), None

        loaded = fetch((whole - 1) * size, size)
        (total, later, _), _ = jax.lax.scan(
            one, (total, later, loaded), jnp.arange(whole, dtype=jnp.int32), reverse=True
        )
        _, pull = jax.vjp(
            lambda leaves: [x for v, x in self._begin(leaves, firsts).items() if is_float(v)], self.p.leaves
        )
        loss, grads = total
        return loss, [g + widened(x) for g, x in zip(grads, *pull(later), strict=True)]

    def _firsts(self, far: Mapping[Var, Value]) -> Mapping[Var, Value]:
        """What is stored of the first timestep."""
        near = {v: x for v, x in self.stored.items() if v not in far}
        return first_of({**near, **{v: replace(x, data=fetched_times(x, 0, 1)) for v, x in far.items()}})

    def _begin(self, leaves: Sequence, firsts: Mapping[Var, Value]) -> dict[Var, Any]:
        """The registers before the first timestep."""
        once = {
            v: replace(x, data=x.data[None], dims=x.dims | {"t"}) if "t" in self.stored[v].dims else x
            for v, x in firsts.items()
        }
        run = self._execution(leaves, once, self.extent.at(self.extent.times[:1]), None)
        loops = [RunningLoop(run, node) for node in run.plan.nodes if isinstance(node, Repeated)]
        return {v: x for running in loops for v, x in zip(running.loop.depth, running.initial(), strict=True)}

    def _execution(self, leaves: Sequence, stored: Mapping, extent: Extent, runner: Runner | None) -> Execution:
        p = self.p
        own = {**p.env, **stored}
        own |= {v: Value(x, p.env[v].dims) for v, x in zip(p.order, leaves, strict=True)}
        return p.region(own, self.beyond, extent, runner)

    def _block(self, total, later, start, first, count, loaded, firsts, begin) -> tuple:
        """``total`` with the loss and the gradient of a block, and the cotangent of the state before it.

        Args:
          later: the cotangent of the floats of the state after it.
          start: the state before it.
          begin: the registers, in the shapes that the learner has them in.
        """
        needed = any_of(self.mask, first, count)
        if needed is not None:
            needed |= self.extent.over_devices("max", not_zero(later))
        compute = lambda: self._pulled(later, start, first, count, loaded, firsts, begin)  # noqa: E731
        zero = lambda: jax.tree.map(jnp.zeros_like, (total, later))  # noqa: E731
        (value, grads), sooner = if_needed(needed, compute, zero)
        return jax.tree.map(jnp.add, total, (value, grads)), sooner

    def _pulled(self, later, start, first, count, loaded, firsts, begin) -> tuple:
        """As :meth:`_block`: ``((loss, gradient), cotangent)`` of the block itself."""
        p, on_host = self.p, iter(loaded)
        part = {
            v: replace(x, data=next(on_host)) if v in p.on_host else cut_times(x, first, count)
            for v, x in self.stored.items()
        }
        part = hold(p.learner.region.graph, part, self.extent, firsts)
        extent = self.extent.at(jax.lax.dynamic_slice_in_dim(self.extent.times, first, count))
        state = {v: jnp.broadcast_to(x.data, begin[v].shape) for v, x in start.items()}
        moving, fixed = ({v: x for v, x in state.items() if is_float(v) is which} for which in (True, False))

        def loss(leaves, floats):
            runner = Resumed({**dict(zip(moving, floats, strict=True)), **fixed})
            run = self._execution(leaves, part, extent, runner).run()
            return p.objective(run, self.share), [runner.after[v] for v in moving]

        def pulled(leaves, floats, later):
            (value, after), pull = jax.vjp(loss, leaves, floats)
            grads, sooner = pull(
                (jnp.ones((), value.dtype), [narrowed(c, x.dtype) for c, x in zip(later, after, strict=True)])
            )
            return widened(value), list(map(widened, grads)), sooner

        value, grads, sooner = p.learning(pulled)(p.leaves, list(moving.values()), later)
        return (value, grads), sooner
