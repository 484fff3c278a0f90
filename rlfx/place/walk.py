"""Planned steps of stages, as they run: one thread a device that walks its list, or one thread that dispatches all.

Each device has a list of steps, and a memory of its own: blocks by number. A step reads and writes the memory of its device; what
other devices need is sent to them. On host devices a thread walks each list, since XLA runs host devices one after another
otherwise; elsewhere one thread dispatches all of it, and the devices wait for each other.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place.runtime import Timeline

Memory = dict[int, jax.Array]
STOP = None


@dataclass(frozen=True)
class Step:
    """One stage on one device.

    Attributes:
      task: its number in the problem.
      run: the compiled program.
      reads, yields: blocks.
      awaited: those of ``reads`` that other devices send.
      sends: other devices, and the blocks that each of them needs.
      frees: blocks that nothing on this device needs any more.
    """

    task: int
    run: Callable[..., tuple[jax.Array, ...]]
    reads: tuple[int, ...]
    yields: tuple[int, ...]
    awaited: tuple[int, ...]
    sends: tuple[tuple[int, tuple[int, ...]], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """An assignment, ready to run.

    Attributes:
      steps: of each device, in order.
      sequence: ``(device, step)`` of all, each after those it reads.
      readers: for each argument, the devices on which it is read.
      home: of each block that is a result, its device.
      donated: arguments whose memory a step uses again.
    """

    steps: tuple[tuple[Step, ...], ...]
    sequence: tuple[tuple[int, Step], ...]
    readers: tuple[tuple[int, ...], ...]
    home: dict[int, int]
    donated: frozenset[int]


class Clock:
    """When steps began and ended; with ``count`` devices, on each of them."""

    def __init__(self, tasks: int, count: int = 0) -> None:
        self.origin = time.perf_counter()
        self.begin = np.zeros((tasks, count) if count else tasks)
        self.end = np.zeros_like(self.begin)
        self.per_device = bool(count)

    def note(self, step: Step, d: int, begin: float) -> None:
        """A step has ended now."""
        at = (step.task, d) if self.per_device else step.task
        self.begin[at], self.end[at] = begin - self.origin, time.perf_counter() - self.origin

    def timeline(self, devices: int) -> Timeline:
        """As :mod:`rlfx.place.runtime` has it; copies and memory are not recorded."""
        return Timeline(float(self.end.max(initial=0.0)), self.begin, self.end, (), np.zeros(devices))


class Stopped(Exception):
    """Another device has failed."""


def serve(jobs: queue.SimpleQueue) -> None:
    """What a thread that drives a device does."""
    while (job := jobs.get()) is not STOP:
        job()
        del job


def compute(step: Step, memory: Memory, d: int, clock: Clock | None) -> None:
    """One step on what its device has."""
    begin = time.perf_counter() if clock else 0.0
    out = step.run(*[memory[b] for b in step.reads])
    if clock:
        jax.block_until_ready(out)
        clock.note(step, d, begin)
    memory.update(zip(step.yields, out, strict=True))


def walk(steps: Sequence[Step], memory: Memory, inboxes: Sequence[queue.SimpleQueue], d: int, devices: Sequence[Any],
          clock: Clock | None) -> None:  # fmt: skip
    """One device's steps, in order, waiting for what others send."""
    inbox, own = inboxes[d], devices[d]
    for step in steps:
        for b in step.awaited:
            while b not in memory:
                message = inbox.get()
                if message is STOP:
                    raise Stopped
                blocks, values = message
                memory.update(zip(blocks, J.moved(values, own), strict=True))
        compute(step, memory, d, clock)
        for target, blocks in step.sends:
            inboxes[target].put((blocks, [memory[b] for b in blocks]))
        for b in step.frees:
            del memory[b]


def dispatch(plan: Plan, memories: Sequence[Memory], devices: Sequence[Any], clock: Clock | None) -> None:
    """All steps by one thread, in order: devices that run behind their host wait for each other by themselves."""
    for d, step in plan.sequence:
        memory = memories[d]
        compute(step, memory, d, clock)
        for target, blocks in step.sends:
            values = J.moved([memory[b] for b in blocks], devices[target])
            memories[target].update(zip(blocks, values, strict=True))
        for b in step.frees:
            del memory[b]
