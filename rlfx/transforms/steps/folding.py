"""What is known at trace time, computed with numpy: XLA would compile a program for every operation and shape.

Only what numpy computes to the same bits: moves of numbers, and arithmetic on integers. The rest is XLA's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J


def fold(op: Any, params: dict, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of an equation whose inputs are all known.

    Example:
      >>> fold(J.primitive("add"), {}, [np.uint32([2**32 - 1]), np.uint32([2])])
      [array([1], dtype=uint32)]
    """
    rule = MOVES.get(op)
    if rule is not None:
        return rule(params, *args)
    if op in WHOLE and all(x.dtype.kind in "iu" and x.dtype == args[0].dtype for x in args):
        with np.errstate(over="ignore"):  # they wrap around, as XLA's do
            return [np.asarray(WHOLE[op](*args))]
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in J.bind(op, params, *map(jnp.asarray, args))]


def _broadcast(params: dict, x: np.ndarray) -> list:
    shape, axes = tuple(params["shape"]), params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for axis, n in zip(axes, np.shape(x), strict=True):
        sizes[axis] = n
    return [np.broadcast_to(np.reshape(x, sizes), shape)]


def _counted(params: dict) -> list:
    shape, axis = tuple(params["shape"]), params["dimension"]
    numbers = np.arange(shape[axis], dtype=params["dtype"])
    return _broadcast({"shape": shape, "broadcast_dimensions": (axis,)}, numbers)


def _slice(params: dict, x: np.ndarray) -> list:
    steps = params["strides"] or (1,) * x.ndim
    return [x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]]


def _split(params: dict, x: np.ndarray) -> list:
    return list(np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]))


MOVES: dict[Any, Callable[..., list]] = {
    J.primitive("broadcast_in_dim"): _broadcast,
    J.primitive("concatenate"): lambda params, *xs: [np.concatenate(xs, params["dimension"])],
    J.primitive("iota"): _counted,
    J.primitive("reshape"): lambda params, x: [np.reshape(x, params["new_sizes"])],
    J.primitive("rev"): lambda params, x: [np.flip(x, params["dimensions"])],
    J.primitive("slice"): _slice,
    J.SPLIT: _split,
    J.primitive("squeeze"): lambda params, x: [np.squeeze(x, tuple(params["dimensions"]))],
    J.primitive("transpose"): lambda params, x: [np.transpose(x, params["permutation"])],
}

WHOLE: dict[Any, Callable[..., Any]] = {
    J.primitive("add"): np.add,
    J.primitive("and"): np.bitwise_and,
    J.primitive("mul"): np.multiply,
    J.primitive("or"): np.bitwise_or,
    J.primitive("sub"): np.subtract,
    J.primitive("xor"): np.bitwise_xor,
}
