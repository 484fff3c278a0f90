"""A jaxpr, sharded ("exploded") into a dataflow graph: shards, reductions of partial results, lazy data movement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import Axes, Nest
from rlfx._checks import CALLABLE, POSITIVE, TEXT, Kind, each, expect, optional
from rlfx.errors import PlacementError, located
from rlfx.place import jaxpr as jp
from rlfx.place import rules
from rlfx.place import tensors as tn
from rlfx.place.fuse import fuse_scopes
from rlfx.place.graph import DataflowGraph, Node, Step

Splits = Mapping[str, tuple[int, ...]]
LARGE = 2**14  # elements; smaller values are not worth cutting by themselves


def _automatic(work: rules.Work, operands: Sequence[tn.Tensor], parts: int) -> tuple[int, ...] | None:
    """Cut the first long result axis of contractions, and of large operations on uncut operands, into ``parts``."""
    uncut = all(len(c) == 2 for x in operands for c in x.cuts)
    sizes = work.loops.sizes
    if not (work.kind == "matmul" or (uncut and math.prod(sizes) >= LARGE)):
        return None
    loop = next((a for a in work.loops.results[0] if a in work.loops.free and sizes[a] >= parts), None)
    return None if loop is None else tuple(parts if a == loop else 1 for a in range(len(sizes)))


def _grid(it: Nest, operands: Sequence[tn.Tensor], split: tuple[int, ...] | None) -> tn.Cuts:
    """Where an equation's index space is cut: by the user's split, or as its most finely cut operand is."""
    cuts = []
    for axis, size in enumerate(it.sizes):
        if axis in it.pinned:
            cuts.append((0, size))
        elif split is not None:
            parts = split[axis] if axis < len(split) else 1
            cuts.append(tn.even_cuts(size, min(parts, size)))
        else:
            options = [(0, size)]
            for tensor, mapping in zip(operands, it.operands, strict=True):
                options += [tensor.cuts[a] for a, target in enumerate(mapping) if target == axis]
            cuts.append(max(options, key=len))
    return tuple(cuts)


class _Builder:
    """Accumulates nodes and blocks while the equations are visited in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.metas: list[str] = []
        self.scopes: list[tuple[str, ...]] = []  # of each meta-op
        self.blocks: list[jax.ShapeDtypeStruct] = []
        self.loads: dict[int, tuple[int, tn.Region]] = {}

    def meta(self, name: str, scopes: tuple[str, ...] = ()) -> int:
        """A new meta-op; repeated names are numbered."""
        self.scopes.append(scopes)
        count = sum(m == name or m.startswith(f"{name}#") for m in self.metas)
        self.metas.append(name if not count else f"{name}#{count + 1}")
        return len(self.metas) - 1

    def block(self, shape: tn.Shape, dtype: Any) -> int:
        """A new block."""
        self.blocks.append(jax.ShapeDtypeStruct(shape, dtype))
        return len(self.blocks) - 1

    def nbytes(self, *blocks: int) -> int:
        """Bytes of some blocks."""
        return sum(math.prod(self.blocks[b].shape) * self.blocks[b].dtype.itemsize for b in blocks)

    def add(self, meta: int, index: Sequence[int], kind: str, role: Any, step: Step, flops: float, source: str,
            read_bytes: float) -> None:  # fmt: skip
        """A new node of one step."""
        size = self.nbytes(*step.defines)
        label = f"{self.metas[meta]}[{','.join(map(str, index))}]"
        self.nodes.append(
            Node(label, kind, meta, role, (step,), step.defines, step.reads, flops, read_bytes + size, size, source)
        )

    def argument(self, position: int, name: str, aval: Any) -> tn.Argument:
        """An argument whose blocks become input nodes when its first reader cuts it."""

        def make(cuts: tn.Cuts) -> tn.Blocks:
            meta, ids = self.meta(name), {}
            for index, region in tn.regions(cuts).items():
                ids[index] = self.block(tn.region_shape(region), aval.dtype)
                self.loads[ids[index]] = (position, region)
                step = Step((ids[index],), (), lambda env: ())
                self.add(meta, index, "input", "input", replace(step, defines=(ids[index],)), 0.0, name, 0.0)
            return tn.Blocks(aval.shape, cuts, ids)

        return tn.Argument(aval.shape, make)

    def shards(self, eqn: jp.JaxprEqn, work: rules.Work, operands: Sequence[tn.Tensor], cuts: tn.Cuts,
               name: str) -> list[tn.Tensor]:  # fmt: skip
        """The nodes of one equation, and its results as blocks."""
        it, shapes = work.loops, [v.aval.shape for v in eqn.outvars]

        def regions(region: tn.Region, of: Sequence[tn.Shape], axes: Sequence[Axes]) -> list[tn.Region]:
            return [
                tuple((0, n) if a is None else region[a] for n, a in zip(shape, loops, strict=True))
                for shape, loops in zip(of, axes, strict=True)
            ]

        def operand_regions(region: tn.Region) -> list[tn.Region]:
            return regions(region, [x.shape for x in operands], it.operands)

        grid = tn.regions(cuts)
        for region in grid.values():
            for x, wanted in zip(operands, operand_regions(region), strict=True):
                x.request(wanted)
        for x in operands:
            x.read(tn.whole(x.shape))  # settles arguments
        meta, source = self.meta(name, jp.scopes(eqn)), jp.source(eqn)
        parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for index, region in grid.items():
            wanted = operand_regions(region)
            reads = [x.read(r) for x, r in zip(operands, wanted, strict=True)]
            out_shapes = map(tn.region_shape, regions(region, shapes, it.results))
            defines = tuple(self.block(s, v.aval.dtype) for s, v in zip(out_shapes, eqn.outvars, strict=True))
            blocks = tuple(sorted(frozenset().union(*(r.blocks for r in reads))))

            def run(env: Any, reads: Any = reads) -> tuple[jax.Array, ...]:
                return tuple(jp.evaluate(eqn, *(r.run(env) for r in reads)))

            read_bytes = sum(
                math.prod(tn.region_shape(r)) * v.aval.dtype.itemsize
                for r, v, e in zip(wanted, eqn.invars, reads, strict=True)
                if e.blocks
            )
            sizes = tn.region_shape(region)
            self.add(meta, index, work.kind, "shard", Step(defines, blocks, run), work.flops(sizes), source, read_bytes)
            parts.setdefault(tuple(0 if a in it.reduced else i for a, i in enumerate(index)), []).append(defines)
        return self._results(eqn, it, cuts, meta, parts, source)

    def _results(self, eqn: Any, it: Nest, cuts: tn.Cuts, meta: int, parts: Any, source: str) -> list[tn.Tensor]:
        """Blocks of the results; partial results of one block are combined by a reduce node."""
        results: list[dict[tuple[int, ...], int]] = [{} for _ in eqn.outvars]
        for at, partials in parts.items():
            of_result = [tuple(0 if a is None else at[a] for a in axes) for axes in it.results]
            if len(partials) > 1:
                reads = tuple(p[0] for p in partials)
                aval = self.blocks[reads[0]]
                total = self.block(aval.shape, aval.dtype)

                def run(env: Any, reads: Any = reads) -> tuple[jax.Array, ...]:
                    value = env[reads[0]]
                    for b in reads[1:]:
                        value = it.monoid.combine(value, env[b])  # type: ignore[union-attr]
                    return (value,)

                flops = float(math.prod(aval.shape) * (len(reads) - 1))
                self.add(meta, ("reduce", *of_result[0]), "aggregate", "reduce", Step((total,), reads, run), flops, source,
                         self.nbytes(*reads))  # fmt: skip
                partials = [(total,)]
            for result, index, block in zip(results, of_result, partials[0], strict=True):
                result[index] = block
        return [
            tn.Blocks(shape, tuple((0, n) if a is None else cuts[a] for n, a in zip(shape, axes, strict=True)), ids)
            for shape, axes, ids in zip((v.aval.shape for v in eqn.outvars), it.results, results, strict=True)
        ]

    def form(self, x: tn.Tensor, cuts: tn.Cuts, dtype: Any, name: str) -> tn.Tensor:
        """Formation nodes: the tensor copied into a grid of its own."""
        meta, ids = self.meta(name), {}
        for index, region in tn.regions(cuts).items():
            expr = x.read(region)
            ids[index] = self.block(tn.region_shape(region), dtype)
            step = Step((ids[index],), tuple(sorted(expr.blocks)), lambda env, expr=expr: (expr.run(env),))
            self.add(meta, index, "formation", "shard", step, 0.0, "the function's result", self.nbytes(ids[index]))
        return tn.Blocks(x.shape, cuts, ids)


def argument_names(fn: Callable[..., Any], args: Any) -> list[str]:
    """Names of the flat arguments: parameter, then path."""
    import inspect

    try:
        bound = list(inspect.signature(fn).bind(*args).arguments.items())
    except (TypeError, ValueError):
        bound = [(f"arg{i}", a) for i, a in enumerate(args)]
    leaves = jax.tree_util.tree_leaves_with_path(dict(enumerate(v for _, v in bound)))
    names = [name for name, _ in bound]
    return [names[path[0].key] + jax.tree_util.keystr(path[1:]) for path, _ in leaves]


def _split_for(name: str, scopes: tuple[str, ...], eqn: jp.JaxprEqn, splits: Splits, dots: set[str]) -> Any:
    """The user's split of an equation: by its own name, or by the innermost named scope that has one."""
    if name in splits:
        return splits[name]
    primitive = str(eqn.primitive)
    for scope in reversed(scopes):
        if scope in splits and (scope not in dots or eqn.primitive is jp.dot_general_p):
            return splits[scope]
    return splits.get(primitive)


_GRID = each(POSITIVE, "the number of parts of each axis", "(2, 1, 4)")
_SCOPES = each(TEXT, "a list of named scopes", '("attention",)')


def _splits(value: Any) -> Splits | int:
    if not isinstance(value, Mapping):
        return POSITIVE.take(value)
    return {TEXT.take(name): _GRID.take(parts) for name, parts in value.items()}


def _arguments(value: Any) -> Any:
    leaves = jax.tree.leaves(value)
    if any(isinstance(x, type) for x in leaves):
        raise TypeError
    for x in leaves:
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            raise TypeError
        jnp.result_type(x)
    return value


_SPLITS = Kind("a positive integer, parts of each axis by name", '{"dot_general": (2, 1, 4)}', _splits)
ARGUMENTS = Kind("pytrees of arrays", "(jnp.ones((8, 4)), ...)", _arguments)


def explode(
    fn: Callable[..., Any],
    *args: Any,
    splits: Splits | int | None = None,
    out_splits: tuple[int, ...] | None = None,
    fuse: Sequence[str] = (),
    name: str | None = None,
) -> DataflowGraph:
    """Trace a function and shard its operations into a dataflow graph (DOPPLER section 2, appendix A).

    Every equation of the jaxpr is a meta-op. Its index space (for a contraction: batch, rows, contracted, columns; for a
    convolution: images, filters, channels, of which the last is contracted; else the axes of its largest array) is cut into a
    grid of shard nodes; a cut contracted or reduced axis adds reduce nodes that combine the partial results. Broadcasts,
    reshapes, transposes, casts, slices and concatenations are
    evaluated lazily by the nodes that read them. Arguments are cut where their first reader needs them.

    Args:
      fn: a pure JAX function of pytrees of arrays.
      *args: example arguments, or ``jax.ShapeDtypeStruct``.
      splits: parts per axis, by ``jax.named_scope``, primitive or argument name. A scope with a contraction splits its
        contractions only. Everything else follows its most finely cut operand. An integer cuts every contraction, and
        every large operation on uncut operands, into that many parts along the first axis that allows it.
      out_splits: cut the function's results with formation nodes; by default results stay in their last blocks.
      fuse: named scopes whose equations become one node per block.
      name: the graph's name, by default the function's.

    Returns:
      The graph. ``graph.evaluate(*args)`` equals ``fn(*args)`` up to the order of floating-point sums.

    Raises:
      PlacementError: the function has effects, a split names nothing in it, or a fused scope would make a cycle.

    Differs from the paper: the paper takes shardings from EinDecomp and does not print them; ours are arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> graph = explode(lambda x, w: jnp.tanh(x @ w), jnp.ones((8, 4)), jnp.ones((4, 8)),
      ...                 splits={"dot_general": (2, 2, 1)}, name="layer")
      >>> graph.summary()
      'layer: 14 nodes (input 6, matmul 4, aggregate 2, elementwise 2), 14 edges, 0.6 kFLOP'
    """
    expect("fn", fn, CALLABLE, PlacementError, of="explode")
    splits = expect("splits", splits, optional(_SPLITS), PlacementError, of="explode")
    out_splits = expect("out_splits", out_splits, optional(_GRID), PlacementError, of="explode")
    fuse = expect("fuse", fuse, _SCOPES, PlacementError, of="explode")
    name = expect("name", name, optional(TEXT), PlacementError, of="explode")
    expect("args", args, ARGUMENTS, PlacementError, of="explode")
    parts = splits if isinstance(splits, int) else None
    named: Splits = {} if splits is None or isinstance(splits, int) else splits
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    label = name or getattr(fn, "__name__", "fn")
    without_effects(closed, label)
    jaxpr, consts = jp.flatten(closed)
    names = argument_names(fn, args)
    builder = _Builder()
    env: dict[Any, tn.Tensor] = {}
    avals = [v.aval for v in jaxpr.invars]
    for position, (var, arg_name) in enumerate(zip(jaxpr.invars, names, strict=True)):
        env[var] = builder.argument(position, arg_name, var.aval)
    for i, (var, const) in enumerate(zip(jaxpr.constvars, consts, strict=True)):
        small = math.prod(jnp.shape(const)) == 1
        env[var] = tn.literal(const) if small else builder.argument(len(names) + i, f"const{i}", var.aval)
    dots = {s for e in jaxpr.eqns if e.primitive is jp.dot_general_p for s in jp.scopes(e)}
    _check_splits(named, fuse, names, jaxpr, label)
    for var, arg_name in zip(jaxpr.invars, names, strict=True):
        if arg_name in named:
            given = named[arg_name]
            env[var].settle(  # type: ignore[attr-defined]
                tuple(tn.even_cuts(n, given[a] if a < len(given) else 1) for a, n in enumerate(var.aval.shape))
            )
    for eqn in jaxpr.eqns:
        operands = [tn.literal(v.val) if isinstance(v, J.Literal) else env[v] for v in eqn.invars]
        view = rules.view(eqn, operands)
        if view is not None:
            env[eqn.outvars[0]] = view
            continue
        work, scopes = rules.work(eqn), jp.scopes(eqn)
        meta_name = "/".join((*scopes, str(eqn.primitive)))
        split = _split_for(meta_name, scopes, eqn, named, dots)
        if parts is not None:
            split = _automatic(work, operands, parts)
        cuts = _grid(work.loops, operands, split)
        env.update(zip(eqn.outvars, builder.shards(eqn, work, operands, cuts, meta_name), strict=True))
    results = []
    for i, v in enumerate(jaxpr.outvars):
        x = tn.literal(v.val) if isinstance(v, J.Literal) else env[v]
        if out_splits is not None:
            cuts = tuple(
                tn.even_cuts(n, out_splits[a] if a < len(out_splits) else 1) for a, n in enumerate(v.aval.shape)
            )
            x = builder.form(x, cuts, v.aval.dtype, f"result{i}")
        expr = x.read(tn.whole(x.shape))
        results.append((tuple(sorted(expr.blocks)), expr.run))
    loads, constants = dict(builder.loads), list(consts)

    def load(flat: Sequence[jax.Array]) -> dict[int, jax.Array]:
        everything = [*map(jnp.asarray, flat), *map(jnp.asarray, constants)]
        return {
            block: everything[position][tuple(slice(a, b) for a, b in region)]
            for block, (position, region) in loads.items()
        }

    nodes = fuse_scopes(builder.nodes, builder.metas, builder.scopes, fuse, results, builder.nbytes, label)
    return DataflowGraph(
        tuple(nodes), tuple(builder.metas), tuple(builder.blocks), load, tuple(results),
        jax.tree.structure(args), jax.tree.structure(out_shape),
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals), label,
    )  # fmt: skip


def without_effects(closed: Any, label: str) -> None:
    """Raise PlacementError if a traced function has side effects."""
    if closed.effects:
        kinds = ", ".join(sorted(str(e) for e in closed.effects))
        raise PlacementError(
            located(
                f"{label} has side effects ({kinds}); its nodes may run in any order on any device.",
                where=next((jp.source(e) for e in closed.jaxpr.eqns if e.effects), None),
                fix="Remove debug prints and callbacks from the function, or run them outside of it.",
            )
        )


def _check_splits(splits: Splits, fuse: Sequence[str], names: list[str], jaxpr: J.Jaxpr, label: str) -> None:
    """Every name in ``splits`` and ``fuse`` means something in the function."""
    paths = [("/".join((*jp.scopes(e), str(e.primitive)))) for e in jaxpr.eqns]
    known = {*names, *paths, *itertools.chain.from_iterable(p.split("/") for p in paths)}
    for key in (*splits, *fuse):
        if key not in known:
            raise PlacementError(
                located(
                    f"{key!r} names no scope, operation or argument of {label}.",
                    fix=f"Use one of: {', '.join(sorted(known))}.",
                )
            )
