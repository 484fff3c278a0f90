"""What a change would gain: the window replayed without one of its costs, for the costs that are largest.

A cost is a line of the program, or an operation: what Python computes there, calls of jax, waits for the device, waits for
others, callbacks, compilations that another call could have had, and instructions of compiled programs. What is said is
an upper bound where the cost can only be made smaller, and what to expect where it can be left out.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlfx.profile import compilations, hlo, lines
from rlfx.profile.attributed import Attributed, Process
from rlfx.profile.lines import Frame, Stack
from rlfx.profile.replay import Replay
from rlfx.profile.rows import named
from rlfx.profile.rules import BACKEND, BLOCKED, CALLBACK, COMPILE, DISPATCH, WAIT
from rlfx.profile.seen import CALL, PYTHON_KIND, SAMPLES, seen, seen_at
from rlfx.profile.timeline import HOST, TASK, THUNK

#: Less than this of the window is no finding.
LEAST = 0.03
#: A line that holds more of the device's time than this holds the program, and says nothing; unless nothing is inside it.
MOST = 0.95
#: Larger gains are no number to plan with: what is left is no more than the attribution's error.
SAID = 20
#: So many of the largest costs are replayed.
TRIED = 12

DEVICE_KIND, PROGRAM, OPERATION = "device", "program", "operation"
#: What to do, by kind.
CHANGES = {
    CALL: "jit these calls as one, or put them into the program around them",
    PYTHON_KIND: "compute it less often, in NumPy, or in jax",
    WAIT: "read results later, or less often: the host can go on meanwhile",
    BLOCKED: "do something else meanwhile, or make what it waits for faster",
    CALLBACK: "call back less often, or compute it in jax",
    COMPILE: "keep shapes, dtypes and the function the same",
    DEVICE_KIND: "compute it less often, or with less work",
    PROGRAM: "call it less often, or from inside of another program",
    OPERATION: "do it less often, or make it faster",
}


@dataclass(frozen=True)
class Gain:
    """One cost: its `kind`, the source `line` (`file`, `number`) or operation, and what leaving it out would gain.

    `seconds` of the window would become `seconds / speedup`. `what` says it in words, `change` what to do.
    """

    kind: str
    file: str
    number: int
    what: str
    change: str
    seconds: float
    speedup: float

    @property
    def line(self) -> str:
        return f"{self.file}:{self.number}" if self.number else ""

    def __str__(self) -> str:
        gain = f"{self.speedup:.2f}x" if self.speedup < SAID else f"more than {SAID}x (it is nearly all of the time)"
        return f"without {self.what}: {gain}; {self.change}"


@dataclass(frozen=True)
class Cost:
    """A candidate: `cost` of every context without it, as `replay` takes it."""

    kind: str
    frame: Frame | None
    what: str
    cost: np.ndarray


def gains(report: Attributed, count: int = 3, paid: Mapping[str, float] | None = None) -> list[Gain]:
    """The changes that gain most, the largest first; each would gain so much alone.

    Args:
      report: of one or several processes; a change is one of its process.
      count: how many at most.
      paid: ns that each event of a kind cost the program while it was captured, from `paid_in` or
        `Overhead.costs`. By default it follows from how long the same work took without a capture, where `sampled` has
        measured that; otherwise profiling's own cost stays in, most of it in the device's share.

    Example:
      >>> from rlfx.profile.rows import Row
      >>> gains(Attributed([], {Row("", (), "", "python", "idle"): 1}, {}, collections.Counter(), {}, [], []))
      []
    """
    if paid is None:
        plain_ns = sum(process.notes.get("plain_ns", 0) for process in report.processes)
        paid = paid_in(report, plain_ns) if plain_ns else {}
    found: list[tuple[Gain, Process, Cost]] = []
    for process in report.processes:
        replay = Replay.of_process(process, paid)
        whole = replay.lasts(_ones(process))
        if whole <= 0:
            continue
        weight = _weights(process)
        for candidate in sorted(_candidates(process, paid), key=lambda c: -float((1 - c.cost) @ weight))[:TRIED]:
            left = replay.lasts(candidate.cost)
            # A function that is all of the program says nothing.
            if whole - left >= LEAST * whole and not (candidate.kind == PROGRAM and left < 0.02 * whole):
                f = candidate.frame or Frame("", 0)
                words = candidate.what, CHANGES[candidate.kind], whole / 1e9, whole / max(left, 1.0)
                found.append((Gain(candidate.kind, f.file, f.line, *words), process, candidate))
    found.sort(key=lambda item: -item[0].speedup)
    kept: list[tuple[Gain, Process, Cost]] = []
    for new in found:
        same = [i for i, old in enumerate(kept) if old[1] is new[1] and _same(new[1], new[2], old[2])]
        if not same:
            kept.append(new)
        elif _says_more(new[2], kept[same[0]][2]):
            kept[same[0]] = new
    return sorted((gain for gain, _, _ in kept), key=lambda gain: -gain.speedup)[:count]


def _says_more(new: Cost, old: Cost) -> bool:
    """Of two candidates for the same time: an operation names the line seen most, too, and is no estimate from samples."""
    if new.kind == OPERATION:
        return old.kind in _WORDS
    return new.kind == DEVICE_KIND and old.kind == PROGRAM and old.frame is None


def _weights(process: Process) -> np.ndarray:
    """ns in each context, on whatever thread."""
    weight = np.zeros(len(process.sweep.contexts))
    times = np.bincount(process.sweep.combo, np.diff(process.sweep.bounds), len(process.sweep.columns))
    for column, ns in zip(process.sweep.columns, times.tolist(), strict=True):
        weight[list(set(column))] += ns
    return weight


def _same(process: Process, a: Cost, b: Cost) -> bool:
    """Do two candidates of different kinds leave out the same time, more than half of the larger one?"""
    if a.kind == b.kind and a.kind != OPERATION:
        return False
    weight = _weights(process)
    return bool(np.minimum(1 - a.cost, 1 - b.cost) @ weight > 0.5 * max((1 - a.cost) @ weight, (1 - b.cost) @ weight))


def paid_in(report: Attributed, plain_ns: float) -> dict[str, float]:
    """What an event cost in a window that takes `plain_ns` when it is not captured: `paid` of `gains`.

    The events of XLA's instructions are most of it; those of the host count half of one, tasks of its threads twenty.
    """
    relative = {THUNK: 1.0, HOST: 0.5, TASK: 20.0}
    replays = [Replay.of_process(process, relative) for process in report.processes]

    def left(one: float) -> float:
        return sum(r.scaled(one).lasts(_ones(r.process)) for r in replays)

    low, high = 0.0, 100.0  # ns; an event never cost more than 10 us
    while left(high) > plain_ns and high < 10_000:
        low, high = high, 2 * high
    for _ in range(12 if left(low) > plain_ns else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > plain_ns else (low, middle)
    return {kind: low * weight for kind, weight in relative.items()}


def _candidates(process: Process, paid: Mapping[str, float]) -> Iterator[Cost]:
    yield from _sampled(process)
    yield from _callbacks(process)
    yield from _compilations(process)
    yield from _instructions(process, paid.get(THUNK, 0.0))
    yield from _programs(process)
    yield from _operations(process)


def _ones(process: Process) -> np.ndarray:
    return np.ones(len(process.sweep.contexts))


def _sampled(process: Process) -> Iterator[Cost]:
    """Lines at which threads of Python were seen: their share of what a context took, for each context apart."""
    total = collections.Counter(at.context for at in seen(process) if at.kind)
    for (kind, frame), hits in seen_at(process)[:12]:
        if hits.total() >= SAMPLES:
            cost = _ones(process)
            for (_, context), n in hits.items():
                cost[context] -= n / total[context]
            yield Cost(kind, frame, _WORDS[kind].format(frame), cost)


_WORDS = {
    CALL: "the calls of jax at {}", PYTHON_KIND: "Python at {}", WAIT: "the wait for the device at {}",
    BLOCKED: "what blocks at {}",
}  # fmt: skip


def _most(process: Process, contexts: set[int]) -> Frame | None:
    """The line that was seen most in these contexts."""
    return lines.most(at.frame for at in seen(process) if at.context in contexts)


def _callbacks(process: Process) -> Iterator[Cost]:
    """By the line that asks for the call back, which the instruction names."""
    kernels = [k for k in process.timeline.kernels.values() if k.op is not None and k.op.kind == hlo.CALLBACK]
    times: collections.Counter = collections.Counter()
    for kernel in kernels:
        stack = lines.own(kernel.op.sources[0][0]) if kernel.op and kernel.op.sources else ()
        times[Frame(stack[0].file, stack[0].line) if stack else None] += kernel.ns
    for frame, ns in times.most_common(6):
        cost = _ones(process)
        for i, context in enumerate(process.sweep.contexts):
            cost[i] = 1 - ns / times.total() if context.called_back else 1.0
        yield Cost(CALLBACK, frame, f"the callback at {frame}" if frame else "callbacks", cost)


def _compilations(process: Process) -> Iterator[Cost]:
    """What was compiled again: not for the first time in this process."""
    all_of_it = sum(c.seconds for c in process.compiled)
    for c in process.compiled[:6]:
        again = [cause for cause in c.causes if not compilations.first(cause)]
        if not again or not all_of_it:
            continue
        part = len(again) / c.count
        mine = {
            i for i, x in enumerate(process.sweep.contexts) if x.state == COMPILE and x.function == f"jit({c.function})"
        }
        cost = _ones(process)
        for i, context in enumerate(process.sweep.contexts):
            if i in mine:
                cost[i] = 1 - part
            elif not mine and context.state == COMPILE:
                cost[i] = 1 - part * c.seconds / all_of_it
        frame = _most(process, mine)
        where = f" at {frame}" if frame else ""
        yield Cost(COMPILE, frame, f"compiling {c.function} {len(again)} times again{where} ({again[0]})", cost)


def _instructions(process: Process, paid: float) -> Iterator[Cost]:
    """Lines of compiled programs with all that they call, which share no instruction with one another.

    `paid`: ns that capturing an instruction costs, which is in the time between instructions, too.
    """
    weights: collections.Counter = collections.Counter()
    leaves = [k for k in process.timeline.kernels.values() if not k.copy and (k.op is None or k.op.kind == hlo.LEAF)]
    count = sum(k.count for k in leaves) or 1
    between = max(0.0, (sum(process.sweep.device.values()) - sum(k.ns for k in leaves)) / count)
    for kernel in leaves:
        taken = max(kernel.ns + kernel.count * (between - paid), 0.05 * kernel.ns)
        sources = kernel.op.sources if kernel.op is not None else ()
        for stack, weight in sources or (((), 1),):
            weights[stack] += taken * weight / sum(w for _, w in sources or (((), 1),))
    weights = lines.completed(weights)
    total = weights.total()
    for _ in range(4):
        fits = _fitting(weights, lines.own, MOST) or _fitting(weights, lambda stack: stack, 1.0)
        if not fits:
            return
        frame = max(fits, key=lambda f: _sum(weights, fits[f]))
        share = _sum(weights, fits[frame]) / total
        cost = np.asarray([1 - share * (bool(c.device) and not c.called_back) for c in process.sweep.contexts])
        yield Cost(DEVICE_KIND, frame, f"what {frame} computes on the device", cost)
        for stack in fits[frame]:
            del weights[stack]


def _fitting(weights: Mapping[Stack, float], frames: Callable[[Stack], Stack], most: float) -> dict[Frame, list[Stack]]:
    """The stacks of every line that holds enough of the device's time, and not nearly all; `most` if it ends there."""
    known = _sum(weights, [s for s in weights if s])
    fits = {f: of for f, of in lines.within(weights, frames).items() if _sum(weights, of) <= MOST * known}
    ends = {f: of for f, of in lines.at(weights, frames).items() if f not in fits and _sum(weights, of) <= most * known}
    return {f: of for f, of in (ends | fits).items() if _sum(weights, of) > LEAST * known}


def _sum(weights: Mapping[Stack, float], stacks: list[Stack]) -> float:
    return sum(weights[stack] for stack in stacks)


def _programs(process: Process) -> Iterator[Cost]:
    """Jitted functions with all that their calls do: on the host, on the device, and while the host waits for them."""
    contexts = process.sweep.contexts
    functions = {c.function for c in contexts if c.function and c.state in (BACKEND, DISPATCH) and not c.called_back}
    for function in sorted(functions):
        mine = {
            i for i, c in enumerate(contexts) if c.function == function and c.state != COMPILE and not c.called_back
        }
        cost = _ones(process)
        cost[list(mine)] = 0.0
        frame = _most(process, {i for i in mine if contexts[i].state in (BACKEND, DISPATCH)})
        where = f", called at {frame}," if frame else ""
        yield Cost(PROGRAM, frame, f"{function}{where} and what it computes", cost)


def _operations(process: Process) -> Iterator[Cost]:
    """Whole operations, and where they were seen most."""
    contexts = process.sweep.contexts
    paths = {s.path[:size] for c in contexts for s in c.shares for size in range(1, len(s.path) + 1) if named(s.path)}
    busy = collections.Counter()
    for row, ns in process.sweep.rows.items():
        busy.update({row.path[:size]: ns for size in range(1, len(row.path) + 1)})
    inner = {path[:-1] for path in paths}
    # An operation that is all of the program, with others inside of it, says nothing.
    paths = {path for path in paths if path not in inner or busy[path] <= 0.9 * process.window_ns}
    for path in sorted(paths, key=lambda path: -busy[path])[:12]:
        mine = {i for i, c in enumerate(contexts) if any(s.path[: len(path)] == path for s in c.shares)}
        cost = _ones(process)
        for i in mine:
            shares = contexts[i].shares
            inside = sum(s.weight for s in shares if s.path[: len(path)] == path)
            cost[i] = 1 - inside / sum(s.weight for s in shares)
        frame = _most(process, mine)
        where = f" (most of it at {frame})" if frame else ""
        yield Cost(OPERATION, frame, f"operation {'/'.join(path)}{where}", cost)
