"""Machines as the simulator sees them: compute and memory rates, links, capacities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import INT32, POSITIVE, TEXT, Kind, each, expect, instance, integer, integers, number, optional
from rlfx.cores import available_cores
from rlfx.errors import PlacementError, located
from rlfx.place.graph import GRAPH, DataflowGraph

_NAMES = each(TEXT, "names of devices", '("gpu:0", "gpu:1")')
_RATES = Kind(
    "an array of numbers", "np.ones(2)", lambda value: np.asarray(value).astype(np.float64, casting="same_kind")
)
_ABOVE_ZERO = number(above=0)


def _positive(user: str, **given: Any) -> list[float]:
    """Numbers above zero, as ``float``."""
    return [expect(name, value, _ABOVE_ZERO, PlacementError, of=user) for name, value in given.items()]


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
      names: of the devices, ``[D]``.
      flops: floating-point operations per second of each device, ``[D]``.
      memory_rate: bytes per second between a device and its own memory, ``[D]``.
      overhead: seconds to launch a kernel, ``[D]``.
      memory: bytes of each device's memory, ``[D]``.
      bandwidth: bytes per second of the link from row to column, ``[D, D]``; the diagonal is each device's own memory,
        ``memory_rate``, whatever is given.
      latency: seconds to start a transfer, ``[D, D]``.
      lane: which of the row device's lanes, from 0 to D - 1, transfers from row to column take, one at a time, int32 ``[D, D]``;
        ``[0, 0]``: each column has its own.
    """

    names: tuple[str, ...]
    flops: np.ndarray
    memory_rate: np.ndarray
    overhead: np.ndarray
    memory: np.ndarray
    bandwidth: np.ndarray
    latency: np.ndarray
    lane: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def __post_init__(self) -> None:
        """Every rate is positive; the diagonal of the links is the devices' own memory."""
        names = expect("names", self.names, _NAMES, PlacementError, of="Hardware")
        object.__setattr__(self, "names", names)
        n = len(names)
        shapes = dict.fromkeys(("flops", "memory_rate", "overhead", "memory"), (n,)) | dict.fromkeys(
            ("bandwidth", "latency"), (n, n)
        )
        for label, shape in shapes.items():
            rates = expect(label, getattr(self, label), _RATES, PlacementError, of="Hardware")
            object.__setattr__(self, label, rates)
            if np.shape(getattr(self, label)) != shape:
                fact = f"Hardware.{label} of {n} devices has shape {np.shape(getattr(self, label))}."
                raise PlacementError(located(fact, fix=f"Give an array of shape {shape}."))
        lane = np.asarray(expect("lane", self.lane, integers(2, "[D, D]"), PlacementError, of="Hardware"), np.int32)
        object.__setattr__(self, "lane", lane)
        if lane.size and (lane.shape != (n, n) or lane.min() < 0 or lane.max() >= n):
            fact = f"Hardware.lane of {n} devices is {lane.tolist()}."
            raise PlacementError(located(fact, fix=f"Give numbers from 0 to {n - 1}, {(n, n)}."))
        bandwidth = np.array(self.bandwidth, np.float64)
        np.fill_diagonal(bandwidth, self.memory_rate)
        object.__setattr__(self, "bandwidth", bandwidth)
        off = ~np.eye(len(self.names), dtype=bool)
        for label, values in (
            ("flops", self.flops),
            ("memory_rate", self.memory_rate),
            ("overhead", self.overhead),
            ("memory", self.memory),
            ("bandwidth", self.bandwidth[off]),
            ("latency", self.latency[off]),
        ):
            if np.any(~(np.asarray(values) > 0)):
                raise PlacementError(
                    located(f"Hardware.{label} must be positive everywhere, got {np.asarray(values).tolist()}.",
                            fix="Give measured rates; a kernel launch and a transfer both take some time.")
                )  # fmt: skip

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.names)

    def fitted(self, graph: DataflowGraph, one_device_seconds: float) -> Hardware:
        """This machine, uniformly faster or slower so that one device runs the whole graph in the given time.

        Links keep their speed. The paper prints one-device times but neither its kernels' rates nor its shardings.
        """
        expect("graph", graph, GRAPH, PlacementError, of="fitted")
        (one_device_seconds,) = _positive("fitted", one_device_seconds=one_device_seconds)
        factor = float(task_seconds(graph, self)[:, 0].sum()) / one_device_seconds
        return replace(
            self, flops=self.flops * factor, memory_rate=self.memory_rate * factor, overhead=self.overhead / factor
        )

    def with_memory(self, nbytes: float) -> Hardware:
        """This machine with the same memory limit on every device."""
        (nbytes,) = _positive("with_memory", nbytes=nbytes)
        return replace(self, memory=np.full(self.devices, nbytes, np.float64))

    def with_links(self, bytes_per_second: float) -> Hardware:
        """This machine with the same bandwidth on every link."""
        (bytes_per_second,) = _positive("with_links", bytes_per_second=bytes_per_second)
        return replace(self, bandwidth=np.full((self.devices, self.devices), bytes_per_second, np.float64))

    def with_shared_links(self, slower_than: float = np.inf) -> Hardware:
        """This machine with one lane for all that a device sends, as on PCIe: one transfer at a time, wherever it goes.

        Args:
          slower_than: links of at least so many bytes per second stay lanes of their own, as NVLinks are.

        Raises:
          PlacementError: the rate is no positive number.

        Example:
          >>> p100_pcie(3).with_shared_links().lane.tolist()  # the diagonal is not used
          [[0, 1, 1], [0, 1, 0], [0, 0, 2]]
        """
        slower_than = expect("slower_than", slower_than, number(above=0, infinite=True), PlacementError)
        slow = self.bandwidth < slower_than
        np.fill_diagonal(slow, False)
        own, first = np.arange(self.devices), slow.argmax(axis=1)
        return replace(self, lane=np.where(slow, first[:, None], own[None]).astype(np.int32))


HARDWARE = instance(Hardware, "a Hardware", "rlfx.place.hardware.measured()")


def task_seconds(graph: DataflowGraph, hardware: Hardware) -> np.ndarray:
    """Seconds of every task of a graph on every device, float64 ``[tasks, D]``: a roofline plus the launch overhead."""
    flops = np.array([graph.nodes[i].flops for i in graph.tasks])
    traffic = np.array([graph.nodes[i].traffic for i in graph.tasks])
    compute, memory = flops[:, None] / hardware.flops, traffic[:, None] / hardware.memory_rate
    return np.maximum(compute, memory) + hardware.overhead


def uniform(
    devices: int,
    *,
    flops: float,
    memory_rate: float,
    memory: float,
    bandwidth: float,
    latency: float = 10e-6,
    overhead: float = 5e-6,
    name: str = "gpu",
) -> Hardware:
    """Equal devices, one dedicated link per ordered pair.

    Raises:
      PlacementError: a rate that is no positive number.

    Example:
      >>> uniform(2, flops=1e12, memory_rate=1e11, memory=1e9, bandwidth=1e10).names
      ('gpu:0', 'gpu:1')
    """
    devices = expect("devices", devices, POSITIVE, PlacementError, of="uniform")
    name = expect("name", name, TEXT, PlacementError, of="uniform")
    own = _positive("uniform", flops=flops, memory_rate=memory_rate, overhead=overhead, memory=memory)
    links = _positive("uniform", bandwidth=bandwidth, latency=latency)
    names = tuple(f"{name}:{i}" for i in range(devices))
    return Hardware(names, *(x * np.ones(devices) for x in own), *(x * np.ones((devices, devices)) for x in links))


def p100_pcie(devices: int = 4, bandwidth: float = 10e9, memory: float = 16e9) -> Hardware:
    """Tesla P100s on PCIe (section 7.1): 9.3 TFLOP/s single precision, 732 GB/s memory."""
    return uniform(devices, flops=9.3e12, memory_rate=732e9, memory=memory, bandwidth=bandwidth, name="p100")


def _even(value: Any) -> int:
    if POSITIVE.take(value) % 2:
        raise ValueError
    return POSITIVE.take(value)


_EVEN = Kind("a positive even integer", "8", _even)


def v100_meshes(devices: int = 8, nvlink: float = 45e9, bridge: float = 22.5e9, pcie: float = 10e9) -> Hardware:
    """V100s in two fully connected NVLink meshes (appendix I.2), with one NVLink from each device to its twin.

    Other pairs of the two meshes go through PCIe. 15.7 TFLOP/s, 900 GB/s memory, 32 GB.
    """
    devices = expect("devices", devices, _EVEN, PlacementError, of="v100_meshes")
    nvlink, bridge, pcie = _positive("v100_meshes", nvlink=nvlink, bridge=bridge, pcie=pcie)
    base = uniform(devices, flops=15.7e12, memory_rate=900e9, memory=32e9, bandwidth=pcie, name="v100")
    mesh = np.arange(devices) // (devices // 2)
    twin = np.arange(devices) % (devices // 2)
    same, paired = mesh[:, None] == mesh, (twin[:, None] == twin) & (mesh[:, None] != mesh)
    return replace(base, bandwidth=np.where(same, nvlink, np.where(paired, bridge, pcie)))


_DEVICE = instance(jax.Device, "a device of jax", "jax.devices()[0]")
_DEVICES = Kind("devices of jax", "jax.devices()", lambda given: tuple(_DEVICE.take(device) for device in given))


def core_devices(count: int | None = None) -> tuple[Any, ...]:
    """CPU cores as devices for placement: each has one thread, the one that calls, and shares it with no other device.

    The host devices of ``jax.devices()`` share XLA's threads: a kernel of one device may run on all cores, and waits for those of
    the others. Arrays and other computations stay on jax's own devices unless put on these. They may be made at any time; they
    are the same ones in every call.

    Args:
      count: how many; by default as many as this process may use.

    Returns:
      The devices, for ``devices=`` of :func:`assign_stages` and :func:`assign`.

    Raises:
      PlacementError: ``count`` is no positive integer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.place import core_devices
      >>> first, second = core_devices(2)
      >>> x = jax.device_put(jnp.ones(3), second)
      >>> (x + x).devices() == {second}
      True
    """
    count = expect("count", count, optional(POSITIVE), PlacementError, of="core_devices")
    return J.core_devices(count or available_cores())


def check_devices(devices: Sequence[Any]) -> tuple[Any, ...]:
    """The devices, each of which is one, and is still there.

    Raises:
      PlacementError: one is not.
    """
    chosen: tuple[Any, ...] = expect("devices", devices, _DEVICES, PlacementError)
    for device in chosen:
        present = J.devices_like(device)
        if device not in present:
            raise PlacementError(
                located(
                    f"Device {device} of the placement is gone: {device.platform} has {', '.join(map(str, present))}.",
                    fix="Assign again with rlfx.place.assign(..., devices=jax.devices()).",
                )
            )
    return chosen


def _median_seconds(fn: Any, *args: Any, repeats: int = 7) -> float:
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measured(devices: list[Any] | None = None, size: int = 512) -> Hardware:
    """This machine's jax devices, measured with a matrix product, an addition, an empty kernel and transfers.

    Args:
      devices: jax devices, by default all of the default platform.
      size: edge of the square matrices.

    Returns:
      Medians of a few runs, taken one device at a time: devices that share cores (XLA's host devices) look faster here
      than they are together.

    Raises:
      PlacementError: no devices, or no size.
    """
    devices = list(jax.devices() if devices is None else check_devices(devices))
    size = expect("size", size, integer(1, INT32 // 4), PlacementError, of="measured")
    if not devices:
        raise PlacementError(located("measured: there are no devices to measure.", fix="Give jax.devices()."))
    count = len(devices)
    product, add, empty = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1.0), jax.jit(lambda x: x + 1.0)
    flops, rate, overhead = np.zeros(count), np.zeros(count), np.zeros(count)
    nbytes = 4.0 * (4 * size) ** 2
    on = [jax.device_put(jnp.ones((size, size), jnp.float32), d) for d in devices]
    big = [jax.device_put(jnp.ones((4 * size, 4 * size), jnp.float32), d) for d in devices]
    for i, d in enumerate(devices):
        overhead[i] = _median_seconds(empty, jax.device_put(jnp.float32(0.0), d), repeats=50)
        flops[i] = 2.0 * size**3 / max(_median_seconds(product, on[i]) - overhead[i], 1e-9)
        rate[i] = 2.0 * nbytes / max(_median_seconds(add, big[i]) - overhead[i], 1e-9)
    bandwidth, latency = np.ones((count, count)), np.ones((count, count))
    for i in range(count):
        for j in range(count):
            if i != j:
                small = jax.device_put(jnp.float32(0.0), devices[i])
                latency[i, j] = _median_seconds(lambda x, d=devices[j]: jax.device_put(x, d), small, repeats=20)
                seconds = _median_seconds(lambda x, d=devices[j]: jax.device_put(x, d), big[i])
                bandwidth[i, j] = nbytes / max(seconds - latency[i, j], 1e-9)
    stats = [d.memory_stats() or {} for d in devices]
    memory = np.array([float(s.get("bytes_limit", 8e9)) for s in stats])
    return Hardware(tuple(str(d) for d in devices), flops, rate, overhead, memory, bandwidth, latency)
