"""Products with windows, as products of blocks of timesteps with all rows that they see (``schedule/window_products.py``).

A timestep multiplies rows that it does not see by zero, and takes no product with them. Infinite ones would not be nothing then,
nor in the way back: rows that are not finite are left out, and what sees one is not a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.bands import blocks_of, rows_between
from rlfx.recurrence.execute.values import Value, Values, expand, map_over, scope_of
from rlfx.recurrence.schedule.bands import Band
from rlfx.recurrence.schedule.window_products import WindowProduct


def run_window_product(part: WindowProduct, env: Values, sizes: Mapping[str, int]) -> None:
    """Add the product at all timesteps to ``env``, which knows the series that the window is of."""
    read, other = (env[v] for v in (part.read.source, part.equation.inputs[1 - part.side]))
    operands = [expand(x, x.dims | {"t"}, sizes) for x in (read, other)]
    over = frozenset().union(*(x.dims for x in operands)) - {"t"}  # environments, if any
    with scope_of(part.equation):
        run = map_over(lambda x, other: _of_all(part, x, other), over, [x.dims - {"t"} for x in operands])
        data = run(*(jnp.moveaxis(x.data, 1, 0) if "b" in x.dims else x.data for x in operands))
        env[part.equation.outputs[0]] = Value(jnp.moveaxis(data, 0, 1) if "b" in over else data, over | {"t"})


def _of_all(part: WindowProduct, x: Any, other: Any) -> Any:
    """The product at all timesteps, ``[T, ...]``, of one environment."""
    access, band, length = part.read.access, part.band, len(x)

    def of_block(seen: Any, lost: Any, others: Any) -> Any:
        """``[block, ...]``, of the rows that it sees, of which some are lost."""

        def product(other: Any) -> Any:
            turned = jnp.transpose(seen, part.order)
            operands = (turned, other) if part.side == 0 else (other, turned)
            return J.bind(part.equation.op, dict(part.equation.params), *operands)[0]

        if part.adds:
            return jax.vmap(product)(_slanted(others, 1 + part.along, band.width))
        out = jax.vmap(product)(others)
        out = out + _along(lost, 1 + part.along, out)
        return _straight(out, 1 + part.along, access.hi - access.lo)

    lost = _lost(x)
    whole = jnp.where(jnp.isnan(_along(lost, 0, x)), jnp.zeros_like(x), x)
    seen, others = blocks_of(whole, band, part.fill), blocks_of(other, Band(0, band.block, band.block))
    out = jax.vmap(of_block)(seen, blocks_of(lost, band), others)
    out = out.reshape(-1, *out.shape[2:])[:length]
    return out + _along(_in_windows(lost, access.lo, access.hi), 0, out) if part.adds else out


def _lost(x: Any) -> Any:
    """Of ``x[T, ...]``, zero for each row of finite numbers, and otherwise not a number."""
    zeros = jax.lax.optimization_barrier(np.zeros(x[0].size, x.dtype))  # not known to be: a product with zeros would be zeros
    return jax.lax.stop_gradient(x.reshape(len(x), -1) @ zeros)


def _in_windows(x: Any, lo: int, hi: int) -> Any:
    """Sums of ``x[T]`` over what each timestep sees."""
    around = rows_between(x, lo, len(x) - 1 + hi)
    return jax.lax.reduce_window(around, np.zeros((), x.dtype), jax.lax.add, (hi - lo,), (1,), "valid")


def _along(x: Any, axis: int, like: Any) -> Any:
    """``x[n]`` as it lies along one axis of another array."""
    return x.astype(like.dtype).reshape([-1 if a == axis else 1 for a in range(like.ndim)])


def _straight(x: Any, axis: int, width: int) -> Any:
    """``[block, ..., rows, ...]`` to ``[block, ..., width, ...]``: of row q the columns from q on."""
    moved = jnp.moveaxis(x, (0, axis), (-2, -1))
    *rest, block, rows = moved.shape
    flat = jnp.pad(moved.reshape(*rest, block * rows), (*((0, 0) for _ in rest), (0, block)))
    return jnp.moveaxis(flat.reshape(*rest, block, rows + 1)[..., :width], (-2, -1), (0, axis))


def _slanted(x: Any, axis: int, rows: int) -> Any:
    """``[block, ..., width, ...]`` to ``[block, ..., rows, ...]``: row q begins at column q; zeros beside."""
    moved = jnp.moveaxis(x, (0, axis), (-2, -1))
    *rest, block, width = moved.shape
    wide = jnp.pad(moved, (*((0, 0) for _ in rest), (0, 0), (0, rows + 1 - width)))
    flat = wide.reshape(*rest, block * (rows + 1))[..., : block * rows]
    return jnp.moveaxis(flat.reshape(*rest, block, rows), (-2, -1), (0, axis))
