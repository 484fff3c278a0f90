"""Fused steps as one Pallas kernel: one program for each block of environments, its state in registers for K steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.transforms.steps.defined import DEFINED
from rlfx.transforms.steps.program import StepProgram
from rlfx.transforms.steps.scalarize import NARROW, Target, array_of, keys_of

Flat = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Backend:
    """How Pallas compiles the kernel: the only place that knows the backends.

    Attributes:
      rewrites: primitives that it lacks, as functions of what it has.
      widest: the bytes of its widest number.
      tile: in the body, the number of its tile.
    """

    rewrites: Mapping[Any, Callable]
    spec: Any = pl.no_block_spec
    compiler: Any = None
    interpret: bool = False
    widest: int = 8
    tile: Callable[[], Any] = lambda: pl.program_id(0)

    def made(self, body: Callable, tiles: int, inputs: int, outputs: Sequence[Any], name: str, **more: Any) -> Callable:
        """``tiles`` programs of a body, which takes references to so many inputs and to outputs of these types."""
        return pl.pallas_call(
            body,
            out_shape=outputs,
            grid=(tiles,),
            in_specs=[self.spec] * inputs,
            out_specs=[self.spec] * len(outputs),
            interpret=self.interpret,
            compiler_params=self.compiler,
            name=name,
            **more,
        )


class Mosaic(Backend):
    """Mosaic GPU has an entry of its own since jax 0.11."""

    def made(self, body: Callable, tiles: int, inputs: int, outputs: Sequence[Any], name: str, **more: Any) -> Callable:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        body.__name__ = name
        return plgpu.kernel(
            body, out_type=outputs, grid=(tiles,), grid_names=(_TILES,), compiler_params=self.compiler, **more
        )


_TILES = "tiles"


def kernel(
    program: StepProgram,
    length: int,
    shared: Flat,
    t: jax.Array,
    b: jax.Array,
    carry: Flat,
    xs: Flat,
    *,
    block: int,
    target: Backend,
):
    """One ``pallas_call`` with a grid of ``N / block`` programs.

    Scalars of the carry are loaded once, carried through the loop over K as values, and stored once. ``xs`` and ``ys``
    stay in global memory, one row for each timestep. What all environments share travels as one vector for each dtype.
    """
    n = b.shape[0]
    _check_widths(program, shared, target)
    vectors, places = _packed(program, shared)
    step = program.scalar_step(Target(block=(block,), rewrites=target.rewrites, widest=target.widest))
    stored = [storage(d) for d in program.carry.dtypes]
    outputs = [storage(d) for d in program.ys.dtypes]
    inputs = [
        jnp.broadcast_to(t, b.shape),
        b,
        *vectors,
        *[x.astype(d) for x, d in zip(carry, stored, strict=True)],
        *[x.astype(storage(x.dtype)) for x in xs],
    ]
    sizes = np.cumsum([2, len(vectors), len(stored), len(xs), len(stored)])

    def run(*refs):
        (time, index), packed, before, given, after, out = cut(refs, sizes)
        here = pl.ds(target.tile() * block, block)
        first, envs = time[here], index[here]
        weights = _unpacked(program, packed, places)

        def advance(k, state):
            x = [loaded(r[k, here], d) for r, d in zip(given, program.xs.dtypes, strict=True)]
            state, y = step(weights, first + k, envs, state, x)
            for r, value in zip(out, itertools.chain(*y), strict=True):
                r[k, here] = to_store(value, r.dtype)
            return state

        state = [loaded(r[here], d) for r, d in zip(before, program.carry.dtypes, strict=True)]
        for r, value in zip(after, counted(length, advance, state), strict=True):
            r[here] = to_store(value, r.dtype)

    states = [jax.ShapeDtypeStruct((n,), d) for d in stored]
    shapes = [*states, *[jax.ShapeDtypeStruct((length, n), d) for d in outputs]]
    call = target.made(run, n // block, len(inputs), shapes, "rlfx_fused_steps")
    results = call(*inputs)
    dtypes = [*program.carry.dtypes, *program.ys.dtypes]
    results = [x.astype(d) for x, d in zip(results, dtypes, strict=True)]
    ys = iter(results[len(stored) :])
    return results[: len(stored)], [[next(ys) for _ in range(math.prod(s))] for s in program.ys.shapes]


def _check_widths(program: StepProgram, shared: Flat, target: Backend) -> None:
    """Raise ProgramError if what goes into the kernel, or comes out of it, has more bits than the backend's numbers."""
    found = {"the carry": program.carry.dtypes, "xs": program.xs.dtypes, "ys": program.ys.dtypes}
    for what, dtypes in {**found, "shared": [s.dtype for s in shared]}.items():
        for d in dtypes:
            if not jnp.issubdtype(d, jax.dtypes.prng_key) and d.itemsize > target.widest:
                fact = f"fuse_steps: {what} has {d}, and this backend has numbers of {8 * target.widest} bits."
                raise ProgramError(located(fact, fix=NARROW))


def counted(length: int, advance: Callable, state: Any) -> Any:
    """``advance(k, state)`` for k = 0 ... length - 1, of 32 bits: what loops of kernels count in.

    ``fori_loop`` counts from a Python number, which has jax's default width: under x64 a TPU's kernel would have to narrow it.
    """

    def body(counted, _):
        k, state = counted
        return (k + 1, advance(k, state)), None

    (_, state), _ = jax.lax.scan(body, (np.int32(0), state), None, length=length)
    return state


def cut(refs: Sequence[Any], bounds: np.ndarray) -> list[Sequence[Any]]:
    return [refs[a:b] for a, b in zip([0, *bounds], [*bounds, len(refs)], strict=True)]


def storage(dtype: Any) -> np.dtype:
    """Booleans are words in memory: Mosaic GPU converts no smaller integer to a predicate."""
    return np.dtype("int32") if np.dtype(dtype) == bool else np.dtype(dtype)


def loaded(x: jax.Array, dtype: Any) -> jax.Array:
    return x != 0 if np.dtype(dtype) == bool and x.dtype != bool else x.astype(dtype)


def to_store(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype != bool or np.dtype(dtype) == bool:
        return x.astype(dtype)
    return jnp.where(x, jnp.ones_like(x, dtype), jnp.zeros_like(x, dtype))


def _packed(program: StepProgram, shared: Flat) -> tuple[list[jax.Array], list[list[tuple[int, int]]]]:
    """One vector for each dtype, padded to a power of two, and where each scalar of each leaf is."""
    parts: dict[np.dtype, list] = {}
    places, sizes = [], {}
    for x, aval, shape in zip(shared, program.shared.avals, program.shared.shapes, strict=True):
        data = jax.random.key_data(x) if J.is_key(aval) else x
        data = data.astype(storage(data.dtype)).reshape(-1)
        start = sizes.get(data.dtype, 0)
        parts.setdefault(data.dtype, []).append(data)
        sizes[data.dtype] = start + math.prod(shape)
        which = list(parts).index(data.dtype)
        places.append([(which, start + i) for i in range(math.prod(shape))])
    vectors = [jnp.concatenate(group) for group in parts.values()]
    return [jnp.pad(v, (0, _power_of_two(v.size) - v.size)) for v in vectors], places


def _unpacked(program: StepProgram, refs: Sequence[Any], places: list[list[tuple[int, int]]]) -> list[np.ndarray]:
    out = []
    for aval, shape, at in zip(program.shared.avals, program.shared.shapes, places, strict=True):
        dtype = np.dtype("uint32") if J.is_key(aval) else aval.dtype
        x = array_of([loaded(refs[which][i], dtype) for which, i in at], shape)
        out.append(keys_of(x, aval.shape) if J.is_key(aval) else x)
    return out


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _erf_inv(x, **_):
    """Giles (2010), "Approximating the erfinv function", single precision: what XLA computes."""
    w = -jnp.log1p(-x * x)
    central = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
               -0.00417768164, 0.246640727, 1.50140941]  # fmt: skip
    tail = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
            0.00943887047, 1.00167406, 2.83297682]  # fmt: skip
    near = w < 5.0
    v = jnp.where(near, w - 2.5, jnp.sqrt(jnp.maximum(w, 5.0)) - 3.0)
    p = functools.reduce(lambda acc, c: acc * v + jnp.where(near, c[0], c[1]), zip(central, tail, strict=True),
                         jnp.zeros_like(v))  # fmt: skip
    return jnp.where(jnp.abs(x) == 1.0, x * jnp.inf, p * x)


def _sign(x, **_):
    one = jnp.ones_like(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _integer_pow(x, *, y):
    result, base, n = None, x, abs(y)
    while n:
        result = base if result is None and n & 1 else result * base if n & 1 else result
        base, n = base * base, n >> 1
    result = jnp.ones_like(x) if result is None else result
    return 1 / result if y < 0 else result


def _clamp(low, x, high):
    return jnp.minimum(jnp.maximum(x, low), high)


def _round(x, *, rounding_method):
    """Half away from zero, or to even."""
    if rounding_method == jax.lax.RoundingMethod.AWAY_FROM_ZERO:
        return jnp.where(x < 0, jnp.ceil(x - 0.5), jnp.floor(x + 0.5))
    low = jnp.floor(x)
    odd = low - 2 * jnp.floor(low * 0.5) == 1
    gap = x - low
    return jnp.where((gap > 0.5) | ((gap == 0.5) & odd), low + 1, low)


REWRITES = {
    **DEFINED,
    J.primitive("erf_inv"): _erf_inv,
    J.primitive("sign"): _sign,
    J.primitive("integer_pow"): _integer_pow,
    J.primitive("clamp"): _clamp,
    J.primitive("round"): _round,
    J.primitive("square"): lambda x: x * x,
}
"""What Pallas' GPU backends lack, or leave undefined, from what they have."""


def _floor(x):
    """Through int32: exact where a float32 has a fraction at all."""
    whole = x.astype(jnp.int32).astype(x.dtype)
    down = jnp.where(whole > x, whole - 1, whole)
    return jnp.where(jnp.abs(x) < 2.0**23, down, x)


def _rem(x, y):
    if jnp.issubdtype(x.dtype, jnp.floating):
        quotient = x / y
        whole = jnp.where(quotient < 0, -_floor(-quotient), _floor(quotient))
        return x - whole * y
    return x - jax.lax.div(x, y) * y


def _not(x):
    """Mosaic GPU cannot negate a predicate."""
    return jnp.where(x, jnp.int32(0), jnp.int32(1)) != 0 if x.dtype == bool else x ^ np.asarray(-1).astype(x.dtype)


MOSAIC_REWRITES = {
    **REWRITES,
    J.primitive("floor"): _floor,
    J.primitive("ceil"): lambda x: -_floor(-x),
    J.primitive("rem"): _rem,
    J.primitive("not"): _not,
}
"""What Mosaic GPU lacks beside: it has no rounding, no remainder, no negated predicates."""


def _triton(block: int) -> Backend:
    from jax.experimental.pallas import triton

    return Backend(REWRITES, compiler=triton.CompilerParams(num_warps=max(1, block // 32), num_stages=1))


def _mosaic_gpu(block: int) -> Backend:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroup = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    return Mosaic(MOSAIC_REWRITES, compiler=warpgroup, tile=lambda: jax.lax.axis_index(_TILES))


def _tpu(block: int) -> Backend:
    from jax.experimental.pallas import tpu as pltpu

    return Backend(REWRITES, pl.BlockSpec(memory_space=pltpu.VMEM), widest=4)


TARGETS: dict[str, Callable[[int], Backend]] = {
    "triton": _triton,
    "mosaic_gpu": _mosaic_gpu,
    "tpu": _tpu,
    "interpret": lambda block: Backend(REWRITES, interpret=True),
}
