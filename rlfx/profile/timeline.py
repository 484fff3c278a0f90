"""Walk a trace once, in time order: every thread and stream becomes a step function from time to context.

A `Context` says what a thread does at an instant: its host state, whether it keeps the device busy, and the operations
it works for. Nesting is resolved here with one stack a thread; the sweep then only meets step functions.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlfx.profile import rules
from rlfx.profile.annotate import OPERATION, PHASE
from rlfx.profile.events import DeviceEvent, Event, Line, gather
from rlfx.profile.hlo import CALLBACK as CALLBACK_OP
from rlfx.profile.hlo import LEAF, Op
from rlfx.profile.launches import Base, Launches, unmatched
from rlfx.profile.rules import BACKEND, CALLBACK, COMPILE, COPY, DEVICE, DISPATCH, FETCH, PYTHON, TRANSFER, WAIT
from rlfx.profile.scopes import UNNAMED, join
from rlfx.profile.xspace import Trace

FOREVER = np.iinfo(np.int64).max
CONTAINER = "container"
# What profiling pays for: an annotation of ours, an instruction of XLA, a task handed to one of its threads (recorded
# when handed over and when taken up), and any other event of the host. Calls back to Python count apart.
ANNOTATION, THUNK, TASK, HOST = "annotation", "thunk", "task", "host"


class Share(NamedTuple):
    """An operation that an instant works for, with the relative weight of its part."""

    phase: str
    path: tuple[str, ...]
    stage: str = ""
    weight: int = 1


class Context(NamedTuple):
    """`state`: host state, None when the thread is no actor. `device`: "", "leaf", "container" or "copy".

    `function` is the jitted function whose call encloses.
    """

    state: str | None
    device: str
    shares: tuple[Share, ...]
    base: Base
    function: str = ""


ABSENT = Context(None, "", (), Base())


@dataclass
class Track:
    """A thread or stream as a step function: from `times[i]` on it is in `contexts[context[i]]`."""

    line: Line
    times: np.ndarray
    context: np.ndarray


@dataclass
class Kernel:
    """All executions of one instruction (or callback) in the window."""

    count: int = 0
    ns: int = 0
    op: Op | None = None
    path: tuple[str, ...] = ()
    copy: bool = False


@dataclass
class Timeline:
    """A walked trace. `window` in ns after the trace's start; `events` are the costs that profiling itself paid."""

    window: tuple[int, int]
    contexts: list[Context]
    tracks: list[Track]
    main: int
    transitions: collections.Counter = field(default_factory=collections.Counter)
    operations: collections.Counter = field(default_factory=collections.Counter)
    launches: collections.Counter = field(default_factory=collections.Counter)
    bytes: collections.Counter = field(default_factory=collections.Counter)
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)
    unknown: dict[str, list[int]] = field(default_factory=dict)
    paid: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # kind: [(time, track)]
    problems: list[str] = field(default_factory=list)
    early: dict[str, int] = field(default_factory=dict)  # programs launched before the capture
    late: dict[str, int] = field(default_factory=dict)  # programs launched that were not seen to run
    worked: int = 0  # end of the last instruction
    waited: int = 0  # end of the last time that a thread of the host waited for the device, or read from it


class _Frame(NamedTuple):
    end: int
    context: int


def walk(trace: Trace) -> Timeline:
    """Turn a trace into step functions, transitions and counts.

    Raises:
      ProfileError: the trace holds no host events at all.
    """
    return _Walker(trace).run()


class _Walker:
    def __init__(self, trace: Trace):
        self.gathered = gather(trace)
        self.trace = trace
        self.ids: dict[Context, int] = {}
        self.contexts: list[Context] = []
        self.memo: dict[tuple, int] = {}
        early, late = unmatched(self.gathered.events)
        self.launches = Launches(early)
        self.waiting: dict[int, int] = {}  # run: the line of the thread that waits for it
        lines = self.gathered.lines
        self.lines = lines
        self.stacks: list[list[_Frame]] = [[] for _ in lines]
        self.times: list[list[int]] = [[] for _ in lines]
        self.steps: list[list[int]] = [[] for _ in lines]
        main = Context(PYTHON, "", (Share("", ()),), Base())
        self.roots = [self.intern(main if line.kind == "main" else ABSENT) for line in lines]
        window = self.gathered.window
        self.out = Timeline(
            window,
            self.contexts,
            [],
            self.gathered.main,
            problems=self.gathered.problems,
            early=dict(early),
            late=dict(late),
        )
        self.by_kind = {
            "annotation": self.annotation, "state": self.state, "record": self.record, "region": self.region,
            "stop": self.stop, "unknown": self.unknown,
        }  # fmt: skip

    def intern(self, context: Context) -> int:
        found = self.ids.get(context)
        if found is None:
            found = self.ids[context] = len(self.contexts)
            self.contexts.append(context)
        return found

    def run(self) -> Timeline:
        start, stop = self.out.window
        for event in self.gathered.events:
            at, line = event.start, event.line
            self.close(line, at)
            inside = start <= at < stop
            if isinstance(event, DeviceEvent):
                self.device(event, inside)
            else:
                handle = self.by_kind.get(event.rule.kind)
                if handle is not None:
                    handle(event, inside)
        for line in range(len(self.lines)):
            self.close(line, FOREVER)
        inside = [(at, line) for at, line in self.gathered.marks if start <= at < stop]
        if inside:
            self.out.paid.setdefault(HOST, []).extend(inside)
        self.out.tracks = [
            Track(line, np.asarray(t, np.int64), np.asarray(c, np.int32))
            for line, t, c in zip(self.lines, self.times, self.steps, strict=True)
        ]
        return self.out

    # The stack of a line.

    def top(self, line: int) -> int:
        return self.stacks[line][-1].context if self.stacks[line] else self.roots[line]

    def close(self, line: int, now: int) -> None:
        stack = self.stacks[line]
        while stack and stack[-1].end <= now:
            end, ended = stack.pop()
            if end != FOREVER:
                self.emit(line, end, self.after(line, ended))

    def after(self, line: int, ended: int) -> int:
        """Between two instructions of an open program its executor works: for the operation of the one that ended."""
        around = self.top(line)
        old, new = self.contexts[ended], self.contexts[around]
        if old.device != LEAF or new.state is not None or not self.stacks[line] or self.lines[line].kind == "stream":
            return around
        key = ("after", ended, around)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self.intern(new._replace(device=CONTAINER, shares=old.shares))
        return found

    def push(self, event: Event, context: int) -> None:
        stack = self.stacks[event.line]
        end = min(event.end, stack[-1].end) if stack else event.end  # clock jitter must not break the nesting
        stack.append(_Frame(end, context))
        self.emit(event.line, event.start, context)

    def emit(self, line: int, at: int, context: int) -> None:
        steps = self.steps[line]
        if not steps or steps[-1] != context:
            self.times[line].append(at)
            steps.append(context)

    def pay(self, kind: str, event: Event) -> None:
        self.out.paid.setdefault(kind, []).append((event.start, event.line))

    # One method a kind of event.

    def annotation(self, event: Event, inside: bool) -> None:
        before = self.top(event.line)
        key = (before, event.rule.value)
        after = self.memo.get(key)
        if after is None:
            c = self.contexts[before]
            marked = event.rule.value
            if marked.startswith(PHASE):
                base = Base(marked[len(PHASE) :], c.base.path)
            else:
                base = Base(c.base.phase, (*c.base.path, marked[len(OPERATION) :]))
            shares = (Share(base.phase, base.path),)
            after = self.memo[key] = self.intern(Context(c.state or PYTHON, "", shares, base))
        if inside:
            c = self.contexts[after]
            if event.rule.value.startswith(OPERATION) and c.state in (PYTHON, CALLBACK):
                self.out.operations[c.base.phase, c.base.path] += 1
            if not event.synthetic:
                self.pay(ANNOTATION, event)
        self.push(event, after)

    def state(self, event: Event, inside: bool) -> None:
        before = self.top(event.line)
        key = (before, event.name, event.run)
        after = self.memo.get(key)
        if after is None:
            after = self.memo[key] = self.intern(self.stated(self.contexts[before], event))
        if inside and after != before:
            old, new = self.contexts[before], self.contexts[after]
            if new.state not in (None, old.state):
                share = new.shares[0]
                reached = TRANSFER if new.state == FETCH else new.state
                source = TRANSFER if old.state == FETCH else old.state or PYTHON
                self.out.transitions[source, reached, share.phase, share.path] += 1
                if reached in (BACKEND, TRANSFER) and not event.synthetic:
                    self.pay(reached, event)
        if inside and not event.synthetic:
            self.pay(HOST, event)
        if event.rule.value in (WAIT, FETCH) and self.lines[event.line].kind != "pool":
            self.out.waited = max(self.out.waited, event.end)
        if event.correlation is not None:
            self.launches.correlated[event.correlation] = self.contexts[after].base
        if event.rule.value == DISPATCH and after != before:
            context = self.contexts[after]
            self.launches.dispatched(event.line, context.function, context.base)
        self.push(event, after)
        if event.run is not None and self.contexts[after].device == CONTAINER:
            self.waiting[event.run] = event.line

    def stated(self, c: Context, event: Event) -> Context:
        state = event.rule.value
        if self.lines[event.line].kind == "pool" and c.state is None:
            # A pool thread that waits for the thunks of a program holds the program open: the device runs it.
            if state == WAIT and not c.device:
                base = self.launches.base(event.run, event.line, "", c.base)
                return Context(None, CONTAINER, self.shares(base, UNNAMED, ""), base)
            return c
        if c.device or c.state == CALLBACK or (c.state == COMPILE and state == BACKEND):
            return c  # a jitted function called while another is traced is part of its compilation
        shares = c.shares or (Share(c.base.phase, c.base.path),)
        function = rules.function_of(event.name) or c.function
        if function and not c.base.path:
            shares = (Share(c.base.phase, (function,)),)
        return Context(state, "", shares, c.base, function)

    def record(self, event: Event, inside: bool) -> None:
        if inside:
            self.pay(TASK, event)
        self.launches.handed_over(event.line, event.link, self.contexts[self.top(event.line)].base)

    def region(self, event: Event, inside: bool) -> None:
        if inside:
            self.pay(TASK, event)
        before = self.contexts[self.top(event.line)]
        base = self.launches.taken_up(event.line, event.link, before.base)
        context = self.intern(Context(before.state, before.device, before.shares, base))
        self.stacks[event.line].append(_Frame(FOREVER, context))
        self.emit(event.line, event.start, context)

    def stop(self, event: Event, inside: bool) -> None:
        stack = self.stacks[event.line]
        while stack and stack.pop().end != FOREVER:
            pass
        self.emit(event.line, event.start, self.top(event.line))

    def unknown(self, event: Event, inside: bool) -> None:
        if not inside:
            return
        self.pay(HOST, event)
        c = self.contexts[self.top(event.line)]
        if self.lines[event.line].kind in ("main", "program") and c.state in (PYTHON, None):
            seen = self.out.unknown.setdefault(event.name, [0, 0])
            seen[0] += 1
            seen[1] += event.end - event.start

    def shares(self, base: Base, op_scope, module: str) -> tuple[Share, ...]:
        # Without an operation, time goes by stage in programs that rlfx compiled, and by jitted function in others.
        instead = op_scope.stage or rules.function_of(module)
        named = join(base.path, op_scope.path) or ((instead,) if instead else ())
        return (Share(op_scope.phase or base.phase, named, op_scope.stage),)

    def device(self, event: DeviceEvent, inside: bool) -> None:
        before = self.top(event.line)
        base = self.contexts[before].base
        if event.correlation is not None:
            base = self.launches.correlated.get(event.correlation, base)
        elif self.contexts[before].state is None:
            base = self.launches.base(event.run, event.line, rules.function_of(event.module), base)
        else:
            self.launches.inline(event.run, event.line, base)
        key = (before, base, event.module, event.program, event.op, event.copy)
        after = self.memo.get(key)
        if after is None:
            after = self.memo[key] = self.intern(self.executing(self.contexts[before], base, event))
        if inside:
            self.count(event, before, after)
        self.push(event, after)
        self.hand_on(event, after)

    def hand_on(self, event: DeviceEvent, after: int) -> None:
        """A thread that waits for a program to end stands for it: from now on for the operation of this instruction."""
        waiter = self.waiting.get(event.run)
        if waiter is None or waiter == event.line or self.contexts[after].device != LEAF:
            return
        self.close(waiter, event.start)
        if not self.stacks[waiter] or self.contexts[self.top(waiter)].device != CONTAINER:
            del self.waiting[event.run]
            return
        top = self.top(waiter)
        key = ("waits", after, top)
        found = self.memo.get(key)
        if found is None:
            shares = self.contexts[after].shares
            found = self.memo[key] = self.intern(self.contexts[top]._replace(shares=shares))
        self.emit(waiter, event.start, found)

    def executing(self, c: Context, base: Base, event: DeviceEvent) -> Context:
        op = self.op(event)
        on_host = self.lines[event.line].kind != "stream"
        if op is None:
            shares = self.shares(base, UNNAMED, event.module)
            kind = COPY if event.copy else LEAF
        else:
            kind = op.kind
            shares = tuple(self.shares(base, scope, event.module)[0]._replace(weight=w) for scope, w in op.scopes)
        if op is not None and op.kind == CALLBACK_OP and on_host:
            share = shares[0]
            return Context(
                CALLBACK, "", (share,), Base(share.phase, () if "jit(" in "".join(share.path[:1]) else share.path)
            )
        state = DEVICE if c.state is not None and on_host else None
        return Context(state, kind, shares, base)

    def op(self, event: DeviceEvent) -> Op | None:
        module = self.trace.modules.get(event.program)
        if module is None:
            same = [m for m in self.trace.modules.values() if m.name == event.module]
            module = same[0] if len(same) == 1 else None
        return module.ops.get(event.op) if module else None

    def count(self, event: DeviceEvent, before: int, after: int) -> None:
        old, new = self.contexts[before], self.contexts[after]
        share = new.shares[0] if new.shares else Share("", ())
        if new.state not in (None, old.state) or (new.state == CALLBACK):
            source = old.state or ("device" if new.state == CALLBACK else PYTHON)
            self.out.transitions[source, new.state, share.phase, share.path] += 1
        if event.bytes:
            self.out.bytes[event.name] += event.bytes
        if not event.copy and new.device == LEAF:
            self.out.launches[share.phase, share.path] += 1
        self.out.worked = max(self.out.worked, event.end)
        kernel = self.out.kernels.setdefault((event.module, event.op or event.name), Kernel())
        kernel.count += 1
        kernel.ns += event.end - event.start
        kernel.op = self.op(event)
        kernel.path = share.path
        kernel.copy = event.copy
        if self.lines[event.line].kind != "stream":
            self.pay(CALLBACK if new.state == CALLBACK else THUNK, event)
