"""The placement problem: a task graph with durations, as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import numpy as np

from rlfx._checks import BOOLEAN, expect, instance
from rlfx.errors import PlacementError, located
from rlfx.place.graph import GRAPH, DataflowGraph
from rlfx.place.hardware import HARDWARE, Hardware, task_seconds


def edges_of(matrix: np.ndarray) -> np.ndarray:
    """The pairs (row, column) that a boolean matrix holds, int32 ``[E, 2]``, by row, then column.

    Example:
      >>> edges_of(np.array([[False, True], [False, False]])).tolist()
      [[0, 1]]
    """
    return np.argwhere(matrix).astype(np.int32).reshape(-1, 2)


def _matrix(edges: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    out = np.zeros(shape, bool)
    out[edges[:, 0], edges[:, 1]] = True
    return out


def _grouped(by: np.ndarray, values: np.ndarray, size: int) -> list[np.ndarray]:
    """``values`` by the group each belongs to, ascending."""
    ids = np.lexsort((values, by))
    return np.split(values[ids], np.cumsum(np.bincount(by, minlength=size))[:-1])


@dataclass(frozen=True, eq=False)
class Problem:
    """What a simulator and a policy need to know, V tasks on D devices. All times in seconds.

    Attributes:
      exec_time: float32 ``[V, D]``, positive.
      transfer_time: float32 ``[V, D, D]``, of a task's result from row to column device; zero on the diagonal.
      edges: int32 ``[E, 2]``, each pair (u, v) once, where v reads u's result, by u, then v. Tasks are in topological order.
      nbytes: float32 ``[V]``, size of each task's result.
      input_bytes: float32 ``[I]``, sizes of the graph's input blocks, which are available everywhere.
      input_edges: int32 ``[R, 2]``, pairs (block, task): which tasks read them.
      memory: float32 ``[D]``, bytes.
      metas: groups of tasks ``(shards, reduces)``, one per meta-op, in topological order (appendix A).
      names: of the tasks.
      held: float32 ``[D]``, bytes of each device that a call holds throughout, beside the input blocks that its tasks
        read and what they compute; none by default.
      source_bytes: float32 ``[S]``, sizes of inputs that are on one device when a call begins, and are sent to others that read
        them; none by default.
      source_time: float32 ``[S, D, D]``, seconds from row to column device.
      source_home: int32 ``[S]``, the task on whose device each is (its result in the call before), or -1: on device 0.
      source_edges: int32 ``[Q, 2]``, pairs (source, task): which tasks read them, by source.
      lane: int32 ``[D, D]``, from 0 to D - 1: copies from row to column device take this one of the row's lanes, one at a time.
        ``[0, 0]``, the default: a lane for each column.
    """

    exec_time: np.ndarray
    transfer_time: np.ndarray
    edges: np.ndarray
    nbytes: np.ndarray
    input_bytes: np.ndarray
    input_edges: np.ndarray
    memory: np.ndarray
    metas: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = field(default=())
    names: tuple[str, ...] = field(default=())
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    source_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    source_time: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1), np.float32))
    source_home: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    source_edges: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    lane: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def __post_init__(self) -> None:
        """Nothing is held where nothing is said."""
        if isinstance(self.held, np.ndarray) and not self.held.size:
            object.__setattr__(self, "held", np.zeros(self.exec_time.shape[1], np.float32))

    @property
    def tasks(self) -> int:
        """V."""
        return self.exec_time.shape[0]

    @property
    def devices(self) -> int:
        """D."""
        return self.exec_time.shape[1]

    @cached_property
    def adjacency(self) -> np.ndarray:
        """``edges`` as a matrix, bool ``[V, V]``: for small problems."""
        return _matrix(self.edges, (self.tasks, self.tasks))

    @cached_property
    def input_reads(self) -> np.ndarray:
        """``input_edges`` as a matrix, bool ``[I, V]``."""
        return _matrix(self.input_edges, (len(self.input_bytes), self.tasks))

    @cached_property
    def preds(self) -> list[np.ndarray]:
        """The tasks that each task reads, ascending."""
        return _grouped(self.edges[:, 1], self.edges[:, 0], self.tasks)

    @cached_property
    def succs(self) -> list[np.ndarray]:
        """The tasks that read each task, ascending."""
        return _grouped(self.edges[:, 0], self.edges[:, 1], self.tasks)

    @cached_property
    def input_preds(self) -> list[np.ndarray]:
        """The input blocks that each task reads, ascending."""
        return _grouped(self.input_edges[:, 1], self.input_edges[:, 0], self.tasks)

    @cached_property
    def mean_exec(self) -> np.ndarray:
        """Mean time over devices, ``[V]``."""
        return self.exec_time.mean(axis=1)

    @cached_property
    def mean_transfer(self) -> np.ndarray:
        """Mean time over links, ``[V]``."""
        pairs = max(1, self.devices * (self.devices - 1))
        return self.transfer_time.sum(axis=(1, 2)) / pairs

    def _longest(self, forward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Longest path costs and next hops; ``forward``: towards the exits, own cost included."""
        cost, hop = self.mean_exec.astype(np.float64).copy(), np.full(self.tasks, -1)
        order = range(self.tasks - 1, -1, -1) if forward else range(self.tasks)
        for v in order:
            others = self.succs[v] if forward else self.preds[v]
            if len(others):
                through = cost[others] + (self.mean_transfer[v] if forward else self.mean_transfer[others])
                hop[v] = others[np.argmax(through)]
                cost[v] += through.max()
        return cost, hop

    @cached_property
    def to_exit(self) -> tuple[np.ndarray, np.ndarray]:
        """Longest path from each task to an exit, with mean transfers (the paper's t-level): cost and next hop."""
        return self._longest(True)

    @cached_property
    def from_entry(self) -> tuple[np.ndarray, np.ndarray]:
        """Longest path from an entry to each task (the paper's b-level): cost and previous hop."""
        return self._longest(False)

    @cached_property
    def depth(self) -> np.ndarray:
        """Hops on the longest path from an entry, int ``[V]``."""
        depth = np.zeros(self.tasks, np.int64)
        for v in range(self.tasks):
            preds = self.preds[v]
            depth[v] = depth[preds].max() + 1 if len(preds) else 0
        return depth

    def lower_bound(self) -> float:
        """Seconds that no assignment beats: all work spread evenly, or the longest path without transfers.

        The work bound sums each task's fastest time; with unequal devices the sum is of harmonic shares, so that a
        device twice as fast counts twice.
        """
        fastest = self.exec_time.min(axis=1).astype(np.float64)
        path = fastest.copy()
        for v in range(self.tasks - 1, -1, -1):
            succ = self.succs[v]
            path[v] += path[succ].max() if len(succ) else 0.0
        speed = (fastest[:, None] / self.exec_time).max(axis=0)  # of each device, relative to the fastest, at best
        return float(max(path.max(), fastest.sum() / speed.sum()))

    def one_device(self) -> np.ndarray:
        """Seconds of running everything on each device alone, ``[D]``."""
        return self.exec_time.sum(axis=0)

    def restricted(self, nbytes: float) -> Problem:
        """The same problem with every device's memory limited."""
        return replace(self, memory=np.full(self.devices, nbytes, np.float32))

    @cached_property
    def memory_may_bind(self) -> bool:
        """Whether some assignment could exceed a device's memory: everything on one device."""
        return bool(np.any(self.nbytes.sum() + self.input_bytes.sum() + self.held > self.memory))


PROBLEM = instance(Problem, "a Problem", "rlfx.place.build(graph, hardware)")


def checked(problem: Problem) -> Problem:
    """The same problem, once its durations are known to make sense and its tasks to be in topological order.

    Raises:
      PlacementError: they are not.
    """
    expect("problem", problem, PROBLEM, PlacementError, of="checked")
    if np.any(~(problem.exec_time > 0)):
        v, d = (int(i) for i in np.argwhere(~(problem.exec_time > 0))[0])
        raise PlacementError(
            located(f"Task {v} takes {problem.exec_time[v, d]} s on device {d}; every task must take some time.",
                    fix="Give positive execution times: a launch alone takes microseconds.")
        )  # fmt: skip
    if not np.all(np.isfinite(problem.transfer_time) & (problem.transfer_time >= 0)):
        u, s, t = (int(i) for i in np.argwhere(~(np.isfinite(problem.transfer_time) & (problem.transfer_time >= 0)))[0])
        fact = f"The result of task {u} takes {problem.transfer_time[u, s, t]} s from device {s} to device {t}."
        raise PlacementError(located(fact, fix="Give finite transfer times that are not negative."))
    backwards = np.flatnonzero(problem.edges[:, 0] >= problem.edges[:, 1])
    if len(backwards):
        u, v = (int(i) for i in problem.edges[backwards[0]])
        fact = f"Task {v} reads task {u}, which does not come before it."
        raise PlacementError(located(fact, fix="Number tasks in topological order."))
    return problem


def build(graph: DataflowGraph, hardware: Hardware, *, called: bool = False) -> Problem:
    """The placement problem of a graph on a machine.

    Args:
      graph: what to place.
      hardware: the machine.
      called: count what a call of a :class:`Placement` holds on the first device, too: its arguments, and each result
        twice, as blocks and put together. The simulator's papers count neither.

    Raises:
      PlacementError: the graph has no task, or no assignment can fit, because some task's own inputs and result
        exceed every device's memory.

    Example:
      >>> from rlfx.place import workloads, hardware
      >>> problem = build(workloads.chainmm(size=16).graph(), hardware.p100_pcie())
      >>> problem.tasks, problem.devices
      (76, 4)
    """
    expect("graph", graph, GRAPH, PlacementError, of="build")
    expect("hardware", hardware, HARDWARE, PlacementError, of="build")
    called = expect("called", called, BOOLEAN, PlacementError, of="build")
    tasks, inputs = graph.tasks, graph.inputs
    if not tasks:
        fact = (
            f"{graph.name} computes nothing: its results are its arguments or constants, so there is nothing to place."
        )
        raise PlacementError(located(fact, fix="Place a function with at least one operation."))
    number = {node: i for i, node in enumerate(tasks)}
    input_number = {node: i for i, node in enumerate(inputs)}
    edges = [(number[u], number[v]) for u, v in graph.edges if u in number]
    input_edges = [(input_number[u], number[v]) for u, v in graph.edges if u not in number]
    nbytes = np.array([graph.nodes[i].nbytes for i in tasks], np.float32)
    input_bytes = np.array([graph.nodes[i].nbytes for i in inputs], np.float32)
    off = ~np.eye(hardware.devices, dtype=bool)
    transfer = (nbytes[:, None, None] / hardware.bandwidth + hardware.latency) * off
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for i, node in enumerate(tasks):
        shard, reduce = groups.setdefault(graph.nodes[node].meta, ([], []))
        (reduce if graph.nodes[node].role == "reduce" else shard).append(i)
    held = np.zeros(hardware.devices, np.float32)
    if called:
        results = {b for reads, _ in graph.collect for b in reads}
        sizes = [math.prod(graph.blocks[b].shape) * graph.blocks[b].dtype.itemsize for b in results]
        held[0] = input_bytes.sum() + 2 * sum(sizes)
    problem = Problem(
        exec_time=task_seconds(graph, hardware).astype(np.float32),
        transfer_time=transfer.astype(np.float32),
        edges=np.array(sorted(edges), np.int32).reshape(-1, 2),
        nbytes=nbytes,
        input_bytes=input_bytes,
        input_edges=np.array(sorted(input_edges), np.int32).reshape(-1, 2),
        memory=np.asarray(hardware.memory, np.float32),
        metas=tuple((tuple(s), tuple(r)) for s, r in groups.values()),
        names=tuple(graph.nodes[i].name for i in tasks),
        held=held,
        lane=hardware.lane,
    )
    _check_fits(problem, graph.name)
    return checked(problem)


def size(nbytes: float) -> str:
    """Bytes in words.

    Example:
      >>> size(12), size(4096), size(3.2e6), size(16e9)
      ('12 bytes', '4.096 kB', '3.200 MB', '16.000 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3f} {name}"
    return f"{nbytes:.0f} bytes"


def _check_fits(problem: Problem, label: str) -> None:
    """Some device can hold each task's own inputs and result."""
    (u, v), (block, reader), V = problem.edges.T, problem.input_edges.T, problem.tasks
    need = problem.nbytes + np.bincount(v, problem.nbytes[u], V) + np.bincount(reader, problem.input_bytes[block], V)
    worst, room = int(np.argmax(need)), problem.memory - problem.held
    if need[worst] > room.max():
        raise PlacementError(
            located(
                f"{label} does not fit on any assignment: {problem.names[worst]} alone needs "
                f"{size(need[worst])} and the largest device has room for {size(room.max())}.",
                fix="Split that operation into more parts, or use devices with more memory.",
            )
        )


jax.tree_util.register_dataclass(
    Problem,
    data_fields=[
        "exec_time", "transfer_time", "edges", "nbytes", "input_bytes", "input_edges", "memory", "held",
        "source_bytes", "source_time", "source_home", "source_edges", "lane",
    ],
    meta_fields=["metas", "names"],
)
