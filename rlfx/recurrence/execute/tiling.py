"""Equations on slices of symbolic length in blocks of timesteps, each of which is computed again for its derivative.

What runs so, and in which blocks and sections, ``schedule/tiling.py`` decides. What is masked entirely is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.recurrence.execute import reads
from rlfx.recurrence.execute.bands import rows_of_blocks, seen_by_block
from rlfx.recurrence.execute.positions import run_positions_last, times_last
from rlfx.recurrence.execute.values import Value, expand, of_atom
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import Slice
from rlfx.recurrence.language.precision import narrowed, widened
from rlfx.recurrence.schedule.tiling import Blocked


@dataclass(frozen=True)
class SectionDomain(Domain):
    """The timesteps ``begin <= t < end`` of a domain: slices are as wide as these readers see."""

    begin: int = 0
    end: int = 0

    def times(self) -> np.ndarray:
        return np.arange(self.begin, self.end, dtype=np.int32)


def run_blocked(run: Any, blocked: Blocked, at: Any) -> None:
    """Evaluate the equations at all timesteps, and add what is needed elsewhere to the values that ``run`` knows.

    Args:
      run: an execution over all timesteps.
      at: ``(times, domain, env) -> execution`` of a part of them.
    """
    defined = {v for e in blocked.equations for v in e.outputs}
    every = (*blocked.equations, *blocked.sums)
    used = dict.fromkeys(v for e in every for v in e.point_inputs if isinstance(v, Var))
    inputs = {v: run.now() if v is run.program.now else run.env[v] for v in used if v not in defined}
    moving = [v for v in inputs if "t" in inputs[v].dims]
    # Gradients of what all blocks use are added up in at least float32.
    fixed = {v: replace(x, data=widened(x.data)) for v, x in inputs.items() if v not in moving}
    last = blocked.last
    turned = set() if last is None else {*last.reads, *last.equations}
    series = {} if last is None else {
        e: times_last(run.source_of(e, run.env), e, of_atom(e.operands[0], run.env), run.sizes) for e in last.reads
    }  # fmt: skip
    bands = {e: rows_of_blocks(run.env[e.source], band, run.sizes) for e, band in blocked.bands.items()}
    found: list[list] = []
    for begin, end in blocked.sections:
        domain = run.domain
        section = SectionDomain(domain.length, domain.batch, domain.until, begin=begin, end=end)
        views = {}
        for e in blocked.equations:
            sliced = e.is_read and isinstance(e.access, Slice) and e not in bands
            if sliced and (view := reads.view_slice(run.env[e.source], e, section, run.sizes)) is not None:
                views[e.outputs[0]] = view
        done = {*bands, *turned}
        rest = tuple(e for e in every if e not in done and not any(v in views for v in e.outputs))

        def evaluate(times, slices, rows, rest=rest, section=section, views=views):
            here = {v: replace(i, data=x) for x, (v, i) in zip(slices, _pick(inputs, moving), strict=True)}
            own = {v: replace(x, data=narrowed(x.data, v.dtype)) for v, x in fixed.items()}
            seen = {
                e.outputs[0]: seen_by_block(run.env[e.source], x, e, band, section)
                for x, (e, band) in zip(rows, blocked.bands.items(), strict=True)
            }
            part = at(times, section, {**own, **views, **seen, **here})
            if last is not None:
                run_positions_last(last, series, part.env, times[0])

            def read(equation, env, t):
                access = equation.access
                if isinstance(access, Slice):
                    return reads.gather_slice(run.env[equation.source], equation, section, times, run.sizes)
                source, fill = run.source_of(equation, run.env), of_atom(equation.operands[0], env)
                source = expand(source, source.dims | {"t"}, run.sizes)
                return reads.read_window(source, access, fill, run.domain, run.domain.length, part.sizes, times)

            part.sequence(rest, part.env, part.times, read)
            found = [expand(part.env[v], run.program.dims_of(v) | {"t"}, part.sizes).data for v in blocked.outputs]
            return found + [part.env[v].data[None] for e in blocked.sums for v in e.outputs]

        slices = [inputs[v].data for v in moving]
        found.append(_map_blocks(evaluate, blocked.block, begin, end, slices, run.times.data, list(bands.values())))
    data = [_joined(list(parts)) for parts in zip(*found, strict=True)]
    for v, x in zip(blocked.outputs, data[: len(blocked.outputs)], strict=True):
        run.env[v] = Value(x, run.program.dims_of(v) | {"t"})
    for e, x in zip(blocked.sums, data[len(blocked.outputs) :], strict=True):
        whole = getattr(jnp, e.params["op"])(widened(x), axis=0)
        run.env[e.outputs[0]] = Value(narrowed(whole, x.dtype), run.program.dims_of(e.outputs[0]))


def _pick(inputs: Mapping[Var, Value], moving: Sequence[Var]) -> list[tuple[Var, Value]]:
    return [(v, inputs[v]) for v in moving]


def _map_blocks(fn: Any, block: int, begin: int, end: int, moving: Sequence, times: Any, bands: Sequence) -> list:
    """``fn(times, slices, rows)`` of consecutive timesteps, block by block; each is computed again for its derivative.

    ``bands``: what blocks see, of all blocks.
    """
    again = jax.checkpoint(fn, prevent_cse=False)
    whole, first = (end - begin) // block, begin // block
    outs: list[list] = []

    def cut(x: Any) -> Any:
        return x[begin : begin + whole * block].reshape(whole, block, *x.shape[1:])

    def one(low: int, high: int, number: int) -> Any:
        return jax.checkpoint(fn)(times[low:high], [x[low:high] for x in moving], [x[number] for x in bands])

    if whole > 1:
        rows = [x[first : first + whole] for x in bands]
        ys = jax.lax.map(lambda xs: again(*xs), (cut(times), [cut(x) for x in moving], rows))
        outs.append([y.reshape(-1, *y.shape[2:]) for y in ys])
    elif whole:
        outs.append(one(begin, begin + block, first))
    rest = begin + whole * block
    if rest < end:
        outs.append(one(rest, end, first + whole))
    return [_joined(list(ys)) for ys in zip(*outs, strict=True)]


def _joined(parts: list) -> Any:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
