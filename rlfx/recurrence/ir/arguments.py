"""Checks of what a compiled program is called with: every error names the argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import INT32, POSITIVE, expect, function, optional, shown
from rlfx.errors import DomainError, ProgramError, located
from rlfx.prng import seeded
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.trace import unwrap_shared
from rlfx.recurrence.language.context import told_together
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.names import told, validate_names
from rlfx.recurrence.language.operands import as_key, to_array
from rlfx.recurrence.language.time import Time, as_integer, without_time

tree = jax.tree_util


@dataclass(frozen=True)
class Arguments:
    """Flat, checked arguments.

    Attributes:
      point_avals: shapes and dtypes at one point of the domain: params, then carry without its [B] axis.
      signature: hashable; two calls with the same signature trace the same program.
      keeping: which outputs are a part of the carry, or None.
    """

    params: list
    carry: list
    key: Any
    point_avals: list
    key_aval: Any
    signature: tuple
    keeping: Any = None


PROGRAM = function("params", "carry", "t")
_TARGET = replace(PROGRAM, words=f"a program, or {PROGRAM.words}")


def validate_domain(length: Any, batch: Any, until: Any, dim: Any = "t") -> Domain:
    """The domain of a program, or a DomainError that names the argument."""
    names, batch = validate_names(dim, batch)
    if isinstance(length, (Time, J.Tracer)):
        fact = "length= is computed, so it is known only when the program runs; a program is scheduled for one length."
        fix = "Give the longest that there is, an int, and let until= end what is shorter."
        raise told(DomainError(located(fact, where=J.here(), fix=fix)))
    length = expect("length", length, POSITIVE, fix="Give length=T, the number of timesteps, an int >= 1.")
    batch = expect("batch", batch, optional(POSITIVE), fix="Give batch=B, the number of environments, an int >= 1.")
    expect("until", until, optional(function("carry")))
    return Domain(length, batch, until is not None, names=names)


def validate_program(f: Any) -> Callable:
    """A per-timestep function, or a ProgramError."""
    fix = "Give a function of one timestep: def f(params, carry, t): ..."
    return expect("A program", f, PROGRAM, ProgramError, fix=fix)


def check_fit(program: Program, arguments: Arguments, params: Any, carry: Any) -> None:
    """Check that arguments are those that a program was traced for.

    Raises:
      ProgramError: with the first leaf that has another shape or dtype, or the structures.
    """
    given = {"params": params, "carry": unwrap_shared(carry)[0]}
    for name, value in given.items():
        found = tree.tree_structure(value)
        if found != program.trees[name]:
            fact = f"{name} has the structure {found}; {program.name} was traced with {program.trees[name]}."
            raise ProgramError(located(fact, where=program.where, fix=_LIKE_TRACE))
    names = [f"{name}{tree.keystr(path)}" for name in given for path, _ in tree.tree_flatten_with_path(given[name])[0]]
    for name, aval, var in zip(names, arguments.point_avals, (*program.params, *program.carry), strict=True):
        if (aval.shape, aval.dtype) != (var.shape, var.dtype):
            types = [f"{J.short_dtype(x.dtype)}{list(x.shape)}" for x in (aval, var)]
            fact = f"{name} is {types[0]}; {program.name} was traced with {types[1]}."
            raise ProgramError(located(fact, where=program.where, fix=_LIKE_TRACE))


_LIKE_TRACE = "Give arguments like those of rlfx.trace, or trace the program for these; rlfx.compile does by itself."


def validate_target(target: Any, transform: str) -> Any:
    """What a transform is applied to: a program or a per-timestep function, or a ProgramError."""
    if isinstance(target, Program):
        return target
    fix = "Give a function of one timestep, or rlfx.trace(f, params, carry, length=T)."
    return expect("what it transforms", target, _TARGET, ProgramError, of=transform, fix=fix)


def validate_start(t0: Any, length: int = 1) -> Any:
    """The absolute time of the first timestep, an integer or a traced one, as an int32 scalar.

    Raises:
      DomainError: if it is no integer scalar, or a time of the program is no int32.
    """
    fix = "Give t0=n, an integer: how many timesteps were before."
    t0 = without_time(t0)  # of the program that calls this one
    number = None if isinstance(t0, jax.Array) else as_integer(t0)  # an array on a device isn't waited for
    if number is not None:
        if not -INT32 - 1 <= number <= INT32 - length:
            fact = f"t0={number} and {length} timesteps are more than an int32 counts."
            raise DomainError(located(fact, where=J.here(), fix=fix))
        return jnp.asarray(number, jnp.int32)
    shape, dtype = getattr(t0, "shape", None), getattr(t0, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        of = f"{J.short_dtype(dtype)}{list(shape)}" if shape is not None and dtype is not None else shown(t0)
        fact = f"t0 is the time of the first timestep, an integer; it is {of}."
        raise DomainError(located(fact, where=J.here(), fix=fix))
    return jnp.asarray(t0).astype(jnp.int32)


def validate_prng(prng: Any) -> Any:
    """A generator that ``jax.random.key(seed, impl=prng)`` takes, or None; or a ProgramError that names the argument."""
    if prng is not None:
        try:
            key = jax.eval_shape(lambda: jax.random.key(0, impl=prng))
        except (TypeError, ValueError) as error:
            fix = "Give rlfx.envs.fast_prng, a name such as 'threefry2x32', or None for that of the key."
            raise ProgramError(
                located(f"prng={shown(prng)} is no random number generator.", where=J.here(), fix=fix)
            ) from error
        if together := J.drawn_together(key.dtype):
            raise told_together(f"prng={shown(prng)}", together, J.here())
    return prng


def check_arguments(params: Any, carry: Any, key: Any, domain: Domain, prng: Any = None) -> Arguments:
    """Flatten and check the arguments of a compiled program; its key is one of ``prng``, seeded by the one given.

    One of jax's ``rbg`` seeds threefry, since a program's numbers must not depend on what is drawn together.

    Raises:
      ProgramError: for a leaf that is no array, a carry leaf without its [B] axis, or an unusable key.
    """
    bare, shared = unwrap_shared(carry)
    flat_params = [_array(leaf, f"params{tree.keystr(path)}") for path, leaf in tree.tree_flatten_with_path(params)[0]]
    flat_carry, avals = [], [_struct(x, x.shape, weak_type=_is_weak(x)) for x in flat_params]
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
                        where=J.here(),
                        fix="Give the carry of all environments (jax.vmap(env.reset)(keys)), or wrap what they all share "
                        "in rlfx.Shared(...).",
                    )
                )
            shape = shape[1:]
        flat_carry.append(leaf)
        avals.append(_struct(leaf, shape))
    key = _seeded(as_key(key), prng)
    key_aval = None if key is None else jax.ShapeDtypeStruct((), key.dtype)
    signature = (
        tree.tree_structure(params),
        tree.tree_structure(carry),
        tuple((a.shape, a.dtype, _is_weak(a)) for a in avals),
        None if key is None else key.dtype,
    )
    return Arguments(flat_params, flat_carry, key, avals, key_aval, signature)


def _array(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return to_array(leaf)
    except (TypeError, ValueError, OverflowError):
        fix = (
            "Keep what is no array out of the arguments: close over it, make it a static field of the pytree, or for "
            "an equinox module, params, static = eqx.partition(model, eqx.is_array), and eqx.combine(params, static) "
            "inside the program."
        )
        fact = f"{name} is {type(leaf).__name__} ({shown(leaf)}), not an array."
        raise ProgramError(located(fact, where=J.here(), fix=fix)) from None


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf has the type of a number of Python's; keys have none."""
    return getattr(leaf, "weak_type", False)


def _struct(leaf: Any, shape: tuple, *, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak_type)


def _seeded(key: Any, prng: Any) -> Any:
    if key is not None and prng is None and J.drawn_together(key.dtype):
        prng = "threefry2x32"
    if key is None or prng is None:
        return key
    make = functools.partial(seeded, impl=prng)
    return jax.eval_shape(make, key) if isinstance(key, jax.ShapeDtypeStruct) else make(key)
