"""The functions behind typed keys, jaxprs without dead equations, and primitives by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._jaxpr import ClosedJaxpr, prng
from rlfx._jaxpr import primitives as p


def key_shape(aval: Any) -> tuple[int, ...]:
    """The shape of the uint32 words of one key."""
    return tuple(aval.dtype._impl.key_shape)


def key_function(aval: Any, name: str) -> Callable:
    """A function of the key type's implementation on key words: ``split``, ``random_bits``, ``fold_in``."""
    return getattr(aval.dtype._impl, name)


def seed_function(params: dict) -> Callable:
    """The seeding function of a ``random_seed`` equation."""
    return params["impl"].seed


def wrap_key(words: Any, aval: Any) -> Any:
    """Typed keys of the type of ``aval`` from their words."""
    return prng.random_wrap(words, impl=aval.dtype._impl)


def trace(fn: Callable, *avals: Any) -> ClosedJaxpr:
    """The closed jaxpr of a function at these types, of jax's primitives, without the equations that no output needs."""
    return J.of_jax(J.without_dead_code(jax.make_jaxpr(fn)(*avals)))


IOTA_2X32 = prng.iota_2x32_shape_p
RANDOM_WRAP, RANDOM_UNWRAP = prng.random_wrap_p, prng.random_unwrap_p


def named(*names: str) -> list:
    """The primitives with these public names that this jax has."""
    found = [getattr(p, f"{name}_p", None) or getattr(jax.lax, f"{name}_p", None) for name in names]
    return [primitive for primitive in found if primitive is not None]
