"""A function as a graph of stages: few nodes, each of which is one compiled program with weights of its own.

A stage is a named scope, a module of flax or equinox, a jitted function, a stage of an rlfx program, or what merging neighbours
makes of a function that names nothing (:mod:`rlfx.place.cluster`). Nothing is cut: equations are evaluated as they were traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import CALLABLE, NATURAL, POSITIVE, TEXT, each, expect, integer, optional
from rlfx.errors import PlacementError, located
from rlfx.place import jaxpr as jp
from rlfx.place.cluster import clustered
from rlfx.place.explode import ARGUMENTS, argument_names, without_effects
from rlfx.place.graph import DataflowGraph, Node, Step
from rlfx.place.hardware import Hardware
from rlfx.place.problem import Problem, build
from rlfx.recurrence.analysis.cost import flops_of_jaxpr_equation

LAUNCH = 50e-6  # seconds that a stage takes beside its work, about: what merging saves
PARTS = 4  # stages are merged up to this part of a device's share: more would leave nothing to balance
RATES = 2e10, 1e10  # FLOP/s and bytes/s, to compare equations; stages are measured later
_NAMES = each(TEXT, "names of scopes, modules or jitted functions", '("actor", "critic")')
_ARGNUMS = each(integer(0), "numbers of arguments", "(0, 1)")

#: What is moved and not computed: each stage that reads it does it again.
FREE = frozenset({
    jp.broadcast_in_dim_p, jp.transpose_p, jp.reshape_p, jp.squeeze_p, jp.slice_p, jp.iota_p, *jp.CASTS,
})  # fmt: skip


@dataclass(frozen=True)
class StagedGraph(DataflowGraph):
    """A function as stages.

    Attributes:
      carried: pairs (argument, result), flat: the result is the argument of the next call.
      constant: flat arguments that are the same in every call; constants of the function come after the arguments.
      donated: flat arguments whose memory may be used again.
    """

    carried: tuple[tuple[int, int], ...] = ()
    constant: frozenset[int] = frozenset()
    donated: frozenset[int] = frozenset()


def _core(component: str) -> str:
    """``critic`` of ``transpose(jvp(critic))``."""
    return component.rsplit("(", 1)[-1].rstrip(")")


def _label(path: Sequence[str], names: frozenset[str]) -> tuple[str, bool] | None:
    """The innermost of some names on a path, and whether it is the backward pass of it."""
    for component in reversed(path):
        if _core(component) in names:
            return _core(component), any("transpose(" in part for part in path)
    return None


def _seconds(eqn: Any) -> float:
    flops, rate = RATES
    moved = sum(_nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return max(flops_of_jaxpr_equation(eqn) / flops, moved / rate) + 1e-6


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def staged(
    fn: Callable[..., Any],
    *args: Any,
    names: Sequence[str] = (),
    carry: int = 0,
    constant_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    devices: int = 2,
    at_most: int = 200,
    name: str | None = None,
) -> StagedGraph:
    """Trace a function and group its equations into stages.

    Args:
      fn: a pure JAX function of pytrees of arrays.
      *args: example arguments, or ``jax.ShapeDtypeStruct``.
      names: scopes, modules or jitted functions that are stages whatever that costs; their backward passes are stages, too.
        The rest, or everything if there are none, is merged where that costs no parallelism.
      carry: so many of the first arguments come back as the first results, as in ``lax.scan``: the next call is given what
        this one returns.
      constant_argnums: arguments that stay the same from call to call.
      donate_argnums: arguments that are not used after the call, as in ``jax.jit``.
      devices: how many there will be: stages are small enough to balance them.
      at_most: stages, of those that have no name.
      name: the graph's name, by default the function's.

    Returns:
      The graph. ``graph.evaluate(*args)`` equals ``fn(*args)``: every equation once, but for broadcasts, reshapes and casts of
      arguments, which every stage that reads them does for itself.

    Raises:
      PlacementError: the function has effects, a name is nowhere in it, or what is carried comes back as something else.

    Example:
      >>> def update(w, x):
      ...     with jax.named_scope("first"):
      ...         y = jnp.tanh(x @ w)
      ...     with jax.named_scope("second"):
      ...         return y @ w
      >>> graph = staged(update, jnp.ones((4, 4)), jnp.ones((8, 4)), names=("first", "second"))
      >>> [node.name for node in graph.nodes if node.role != "input"]
      ['first[0]', 'second[1]']
    """
    expect("fn", fn, CALLABLE, PlacementError, of="staged")
    names = tuple(expect("names", names, _NAMES, PlacementError, of="staged"))
    carry = expect("carry", carry, NATURAL, PlacementError, of="staged")
    devices = expect("devices", devices, POSITIVE, PlacementError, of="staged")
    name = expect("name", name, optional(TEXT), PlacementError, of="staged")
    at_most = expect("at_most", at_most, POSITIVE, PlacementError, of="staged")
    expect("args", args, ARGUMENTS, PlacementError, of="staged")
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    label = name or getattr(fn, "__name__", "fn")
    without_effects(closed, label)
    jaxpr, consts = jp.flatten(J.without_dead_code(closed), calls=True)
    spans = np.cumsum([0, *(len(jax.tree.leaves(arg)) for arg in args)])
    flat = _Flat(jaxpr, frozenset(names), label)
    share = sum(flat.seconds) / devices
    groups = clustered(
        flat.edges, flat.seconds, flat.labels, launch=LAUNCH, largest=share / PARTS, path=share / 2, at_most=at_most
    )
    of_arguments = [
        frozenset(i for a in _argnums(label, given, args, what) for i in range(spans[a], spans[a + 1]))
        for what, given in (("constant_argnums", constant_argnums), ("donate_argnums", donate_argnums))
    ]
    return flat.graph(groups, argument_names(fn, args), consts, jax.tree.structure(args), jax.tree.structure(out_shape))(
        carried=_carried(label, args, out_shape, carry),
        constant=of_arguments[0] | frozenset(range(spans[-1], spans[-1] + len(consts))),
        donated=of_arguments[1],
    )


def _argnums(label: str, given: Any, args: Sequence[Any], what: str) -> tuple[int, ...]:
    chosen = tuple(expect(what, given, _ARGNUMS, PlacementError, of="staged"))
    if over := [a for a in chosen if a >= len(args)]:
        fact = f"{what} has argument {over[0]}, and {label} is given {len(args)}."
        raise PlacementError(located(fact, fix=f"Arguments are 0, ..., {len(args) - 1}."))
    return chosen


def _carried(label: str, args: Sequence[Any], out: Any, carry: int) -> tuple[tuple[int, int], ...]:
    """Pairs (argument, result), flat, of the first ``carry`` arguments."""

    def kind(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    if carry == 1 and len(args) and kind(args[0]) == kind(out):
        out = (out,)
    count = len(jax.tree.leaves(args[:carry]))
    if carry > len(args) or (carry and (not isinstance(out, tuple) or kind(args[:carry]) != kind(out[:carry]))):
        fact = f"carry={carry}: the first {carry} results of {label} are not like its first {carry} arguments."
        fix = "Return what is carried first, as one tuple with the other results: (state, metrics)."
        raise PlacementError(located(fact, fix=fix))
    return tuple((i, i) for i in range(count))


class _Flat:
    """A flat jaxpr as tasks: equations that compute, what they read of each other, and their labels."""

    def __init__(self, jaxpr: Any, names: frozenset[str], label: str) -> None:
        self.jaxpr, self.label = jaxpr, label
        self.inputs = [*jaxpr.invars, *jaxpr.constvars]
        results = set(J.variables(jaxpr.outvars))
        self.free: dict[Any, Any] = {}  # the equation that makes a variable, of those that only move what is given
        given = set(self.inputs)
        self.tasks: list[Any] = []
        self.maker: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            reads = J.variables(eqn.invars)
            moved = eqn.primitive in FREE and all(v in given or v in self.free for v in reads)
            if moved and not results & set(eqn.outvars):
                self.free.update(dict.fromkeys(eqn.outvars, eqn))
            else:
                self.maker.update(dict.fromkeys(eqn.outvars, len(self.tasks)))
                self.tasks.append(eqn)
        self.edges = sorted({
            (self.maker[v], i) for i, eqn in enumerate(self.tasks) for v in self.reads(eqn) if v in self.maker
        })  # fmt: skip
        self.seconds = [_seconds(eqn) for eqn in self.tasks]
        self.paths = [jp.scopes(eqn) for eqn in self.tasks]
        self.labels = [_label(path, names) for path in self.paths]
        if missing := names - {found[0] for found in self.labels if found}:
            known = sorted({_core(part) for path in self.paths for part in path} - {""})
            fact = f"{sorted(missing)[0]!r} names no scope, module or jitted function of {label}."
            raise PlacementError(located(fact, fix=f"Use some of: {', '.join(known)}." if known else "Name scopes."))

    @staticmethod
    def reads(eqn: Any) -> list[Any]:
        """The variables that an equation reads."""
        return J.variables(eqn.invars)

    def program(self, group: Sequence[int]) -> list[Any]:
        """The equations of a group, in order, with those that are done again for it."""
        out: dict[int, Any] = {}

        def add(eqn: Any) -> None:
            if id(eqn) not in out:
                for v in self.reads(eqn):
                    if v in self.free:
                        add(self.free[v])
                out[id(eqn)] = eqn

        for i in group:
            add(self.tasks[i])
        return list(out.values())

    def graph(self, groups: Sequence[Sequence[int]], names: Sequence[str], consts: Sequence[Any], in_tree: Any,
              out_tree: Any) -> Callable[..., StagedGraph]:  # fmt: skip
        """The graph of some groups of tasks, but for what is said of its arguments."""
        number = {v: i for i, v in enumerate(self.inputs)}
        programs = [self.program(group) for group in groups]
        wanted = set(J.variables(self.jaxpr.outvars))
        ins: list[list[Any]] = []
        for eqns in programs:
            made = {v for eqn in eqns for v in eqn.outvars}
            ins.append(list(dict.fromkeys(v for eqn in eqns for v in self.reads(eqn) if v not in made)))
        wanted |= {v for reads in ins for v in reads}
        nodes = [
            Node(f"{label}[{i}]", "input", i, "input", (Step((i,), (), _nothing),), (i,), (), 0.0, 0.0, _nbytes(v.aval), label)
            for i, (v, label) in enumerate(zip(self.inputs, _labels(names, consts), strict=True))
        ]
        for at, (group, eqns, reads) in enumerate(zip(groups, programs, ins, strict=True)):
            yields = [v for i in group for v in self.tasks[i].outvars if v in wanted]
            for v in yields:
                number[v] = len(number)
            heavy = max(group, key=lambda i: self.seconds[i])
            nodes.append(self._node(f"{self._name(heavy)}[{at}]", len(nodes), heavy, eqns, reads, yields, number))
        blocks = [None] * len(number)
        for v, i in number.items():
            blocks[i] = jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)  # type: ignore[call-overload]
        constants = list(consts)

        def load(flat: Sequence[jax.Array]) -> dict[int, jax.Array]:
            return dict(enumerate([*flat, *constants]))

        collect = tuple(_literal(v.val) if J.is_literal(v) else _block(number[v]) for v in self.jaxpr.outvars)
        avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.jaxpr.invars)

        def make(**given: Any) -> StagedGraph:
            metas = tuple(node.name for node in nodes)
            return StagedGraph(
                tuple(nodes), metas, tuple(blocks), load, collect, in_tree, out_tree, avals, self.label, **given
            )

        return make

    def _name(self, i: int) -> str:
        return "/".join(self.paths[i][:2]) or str(self.tasks[i].primitive)

    def _node(self, name: str, meta: int, heavy: int, eqns: list[Any], reads: list[Any], yields: list[Any],
              number: Mapping[Any, int]) -> Node:  # fmt: skip
        read, defined = tuple(number[v] for v in reads), tuple(number[v] for v in yields)

        def run(env: Mapping[int, jax.Array]) -> tuple[jax.Array, ...]:
            values: dict[Any, Any] = {v: env[b] for v, b in zip(reads, read, strict=True)}
            for eqn in eqns:
                operands = [v.val if J.is_literal(v) else values[v] for v in eqn.invars]
                values.update(zip(eqn.outvars, jp.evaluate(eqn, *operands), strict=True))
            return tuple(values[v] for v in yields)

        size = sum(_nbytes(v.aval) for v in yields)
        return Node(
            name, "stage", meta, "shard", (Step(defined, read, run),), defined, read,
            float(sum(flops_of_jaxpr_equation(eqn) for eqn in eqns)), float(sum(_nbytes(v.aval) for v in reads) + size),
            size, jp.source(self.tasks[heavy]),
        )  # fmt: skip


def _nothing(env: Any) -> tuple:
    return ()


def _labels(names: Sequence[str], consts: Sequence[Any]) -> list[str]:
    return [*names, *(f"const{i}" for i in range(len(consts)))]


def _block(b: int) -> tuple[tuple[int, ...], Callable[[Mapping[int, jax.Array]], jax.Array]]:
    return (b,), lambda env: env[b]


def _literal(value: Any) -> tuple[tuple[int, ...], Callable[[Mapping[int, jax.Array]], jax.Array]]:
    return (), lambda env: jnp.asarray(value)


def staged_problem(graph: StagedGraph, hardware: Hardware) -> Problem:
    """The placement problem of stages, with what a call moves before it begins.

    An argument that was a result is where its stage put it in the call before; one that is the same in every call is everywhere;
    any other is on the first device. Results stay where they are.
    """
    problem, number = build(graph, hardware), {node: i for i, node in enumerate(graph.tasks)}
    readers: dict[int, set[int]] = {}
    for task, i in number.items():
        for b in graph.nodes[task].reads:
            readers.setdefault(b, set()).add(i)
    carried, grouped = dict(graph.carried), {}
    for i in sorted(set(readers) & set(range(len(graph.inputs))) - graph.constant):
        home = -1
        if i in carried and (made := graph.collect[carried[i]][0]):
            if made[0] == i:
                continue  # it comes back as it was
            home = number.get(graph.owner[made[0]], -1)
        if readers[i] != {home}:
            grouped.setdefault((home, tuple(sorted(readers[i]))), []).append(graph.nodes[i].nbytes)
    nbytes = np.array([sum(sizes) for sizes in grouped.values()], np.float32)
    off = ~np.eye(hardware.devices, dtype=bool)
    seconds = (nbytes[:, None, None] / hardware.bandwidth + hardware.latency) * off
    edges = [(s, v) for s, (_, tasks) in enumerate(grouped) for v in tasks]
    return replace(
        problem, source_bytes=nbytes, source_time=seconds.astype(np.float32),
        source_home=np.array([home for home, _ in grouped], np.int32),
        source_edges=np.array(edges, np.int32).reshape(-1, 2),
    )  # fmt: skip


def whole(graph: StagedGraph) -> StagedGraph:
    """The same function as one stage."""
    inputs = [node for node in graph.nodes if node.role == "input"]
    tasks = [graph.nodes[i] for i in graph.tasks]
    made = {b for node in tasks for b in node.yields}
    kept = tuple(sorted({b for reads, _ in graph.collect for b in reads} & made))
    reads = tuple(sorted({b for node in tasks for b in node.reads} - made))
    one = replace(
        tasks[0], name=f"{graph.name}[0]", steps=tuple(step for node in tasks for step in node.steps), reads=reads,
        yields=kept, flops=sum(node.flops for node in tasks), nbytes=sum(_nbytes(graph.blocks[b]) for b in kept),
        traffic=float(sum(_nbytes(graph.blocks[b]) for b in (*reads, *kept))),
    )  # fmt: skip
    return replace(graph, nodes=(*inputs, one))
