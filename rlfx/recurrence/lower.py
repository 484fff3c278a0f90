"""The executor: runs a schedule as one pure JAX function, loops as ``lax.scan``, everything else under nested ``vmap``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence import reads
from rlfx.recurrence.access import is_shift, reach_in
from rlfx.recurrence.index import TIME, Lookup, Point, Slice
from rlfx.recurrence.primitives import across_p, inputs_p, reduce_p, whole_p
from rlfx.recurrence.program import NO_DIMS, Atom, Equation, Lit, Program, Var
from rlfx.recurrence.ragged import evaluate_ragged, extreme_of
from rlfx.recurrence.schedule import REGISTER, Loop, Parallel, Schedule
from rlfx.recurrence.values import Value, axis_of, expand, map_over, mask_like, of_atom, run_pointwise


@dataclass(frozen=True, eq=False)
class Extent:
    """The part of the domain that one execution covers.

    Attributes:
      times: the timesteps, int32 [T or block].
      batch: the number of environments here.
      first: the index of the first of them.
      mesh_axis: the name of the mesh axis over which the environments are split, or None.
    """

    times: Any
    batch: int
    first: Any = 0
    mesh_axis: str | None = None

    def environments(self) -> Any:
        """The global indices of the environments."""
        return self.first + jnp.arange(self.batch, dtype=jnp.int32)

    def over_devices(self, op: str, x: Any) -> Any:
        """Complete a reduction over the environments of this device with those of the others."""
        if self.mesh_axis is None:
            return x
        collective = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
        if x.dtype == jnp.bool_:
            return collective(x.astype(jnp.int32), self.mesh_axis).astype(jnp.bool_)
        return collective(x, self.mesh_axis)

    def gathered(self, value: Value) -> Value:
        """The value of all environments, on every device."""
        if self.mesh_axis is None or "b" not in value.dims:
            return value
        data = jax.lax.all_gather(value.data, self.mesh_axis, axis=axis_of(value.dims, "b"), tiled=True)
        return Value(data, value.dims)


def whole_extent(program: Program) -> Extent:
    """All timesteps of all environments."""
    return Extent(jnp.asarray(program.domain.times()), program.domain.batch or 1)


class Execution:
    """One run of a schedule: what is known of each variable so far.

    Attributes:
      env: values at all points.
      finals: values at the last iteration of a loop.
    """

    def __init__(
        self, schedule: Schedule, env: Mapping[Var, Value], tails: Mapping[Var, Value], t0: Any, extent: Extent
    ):
        self.schedule, self.program, self.graph = schedule, schedule.graph.program, schedule.graph
        self.domain = self.program.domain
        self.extent = extent
        self.sizes = {"t": extent.times.shape[0], "b": extent.batch}
        self.t0 = t0
        self.env: dict[Var, Value] = dict(env)
        self.finals: dict[Var, Value] = {}
        self.tails = dict(tails)
        self.times = Value(extent.times, frozenset("t"))

    def run(self) -> Execution:
        for number, stage in enumerate(self.schedule.stages):
            kind = stage.direction + " scan" if isinstance(stage, Loop) else "all t"
            with jax.named_scope(f"rlfx.stage/{number} {kind}"):
                if isinstance(stage, Parallel):
                    self._sequence(stage.equations, self.env, self.times, self._read_complete)
                else:
                    self._loop(stage)
        return self

    # -- results

    @property
    def length(self) -> Any:
        """N: the integer T, or under ``until=`` the Value [b] of the episodes' lengths."""
        if not self.domain.until:
            return self.domain.length
        assert isinstance(self.program.ends, Var)
        if self.program.ends in self.tails:
            return self.tails[self.program.ends]
        return self.last(self.program.definitions()[self.program.ends].source)

    def valid(self, env: Mapping[Var, Value]) -> Value:
        """Under ``until=``: at which points the environment has not ended."""
        assert self.program.alive is not None
        return env[self.program.alive]

    def last(self, var: Var) -> Value:
        """The value at the last timestep."""
        if var in self.finals:
            return self.finals[var]
        value = self.env[var]
        if "t" not in value.dims:
            return value
        # Under `until=` the carry, and the count of timesteps, stay what they are after an environment's end.
        ends = self.program.ends
        frozen = var in self.program.next_carry or (ends is not None and self.program.definitions()[ends].source is var)
        n = None if frozen else self.length
        if not isinstance(n, Value):
            return Value(value.data[-1], value.dims - {"t"})
        wide = expand(value, value.dims | n.dims, self.sizes)
        picked = map_over(lambda x, i: x[i], n.dims, [n.dims, n.dims])
        data = jnp.moveaxis(wide.data, 0, 1) if "b" in n.dims else wide.data
        return Value(picked(data, n.data - 1), wide.dims - {"t"})

    def tail(self, var: Atom) -> Value:
        """The value at t = T: demand extension from the final carry."""
        if isinstance(var, Lit) or "t" not in self.program.dims_of(var):
            return of_atom(var, self.env)
        if var in self.tails:
            return self.tails[var]
        extension = self.graph.extension(var, None)
        env = {v: x for v, x in self.env.items() if "t" not in x.dims} | self.tails
        n = self.length
        end = n if isinstance(n, Value) else Value(jnp.int32(n))
        env[self.program.now] = Value(self.t0 + end.data, end.dims)
        for e in self.program.equations:
            if e.is_read and e.access == _PREVIOUS and e.source in extension.last:
                env[e.outputs[0]] = self.last(e.source)
        self._sequence(extension.equations, env, end, self._no_reads)
        return env[var]

    def first(self, atom: Atom) -> Value:
        """The value at t = 0."""
        if isinstance(atom, Lit) or "t" not in self.program.dims_of(atom):
            return of_atom(atom, self.env)
        if atom in self.env and "t" in self.env[atom].dims and atom is not self.program.now:
            return Value(self.env[atom].data[0], self.env[atom].dims - {"t"})
        if atom is self.program.now:
            return Value(jnp.asarray(self.t0))
        equation = self.program.definitions()[atom]
        if equation.is_read:
            assert equation.start is not None
            return self.first(equation.start)
        env = {v: x for v, x in self.env.items() if "t" not in x.dims}
        env |= {v: self.first(v) for v in equation.inputs if isinstance(v, Var)}
        self._sequence((equation,), env, Value(jnp.int32(0)), self._no_reads)
        return env[atom]

    def _no_reads(self, equation: Equation, env, t):
        raise AssertionError(f"a read in a pointwise evaluation: {equation}")

    def end_value(self, equation: Equation) -> Value:
        """What a read beyond the end gives."""
        if equation.end is None:
            return self.tail(equation.source)
        if isinstance(equation.end, Var) and "t" in self.program.dims_of(equation.end):
            return self.last(equation.end)
        return of_atom(equation.end, self.env)

    # -- sequences of equations

    def _sequence(self, equations: Sequence[Equation], env: dict[Var, Value], t: Value, read: Callable) -> None:
        """Evaluate equations in order, consecutive pointwise ones of the same dims together."""

        def key(e: Equation) -> Any:
            if not e.is_pointwise or e.is_ragged:
                return e
            return frozenset().union(*(self._dims(v, env, t) for v in e.inputs))

        for group_key, group in itertools.groupby(_by_dims(equations, key), key=lambda ke: ke[0]):
            members = [e for _, e in group]
            if isinstance(group_key, frozenset):
                run_pointwise(members, env, lambda v: True)
                continue
            (equation,) = members
            with jax.named_scope(equation.scope) if equation.scope else jax.named_scope(equation.op.name):
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
        elif equation.op in _SPECIAL:
            outs = _SPECIAL[equation.op](self, equation, [of_atom(a, env) for a in equation.inputs], env, t)
        else:
            outs = evaluate_ragged(
                equation, [of_atom(a, env) for a in equation.inputs], self.domain, t, self._ragged_length()
            )
        env.update(zip(equation.outputs, outs, strict=True))

    def _ragged_length(self) -> Any:
        try:
            return self.length
        except (
            KeyError
        ):  # inside the loop that finds the lengths only past slices are read, which do not depend on them
            return self.domain.length

    # -- reads of what is complete

    def _read_complete(self, equation: Equation, env: Mapping[Var, Value], t: Value) -> Value:
        access = equation.access
        bare = equation.start is None and equation.end is None
        if isinstance(access, Point) and bare and "t" not in self.program.dims_of(equation.source):
            return env[equation.source]  # it has the same value everywhere, also beyond the end
        found = reach_in(access, self.domain)
        source = self._nothing(equation.source) if found.misses else env[equation.source]
        if isinstance(access, Lookup):
            source = self.extent.gathered(source) if access.across_batch else source
            return reads.lookup(source, equation, [of_atom(a, env) for a in equation.operands], t, self.t0, self.sizes)
        if isinstance(access, Slice):
            return reads.read_slice(source, access, equation.params["size"], self.domain, self.sizes)
        n = self.length if found.future or found.after_end else self.domain.length
        if isinstance(access, Point):
            start = lambda: self.first(equation.start)  # noqa: E731
            end = lambda: self.end_value(equation)  # noqa: E731
            return reads.read_point(source, access.index, self.domain, n, start, end, self.sizes)
        return reads.read_window(source, access, of_atom(equation.operands[0], env), self.domain, n, self.sizes)

    def _nothing(self, var: Var) -> Value:
        """Stands for a series of which no point is read."""
        return Value(_zeros(tuple(var.shape), var.dtype))

    # -- loops

    def _loop(self, loop: Loop) -> None:
        program, sizes = self.program, self.sizes
        defined = {v for e in loop.body for v in e.outputs}
        used = (v for e in loop.body for v in e.point_inputs if isinstance(v, Var))
        operands = [v for v in dict.fromkeys(used) if v not in defined]
        xs = {v: self._now() if v is program.now else self.env[v] for v in operands if self._varies(v)}
        constants = {v: self.env[v] for v in operands if v not in xs}
        slots = {v: self._slot_dims(v, loop) for v in loop.depth}

        def step(state, at_t):
            t, slices = at_t
            here = dict(constants)
            for (v, whole), x in zip(xs.items(), slices, strict=True):
                here[v] = Value(x, whole.dims - {"t"}, whole.starts, whole.clean)
            clock = Value(t)
            rings = dict(zip(loop.depth, state, strict=True))
            pending = list(loop.body)
            writes = {v: self._owner(v) for v in loop.depth if loop.depth[v] != REGISTER}

            def read(equation, env, now):
                if equation not in loop.reads:  # random access to a series that is complete
                    return self._read_complete(equation, {**env, equation.source: self.env[equation.source]}, now)
                return self._read_running(equation, env, Value(rings[equation.source], slots[equation.source]), loop, t)

            for chunk, written in _chunks(pending, writes):
                self._sequence(chunk, here, clock, read)
                for v in written:
                    rings[v] = self._write(rings[v], here[v], slots[v], loop.depth[v], t)
            for v, depth in loop.depth.items():
                if depth == REGISTER:
                    rings[v] = expand(here[v], slots[v], sizes).data
            stacked = [expand(here[v], program.dims_of(v) - {"t"}, sizes).data for v in loop.stacked]
            return list(rings.values()), stacked

        init = [self._initial(v, loop, slots[v]) for v in loop.depth]
        slices = [x.data for x in xs.values()]
        kept, ys = jax.lax.scan(step, init, (self.times.data, slices), reverse=loop.direction == "backward")
        final = dict(zip(loop.depth, kept, strict=True))
        for v, data in zip(loop.stacked, ys, strict=True):
            self.env[v] = Value(data, program.dims_of(v) | {"t"})
        for v in loop.last:
            data, depth = final[v], loop.depth[v]
            if depth != REGISTER:
                data = data[reads.ring_slot(self.domain.length - 1, depth, self.domain.length)]
            self.finals[v] = Value(data, slots[v])

    def _varies(self, var: Var) -> bool:
        return var is self.program.now or "t" in self.env[var].dims

    def _now(self) -> Value:
        return Value(self.t0 + self.times.data, frozenset("t"))

    def _owner(self, var: Var) -> Equation:
        return self.graph.definition[var]

    def _slot_dims(self, var: Var, loop: Loop) -> frozenset:
        """A register also holds the boundary value, which may vary with the environment where the series does not."""
        readers = [e for e in loop.reads if e.source is var] if loop.depth[var] == REGISTER else []
        return frozenset().union(self.program.dims_of(var), *(self.program.dims_of(e.outputs[0]) for e in readers)) - {
            "t"
        }

    def _edge_reads(self, var: Var, loop: Loop) -> Iterable[Equation]:
        return (e for e in loop.reads if e.source is var)

    def _initial(self, var: Var, loop: Loop, dims: frozenset) -> Any:
        """What the loop's storage of a series holds before the first iteration."""
        depth = loop.depth[var]
        shape = tuple(self.sizes["b"] for a in ("b",) if a in dims) + tuple(var.shape)
        if depth == REGISTER:
            for read in self._edge_reads(var, loop):
                edge = self.first(read.start) if loop.direction == "forward" else self.end_value(read)
                return expand(edge, dims, self.sizes).data
            return _zeros(shape, var.dtype)
        return _zeros((depth,) + shape, var.dtype)

    def _write(self, ring: Any, value: Value, dims: frozenset, depth: int, t: Any) -> Any:
        slot = reads.ring_slot(t, depth, self.domain.length)
        return jax.lax.dynamic_update_index_in_dim(ring, expand(value, dims, self.sizes).data, slot, 0)

    def _read_running(self, equation: Equation, env: Mapping[Var, Value], stored: Value, loop: Loop, t: Any) -> Value:
        access, depth = equation.access, loop.depth[equation.source]
        if isinstance(access, Lookup):
            source = Value(stored.data, stored.dims | {"t"})
            source = self.extent.gathered(source) if access.across_batch else source
            operands = [of_atom(a, env) for a in equation.operands]
            return reads.lookup(source, equation, operands, Value(t), self.t0, self.sizes)
        if isinstance(access, Slice):
            return reads.read_ring_slice(stored, depth, access, equation.params["size"], self.domain, t)
        future = loop.direction == "backward"
        n = self.length if future else self.domain.length
        if not isinstance(access, Point):
            fill = of_atom(equation.operands[0], env)
            return reads.read_ring_window(stored, depth, access, fill, self.domain, t, n, self.sizes)
        if depth == REGISTER:
            value, position = stored, t + is_shift(access)
            if not isinstance(n, Value):
                return value  # the register starts with the boundary value
        else:
            value, position = reads.read_ring_point(stored, depth, access.index, self.domain, t)
        if future:
            late = reads.beyond(position, NO_DIMS, n, self.sizes)
            return value if late is None else reads.choose(late, self.end_value(equation), value, self.sizes)
        if equation.start is None:
            return value
        return reads.choose(Value(position < 0), self.first(equation.start), value, self.sizes)


_PREVIOUS = Point(TIME - 1)


def _by_dims(equations: Sequence[Equation], key: Callable) -> Iterable[tuple[Any, Equation]]:
    """Pairs (key, equation), computed as the iteration goes: keys may depend on what was evaluated before."""
    for e in equations:
        yield key(e), e


def _chunks(body: Sequence[Equation], writes: Mapping[Var, Equation]) -> Iterable[tuple[list[Equation], list[Var]]]:
    """The body, cut after each equation whose value goes into a ring."""
    chunk: list[Equation] = []
    for equation in body:
        chunk.append(equation)
        written = [v for v, owner in writes.items() if owner is equation]
        if written:
            yield chunk, written
            chunk = []
    yield chunk, []


def _zeros(shape: tuple, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.zeros((*shape, *jax.random.key_data(jax.random.key(0)).shape), jnp.uint32))
    return jnp.zeros(shape, dtype)


# -- equations across points -----------------------------------------------------------------------------------------


def reduce_value(
    op: str, value: Value, over: Sequence[str], sizes: Mapping[str, int], valid: Value | None, extent: Extent
) -> Value:
    """Reduce over t and b. ``valid``: which points belong to the domain, where it is ragged."""
    finish = extent.over_devices if "b" in over else lambda op, x: x
    dims = value.dims | (frozenset(over) if op == "sum" or valid is not None else NO_DIMS)
    if valid is not None:
        dims |= valid.dims
    wide = expand(value, dims, sizes)
    axes = tuple(a for a in (axis_of(dims, d) for d in over) if a is not None)
    if op == "last":
        return Value(wide.data[-1], dims - {"t"}) if "t" in dims else wide
    if valid is None:
        data = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}[op](wide.data, axis=axes)
        return Value(finish(op, data.astype(wide.data.dtype)), dims - set(over))
    data = wide.data
    mask = mask_like(expand(valid, dims, sizes).data, data)
    if op in ("sum", "mean"):
        total = finish("sum", jnp.sum(jnp.where(mask, data, jnp.zeros_like(data)), axis=axes))
        if op == "mean":
            total = total / finish("sum", jnp.sum(mask, axis=axes).astype(data.dtype))
        return Value(total.astype(data.dtype), dims - set(over))
    fill = jnp.asarray(extreme_of(data.dtype, op == "min"), data.dtype)
    return Value(finish(op, getattr(jnp, op)(jnp.where(mask, data, fill), axis=axes)), dims - set(over))


def _reduce(run: Execution, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    op, over = equation.params["op"], equation.params["over"]
    valid = run.valid(env) if run.domain.until else None
    if op == "last" and valid is not None:
        return [run.last(equation.inputs[0])]
    return [reduce_value(op, values[0], over, run.sizes, valid, run.extent)]


def _whole(run: Execution, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    n, jaxpr = equation.params["num_consts"], equation.params["jaxpr"]
    args = [*values[:n], *(run.extent.gathered(expand(v, v.dims | {"b"}, run.sizes)) for v in values[n:])]
    fn = J.jaxpr_as_fun(jaxpr.jaxpr, jaxpr.consts)
    dims = frozenset().union(*(v.dims for v in args)) - {"b"} if args else NO_DIMS
    outs = map_over(fn, dims, [v.dims for v in args])(*(v.data for v in args))
    return [Value(o, dims) for o in outs]


def _across(run: Execution, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    data, i, b = values
    if "b" not in data.dims:
        data = expand(data, data.dims | {"b"}, run.sizes)
    data = run.extent.gathered(data)
    dims = (data.dims - {"b"}) | i.dims | b.dims
    whole = data.dims - {"b"}
    fn = map_over(lambda x, i, b: x[b, i], dims, [whole, i.dims, b.dims])
    return [Value(fn(data.data, i.data, b.data), dims)]


def _inputs(run: Execution, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    return [Value(values[0].data, frozenset(equation.params["axes"]))]


_SPECIAL: dict[Any, Callable] = {reduce_p: _reduce, whole_p: _whole, across_p: _across, inputs_p: _inputs}


def execute(
    schedule: Schedule,
    env: Mapping[Var, Value],
    t0: Any,
    tails: Mapping[Var, Value] | None = None,
    extent: Extent | None = None,
) -> Execution:
    """Run a schedule.

    Args:
      env: values of the program's inputs and of what is given.
      t0: the absolute time of the first timestep.
      tails: values at t = T of what is given.
      extent: the part of the domain to run; everything by default.
    """
    full = dict(env)
    program: Program = schedule.graph.program
    execution = Execution(schedule, full, tails or {}, t0, extent or whole_extent(program))
    execution.env[program.now] = execution._now()
    return execution.run()
