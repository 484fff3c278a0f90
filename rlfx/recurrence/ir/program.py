"""The IR: a program is the set of equations of one timestep of one environment, with symbolic reads between points."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.atoms import Atom as Atom
from rlfx.recurrence.ir.atoms import Lit as Lit
from rlfx.recurrence.ir.atoms import Var as Var
from rlfx.recurrence.ir.atoms import name_of as name_of
from rlfx.recurrence.ir.directives import Directives
from rlfx.recurrence.ir.named import Named
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import Lookup, Point, Window
from rlfx.recurrence.language.names import USUAL, Names
from rlfx.recurrence.language.primitives import across_p, inputs_p, read_p, reduce_p, whole_p

Dims = frozenset
NO_DIMS: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Equation:
    """``outputs = op(inputs)``. For a read, ``inputs[0]`` is the source, at the points that ``access`` relates.

    Attributes:
      where: the user's source line.
      scope: the ``jax.named_scope`` path.
      has_effects: whether it does something beside its outputs (a callback): it runs once, whether used or not.
    """

    op: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    where: str = ""
    scope: str = ""
    has_effects: bool = False

    @property
    def is_read(self) -> bool:
        return self.op is read_p

    @property
    def access(self) -> Any:
        """The access of a read."""
        return self.params["access"]

    @property
    def source(self) -> Var:
        """What a read reads."""
        return self.inputs[0]  # type: ignore[return-value]

    @property
    def operands(self) -> tuple[Atom, ...]:
        """The inputs at the equation's own point: a read's source is not among them."""
        return self.inputs[1:] if self.is_read else self.inputs

    @property
    def point_inputs(self) -> tuple[Atom, ...]:
        """The inputs whose value at the equation's own point is used: a read's boundary values are not among them."""
        return (
            self.operands[bool(self.start is not None) + bool(self.end is not None) :] if self.is_read else self.inputs
        )

    @property
    def start(self) -> Atom | None:
        """The boundary value before the first timestep."""
        return self.inputs[1] if self.is_read and self.params["start"] else None

    @property
    def end(self) -> Atom | None:
        """The boundary value after the last timestep."""
        return self.inputs[1 + bool(self.params["start"])] if self.is_read and self.params["end"] else None

    @property
    def is_pointwise(self) -> bool:
        """Whether the outputs at (t, b) depend on the inputs at (t, b) alone."""
        return not (self.is_read or self.op in (reduce_p, whole_p, across_p, inputs_p))

    @property
    def is_over_time(self) -> bool:
        """Whether it reduces over all timesteps."""
        return self.op is reduce_p and "t" in self.params["over"]

    @property
    def is_simultaneous(self) -> bool:
        """Whether the outputs at t depend on inputs at t alone, of all environments perhaps: it can run inside a loop."""
        return not (self.is_read or self.op is inputs_p or self.is_over_time)

    @property
    def needs_length(self) -> bool:
        """Whether an axis depends on where the environment ends."""
        dims = [d for v in (*self.operands, *self.outputs) for d in v.shape]
        return any(J.mentions_end(d) for d in (*dims, self.params.get("dim")))

    @functools.cached_property
    def is_ragged(self) -> bool:
        """Whether an axis of an input or output has a length that depends on t."""
        return self.op is J.DIM_AS_VALUE or any(J.symbolic_axes(v.shape) for v in (*self.operands, *self.outputs))

    @functools.cached_property
    def calls(self) -> tuple[Any, ...]:
        """The calls of other programs in it: what has a ``program``, and says which part of it is computed."""
        return tuple(dict.fromkeys(_calls(self.params)))

    def __str__(self) -> str:
        return self.written(USUAL)

    def written(self, names: Names) -> str:
        """As text, in the names of a program's dimensions."""
        left = " ".join(f"{name_of(v)}:{_type(v)}" for v in self.outputs)
        if self.is_read:
            right = f"{self.source!r}[{names.text(str(self.access))}]"
            extras = [f"{n}={a!r}" for n, a in (("start", self.start), ("end", self.end)) if a is not None]
            right += f" ({', '.join(extras)})" if extras else ""
        elif "of" in self.params and self.calls:
            right = f"call[{self.params['of']}] {' '.join(map(repr, self.inputs))}"
        else:
            shown = {k: v for k, v in self.params.items() if k in ("op", "over", "axes")}
            if "over" in shown:
                shown["over"] = names.of(shown["over"])
            if isinstance(shown.get("axes"), str):
                shown["axes"] = names.joined(shown["axes"])
            inside = (
                "["
                + " ".join(f"{k}={v if isinstance(v, str) else '+'.join(map(str, v))}" for k, v in shown.items())
                + "]"
            )
            right = f"{self.op.name}{inside if shown else ''} {' '.join(map(repr, self.inputs))}".rstrip()
        return f"{left} = {right}"


@dataclass(frozen=True, eq=False)
class Program:
    """A traced per-timestep program: equations over the domain, frozen and printable.

    Attributes:
      name: the user's function.
      domain: the timesteps and environments.
      equations: in program order; only reads may refer to later ones.
      params, consts: inputs shared by all points (``consts`` are arrays that the function closes over).
      carry: inputs with the initial carry.
      key, now, b: the random key (or None), the absolute time, the environment's index.
      loss, next_carry, aux: outputs. ``loss`` is None for an unrolled program.
      ends, alive: under ``until=``, the number of timesteps so far, and whether the environment takes this one.
      dims: which of t, b each value varies with.
      aux_dims: which of t, b each leaf of aux has, as it was written: also where a rewrite finds that it varies less.
      shared: for each leaf of the carry, whether all environments share it.
      directives: what transforms asked of the schedule.
      where: the user's function, with its source line.
    """

    name: str
    domain: Domain
    equations: tuple[Equation, ...]
    params: tuple[Var, ...]
    consts: tuple[Var, ...]
    carry: tuple[Var, ...]
    key: Var | None
    now: Var
    b: Var
    loss: Atom | None
    next_carry: tuple[Atom, ...]
    aux: tuple[Atom, ...]
    dims: Mapping[Var, frozenset[str]]
    shared: tuple[bool, ...]
    aux_dims: tuple[frozenset[str], ...]
    ends: Var | None = None
    alive: Var | None = None
    reduce: str = "mean"
    const_values: tuple[Any, ...] = ()
    trees: Mapping[str, Any] = field(default_factory=dict)
    directives: Directives = field(default_factory=Directives)
    where: str = ""

    @property
    def inputs(self) -> tuple[Var, ...]:
        """Every input, in the order in which a gradient rule takes them."""
        key = () if self.key is None else (self.key,)
        return (*self.params, *self.consts, *self.carry, *key, self.now, self.b)

    @property
    def returned(self) -> tuple[Atom | None, ...]:
        """What is read of it from outside: its results, and when environments end."""
        return (self.loss, self.ends, self.alive, *self.next_carry, *self.aux)

    def dims_of(self, atom: Atom) -> frozenset[str]:
        """Which of t and b a value varies with."""
        return self.dims.get(atom, NO_DIMS) if isinstance(atom, Var) else NO_DIMS

    def ends_apart(self, var: Var) -> bool:
        """Whether a series goes on after an environment's end, so that its last value is another one for each."""
        frozen = var in self.next_carry and not self.shared[self.next_carry.index(var)]
        counts = self.ends is not None and self._definitions[self.ends].source is var
        return self.domain.until and not (frozen or counts)

    def definitions(self) -> dict[Var, Equation]:
        """The equation that defines each value."""
        return self._definitions

    @functools.cached_property
    def _definitions(self) -> dict[Var, Equation]:
        return {v: e for e in self.equations for v in e.outputs}

    @functools.cached_property
    def users(self) -> dict[Var, list[Equation]]:
        """The equations that have each value among their inputs."""
        return users_of(self.equations)

    @functools.cached_property
    def places(self) -> dict[Equation, int]:
        """Where each equation stands."""
        return {e: i for i, e in enumerate(self.equations)}

    def reads(self) -> Iterator[Equation]:
        """The equations that reach other timesteps."""
        return (e for e in self.equations if e.is_read)

    @property
    def size(self) -> str:
        """The lengths of its dimensions: ``T=8 B=3``."""
        (length, batch), domain = self.domain.names.size, self.domain
        return f"{length}={domain.length}" + (f" {batch}={domain.batch}" if domain.batch else "")

    def __str__(self) -> str:
        return self.written()

    def written(self, seen: set[Any] | None = None) -> str:
        """As text, with the user's names where they are known: and the programs that it calls, each below its first call."""
        named = Named(self)
        names, seen = self.domain.names, set() if seen is None else seen
        lines = [f"{self.name}   {self.size}"]
        groups = [("params", self.params), ("consts", self.consts), ("carry", self.carry)]
        for label, group in groups:
            if group:
                paths = [named(v).removeprefix(label) if label != "consts" else "" for v in group]
                shown = [f"{path}={v!r}" if path else repr(v) for path, v in zip(paths, group, strict=True)]
                lines.append(f"  {label:7}" + " ".join(f"{s}:{_type(v)}" for s, v in zip(shown, group, strict=True)))
        given = (("key", self.key), (names.dim, self.now), (names.axis, self.b))
        lines.append("  given  " + " ".join(f"{label}={v!r}" for label, v in given if v))
        for equation in self.equations:
            dims = names.joined(d for d in "tb" if any(d in self.dims_of(v) for v in equation.outputs)) or "-"
            own = [name for v in equation.outputs if (name := named.written(v))]
            lines.append(f"  {dims:3}{equation.written(names)}" + (f"  # {', '.join(own)}" if own else ""))
            for program in dict.fromkeys(call.program for call in equation.calls):
                if program not in seen:
                    seen.add(program)
                    lines += [f"       | {line}" for line in program.written(seen=seen).splitlines()]
        if self.loss is not None:
            lines.append(f"  loss   {self.reduce} {self.loss!r}")
        lines.append("  next   " + " ".join(map(repr, self.next_carry)))
        if self.aux:
            lines.append("  aux    " + " ".join(map(repr, self.aux)))
        if asked := str(self.directives):
            lines.append(f"  asked  {asked}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.equations)} equations, {sum(1 for _ in self.reads())} reads>"


def _calls(params: Mapping) -> Iterator[Any]:
    """The calls of programs among an equation's parameters, and in its bodies."""
    of = params.get("of")
    if isinstance(getattr(of, "program", None), Program):
        yield of
        return
    for body, _ in J.sub_jaxprs(dict(params)):
        for equation in body.eqns:
            yield from _calls(equation.params)


def _type(var: Var) -> str:
    kind = J.short_dtype(var.dtype)
    return f"{kind}[{','.join(str(d).replace(' ', '') for d in var.shape)}]"


# -- which dimensions a value varies with ----------------------------------------------------------------------------


def infer_dims(
    equations: Sequence[Equation], given: Mapping[Var, frozenset], alive: Var | None = None
) -> dict[Var, frozenset]:
    """The least fixed point of ``dims(output) = union of dims(inputs)`` over operands, reads and recurrences.

    ``alive``: under ``until=``, on which every reduction depends: only points before an environment's end count.
    """
    dims = dict.fromkeys((v for e in equations for v in e.outputs), NO_DIMS) | dict(given)

    def of(atom: Atom) -> frozenset:
        return dims.get(atom, NO_DIMS) if isinstance(atom, Var) else NO_DIMS

    users = users_of(equations)
    todo, waiting = deque(equations), set(equations)
    while todo:
        equation = todo.popleft()
        waiting.discard(equation)
        found = _dims_rule(equation, of, NO_DIMS if alive is None else of(alive))
        for out in equation.outputs:
            if not found <= dims[out]:
                dims[out] |= found
                again = [e for e in (equations if out is alive else users.get(out, ())) if e not in waiting]
                todo.extend(again)
                waiting.update(again)
    return dims


def with_equations(program: Program, equations: Iterable[Equation]) -> Program:
    """The program with other equations, and the dims of what these give."""
    found, given = tuple(equations), {v: program.dims_of(v) for v in program.inputs}
    return replace(program, equations=found, dims=infer_dims(found, given, program.alive))


def users_of(equations: Iterable[Equation]) -> dict[Var, list[Equation]]:
    """The equations that have a value among their inputs."""
    users: dict[Var, list[Equation]] = {}
    for e in equations:
        for v in dict.fromkeys(v for v in e.inputs if isinstance(v, Var)):
            users.setdefault(v, []).append(e)
    return users


def _dims_rule(equation: Equation, of, alive: frozenset) -> frozenset:
    union = frozenset().union(*(of(a) for a in equation.inputs)) if equation.inputs else NO_DIMS
    if equation.is_ragged and not equation.is_read:
        union |= alive | {"t"}
    if equation.op is reduce_p:
        return (union | alive) - set(equation.params["over"])
    if equation.op is whole_p:
        return union - {"b"}
    if equation.op is across_p:
        return (of(equation.inputs[0]) - {"b"}) | of(equation.inputs[1]) | of(equation.inputs[2])
    if equation.op is inputs_p:
        return union | set(equation.params["axes"])
    if equation.is_read:
        dims = _read_dims(equation, of)
        return dims | alive if _meets_the_end(equation, of(equation.source)) else dims
    return union


def _read_dims(equation: Equation, of) -> frozenset:
    source, access = of(equation.source), equation.access
    if isinstance(access, Lookup):
        index = frozenset().union(*(of(a) for a in equation.inputs[1:]))
        return ((source - {"b"}) if access.across_batch else source) - {"t"} | index | {"t"}
    edges = frozenset().union(*(of(a) for a in equation.inputs[1:])) if len(equation.inputs) > 1 else NO_DIMS
    if isinstance(access, Point):
        moves = access.index.depends_on_time and (source & {"t"} or edges_matter(equation))
        return (source - {"t"}) | (edges - {"t"}) | ({"t"} if moves else NO_DIMS)
    return (source - {"t"}) | (edges - {"t"}) | ({"t"} if _moves(equation) else NO_DIMS)


def _meets_the_end(equation: Equation, source: frozenset) -> bool:
    """Whether what is read depends on where the environment ends: beyond it, there is another value."""
    access = equation.access
    if isinstance(access, Window):
        return access.hi > 1
    ahead = isinstance(access, Point) and (access.index.offset is None or access.index.offset > 0)
    return ahead and ("t" in source or bool(equation.params["end"]))


def edges_matter(equation: Equation) -> bool:
    """Whether a boundary value may be read: the result then varies with t even if the source does not."""
    return bool(equation.params["start"] or equation.params["end"])


def _moves(equation: Equation) -> bool:
    access = equation.access
    if not hasattr(access, "first"):
        return True  # a window is filled at the ends
    return access.first.depends_on_time or access.stop.depends_on_time
