"""``rlfx.place.assign``: from a function to a placed, callable, explainable one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import ARRAYS, KEY, PATH, expect, integer, optional
from rlfx.errors import PlacementError, located
from rlfx.place import simulate as sim
from rlfx.place.baselines import Assignment, evaluate
from rlfx.place.execute import Executor
from rlfx.place.explode import explode
from rlfx.place.graph import DataflowGraph
from rlfx.place.hardware import HARDWARE, Hardware, check_devices, measured
from rlfx.place.methods import checked_method, fits, solve
from rlfx.place.online import descend
from rlfx.place.plot import draw
from rlfx.place.problem import Problem, build
from rlfx.place.resident import StageExecutor
from rlfx.place.runtime import Timeline
from rlfx.place.stages import StagedGraph


@dataclass(frozen=True, eq=False)
class Placement:
    """A function whose shards have devices. Call it like the function.

    Attributes:
      graph: the sharded function.
      problem: its durations on the machine.
      devices: jax devices.
      assignment: device and run-time order of each task.
      seconds: simulated makespan.
      method, calls: how it was found, and with how many simulator calls.
      params: the policy's parameters, if the method learned one.
      alone: of stages, the predicted seconds of what was not chosen: one program on one device, or the best assignment
        where that is slower.
    """

    graph: DataflowGraph
    problem: Problem
    devices: tuple[Any, ...]
    assignment: Assignment
    seconds: float
    method: str
    calls: int
    params: Any = None
    alone: float | None = None

    @cached_property
    def executor(self) -> Executor | StageExecutor:
        """The compiled graph on its devices."""
        if isinstance(self.graph, StagedGraph):
            return StageExecutor(self.graph, self.problem, self.devices)
        return Executor(self.graph, self.devices)

    def __call__(self, *args: Any) -> Any:
        """The function's result, computed by its shards on their devices; on the first device, that of stages where it is.

        Raises:
          PlacementError: the arguments have other shapes or types than those that were placed, a device is gone, or the
            call is inside ``jit``, ``grad`` or ``vmap``.
        """
        if isinstance(self.executor, StageExecutor):
            return self.executor(self._check(args), self.assignment)
        return self.timed(*args)[1]

    def timed(self, *args: Any) -> tuple[Timeline, Any]:
        """The execution's timeline, and the result."""
        flat = self._check(args)
        check_devices(self.devices)
        self.executor.load(flat, self.assignment)
        return self.executor.run(self.assignment)

    def _check(self, args: Any) -> list[jax.Array]:
        flat, tree = jax.tree.flatten(args)
        name = self.graph.name
        if any(isinstance(x, jax.core.Tracer) for x in flat):
            fact = (
                f"{name} is placed: its tasks run on their devices at once, and cannot be traced by jit, grad or vmap."
            )
            fix = "Transform the function, then place it: assign(jax.grad(fn), ...). A placed function is compiled already."
            raise PlacementError(located(fact, fix=fix))
        if tree != self.graph.in_tree:
            raise PlacementError(
                located(f"{name} was placed for arguments {self.graph.in_tree}, and is called with {tree}.",
                        fix="Call it with the same pytree, or assign again.")
            )  # fmt: skip
        new = self.executor.unknown(flat) if isinstance(self.executor, StageExecutor) else range(len(flat))
        if others := [flat[i] for i in new if not isinstance(flat[i], jax.Array)]:
            expect("args", others, ARRAYS, PlacementError, of=name)
        for i in new:
            x, aval = flat[i], self.graph.in_avals[i]
            if jnp.shape(x) != aval.shape or jnp.result_type(x) != aval.dtype:
                raise PlacementError(
                    located(
                        f"{name} was placed for argument {i} of {aval.dtype}{list(aval.shape)}, and is called with "
                        f"{jnp.result_type(x)}{list(jnp.shape(x))}.",
                        fix="A placement holds for one set of shapes: assign again for these arguments.",
                    )
                )
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in flat]

    @cached_property
    def schedule(self) -> sim.Schedules:
        """The simulated execution, batch of one."""
        device, order = jnp.asarray(self.assignment.device)[None], jnp.asarray(self.assignment.order)[None]
        return sim.simulate(self.problem, device, order)

    def improve(self, *args: Any, calls: int = 64, key: jax.Array | None = None) -> Placement:
        """The placement after a search by executions: the stage of DOPPLER that learns from the system (stage III).

        Neighbours of the assignment that fit into memory are executed in turn with it, and one that is faster in the
        median of three takes its place. Without a policy, that is a local search; :func:`rlfx.place.train.learn_online`
        trains one.

        Args:
          *args: the function's arguments.
          calls: executions, at least 8.
          key: of the moves, by default ``jax.random.key(0)``.

        Returns:
          The placement, with the same simulated problem and as many more calls; this one if nothing was faster.

        Raises:
          PlacementError: fewer than 8 calls, or arguments that were not placed.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from rlfx.place import assign, hardware
          >>> x = jnp.arange(64.0).reshape(8, 8)
          >>> machine = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)
          >>> placed = assign(lambda x: x @ x, x, devices=jax.devices()[:2], method="heft", hardware=machine)
          >>> bool(jnp.allclose(placed.improve(x, calls=8)(x), x @ x))
          True
        """
        calls = expect("calls", calls, integer(8), PlacementError, of="improve")
        key = expect("key", key, optional(KEY), PlacementError, of="improve")
        flat = self._check(args)

        def seconds(assignment: Assignment) -> float:
            if isinstance(self.executor, StageExecutor):
                return self.executor.measure(flat, assignment, repeats=1)
            self.executor.load(flat, assignment)
            return self.executor.run(assignment)[0].makespan

        def fit(assignment: Assignment) -> bool:
            return not self.problem.memory_may_bind or fits(
                self.problem, float(evaluate(self.problem, [assignment])[0])
            )

        key = jax.random.key(0) if key is None else key
        best = descend(self.problem, self.assignment, seconds, fit, key, calls)
        cost = float(evaluate(self.problem, [best])[0])
        return replace(self, assignment=best, seconds=cost, calls=self.calls + calls)

    def explain(self) -> str:
        """What was decided and what limits it, as a table."""
        p, device = self.problem, self.assignment.device
        copies = np.isfinite(np.asarray(self.schedule.sent[0]))
        peak = np.asarray(sim.peak_memory(p, jnp.asarray(device)[None], self.schedule)[0])
        bound, alone = p.lower_bound(), float(p.one_device().min())
        lines = [
            self.graph.summary(),
            f"{self.method}, {self.calls} simulator calls: {self.seconds * 1e3:.3f} ms "
            f"({self.seconds / bound:.2f} x the lower bound {bound * 1e3:.3f} ms, "
            f"{alone / self.seconds:.2f} x faster than one device)",
            *self._decision(),
            f"{int(copies.sum())} transfers, {float(p.nbytes @ copies.sum(axis=1)) / 1e6:.3f} MB",
            f"{'device':<28} {'tasks':>6} {'busy':>6} {'peak memory':>12}",
        ]
        for d, name in enumerate(self.devices):
            mine = device == d
            busy = float(p.exec_time[mine, d].sum()) / self.seconds
            lines.append(f"{name!s:<28} {int(mine.sum()):>6} {busy:>6.0%} {peak[d] / 1e6:>9.3f} MB")
        return "\n".join(lines)

    def _decision(self) -> list[str]:
        """Of stages, one device or several, and why."""
        if self.alone is None:
            return []
        if self.problem.tasks == 1:
            return [f"one device: one program is predicted to take {self.seconds * 1e3:.3f} ms, "
                    f"stages on {len(self.devices)} devices {self.alone * 1e3:.3f} ms"]  # fmt: skip
        return [f"{len(self.devices)} devices: one program on one of them takes {self.alone * 1e3:.3f} ms, "
                f"{self.alone / self.seconds:.2f} x as long as predicted for the stages"]  # fmt: skip

    def plot(self) -> Any:
        """A matplotlib figure: the graph coloured by device, and each device's and link's simulated use over time."""
        return draw(self)

    def save(self, path: str | Path) -> None:
        """Write devices and order of every task, by name, as JSON."""
        path = expect("path", path, PATH, PlacementError, of="save")
        record = {
            "function": self.graph.name,
            "method": self.method,
            "calls": self.calls,
            "seconds": self.seconds,
            "devices": [str(d) for d in self.devices],
            "arguments": [[list(a.shape), str(a.dtype)] for a in self.graph.in_avals],
            "tasks": {
                name: [int(d), int(o)]
                for name, d, o in zip(self.problem.names, self.assignment.device, self.assignment.order, strict=True)
            },
        }
        Path(path).write_text(json.dumps(record, indent=1))

    @staticmethod
    def load(
        path: str | Path,
        fn: Callable[..., Any],
        *args: Any,
        devices: Sequence[Any] | None = None,
        splits: Mapping[str, tuple[int, ...]] | int | None = None,
        fuse: Sequence[str] = (),
        hardware: Hardware | None = None,
    ) -> Placement:
        """Read a placement of the same function, arguments' shapes, splits and number of devices.

        Raises:
          PlacementError: any of them differs.
        """
        record = _record(path)
        expect("hardware", hardware, _MACHINE, PlacementError, of="load")
        devices = chosen_devices(devices)
        if len(devices) != len(record["devices"]):
            raise PlacementError(
                located(
                    f"{Path(path).name} was placed on {len(record['devices'])} devices, not on {len(devices)}.",
                    fix="Pass as many devices, or assign again.",
                )
            )
        graph = explode(fn, *args, splits=len(devices) if splits is None else splits, fuse=fuse)
        given = [[list(a.shape), str(a.dtype)] for a in graph.in_avals]
        if given != record["arguments"]:
            raise PlacementError(
                located(f"{Path(path).name} was placed for arguments {record['arguments']}, not for {given}.",
                        fix="A placement holds for one set of shapes: assign again for these arguments.")
            )  # fmt: skip
        problem = build(graph, hardware or measured(list(devices)), called=True)
        if set(problem.names) != set(record["tasks"]):
            odd = sorted(set(problem.names) ^ set(record["tasks"]))[0]
            raise PlacementError(
                located(f"{Path(path).name} places another function: task {odd} is in only one of them.",
                        fix="Load with the function, splits and fused scopes that were assigned.")
            )  # fmt: skip
        pairs = np.array([record["tasks"][name] for name in problem.names], np.int32)
        return Placement(
            graph, problem, devices, Assignment(pairs[:, 0], pairs[:, 1]), record["seconds"], record["method"],
            record["calls"],
        )  # fmt: skip


_MACHINE = optional(HARDWARE)


def _record(path: str | Path) -> dict[str, Any]:
    """What :meth:`Placement.save` wrote."""
    file = Path(expect("path", path, PATH, PlacementError, of="load"))
    try:
        record = json.loads(file.read_text())
        assert set(record) >= {"devices", "arguments", "tasks", "seconds", "method", "calls"}
    except (OSError, UnicodeDecodeError, ValueError, AssertionError, TypeError) as error:
        fact = f"{file} is not what Placement.save writes: {type(error).__name__} {error}"
        raise PlacementError(located(fact.rstrip(), fix="Write one with placed.save(path).")) from error
    return record


def chosen_devices(devices: Sequence[Any] | None) -> tuple[Any, ...]:
    chosen = tuple(jax.devices()) if devices is None else check_devices(devices)
    if len(chosen) < 2:
        raise PlacementError(
            located(
                f"Placement needs two devices or more, and there is {len(chosen)}: {', '.join(map(str, chosen))}.",
                fix="Pass devices=..., or set XLA_FLAGS=--xla_force_host_platform_device_count=4 to split a CPU.",
            )
        )
    return chosen


def assign(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[Any] | None = None,
    method: str = "polish",
    budget: int = 4096,
    splits: Mapping[str, tuple[int, ...]] | int | None = None,
    fuse: Sequence[str] = (),
    hardware: Hardware | None = None,
    key: jax.Array | None = None,
) -> Placement:
    """Shard a function, decide where each shard runs, and return it as a callable (DOPPLER stages I and II).

    Args:
      fn: a pure JAX function of pytrees of arrays.
      *args: example arguments, or ``jax.ShapeDtypeStruct``.
      devices: jax devices, at least two; by default all of the default platform.
      method: ``polish``, ``doppler`` (a learned policy before it), ``local-search``, ``anneal``, ``placeto``, ``enumerate``,
        ``heft``, ``critical-path`` or ``one-device``.
      budget: simulator calls, training episodes included.
      splits: see :func:`rlfx.place.explode`; by default as many parts as devices.
      fuse: named scopes that become one node per block.
      hardware: the machine's rates; measured if not given.
      key: PRNG key, by default ``jax.random.key(0)``.

    Returns:
      The placed function: call it, or ``explain``, ``plot``, ``save`` it.

    Raises:
      PlacementError: side effects, fewer than two devices, nothing that fits into memory, or unknown names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.place import assign, hardware
      >>> x = jnp.arange(64.0).reshape(8, 8)
      >>> machine = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)
      >>> placed = assign(lambda x: x @ x, x, devices=jax.devices()[:2], method="heft", hardware=machine)
      >>> bool(jnp.allclose(placed(x), x @ x))
      True
    """
    method, budget = checked_method("assign", method, budget)
    key = expect("key", key, optional(KEY), PlacementError, of="assign")
    expect("hardware", hardware, _MACHINE, PlacementError, of="assign")
    chosen = chosen_devices(devices)
    graph = explode(fn, *args, splits=len(chosen) if splits is None else splits, fuse=fuse)
    machine = hardware or measured(list(chosen))
    if machine.devices != len(chosen):
        raise PlacementError(
            located(f"hardware describes {machine.devices} devices and {len(chosen)} are given.",
                    fix="Pass a Hardware with one entry per device, or none to measure them.")
        )  # fmt: skip
    problem = build(graph, machine, called=True)
    result = solve(problem, method, jax.random.key(0) if key is None else key, budget)
    return Placement(graph, problem, chosen, result.assignment, result.cost, method, result.calls, result.params)
