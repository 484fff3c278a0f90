"""Machines that programs are compiled for, as values: what they do in a second, what fits, and which rewrites pay there.

Nothing here runs anything: the compiler asks these values, and ``compile(target=)`` gives others than those of the machine
at hand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._checks import CALLABLE, TEXT, Kind, expect, number, optional
from rlfx.ahead.compilation import LIMIT, Compilation, compile_for
from rlfx.ahead.machines import MACHINES, Machine
from rlfx.ahead.program import surroundings
from rlfx.cores import available_cores, core_cache
from rlfx.errors import ScheduleError, TargetError, located

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, to rank plans.

    Attributes:
      flops: operations of large products.
      elements: other operations.
      bandwidth: bytes to and from its memory.
      overhead: seconds to start one operation.
    """

    flops: float
    elements: float
    bandwidth: float
    overhead: float


@dataclass(frozen=True)
class Room:
    """What fits where, in bytes.

    Attributes:
      cache: what stays close to the processor.
      tile: activations that the learner has at a time by default; None: those of all timesteps.
      at_once: the largest value on slices that is computed for all timesteps at once.
      in_block: the same within a block of timesteps.
      draws: random numbers that are drawn before a loop that uses them, for all timesteps at once.
      memory: of the device; None: not known.
      unmapped: temporary bytes up to which a call gets memory that earlier ones have had; None: however many. glibc gives
        blocks of more than 32 MiB back, and their pages are mapped anew.
      host: whether host memory is another one than the device's.
    """

    cache: int
    tile: int | None = None
    at_once: int = 1 << 30
    in_block: int = 1 << 30
    draws: int = 16 * _MIB
    memory: int | None = None
    unmapped: int | None = None
    host: bool = True


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites pay. (Each has a benchmark: ``benchmarks/rewrites.py``.)

    Attributes:
      contractions: weight gradients as contractions over rows (``cpu/contractions.py``).
      matrices: rows along several axes are a matrix where they are multiplied: instead, where gradients are differentiated.
      channels_last: convolutions inside loops with channels last (``cpu/convolution.py``).
      patches: convolutions that a gradient goes through time by, and small ones, are products, if their patches are at most so
        many numbers at a point (``rewrite/patches.py``); 0: never.
      dense: transposed convolutions multiply no zeros (``cpu/dense.py``).
      rows: points of all timesteps and environments are along one axis (``execute/pointwise.py``).
      tree_reductions: in loops over time, maxima of rows by halves (``execute/ragged/tree_reduction.py``).
      shared_rows: products of one value with weights of at most so many rows are one in loops over t (``schedule/products.py``).
      deferred_rows: gradients of weights of at most so many rows a timestep are contracted after a backward loop
        (``gradient/deferred.py``).
      leaving_rows: products with weights of fewer rows leave a loop over time that does not need them, where nothing more is kept
        for that and no blocks, or less memory, are asked for (``schedule/fission.py``).
      starts: operations are slow to start: what can leaves a loop over time, if its operands take less time to store.
      unroll: about so many iterations of a loop over time are one iteration of the program's (``execute/loops.py``).
      affine: loops of affine recurrences are associative scans (``execute/affine.py``).
      branches: blocks of timesteps that a loss does not count are skipped, and what is chosen at every n-th one is computed
        there (``gradient/counted.py``, ``rewrite/now_and_then.py``).
      picks: one element of an axis is read by a masked sum, of values with at most so many elements (``rewrite/picks.py``).
      rows_taken: products of one-hot vectors with weights are rows of these (``rewrite/one_hot.py``).
      entries: what points compute of one entry of a table is computed of the table, if there are so many times as many points as
        entries (``rewrite/entries.py``); 0: never.
      narrow: networks whose weights have at most so many rows and columns have features first (``schedule/narrow.py``).
      reals: complex numbers as real and imaginary parts, arrays of their own, where a value has at least so many at a timestep
        (``rewrite/reals.py``); 0: never.
      unrolled: nested loops that are at most so many equations without a loop have none (``rewrite/unrolled.py``).
      apart: products of what is put together from parts that vary less are sums of products (``rewrite/apart.py``), and those
        of what is the same along an axis are computed once (``rewrite/spread.py``); what is taken of computed values, or
        chosen by one index, is computed of that (``rewrite/taken.py``, ``chosen.py``).
      pairs: sums over at least so many pairs of numbers are loops over one of the two (``rewrite/pairs.py``); 0: never.
      contracted: sums of at least so many products of what is spread are products of matrices (``rewrite/contracted.py``); 0:
        never.
      turns: copies under ``jax.vmap`` are computed in turns if a tile has room for fewer (``gradient/replanned.py``); 0: never.
      packed: what an update does alike to arrays of its carry with at most so many numbers is done to all of them at once
        (``rewrite/packed.py``); 0: never.
      postponed: states of at least so many numbers that begin anew, as traces do, do so where they are read
        (``schedule/postponed.py``); 0: never.
      windows: products with windows of at least so many numbers at a position are those of blocks of rows
        (``schedule/window_products.py``); 0: never.
      inside: what a loop over time could be given for all timesteps is computed in it, if it would leave the cache: products, and
        what is made of less (``Room.tile``; ``schedule/fusion.py``).
    """

    contractions: bool = False
    matrices: bool = False
    channels_last: bool = False
    patches: int = 0
    dense: bool = False
    rows: bool = False
    tree_reductions: bool = False
    shared_rows: int = 0
    deferred_rows: int = 0
    leaving_rows: int = 0
    starts: bool = False
    unroll: int = 1
    affine: bool = False
    branches: bool = False
    picks: int = 0
    rows_taken: bool = False
    entries: int = 0
    narrow: int = 0
    inside: bool = False
    reals: int = 0
    unrolled: int = 0
    apart: bool = False
    pairs: int = 0
    contracted: int = 0
    turns: int = 0
    packed: int = 0
    postponed: int = 0
    windows: int = 0


@dataclass(frozen=True)
class Target:
    """A machine, or one device of it, that programs are compiled for. A value: ``target`` gives those that are known.

    Attributes:
      name: as ``target`` knows it.
      platform: jax's name: "cpu", "gpu" or "tpu".
      rates: what it does in a second.
      room: what fits where.
      rewrites: what pays there.
      sooner: options of XLA with which it compiles sooner to code that takes the same memory.
      machine: what a compiler that has no such device is told of it; None: not enough is known.
    """

    name: str
    platform: str
    rates: Rates
    room: Room
    rewrites: Rewrites = Rewrites()
    sooner: tuple[tuple[str, Any], ...] = ()
    machine: Machine | None = None

    def __str__(self) -> str:
        return self.name if self.name == self.platform else f"{self.name} ({self.platform})"

    @property
    def is_here(self) -> bool:
        """Whether programs run on such a machine here."""
        if self.platform != jax.default_backend():
            return False
        here = target_of(jax.devices()[0]).machine
        return self.machine is None or here is None or replace(self.machine, grid=()) == here

    @property
    def has_triton(self) -> bool:
        """Whether Triton compiles for it: a GPU of capability 8.0 or later (or one of which that is not known)."""
        return self.platform == "gpu" and (self.machine is None or self.machine.capability >= (8, 0))

    @property
    def devices(self) -> int:
        """How many it is: 16 of ``rlfx.target("h200:2x8")``."""
        return 1 if self.machine is None else self.machine.devices

    def mesh(self, *names: str) -> jax.sharding.AbstractMesh:
        """Its devices as a mesh: for ``rlfx.compile(mesh=)``, and for shapes that are split over it.

        Args:
          names: of the axes; one: all devices along it; as many as the target's grid has numbers: one for each.

        Raises:
          TargetError: there are more names than numbers, or none.

        Example:
          >>> target("h200:2x8").mesh("b").axis_sizes
          (16,)
        """
        grid = (self.devices,) if self.machine is None or len(names) == 1 else self.machine.grid
        names = tuple(expect("names", name, TEXT, TargetError, of="target.mesh") for name in names)
        if not names or len(names) != len(grid):
            fact = f"A mesh of {self.name} has one axis{f', or {len(grid)}' if len(grid) > 1 else ''}; {len(names)} are named."
            raise TargetError(located(fact, where=J.here(), fix='Name it: rlfx.target("h200:8").mesh("b").'))
        return surroundings(self._described(), grid, names)

    def compile(self, fn: Callable[..., Any], *shapes: Any, limit: float = LIMIT) -> Compilation:
        """A function compiled for this machine, which need not be here: what it takes there, by its own compiler.

        The function is traced here, as if jax ran on the machine, and leaves the process as StableHLO. A process of an
        environment of its own, with jax's plugin for the machine, compiles it. The result is kept in a file (``RLFX_CACHE``,
        by default in the user's cache): the same program is compiled once.

        Args:
          fn: a function of pytrees of arrays and keys; a jitted one with what it donates.
          shapes: its arguments, arrays or shapes. What is split over a mesh has a sharding
            (``jax.ShapeDtypeStruct(..., sharding=NamedSharding(target.mesh("b"), P("b")))``); the rest is on all devices.
          limit: seconds that compiling may take.

        Returns:
          A :class:`Compilation`: temporary bytes, launches by loop, collectives, host transfers, kernels. It prints.

        Raises:
          TargetError: there is no environment that compiles for it (with the line that makes one), the program can't leave the
            process, or compiling failed or took longer, with the compiler's last lines.

        Example:
          >>> import jax.numpy as jnp
          >>> found = target("cpu").compile(lambda x: jnp.tanh(x @ x.T), jnp.ones((256, 64)))
          >>> found.argument_bytes, found.output_bytes, found.loops, found.collectives
          (65536, 262144, (), ())
        """
        fn = expect("fn", fn, CALLABLE, TargetError, of="target.compile")
        limit = expect("limit", limit, number(above=0), TargetError)
        return compile_for(self._described(), self.name, fn, shapes, limit)

    def _described(self) -> Machine:
        if self.machine is None:
            fact = f"Nothing is known of {self.name} that its compiler could be told."
            fix = f"Name a machine: {', '.join(f'rlfx.target({name!r})' for name in MACHINES)}."
            raise TargetError(located(fact, where=J.here(), fix=fix))
        return self.machine


#: Operations are slow to start, and gathers and scatters slow.
_ACCELERATOR = Rewrites(starts=True, affine=True, picks=1024)


def _cpu() -> Target:
    """All the cores that the process may use, as measured on x86."""
    cores = available_cores()
    return Target(
        "cpu",
        "cpu",
        Rates(2.5e10 * cores, 1e10 * cores, 8e9, 1e-6),
        Room(cache=16 * _MIB, tile=core_cache(), at_once=4 * _MIB, in_block=_MIB, unmapped=32 * _MIB, host=False),
        Rewrites(
            contractions=True,
            channels_last=True,
            patches=1 << 20,
            dense=True,
            rows=True,
            tree_reductions=True,
            shared_rows=128,
            deferred_rows=32,
            leaving_rows=64,
            branches=True,
            rows_taken=True,
            entries=8,
            narrow=32,
            inside=True,
            reals=256,
            unrolled=512,
            apart=True,
            pairs=64,
            contracted=512,
            turns=8,
            postponed=256,
            windows=8,
        ),
        (("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True)),
        MACHINES["cpu"],
    )


def _gpu(name: str, tf32: float, f32: float, bandwidth: float, cache: int, memory: int | None) -> Target:
    rates, room = Rates(tf32, f32, bandwidth, 1.5e-6), Room(cache=cache, memory=memory)
    rewrites = replace(_ACCELERATOR, packed=1 << 16, deferred_rows=1 << 30, unroll=4, unrolled=512)
    return Target(name, "gpu", rates, room, rewrites, machine=MACHINES.get(name))


def _tpu(name: str, bf16: float, elements: float, bandwidth: float, cache: int, memory: int | None) -> Target:
    rates, room = Rates(bf16, elements, bandwidth, 2e-6), Room(cache=cache, memory=memory)
    return Target(name, "tpu", rates, room, _ACCELERATOR, machine=MACHINES.get(name))


#: From the makers' data sheets: products in TF32 (bfloat16 on TPUs, float32 where there is no other), as jax computes them
#: by default. Of TPUs the rate of other operations is that of their vector unit's lanes.
_KNOWN = {
    t.name: t
    for t in (
        _gpu("gpu", 2e13, 1e12, 1e12, 40 * _MIB, None),
        _gpu("t4", 8.1e12, 8.1e12, 3.2e11, 4 * _MIB, 15 * _GIB),
        _gpu("a100", 1.56e14, 1.95e13, 2.0e12, 40 * _MIB, 80 * _GIB),
        _gpu("h100", 4.94e14, 6.7e13, 3.35e12, 50 * _MIB, 80 * _GIB),
        _gpu("h200", 4.94e14, 6.7e13, 4.8e12, 50 * _MIB, 139 * _GIB),
        _tpu("tpu", 5e13, 2e12, 8e11, 64 * _MIB, None),
        _tpu("v5e", 1.97e14, 6e12, 8.2e11, 128 * _MIB, 16 * _GIB),
        _tpu("v6e", 9.18e14, 7e12, 1.64e12, 128 * _MIB, 32 * _GIB),
    )
}

#: Part of what jax calls a device (``device_kind``), and the target.
_KINDS = {"T4": "t4", "A100": "a100", "H100": "h100", "H200": "h200", "v5 lite": "v5e", "v5e": "v5e", "v6": "v6e"}


def target(name: str | None = None) -> Target:
    """A machine to compile for: its rates, its memory, and what pays there.

    Args:
      name: "cpu" (the cores of this process), "t4", "a100", "h100", "h200", "v5e", "v6e", or "gpu" or "tpu" for one of which
        no more is known; None: the devices that jax has here. Several: "h200:8" of one host, "h200:2x8" of two hosts, "v5e:4x4"
        of TPU chips by rows and columns. Rates and memory are those of one device.

    Returns:
      A :class:`Target` for ``rlfx.compile(target=)``: a frozen value, of which ``dataclasses.replace`` makes another.
      ``target.compile(fn, *shapes)`` compiles a function for it.

    Raises:
      ScheduleError: the name is not known, or there are no such grids of it.

    Example:
      >>> import rlfx
      >>> rlfx.target("h200").room.memory // 2**30
      139
      >>> rlfx.target("cpu") == rlfx.target("cpu")
      True
      >>> rlfx.target("h200:2x8").devices
      16
    """
    name = expect("name", name, optional(TEXT), ScheduleError, of="target")
    if name is None:
        return _around() or target_of(jax.devices()[0])
    known, several, grid = name.partition(":")
    found = _cpu() if known == "cpu" else _KNOWN.get(known)
    if found is None:
        fact = f"No machine named {known!r} is known: cpu, {', '.join(_KNOWN)}."
        fix = 'Name one of them, or change one: dataclasses.replace(rlfx.target("gpu"), name="mine", rates=...).'
        raise ScheduleError(located(fact, where=J.here(), fix=fix))
    return _of_several(found, grid) if several else found


def _of_several(one: Target, grid: str) -> Target:
    numbers = tuple(map(int, grid.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid) else ()
    machine = None if one.machine is None else replace(one.machine, grid=numbers)
    if machine is None or not numbers or (why := machine.misfit()):
        fact = f"There is no machine {one.name}:{grid}"
        if machine is None:
            fact += f": of {one.name} not enough is known."
        else:
            fact += f". {why}." if numbers and why else "."
        raise ScheduleError(
            located(fact, where=J.here(), fix='Give a number, or rows x columns: "h200:8", "h200:2x8", "v5e:4x4".')
        )
    return replace(one, name=f"{one.name}:{grid}", machine=machine)


def _around() -> Target | None:
    """The device that the trace around is for, if it names one (``Target.compile`` does)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else target_of(device)


def _target(value: Any) -> Target:
    if isinstance(value, Target):
        return value
    if not isinstance(value, str):
        raise TypeError
    return target(value)


#: What ``target=`` takes: a value, or its name.
TARGET = Kind("a target, or the name of one", 'rlfx.target("h200")', _target)


@functools.lru_cache(maxsize=64)
def target_of(device: Any) -> Target:
    """The target that a jax device is; of a kind that is not known, what is known of its platform.

    Example:
      >>> import jax
      >>> target_of(jax.devices("cpu")[0]).name
      'cpu'
    """
    if device.platform == "cpu":
        return _cpu()
    kinds = (name for part, name in _KINDS.items() if part.lower() in device.device_kind.lower())
    found = _KNOWN.get(next(kinds, device.platform)) or replace(_cpu(), rewrites=Rewrites())
    return found if found.platform == device.platform else _KNOWN.get(device.platform, found)
