"""Algorithms 1 and 2 in plain Python, line by line: the oracle of the compiled simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlfx.place.problem import Problem

Task = tuple[str, int, int, int]  # ("exec", v, device, device) or ("transfer", v, from, to)


@dataclass(frozen=True)
class Event:
    """An entry of the schedule S: a task began or ended."""

    task: Task
    time: np.float32
    kind: str  # "beg" or "end"


def enum_tasks(ready: np.ndarray, problem: Problem, assignment: np.ndarray, started: set[Task]) -> list[Task]:
    """Algorithm 2: all transfers and executions that could start now, were their resource free."""
    output: list[Task] = []
    for v1, v2 in zip(*np.nonzero(problem.adjacency), strict=True):
        source, target = int(assignment[v1]), int(assignment[v2])
        transfer = ("transfer", int(v1), source, target)
        if not ready[v1, target] and ready[v1, source] and transfer not in started and transfer not in output:
            output.append(transfer)
    for v2 in range(problem.tasks):
        device = int(assignment[v2])
        inputs_ready = all(ready[v1, device] for v1 in np.flatnonzero(problem.adjacency[:, v2]))
        if inputs_ready and ("exec", v2, device, device) not in started:
            output.append(("exec", v2, device, device))
    return output


def simulate(
    problem: Problem,
    assignment: np.ndarray,
    priority: np.ndarray,
    *,
    fifo: bool = False,
    exec_noise: np.ndarray | None = None,
    transfer_noise: np.ndarray | None = None,
) -> tuple[np.float32, list[Event]]:
    """Algorithm 1: the execution time of an assignment under a work-conserving scheduler.

    Args:
      problem: durations and dependences.
      assignment: int ``[V]``, device of each task.
      priority: int ``[V]``, distinct; among tasks ready on an idle device the lowest starts (ChooseTask).
      fifo: the task whose inputs arrived first starts, priorities break ties.
      exec_noise: float32 ``[V]``, factors on execution times (a draw from P; 1 if absent).
      transfer_noise: float32 ``[V, D]``, factors on transfer times, by task and target.

    Returns:
      The makespan and the schedule S. Each device executes one task at a time, each lane of a device (one for each target,
      unless ``problem.lane`` says otherwise) makes one transfer at a time, in the order in which their results became ready,
      then to the lowest target. All completions at one instant, those of
      transfers that take no time included, are recorded before the next choice; the lowest device chooses first. Times are
      float32 sums, as in the compiled simulator. Sources are sent at time 0, by their number, and are not in the schedule.
    """
    ready = np.zeros((problem.tasks, problem.devices), bool)
    arrived = np.zeros((problem.tasks, problem.devices), np.float32)
    now, schedule = np.float32(0.0), []
    started: set[Task] = set()
    running: dict[Task, np.float32] = {}
    given = sent_sources(problem, assignment)
    running.update({("source", s, home, d): end for (s, home, d), end in given.items()})
    reads: dict[int, list[int]] = {v: [] for v in range(problem.tasks)}
    for s, v in problem.source_edges:
        reads[int(v)].append(int(s))

    def sources_of(v: int) -> list[np.float32]:
        return [end for (s, _, d), end in given.items() if s in reads[v] and d == int(assignment[v])]

    def duration(task: Task) -> np.float32:
        kind, v, source, target = task
        if kind == "exec":
            base = problem.exec_time[v, source]
            return base if exec_noise is None else base * exec_noise[v]
        base = problem.transfer_time[v, source, target]
        return base if transfer_noise is None else base * transfer_noise[v, target]

    def order(task: Task) -> tuple[int, int, float, int, int]:
        kind, v, source, target = task
        if kind == "transfer":
            return 0, 0, float(arrived[v, source]), v, target
        there = [float(arrived[u, source]) for u in np.flatnonzero(problem.adjacency[:, v])]
        when = max([*there, *map(float, sources_of(v))], default=0.0)
        return 1, source, (when if fifo else 0.0), int(priority[v]), target

    def complete(task: Task) -> None:
        del running[task]
        if task[0] == "source":
            return
        schedule.append(Event(task, now, "end"))
        ready[task[1], task[3]] = True
        arrived[task[1], task[3]] = now

    def resource(task: Task) -> tuple[str, int, int]:
        kind, _, source, target = task
        return ("exec", source, target) if kind == "exec" else ("lane", source, lane_of(problem, source, target))

    def choose_task(tasks: list[Task]) -> Task | None:
        busy = {resource(task) for task in running}
        free = [t for t in tasks if resource(t) not in busy]
        free = [t for t in free if t[0] == "transfer" or all(end <= now for end in sources_of(t[1]))]
        return min(free, key=order) if free else None

    for task in [t for t, end in running.items() if end == now]:
        complete(task)
    while any(not ready[v, assignment[v]] for v in range(problem.tasks)):
        task = choose_task(enum_tasks(ready, problem, assignment, started))
        if task is None:
            now = min(running.values())
            for done in [t for t, end in running.items() if end == now]:
                complete(done)
        else:
            started.add(task)
            running[task] = np.float32(now + duration(task))
            schedule.append(Event(task, now, "beg"))
            if running[task] == now:  # it takes no time (or none that float32 sees): what waits for it may start now
                complete(task)
    return now, schedule


def lane_of(problem: Problem, source: int, target: int) -> int:
    """The lane of the source device that its copies to the target take."""
    return int(problem.lane[source, target]) if len(problem.lane) else target


def sent_sources(problem: Problem, assignment: np.ndarray) -> dict[tuple[int, int, int], np.float32]:
    """When each source that is sent is there: ``(source, from, to)``. They leave one after another on each link."""
    free: dict[tuple[int, int], np.float32] = {}
    there: dict[tuple[int, int, int], np.float32] = {}
    for s, where in enumerate(problem.source_home):
        home = 0 if where < 0 else int(assignment[where])
        for d in sorted({int(assignment[v]) for u, v in problem.source_edges if u == s} - {home}):
            lane = lane_of(problem, home, d)
            begin = free.get((home, lane), np.float32(0.0))
            there[s, home, d] = free[home, lane] = np.float32(begin + problem.source_time[s, home, d])
    return there


def peak_memory(problem: Problem, assignment: np.ndarray, schedule: list[Event]) -> np.ndarray:
    """Peak bytes on each device, float64 ``[D]``, by walking the schedule.

    A result is on its device from the start of its task, and a copy on its target from the start of its transfer, until
    its last local reader and its last transfer have ended; results that nobody reads stay. Input blocks stay on every
    device that reads them; ``problem.held`` is there throughout.
    """
    inputs = np.array(problem.held, np.float64)
    for block, readers in enumerate(problem.input_reads):
        for d in {int(assignment[v]) for v in np.flatnonzero(readers)}:
            inputs[d] += problem.input_bytes[block]
    waiting: dict[tuple[int, int], set[Task]] = {}
    for v in range(problem.tasks):
        home, readers = int(assignment[v]), [int(u) for u in np.flatnonzero(problem.adjacency[v])]
        targets = {int(assignment[u]) for u in readers}
        for d in targets | {home}:
            waiting[v, d] = {("exec", u, d, d) for u in readers if assignment[u] == d}
        waiting[v, home] |= {("transfer", v, home, d) for d in targets - {home}}
        if not readers:
            waiting[v, home] = {("exec", -1, home, home)}  # never ends
    live, peak = inputs.copy(), inputs.copy()
    by_time: dict[float, list[Event]] = {}
    for event in schedule:
        by_time.setdefault(float(event.time), []).append(event)
    for time in sorted(by_time):
        for event in by_time[time]:
            if event.kind == "end":
                for (v, d), readers in waiting.items():
                    if event.task in readers:
                        readers.discard(event.task)
                        if not readers:
                            live[d] -= problem.nbytes[v]
        for event in by_time[time]:
            if event.kind == "beg":
                live[event.task[3]] += problem.nbytes[event.task[1]]
        peak = np.maximum(peak, live)
    return peak
