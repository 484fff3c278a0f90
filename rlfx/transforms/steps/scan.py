"""``fuse_scan``: a per-environment body over K timesteps of N environments, on the backend that suits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _target
from rlfx._checks import POSITIVE, expect, one_of, optional, scalar
from rlfx.ahead.environment import cache_folder
from rlfx.errors import ProgramError, located
from rlfx.transforms.steps import checked, xla
from rlfx.transforms.steps.program import StepProgram, reporting_leaks, trace_step

BACKENDS = ("auto", "vmap", "scan", "tile", "triton", "mosaic_gpu", "tpu", "interpret")
CPU_TILE = 256
_INDEX = scalar(whole=True)
_LANES = 16  # of a vector register


def fuse_scan(body: Callable, length: int, *, backend: str = "auto", tile: int | None = None) -> Callable:
    """A scan of a per-environment body over K timesteps of N environments, as one scalarised program.

    ``body(shared, t, b, carry, x) -> (carry, y)`` is one timestep of one environment: ``shared`` is the same for all,
    ``t`` and ``b`` are ``int32[()]``. The function returned,

        ``run(shared, carry, xs=None, *, t0=0, b0=0) -> (carry, ys)``

    takes leaves ``[N, ...]`` in ``carry`` and ``[K, N, ...]`` in ``xs``; ``ys`` has leaves ``[K, N, ...]``. The result
    equals ``lax.scan`` over ``vmap(body)`` up to floating-point contraction. Any N, any K; typed keys anywhere.

    Args:
      body: the step; pure, without data-dependent loops.
      length: K.
      backend: ``"auto"`` (a loop over a structure of arrays on CPU; on NVIDIA GPUs a Triton kernel, if it gives what
        ``"vmap"`` gives, sooner: both take a few steps where it first runs, and the answer is kept in a file), ``"vmap"`` (plain
        ``scan(vmap(body))``), ``"scan"``, ``"tile"``, ``"triton"``, ``"mosaic_gpu"`` (bodies without
        ``shared``; tiles of a multiple of 128), ``"tpu"`` (likewise, of 1024; all environments fit into its VMEM), or
        ``"interpret"`` (the kernel, interpreted).
      tile: environments in a tile, or in a kernel's block (a power of two).

    Raises:
      ProgramError: K or N is not positive, the carry changes type, the body uses a value that leaked, or ``"tpu"`` is given
        or returns numbers of 64 bits.
      UnsupportedPrimitive: the body has no scalar form, or computes with 64 bits on ``"tpu"``.

    Example:
      >>> def body(shared, t, b, carry, x):
      ...     carry = carry + shared * x
      ...     return carry, carry
      >>> run = fuse_scan(body, 3)
      >>> carry, ys = run(jnp.float32(2.0), jnp.zeros(2), jnp.ones((3, 2)))
      >>> carry, ys.shape
      (Array([6., 6.], dtype=float32), (3, 2))
    """
    return fused(body, length, backend, tile)


def fused(body: Callable, length: int, backend: str, tile: int | None, example: Callable | None = None) -> Callable:
    """:func:`fuse_scan`; ``example(carry)`` is a better carry than a made-up one, to check a kernel where it first runs."""
    length = expect("k", length, POSITIVE, ProgramError, of="fuse_steps")
    check_backend(backend, tile)

    @reporting_leaks()
    def run(shared: Any, carry: Any, xs: Any = None, *, t0: Any = 0, b0: Any = 0):
        n = batch_of(carry, xs, length)
        program = trace_step(body, shared, carry, xs)
        chosen, size = _choose(backend, tile, n, program.has_products)
        t0, b0 = (expect(name, x, _INDEX, ProgramError, of="fuse_steps") for name, x in (("t0", t0), ("b0", b0)))
        if backend == "auto" and chosen in KERNELS and _target.target().is_here:
            found = _checked(program, body, length, n, chosen, size, example)
            chosen, size = (chosen, size) if found.kernel else ("vmap", 0)
        t, first = jnp.asarray(t0, jnp.int32), jnp.asarray(b0, jnp.int32)
        return _run(program, body, length, chosen, size, shared, t, first, n, carry, xs)

    return run


def _run(
    program: StepProgram, body: Callable, length: int, chosen: str, size: int, shared, t, first, n: int, carry, xs
) -> Any:
    """``(carry, ys)`` of n environments from ``first`` by one backend, in tiles of ``size`` of them."""
    if chosen in TILED and program.has_products:
        return _tiled(program, length, shared, t, first, n, carry, xs, size, name=chosen)
    b = first + jnp.arange(n, dtype=jnp.int32)
    if chosen == "vmap":
        return _vmapped(body, length, shared, t, b, carry, xs)
    padding = -n % size if size else 0
    flat_carry = [_padded(x, padding, 0) for x in program.carry.split(carry, 1)]
    flat_xs = [_padded(x, padding, 1) for x in program.xs.split(xs, 2)]
    out, ys = _EXECUTORS[chosen](
        program, length, jax.tree.leaves(shared), t, _padded(b, padding, 0), flat_carry, flat_xs, size
    )
    results = jax.tree.map(lambda y: y[..., :n], ys)
    return program.carry.join([x[:n] for x in out], (n,)), program.ys.join_leaves(results, (length, n))


def _checked(
    program: StepProgram, body: Callable, length: int, n: int, chosen: str, size: int, example: Callable | None
) -> checked.Verdict:
    """Whether the kernel is used here: a few of its steps beside those of XLA's form, on this device."""
    if jax.process_count() > 1:  # their clocks would decide apart
        return checked.Verdict(False, "several processes run")
    steps, n = min(length, checked.STEPS), min(max(n, checked.LEAST), checked.MOST)
    device = jax.devices()[0]
    kind = f"{device.device_kind}, {device.client.platform_version}"

    def form(chosen: str, size: int) -> Callable:
        def few(shared, carry, xs):
            return _run(program, body, steps, chosen, size, shared, jnp.int32(0), jnp.int32(0), n, carry, xs)

        return few

    def found() -> checked.Verdict:
        shared, xs = checked.made_up(program.shared.structs, ()), checked.made_up(program.xs.structs, (steps, n), 1)
        carry = checked.made_up(program.carry.structs, (n,), 2)
        carry = carry if example is None else example(carry)
        folder = cache_folder() / "kernels"
        return checked.verdict(form(chosen, size), form("vmap", 0), (shared, carry, xs), kind, folder)

    answer = checked.outside(found)
    if answer.wrong:
        checked.warn("fuse_steps", answer)
    return answer


def check_backend(backend: str, tile: int | None) -> None:
    """Raise ProgramError if there is no such backend, or if it has no such tiles."""
    backend = expect("backend", backend, one_of(*BACKENDS), ProgramError, of="fuse_steps")
    tile = expect("tile", tile, optional(POSITIVE), ProgramError, of="fuse_steps")
    fits, fix = _TILES.get(backend, (lambda tile: True, ""))
    if tile is not None and not fits(tile):
        raise ProgramError(located(f"fuse_steps: tile={tile!r} with backend={backend!r}.", fix=fix))


_TILES: dict[str, tuple[Callable[[int], bool], str]] = {
    "triton": (lambda tile: tile & (tile - 1) == 0, "A block of Triton is a power of two of environments."),
    "mosaic_gpu": (lambda tile: tile % 128 == 0, "A block of Mosaic GPU is a multiple of 128 environments."),
    "tpu": (lambda tile: tile % 1024 == 0, "A block of a TPU is a multiple of 1024 environments."),
}
"""Which tiles a backend has, and what to say of others."""


def batch_of(carry: Any, xs: Any, length: int) -> int:
    """N, of a carry with leaves ``[N, ...]`` and inputs with leaves ``[K, N, ...]``; or a ProgramError."""
    leaves = jax.tree.leaves(carry)
    fix = "Every leaf of the carry is [N, ...], every leaf of xs [K, N, ...]."
    lacking = [x for n, given in enumerate((leaves, jax.tree.leaves(xs))) for x in given if np.ndim(x) <= n]
    if lacking:
        fact = f"fuse_steps: a leaf has the shape {list(np.shape(lacking[0]))}, and no axis [N] of environments."
        raise ProgramError(located(fact, fix=f"{fix} jax.vmap(env.reset)(keys) gives states of N environments."))
    sizes = {np.shape(x)[0] for x in leaves} | {np.shape(x)[1] for x in jax.tree.leaves(xs)}
    if len(sizes) != 1:
        raise ProgramError(located(f"fuse_steps: the leading [N] axes differ: {sorted(sizes)}.", fix=fix))
    (n,) = sizes
    if n < 1:
        raise ProgramError(located(f"fuse_steps: N = {n} environments.", fix="Step at least one environment."))
    lengths = {x.shape[0] for x in jax.tree.leaves(xs)}
    if lengths - {length}:
        raise ProgramError(
            located(
                f"fuse_steps: K = {length} steps, and xs has {sorted(lengths)}.", fix="Every leaf of xs is [K, N, ...]."
            )
        )
    return n


def _padded(x: jax.Array, padding: int, axis: int) -> jax.Array:
    if not padding:
        return x
    widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge")


def _vmapped(body, length, shared, t, b, carry, xs):
    def advance(c, x):
        return jax.vmap(lambda i, one, given: body(shared, x[0], i, one, given))(b, c, x[1])

    return jax.lax.scan(advance, carry, (t + jnp.arange(length, dtype=jnp.int32), xs), length=length)


def _choose(backend: str, tile: int | None, n: int, has_products: bool) -> tuple[str, int]:
    """A backend and a tile; 0 where there are none. Matrix products are dispatched: of all environments at once."""
    if backend == "auto":
        machine = _target.target()
        in_tiles = machine.platform == "cpu" and n > CPU_TILE and not has_products
        backend = kernel_of(backend, machine) or ("tile" if in_tiles else "scan")
    gpu = _with_products(n) if has_products else 128
    defaults = {"tile": _even_tile(n), "triton": gpu, "mosaic_gpu": gpu, "tpu": 1024, "interpret": gpu}
    return backend, (tile or defaults[backend]) if backend in defaults else 0


def kernel_of(backend: str, machine: _target.Target) -> str | None:
    """The kernel that a backend is on a machine, or None."""
    if backend == "auto":
        return "triton" if machine.has_triton else None
    return backend if backend in KERNELS else None


def unsupported_by(program: StepProgram, kernel: str | None, dense_matmul: bool = False) -> str | None:
    """What has no form in a kernel, or no scalar form; None if everything has. Computes nothing."""
    if kernel not in TILED or not program.has_products:
        return program.unsupported(dense_matmul=dense_matmul)
    from rlfx.transforms.steps import pallas, tiled

    return tiled.why_not(program, pallas.TARGETS[kernel](WARPS * 32))


def _with_products(n: int) -> int:
    """Environments in a tile with products: as few as a product takes, until each processor has two tiles."""
    return next(tile for tile in (16, 32, 64) if n <= 256 * tile or tile == 64)


def _even_tile(n: int) -> int:
    """Tiles of at most ``CPU_TILE`` environments that leave little over: 300 become two of 160, not of 256."""
    return -(-n // (-(-n // CPU_TILE) * _LANES)) * _LANES


def _pallas(*args, name: str):
    from rlfx.transforms.steps import pallas

    *arguments, block = args
    return pallas.kernel(*arguments, block=block, target=pallas.TARGETS[name](block))


def _tiled(program: StepProgram, length: int, shared, t, first, n: int, carry, xs, block: int, name: str):
    from rlfx.transforms.steps import pallas, tiled

    return tiled.run(program, length, shared, t, first, n, carry, xs, block, pallas.TARGETS[name](WARPS * 32))


WARPS = 8  # of a tile with products, however few environments it has
TILED = ("triton", "interpret")  # kernels that have products
KERNELS = ("triton", "mosaic_gpu", "tpu", "interpret")
_EXECUTORS: dict[str, Callable] = {
    "scan": lambda *args: xla.scan(*args[:-1]),
    "tile": lambda *args: xla.tiles(*args[:-1], tile=args[-1]),
    **{name: functools.partial(_pallas, name=name) for name in KERNELS},
}
