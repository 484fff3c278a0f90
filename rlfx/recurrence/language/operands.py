"""What the functions of the language take: arrays, and pytrees of them."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import shown
from rlfx.errors import ProgramError, ProgramTypeError, RlfxError, located

tree = jax.tree_util


class NoArray:
    """Base of what stands for values at several timesteps, and is no array: what Python makes of arrays is refused.

    Attributes:
      name, because, fix: what it is called, why it is no array, and what to write, in the refusal.
    """

    name: ClassVar[str]
    because: ClassVar[str]
    fix: ClassVar[str]

    def refusal(self) -> ProgramTypeError:
        """The error of a use as an array."""
        return ProgramTypeError(
            located(f"A {self.name} is not an array: {self.because}.", where=J.here(), fix=self.fix)
        )

    def _refused(self, *_: Any) -> Any:
        raise self.refusal()

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, (int, float, complex, NoArray)) or hasattr(other, "__jax_array__") or hasattr(other, "dtype"):
            raise self.refusal()
        return NotImplemented

    __hash__ = object.__hash__

    def __setitem__(self, *_: Any) -> None:
        fact = f"A {self.name} cannot be written to: its value at a timestep is what the program gives there."
        fix = "Choose before it is named, rlfx.series(jnp.where(condition, new, value)), or keep what is written in the carry."
        raise ProgramTypeError(located(fact, where=J.here(), fix=fix))



_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "iter", "len", "bool")
for _op in (*_BINARY, *(f"r{op}" for op in _BINARY), *_UNARY):
    setattr(NoArray, f"__{_op}__", NoArray._refused)


def to_array(leaf: Any) -> Any:
    """``jnp.asarray``, which warns about some strings before it refuses them.

    Raises:
      TypeError, ValueError, OverflowError: for what is no array.
    """
    if isinstance(leaf, (str, bytes)):
        raise TypeError
    return jnp.asarray(leaf)


def as_array(leaf: Any, what: str) -> Any:
    """A leaf that ``what`` was given, as an array.

    Raises:
      ProgramTypeError: for a series.
      ProgramError: for what is no array.
    """
    if isinstance(leaf, NoArray):
        raise leaf.refusal()
    try:
        return to_array(leaf)
    except RlfxError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise _no_array(what, leaf) from None


def type_of(leaf: Any, what: str, where: str | None = None) -> Any:
    """Shape and dtype of a leaf that ``what`` was given, and whether they are those of a number of Python's.

    Raises: as :func:`as_array`.
    """
    if isinstance(leaf, NoArray):
        raise leaf.refusal()
    try:
        return jax.typeof(jnp.asarray(leaf) if hasattr(leaf, "__jax_array__") else leaf)
    except RlfxError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise _no_array(what, leaf, where) from None


def _no_array(what: str, leaf: Any, where: str | None = None) -> ProgramError:
    fact = f"{what} must be arrays, got {shown(leaf)}." if where else f"{what} takes arrays, got {shown(leaf)}."
    return ProgramError(located(fact, where=where or J.here(), fix="Give numbers, arrays, or a pytree of them."))


def same_type(value: Any, like: Any, what: str, other: str, fix: str, *, where: str, promoted: bool = False) -> None:
    """Check that two pytrees have the structure, shapes and dtypes of each other.

    Args:
      where: the user's line; inside of a branch or a loop there may be none any more.
      promoted: whether a number of Python's in ``like`` may become an array of another dtype, as in the carry of a scan.

    Raises:
      ProgramError: at the first difference.
    """
    structures = tree.tree_structure(value), tree.tree_structure(like)
    if structures[0] != structures[1]:
        fact = f"{what} has the structure {structures[0]}, {other} has {structures[1]}."
        raise ProgramError(located(fact, where=where, fix=fix))
    for (path, a), b in zip(tree.tree_flatten_with_path(value)[0], tree.tree_leaves(like), strict=True):
        at = tree.keystr(path)
        a, b = type_of(a, what + at, where), type_of(b, other + at, where)
        same_shape = len(a.shape) == len(b.shape) and all(map(J.equal_dims, a.shape, b.shape))
        if not same_shape or (a.dtype != b.dtype and not (promoted and b.weak_type)):
            types = [f"{J.short_dtype(x.dtype)}{list(x.shape)}" for x in (a, b)]
            fact = f"{what + at} is {types[0]}, {other + at} is {types[1]}."
            raise ProgramError(located(fact, where=where, fix=fix))


def as_key(key: Any) -> Any:
    """A typed key, or None; raw uint32 keys are wrapped.

    Raises:
      ProgramError: if it is no key, or several.
    """
    if key is None:
        return None
    try:
        key = key if isinstance(key, jax.ShapeDtypeStruct) else to_array(key)
    except (TypeError, ValueError, OverflowError):
        raise _no_key(shown(key)) from None
    if J.is_key(key):
        if key.shape == ():
            return key
        raise ProgramError(
            located(
                f"key has shape {list(key.shape)}; a program takes one key.",
                where=J.here(),
                fix="vmap over keys, or give key[0].",
            )
        )
    if key.dtype == jnp.uint32 and key.ndim == 1:
        wrap = jax.random.wrap_key_data
        with contextlib.suppress(TypeError, ValueError):  # not as many words as a key has
            return jax.eval_shape(wrap, key) if isinstance(key, jax.ShapeDtypeStruct) else wrap(key)
    raise _no_key(f"{J.short_dtype(key.dtype)}{list(key.shape)}")


def _no_key(what: str) -> ProgramError:
    fix = "Give jax.random.key(seed) (a raw uint32 key is accepted too)."
    return ProgramError(located(f"key is {what}, not a random key.", where=J.here(), fix=fix))


def mask_like(mask: Any, x: Any) -> Any:
    """A mask over leading axes, broadcastable to x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
