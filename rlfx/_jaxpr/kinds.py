"""The primitives of jax: by name, and in classes that have a meaning in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src import callback, custom_batching, debugging, dtypes, shard_map
from jax._src.lax import lax
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad

from rlfx._jaxpr.staged import Staged


def _all(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(primitives, n + "_p", None)) is not None)


ADD_ANY = ad.add_jaxvals_p
#: One output element for each element of the operands (scalars broadcast).
ELEMENTWISE = {ADD_ANY} | _all(
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh",
    "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "polygamma", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta", "random_gamma_grad", "clz",
)  # fmt: skip
STOP_GRADIENT = _all("stop_gradient")
#: Of those, arithmetic and comparisons: an instruction or two for an element.
ARITHMETIC = {ADD_ANY} | _all(
    "abs", "add", "and", "ceil", "clamp", "conj", "convert_element_type", "copy", "eq", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "real", "select_n",
    "sign", "square", "stop_gradient", "sub", "xor",
)  # fmt: skip
#: Primitives that ``jax.extend`` does not list.
SPLIT, OPTIMIZATION_BARRIER = lax.split_p, lax.optimization_barrier_p
#: The same elements in other places, or once more.
LAYOUTS = {SPLIT} | _all("broadcast_in_dim", "concatenate", "iota", "reshape", "rev", "slice", "squeeze", "transpose")
#: jnp.stack, unstack and tile, where jax has primitives for them.
STACKING = frozenset(p for n in ("stack_p", "unstack_p", "tile_p") if (p := getattr(lax, n, None)))

DRAWS = _all("random_bits", "random_fold_in", "random_split")
RANDOM = _all("random_bits", "random_fold_in", "random_seed", "random_split", "random_gamma", "threefry2x32")

#: Calls that mean nothing but their body: the tracer inlines them.
INLINED = frozenset(p for n in ("jit_p", "closed_call_p", "core_closed_call_p") if (p := getattr(primitives, n, None)))
CUSTOM_JVP = primitives.custom_jvp_call_p
CUSTOM_VJP = primitives.custom_vjp_call_p
REMAT = next(p for n in ("remat_p", "checkpoint_p") if (p := getattr(primitives, n, None)))
COND, SCAN, WHILE = primitives.cond_p, primitives.scan_p, primitives.while_p

#: Primitives that run Python functions of the user's.
CALLBACKS = frozenset(
    p
    for module, names in (
        (callback, ("pure_callback_p", "io_callback_p")),
        (debugging, ("debug_callback_p", "debug_print_p")),
    )
    for n in names
    if (p := getattr(module, n, None)) is not None
)
SHARD_MAP = frozenset({shard_map.shard_map_p})

#: Calls whose body may be inlined at the price of their special rule (custom derivative or batching, rematerialisation).
_CALLS = INLINED | {CUSTOM_JVP, CUSTOM_VJP, REMAT, custom_batching.custom_vmap_p}


def primitive(name: str) -> Primitive:
    """A primitive of jax by its public name, ``primitive("dot_general")``."""
    return getattr(primitives, name + "_p")


def is_call(op: Any) -> bool:
    """Whether an equation calls a body on exactly its own inputs."""
    return op in _CALLS or isinstance(op, Staged)


def is_inexact(aval: Any) -> bool:
    """Whether a value may have a derivative."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def short_dtype(dtype: Any) -> str:
    """``f32``, ``i32``, ``bool``, ``key``."""
    return "key" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtypes.short_dtype_name(dtype)
