"""Random numbers in scalar programs: the key type's own functions, on its words; the same numbers as ``jax.random``."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.scalarize import Interpreter, array_of, keys_of, words_of

_UINT32 = np.dtype("uint32")


def _expand(ip: Interpreter, fn: Any, *args: np.ndarray, dtypes: tuple) -> np.ndarray:
    """The elements of ``fn`` (traced at the arguments' shapes)."""
    avals = [jax.ShapeDtypeStruct(x.shape, d) for x, d in zip(args, dtypes, strict=True)]
    closed = F.trace(fn, *avals)
    return ip.elements(ip.run(closed.jaxpr, closed.consts, args)[0])


def random_bits(ip: Interpreter, eqn: Any, args: list) -> list:
    key = eqn.invars[0].aval
    width, shape, bits = eqn.params["bit_width"], tuple(eqn.params["shape"]), F.key_function(key, "random_bits")
    rows = [_expand(ip, lambda w: bits(w, width, shape), words, dtypes=(_UINT32,)) for words in _each_key(args[0], key)]
    return [array_of([e for row in rows for e in row.reshape(-1)], eqn.outvars[0].aval.shape)]


def random_split(ip: Interpreter, eqn: Any, args: list) -> list:
    key, shape = eqn.invars[0].aval, tuple(eqn.params["shape"])
    split = F.key_function(key, "split")
    rows = [
        keys_of(_expand(ip, lambda w: split(w, shape), words, dtypes=(_UINT32,)), shape)
        for words in _each_key(args[0], key)
    ]
    return [array_of([k for row in rows for k in row.reshape(-1)], eqn.outvars[0].aval.shape)]


def random_fold_in(ip: Interpreter, eqn: Any, args: list) -> list:
    key, data = (v.aval for v in eqn.invars)
    shape, fold_in = eqn.outvars[0].aval.shape, F.key_function(key, "fold_in")
    keys, messages = np.broadcast_to(args[0], shape), np.broadcast_to(ip.elements(args[1]), shape)
    out = [
        _expand(ip, fold_in, words, array_of([m], ()), dtypes=(_UINT32, data.dtype))
        for words, m in zip(_each_key(keys, key), messages.reshape(-1), strict=True)
    ]
    return [array_of([tuple(words.reshape(-1)) for words in out], shape)]


def random_seed(ip: Interpreter, eqn: Any, args: list) -> list:
    seed, shape = F.seed_function(eqn.params), eqn.outvars[0].aval.shape
    seeds = ip.elements(args[0]).reshape(-1)
    out = [_expand(ip, seed, array_of([s], ()), dtypes=(eqn.invars[0].aval.dtype,)) for s in seeds]
    return [array_of([tuple(words.reshape(-1)) for words in out], shape)]


def random_wrap(ip: Interpreter, eqn: Any, args: list) -> list:
    return [keys_of(ip.elements(args[0]), eqn.outvars[0].aval.shape)]


def random_unwrap(ip: Interpreter, eqn: Any, args: list) -> list:
    return [words_of(args[0], F.key_shape(eqn.invars[0].aval))]


def _each_key(keys: np.ndarray, aval: Any) -> list[np.ndarray]:
    words = words_of(np.asarray(keys, object), F.key_shape(aval))
    return list(words.reshape(math.prod(np.shape(keys)), *F.key_shape(aval)))


def threefry(ip: Interpreter, eqn: Any, args: list) -> list:
    """Threefry-2x32 with 20 rounds, unrolled: jax's CPU lowering is a loop, which vectorises less well."""
    aval = eqn.outvars[0].aval
    columns = [np.broadcast_to(ip.elements(x), aval.shape).reshape(-1) for x in args]
    pairs = [threefry_block(ip, *row) for row in zip(*columns, strict=True)]
    return [array_of([pair[word] for pair in pairs], aval.shape) for word in (0, 1)]


def threefry_block(ip: Any, k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Written with primitives: there are hundreds of them, and each operator of ``jax.numpy`` is a call to trace."""

    def turned(x, r):
        left, right = np.uint32(r), np.uint32(32 - r)
        return ip.apply(lambda v: lax.bitwise_or(lax.shift_left(v, left), lax.shift_right_logical(v, right)), x)

    add, xor = (functools.partial(ip.apply, op) for op in (lax.add, lax.bitwise_xor))
    return J.threefry_rounds(add, xor, turned, k0, k1, x0, x1)


RANDOM_RULES: dict[Any, Any] = {
    J.primitive("random_bits"): random_bits,
    J.primitive("random_split"): random_split,
    J.primitive("random_fold_in"): random_fold_in,
    J.primitive("random_seed"): random_seed,
    F.RANDOM_WRAP: random_wrap,
    F.RANDOM_UNWRAP: random_unwrap,
    J.primitive("threefry2x32"): threefry,
}
