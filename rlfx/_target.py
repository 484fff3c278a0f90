"""Machines that programs are compiled for, as values: what they do in a second, what fits, and which rewrites pay there.

Nothing here runs anything: the compiler asks these values, and ``compile(target=)`` gives others than those of the machine
at hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax

from rlfx._checks import TEXT, expect, optional
from rlfx.cores import available_cores
from rlfx.errors import ScheduleError, located

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
      memory: of the device; None: not known.
      host: whether host memory is another one than the device's.
    """

    cache: int
    tile: int | None = None
    at_once: int = 1 << 30
    in_block: int = 1 << 30
    memory: int | None = None
    host: bool = True


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites pay. (Each has a benchmark: ``benchmarks/rewrites.py``.)

    Attributes:
      contractions: weight gradients as contractions over rows (``cpu/contractions.py``).
      channels_last: convolutions inside loops with channels last (``cpu/convolution.py``).
      tree_reductions: maxima of rows by halves (``execute/ragged/tree_reduction.py``).
      shared_rows: products of one value with weights of at most so many rows are one while acting (``schedule/products.py``).
      deferred_rows: gradients of weights that a recurrence multiplies at most so many rows with are contracted after its
        backward loop (``gradient/deferred.py``).
    """

    contractions: bool = False
    channels_last: bool = False
    tree_reductions: bool = False
    shared_rows: int = 0
    deferred_rows: int = 0


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
    """

    name: str
    platform: str
    rates: Rates
    room: Room
    rewrites: Rewrites = Rewrites()
    sooner: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name if self.name == self.platform else f"{self.name} ({self.platform})"

    @property
    def is_here(self) -> bool:
        """Whether programs run on such a platform here."""
        return self.platform == jax.default_backend()


def _cpu() -> Target:
    """All the cores that the process may use, as measured on x86."""
    cores = available_cores()
    return Target(
        "cpu",
        "cpu",
        Rates(2.5e10 * cores, 1e10 * cores, 8e9, 1e-6),
        Room(cache=16 * _MIB, tile=16 * _MIB, at_once=4 * _MIB, in_block=_MIB, host=False),
        Rewrites(contractions=True, channels_last=True, tree_reductions=True, shared_rows=128, deferred_rows=12),
        (("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True)),
    )


def _gpu(name: str, tf32: float, f32: float, bandwidth: float, cache: int, memory: int | None) -> Target:
    return Target(name, "gpu", Rates(tf32, f32, bandwidth, 4e-6), Room(cache=cache, memory=memory))


def _tpu(name: str, bf16: float, elements: float, bandwidth: float, cache: int, memory: int | None) -> Target:
    return Target(name, "tpu", Rates(bf16, elements, bandwidth, 2e-6), Room(cache=cache, memory=memory))


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
        no more is known; None: the devices that jax has here.

    Returns:
      A :class:`Target` for ``rlfx.compile(target=)``: a frozen value, of which ``dataclasses.replace`` makes another.

    Raises:
      ScheduleError: the name is not known.

    Example:
      >>> import rlfx
      >>> rlfx.target("h200").room.memory // 2**30
      139
      >>> rlfx.target("cpu") == rlfx.target("cpu")
      True
    """
    name = expect("name", name, optional(TEXT), ScheduleError, of="target")
    if name is None:
        return target_of(jax.devices()[0])
    if name == "cpu":
        return _cpu()
    if name not in _KNOWN:
        fact = f"No machine named {name!r} is known: cpu, {', '.join(_KNOWN)}."
        fix = 'Name one of them, or change one: dataclasses.replace(rlfx.target("gpu"), name="mine", rates=...).'
        raise ScheduleError(located(fact, fix=fix))
    return _KNOWN[name]


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
