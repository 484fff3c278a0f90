"""What host environments say beside a step, as arrays of a structure that does not change."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlfx._checks import Kind
from rlfx.errors import EnvError, located

#: The dtypes of arrays without float64.
NARROW = {"float64": np.dtype("float32"), "int64": np.dtype("int32"), "uint64": np.dtype("uint32")}


def narrowed(dtype: Any) -> np.dtype:
    """The dtype that arrays of ``dtype`` have here."""
    return NARROW.get(np.dtype(dtype).name, np.dtype(dtype))


def numeric(info: dict[str, Any]) -> dict[str, Any]:
    """The entries that are numbers, or arrays or dicts of them; zeros of their shapes and dtypes."""
    kept = {}
    for name, value in info.items():
        if isinstance(value, dict):
            if inner := numeric(value):
                kept[name] = inner
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.asarray(value).dtype.kind in "biuf":
            kept[name] = np.zeros(np.shape(value), narrowed(np.asarray(value).dtype))
    return kept


def _declared(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict) or not all(isinstance(name, str) for name in info):
        raise TypeError
    return {name: _declared(value) if isinstance(value, dict) else _number(value) for name, value in info.items()}


def _number(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError
    return array.astype(narrowed(array.dtype))


#: Each entry's value where a step has none, and so its shape and dtype.
INFO = Kind("a dict, by name, of numbers, arrays and such dicts", "{'lives': 0}", _declared)


def read(of: str, like: dict[str, Any], info: dict[str, Any], *, default: bool) -> dict[str, Any]:
    """The entries of ``like`` in the ``info`` of a step; with ``default``, ``like``'s own where it has none.

    Raises:
      EnvError: an entry is missing without a default, or has another shape or a wider kind of dtype.
    """

    def entry(path: Any, expected: np.ndarray) -> np.ndarray:
        value, where = info, "".join(f"[{key.key!r}]" for key in path)
        for key in path:
            if not isinstance(value, dict) or key.key not in value:
                if default:
                    return expected
                fact = f"{of}: a step has no info{where}, and the first one had."
                raise EnvError(
                    located(fact, fix="Say what it is then: make(..., info={name: value}). info={} keeps nothing.")
                )
            value = value[key.key]
        array = np.asarray(value)
        if array.shape != expected.shape or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
            found = f"{array.dtype}{list(array.shape)}"
            fact = f"{of}: info{where} of a step is {found}, and {expected.dtype}{list(expected.shape)} was expected."
            raise EnvError(located(fact, fix="Give an example of it, or leave it out: make(..., info={name: value})."))
        return array.astype(expected.dtype)

    return jax.tree_util.tree_map_with_path(entry, like)
