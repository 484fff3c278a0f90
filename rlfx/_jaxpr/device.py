"""What programs run on: the platform, and what XLA does there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import xla_bridge
from jax.experimental.xla_metadata import set_xla_metadata


def platform() -> str:
    """The platform that programs are traced for, "cpu", "gpu" or "tpu": that of the mesh around, or jax's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def has_one_device() -> bool:
    """Whether nothing can be split over devices."""
    return jax.device_count() == 1


def backend_has_started() -> bool:
    """Whether jax has initialised its devices: their number is fixed from then on."""
    return xla_bridge.backends_are_initialized()


def computed_once(fn: Callable, static_argnums: tuple[int, ...] = ()) -> Callable:
    """``fn``, whose results XLA computes once, however many use them.

    Operations that XLA counts as cheap are computed again in every fusion that uses their results, be they hundreds one after
    another. On CPUs ``optimization_barrier`` is gone by then, but a call that must not be inlined stays; elsewhere it is a
    barrier.
    """

    def body(*args: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # of the call alone, not of what is inside
            return fn(*args)

    functools.update_wrapper(body, fn)
    apart, within = (
        jax.jit(body, static_argnums=static_argnums),
        jax.jit(fn, static_argnums=static_argnums, inline=True),
    )

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if platform() != "cpu":
            return within(*args)
        with set_xla_metadata(inlineable="false"):
            return apart(*args)

    return call


def stays_a_call(eqn: Any) -> bool:
    """Whether an equation is a call that XLA must not inline, one of :func:`computed_once`.

    Example:
      >>> import jax
      >>> (eqn,) = jax.make_jaxpr(computed_once(lambda x: 2.0 * x))(1.0).eqns
      >>> stays_a_call(eqn) == (platform() == "cpu")
      True
    """
    return (eqn.ctx.xla_metadata or {}).get("inlineable") == "false" and "jaxpr" in eqn.params
