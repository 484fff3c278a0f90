"""Running a placed graph: on real jax devices, or with the cost model slept instead of computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place.baselines import Assignment
from rlfx.place.graph import DataflowGraph
from rlfx.place.hardware import check_devices
from rlfx.place.problem import Problem
from rlfx.place.runtime import Timeline, Value, run, run_synchronous


class Executor:
    """A graph on devices, compiled; assignments can change from run to run.

    Nodes with equal jaxprs share one compiled function per device.

    Args:
      graph: what to run.
      devices: jax devices.
    """

    def __init__(self, graph: DataflowGraph, devices: Sequence[Any]) -> None:
        check_devices(devices)
        self.graph, self.devices = graph, tuple(devices)
        number = {node: i for i, node in enumerate(graph.tasks)}
        self.preds = [
            sorted({number[graph.owner[b]] for b in graph.nodes[node].reads if graph.owner[b] in number})
            for node in graph.tasks
        ]
        self.number = number
        self.nbytes = np.array([graph.nodes[node].nbytes for node in graph.tasks], np.float64)
        self.keep = tuple(
            sorted({number[graph.owner[b]] for reads, _ in graph.collect for b in reads if graph.owner[b] in number})
        )
        self.inputs: dict[tuple[int, int], jax.Array] = {}

    @cached_property
    def kernels(self) -> list[Callable[..., Value]]:
        """One jitted function per task, shared between tasks with equal jaxprs."""
        shared: dict[Any, Callable[..., Value]] = {}
        kernels = []
        for node in (self.graph.nodes[i] for i in self.graph.tasks):

            def kernel(*blocks: jax.Array, node: Any = node) -> Value:
                return node.run(dict(zip(node.reads, blocks, strict=True)))

            closed = jax.make_jaxpr(kernel)(*(self.graph.blocks[b] for b in node.reads))
            same = (str(closed), tuple(map(id, closed.consts)), node.name if node.kind == "opaque" else "")
            kernels.append(shared.setdefault(same, jax.jit(kernel)))
        return kernels

    @property
    def programs(self) -> int:
        """How many different kernels there are."""
        return len({id(k) for k in self.kernels})

    def load(self, args: Sequence[jax.Array], assignment: Assignment) -> None:
        """Put every input block on the devices whose tasks read it: inputs are there before the run (Algorithm 1)."""
        blocks = self.graph.load(args)
        wanted = {
            (b, int(assignment.device[self.number[i]]))
            for i in self.graph.tasks
            for b in self.graph.nodes[i].reads
            if b in blocks
        }
        self.inputs = {(b, d): jax.device_put(blocks[b], self.devices[d]) for b, d in wanted}
        results = {b for reads, _ in self.graph.collect for b in reads}
        self.arguments = {b: x for b, x in blocks.items() if b in results}
        jax.block_until_ready(list(self.inputs.values()))

    def _compute(self, v: int, d: int, values: dict[int, Value]) -> Value:
        node = self.graph.nodes[self.graph.tasks[v]]
        blocks = []
        for b in node.reads:
            owner = self.graph.owner[b]
            if owner in self.number:
                u = self.number[owner]
                blocks.append(values[u][self.graph.nodes[owner].yields.index(b)])
            else:
                blocks.append(self.inputs[b, d])
        out = self.kernels[v](*blocks)
        jax.block_until_ready(out)
        return out

    def _copy(self, u: int, source: int, target: int, value: Value) -> Value:
        return jax.block_until_ready(tuple(J.moved(value, self.devices[target])))  # a view is never written again

    def run(self, assignment: Assignment) -> tuple[Timeline, Any]:
        """Execute on loaded arguments, work-conserving. Returns the timeline and the function's result."""
        check_devices(self.devices)
        timeline, kept = run(
            self.preds, assignment.device, assignment.order, len(self.devices), self._compute, self._copy,
            nbytes=self.nbytes, keep=self.keep,
        )  # fmt: skip
        env = {b: jax.device_put(x, self.devices[0]) for b, x in self.arguments.items()}
        for u, value in kept.items():
            blocks = jax.device_put(value, self.devices[0])
            env.update(zip(self.graph.nodes[self.graph.tasks[u]].yields, blocks, strict=True))
        return timeline, jax.tree.unflatten(self.graph.out_tree, [collect(env) for _, collect in self.graph.collect])

    def run_synchronous(self, assignment: Assignment, groups: Sequence[Sequence[int]]) -> Timeline:
        """Execute on loaded arguments with barriers between groups of tasks (table 1)."""
        return run_synchronous(self.preds, assignment.device, groups, len(self.devices), self._compute, self._copy)

    def calibrated(self, problem: Problem, args: Sequence[jax.Array], repeats: int = 5) -> Problem:
        """The same problem with durations as they are in executions of the graph.

        A roofline of FLOP and bytes (``hardware.measured``) does not know what a kernel really takes, and a kernel that
        is repeated by itself finds its operands in the cache and its result's memory ready. Kernels are therefore timed
        while one device after the other runs everything, from one start to the device's next, which includes what the
        runtime does in between; copies are timed in executions of random assignments. Equal kernels share a duration,
        as do copies of one size between two devices: the median. What no execution copied keeps its duration.

        Args:
          problem: of this graph, with as many devices.
          args: the function's arguments, flat.
          repeats: executions on each device, and of random assignments, after a first one each.
        """
        V, D = problem.tasks, problem.devices
        rng, order = np.random.default_rng(0), np.arange(V, dtype=np.int32)

        def observed(device: np.ndarray) -> Timeline:
            assignment = Assignment(device.astype(np.int32), order)
            self.load(args, assignment)
            return self.run(assignment)[0]

        taken, copied = np.zeros((repeats + 1, V, D)), {}
        for i in range(repeats + 1):  # devices in turn: the machine may be faster at one time than at another
            for d in range(D):
                timeline = observed(np.full(V, d))
                taken[i, :, d] = np.diff(timeline.start, append=timeline.makespan)
            for u, s, t, begin, end in observed(rng.integers(0, D, V)).copies if i else ():
                copied.setdefault((s, t, float(problem.nbytes[u])), []).append(end - begin)
        exec_time, transfer_time = np.array(problem.exec_time), np.array(problem.transfer_time)
        same: dict[int, list[int]] = {}
        for v, kernel in enumerate(self.kernels):
            same.setdefault(id(kernel), []).append(v)
        for tasks in same.values():
            exec_time[tasks] = np.median(taken[1:, tasks], axis=(0, 1))
        for (s, t, size), seconds in copied.items():
            transfer_time[problem.nbytes == size, s, t] = np.median(seconds)
        return replace(problem, exec_time=exec_time, transfer_time=transfer_time)

    def measure(self, args: Sequence[jax.Array], assignment: Assignment, repeats: int = 3) -> float:
        """Median makespan of a few runs after a warm-up, seconds: stage III's reward."""
        self.load(args, assignment)
        self.run(assignment)
        return float(np.median([self.run(assignment)[0].makespan for _ in range(repeats)]))


def emulate(problem: Problem, assignment: Assignment, slowdown: float = 1.0) -> Timeline:
    """The runtime with the cost model slept instead of computed: a real scheduler, and devices that need not exist.

    Args:
      problem: durations.
      assignment: what to run.
      slowdown: seconds slept per simulated second; sleeps below a millisecond are inexact.

    Returns:
      The timeline in simulated seconds.
    """
    preds = [preds.tolist() for preds in problem.preds]

    def compute(v: int, d: int, values: dict[int, Value]) -> Value:
        time.sleep(float(problem.exec_time[v, d]) * slowdown)
        return ()

    def copy(u: int, s: int, t: int, value: Value) -> Value:
        time.sleep(float(problem.transfer_time[u, s, t]) * slowdown)
        return ()

    real, _ = run(preds, assignment.device, assignment.order, problem.devices, compute, copy, nbytes=problem.nbytes)
    return Timeline(
        real.makespan / slowdown,
        real.start / slowdown,
        real.finish / slowdown,
        tuple((u, s, t, a / slowdown, b / slowdown) for u, s, t, a, b in real.copies),
        real.peak,
    )
