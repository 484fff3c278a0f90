"""Walk a trace once, in time order: every thread and stream becomes a step function from time to context.

Nesting is resolved here with one stack a thread; the sweep then only meets step functions. A trace has a few thousand
events that change what is going on, and millions of executions that repeat what has been seen: for these the loop in
`run` looks one number up, and what they count for is added up afterwards, all at once.
"""

from __future__ import annotations

import collections

import numpy as np

from rlfx.profile import rules, tally
from rlfx.profile.annotate import OPERATION, PHASE
from rlfx.profile.columns import BLOCK, NONE
from rlfx.profile.events import Event, Kind, Marks, gather
from rlfx.profile.hlo import CALLBACK as CALLBACK_OP
from rlfx.profile.hlo import LEAF, Op
from rlfx.profile.launches import Base, Launches, alone, extents, unmatched
from rlfx.profile.rules import (
    BACKEND,
    BLOCKED,
    CALLBACK,
    COMPILE,
    COPY,
    DEVICE,
    DISPATCH,
    FETCH,
    PYTHON,
    TRANSFER,
    WAIT,
)
from rlfx.profile.scopes import UNNAMED, join
from rlfx.profile.timeline import ABSENT, ANNOTATION, CONTAINER, HOST, TASK, Context, Growing, Share, Timeline, of_tasks
from rlfx.profile.xspace import Trace

FOREVER = np.iinfo(np.int64).max


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
        self.known: dict[tuple[int, int, int], int] = {}  # (context around, kind, run) of executions: their context
        self.ended: dict[tuple[int, int, bool], int] = {}  # (context that ended, around, in a frame): what follows
        self.runs: set[int] = set()  # those with entries in `known`
        early, late = unmatched(self.gathered.events, self.gathered.device)
        self.launches = Launches(early)
        self.waiting: dict[int, int] = {}  # run: the line of the thread that waits for it
        lines = self.gathered.lines
        self.ran, self.did = [NONE for _ in lines], [-1 for _ in lines]  # the latest execution: its run and context
        self.lines = lines
        self.stacks: list[list[tuple[int, int]]] = [[] for _ in lines]  # (end, context) of what is open
        self.growing = [Growing(line) for line in lines]
        self.times, self.steps = [g.times for g in self.growing], [g.steps for g in self.growing]
        self.paid: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        self.last = [-1 for _ in lines]  # of `steps`
        self.cases: dict[tuple[int, int, int], int] = {}  # (context around, its own, kind) of executions: a number
        self.own: list[int] = []  # the second of each
        self.case = np.zeros(len(self.gathered.device.start), np.int32)  # of each execution
        main = Context(PYTHON, "", (Share("", ()),), Base())
        window = self.gathered.window
        self.lives = self.gathered.lives
        self.roots = [
            self.intern(main if line.kind == "main" or at in self.lives else ABSENT) for at, line in enumerate(lines)
        ]
        for at, (begin, _) in self.lives.items():
            self.emit(at, min(begin, window[0]) if lines[at].kind == "main" else begin, self.roots[at])
        self.extents = extents(self.gathered.device, window, bool(early), bool(trace.notes.get("not_ready")))
        self.out = Timeline(
            window, self.contexts, [], self.gathered.main, problems=self.gathered.problems, early=dict(early),
            late=dict(late), alone=alone(self.gathered.events, self.extents),
        )  # fmt: skip
        self.by_kind = {
            "annotation": self.annotation, "again": self.annotation, "state": self.state, "record": self.record,
            "region": self.region, "stop": self.stop, "unknown": self.unknown,
        }  # fmt: skip

    def intern(self, context: Context) -> int:
        found = self.ids.get(context)
        if found is None:
            found = self.ids[context] = len(self.contexts)
            self.contexts.append(context)
        return found

    def run(self) -> Timeline:
        start, stop = self.out.window
        events, device = self.gathered.events, self.gathered.device
        starts = np.concatenate([np.asarray([e.start for e in events], np.int64), device.start])
        ends = np.concatenate([np.asarray([e.end for e in events], np.int64), device.end])
        order = np.lexsort([-ends, starts])
        del starts, ends
        for begin in range(0, len(order), BLOCK):
            self.block(order[begin : begin + BLOCK], start, stop)
        for line in range(len(self.lines)):
            self.close(line, FOREVER)
        tracks = [g.track() for g in self.growing]
        for line, (_, end) in self.lives.items():
            if self.lines[line].kind != "main" and end < stop and tracks[line].times[-1] < end:
                self.emit(line, end, self.intern(ABSENT))
                tracks[line] = self.growing[line].track()
        tally.executions(self.out, device, list(self.cases), self.case, self.op, [x.kind for x in self.lines])
        marks = self.gathered.marks
        inside = (marks.times >= start) & (marks.times < stop)
        tally.pay(self.out, HOST, Marks(marks.times[inside], marks.lines[inside]))
        for kind, found in self.paid.items():
            times, lines = np.asarray(found, np.int64).reshape(-1, 2).T
            tally.pay(self.out, kind, Marks(times, lines.astype(np.int32)))
        self.out.tracks = tracks
        return self.out

    def block(self, order: np.ndarray, start: int, stop: int) -> None:
        """Walk some events, in order: those of the host one by one, executions by what is known of their like."""
        events, device = self.gathered.events, self.gathered.device
        count = len(events)
        # Executions of the block, in order; the others have no row here.
        rows = order[order >= count] - count
        executions = zip(
            device.start[rows].tolist(), device.end[rows].tolist(), device.line[rows].tolist(),
            device.kind[rows].tolist(), device.run[rows].tolist(), device.correlation[rows].tolist(), strict=True,
        )  # fmt: skip
        cases: list[int] = []
        stacks, roots, known, waiting, ended = self.stacks, self.roots, self.known, self.waiting, self.ended
        all_times, all_steps, last, own = self.times, self.steps, self.last, self.own
        ran, did = self.ran, self.did
        for number in order.tolist():
            if number < count:
                event = events[number]
                self.close(event.line, event.start)
                handle = self.by_kind.get(event.rule.kind)
                if handle is not None:
                    handle(event, start <= event.start < stop)
                continue
            # As `close`, `push` and `emit` do; written out, since this is done for every execution.
            at, end, line, kind, run, correlation = next(executions)
            stack = stacks[line]
            while stack and stack[-1][0] <= at:
                over, old = stack.pop()
                outer = stack[-1][1] if stack else roots[line]
                new = ended.get((old, outer, bool(stack)))
                if new is None:
                    new = self.after(line, old)
                if last[line] != new:
                    last[line] = new
                    all_times[line].append(over)
                    all_steps[line].append(new)
            before = stack[-1][1] if stack else roots[line]
            case = known.get((before, kind, run)) if correlation == NONE else None
            if case is None:
                case = self.execution(before, line, kind, run, correlation)
                if not stack and run in self.extents and self.lines[line].kind == "pool":
                    self.under_way(line, run, own[case])
            cases.append(case)
            after = own[case]
            ran[line], did[line] = run, after
            if stack and stack[-1][0] < end:
                end = stack[-1][0]  # clock jitter must not break the nesting
            stack.append((end, after))
            if last[line] != after:
                last[line] = after
                all_times[line].append(at)
                all_steps[line].append(after)
            if waiting:
                self.hand_on(line, at, run, after)
        self.case[rows] = cases
        for growing in self.growing:
            growing.pack()

    # The stack of a line.

    def top(self, line: int) -> int:
        return self.stacks[line][-1][1] if self.stacks[line] else self.roots[line]

    def close(self, line: int, now: int) -> None:
        stack = self.stacks[line]
        while stack and stack[-1][0] <= now:
            end, ended = stack.pop()
            if end != FOREVER:
                around = stack[-1][1] if stack else self.roots[line]
                found = self.ended.get((ended, around, bool(stack)))
                self.emit(line, end, self.after(line, ended) if found is None else found)

    def after(self, line: int, ended: int) -> int:
        """Between two instructions of an open program its executor works: for the operation of the one that ended."""
        around = self.top(line)
        old, new = self.contexts[ended], self.contexts[around]
        inside = bool(self.stacks[line])
        found = around
        if old.device == LEAF and new.state is None and inside and self.lines[line].kind != "stream":
            found = self.intern(new.working_as(old)._replace(device=CONTAINER))
        if self.lines[line].kind != "stream":
            self.ended[ended, around, inside] = found
        return found

    def push(self, event: Event, context: int) -> None:
        stack = self.stacks[event.line]
        end = min(event.end, stack[-1][0]) if stack else event.end
        stack.append((end, context))
        self.emit(event.line, event.start, context)

    def emit(self, line: int, at: int, context: int) -> None:
        if self.last[line] != context:
            self.last[line] = context
            self.times[line].append(at)
            self.steps[line].append(context)

    def owe(self, kind: str, event: Event) -> None:
        self.paid[kind].append((event.start, event.line))

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
            after = self.memo[key] = self.intern(
                Context(c.state or PYTHON, "", shares, base, called_back=c.called_back)
            )
        if inside:
            c = self.contexts[after]
            begins = event.rule.kind == "annotation" and event.rule.value.startswith(OPERATION)
            if begins and c.state in (PYTHON, CALLBACK):
                self.out.operations[c.base.phase, c.base.path] += 1
            if not event.synthetic:
                self.owe(ANNOTATION, event)
        self.push(event, after)

    def state(self, event: Event, inside: bool) -> None:
        before = self.top(event.line)
        started = self.did[event.line] if event.run is not None and self.ran[event.line] == event.run else -1
        key = (before, event.name, event.run, started)
        after = self.memo.get(key)
        if after is None:
            after = self.memo[key] = self.intern(self.stated(self.contexts[before], event, started))
        if inside and after != before:
            old, new = self.contexts[before], self.contexts[after]
            if new.state not in (None, old.state):
                share = new.shares[0]
                reached = TRANSFER if new.state == FETCH else new.state
                source = TRANSFER if old.state == FETCH else old.state or PYTHON
                self.out.transitions[source, reached, share.phase, share.path] += 1
                if reached in (BACKEND, TRANSFER) and not event.synthetic:
                    self.owe(reached, event)
        if inside and not event.synthetic:
            self.owe(HOST, event)
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

    def stated(self, c: Context, event: Event, started: int) -> Context:
        """`started`: the context of the latest instruction that the same thread executed of the same run."""
        state = event.rule.value
        if self.lines[event.line].kind == "pool" and c.state is None:
            # A pool thread that waits for the thunks of a program holds the program open: the device runs it.
            if state == WAIT and not c.device:
                base = self.launches.base(event.run, event.line, "", c.base)
                waits = Context(None, CONTAINER, self.shares(base, UNNAMED, ""), base)
                # What it waits for is the last thing that it started: a large product goes on in threads that say nothing.
                return waits if started < 0 else waits.working_as(self.contexts[started])
            return c
        if c.device or c.state == CALLBACK or (c.state == COMPILE and state == BACKEND):
            return c  # a jitted function called while another is traced is part of its compilation
        shares = c.shares or (Share(c.base.phase, c.base.path),)
        if state == BLOCKED:
            shares = of_tasks(event.name, c.base) or shares
            return Context(BLOCKED, "", shares, c.base, c.function) if c.state in (PYTHON, None) else c
        function = rules.function_of(event.name) or c.function
        if function and not c.base.path:
            shares = (Share(c.base.phase, (function,)),)
        return Context(state, "", shares, c.base, function)

    def record(self, event: Event, inside: bool) -> None:
        if inside:
            self.owe(TASK, event)
        self.launches.handed_over(event.line, event.link, self.contexts[self.top(event.line)].base)

    def region(self, event: Event, inside: bool) -> None:
        if inside:
            self.owe(TASK, event)
        before = self.contexts[self.top(event.line)]
        base = self.launches.taken_up(event.line, event.link, before.base)
        context = self.intern(Context(before.state, before.device, before.shares, base))
        self.stacks[event.line].append((FOREVER, context))
        self.emit(event.line, event.start, context)

    def stop(self, event: Event, inside: bool) -> None:
        stack = self.stacks[event.line]
        while stack and stack.pop()[0] != FOREVER:
            pass
        self.emit(event.line, event.start, self.top(event.line))

    def unknown(self, event: Event, inside: bool) -> None:
        if not inside:
            return
        self.owe(HOST, event)
        c = self.contexts[self.top(event.line)]
        if self.lines[event.line].kind in ("main", "program") and c.state in (PYTHON, None):
            seen = self.out.unknown.setdefault(event.name, [0, 0])
            seen[0] += 1
            seen[1] += event.end - event.start

    def shares(self, base: Base, op_scope, module: str) -> tuple[Share, ...]:
        instead = rules.function_of(module)  # without an operation, time goes by jitted function
        named = join(base.path, op_scope.path) or ((instead,) if instead else ())
        return (Share(op_scope.phase or base.phase, named, op_scope.stage),)

    def execution(self, before: int, line: int, kind: int, run: int, correlation: int) -> int:
        """The number of the case of an execution whose like has not been seen in its run."""
        c, what = self.contexts[before], self.gathered.device.kinds[kind]
        number = None if run == NONE else run
        base = c.base
        if correlation != NONE:
            base = self.launches.correlated.get(correlation, base)
        elif c.state is None:
            base = self.launches.base(number, line, rules.function_of(what.module), base)
        else:
            self.launches.inline(number, line, base)
        key = (before, base, kind)
        after = self.memo.get(key)
        if after is None:
            after = self.memo[key] = self.intern(self.executing(c, base, what, line))
        case = self.cases.setdefault((before, after, kind), len(self.cases))
        if case == len(self.own):
            self.own.append(after)
        # A run belongs to one launch, once an instruction of it has been seen to: the next of this kind is the same.
        if correlation == NONE and (number is None or number in self.launches):
            if run not in self.runs and len(self.runs) > 64:  # runs end; do not remember all of them
                self.runs.clear()
                self.known.clear()
            self.runs.add(run)
            self.known[before, kind, run] = case
        return case

    def under_way(self, line: int, run: int, context: int) -> None:
        """A task that its thread took up before the trace began: the program is open as long as it runs."""
        first, last = self.extents[run]
        if self.last[line] < 0 and first == self.out.window[0]:
            self.emit(line, first, self.intern(self.contexts[context]._replace(device=CONTAINER)))
        self.stacks[line].append((last, self.roots[line]))

    def hand_on(self, line: int, at: int, run: int, after: int) -> None:
        """A thread that waits for a program to end stands for it: from now on for the operation of this instruction."""
        waiter = self.waiting.get(run)
        if waiter is None or waiter == line or self.contexts[after].device != LEAF:
            return
        self.close(waiter, at)
        if not self.stacks[waiter] or self.contexts[self.top(waiter)].device != CONTAINER:
            del self.waiting[run]
            return
        top = self.top(waiter)
        key = ("waits", after, top)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self.intern(self.contexts[top].working_as(self.contexts[after]))
        self.emit(waiter, at, found)

    def executing(self, c: Context, base: Base, what: Kind, line: int) -> Context:
        op = self.op(what)
        on_host = self.lines[line].kind != "stream"
        if op is None:
            shares = self.shares(base, UNNAMED, what.module)
            kind = COPY if what.copy else LEAF
        else:
            kind = op.kind
            shares = tuple(self.shares(base, scope, what.module)[0]._replace(weight=w) for scope, w in op.scopes)
        if op is not None and op.kind == CALLBACK_OP and on_host:
            share = shares[0]
            path = () if "jit(" in "".join(share.path[:1]) else share.path
            return Context(CALLBACK, "", (share,), Base(share.phase, path), called_back=True)
        state = DEVICE if c.state is not None and on_host else None
        return Context(state, kind, shares, base, rules.function_of(what.module), c.called_back)

    def op(self, what: Kind) -> Op | None:
        module = self.trace.modules.get(what.program)
        if module is None:
            same = [m for m in self.trace.modules.values() if m.name == what.module]
            module = same[0] if len(same) == 1 else None
        return module.ops.get(what.op) if module else None
