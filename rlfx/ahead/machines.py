"""Machines as their compilers want them described. A value each; nothing here needs the machine, or its plugin."""

from __future__ import annotations

import math
from dataclasses import dataclass

_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_core}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{kind}"
"""


@dataclass(frozen=True)
class Machine:
    """What a compiler is told of a machine.

    Attributes:
      name: as ``rlfx.target`` knows one device of it.
      plugin: "cuda", "tpu" or "cpu": which environment compiles for it.
      kind: what jax calls such a device (``device_kind``).
      cores: of one device.
      grid: its devices. Of GPUs ``(hosts, devices of a host)``, of TPUs the chips along two axes, of a CPU their number;
        ``()`` for one device.
      capability: of a GPU; ``(0, 0)`` elsewhere.
      description: the text that XLA:GPU takes; empty elsewhere.
    """

    name: str
    plugin: str
    kind: str
    cores: int = 1
    grid: tuple[int, ...] = ()
    capability: tuple[int, int] = (0, 0)
    description: str = ""

    @property
    def devices(self) -> int:
        return math.prod(self.grid)

    @property
    def topology(self) -> str:
        """The grid, as the plugin names it."""
        if self.plugin == "cuda":
            hosts, each = (1,) * (2 - len(self.grid)) + self.grid
            return f"{hosts}x{each}x1"
        if self.plugin == "tpu":
            along = self.grid if len(self.grid) == 2 else _CHIPS[self.devices]
            return f"{self.name}:{along[0]}x{along[1]}"
        return str(self.devices)

    def misfit(self) -> str | None:
        """Why there is no such grid; None if there is."""
        if len(self.grid) > (1 if self.plugin == "cpu" else 2):
            return "A CPU's devices are one number" if self.plugin == "cpu" else "A grid has one or two numbers"
        if self.plugin == "tpu" and len(self.grid) == 1 and self.devices not in _CHIPS:
            return f"TPUs are given as chips along two axes, or one of {', '.join(map(str, sorted(_CHIPS)))}"
        if self.plugin == "tpu" and len(self.grid) == 2 and any(n % 2 for n in self.grid):
            return "TPU hosts have 2 x 2 chips, so both numbers are even"
        return None


#: TPU chips by number. (A host has 2 x 2; one device is compiled for as the first of them.)
_CHIPS = {1: (2, 2), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}


def _gpu(name: str, kind: str, capability: tuple[int, int], cores: int, **figures: object) -> Machine:
    major, minor = capability
    text = _TEXT.format(kind=kind, cores=cores, major=major, minor=minor, **figures)
    return Machine(name, "cuda", kind, cores, capability=capability, description=text)


_HOPPER = {
    "shared_core": 233472,
    "shared_block": 232448,
    "threads": 2048,
    "fpus": 128,
    "clock": 1.98,
    "cache": 50 << 20,
}

#: From the makers' figures; XLA asks no device while it compiles for one of them.
MACHINES = {
    m.name: m
    for m in (
        _gpu("h200", "NVIDIA H200", (9, 0), 132, memory=151397597184, bandwidth=4800000000000, **_HOPPER),
        _gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, memory=84978434048, bandwidth=3352320000000, **_HOPPER),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, memory=85100068864, bandwidth=2039040000000, cache=40 << 20,
             shared_core=167936, shared_block=166912, threads=2048, fpus=64, clock=1.41),
        _gpu("t4", "Tesla T4", (7, 5), 40, memory=15828320256, bandwidth=320000000000, cache=4 << 20,
             shared_core=65536, shared_block=65536, threads=1024, fpus=64, clock=1.59),
        Machine("v5e", "tpu", "TPU v5 lite"),
        Machine("v6e", "tpu", "TPU v6 lite"),
        Machine("cpu", "cpu", "cpu"),
    )
}  # fmt: skip
