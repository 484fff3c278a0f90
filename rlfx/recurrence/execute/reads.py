"""How a read gets its values: from arrays of all timesteps, or from the registers and rings of a running loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.values import NOTHING, OTHERS, Value, axis_of, expand
from rlfx.recurrence.ir.program import NO_DIMS, Equation
from rlfx.recurrence.language.domain import Domain, widest
from rlfx.recurrence.language.index import TIME, Index, Slice, Window
from rlfx.recurrence.language.lookups import filled
from rlfx.recurrence.language.operands import mask_like


def choose(mask: Value, yes: Value, no: Value, sizes: Mapping[str, int]) -> Value:
    """``where(mask, yes, no)`` of values with their own dims."""
    dims = mask.dims | yes.dims | no.dims
    m, y, n = (expand(v, dims, sizes).data for v in (mask, yes, no))
    return Value(jnp.where(mask_like(m, n), y, n), dims)


def beyond(index: Any, dims: frozenset, n: Any, sizes: Mapping[str, int]) -> Value | None:
    """Where an index is at or after the end; None if it never is."""
    if not isinstance(n, Value):
        mask = index >= n
        known = isinstance(mask, np.ndarray | np.bool_)
        return None if known and not np.any(mask) else Value(jnp.asarray(mask), dims)
    both = dims | n.dims
    i = expand(Value(jnp.asarray(index, n.data.dtype), dims), both, sizes).data
    return Value(i >= expand(n, both, sizes).data, both)


def earlier(t: Value, n: Value, sizes: Mapping[str, int]) -> Value:
    """``min(t, n - 1)``."""
    dims = t.dims | n.dims
    return Value(jnp.minimum(expand(t, dims, sizes).data, expand(n, dims, sizes).data - 1), dims)


def within(t: Value, n: Value, sizes: Mapping[str, int]) -> Value:
    """``t`` before the end, and 0 from there on."""
    dims = t.dims | n.dims
    i = expand(t, dims, sizes).data
    return Value(jnp.where(i < expand(n, dims, sizes).data, i, 0), dims)


# -- reads of complete series ----------------------------------------------------------------------------------------


def read_point(
    source: Value, index: Index, domain: Domain, n: Any, start: Callable[[], Value], end: Callable[[], Value], sizes
) -> Value:
    """``x[index]`` at all readers. ``start`` and ``end`` give the boundary values where they are needed."""
    moving = index.depends_on_time
    positions = domain.evaluate(index) if moving else np.asarray(domain.evaluate(index, np.int32(0)))
    dims = frozenset("t") if moving else NO_DIMS
    shift = index.offset
    if shift is not None and shift and "t" in source.dims and not isinstance(n, Value) and abs(shift) < domain.length:
        edge = start() if shift < 0 else end()
        edge = expand(edge, source.dims - {"t"}, sizes)
        wide = expand(Value(source.data, source.dims), edge.dims | {"t"}, sizes)
        pad = jnp.broadcast_to(edge.data[None], (abs(shift),) + wide.data.shape[1:])
        parts = [pad, wide.data[:shift]] if shift < 0 else [wide.data[shift:], pad]
        return Value(jnp.concatenate(parts), wide.dims)
    value = source
    if "t" in source.dims:
        taken = jnp.take(source.data, np.clip(positions, 0, domain.length - 1), axis=0)
        value = Value(taken, (source.dims - {"t"}) | dims)
    elif moving and ((positions < 0).any() or (positions >= domain.length).any() or isinstance(n, Value)):
        value = expand(source, source.dims | {"t"}, sizes)
    if (positions < 0).any():
        value = choose(Value(jnp.asarray(positions < 0), dims), start(), value, sizes)
    late = beyond(positions, dims, n, sizes)
    return value if late is None else choose(late, end(), value, sizes)


def read_slice(source: Value, equation: Equation, domain: Domain, sizes) -> Value:
    """``x[lo:hi]`` at all readers: a view of the shared array where that is possible, else gathered windows."""
    view = view_slice(source, equation, domain, sizes)
    return gather_slice(source, equation, domain, domain.times(), sizes) if view is None else view


def view_slice(source: Value, equation: Equation, domain: Domain, sizes) -> Value | None:
    """The part of the shared array that all readers see; None where each sees less than half of it."""
    access, size = equation.access, equation.params["size"]
    lo, stop = (np.clip(domain.evaluate(e), 0, domain.length) for e in (access.first, access.stop))
    first = min(int(lo.min()), domain.length - 1)
    width = max(int(stop.max()) - first, 0 if size == 0 else 1)
    if (lo != lo[0]).any() and (not J.is_symbolic(size) or width > 2 * widest(domain, size)):
        return None
    data = expand(source, source.dims | {"t"}, sizes).data
    if not J.is_symbolic(size):
        first, width = int(lo[0]), int(size)
    data = _behind_b(data[first : first + width], source.dims)
    return _slice_value(data, source.dims - {"t"}, access, size, domain, width, first)


def gather_slice(source: Value, equation: Equation, domain: Domain, times: Any, sizes) -> Value:
    """The slice of each reader: [n, B?, W, ...] for readers at ``times``."""
    access, size = equation.access, equation.params["size"]
    source = expand(source, source.dims | {"t"}, sizes)
    width = widest(domain, size)
    lo = access.first.evaluate(times, domain.length, low=jnp.minimum, high=jnp.maximum)
    base = jnp.clip(jnp.broadcast_to(jnp.asarray(lo, jnp.int32), np.shape(times)), 0, domain.length - width)
    data = jnp.take(source.data, base[:, None] + np.arange(width, dtype=np.int32)[None], axis=0)  # [n, W, B?, ...]
    data = jnp.moveaxis(data, 1, 2) if "b" in source.dims else data
    return _slice_value(data, source.dims, access, size, domain, width, None)


def windows_of(rows: Any, dims: frozenset, equation: Equation, domain: Domain, first: Index) -> Value:
    """The slices of several readers in an array of the rows from ``first`` on, which depends on t: [W, B?, ...]."""
    size = equation.params["size"]
    return _slice_value(_behind_b(rows, dims), dims, equation.access, size, domain, len(rows), first)


def _slice_value(
    data: Any,
    dims: frozenset,
    access: Slice,
    size: Any,
    domain: Domain,
    width: int,
    first: Index | int | None,
    raw: int = OTHERS,
) -> Value:
    """The slice that an array stands for, of ``width`` positions from ``first`` on, or from each reader's own."""
    if not J.is_symbolic(size):
        return Value(data, dims)
    tau, nu = J.time_dims(domain.length, domain.until)
    lo = access.first.as_dim(tau, nu)
    if first is None:
        start = lo - J.maximum_dim(J.minimum_dim(lo, domain.length - width), 0)
    else:
        start = lo - (first.as_dim(tau, nu) if isinstance(first, Index) else first)
    others = data.ndim - len(dims) - 1
    return Value(data, dims, (start,) + (None,) * others, clean=False, raw=raw)


def _behind_b(data: Any, dims: frozenset) -> Any:
    """[W, B, ...] to [B, W, ...]: the axis of a slice belongs to the value at one point."""
    return jnp.moveaxis(data, 0, 1) if "b" in dims else data


def read_window(source: Value, access: Window, fill: Value, domain: Domain, n: Any, sizes, times: Any = None) -> Value:
    """``x.window(lo, hi, fill=v)`` at readers at some ``times``, all by default."""
    source = expand(source, source.dims | {"t"}, sizes)
    offsets = np.arange(access.lo, access.hi, dtype=np.int32)
    positions = (domain.times() if times is None else times)[:, None] + offsets[None]
    data = jnp.take(source.data, (np if times is None else jnp).clip(positions, 0, domain.length - 1), axis=0)
    data = jnp.moveaxis(data, 1, 2) if "b" in source.dims else data
    return _filled(Value(data, source.dims), jnp.asarray(positions), frozenset("t"), fill, domain, n, sizes)


def _filled(value: Value, positions: Any, dims: frozenset, fill: Value, domain: Domain, n: Any, sizes) -> Value:
    """A window with ``fill`` at positions outside of the domain. ``positions``: [t?, W]."""
    limit = n if isinstance(n, Value) else Value(jnp.int32(domain.length))
    all_dims = value.dims | fill.dims | dims | limit.dims
    at = expand(Value(positions, dims), all_dims, sizes).data  # [t?, b?, W]
    stop = expand(limit, all_dims, sizes).data[..., None]
    inside = (at >= 0) & (at < stop)
    wide, pad = expand(value, all_dims, sizes).data, expand(fill, all_dims, sizes).data
    pad = jnp.expand_dims(pad, inside.ndim - 1)
    return Value(jnp.where(mask_like(inside, wide), wide, pad), all_dims)


def lookup(
    source: Value,
    equation: Equation,
    operands: list[Value],
    t: Value,
    t0: Any,
    domain: Domain,
    sizes,
    depth: int | None = None,
) -> Value:
    """``x[i]``, ``x[i, b]`` with absolute times i: what has happened, and outside of it as the access says.

    ``depth``: of the ring that the source is; None: it has all timesteps.
    """
    if "t" not in source.dims:
        source = expand(source, source.dims | {"t"}, sizes)
    access = equation.access
    across = access.across_batch and "b" in source.dims
    own = source.dims - {"t"} - ({"b"} if across else set())
    b_axis = axis_of(source.dims, "b")

    def at(x, steps, i, *b):
        now = t0 + steps
        oldest = t0 if access.back is None else jnp.maximum(now - np.int32(access.back - 1), t0)
        row = jnp.clip(i, oldest, now) - t0  # in this order: i - t0 may be no int32
        row = row if depth is None else ring_slot(row, depth, domain.length)
        found = x[row, jnp.clip(b[0], 0, x.shape[1] - 1)] if across else x[row]
        if access.outside == "clip":
            return found
        inside = (i >= oldest) & (i <= now)
        return filled(inside & (b[0] >= 0) & (b[0] < (domain.batch or 1)) if b else inside, found)

    dims = own | t.dims | frozenset().union(*(v.dims for v in operands))
    fn = at
    for axis in ("b", "t"):
        if axis in dims:
            axes = [b_axis if axis == "b" and not across and "b" in source.dims else None]
            axes += [0 if axis in v.dims else None for v in (t, *operands)]
            fn = jax.vmap(fn, in_axes=tuple(axes))
    return Value(fn(source.data, t.data, *(v.data for v in operands)), dims)


# -- reads inside a running loop -------------------------------------------------------------------------------------


def ring_slot(t: Any, depth: int, length: int) -> Any:
    """Where iteration t is kept in a ring."""
    return t if depth >= length else t % depth


def read_ring_point(ring: Value, depth: int, index: Index, domain: Domain, t: Any) -> tuple[Value, Any]:
    """One earlier iteration, and its (unclipped) index. ``ring.data`` is [K, b?, ...]."""
    position = jnp.asarray(index.evaluate(t, domain.length, low=jnp.minimum, high=jnp.maximum), jnp.int32)
    slot = ring_slot(jnp.clip(position, 0, domain.length - 1), depth, domain.length)
    return Value(jax.lax.dynamic_index_in_dim(ring.data, slot, 0, keepdims=False), ring.dims), position


def read_ring_slice(ring: Value, depth: int, access: Slice, size: Any, domain: Domain, t: Any) -> Value:
    """The slice that iteration t sees, from a ring."""
    width = widest(domain, size)
    lo = access.first.evaluate(t, domain.length, low=jnp.minimum, high=jnp.maximum)
    if depth >= domain.length and width >= domain.length:
        data, first = ring.data, 0
    else:
        base = jnp.clip(jnp.asarray(lo, jnp.int32), 0, max(domain.length - width, 0))
        slots = ring_slot(base + np.arange(width, dtype=np.int32), depth, domain.length)
        data, first = jnp.take(ring.data, slots, axis=0), None
    data = _behind_b(data, ring.dims)
    # A loop over one's own past has written what is valid, and nothing else.
    own = access.first == Index() and access.stop == TIME + 1 and first == 0 and not domain.until
    return _slice_value(data, ring.dims, access, size, domain, width, first, NOTHING if own else OTHERS)


def read_ring_window(
    ring: Value, depth: int, access: Window, fill: Value, domain: Domain, t: Any, n: Any, sizes
) -> Value:
    """The window that iteration t sees, from a ring."""
    positions = t + np.arange(access.lo, access.hi, dtype=np.int32)
    slots = ring_slot(jnp.clip(positions, 0, domain.length - 1), depth, domain.length)
    data = _behind_b(jnp.take(ring.data, slots, axis=0), ring.dims)
    return _filled(Value(data, ring.dims), positions, NO_DIMS, fill, domain, n, sizes)
