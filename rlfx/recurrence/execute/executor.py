"""The executor: runs a plan as one pure JAX function, loops as ``lax.scan``, everything else under nested ``vmap``.

It decides nothing: how each stage runs is in the plan (``schedule/physical.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.graph import first_operands, in_order
from rlfx.recurrence.execute import reads
from rlfx.recurrence.execute.collectives import SPECIAL
from rlfx.recurrence.execute.extent import Extent, whole_extent
from rlfx.recurrence.execute.held import first_of, held, seen_after_ends
from rlfx.recurrence.execute.later import run_later
from rlfx.recurrence.execute.loops import RunningLoop
from rlfx.recurrence.execute.pointwise import run_pointwise
from rlfx.recurrence.execute.ragged import evaluate_ragged
from rlfx.recurrence.execute.strided import run_strided
from rlfx.recurrence.execute.tiling import run_blocked
from rlfx.recurrence.execute.values import Value, Values, as_made, expand, map_over, of_atom, zeros
from rlfx.recurrence.execute.window_products import run_window_product
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.program import NO_DIMS, Atom, Equation, Lit, Program, Var
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import TIME, Lookup, Point, Slice
from rlfx.recurrence.language.primitives import inputs_p
from rlfx.recurrence.schedule.later import Later
from rlfx.recurrence.schedule.physical import ExecutablePlan, Repeated, Together
from rlfx.recurrence.schedule.strided import Strided
from rlfx.recurrence.schedule.tiling import Blocked
from rlfx.recurrence.schedule.window_products import WindowProduct


class Execution:
    """One run of a plan: what is known of each variable so far.

    Attributes:
      env: values at all points.
      finals: values at the last iteration of a loop.
      ragged: the starts of what loops stack that is ragged.
    """

    def __init__(
        self,
        plan: ExecutablePlan,
        env: Mapping[Var, Value],
        beyond: Mapping[Var, Value],
        t0: Any,
        extent: Extent,
        on_host: frozenset[Var] = frozenset(),
    ):
        self.plan, self.program, self.graph = plan, plan.graph.program, plan.graph
        self.domain = self.program.domain
        self.extent, self.on_host = extent, on_host
        self.sizes = {"t": extent.times.shape[0], "b": extent.batch}
        self.t0 = t0
        self.env: Values = Values(env)
        self.finals: dict[Var, Value] = {}
        self.ragged: dict[Var, tuple] = {}
        self.beyond = dict(beyond)
        self.times = Value(extent.times, frozenset("t"))

    def run(self) -> Execution:
        for number, node in enumerate(self.plan.nodes, self.plan.first):
            names = self.domain.names
            kind = f"all {names.dim}" if isinstance(node, Together) else node.kind
            kind += "" if names.dim == "t" or isinstance(node, Together) else f" over {names.dim}"
            with jax.named_scope(f"rlfx.stage/{number} {kind}"):
                if isinstance(node, Together):
                    self._together(node)
                else:
                    self._repeated(node)
        return self

    def _together(self, node: Together) -> None:
        for part in node.parts:
            if isinstance(part, Blocked):
                run_blocked(self, part, self._part)
            elif isinstance(part, Strided):
                run_strided(part, self.env, self.t0 + self.times.data)
            elif isinstance(part, WindowProduct):
                run_window_product(part, self.env, self.sizes)
            elif isinstance(part, Later):
                run_later(self, part)
            else:
                self.sequence(part, self.env, self.times, self.read_complete)

    def _part(self, times: Any, domain: Domain, env: Mapping[Var, Value]) -> Execution:
        """An execution of a part of the timesteps that evaluates slices in a domain of its own."""
        ends = self.program.ends
        beyond = self.beyond if ends is None else {**self.beyond, ends: self.length}
        part = Execution(self.plan, env, beyond, self.t0, self.extent.at(times))
        part.domain = domain
        return part

    def _repeated(self, node: Repeated) -> None:
        self.join(node)
        running = RunningLoop(self, node)
        loop, (moving, _) = running.loop, running.operands
        slices = [(self.now() if v is self.program.now else self.env[v]).data for v in moving]
        state, ys = running.advance(running.initial(), self.times.data, slices)
        for v, data in zip(loop.stacked, ys, strict=True):
            # What a scan computes is the same at every timestep if it varies with none, x[0] for one.
            self.env[v] = self.stacked(v, data if "t" in self.program.dims_of(v) else data[0])
        for v in loop.last:
            self.finals[v] = running.last_of(v, state)

    def join(self, node: Repeated) -> None:
        """Put together the weights that a loop uses as one."""
        for joined in node.joined:
            weights = [of_atom(w, self.env).data for w in joined.weights]
            self.env[joined.together] = Value(jnp.concatenate(weights, axis=1))

    def stacked(self, var: Var, data: Any) -> Value:
        """What a loop has stacked, with where it is valid."""
        return Value(data, self.program.dims_of(var), self.ragged.get(var), var not in self.ragged)

    def now(self) -> Value:
        """The absolute times."""
        now = Value(self.t0 + self.times.data, frozenset("t"))
        return self.held(now, self.program.now, Value(jnp.asarray(self.t0)))

    # -- after the ends

    @cached_property
    def unseen(self) -> Callable[[Var], bool] | None:
        """Which values nobody sees after an environment has ended; None where they may be anything, as none is derived."""
        if not self.domain.until or not self.plan.differentiated:
            return None
        seen = seen_after_ends(self.graph)
        return lambda var: var not in seen

    def held(self, value: Value, var: Var, first: Value | None = None) -> Value:
        """A value of all timesteps, or of one in a loop, as the learner computes with it (``held.py``)."""
        if self.unseen is None or self.program.alive not in self.env or not self.unseen(var):
            return value
        return self.held_by(self.valid(self.env), value, first or first_of({var: value})[var])

    def _until_the_end(self, source: Value) -> Value:
        """A series that is sliced. The slices may be kept for the learner: what no timestep sees is not infinite there."""
        if not self.domain.until or "t" not in source.dims or not J.is_inexact(source.data):
            return source
        first = Value(source.data[0], source.dims - {"t"})
        return self.held_by(self.valid(self.env), source, first) if self.program.alive in self.env else source

    def held_by(self, alive: Value, value: Value, first: Value) -> Value:
        """As :meth:`held`, by a mask of one timestep or of all."""
        return held(value, first, alive, self.extent, self.sizes)

    # -- results

    @property
    def length(self) -> Any:
        """N: the integer T, or under ``until=`` the Value [b] of the episodes' lengths."""
        if not self.domain.until:
            return self.domain.length
        assert isinstance(self.program.ends, Var)
        if self.program.ends in self.beyond:
            return self.beyond[self.program.ends]
        return self.last(self.program.definitions()[self.program.ends].source)

    @property
    def behind(self) -> Value:
        """The time of what reads beyond the end get: N, or where a part of the domain goes on, its next timestep."""
        if self.extent.goes_on:
            return Value(self.times.data[-1] + 1)
        return n if isinstance(n := self.length, Value) else Value(jnp.int32(n))

    def valid(self, env: Mapping[Var, Value]) -> Value:
        """Under ``until=``: at which points the environment has not ended."""
        assert self.program.alive is not None
        return env[self.program.alive]

    def final(self, var: Var) -> Value:
        """The value after all timesteps."""
        if var in self.finals:
            return self.finals[var]
        value = self.env[var]
        if "t" not in value.dims:
            return value
        if self.unseen is None or var not in self.program.next_carry:
            return Value(value.data[-1], value.dims - {"t"})
        n = self.length  # after an end the learner has other values
        if "b" in n.dims - value.dims:  # what environments share goes on until the last end
            n = Value(self.extent.over_devices("max", jnp.max(n.data)), n.dims - {"b"})
        return self._before(value, n)

    def last(self, var: Var) -> Value:
        """The value at the last timestep, of each environment's own."""
        if not self.program.ends_apart(var):
            return self.final(var)
        value = self.env[var]
        return self._before(value, self.length) if "t" in value.dims else value

    def _before(self, value: Value, n: Value) -> Value:
        """Of a value of all timesteps, that of timestep n - 1."""
        wide = expand(value, value.dims | n.dims, self.sizes)
        picked = map_over(lambda x, i: x[i], n.dims, [n.dims, n.dims])
        data = jnp.moveaxis(wide.data, 0, 1) if "b" in n.dims else wide.data
        return Value(picked(data, n.data - 1), wide.dims - {"t"})

    def value_beyond(self, var: Atom) -> Value:
        """The value at t = T: demand extension from the final carry."""
        if isinstance(var, Lit) or "t" not in self.program.dims_of(var):
            return of_atom(var, self.env)
        if var in self.beyond:
            return self.beyond[var]
        extension = self.graph.extension(var, None)
        env = {v: x for v, x in self.env.items() if "t" not in x.dims} | self.beyond
        end = self.behind
        env[self.program.now] = Value(self.t0 + end.data, end.dims)
        for e in self.program.equations:
            if e.is_read and e.access == _PREVIOUS and e.source in extension.last:
                env[e.outputs[0]] = self.last(e.source)
        ordered = in_order(extension.equations, lambda e: e.inputs, self.program)
        self.sequence(ordered, env, end, lambda e, env, t: env[e.source])
        return env[var]

    def first(self, atom: Atom) -> Value:
        """The value at t = 0."""
        known = self._known_first(atom)
        if known is not None:
            return known
        env = {v: x for v, x in self.env.items() if "t" not in x.dims}
        needed: set[Equation] = set()
        todo = [atom]
        while todo:
            v = todo.pop()
            known = self._known_first(v)
            if known is None and (equation := self.program.definitions()[v]) not in needed:
                needed.add(equation)
                todo += first_operands(equation)
            elif known is not None and isinstance(v, Var):
                env[v] = known
        read = lambda e, env, t: of_atom(first_operands(e)[0], env)  # noqa: E731
        self.sequence(in_order(needed, first_operands, self.program), env, Value(jnp.int32(0)), read)
        return of_atom(atom, env)

    def _known_first(self, atom: Atom) -> Value | None:
        """The value at t = 0 of what is an input, or was evaluated before; None of anything else."""
        if isinstance(atom, Lit) or ("t" not in self.program.dims_of(atom) and atom in self.env):
            return of_atom(atom, self.env)
        if atom is self.program.now:
            return Value(jnp.asarray(self.t0))
        if atom in self.env and "t" in self.env[atom].dims:
            return Value(self.env[atom].data[0], self.env[atom].dims - {"t"})
        equation = self.program.definitions()[atom]
        if equation.op is inputs_p:
            whole = self.extent.own(
                Value(of_atom(equation.inputs[0], self.env).data, frozenset(equation.params["axes"]))
            )
            return Value(whole.data[0], whole.dims - {"t"})
        return None

    def end_value(self, equation: Equation) -> Value:
        """What a read beyond the end gives."""
        if equation.end is None:
            return self.value_beyond(equation.source)
        end = self._given_end(equation)
        if not self.extent.goes_on:
            return end
        at_the_end = Value(self.behind.data >= self.domain.length)
        return reads.choose(at_the_end, end, self.value_beyond(equation.source), self.sizes)

    def _given_end(self, equation: Equation) -> Value:
        if isinstance(equation.end, Var) and "t" in self.program.dims_of(equation.end):
            return self.last(equation.end)
        return of_atom(equation.end, self.env)

    # -- sequences of equations

    def sequence(self, equations: Sequence[Equation], env: dict[Var, Value], t: Value, read: Callable) -> None:
        """Evaluate equations in order, consecutive pointwise ones of the same dims together."""

        def key(e: Equation) -> Any:
            if not e.is_pointwise or e.is_ragged:
                return e
            return frozenset().union(*(self._dims(v, env, t) for v in e.inputs))

        for group_key, group in itertools.groupby(_by_dims(equations, key), key=lambda ke: ke[0]):
            members = [e for _, e in group]
            if isinstance(group_key, frozenset):
                run_pointwise(members, env, self.plan)
                continue
            (equation,) = members
            with J.made_at(equation.where, equation.scope or f"rlfx.{equation.op.name}"):
                self._special(equation, env, t, read)

    def _dims(self, atom: Atom, env: Mapping[Var, Value], t: Value) -> frozenset:
        if isinstance(atom, Lit):
            return NO_DIMS
        known = env.get(atom)
        dims = known.dims if known is not None else self.program.dims_of(atom)
        return dims if "t" in t.dims else dims - {"t"}

    def _special(self, equation: Equation, env: dict[Var, Value], t: Value, read: Callable) -> None:
        if equation.is_read:
            outs = [read(equation, env, t)]
        elif equation.op in SPECIAL:
            outs = SPECIAL[equation.op](self, equation, [of_atom(a, env) for a in equation.inputs], env, t)
        else:
            n = self.length if equation.needs_length else self.domain.length
            if self.unseen is not None and self.unseen(equation.outputs[0]):
                t = reads.within(t, self.length, self.sizes)
            elif isinstance(n, Value):
                # After an environment's end every slice is that of its last timestep: never empty, so no NaN comes of it.
                t = reads.earlier(t, n, self.sizes)
            operands = [as_made(a, env) for a in equation.inputs]
            outs = evaluate_ragged(equation, operands, self.domain, t, n, self.plan)
        env.update(zip(equation.outputs, outs, strict=True))

    # -- reads of what is complete

    def read_complete(self, equation: Equation, env: Mapping[Var, Value], t: Value) -> Value:
        value = self._read_complete(equation, env, t)
        kept = isinstance(equation.access, Slice) or "t" not in value.dims
        return value if kept else self.held(value, equation.outputs[0])

    def _read_complete(self, equation: Equation, env: Mapping[Var, Value], t: Value) -> Value:
        access = equation.access
        bare = equation.start is None and equation.end is None
        if isinstance(access, Point) and bare and "t" not in self.program.dims_of(equation.source):
            return env[equation.source]  # it has the same value everywhere, also beyond the end
        found = reach_in(access, self.domain)
        source = self.source_of(equation, env)
        if isinstance(access, Lookup):
            source = self.extent.gathered(source) if access.across_batch else source
            return reads.lookup(
                source, equation, [of_atom(a, env) for a in equation.operands], t, self.t0, self.domain, self.sizes
            )
        if isinstance(access, Slice):
            return reads.read_slice(self._until_the_end(source), equation, self.domain, self.sizes)
        n = self.length if found.future or found.after_end else self.domain.length
        if isinstance(access, Point):
            if self.extent.goes_on:  # what is read has the timesteps of this part, and one more
                source = expand(source, source.dims | {"t"}, self.sizes)
            start = lambda: self.first(equation.start)  # noqa: E731
            end = lambda: self.end_value(equation)  # noqa: E731
            return reads.read_point(source, access.index, self.domain, n, start, end, self.sizes)
        return reads.read_window(source, access, of_atom(equation.operands[0], env), self.domain, n, self.sizes)

    def source_of(self, equation: Equation, env: Mapping[Var, Value]) -> Value:
        """What is read; of a series of which no point is, something of its shape."""
        var = equation.source
        misses = reach_in(equation.access, self.domain).misses
        return Value(zeros(tuple(var.shape), var.dtype)) if misses else env[var]


_PREVIOUS = Point(TIME - 1)


def _by_dims(equations: Sequence[Equation], key: Callable) -> Iterable[tuple[Any, Equation]]:
    """Pairs (key, equation), computed as the iteration goes: keys may depend on what was evaluated before."""
    for e in equations:
        yield key(e), e


def execute(
    plan: ExecutablePlan,
    env: Mapping[Var, Value],
    t0: Any,
    beyond: Mapping[Var, Value] | None = None,
    extent: Extent | None = None,
    on_host: frozenset[Var] = frozenset(),
) -> Execution:
    """Run a plan; see :func:`prepared` for the arguments."""
    return prepared(plan, env, t0, beyond, extent, on_host).run()


def prepared(
    plan: ExecutablePlan,
    env: Mapping[Var, Value],
    t0: Any,
    beyond: Mapping[Var, Value] | None = None,
    extent: Extent | None = None,
    on_host: frozenset[Var] = frozenset(),
) -> Execution:
    """An execution of a plan, that is not run yet.

    Args:
      env: values of the program's inputs and of what is given.
      t0: the absolute time of the first timestep.
      beyond: values at t = T of what is given.
      extent: the part of the domain to run; everything by default.
      on_host: values that loops stack in host memory.
    """
    program: Program = plan.graph.program
    execution = Execution(plan, dict(env), beyond or {}, t0, extent or whole_extent(program), on_host)
    execution.env[program.now] = execution.now()
    return execution
