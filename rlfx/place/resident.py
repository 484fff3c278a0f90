"""Running stages: one compiled program each, weights that stay where they are used, messages between devices.

Each device has a list of steps, in the order of the simulated schedule (``walk.py`` runs them).

Arguments are put on the devices that read them, once: one that is the same object as in the last call is there already, and so
is a result that comes back as an argument (``carry``).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place.baselines import Assignment
from rlfx.place.hardware import check_devices
from rlfx.place.problem import Problem
from rlfx.place.runtime import Timeline
from rlfx.place.simulate import simulate
from rlfx.place.stages import StagedGraph
from rlfx.place.walk import STOP, Clock, Memory, Plan, Step, Stopped, dispatch, serve, walk


@dataclass
class _Known:
    """An argument as it was last given, and where it is."""

    value: Any = None
    on: dict[int, jax.Array] | None = None


class StageExecutor:
    """Stages on devices. An assignment can change from run to run; only the steps that it changes are compiled.

    Args:
      graph: what to run.
      problem: its durations, from which the order on each device follows.
      devices: jax devices.
    """

    def __init__(self, graph: StagedGraph, problem: Problem, devices: Sequence[Any]) -> None:
        check_devices(devices)
        self.graph, self.problem, self.devices = graph, problem, tuple(devices)
        self.threads = all(d.platform == "cpu" for d in devices) and len(devices) > 1
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.plans: dict[bytes, Plan] = {}
        self.lock = threading.Lock()
        self.inputs = [_Known() for _ in graph.inputs]
        constants = list(graph.load([None] * len(graph.in_avals)).values())[len(graph.in_avals) :]
        self.constants = [jax.device_put(x, self.devices[0]) for x in constants]  # some are NumPy's as they were traced
        self.results: list[Any] = []
        for reads, collect in graph.collect:  # one block each, or a constant
            self.results.extend(reads if reads else [jax.device_put(collect({}), self.devices[0])])
        self.jobs: dict[int, queue.SimpleQueue] = {}

    # Plans

    @cached_property
    def _last_result(self) -> frozenset[int]:
        return frozenset(b for b in self.results if isinstance(b, int))

    @cached_property
    def _follows(self) -> dict[int, Any]:
        """The block that each carried argument is in the next call."""
        return {i: self.results[r] for i, r in self.graph.carried}

    def plan(self, assignment: Assignment) -> Plan:
        """The steps of an assignment, by its simulated schedule."""
        key = assignment.device.tobytes() + assignment.order.tobytes()
        if key not in self.plans:
            device, order = (np.asarray(x, np.int32)[None] for x in assignment)
            start = np.asarray(simulate(self.problem, device, order).start[0])
            sequence = np.lexsort((np.arange(len(start)), start))
            self.plans = {key: self._planned(np.asarray(assignment.device), sequence, donates=True)}
        return self.plans[key]

    def _planned(self, device: np.ndarray, sequence: Sequence[int], *, donates: bool) -> Plan:
        graph, count = self.graph, len(self.devices)
        nodes = [graph.nodes[i] for i in graph.tasks]
        home = {b: int(device[v]) for v, node in enumerate(nodes) for b in node.yields}
        needed: dict[tuple[int, int], int] = {}  # (block, device): the last task there that reads it
        for v in sequence:
            needed.update({(b, int(device[v])): int(v) for b in nodes[v].reads})
        elsewhere = {b: sorted({d for block, d in needed if block == b} - {home[b]}) for b in home}
        steps: list[list[Step]] = [[] for _ in range(count)]
        given: set[int] = set()
        ordered = []
        for v in map(int, sequence):
            node, d = nodes[v], int(device[v])
            last = [b for b in node.reads if needed[b, d] == v and b not in self._last_result]
            mine = [b for b in last if self._owned(b, d, home, elsewhere, needed)] if donates else []
            given.update(b for b in mine if b not in home)
            targets = sorted({t for b in node.yields for t in elsewhere[b]})
            step = Step(
                v,
                self._program(v, self._donated(node, mine)),
                node.reads,
                node.yields,
                tuple(b for b in node.reads if home.get(b, d) != d),
                tuple((t, tuple(b for b in node.yields if t in elsewhere[b])) for t in targets),
                tuple(last),
            )
            steps[d].append(step)
            ordered.append((d, step))
        readers = tuple(tuple(sorted({d for b, d in needed if b == i})) for i in range(len(self.inputs)))
        return Plan(tuple(map(tuple, steps)), tuple(ordered), readers, home, frozenset(given))

    def _owned(self, b: int, d: int, home: dict, elsewhere: dict, needed: dict) -> bool:
        """Whether a block's memory is this device's alone: no other device reads it, nobody else holds it."""
        if b in home:
            return home[b] == d and not elsewhere[b]
        comes_back = home.get(self._follows.get(b), d)  # where the call before leaves it: its memory is that device's
        return b in self.graph.donated and comes_back == d and {t for block, t in needed if block == b} == {d}

    def _donated(self, node: Any, candidates: Sequence[int]) -> tuple[int, ...]:
        """Positions of those operands whose memory can hold a result."""
        free = [(self.graph.blocks[b].shape, self.graph.blocks[b].dtype) for b in node.yields]
        chosen = []
        for b in candidates:
            kind = (self.graph.blocks[b].shape, self.graph.blocks[b].dtype)
            if kind in free:
                free.remove(kind)
                chosen.append(node.reads.index(b))
        return tuple(chosen)

    def _program(self, v: int, donated: tuple[int, ...]) -> Callable[..., Any]:
        if (v, donated) not in self.programs:
            node = self.graph.nodes[self.graph.tasks[v]]

            def stage(*blocks: jax.Array) -> tuple[jax.Array, ...]:
                return node.run(dict(zip(node.reads, blocks, strict=True)))

            stage.__name__ = stage.__qualname__ = "".join(c if c.isalnum() else "_" for c in node.name)
            self.programs[v, donated] = jax.jit(stage, donate_argnums=donated)
        return self.programs[v, donated]

    # Arguments

    def unknown(self, flat: Sequence[Any]) -> list[int]:
        """The arguments that are not the objects of the last call."""
        return [i for i, (x, known) in enumerate(zip(flat, self.inputs, strict=False)) if x is not known.value]

    def load(self, args: Sequence[jax.Array], assignment: Assignment) -> None:
        """Put every argument on the devices that read it, where it isn't there yet."""
        self._place([*args, *self.constants], self.plan(assignment))

    def _place(self, values: Sequence[Any], plan: Plan) -> list[Memory]:
        memories: list[Memory] = [{} for _ in self.devices]
        missing: dict[tuple[int, int], list[int]] = {}
        for i, (x, known) in enumerate(zip(values, self.inputs, strict=True)):
            if x is not known.value or known.on is None:
                at = next(iter(x.devices())) if len(x.devices()) == 1 else None
                home = self.devices.index(at) if at in self.devices else -1
                known = self.inputs[i] = _Known(x, {home: x} if home >= 0 else {})
            for d in plan.readers[i]:
                if d in known.on:  # type: ignore[operator]
                    memories[d][i] = known.on[d]  # type: ignore[index]
                else:
                    source = next(iter(known.on), -1)  # type: ignore[arg-type]
                    missing.setdefault((source, d), []).append(i)
        for (source, d), ids in missing.items():
            here = [self.inputs[i].on.get(source, values[i]) for i in ids]  # type: ignore[union-attr]
            for i, x in zip(ids, J.moved(here, self.devices[d]), strict=True):
                x = x.copy() if i in plan.donated else x  # its memory is used again: no view of another device's
                memories[d][i] = self.inputs[i].on[d] = x  # type: ignore[index]
        return memories

    # Runs

    def __call__(self, args: Sequence[jax.Array], assignment: Assignment) -> Any:
        """The function's result: each part is left on the device that computed it."""
        with self.lock:
            plan = self.plan(assignment)
            memories = self._place([*args, *self.constants], plan)
            self._walk_all(plan, memories, None)
            return self._finish(plan, memories)

    def _finish(self, plan: Plan, memories: list[Memory]) -> Any:
        def result(b: Any) -> tuple[int, jax.Array]:
            if not isinstance(b, int):
                return 0, b
            if b in plan.home:
                return plan.home[b], memories[plan.home[b]][b]
            known = self.inputs[b]
            return next(iter(known.on or {}), -1), known.value

        results = [result(b) for b in self.results]
        for i, r in self.graph.carried:
            d, x = results[r]
            if x is not self.inputs[i].value:
                self.inputs[i] = _Known(x, {d: x} if d >= 0 else {})
        return jax.tree.unflatten(self.graph.out_tree, [x for _, x in results])

    def _walk_all(self, plan: Plan, memories: list[Memory], clock: Clock | None) -> None:
        if not self.threads:
            dispatch(plan, memories, self.devices, clock)
            return
        inboxes = [queue.SimpleQueue() for _ in self.devices]
        used = [d for d, steps in enumerate(plan.steps) if steps]
        done: queue.SimpleQueue = queue.SimpleQueue()

        def part(d: int) -> None:
            error: BaseException | None = None
            try:
                walk(plan.steps[d], memories[d], inboxes, d, self.devices, clock)
            except BaseException as e:  # whatever it is, the others must not wait for it
                error = e
                for box in inboxes:
                    box.put(STOP)
            done.put((d, error))

        for d in used[1:]:
            self._worker(d).put(lambda d=d: part(d))
        part(used[0])
        ended = dict(done.get() for _ in used)
        errors = [e for e in ended.values() if e is not None and not isinstance(e, Stopped)]
        if errors:
            raise errors[0]

    def _worker(self, d: int) -> queue.SimpleQueue:
        """The queue of the thread that drives a device; it ends with this object."""
        if d not in self.jobs:
            jobs = self.jobs[d] = queue.SimpleQueue()
            threading.Thread(target=serve, args=(jobs,), daemon=True, name=f"rlfx.place on {self.devices[d]}").start()
            weakref.finalize(self, jobs.put, STOP)
        return self.jobs[d]

    def run(self, assignment: Assignment) -> tuple[Timeline, Any]:
        """Execute on the last arguments, each step waited for. Returns the timeline and the function's result."""
        with self.lock:
            plan = self.plan(assignment)
            memories = self._place([known.value for known in self.inputs], plan)
            clock = Clock(len(self.graph.tasks))
            self._walk_all(plan, memories, clock)
            result = self._finish(plan, memories)
        return clock.timeline(len(self.devices)), result

    def measure(self, args: Sequence[jax.Array], assignment: Assignment, repeats: int = 5) -> float:
        """Median seconds of a call, after one that compiles; what is donated is copied before, and not counted."""
        times = []
        for _ in range(repeats + 1):
            given = [x.copy() if i in self.graph.donated else x for i, x in enumerate(args)]
            self.load(given, assignment)
            jax.block_until_ready([*given, *(x for k in self.inputs for x in (k.on or {}).values())])
            begin = time.perf_counter()
            jax.block_until_ready(self(given, assignment))
            times.append(time.perf_counter() - begin)
        return float(np.median(times[1:]))

    def calibrated(self, problem: Problem, args: Sequence[jax.Array], repeats: int = 7) -> Problem:
        """The same problem with durations as measured: of stages, and of what is sent between devices.

        All devices run all stages at the same time, each by itself: devices that share memory or cores are slower together than
        alone, and together is how a balanced assignment runs them.
        """
        count, tasks = len(self.devices), len(self.graph.tasks)
        plans = [self._planned(np.full(tasks, d), range(tasks), donates=False) for d in range(count)]
        steps = tuple(plan.steps[d] for d, plan in enumerate(plans))
        together = Plan(steps, tuple((d, s) for d, own in enumerate(steps) for s in own),
                        tuple(tuple(range(count)) for _ in self.inputs), {}, frozenset())  # fmt: skip
        taken = np.zeros((repeats + 1, tasks, count))
        with self.lock:
            for i in range(repeats + 1):
                clock = Clock(tasks, count)
                self._walk_all(together, self._place([*args, *self.constants], together), clock)
                taken[i] = clock.end - clock.begin
        exec_time = np.maximum(np.median(taken[1:], axis=0), 1e-7).astype(np.float32)
        latency, rate = self._links()
        off = ~np.eye(count, dtype=bool)

        def seconds(nbytes: np.ndarray) -> np.ndarray:
            return ((latency + nbytes[:, None, None] / rate) * off).astype(np.float32)

        return replace(
            problem, exec_time=exec_time, transfer_time=seconds(problem.nbytes),
            source_time=seconds(problem.source_bytes),
        )  # fmt: skip

    def _links(self, size: int = 2**22, repeats: int = 9) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to begin a transfer, and bytes per second after that, ``[D, D]``."""
        count = len(self.devices)
        latency, rate = np.ones((count, count)), np.ones((count, count))
        for s in range(count):
            small, large = (jax.device_put(np.ones(n, np.float32), self.devices[s]) for n in (1, size // 4))
            for t in range(count):
                taken = []
                for x in (small, large):
                    times = []
                    for _ in range(repeats):
                        begin = time.perf_counter()
                        jax.block_until_ready(J.moved([x], self.devices[t]))
                        times.append(time.perf_counter() - begin)
                    taken.append(float(np.median(times)))
                latency[s, t], rate[s, t] = taken[0], size / max(taken[1] - taken[0], 1e-9)
        return latency, rate
