"""Checks of what a compiled program is called with: every error names the argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ProgramError, located
from rlfx.prng import seeded
from rlfx.recurrence.domain import Domain
from rlfx.recurrence.time import as_integer
from rlfx.recurrence.trace import unwrap_shared

tree = jax.tree_util


@dataclass(frozen=True)
class Arguments:
    """Flat, checked arguments.

    Attributes:
      point_avals: shapes and dtypes at one point of the domain: params, then carry without its [B] axis.
      signature: hashable; two calls with the same signature trace the same program.
    """

    params: list
    carry: list
    key: Any
    point_avals: list
    key_aval: Any
    signature: tuple


def validate_domain(length: Any, batch: Any, until: Callable | None) -> Domain:
    """The domain of a program, or a DomainError that names the argument."""
    length = validate_length(length)
    if until is not None and not callable(until):
        raise DomainError(
            located(f"until must be a function of the carry, got {until!r}.", fix="Give until=lambda c: ...")
        )
    return Domain(length, None if batch is None else validate_length(batch, "batch"), until is not None)


def validate_prng(prng: Any) -> Any:
    """A generator that ``jax.random.key(seed, impl=prng)`` takes, or None; or a ProgramError that names the argument."""
    if prng is not None:
        try:
            jax.eval_shape(lambda: jax.random.key(0, impl=prng))
        except (TypeError, ValueError) as error:
            fix = "Give rlfx.envs.fast_prng, a name such as 'threefry2x32', or None for that of the key."
            raise ProgramError(located(f"prng={prng!r} is no random number generator.", fix=fix)) from error
    return prng


def check_arguments(params: Any, carry: Any, key: Any, domain: Domain, prng: Any = None) -> Arguments:
    """Flatten and check the arguments of a compiled program; its key is one of ``prng``, seeded by the one given.

    Raises:
      ProgramError: for a leaf that is no array, a carry leaf without its [B] axis, or an unusable key.
    """
    bare, shared = unwrap_shared(carry)
    flat_params = [_array(leaf, f"params{tree.keystr(path)}") for path, leaf in tree.tree_flatten_with_path(params)[0]]
    flat_carry, avals = [], [_struct(x, x.shape) for x in flat_params]
    for (path, leaf), is_shared in zip(tree.tree_flatten_with_path(bare)[0], shared, strict=True):
        name = f"carry{tree.keystr(path)}"
        leaf = _array(leaf, name)
        shape = leaf.shape
        if domain.batch is not None and not is_shared:
            if shape[:1] != (domain.batch,):
                raise ProgramError(
                    located(
                        f"{name} has shape {list(shape)}; every leaf of the carry needs a leading axis of batch="
                        f"{domain.batch} environments.",
                        fix="Give the carry of all environments (jax.vmap(env.reset)(keys)), or wrap what they all share "
                        "in rlfx.Shared(...).",
                    )
                )
            shape = shape[1:]
        flat_carry.append(leaf)
        avals.append(_struct(leaf, shape))
    key = _seeded(_key(key), prng)
    key_aval = None if key is None else jax.ShapeDtypeStruct((), key.dtype)
    signature = (
        tree.tree_structure(params),
        tree.tree_structure(carry),
        tuple((a.shape, a.dtype) for a in avals),
        None if key is None else key.dtype,
    )
    return Arguments(flat_params, flat_carry, key, avals, key_aval, signature)


def _array(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise ProgramError(
            located(
                f"{name} is {type(leaf).__name__} ({leaf!r}), not an array.",
                fix="Keep what is no array out of the arguments: close over it, or make it a static field of the pytree.",
            )
        ) from None


def _struct(leaf: Any, shape: tuple) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _seeded(key: Any, prng: Any) -> Any:
    if key is None or prng is None:
        return key
    make = functools.partial(seeded, impl=prng)
    return jax.eval_shape(make, key) if isinstance(key, jax.ShapeDtypeStruct) else make(key)


def _key(key: Any) -> Any:
    """A typed key; raw uint32 keys are wrapped."""
    if key is None:
        return None
    key = _array(key, "key")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return key
        raise ProgramError(
            located(f"key has shape {list(key.shape)}; a program takes one key.", fix="vmap over keys, or give key[0].")
        )
    if key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    raise ProgramError(
        located(
            f"key is {J.short_dtype(key.dtype)}{list(key.shape)}, not a random key.",
            fix="Give jax.random.key(seed) (a raw uint32 key is accepted too).",
        )
    )


def validate_length(length: Any, name: str = "length") -> int:
    """A positive Python integer, or a DomainError that names the argument."""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise DomainError(located(f"{name} must be an integer, got {length!r}.", fix=f"Give {name}=T, an int >= 1."))
    if length < 1:
        raise DomainError(located(f"{name} must be at least 1, got {length}.", fix=f"Give {name} >= 1."))
    return int(length)


def validate_t0(t0: Any, length: int = 1) -> Any:
    """The absolute time of the first timestep: an integer, or a traced scalar int32.

    Raises:
      DomainError: if it is no integer scalar, or a time of the program is no int32.
    """
    fix = "Give t0=n, an integer: how many timesteps were before."
    number = None if isinstance(t0, jax.Array) else as_integer(t0)  # an array on a device isn't waited for
    if number is not None:
        if not -(2**31) <= number < 2**31 - length:
            raise DomainError(located(f"t0={number} and {length} timesteps are more than an int32 counts.", fix=fix))
        return number
    shape, dtype = getattr(t0, "shape", None), getattr(t0, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        shown = f"{J.short_dtype(dtype)}{list(shape)}" if shape is not None and dtype is not None else repr(t0)
        raise DomainError(located(f"t0 is the time of the first timestep, an integer; it is {shown}.", fix=fix))
    return jnp.asarray(t0).astype(jnp.int32)
