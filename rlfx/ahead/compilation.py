"""What a program takes on a machine that is not here, by that machine's own compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from rlfx.ahead import kept, process
from rlfx.ahead.environment import find
from rlfx.ahead.kernels import Kernel, kernels
from rlfx.ahead.launches import Collective, Counted, Loop, Transfer, count
from rlfx.ahead.machines import Machine
from rlfx.ahead.program import export

#: Seconds that a compilation may take.
LIMIT = 1800.0


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a machine, not run: what it takes, not how long it takes, nor that it is right.

    Bytes are those of one device.

    Attributes:
      name: of the function.
      target: the machine.
      plugin: what compiled it: "cuda", "tpu" or "cpu".
      devices: that the program runs on.
      temp_bytes: temporary memory (on a TPU without what stays in its vector memory).
      peak_bytes: of everything at a time, where the backend says so.
      argument_bytes, output_bytes: of its arguments and results.
      alias_bytes: of results that lie in donated arguments.
      host_temp_bytes: temporary memory of the host (offloaded values).
      kernels: what ptxas says of each kernel (CUDA alone).
      flops, bytes_accessed: by XLA, where its backend counts them.
      seconds: that compiling took.
      versions: of the compiler, by package.
      hlo: the text of the optimised module.
    """

    name: str
    target: str
    plugin: str
    devices: int
    temp_bytes: int
    peak_bytes: int | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    host_temp_bytes: int
    kernels: tuple[Kernel, ...]
    flops: float | None
    bytes_accessed: float | None
    seconds: float
    versions: tuple[tuple[str, str], ...]
    hlo: str = field(repr=False)

    @functools.cached_property
    def _counted(self) -> Counted:
        return count(self.hlo, host_loops=self.plugin == "cuda")

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Loops outside of others: how often each runs, and what an iteration launches."""
        return self._counted.loops

    @property
    def launches(self) -> int | None:
        """Kernels that one call launches; None if a loop runs as often as data says (:meth:`launches_if`).

        Of a conditional the dearest branch counts. (A TPU starts a program once: there these are its operations.)
        """
        return self.launches_if(1) if all(loop.is_known for loop in self.loops) else None

    def launches_if(self, trips: int) -> int:
        """Kernels that one call launches if every loop whose length is not known runs ``trips`` times."""
        return self._counted.kernels + sum(loop.launches(trips) for loop in self.loops)

    @property
    def conditionals(self) -> int:
        """How many conditionals there are in the program's text."""
        return self._counted.conditionals

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Where devices meet, and how often."""
        return self._counted.collectives

    @property
    def host_transfers(self) -> tuple[Transfer, ...]:
        """What goes between host and device while the program runs."""
        return self._counted.transfers

    @property
    def spill_bytes(self) -> int:
        """Of all kernels."""
        return sum(kernel.spill_bytes for kernel in self.kernels)

    def __str__(self) -> str:
        many = f", {self.devices} devices" if self.devices > 1 else ""
        lines = [
            f"{self.name} compiled for {self.target}{many} in {self.seconds:.1f} s ({_listed(self.versions)}), not run"
        ]
        memory = f" memory of a device: temporaries {_mib(self.temp_bytes)}, arguments {_mib(self.argument_bytes)}"
        memory += f", results {_mib(self.output_bytes)}"
        lines.append(memory + (f", {_mib(self.host_temp_bytes)} on the host" if self.host_temp_bytes else ""))
        known = self.launches
        lines.append(f" launches: {known}" if known is not None else f" launches: {self.launches_if(1)} or more")
        lines += [line for loop in self.loops for line in _loop_lines(loop, 2)]
        if self.conditionals:
            lines.append(f"  {self.conditionals} conditionals, each counted as its dearest branch")
        lines += [
            f" {c.count} {c.kind} of {_mib(c.bytes)}" + (" in loops" if c.in_loop else "") for c in self.collectives
        ]
        lines += [_transfer_line(transfer) for transfer in self.host_transfers]
        if self.kernels:
            most, shared = max(k.registers for k in self.kernels), max(k.shared_bytes for k in self.kernels)
            text = f" {len(self.kernels)} kernels: at most {most} registers, {shared} bytes of shared memory"
            lines.append(text + f", {self.spill_bytes} bytes spilled")
        return "\n".join(lines)


def _loop_lines(loop: Loop, depth: int) -> list[str]:
    times = "as often as data says, each time" if loop.trips is None else f"{loop.trips} times"
    own = f"{' ' * depth}{times} {loop.kernels} kernels"
    return [own, *(line for inner in loop.loops for line in _loop_lines(inner, depth + 2))]


def _transfer_line(transfer: Transfer) -> str:
    if transfer.kind == "condition":
        return f" {transfer.count} loops on data, whose condition the host reads each time"
    behind = f", behind {transfer.behind} kernels" if transfer.behind else ""
    return f" {transfer.count} {transfer.kind} of {_mib(transfer.bytes)}{behind}"


def _listed(versions: Sequence[tuple[str, str]]) -> str:
    shown = [f"{name} {version}" for name, version in versions if name in ("jax", "jax-cuda12-plugin", "libtpu")]
    return ", ".join(shown)


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB" if n >= 2**10 else f"{n} bytes"


def compile_for(
    machine: Machine, label: str, fn: Callable, arguments: Sequence[Any], limit: float = LIMIT
) -> Compilation:
    """A function compiled for a machine: see :meth:`rlfx._target.Target.compile`."""
    environment = find(machine.plugin, jax.__version__)
    program = export(fn, arguments, machine)
    request = process.request_for(machine, program, environment)
    key = kept.key_of(program, request, environment)
    answer = kept.read(key)
    if answer is None:
        answer = process.run(environment, request, program, limit)
        kept.write(key, answer)
    return read(program.name, label, machine.plugin, program.devices, answer)


def read(name: str, label: str, plugin: str, devices: int, answer: dict[str, Any]) -> Compilation:
    """The answer of a compiler as a value."""
    memory, cost = answer["memory"], answer.get("cost") or {}
    return Compilation(
        name,
        label,
        plugin,
        devices,
        temp_bytes=memory["temp_size_in_bytes"],
        peak_bytes=memory.get("peak_memory_in_bytes"),
        argument_bytes=memory["argument_size_in_bytes"],
        output_bytes=memory["output_size_in_bytes"],
        alias_bytes=memory["alias_size_in_bytes"],
        host_temp_bytes=memory.get("host_temp_size_in_bytes", 0),
        kernels=kernels(answer.get("kernels", ""), answer.get("thunks", "")),
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        seconds=answer["seconds"],
        versions=tuple(sorted((name, v) for name, v in answer["versions"].items() if v)),
        hlo=answer["hlo"],
    )
