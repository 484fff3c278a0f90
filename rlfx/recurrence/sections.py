"""Attention over one's own past while acting: a loop in sections, in each of which the past has one static length.

``keys[:t + 1]`` inside the loop that computes ``keys`` is a masked buffer of T positions. Here the loop runs as several
loops over consecutive timesteps. The buffer is a row of tiles, one a section: what earlier sections have written is
complete, the running one writes its own, and reads reach no further. So the work grows with t, not with T, and the tiles
together are as large as the buffer. TimeRL (section 6.2) masks the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.index import TIME, Index, Slice
from rlfx.recurrence.program import Equation, Program, Var
from rlfx.recurrence.ragged.tiles import Tiles
from rlfx.recurrence.schedule import Loop
from rlfx.recurrence.values import Value, zeros

#: A section compiles the loop's body once more; with n of them the past that is read is (n + 1) / 2n of T.
MOST_SECTIONS = 8
#: Below this length of a tile there is nothing to gain.
SMALLEST_TILE = 256


def tile_size(length: int) -> int:
    """Timesteps in a section."""
    return min(length, max(SMALLEST_TILE, -(-length // MOST_SECTIONS)))


def tiled_series(loop: Loop, program: Program) -> frozenset[Var]:
    """The series of a loop that are kept in tiles: of which it reads prefixes, and nothing else."""
    if loop.direction != "forward":
        return frozenset()
    users: dict[Var, list[Equation]] = {}
    for e in loop.body:
        for v in e.point_inputs:
            if isinstance(v, Var):
                users.setdefault(v, []).append(e)

    def is_prefix(read: Equation) -> bool:
        access = read.access
        reaches_now = isinstance(access, Slice) and access.hi in (TIME, TIME + 1) and access.lo == Index()
        (out,) = read.outputs
        only_ragged = all(e.is_ragged and e.is_pointwise for e in users.get(out, ()))
        return reaches_now and J.is_symbolic(read.params["size"]) and only_ragged and out not in loop.stacked

    readers: dict[Var, list[Equation]] = {}
    for e in loop.reads:
        readers.setdefault(e.source, []).append(e)
    return frozenset(v for v, found in readers.items() if all(map(is_prefix, found)))


def sections_note(loop: Loop, program: Program) -> list[str]:
    """What ``explain`` says of a loop in sections."""
    length = program.domain.length
    size = tile_size(length)
    read = dict.fromkeys(f"x[{e.access}]" for e in loop.reads if e.source in tiled_series(loop, program))
    if not read or size == length:
        return []
    return [
        f"{', '.join(read)}: {-(-length // size)} sections of {size} timesteps, each reads only the past that is there"
    ]


@dataclass(frozen=True, eq=False)
class Section:
    """Consecutive iterations of a loop.

    Attributes:
      first, size: which.
      complete: for each series in tiles, the tiles of earlier sections, [B?, size, ...] each.
    """

    first: int
    size: int
    complete: Mapping[Var, tuple]

    def write(self, tile: Any, value: Value, t: Any) -> Any:
        """The tile with the value of iteration t."""
        return jax.lax.dynamic_update_index_in_dim(tile, value.data, t - self.first, len(value.dims))

    def read(self, equation: Equation, tile: Value) -> Value:
        """What has been written before, and in this section."""
        pieces = (*self.complete[equation.source], tile.data)
        ndim = tile.data.ndim - len(tile.dims)
        return Value(Tiles(pieces, 0), tile.dims, (0,) + (None,) * (ndim - 1), False)


def advance_in_sections(
    running: Any, tiled: frozenset[Var], state: Sequence, times: Any, slices: Sequence, iterate: Any, in_place: bool
) -> tuple[list, list]:
    """As :meth:`RunningLoop.advance` over all timesteps, section by section.

    Args:
      in_place: put what is stacked into one array as it is computed. (Under automatic differentiation, each section
        stacks its own: else every iteration would have a cotangent of all of them.)
    """
    length, names = running.run.domain.length, list(running.loop.depth)
    size = tile_size(length)
    complete: dict[Var, tuple] = dict.fromkeys(tiled, ())
    kept, outs = dict(zip(names, state, strict=True)), []
    stacked: list | None = None
    for first in range(0, length, size):
        count = min(size, length - first)
        part = replace(running, section=Section(first, count, dict(complete)))
        kept |= {v: _empty(running.slots[v], v, count, running) for v in tiled}
        xs = [x[first : first + count] for x in (times, *slices)]
        step, start = part.step, [kept[v] for v in names]
        if in_place:
            if stacked is None:
                _, one = jax.eval_shape(step, start, (times[0], [x[0] for x in slices]))
                stacked = [zeros((length, *y.shape), y.dtype) for y in one]
            (after, stacked), _ = iterate(_writing(step), (start, stacked), (xs[0], xs[1:]), False, None)
        else:
            after, ys = iterate(step, start, (xs[0], xs[1:]), False, part.going())
            outs.append(ys)
        kept = dict(zip(names, after, strict=True))
        complete = {v: (*complete[v], kept[v]) for v in tiled}
    for v in tiled:  # in the form in which the loop's state is known outside
        axis = int("b" in running.slots[v])
        kept[v] = jnp.moveaxis(jnp.concatenate(complete[v], axis=axis), axis, 0)
    if stacked is None:
        stacked = [jnp.concatenate(y) for y in zip(*outs, strict=True)]
    return [kept[v] for v in names], stacked


def _writing(step: Any) -> Any:
    """A step that writes what it puts out into arrays of all timesteps."""

    def write(carry, xs):
        after, ys = step(carry[0], xs)
        put = jax.lax.dynamic_update_index_in_dim
        return (after, [put(array, y, xs[0], 0) for array, y in zip(carry[1], ys, strict=True)]), None

    return write


def _empty(dims: frozenset, var: Var, size: int, running: Any) -> Any:
    lead = (running.run.sizes["b"],) if "b" in dims else ()
    return zeros((*lead, size, *var.shape), var.dtype)
