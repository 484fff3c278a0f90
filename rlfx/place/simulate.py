"""The work-conserving simulator, compiled: Algorithms 1 and 2 for a batch of assignments at once.

Because one device runs its tasks one after another and a link serves one sender, results enter a link in the order in
which their device started the tasks. Each of the V steps below therefore starts one task, the next one in time, and
knows at once when it ends and when its copies arrive: no event queue is needed. Arrays are ``[V, B]``, batch last, so
that the inner loops are vectorised.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import BOOLEAN, KEY, expect, integers, one_of, optional, reals
from rlfx.errors import PlacementError, located
from rlfx.place.problem import PROBLEM, Problem

Order = Literal["critical-path", "depth-first", "breadth-first", "random"]
ORDERS: tuple[Order, ...] = ("critical-path", "depth-first", "breadth-first", "random")


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


def _by_device(assignment: jax.Array, values: list[jax.Array]) -> jax.Array:
    """``values[assignment]``, elementwise, as a chain of selects."""
    out = values[0]
    for d in range(1, len(values)):
        out = jnp.where(assignment == d, values[d], out)
    return out


def _run(
    problem: Problem,
    assignment: jax.Array,
    priority: jax.Array,
    fifo: bool,
    exec_noise: jax.Array | None,
    transfer_noise: jax.Array | None,
) -> Schedules:
    V, D = problem.exec_time.shape
    B = assignment.shape[0]
    device = assignment.T.astype(jnp.int32)  # [V, B]
    adjacency = jnp.asarray(problem.adjacency)
    columns = adjacency.T  # [reader, producer]
    exec_time, transfer_time = jnp.asarray(problem.exec_time), jnp.asarray(problem.transfer_time)
    duration = _by_device(device, [exec_time[:, d, None] for d in range(D)])
    duration = jnp.broadcast_to(duration, (V, B))
    if exec_noise is not None:
        duration = duration * exec_noise.T
    every = jnp.arange(D, dtype=jnp.int32)
    onehot = (device[:, None, :] == every[None, :, None]).astype(jnp.float32)  # [V, D, B]
    read_on = (adjacency.astype(jnp.float32) @ onehot.reshape(V, D * B)).reshape(V, D, B) > 0.5
    copy = jnp.stack([_by_device(device, [transfer_time[:, s, d, None] for s in range(D)]) for d in range(D)], 1)
    if transfer_noise is not None:
        copy = copy * transfer_noise.transpose(1, 2, 0)
    copy = jnp.where(read_on & (onehot < 0.5), copy, jnp.inf)  # [V, D, B]: infinite where no copy is made
    # The place of each task by device, then priority, then number: small numbers, whatever V, D and the priorities.
    task = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32)[:, None], (V, B))
    *_, by_place = jax.lax.sort((device, priority.T.astype(jnp.int32), task), dimension=0, num_keys=3)
    key = jnp.zeros((V, B), jnp.int32).at[by_place, jnp.arange(B)].set(task)
    # Barriers keep the noisy durations out of the loop, where a multiply could be contracted with an add.
    duration, copy = jax.lax.optimization_barrier((duration, copy))
    lanes, last = jnp.arange(B), V - 1

    def step(carry: tuple, _: None) -> tuple[tuple, tuple]:
        arrival, pending, free, link, makespan = carry
        ready = jnp.where(pending == 0, jnp.maximum(arrival, free), jnp.inf)
        now = jnp.min(ready, axis=0, keepdims=True)
        tied = ready == now
        if fifo:
            tied &= device == jnp.min(jnp.where(tied, device, D), axis=0, keepdims=True)
            tied &= arrival == jnp.min(jnp.where(tied, arrival, jnp.inf), axis=0, keepdims=True)
        chosen = jnp.min(jnp.where(tied, key, last), axis=0, keepdims=True)
        v = by_place[chosen[0], lanes]
        d = device[v, lanes][None]
        end = now + duration[v, lanes][None]
        reader = jnp.take(columns, v, axis=1)  # [V, B]
        cost = copy[v, :, lanes].T  # [D, B]
        before = link[d[0], :, lanes].T
        sent = jnp.maximum(end, before)
        landed = sent + cost
        made = jnp.isfinite(cost)
        link = link.at[d[0], :, lanes].set(jnp.where(made, landed, before).T)
        here = jnp.where(every[:, None] == d, end, landed)
        at_reader = _by_device(device, [here[i : i + 1] for i in range(D)])
        arrival = jnp.where(reader, jnp.maximum(arrival, at_reader), arrival)
        pending = pending - reader.astype(jnp.int32) - (key == chosen).astype(jnp.int32)
        free = jnp.where(device == d, end, free)
        out = (v, now[0], end[0], jnp.where(made, sent, jnp.inf), landed)
        return (arrival, pending, free, link, jnp.maximum(makespan, end[0])), out

    start = (
        jnp.zeros((V, B), jnp.float32),
        jnp.broadcast_to(adjacency.sum(axis=0, dtype=jnp.int32)[:, None], (V, B)),
        jnp.zeros((V, B), jnp.float32),
        jnp.zeros((D, D, B), jnp.float32),
        jnp.zeros((B,), jnp.float32),
    )
    (*_, makespan), (order, began, ended, sent, landed) = jax.lax.scan(step, start, None, length=V)
    place = jnp.argsort(order, axis=0).T  # [B, V]: the step at which each task started
    began, ended = (jnp.take_along_axis(x.T, place, axis=1) for x in (began, ended))
    sent, landed = (jnp.take_along_axis(x.transpose(2, 0, 1), place[:, :, None], axis=1) for x in (sent, landed))
    return Schedules(makespan, began, ended, sent, landed)


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
    return _compiled(problem, device, priority, fifo=bool(fifo), exec_noise=exec_noise, transfer_noise=transfer_noise)


@partial(jax.jit, static_argnames="fifo")
def _makespan(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool, exec_noise: Any, transfer_noise: Any
) -> jax.Array:
    return _run(problem, assignment, priority, fifo, exec_noise, transfer_noise).makespan


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
    return _makespan(problem, device, priority, fifo=bool(fifo), exec_noise=exec_noise, transfer_noise=transfer_noise)


def peak_memory(problem: Problem, assignment: jax.Array, schedules: Schedules) -> jax.Array:
    """Peak bytes on each device in simulated executions, float32 ``[B, D]``, by ``oracle.peak_memory``'s rules."""
    D = problem.devices
    adjacency, nbytes = jnp.asarray(problem.adjacency), jnp.asarray(problem.nbytes)
    input_reads = jnp.asarray(problem.input_reads, jnp.float32)

    def one(device: jax.Array, s: Schedules) -> jax.Array:
        on = device[:, None] == jnp.arange(D, dtype=device.dtype)[None, :]  # [V, D]
        inputs = jnp.asarray(problem.input_bytes) @ (input_reads @ on.astype(jnp.float32) > 0.5).astype(jnp.float32)
        copied = jnp.isfinite(s.sent)
        begin = jnp.where(on, s.start[:, None], s.sent)

        def on_device(d: jax.Array) -> jax.Array:
            reads = adjacency & on[:, d][None, :]
            last_read = jnp.max(jnp.where(reads, s.finish[None, :], -jnp.inf), axis=1)
            last_sent = jnp.max(jnp.where(copied, s.arrived, -jnp.inf), axis=1)
            end = jnp.maximum(last_read, jnp.where(on[:, d], last_sent, -jnp.inf))
            end = jnp.where(jnp.any(adjacency, axis=1), end, jnp.inf)
            live = (begin[:, d][None, :] <= begin[:, d][:, None]) & (begin[:, d][:, None] < end[None, :])
            there = (on | copied)[:, d]
            held = jnp.sum(jnp.where(live & there[None, :], nbytes[None, :], 0.0), axis=1)
            return inputs[d] + problem.held[d] + jnp.max(jnp.where(there, held, 0.0))

        return jnp.stack([on_device(d) for d in range(D)])

    return jax.vmap(one)(assignment, schedules)


def judged(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool = False, limited: bool = False
) -> tuple[jax.Array, Schedules]:
    """:func:`objective`, and the simulated executions it judged."""
    schedules = _run(problem, assignment, priority, fifo, None, None)
    if not limited:
        return schedules.makespan, schedules
    over = jnp.max(peak_memory(problem, assignment, schedules) / jnp.asarray(problem.memory)[None] - 1.0, axis=1)
    worst = 10.0 * jnp.max(jnp.sum(jnp.asarray(problem.exec_time), axis=0))
    return jnp.where(over > 0.0, worst * (1.0 + over), schedules.makespan), schedules


@partial(jax.jit, static_argnames=("fifo", "limited"))
def objective(
    problem: Problem, assignment: jax.Array, priority: jax.Array, *, fifo: bool = False, limited: bool = False
) -> jax.Array:
    """What searches and policies minimise, float32 ``[B]``: the makespan, in seconds, of assignments that fit.

    ``limited`` turns the memory check on (``problem.memory_may_bind``). An assignment that overflows by a fraction f of
    a device costs ten times the one-device time, times 1 + f: worse than any that fits, and a search still sees which
    way is better.
    """
    return judged(problem, assignment, priority, fifo=fifo, limited=limited)[0]
