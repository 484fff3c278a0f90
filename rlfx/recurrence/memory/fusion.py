"""Which values get a buffer: a model of XLA:CPU's fusion pass.

From the last operation to the first, each takes over the operations whose results it reads, one after the other, as long
as the rules of :func:`_Pass.fuses` allow it; an operation whose readers have all taken it over is gone, every other one
is computed into a buffer. Several readers may compute the same operation: that is decided per reader, not per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.flat import Flat
from rlfx.recurrence.memory.library import library_calls
from rlfx.recurrence.memory.sizes import (
    BROADCAST,
    COPY,
    LOOPS,
    RELAYOUT,
    RESHAPED,
    SCATTERS,
    Node,
    Value,
    names,
    varying_of,
)

_REDUCTIONS = names(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"
)
#: Computed inside the loop that reads them.
_FUSIBLE = (J.ELEMENTWISE | {RELAYOUT, RESHAPED} | J.STACKING | _REDUCTIONS | names(
    "broadcast_in_dim", "iota", "slice", "dynamic_slice", "rev", "pad", "concatenate", "transpose", "gather",
    "dynamic_update_slice", "random_seed",
)) - {COPY}  # fmt: skip
#: Never computed twice, nor once for each of several elements. Sines and cosines are cheap; divisions of integers are not,
#: whatever they are divided by.
_EXPENSIVE = _REDUCTIONS | names(
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "digamma", "div", "erf", "erfc",
    "exp", "exp2", "expm1", "gather", "igamma", "igammac", "lgamma", "log", "log1p", "logistic", "pow",
    "regularized_incomplete_beta", "rem", "rsqrt", "sinh", "sqrt", "tanh", "polygamma",
)  # fmt: skip
#: Their code branches, and so is not shared between the operations of a loop that read them.
_BRANCHING = names("concatenate", "dynamic_update_slice", "pad", "stack") | _REDUCTIONS
#: They read the same elements of (all of) their operands several times.
_REUSING = names("broadcast_in_dim", "dynamic_slice", "tile")
#: Between host and device; a slice of what is on the host is fetched as it is.
_MOVED = J.primitive("device_put")
_SORT = J.primitive("sort")
_TRANSPOSE = J.primitive("transpose")
_REPEATED = names("broadcast_in_dim", "iota")
#: They write into their first operand.
UPDATES = SCATTERS | names("dynamic_update_slice")
IN_PLACE = J.ELEMENTWISE | UPDATES
#: How often the code of an operation may be repeated in one loop.
_REPETITIONS = 15
#: What puts more arrays together is neither fused nor fuses.
_MANY = 8


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one piece: an operation with buffers for its results, and everything fused into it.

    Attributes:
      reads: the values it reads from memory.
      aligned: those of which it reads the element that it writes, and no other: it may be written over them.
      target: the one that it updates.
    """

    node: Node
    reads: list[Value]
    aligned: set[int]
    target: Value | None = None


@dataclass(eq=False, slots=True)
class _Loop:
    """A loop in the making: an operation and those it took over.

    Attributes:
      members: by identity.
      operands: what it reads -> by how many of its members.
      reused: those of which it reads elements several times.
      places: of an operation inside, or read: those that index it; and how often each of those is emitted.
    """

    root: Node
    members: dict[int, Node]
    operands: dict[int, Value]
    readers: dict[int, int]
    reused: set[int] = field(default_factory=set)
    indexed_by: dict[int, set[int]] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)

    def emissions(self, node: Node) -> int:
        return sum(self.emitted[i] for i in self.indexed_by.get(id(node), ()))


def units_of(flat: Flat, needing_buffer: set[int]) -> list[Unit]:
    return _Pass(flat, needing_buffer).run()


class _Pass:
    def __init__(self, flat: Flat, needing_buffer: set[int]):
        consumers: dict[int, list[Node]] = {}
        for node in flat.nodes:
            for value in node.ins:
                consumers.setdefault(id(value), []).append(node)
        self.library = library_calls(flat, consumers, needing_buffer)
        self.nodes = flat.nodes
        self.position = {id(node): i for i, node in enumerate(flat.nodes)}
        self.loops: dict[int, _Loop] = {}
        self.seen_through: dict[int, Value] = {}
        #: of an operation, the loops that read its results; None stands for readers outside.
        self.users: dict[int, set[int | None]] = {id(node): set() for node in flat.nodes}
        self.calls = calls = {}
        for node in flat.nodes:
            calls.setdefault(id(self.library.get(id(node), node)), []).append(node)
        for node in flat.nodes:
            if id(node) in calls:
                self.loops[id(node)] = self._loop(node, calls[id(node)])
            if any(id(out) in needing_buffer for out in node.outs):
                self.users[id(node)].add(None)
        self.consumers = {
            id(node): list({id(u): u for v in node.outs for u in consumers.get(id(v), ())}.values())
            for node in flat.nodes
        }
        self.single = self._never_twice()

    def _loop(self, root: Node, members: list[Node]) -> _Loop:
        inside = {id(m): m for m in members}
        loop = _Loop(root, inside, {}, {})
        for member in members:
            for value in {id(v): v for v in member.ins}.values():
                if value.node is None or id(value.node) not in inside:
                    loop.operands[id(value)] = value
                    loop.readers[id(value)] = loop.readers.get(id(value), 0) + 1
                    if value.node is not None:
                        self.users[id(value.node)].add(id(root))
        loop.reused = _reused(root)
        loop.emitted[0] = loop.emitted[id(root)] = 1
        for member in members:
            loop.indexed_by[id(member)], loop.emitted[id(member)] = {0}, 1
        for member in members:
            _index(loop, member)
        return loop

    def run(self) -> list[Unit]:
        for root in reversed(self.nodes):
            loop = self.loops.get(id(root))
            if loop is None:
                continue
            if root.op in _FUSIBLE or root.op is _MOVED:
                while (value := self._next(loop)) is not None:
                    self._take(loop, value)
        for loop in list(self.loops.values()):  # what nobody else reads need not be copied
            operands = [v.node for v in loop.operands.values() if v.node is not None]
            if loop.root.op is COPY and any(
                n.op is BROADCAST and self.users[id(n)] == {id(loop.root)} for n in operands
            ):
                loop.operands.clear()
                self.loops.pop(id(operands[0]))
        aligned = {id(loop): _aligned(loop) for loop in self.loops.values()}
        for node in self.nodes:
            if (loop := self.loops.get(id(node))) is not None and self._is_view(loop):
                self._see_through(loop, aligned)
        alive = (self.loops[id(node)] for node in self.nodes if id(node) in self.loops)
        return [
            Unit(loop.root, list(loop.operands.values()), aligned[id(loop)], self._target(loop.root)) for loop in alive
        ]

    def _target(self, root: Node) -> Value | None:
        if root.op not in UPDATES or not root.ins:
            return None
        target = root.ins[0]
        while id(target) in self.seen_through:
            target = self.seen_through[id(target)]
        return target

    def _is_view(self, loop: _Loop) -> bool:
        """Whether a loop would do no more than copy what nobody else needs, or look at it in another shape."""
        if len(loop.members) > 1 or not loop.operands or None in self.users[id(loop.root)]:
            return False
        if loop.root.op is RESHAPED:
            return True
        users = [self.loops[u].root.op for u in self.users[id(loop.root)] if u in self.loops]
        sources = [v.node for v in loop.operands.values()]
        return (
            loop.root.op is COPY
            and all(op in SCATTERS for op in users)
            and all(n is not None and self.users[id(n)] == {id(loop.root)} for n in sources)
        )

    def _see_through(self, loop: _Loop, aligned: dict[int, set[int]]) -> None:
        (out,), (source,) = loop.root.outs, loop.operands.values()
        for user in self.users[id(loop.root)]:
            if user is None or user not in self.loops:
                continue
            reader = self.loops[user]
            reader.operands = {id(s): s for v in reader.operands.values() for s in [source if v is out else v]}
            if id(out) in aligned[id(reader)]:
                aligned[id(reader)] = aligned[id(reader)] - {id(out)} | {id(source)}
            if source.node is not None:
                self.users[id(source.node)].add(user)
        if source.node is not None:
            self.users[id(source.node)].discard(id(loop.root))
        self.seen_through[id(out)] = source
        del self.loops[id(loop.root)]

    def _remove(self, node: Node) -> None:
        """Forgets an operation that all readers have taken over."""
        for value in self.loops.pop(id(node)).operands.values():
            if value.node is not None:
                self.users[id(value.node)].discard(id(node))

    def _next(self, loop: _Loop) -> Value | None:
        found = [v for v in loop.operands.values() if v.node is not None and id(v.node) not in loop.members]
        found.sort(key=lambda v: -self.position[id(v.node)])
        return next((v for v in found if self.fuses(loop, v)), None)

    def _take(self, loop: _Loop, value: Value) -> None:
        node = value.node
        assert node is not None
        loop.members[id(node)] = node
        del loop.operands[id(value)], loop.readers[id(value)]
        if id(value) in loop.reused:
            loop.reused |= {id(v) for v in node.ins}
        else:
            loop.reused |= _reused(node)
        loop.emitted[id(node)] = loop.emissions(node)
        _index(loop, node)
        self.users[id(node)].discard(id(loop.root))
        for v in {id(v): v for v in node.ins}.values():
            loop.operands[id(v)] = v
            loop.readers[id(v)] = loop.readers.get(id(v), 0) + 1
            if v.node is not None:
                self.users[id(v.node)].add(id(loop.root))
        if not self.users[id(node)]:
            self._remove(node)

    def fuses(self, loop: _Loop, value: Value) -> bool:
        """Whether a loop computes what it reads, instead of reading it from memory."""
        node = value.node
        assert node is not None
        if id(node) in self.single or not self._fusible(loop.root, node):
            return False
        if node.op in _EXPENSIVE and (id(value) in loop.reused or self.users[id(node)] != {id(loop.root)}):
            return False
        return len(loop.members) == 1 or node.op is BROADCAST or not self._repeated(loop, node)

    def _fusible(self, user: Node, node: Node) -> bool:
        if id(node) in self.library or len(node.outs) != 1:
            return False
        if id(user) in self.library:  # of what repeats fewer numbers, XLA reduces those, and repeats the results
            call = self.calls[id(self.library[id(user)])]
            reduced = {id(v) for member in call if member.op in _REDUCTIONS for v in member.ins}
            return id(node.outs[0]) in reduced and _narrow(node.outs[0])
        if node.op not in _FUSIBLE:
            return False
        if any(n.op in _BRANCHING and len(n.ins) > _MANY for n in (user, node)):
            return False
        return user.op in _FUSIBLE or (node.outs[0].host and user.op is _MOVED)

    def _repeated(self, loop: _Loop, node: Node) -> bool:
        """Whether a loop would contain the code of an operation too often."""
        times = loop.emissions(node)
        if times > _REPETITIONS:
            return True
        if node.op not in _BRANCHING:
            return False
        (out,) = node.outs
        return times > 1 or sum(
            1 if user is None else self.loops[user].readers.get(id(out), 0) for user in self.users[id(node)]
        ) > 1  # fmt: skip

    def _never_twice(self) -> set[int]:
        """Operations on several arrays that not all readers can take over: computing them again would read more."""
        above: list[int] = []  # of an operation, which ones it depends on, as bits
        for i, node in enumerate(self.nodes):
            bits = 1 << i
            for value in node.ins:
                if value.node is not None:
                    bits |= above[self.position[id(value.node)]]
            above.append(bits)
        single: set[int] = set()

        def everywhere(node: Node) -> bool:
            """Whether an operation can be fused into its readers along all paths."""
            bit = 1 << self.position[id(node)]
            todo = [user for user in self.consumers[id(node)] if user is not node]
            seen = set(map(id, todo))
            while todo:
                user = todo.pop()
                for v in (value.node for value in user.ins):
                    if v is None or not above[self.position[id(v)]] & bit:
                        continue
                    if id(v) in single or not self._fusible_alone(user, v):
                        return False
                    if v is not node and id(v) not in seen:
                        seen.add(id(v))
                        todo.append(v)
            return True

        for node in reversed(self.nodes):
            if _is_unary(node) or _elements(node.ins) <= _elements(node.outs):
                continue
            if None in self.users[id(node)] or not everywhere(node):
                single.add(id(node))
        return single

    def _fusible_alone(self, user: Node, node: Node) -> bool:
        if not self._fusible(user, node):
            return False
        users = self.consumers[id(node)]
        reused = any(id(out) in _reused(user) for out in node.outs)
        return not (node.op in _EXPENSIVE and (reused or len(users) > 1 or None in self.users[id(node)]))


def _reused(node: Node) -> set[int]:
    """Operands of which an operation reads elements several times."""
    return {id(v) for v in node.ins} if node.op in _REUSING else set()


def _index(loop: _Loop, node: Node) -> None:
    """Notes which operations index the operands of one that joined a loop: a reshaped operand is indexed anew."""
    mine = loop.indexed_by[id(node)]
    for value in node.ins:
        if value.node is not None:
            same = node.op is _TRANSPOSE or (value.shape == node.outs[0].shape and node.op is not RESHAPED)
            loop.indexed_by.setdefault(id(value.node), set()).update(mine if same else {id(node)})


def _elements(values: Sequence[Value]) -> int:
    return sum(int(np.prod(v.shape)) for v in {id(v): v for v in values}.values())


def _rank(value: Value) -> int:
    return sum(d != 1 for d in value.shape)


def _is_unary(node: Node) -> bool:
    """Whether XLA may compute an operation several times: it reads no more than one large operand."""
    rank = max(map(_rank, node.outs))
    return sum(_rank(v) >= rank and not (v.node and v.node.op in _REPEATED) for v in node.ins) <= 1


def _narrow(value: Value) -> bool:
    """Whether a value repeats fewer numbers: XLA reduces those, and broadcasts afterwards."""
    return len(varying_of(value)) < sum(d != 1 for d in value.shape)


def _aligned(loop: _Loop) -> set[int]:
    """The operands that a loop reads where it writes, and nowhere else."""
    if loop.root.op is COPY and loop.root.equation.primitive in SCATTERS:  # both are needed
        return set()
    elsewhere: set[int] = set()
    seen: set[tuple[int, bool]] = set()

    todo = [(loop.root, True)]
    while todo:
        node, aligned = todo.pop()
        aligned = aligned and (node.op in IN_PLACE or node.op in LOOPS or node.op is _SORT)
        for value in node.ins:
            if value.node is None or id(value.node) not in loop.members:
                if not aligned:
                    elsewhere.add(id(value))
            elif (id(value.node), aligned) not in seen:
                seen.add((id(value.node), aligned))
                todo.append((value.node, aligned))
    if loop.root.op not in LOOPS:
        elsewhere |= {id(v) for v in loop.operands.values() if v.node is not None and v.node.op in LOOPS}
    return set(loop.operands) - elsewhere
