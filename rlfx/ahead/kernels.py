"""Kernels of a CUDA program: registers, shared memory and spills, as ptxas and XLA say."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
      name: as XLA calls it.
      registers: of a thread.
      shared_bytes: shared memory of a block.
      spill_bytes: registers that are kept in memory, stores and loads.
      threads, blocks: that a launch has; None where XLA does not say.
    """

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    threads: int | None = None
    blocks: int | None = None


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCHED = re.compile(
    r"k(?:Custom)?Kernel\s.*?\] (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)"
)


def kernels(said: str, launched: str = "") -> tuple[Kernel, ...]:
    """Kernels from the output of ``ptxas -v`` and XLA's list of what it launches (``thunk_sequence``), by name.

    Example:
      >>> kernels('''ptxas info    : Compiling entry function 'add' for 'sm_90a'
      ... ptxas info    : Function properties for add
      ...     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
      ... ptxas info    : Used 28 registers, used 0 barriers, 1024 bytes smem''')
      (Kernel(name='add', registers=28, shared_bytes=1024, spill_bytes=12, threads=None, blocks=None),)
    """
    sizes = {}
    for name, *figures in _LAUNCHED.findall(launched):
        x, y, z, tx, ty, tz, shared = map(int, figures)
        sizes[name] = (x * y * z, tx * ty * tz, shared)
    found: dict[str, Kernel] = {}
    name, spills = None, 0
    for line in said.splitlines():
        if entry := _ENTRY.search(line):
            name, spills = entry.group(1), 0
        elif spilled := _SPILLS.search(line):
            spills = int(spilled.group(1)) + int(spilled.group(2))
        elif name is not None and (used := _USED.search(line)):
            blocks, threads, dynamic = sizes.get(name, (None, None, 0))
            static = _SHARED.search(line)
            shared = max(dynamic, int(static.group(1)) if static else 0)
            found[name] = Kernel(name, int(used.group(1)), shared, spills, threads, blocks)
            name = None
    return tuple(found[name] for name in sorted(found))
