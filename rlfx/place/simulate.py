"""The work-conserving simulator, compiled: Algorithms 1 and 2 for a batch of assignments at once.

Because one device runs its tasks one after another and a link serves one sender, results enter a link in the order in
which their device started the tasks. Each step of the loop (:mod:`rlfx.place.events`) therefore starts one task, the next
one in time, and knows at once when it ends and when its copies arrive: no event queue is needed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import BOOLEAN, KEY, expect, integers, one_of, optional, reals
from rlfx.errors import PlacementError, located
from rlfx.place import events
from rlfx.place.problem import PROBLEM, Problem

Order = Literal["critical-path", "depth-first", "breadth-first", "random"]
ORDERS: tuple[Order, ...] = ("critical-path", "depth-first", "breadth-first", "random")


LIMB = 65536.0  # bytes


class Schedules(NamedTuple):
    """Simulated executions of B assignments.

    Attributes:
      makespan: float32 ``[B]``, seconds.
      start, finish: float32 ``[B, V]``, of each task.
      sent, arrived: float32 ``[B, V, D]``, of each copy of a result to a device; infinite where no copy is made.
    """

    makespan: jax.Array
    start: jax.Array
    finish: jax.Array
    sent: jax.Array
    arrived: jax.Array


def run_order(problem: Problem, order: Order, key: jax.Array | None = None) -> np.ndarray:
    """Run-time priorities of the tasks, int32 ``[V]``, lowest first (ChooseTask of Algorithm 1).

    ``critical-path`` prefers the longest path to an exit, ``depth-first`` the deepest ready task, ``breadth-first`` the
    shallowest, ``random`` (needs a key) is a random permutation.

    Raises:
      PlacementError: an unknown order, or ``random`` without a key.
    """
    expect("problem", problem, PROBLEM, PlacementError, of="run_order")
    order = expect("order", order, one_of(*ORDERS), PlacementError, of="run_order")
    key = expect("key", key, optional(KEY), PlacementError, of="run_order")
    if order == "random":
        if key is None:
            raise PlacementError(located("order='random' needs a PRNG key.", fix="Pass key=jax.random.key(0)."))
        return np.asarray(jax.random.permutation(key, problem.tasks), np.int32)
    scores = {"critical-path": -problem.to_exit[0], "depth-first": -problem.depth, "breadth-first": problem.depth}
    return ranks(scores[order])


def ranks(scores: np.ndarray) -> np.ndarray:
    """Positions in ascending order, ties by index, int32 ``[V]``.

    Example:
      >>> ranks(np.array([3.0, 1.0, 2.0])).tolist()
      [2, 0, 1]
    """
    position = np.empty(len(scores), np.int32)
    position[np.argsort(scores, kind="stable")] = np.arange(len(scores), dtype=np.int32)
    return position


def noise(key: jax.Array, problem: Problem, batch: int, sigma: float) -> tuple[jax.Array, jax.Array]:
    """Lognormal factors of mean one on execution and transfer times: float32 ``[B, V]`` and ``[B, V, D]``."""
    ke, kt = jax.random.split(key)
    shape = (batch, problem.tasks)
    mean = -0.5 * sigma**2
    return (
        jnp.exp(mean + sigma * jax.random.normal(ke, shape, jnp.float32)),
        jnp.exp(mean + sigma * jax.random.normal(kt, (*shape, problem.devices), jnp.float32)),
    )


def _run(
    problem: Problem,
    assignment: jax.Array,
    priority: jax.Array,
    fifo: bool,
    exec_noise: jax.Array | None,
    transfer_noise: jax.Array | None,
) -> Schedules:
    D = problem.exec_time.shape[1]
    device, priority = assignment.astype(jnp.int32), priority.astype(jnp.int32)
    makespan, times = events.run(problem, device, priority, fifo, exec_noise, transfer_noise, recorded=True)
    return Schedules(makespan, times[..., 0], times[..., 1], times[..., 2 : 2 + D], times[..., 2 + D :])


def bucketed(problem: Problem) -> Problem:
    """The same problem with as many edges as the next power of two: graphs of about one size share a compiled program.

    The edges added lead from task V to task V, and from a block that there is not: writes outside of an array are dropped.
    """
    if not isinstance(problem.edges, np.ndarray):
        return problem
    V, blocks = problem.tasks, len(problem.input_bytes)

    def padded(edges: np.ndarray, nowhere: tuple[int, int]) -> np.ndarray:
        rows = max(64, 1 << (len(edges) - 1).bit_length()) - len(edges)
        return np.concatenate([edges, np.broadcast_to(np.array(nowhere, np.int32), (rows, 2))])

    return replace(problem, edges=padded(problem.edges, (V, V)), input_edges=padded(problem.input_edges, (blocks, V)))


def _checked(problem: Problem, assignment: Any, priority: Any, fifo: Any, exec_noise: Any, transfer_noise: Any) -> None:
    """Raise PlacementError unless these are a problem, and arrays that fit it; devices are checked where they are known."""
    expect("problem", problem, PROBLEM, PlacementError, of="simulate")
    expect("fifo", fifo, BOOLEAN, PlacementError, of="simulate")
    expect("assignment", assignment, integers(2, "[B, V]"), PlacementError, of="simulate")
    expect("priority", priority, integers(2, "[B, V]"), PlacementError, of="simulate")
    expect("exec_noise", exec_noise, optional(reals(2, "[B, V]")), PlacementError, of="simulate")
    expect("transfer_noise", transfer_noise, optional(reals(3, "[B, V, D]")), PlacementError, of="simulate")
    rows = (np.shape(assignment)[0], problem.tasks)
    wanted = {"assignment": rows, "priority": rows, "exec_noise": rows, "transfer_noise": (*rows, problem.devices)}
    given = {"assignment": assignment, "priority": priority, "exec_noise": exec_noise, "transfer_noise": transfer_noise}
    for name, shape in wanted.items():
        if given[name] is not None and np.shape(given[name]) != shape:
            size = f"{problem.tasks} tasks on {problem.devices} devices"
            fact = f"simulate: {name} has shape {np.shape(given[name])}; there are {size}."
            raise PlacementError(located(fact, fix=f"Give an array of shape {shape}."))
    if not isinstance(assignment, jax.core.Tracer):
        outside = ~((np.asarray(assignment) >= 0) & (np.asarray(assignment) < problem.devices))
        if outside.any():
            b, v = (int(i) for i in np.argwhere(outside)[0])
            fact = f"simulate: task {v} of assignment {b} is on device {np.asarray(assignment)[b, v]}."
            raise PlacementError(located(fact, fix=f"Devices are 0, ..., {problem.devices - 1}."))


_compiled = jax.jit(_run, static_argnames="fifo")


def simulate(
    problem: Problem,
    assignment: jax.Array,
    priority: jax.Array,
    *,
    fifo: bool = False,
    exec_noise: jax.Array | None = None,
    transfer_noise: jax.Array | None = None,
) -> Schedules:
    """Simulate a batch of assignments (Algorithms 1 and 2); equals :func:`rlfx.place.oracle.simulate` bit for bit.

    Args:
      problem: V tasks on D devices.
      assignment: int ``[B, V]``.
      priority: int ``[B, V]``, a permutation each; the lowest ready task starts.
      fifo: the task whose inputs arrived first starts; priorities break ties.
      exec_noise: factors on execution times, float32 ``[B, V]``.
      transfer_noise: factors on transfer times by target, float32 ``[B, V, D]``.

    Returns:
      Makespans and all times, in seconds.

    Raises:
      PlacementError: no problem, an array of another shape, or a device that there is not.

    Example:
      >>> from rlfx.place import workloads, hardware
      >>> from rlfx.place.problem import build
      >>> problem = build(workloads.chainmm(size=16).graph(), hardware.p100_pcie())
      >>> order = run_order(problem, "critical-path")[None]
      >>> one = simulate(problem, jnp.zeros((1, problem.tasks), jnp.int32), order)
      >>> bool(jnp.isclose(one.makespan[0], problem.one_device()[0]))
      True
    """
    _checked(problem, assignment, priority, fifo, exec_noise, transfer_noise)
    device, priority = jnp.asarray(assignment), jnp.asarray(priority)
    return _compiled(
        bucketed(problem), device, priority, fifo=bool(fifo), exec_noise=exec_noise, transfer_noise=transfer_noise
    )


@partial(jax.jit, static_argnames="fifo")
def _makespan(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool, exec_noise: Any, transfer_noise: Any
) -> jax.Array:
    device, priority = assignment.astype(jnp.int32), priority.astype(jnp.int32)
    return events.run(problem, device, priority, fifo, exec_noise, transfer_noise, recorded=False)[0]


def makespan(
    problem: Problem,
    assignment: jax.Array,
    priority: jax.Array,
    *,
    fifo: bool = False,
    exec_noise: jax.Array | None = None,
    transfer_noise: jax.Array | None = None,
) -> jax.Array:
    """Only the makespans of :func:`simulate`, float32 ``[B]``; nothing else is stored."""
    _checked(problem, assignment, priority, fifo, exec_noise, transfer_noise)
    device, priority = jnp.asarray(assignment), jnp.asarray(priority)
    return _makespan(
        bucketed(problem), device, priority, fifo=bool(fifo), exec_noise=exec_noise, transfer_noise=transfer_noise
    )


def peak_memory(problem: Problem, assignment: jax.Array, schedules: Schedules) -> jax.Array:
    """Peak bytes on each device in simulated executions, float32 ``[B, D]``, by ``oracle.peak_memory``'s rules.

    What begins and ends is sorted by time and summed, ends first. Sums are of integers of two limbs, so that a small
    result counts beside large ones.
    """
    return _peak_memory(bucketed(problem), assignment, schedules)


@jax.jit
def _peak_memory(problem: Problem, assignment: jax.Array, schedules: Schedules) -> jax.Array:
    V, D = problem.exec_time.shape
    producer, consumer = jnp.asarray(problem.edges).T
    block, reader = jnp.asarray(problem.input_edges).T
    nbytes, input_bytes = jnp.asarray(problem.nbytes), jnp.asarray(problem.input_bytes)
    read = jnp.zeros((V,), bool).at[producer].set(True)
    high = jnp.floor(nbytes / LIMB)
    limbs = jnp.stack([high, nbytes - high * LIMB], axis=1).astype(jnp.int32)  # [V, 2]
    kind = jnp.concatenate([jnp.ones((V,), jnp.int32), jnp.zeros((V,), jnp.int32)])

    def one(device: jax.Array, s: Schedules) -> jax.Array:
        on = device[:, None] == jnp.arange(D, dtype=device.dtype)[None, :]  # [V, D]
        loaded = jnp.zeros((input_bytes.shape[0], D), bool).at[block, device[reader]].set(True)
        copied = jnp.isfinite(s.sent)
        begin = jnp.where(on, s.start[:, None], s.sent)  # infinite where it never is
        last_read = jnp.full((V, D), -jnp.inf, jnp.float32).at[producer, device[consumer]].max(s.finish[consumer])
        last_sent = jnp.max(jnp.where(copied, s.arrived, -jnp.inf), axis=1)
        end = jnp.maximum(last_read, jnp.where(on, last_sent[:, None], -jnp.inf))
        end = jnp.where((on | copied) & read[:, None], end, jnp.inf)

        def on_device(begin: jax.Array, end: jax.Array) -> jax.Array:
            time, sign = jnp.concatenate([begin, end]), 2 * kind - 1
            *_, order = jax.lax.sort((time, kind, jnp.arange(2 * V, dtype=jnp.int32)), num_keys=2)
            delta = jnp.where(jnp.isfinite(time), sign, 0)[:, None] * jnp.concatenate([limbs, limbs])
            held = jnp.cumsum(delta[order], axis=0, dtype=jnp.int32).astype(jnp.float32)
            return jnp.max(held[:, 0] * LIMB + held[:, 1])

        peak = jax.vmap(on_device, in_axes=1)(begin, end)
        return input_bytes @ loaded.astype(jnp.float32) + jnp.asarray(problem.held) + peak

    return jax.vmap(one)(assignment, schedules)


def judged(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool = False, limited: bool = False
) -> tuple[jax.Array, Schedules]:
    """:func:`objective`, and the simulated executions it judged."""
    schedules = _run(problem, assignment, priority, fifo, None, None)
    if not limited:
        return schedules.makespan, schedules
    lacks = peak_memory(problem, assignment, schedules) / jnp.asarray(problem.memory)[None] - 1.0
    over = jnp.sum(jnp.maximum(lacks, 0.0), axis=1)
    worst = 10.0 * jnp.max(jnp.sum(jnp.asarray(problem.exec_time), axis=0))
    return jnp.where(over > 0.0, worst * (1.0 + over), schedules.makespan), schedules


_judge = jax.jit(
    lambda *args, fifo, limited: judged(*args, fifo=fifo, limited=limited)[0], static_argnames=("fifo", "limited")
)


def objective(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool = False, limited: bool = False
) -> jax.Array:
    """What searches and policies minimise, float32 ``[B]``: the makespan, in seconds, of assignments that fit.

    ``limited`` turns the memory check on (``problem.memory_may_bind``). An assignment that lacks a fraction f of a device's
    memory, added up over devices, costs ten times the one-device time, times 1 + f: worse than any that fits, and a search
    still sees which way is better, on whichever device.
    """
    return _judge(bucketed(problem), assignment, priority, fifo=fifo, limited=limited)
