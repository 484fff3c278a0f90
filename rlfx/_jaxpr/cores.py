"""CPU cores as devices: each is a client of XLA of its own, whose programs run in the thread that calls them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import SingleDeviceSharding

from rlfx._jaxpr.keys import is_key

_CORES: list[Any] = []  # made once a process: XLA's clients live as long as it
_LOCK = threading.Lock()
_POOL = "NPROC"  # where XLA reads how many threads a client has


def core_devices(count: int) -> tuple[Any, ...]:
    """So many devices of one thread each.

    The host devices that jax makes are of one client, whose pool of threads computes for all of them.
    """
    with _LOCK:
        before = os.environ.get(_POOL)
        os.environ[_POOL] = "1"
        try:
            while len(_CORES) < count:  # another node_id is another id of the device
                client = xla_client.make_cpu_client(asynchronous=False, num_devices=1, node_id=len(_CORES) + 1)
                _CORES.extend(client.local_devices())
        finally:
            if before is None:
                del os.environ[_POOL]
            else:
                os.environ[_POOL] = before
        return tuple(_CORES[:count])


def devices_like(device: Any) -> list[Any]:
    """The devices of jax on a device's platform, and the cores that are devices by themselves."""
    return [*jax.devices(device.platform), *(core for core in _CORES if core.platform == device.platform)]


def moved(values: Sequence[Any], device: Any) -> list[Any]:
    """Arrays on a device. Host devices read each other's memory: between them nothing but keys is copied.

    Between jax arrays XLA would copy in its pool of threads, of which there are as many as devices: behind a kernel.
    """
    if device.platform != "cpu" or not all(isinstance(x, jax.Array) and _on_host(x) for x in values):
        return jax.device_put(list(values), device)
    place = SingleDeviceSharding(device)
    return [
        jax.device_put(x, device) if is_key(x) else pxla.batched_device_put(x.aval, place, [np.asarray(x)], [device])
        for x in values
    ]


def _on_host(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"
