"""Fused steps with networks as one kernel: tiles of environments, all K steps in one launch, products as products.

Scalars of the state are in registers, one number for each environment, and so are wide vectors, as tiles. Weights are read
once, before the loop, as far as they fit beside each other; the others at each timestep.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from rlfx import _jaxpr as J
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.pallas import Backend, counted, cut, loaded, to_store
from rlfx.transforms.steps.products import Weights
from rlfx.transforms.steps.program import Layout, StepProgram
from rlfx.transforms.steps.scalarize import Target, UnsupportedPrimitive, cell, keys_of
from rlfx.transforms.steps.tile_rules import TileInterpreter
from rlfx.transforms.steps.tiles import WIDE, Held, Tile, chunks, padded

#: Bytes of matrices that are kept near the processor for all timesteps: a part of the shared memory.
NEAR = 64 * 1024

#: Lines of weights that are kept in registers for all timesteps.
LINES = 16

Index = tuple[Any, ...]
_LEAF = jax.tree.structure(0)


def run(
    program: StepProgram, length: int, shared: Any, t: Any, first: Any, n: int, carry: Any, xs: Any, block: int,
    target: Backend,
):  # fmt: skip
    """``(carry, ys)`` with leaves ``[N, ...]`` and ``[K, N, ...]``, by one kernel over tiles of ``block`` environments.

    The first timestep and the number of the first environment are two numbers: each tile counts from them.
    """
    size = n + -n % block
    form = form_of(program, target, block)
    weights = form.weights(jax.tree.leaves(shared))
    before = _to_memory(program.carry, form.wide, carry, (size,))
    given = _to_memory(program.xs, form.wide_xs, xs, (length, size))
    inputs = [t[None], first[None], *weights.values(), *before, *given]
    sizes = np.cumsum([2, len(weights), len(before), len(given), len(before)])
    ys = [jax.ShapeDtypeStruct((length, size, *rest), d) for rest, d in _in_memory(program.ys, form.wide_ys)]

    def kernel(*refs):
        (time, number), matrices, initial, moving, after, out = cut(refs, sizes)
        begin = target.tile() * block
        here = pl.ds(begin, block)
        start = jnp.broadcast_to(time[0], (block,))
        envs = number[0] + jnp.minimum(begin + jax.lax.iota(np.int32, block), np.int32(n - 1))
        of = dict(zip(weights, matrices, strict=True))
        kept = {(leaf, at): _part(of[leaf], at) for leaf, at in form.kept}

        def load(leaf: int, at: Index) -> jax.Array:
            return kept[leaf, at] if (leaf, at) in kept else _part(of[leaf], at)

        def advance(k, state):
            x = _loaded(program.xs, form.wide_xs, moving, (k, here))
            state, y = form.step(load, start + k, envs, state, x)
            _store(program.ys, form.wide_ys, out, (k, here), y)
            return state

        state = _loaded(program.carry, form.wide, initial, (here,))
        _store(program.carry, form.wide, after, (here,), counted(length, advance, state))

    states = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before]
    # a state that is donated stays where it is
    kept = {sizes[1] + i: i for i in range(len(states))}
    call = target.made(kernel, size // block, len(inputs), [*states, *ys], "rlfx_acting", input_output_aliases=kept)
    results = call(*inputs)
    new = _from_memory(program.carry, form.wide, [x[:n] for x in results[: len(states)]], (n,))
    return new, _from_memory(program.ys, form.wide_ys, [y[:, :n] for y in results[len(states) :]], (length, n))


def why_not(program: StepProgram, target: Backend) -> str | None:
    """What a kernel can't do, where, and what to do; None if it can do everything. Computes nothing."""
    try:
        form_of(program, target, WIDE)
    except UnsupportedPrimitive as error:
        return str(error)
    return None


# -- what is a tile, and what is loaded


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How the step of a program runs in a kernel.

    Attributes:
      wide, wide_xs, wide_ys: the leaves of carry, inputs and outputs that are tiles.
      draws: whether wide random numbers are.
      parts: of the arrays that all environments share, by number, the parts that are loaded.
      outers: these arrays, as functions of the shared leaves, and their types.
      kept: parts that are loaded once.

    ``outers`` is filled by the first run of the step; later runs find the same arrays under the same numbers.
    """

    program: StepProgram
    target: Target
    wide: frozenset[int]
    wide_xs: frozenset[int]
    draws: bool = True
    wide_ys: frozenset[int] = frozenset()
    parts: dict[int, list[Index]] = dataclasses.field(default_factory=dict)
    outers: dict[int, tuple[Callable, Any]] = dataclasses.field(default_factory=dict)
    kept: frozenset[tuple[int, Index]] = frozenset()

    def weights(self, shared: Sequence[Any]) -> dict[int, jax.Array]:
        """The arrays of which parts are loaded, by number, with padding where a part reaches beyond the end."""
        with jax.ensure_compile_time_eval():  # constants are handed over as they are: no operation makes them first
            return self._padded(shared)

    def _padded(self, shared: Sequence[Any]) -> dict[int, jax.Array]:
        found = {}
        for leaf, parts in self.parts.items():
            x = jnp.asarray(self.outers[leaf][0](shared))
            ends = [max(i + 1 if isinstance(i, int) else sum(i) for i in axis) for axis in zip(*parts, strict=True)]
            x = jnp.pad(x, [(0, max(0, end - n)) for end, n in zip(ends, x.shape, strict=True)]) if x.ndim else x[None]
            found[leaf] = x
        return found

    def step(self, load: Callable[[int, Index], jax.Array], t: Any, b: Any, carry: Sequence, x: Sequence) -> tuple:
        """One timestep of a tile of environments: flat arrays of the carry and of the inputs to those of carry and outputs."""
        new, y = self._run(load, t, b, carry, x)
        return new, _flat(self.program.ys, self.wide_ys, y[0], y[1])

    def _run(self, load: Callable, t: Any, b: Any, carry: Sequence, x: Sequence) -> tuple:
        p, made = self.program, []

        def weights(outer: Callable, aval: Any) -> Weights:
            number = len(made)
            made.append(outer)
            self.outers.setdefault(number, (outer, aval))
            read = lambda at: loaded(load(number, at), aval.dtype)  # noqa: E731
            return Weights(read, outer, aval)

        ip = TileInterpreter(self.target, weights, self.draws)
        shared = []
        for i, aval in enumerate(p.shared.avals):
            words = jax.eval_shape(jax.random.key_data, aval) if J.is_key(aval) else aval
            key = J.is_key(aval)
            leaf = weights(lambda leaves, i=i, key=key: jax.random.key_data(leaves[i]) if key else leaves[i], words)
            small = key or leaf.size < WIDE
            value = leaf.elements() if small else leaf
            shared.append(keys_of(value, aval.shape) if key else value)
        inputs = [*shared, cell(t), cell(b), *_values(p.carry, self.wide, carry), *_values(p.xs, self.wide_xs, x)]
        out = ip.run(p.closed.jaxpr, p.closed.consts, inputs)
        size = len(p.carry.avals)
        return _flat(p.carry, self.wide, ip, out[:size]), (ip, out[size:])


def form_of(program: StepProgram, target: Backend, block: int) -> Form:
    """How a program's step runs in a kernel: with wide vectors of its state as tiles, or as scalars where it needs those.

    Raises:
      UnsupportedPrimitive: naming the primitive, the source line and what to do.
    """
    machine = Target(block=(block,), rewrites=target.rewrites, widest=target.widest)
    wide = [frozenset(i for i, a in enumerate(layout.avals) if _is_wide(a)) for layout in (program.carry, program.xs)]
    none = [frozenset(), frozenset()]
    attempts = [(tiles, draws) for draws in (True, False) for tiles in ([wide, none] if any(wide) else [none])]
    errors = []
    for (carry, xs), draws in attempts:
        try:
            return _recorded(Form(program, machine, carry, xs, draws))
        except UnsupportedPrimitive as error:
            errors.append(error)
    raise errors[0]


def _is_wide(aval: Any) -> bool:
    return not J.is_key(aval) and jnp.issubdtype(aval.dtype, jnp.floating) and math.prod(aval.shape) >= WIDE


def _recorded(form: Form) -> Form:
    """With what a step asks for: parts of weights, and which outputs are tiles."""
    p, block = form.program, form.target.block
    asked: dict[tuple[int, Index], tuple[int, ...]] = {}
    wide_ys: list[int] = []

    def arrays(layout: Layout, wide: frozenset[int]) -> list:
        return [jax.ShapeDtypeStruct((*rows, *block), d) for rows, d in _in_registers(layout, wide)]

    def once(t, b, carry, x):
        def load(leaf, at):
            shape = tuple(i[1] for i in at if not isinstance(i, int))
            asked[leaf, at] = shape
            return jnp.zeros(shape, form.outers[leaf][1].dtype)

        new, (ip, ys) = form._run(load, t, b, carry, x)
        wide_ys.extend(i for i, y in enumerate(ys) if isinstance(y, Tile) and y.size >= WIDE)
        return new, _flat(p.ys, frozenset(wide_ys), ip, ys)

    index = jax.ShapeDtypeStruct(block, jnp.int32)
    jax.eval_shape(once, index, index, arrays(p.carry, form.wide), arrays(p.xs, form.wide_xs))
    parts: dict[int, list[Index]] = {}
    for leaf, at in asked:
        parts.setdefault(leaf, []).append(at)
    return dataclasses.replace(form, wide_ys=frozenset(wide_ys), parts=parts, kept=_kept(asked))


def _kept(asked: dict[tuple[int, Index], tuple[int, ...]]) -> frozenset:
    """Numbers; of lines the first; matrices, smallest first, as long as there is room."""
    lines = [key for key, shape in asked.items() if len(shape) == 1]
    kept = [key for key, shape in asked.items() if not shape] + lines[:LINES]
    room = NEAR
    for key, shape in sorted(asked.items(), key=lambda item: math.prod(item[1])):
        if len(shape) == 2 and (room := room - 4 * math.prod(shape)) >= 0:
            kept.append(key)
    return frozenset(kept)


# -- registers and memory


def _leaves(layout: Layout, wide: frozenset[int]) -> list[tuple[tuple[int, ...], np.dtype, bool]]:
    """Of each leaf: the shape of its scalars, their dtype, and whether it is a tile."""
    dtypes = [np.dtype("uint32") if J.is_key(a) else np.dtype(a.dtype) for a in layout.avals]
    return [(s, d, i in wide) for i, (s, d) in enumerate(zip(layout.shapes, dtypes, strict=True))]


def _in_registers(layout: Layout, wide: frozenset[int]) -> list[tuple[tuple[int, ...], np.dtype]]:
    """The rows of each array, and its dtype."""
    found = []
    for shape, dtype, tile in _leaves(layout, wide):
        count = math.prod(shape)
        found += [((padded(n),), dtype) for _, n in chunks(0, count)] if tile else [((), dtype)] * count
    return found


def _in_memory(layout: Layout, wide: frozenset[int]) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Of each leaf that has any number: its axis behind those of time and environments, and its dtype.

    Of a tile there is what its last part needs.
    """
    found = []
    for shape, dtype, tile in _leaves(layout, wide):
        size = math.prod(shape)
        start, rest = chunks(0, size)[-1] if size else (0, 0)
        if size:
            found.append((((start + padded(rest) if tile else size),) if shape else (), dtype))
    return found


def _to_memory(layout: Layout, wide: frozenset[int], values: Any, lead: tuple[int, ...]) -> list[jax.Array]:
    """A pytree with leaves ``[..., N, ...]`` as arrays ``[*lead]`` or ``[*lead, columns]``."""
    leaves = [jax.random.key_data(x) if J.is_key(x) else x for x in jax.tree.leaves(values)]
    found = []
    for x, (rest, dtype) in zip([x for x in leaves if x.size], _in_memory(layout, wide), strict=True):
        x = x.reshape(*x.shape[: len(lead)], *(-1 for _ in rest))
        x = jnp.pad(
            x, [*((0, m - n) for m, n in zip(lead, x.shape, strict=False)), *((0, 0) for _ in rest)], mode="edge"
        )
        columns = [(0, m - n) for m, n in zip(rest, x.shape[len(lead) :], strict=True)]
        found.append(jnp.pad(x, [*((0, 0) for _ in lead), *columns]).astype(dtype))
    return found


def _from_memory(layout: Layout, wide: frozenset[int], arrays: Sequence[jax.Array], lead: tuple[int, ...]) -> Any:
    """The inverse of :func:`_to_memory`."""
    leaves, rest = [], iter(arrays)
    for aval, (shape, dtype, _) in zip(layout.avals, _leaves(layout, wide), strict=True):
        size = math.prod(shape)
        x = next(rest) if size else jnp.zeros((*lead, *shape), dtype)
        x = (x[..., :size] if shape and size else x).reshape(*lead, *shape).astype(dtype)
        leaves.append(F.wrap_key(x, aval) if J.is_key(aval) else x)
    return jax.tree.unflatten(layout.tree, leaves)


def _loaded(layout: Layout, wide: frozenset[int], refs: Sequence[Any], at: tuple) -> list[jax.Array]:
    """From memory to registers."""
    found = []
    for r, dtype, tile, parts in _places(layout, wide, refs, at):
        found += [r[part] if tile else loaded(r[part], dtype) for part in parts]
    return found


def _store(layout: Layout, wide: frozenset[int], refs: Sequence[Any], at: tuple, values: Sequence[jax.Array]) -> None:
    """From registers to memory."""
    arrays = iter(values)
    for r, _, _, parts in _places(layout, wide, refs, at):
        for part in parts:
            r[part] = to_store(next(arrays), r.dtype)


def _places(layout: Layout, wide: frozenset[int], refs: Sequence[Any], at: tuple) -> Iterator[tuple]:
    """Of each leaf that has any number: its memory, its dtype, whether it is a tile, and where its parts are."""
    rest = iter(refs)
    for shape, dtype, tile in _leaves(layout, wide):
        if size := math.prod(shape):
            places = [_across(at, *part) for part in chunks(0, size)] if tile else [(*at, i) for i in range(size)]
            yield next(rest), dtype, tile, places if shape else [at]


def _across(at: tuple, start: int, size: int) -> tuple:
    """Where a part of a tile is, number by number: ``[rows, environments]``, though memory has environments first.

    The alternative, to transpose what is loaded or stored, does not compile: XLA moves a transposition through all that a tile
    is made of, once for each path to it (``TritonXLAFoldTransposePass``), and random numbers have 2^20 paths.
    """
    *lead, here = at
    shape = (padded(size), here.size)
    numbers = here.start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return *lead, numbers, np.int32(start) + jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _values(layout: Layout, wide: frozenset[int], arrays: Sequence[jax.Array]) -> list[Any]:
    """What is in registers as tiles and elements."""
    found, rest = [], iter(arrays)
    for i, (aval, shape) in enumerate(zip(layout.avals, layout.shapes, strict=True)):
        if i in wide:
            found.append(Held([next(rest) for _ in chunks(0, math.prod(shape))], aval.shape))
        else:
            found += Layout(_LEAF, (aval,)).elements([next(rest) for _ in range(math.prod(shape))])
    return found


def _flat(layout: Layout, wide: frozenset[int], ip: TileInterpreter, values: Sequence[Any]) -> list[jax.Array]:
    """The inverse of :func:`_values`."""
    found = []
    for i, (x, aval) in enumerate(zip(values, layout.avals, strict=True)):
        if i not in wide:
            found += Layout(_LEAF, (aval,)).flatten(ip, [x])
            continue
        tile = ip.tile(x)
        for part in chunks(0, tile.size):
            rows = tile.rows(*part)
            found.append(jnp.broadcast_to(rows, (rows.shape[0], *ip.target.block)).astype(aval.dtype))
    return found


def _part(ref: Any, at: Index) -> jax.Array:
    return ref[tuple(i if isinstance(i, int) else pl.ds(*i) for i in at) or (0,)]
