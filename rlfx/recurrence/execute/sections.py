"""Attention over one's own past while acting: a loop in sections, in each of which the past has one static length.

``keys[:t + 1]`` inside the loop that computes ``keys`` is a masked buffer of T positions. Here the loop runs as several
loops over consecutive timesteps. The buffer is a row of tiles: what earlier sections have written is complete, the running
one writes into the last, and reads reach no further. So the work grows with t, not with T, and the tiles together are as
large as the buffer. Few long tiles are faster than many short ones, so the last one grows by a section as long as its copy
finds room in what is not written yet. TimeRL (section 6.2) masks the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.execute.ragged.tiles import Tiles
from rlfx.recurrence.execute.values import NOTHING, Value, zeros
from rlfx.recurrence.ir.program import Equation, Var


@dataclass(frozen=True, eq=False)
class Section:
    """Consecutive iterations of a loop.

    Attributes:
      first: where the last tile begins, into which it writes.
      complete: for each series in tiles, the other tiles, [B?, (own axes before time), size, ...] each.
      before: how many of its own axes come before time.
    """

    first: int
    complete: Mapping[Var, tuple]
    before: Mapping[Var, int]

    def write(self, var: Var, tile: Any, value: Value, t: Any) -> Any:
        """The tile with the value of iteration t."""
        axis = len(value.dims) + self.before[var]
        return jax.lax.dynamic_update_index_in_dim(tile, value.data, t - self.first, axis)

    def read(self, equation: Equation, tile: Value) -> Value:
        """All tiles: what has been written before, and in this section."""
        ndim, lead = tile.data.ndim - len(tile.dims), len(tile.dims)
        axis = lead + self.before[equation.source]
        tiles = tuple(jnp.moveaxis(x, axis, lead) for x in (*self.complete[equation.source], tile.data))
        return Value(Tiles(tiles, 0), tile.dims, (0,) + (None,) * (ndim - 1), clean=False, raw=NOTHING)


def advance_in_sections(
    running: Any, state: Sequence, times: Any, slices: Sequence, in_place: bool
) -> tuple[list, list]:
    """As :meth:`RunningLoop.advance` over all timesteps, section by section.

    Args:
      in_place: put what is stacked into one array as it is computed, and let tiles grow. (Under automatic
        differentiation, each section stacks its own: else every iteration would have a cotangent of all of them. And it
        keeps its tile for each iteration, so that a tile is as long as a section.)
    """
    length, names = running.run.domain.length, list(running.loop.depth)
    tiled, iterate = running.node.tiled, running.node.iteration
    axes = {v: int("b" in running.state_dims[v]) + before for v, before in tiled.items()}
    complete: dict[Var, tuple] = dict.fromkeys(tiled, ())
    kept, outs = dict(zip(names, state, strict=True)), []
    stacked: list | None = None
    begun = 0
    for first, end in running.node.sections:
        count = end - first
        if in_place and first and first + (first - begun) + count <= length:
            kept |= {v: _longer(kept[v], count, axes[v]) for v in tiled}
        else:
            if first:
                complete = {v: (*complete[v], kept[v]) for v in tiled}
            kept |= {v: _begun(kept[v], v, count, running, in_place and first > 0, axes[v]) for v in tiled}
            begun = first
        part = replace(running, section=Section(begun, dict(complete), tiled))
        xs = [x[first:end] for x in (times, *slices)]
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
    for v in tiled:  # in the form in which the loop's state is known outside
        kept[v] = jnp.moveaxis(jnp.concatenate((*complete[v], kept[v]), axis=axes[v]), axes[v], 0)
    if stacked is None:
        stacked = [jnp.concatenate(y) for y in zip(*outs, strict=True)]
    return [kept[v] for v in names], stacked


def _longer(tile: Any, count: int, axis: int) -> Any:
    """The tile with room for more timesteps: a copy of what happens to be in it, which is masked."""
    return jnp.concatenate([tile, jax.lax.slice_in_dim(tile, 0, count, axis=axis)], axis=axis)


def _begun(last: Any, var: Var, count: int, running: Any, from_last: bool, axis: int) -> Any:
    """A tile for what is not written yet: of zeros, or of what happens to be in the last one, which is masked alike.

    (XLA would set up the zeros of all tiles before the first section, and keep them until they are needed.)
    """
    if from_last and count <= last.shape[axis]:
        return jax.lax.slice_in_dim(last, 0, count, axis=axis)
    whole = (*((running.run.sizes["b"],) if "b" in running.state_dims[var] else ()), *var.shape)
    return zeros((*whole[:axis], count, *whole[axis:]), var.dtype)


def _writing(step: Any) -> Any:
    """A step that writes what it puts out into arrays of all timesteps."""

    def write(carry, xs):
        after, ys = step(carry[0], xs)
        put = jax.lax.dynamic_update_index_in_dim
        return (after, [put(array, y, xs[0], 0) for array, y in zip(carry[1], ys, strict=True)]), None

    return write
