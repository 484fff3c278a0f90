"""Gathers, scatters and dynamic slices of a scalar program: selections among elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.scalarize import Interpreter, array_of, boxed, tidy


def _clamped(ip: Interpreter, start: Any, high: int) -> Any:
    if isinstance(start, np.generic):
        return np.int32(min(max(int(start), 0), high))
    if np.issubdtype(start.dtype, np.unsignedinteger) or start.dtype == bool:
        start = ip.apply(lambda s: s.astype(jnp.int32), start)
    return ip.apply(lambda s: jnp.clip(s, 0, high).astype(jnp.int32), start)


def _window(ip: Interpreter, x: np.ndarray, starts: list, sizes: tuple) -> np.ndarray:
    """``x[start:start + size]`` in each dimension, for starts within bounds, one dimension after the other."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        places = x.shape[axis] - size + 1
        options = [np.take(x, range(s, s + size), axis) for s in range(places)]
        if isinstance(start, np.generic) or places == 1:
            x = options[int(start) if places > 1 else 0]
            continue
        chosen = options[-1]
        for s in reversed(range(places - 1)):
            here = ip.equals(start, s)
            flat = [ip.select(here, a, b) for a, b in zip(options[s].reshape(-1), chosen.reshape(-1), strict=True)]
            chosen = array_of(flat, chosen.shape)
        x = chosen
    return x


def dynamic_slice(ip: Interpreter, eqn: Any, args: list) -> list:
    x, starts = ip.elements(args[0]), [ip.elements(s)[()] for s in args[1:]]
    sizes = eqn.params["slice_sizes"]
    starts = [_clamped(ip, s, d - n) for s, d, n in zip(starts, x.shape, sizes, strict=True)]
    return [tidy(_window(ip, x, starts, sizes), eqn.outvars[0].aval)]


def dynamic_update_slice(ip: Interpreter, eqn: Any, args: list) -> list:
    x, update = ip.elements(args[0]), ip.elements(args[1])
    starts = [_clamped(ip, ip.elements(s)[()], d - n) for s, d, n in zip(args[2:], x.shape, update.shape, strict=True)]
    return [tidy(_write(ip, x, update, starts, lambda old, new: new), eqn.outvars[0].aval)]


def _write(ip: Interpreter, x: np.ndarray, update: np.ndarray, starts: list, combine: Any) -> np.ndarray:
    """``x`` with ``update`` combined in at ``starts``; a window that sticks out anywhere is dropped."""
    out = boxed(x)
    for offset in np.ndindex(*update.shape):
        for at in np.ndindex(*x.shape):
            first = [p - o for p, o in zip(at, offset, strict=True)]
            fits = all(0 <= s <= d - n for s, d, n in zip(first, x.shape, update.shape, strict=True))
            here = ip.logical_and([ip.equals(s, p) for s, p in zip(starts, first, strict=True)]) if fits else None
            if here is None or (isinstance(here, np.generic) and not here):
                continue
            new = update[offset]
            mixed = new if isinstance(new, tuple) else ip.apply(combine, out[at], new)
            out[at] = ip.select(here, mixed, out[at])
    return out


def gather(ip: Interpreter, eqn: Any, args: list) -> list:
    """One dynamic slice for each index vector; where the mode says so, a fill value outside."""
    d, sizes, mode = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.params["mode"]
    x, indices, aval = ip.elements(args[0]), ip.elements(args[1]), eqn.outvars[0].aval
    out = np.empty(aval.shape, object)
    batch_axes = [a for a in range(len(aval.shape)) if a not in d.offset_dims]
    for where in np.ndindex(*indices.shape[:-1]):
        starts = _full_starts(
            x.ndim, indices[where], where, d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
        )
        inside = [_clamped(ip, s, n - k) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
        window = _window(ip, x, inside, sizes)
        window = window.reshape(
            [k for a, k in enumerate(sizes) if a not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
        )
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            window = _filled(ip, eqn, window, starts, [n - k for n, k in zip(x.shape, sizes, strict=True)])
        at: list = [slice(None)] * out.ndim
        for axis, i in zip(batch_axes, where, strict=True):
            at[axis] = i
        out[tuple(at)] = window if window.ndim else window[()]
    return [tidy(out, aval)]


def _full_starts(rank: int, vector: np.ndarray, where: tuple, index_map: tuple, batching: tuple, sources: tuple):
    starts: list = [np.int32(0)] * rank
    for axis, start in zip(index_map, vector, strict=True):
        starts[axis] = start
    for axis, source in zip(batching, sources, strict=True):
        starts[axis] = np.int32(where[source])
    return starts


def _filled(ip: Interpreter, eqn: Any, window: np.ndarray, starts: list, highs: list) -> np.ndarray:
    if J.is_key(eqn.outvars[0].aval):
        return window
    dtype = eqn.outvars[0].aval.dtype
    fill = eqn.params["fill_value"]
    fill = _default_fill(dtype) if fill is None else fill
    valid = ip.logical_and(
        [ip.apply(lambda s, high=high: (s >= 0) & (s <= high), s) for s, high in zip(starts, highs, strict=True)]
    )
    return array_of([ip.select(valid, e, np.asarray(fill, dtype)[()]) for e in window.reshape(-1)], window.shape)


def _default_fill(dtype: Any) -> Any:
    kinds = {"f": np.nan, "c": np.nan, "b": True}
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min
    return kinds.get(dtype.kind, np.nan)


def scatter(ip: Interpreter, eqn: Any, args: list) -> list:
    d, mode, combine = eqn.params["dimension_numbers"], eqn.params["mode"], _WRITES[eqn.primitive.name]
    x, indices, updates = (ip.elements(a) for a in args)
    inserted = (*d.inserted_window_dims, *d.operand_batching_dims)
    scatter_axes = [a for a in range(updates.ndim) if a not in d.update_window_dims]
    for where in np.ndindex(*indices.shape[:-1]):
        at: list = [slice(None)] * updates.ndim
        for axis, i in zip(scatter_axes, where, strict=True):
            at[axis] = i
        window = np.asarray(updates[tuple(at)], object) if updates.ndim > len(where) else array_of([updates[where]], ())
        window = np.expand_dims(window, inserted) if inserted else window
        starts = _full_starts(
            x.ndim,
            indices[where],
            where,
            d.scatter_dims_to_operand_dims,
            d.operand_batching_dims,
            d.scatter_indices_batching_dims,
        )
        if mode == jax.lax.GatherScatterMode.CLIP:
            starts = [_clamped(ip, s, n - k) for s, n, k in zip(starts, x.shape, window.shape, strict=True)]
        x = _write(ip, x, window, starts, combine)
    return [tidy(x, eqn.outvars[0].aval)]


#: How what is written is combined with what is there; jax spells the names in both ways.
_WRITES = {
    "scatter": lambda old, new: new,
    **{f"scatter{dash}{op}": getattr(jax.lax, op) for dash in "-_" for op in ("add", "mul", "max", "min")},
}

#: As :data:`rlfx.transforms.steps.rules.RULES`.
INDEXING_RULES: dict[Any, Any] = {
    **dict.fromkeys(F.named("scatter", "scatter_add", "scatter_mul", "scatter_max", "scatter_min"), scatter),
    J.primitive("dynamic_slice"): dynamic_slice,
    J.primitive("dynamic_update_slice"): dynamic_update_slice,
    J.primitive("gather"): gather,
}
