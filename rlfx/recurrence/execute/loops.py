"""Sequential loops over t: what one keeps from iteration to iteration, and how its iterations are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import multiplies
from rlfx.recurrence.analysis.divisors import divisor_about
from rlfx.recurrence.execute import reads
from rlfx.recurrence.execute.ending import while_somebody
from rlfx.recurrence.execute.host import to_host
from rlfx.recurrence.execute.sections import Section, advance_in_sections
from rlfx.recurrence.execute.values import Value, expand, of_atom, zeros
from rlfx.recurrence.ir.access import is_shift, reach_in
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.language.index import Lookup, Point, Slice
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.primitives import reduce_p
from rlfx.recurrence.schedule.physical import Repeated
from rlfx.recurrence.schedule.postponed import Postponed
from rlfx.recurrence.schedule.schedule import REGISTER, Loop
from rlfx.recurrence.schedule.truncated import Truncated

#: Equations, at most, of all iterations that are one of a program's: more take long to compile.
_MOST = 1024


@dataclass(frozen=True)
class Scan:
    """Every iteration, as a ``lax.scan``: differentiable.

    Attributes:
      unroll: about so many iterations of the loop are one of the program's, if they are few operations.
      again: iterations are evaluated again for their derivative, which keeps of each the state before it alone.
    """

    unroll: int = 1
    again: bool = False
    differentiable = True

    def of(self, loop: Loop) -> Self:
        mine = replace(self, again=self.differentiable and is_made_again(loop))
        if self.unroll == 1:
            return mine
        nested = any(e.op in (J.SCAN, J.WHILE) or e.calls for e in loop.body)
        return mine.rolled() if nested or len(loop.body) * self.unroll > _MOST else mine

    def rolled(self) -> Self:
        return replace(self, unroll=1)

    def truncated(self, at: Truncated, holds: Any, agreed: Callable) -> Self:
        return self

    def __str__(self) -> str:
        return "scan" if self.unroll == 1 else f"scan, about {self.unroll} at a time"

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple[Any, Any]:
        step = jax.checkpoint(step, prevent_cse=False) if self.again else step
        return jax.lax.scan(step, init, xs, reverse=backward, unroll=self.together(xs))

    def together(self, xs: Any) -> int:
        """How many iterations over ``xs`` are one. What is left over would be put behind the others, in copies of all stacks."""
        return 1 if self.unroll == 1 else divisor_about(jax.tree.leaves(xs)[0].shape[0], self.unroll)


def is_made_again(loop: Loop) -> bool:
    """Whether a loop makes much of little by itself, without products: it costs less to make that again than to keep it."""
    return loop.spared > 0 and not (multiplies(loop.body) or any(e.is_ragged or e.has_effects for e in loop.body))


@dataclass(frozen=True)
class WhileGoing(Scan):
    """As :class:`Scan`, but the loop ends when every environment has ended. Not differentiable.

    One iteration runs after the last end; what it puts out (valid data, marked as outside of the domain) stands for those
    that are left out.
    """

    differentiable = False

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple[Any, Any]:
        if going is None or backward:
            return super().__call__(step, init, xs, backward, going)
        return while_somebody(step, init, xs, going)


@dataclass(frozen=True, eq=False)
class RunningLoop:
    """A loop of an execution, to be run over any consecutive timesteps from an explicit state.

    Attributes:
      run: the execution that it belongs to.
      node: what it computes, and how.
      section: the iterations that it stands for, where prefixes are read in tiles.

    The state has one array for each series in ``loop.depth``: the value of the previous iteration (a register), or a ring
    of several.
    """

    run: Any
    node: Repeated
    section: Section | None = None

    @property
    def loop(self) -> Loop:
        """What an iteration computes, and what it keeps."""
        return self.node.loop

    @cached_property
    def operands(self) -> tuple[list[Var], list[Var]]:
        """What the body uses from outside: what varies with t, and what does not."""
        defined = {v for e in self.loop.body for v in e.outputs}
        used = [v for e in self.loop.body for v in e.point_inputs if isinstance(v, Var)]
        if self._holds or (self.run.program.alive is not None and any(e.op is reduce_p for e in self.loop.body)):
            used.append(self.run.program.alive)  # of its environments only those count that have not ended
        outside = [v for v in dict.fromkeys(used) if v not in defined]
        varies = [v for v in outside if v is self.run.program.now or "t" in self.run.env[v].dims]
        return varies, [v for v in outside if v not in varies]

    @cached_property
    def _holds(self) -> bool:
        """Whether environments that have ended keep their state, and read that of the first timestep."""
        return self.run.unseen is not None and self.loop.direction == "forward"

    @cached_property
    def state_dims(self) -> dict[Var, frozenset]:
        """With which dims each series is kept."""
        return {v: state_dims(self.run.program, self.loop, v) for v in self.loop.depth}

    def _readers(self, var: Var) -> Iterable[Equation]:
        return (e for e in self.loop.reads if e.source is var)

    # -- running

    def initial(self) -> list:
        """The state before the first iteration."""
        return [self._initial(v) for v in self.loop.depth]

    def _initial(self, var: Var) -> Any:
        depth, dims, sizes = self.loop.depth[var], self.state_dims[var], self.run.sizes
        shape = (*(sizes["b"] for a in ("b",) if a in dims), *var.shape)
        if depth != REGISTER:
            return zeros((depth, *shape), var.dtype)
        for read in self._readers(var):
            forward = self.loop.direction == "forward"
            edge = self.run.first(read.start) if forward else self.run.end_value(read)
            return expand(edge, dims, sizes).data
        return zeros(shape, var.dtype)

    def advance(self, state: Sequence, times: Any, slices: Sequence) -> tuple[list, list]:
        """Run over consecutive timesteps, by whatever runs the loop.

        Args:
          state: before the first of them.
          times: int32 [n].
          slices: for each operand that varies with t, its values at these timesteps.

        Returns:
          The state after them, and the stacked values.
        """
        if self.node.runner is not None:
            return self.node.runner.run(self, state, times, slices)
        if self.node.sections:
            in_place = not self.node.iteration.differentiable and self.going() is None
            return advance_in_sections(self, state, times, slices, in_place)
        iteration, backward = self.node.iteration, self.loop.direction == "backward"
        if any(v in self.run.on_host for v in self.loop.stacked):  # what goes to the host is not put together before
            iteration = iteration.rolled()
        elif self.node.restarted is not None:
            return self._side_by_side(iteration, state, (times, list(slices)))
        if self.node.truncated is not None:
            agreed = partial(self.run.extent.over_devices, "max")
            iteration = iteration.truncated(self.node.truncated, jnp.asarray(self.run.t0) == 0, agreed)
        state, ys = iteration(self.step, self._postponed(state), (times, list(slices)), backward, self.going())
        return self._seen(state), ys

    def _side_by_side(self, iteration: Any, state: Sequence, xs: tuple) -> tuple[list, list]:
        """As :meth:`advance`, of all windows at once: none but the first reads the state that it is given."""
        size = self.node.restarted.timesteps
        count = len(xs[0]) // size
        cut = lambda x: jnp.swapaxes(x.reshape(count, size, *x.shape[1:]), 0, 1)  # noqa: E731
        joined = lambda x: jnp.swapaxes(x, 0, 1).reshape(count * size, *x.shape[2:])  # noqa: E731
        begun = [jnp.broadcast_to(x, (count, *x.shape)) for x in state]
        state, ys = iteration(jax.vmap(self.step), begun, jax.tree.map(cut, xs), False, None)
        return [x[-1] for x in state], jax.tree.map(joined, ys)

    def _postponed(self, state: Sequence) -> list:
        """The state as iterations carry it: of what may begin anew where it is read what it is otherwise, and whether it does."""
        later, never = self.node.postponed, Value(jnp.bool_(False))
        return [
            (x, self._here(never, later[v].condition)) if v in later else x
            for v, x in zip(self.loop.depth, state, strict=True)
        ]

    def _seen(self, state: Sequence) -> list:
        """The state as iterations see it, of what they carry."""
        later = self.node.postponed
        return [_begun(later[v], *x) if v in later else x for v, x in zip(self.loop.depth, state, strict=True)]

    def _here(self, value: Value, var: Var) -> Any:
        """A value with the dims that an iteration has ``var`` with."""
        return expand(value, self.run.program.dims_of(var) - {"t"}, self.run.sizes).data

    def by(self, runner: Any) -> RunningLoop:
        """The same loop, run by something else; None: iteration by iteration."""
        return replace(self, node=replace(self.node, runner=runner))

    def step(self, state: Sequence, at_t: tuple) -> tuple[list, list]:
        """One iteration of all environments."""
        t, slices = at_t
        run, loop = self.run, self.loop
        moving, fixed = self.operands
        here = {v: run.env[v] for v in fixed}
        for v, x in zip(moving, slices, strict=True):
            whole = run.now() if v is run.program.now else run.env[v]
            here[v] = replace(whole, data=x, dims=whole.dims - {"t"})
        rings = dict(zip(loop.depth, self._seen(state), strict=True))
        writes = {v: run.graph.definition[v] for v, depth in loop.depth.items() if depth != REGISTER}

        def read(equation, env, now):
            if equation not in loop.reads:
                return self._read_outside(equation, env, now)
            value = self._read(equation, env, Value(rings[equation.source], self.state_dims[equation.source]), t)
            if not self._holds or equation.start is None or not run.unseen(equation.outputs[0]):
                return value
            return run.held_by(run.valid(env), value, run.first(equation.start))

        for part, written in _up_to_writes(loop.body, writes):
            run.sequence(part, here, Value(t), read)
            for v in written:
                if self.section is not None and v in self.section.complete:
                    rings[v] = self.section.write(v, rings[v], expand(here[v], self.state_dims[v], run.sizes), t)
                    continue
                slot = reads.ring_slot(t, loop.depth[v], run.domain.length)
                data = expand(here[v], self.state_dims[v], run.sizes).data
                rings[v] = jax.lax.dynamic_update_index_in_dim(rings[v], data, slot, 0)
        for v, depth in loop.depth.items():
            if (late := self.node.postponed.get(v)) is not None:
                condition = self._here(here[late.condition], late.condition)
                value = expand(here[late.value], self.state_dims[v], run.sizes).data
                rings[v] = value, condition if late.holds else ~condition
            elif depth == REGISTER:
                new, old = expand(here[v], self.state_dims[v], run.sizes), Value(rings[v], self.state_dims[v])
                kept = self._holds and run.unseen(v)
                rings[v] = (run.held_by(run.valid(here), new, old) if kept else new).data
        run.ragged.update((v, here[v].starts) for v in loop.stacked if here[v].starts is not None)
        stacked = [self._here(here[v], v) for v in loop.stacked]
        stacked = [to_host(x) if v in run.on_host else x for v, x in zip(loop.stacked, stacked, strict=True)]
        return list(rings.values()), stacked

    def going(self) -> Callable | None:
        """Under ``until=``: whether an environment takes the next timestep, from the register that says so."""
        program = self.run.program
        if program.alive is None or any(v in self.run.on_host for v in self.loop.stacked):
            return None  # what is left out would be filled in where no computation is
        goes_on = program.definitions()[program.alive].source
        if self.loop.depth.get(goes_on) != REGISTER:
            return None
        slot = list(self.loop.depth).index(goes_on)
        return lambda state: self.run.extent.over_devices("max", jnp.any(state[slot]))

    def last_of(self, var: Var, state: Sequence) -> Value:
        """The value at the last timestep, from the final state."""
        data, depth = state[list(self.loop.depth).index(var)], self.loop.depth[var]
        length = self.run.domain.length
        return Value(data if depth == REGISTER else data[reads.ring_slot(length - 1, depth, length)], self.state_dims[var])

    # -- reads

    def _read_outside(self, equation: Equation, env: Mapping[Var, Value], t: Value) -> Value:
        """A read, with operands of this iteration, of a series that is complete: random access, or a window's fill."""
        run, access = self.run, equation.access
        if isinstance(access, Lookup):
            return run.read_complete(equation, {**env, equation.source: run.env[equation.source]}, t)
        length, (fill,) = run.domain.length, equation.operands
        found = reach_in(access, run.domain)
        source = run.source_of(equation, run.env)
        source = expand(source, source.dims | {"t"}, run.sizes)
        n = run.length if found.future or found.after_end else length
        complete = Value(source.data, source.dims - {"t"})
        return reads.read_ring_window(complete, length, access, of_atom(fill, env), run.domain, t.data, n, run.sizes)

    def _read(self, equation: Equation, env: Mapping[Var, Value], stored: Value, t: Any) -> Value:
        run, access, depth = self.run, equation.access, self.loop.depth[equation.source]
        if isinstance(access, Lookup):
            source = Value(stored.data, stored.dims | {"t"})
            source = run.extent.gathered(source) if access.across_batch else source
            operands = [of_atom(a, env) for a in equation.operands]
            return reads.lookup(source, equation, operands, Value(t), run.t0, run.domain, run.sizes, depth)
        if self.section is not None and equation.source in self.section.complete:
            return self.section.read(equation, stored)
        if isinstance(access, Slice):
            return reads.read_ring_slice(stored, depth, access, equation.params["size"], run.domain, t)
        future = self.loop.direction == "backward"
        n = run.length if future else run.domain.length
        if not isinstance(access, Point):
            fill = of_atom(equation.operands[0], env)
            return reads.read_ring_window(stored, depth, access, fill, run.domain, t, n, run.sizes)
        if depth == REGISTER:
            value, position = stored, t + is_shift(access)
            if not isinstance(n, Value):
                return value  # the register starts with the boundary value
        else:
            value, position = reads.read_ring_point(stored, depth, access.index, run.domain, t)
        # Either boundary, whichever way the loop runs: x[2 * t] reads the present at t = 0, and the end at t = 1 = T - 1.
        found = reach_in(access, run.domain)
        if found.before_start and equation.start is not None:
            value = reads.choose(Value(position < 0), run.first(equation.start), value, run.sizes)
        late = reads.beyond(position, NO_DIMS, n, run.sizes) if found.after_end else None
        return value if late is None else reads.choose(late, run.end_value(equation), value, run.sizes)


def state_dims(program: Program, loop: Loop, var: Var) -> frozenset:
    """With which dims a loop keeps a series.

    A register also holds the boundary value, which may vary with the environment where the series does not.
    """
    readers = (e for e in loop.reads if e.source is var) if loop.depth[var] == REGISTER else ()
    return frozenset().union(program.dims_of(var), *(program.dims_of(e.outputs[0]) for e in readers)) - {"t"}


def _begun(late: Postponed, value: Any, anew: Any) -> Any:
    """What was carried, as it is where it begins ``anew``."""
    return jnp.where(mask_like(anew, value), jnp.asarray(late.given, value.dtype), value)


def _up_to_writes(body: Sequence[Equation], writes: Mapping[Var, Equation]) -> Iterable[tuple[list[Equation], list[Var]]]:
    """The body, cut after each equation whose value goes into a ring."""
    part: list[Equation] = []
    for equation in body:
        part.append(equation)
        written = [v for v, owner in writes.items() if owner is equation]
        if written:
            yield part, written
            part = []
    yield part, []
