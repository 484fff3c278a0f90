"""CPU cores as devices: each is a client of XLA of its own, whose programs run in the thread that calls them."""

from __future__ import annotations

import os
import threading
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


def on_host_device(x: jax.Array, device: Any) -> jax.Array:
    """An array of one host device on another: a view of its memory, but for keys."""
    if is_key(x):
        return jax.device_put(x, device)
    return pxla.batched_device_put(x.aval, SingleDeviceSharding(device), [np.asarray(x)], [device])
