"""``rlfx.place.assign_stages``: an update of several models on several devices, or on one where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import KEY, expect, optional
from rlfx.errors import PlacementError, located
from rlfx.place.baselines import Assignment
from rlfx.place.hardware import HARDWARE, Hardware, measured
from rlfx.place.methods import checked_method, solve
from rlfx.place.placement import Placement, chosen_devices
from rlfx.place.resident import StageExecutor
from rlfx.place.stages import staged, staged_problem, whole


def assign_stages(
    fn: Callable[..., Any],
    *args: Any,
    names: Sequence[str] = (),
    carry: int = 0,
    constant_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    devices: Sequence[Any] | None = None,
    method: str = "polish",
    budget: int = 1024,
    hardware: Hardware | None = None,
    key: jax.Array | None = None,
) -> Placement:
    """Group a function into stages, measure them, and decide where each runs: weights stay there from call to call.

    Stages are measured on all devices at the same time, the whole function as one program on the first device. Where that is
    predicted to be faster than any assignment found, everything is that one program, and ``explain`` says so.

    Args:
      fn: a pure JAX function of pytrees of arrays, such as ``update(state, batch) -> (state, metrics)``.
      *args: the arguments of a call; with ``jax.ShapeDtypeStruct`` nothing is measured, and durations are ``hardware``'s.
      names, carry, constant_argnums, donate_argnums: see :func:`rlfx.place.stages.staged`.
      devices: jax devices, at least two; by default all of the default platform.
      method, budget, key: see :func:`rlfx.place.assign`.
      hardware: the machine's rates and memory; measured if not given.

    Returns:
      The placed function. What it returns is left on the devices that computed it; arguments that are not the objects of the last
      call, nor its results, are put where they are read.

    Raises:
      PlacementError: side effects, fewer than two devices, nothing that fits into memory, or unknown names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.place import assign_stages, hardware
      >>> def update(weights, x):
      ...     return [w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w) for w in weights]
      >>> weights, x = [jnp.ones((4, 4)), 2 * jnp.ones((4, 4))], jnp.ones((8, 4))
      >>> machine = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)
      >>> placed = assign_stages(update, weights, x, carry=1, devices=jax.devices()[:2], hardware=machine, method="heft")
      >>> weights = placed(placed(weights, x), x)
      >>> weights[0].shape
      (4, 4)
    """
    method, budget = checked_method("assign_stages", method, budget)
    key = expect("key", key, optional(KEY), PlacementError, of="assign_stages")
    expect("hardware", hardware, optional(HARDWARE), PlacementError, of="assign_stages")
    chosen = chosen_devices(devices)
    graph = staged(
        fn, *args, names=names, carry=carry, constant_argnums=constant_argnums, donate_argnums=donate_argnums,
        devices=len(chosen),
    )  # fmt: skip
    machine = hardware or measured(list(chosen))
    if machine.devices != len(chosen):
        raise PlacementError(
            located(f"hardware describes {machine.devices} devices and {len(chosen)} are given.",
                    fix="Pass a Hardware with one entry per device, or none to measure them.")
        )  # fmt: skip
    problem = staged_problem(graph, machine)
    leaves = jax.tree.leaves(args)
    known = not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    flat = [jnp.asarray(x) for x in leaves] if known else None
    one, zero = whole(graph), np.zeros(1, np.int32)
    first = staged_problem(one, machine)
    alone = float(problem.one_device().min())
    if flat is not None:
        problem = StageExecutor(graph, problem, chosen).calibrated(problem, flat)
        alone = StageExecutor(one, first, chosen[:1]).measure(flat, Assignment(zero, zero))
    result = solve(problem, method, jax.random.key(0) if key is None else key, budget)
    if result.cost < alone:
        return Placement(graph, problem, chosen, result.assignment, result.cost, method, result.calls, alone=alone)
    first.exec_time[:] = alone
    return Placement(one, first, chosen, Assignment(zero, zero), alone, method, result.calls, alone=result.cost)
