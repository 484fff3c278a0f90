"""A batch that lives in host memory, inside one program: every block is fetched while the one before is computed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import PlacementError, located
from rlfx.recurrence.execute.host import JAXLIB, note, refuse, to_host
from rlfx.transforms.blocks.flat import Axis, Block, take
from rlfx.transforms.blocks.loss import Blocks, Report, check, differentiable, report, trace


@dataclass(frozen=True)
class OffloadReport:
    """What is where.

    Attributes:
      blocks: how the function runs in blocks.
      host_bytes: the batch, in pinned host memory.
      device_bytes: the two blocks on the device: one in use, one on its way.
      on_device: bytes of the batch that are read as a whole, and so stay on the device.
      note: what is special about this backend; empty if nothing is.
    """

    blocks: Report
    host_bytes: int
    device_bytes: int
    on_device: int
    note: str

    def __str__(self) -> str:
        lines = [
            str(self.blocks),
            f"on the host {self.host_bytes:,} bytes, on the device 2 blocks: {self.device_bytes:,}",
        ]
        if self.on_device:
            lines.append(f"read as a whole, and so on the device: {self.on_device:,} bytes")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def require_host_memory(device: Any) -> None:
    """Raise if a device has no pinned host memory.

    Raises:
      PlacementError: naming the memories that it has.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise PlacementError(
            located(
                f"{device} has no pinned host memory, only {', '.join(kinds)}: there is nowhere to offload to.",
                fix="Use rlfx.incrementalize, which keeps the batch on the device.",
            )
        )


def fetch(x: Any, axis: Axis, block: Block) -> Any:
    """A block of a host array, on the device."""
    part = x if block.size == x.shape[0] and axis == Axis(0) else take(x, axis, block)
    return jax.device_put(part, jax.memory.Space.Device)


@dataclass(frozen=True)
class Offloaded:
    """A function whose batch is in host memory; see :func:`rlfx.offload`."""

    fn: Callable
    blocks: Blocks

    @property
    def __wrapped__(self) -> Callable:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse(J.platform(), JAXLIB)
        require_host_memory(jax.devices()[0])
        traced = trace(self.fn, args, kwargs, self.blocks.argnums)
        size = self.blocks.block_size(traced.n)
        check(traced.plan(), self.fn, strict=False)
        fetched = {i: fetch for i, batched in enumerate(traced.batched) if batched}
        inputs = [to_host(x) if i in fetched else x for i, x in enumerate(traced.inputs)]
        return jax.tree.unflatten(traced.out_tree, differentiable(traced, size, fetched)(*inputs))

    def explain(self, *args: Any, **kwargs: Any) -> OffloadReport:
        """What is on the host and on the device for these arguments."""
        traced = trace(self.fn, args, kwargs, self.blocks.argnums)
        size, plan = self.blocks.block_size(traced.n), traced.plan()
        inputs = plan.flat.inputs[len(plan.flat.inputs) - len(traced.inputs) :]
        leaves = [v for v, batched in zip(inputs, traced.batched, strict=True) if batched]
        whole = plan.read_whole()
        host = sum(_bytes(v) for v in leaves if v not in whole)
        stay = sum(_bytes(v) for v in leaves if v in whole)
        ahead = math.ceil(2 * host * size / traced.n)
        return OffloadReport(report(plan, size), host, ahead, stay, note(J.platform()))


def _bytes(value: Any) -> int:
    dtype = value.aval.dtype
    width = 8 if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize
    return math.prod(value.shape) * width
