"""HLO modules as the profiler embeds them: what each instruction is, and which operations it works for."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rlfx.profile import lines, wire
from rlfx.profile.scopes import UNNAMED, Scope, parse
from rlfx.profile.work import NOTHING, Shape, Work, shape, summed, work

LEAF, CONTAINER, CALLBACK = "leaf", "container", "callback"
CONTAINERS = frozenset({"while", "conditional", "call", "async-start", "async-done"})
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "copy", "reshape"}
)
TRANSCENDENTAL = frozenset(
    [
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "tanh",
        "sine",
        "cosine",
        "tan",
        "power",
        "sqrt",
        "rsqrt",
        "cbrt",
        "erf",
        "atan2",
    ]
)
SEES_THROUGH = frozenset({"get-tuple-element", "tuple", "bitcast", "copy", "reshape", "copy-start", "copy-done"})


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction, as far as a profile needs it."""

    name: str
    opcode: str
    operands: tuple[int, ...]
    called: tuple[int, ...]
    scope: Scope
    shape: Shape
    target: str
    computation: int
    source: lines.Stack = ()
    summed: tuple[int, ...] = ()  # see `work.summed`

    @property
    def elements(self) -> int:
        return self.shape.elements


@dataclass(frozen=True)
class Op:
    """What a profile attributes: a kind, and `(scope, weight)` for every operation the instruction works for.

    `sources` are the lines that it comes from, with their weights; `work` is of one execution.
    """

    kind: str
    scopes: tuple[tuple[Scope, int], ...]
    inherited: bool
    opcode: str = ""
    sources: tuple[tuple[lines.Stack, int], ...] = ()
    work: Work = NOTHING

    @property
    def mixed(self) -> bool:
        return len(self.scopes) > 1


@dataclass
class Module:
    """An HLO module: `ops()[instruction name]` says where its time belongs. Parsed on first use."""

    name: str
    program_id: int
    data: memoryview = field(repr=False)

    @functools.cached_property
    def ops(self) -> dict[str, Op]:
        instructions, members, users, callers, roots = read_module(self.data)
        lookup = _Inheritance(instructions, users, callers)
        found = {}
        for key, i in instructions.items():
            op = _op(key, i, instructions, members, lookup)
            found[i.name] = replace(op, work=work(key, instructions, members, roots)) if op.kind == LEAF else op
        return found


def read_module(data: memoryview):
    """Of an HloModuleProto: instructions by id, ids by computation, users by id, calling instruction and root by computation."""
    instructions: dict[int, Instruction] = {}
    members: dict[int, list[int]] = {}
    users: dict[int, list[int]] = collections.defaultdict(list)
    callers: dict[int, int] = {}
    roots: dict[int, int] = {}
    module = wire.message(data)
    source = lines.stacks(module)
    for computation in module.get(3, []):
        found = wire.message(computation)
        home = wire.integer(found, 5)
        members[home] = []
        roots[home] = wire.integer(found, 6)
        for raw in found.get(2, []):
            entry = wire.message(raw)
            metadata = wire.message(entry[7][-1]) if 7 in entry else {}
            i = Instruction(
                name=wire.text(entry, 1),
                opcode=wire.text(entry, 2),
                operands=tuple(wire.integers(entry, 36)),
                called=tuple(wire.integers(entry, 38)),
                scope=parse(wire.text(metadata, 2)),
                shape=shape(entry[3][-1] if 3 in entry else None),
                target=wire.text(entry, 28),
                computation=home,
                source=source(metadata),
                summed=summed(entry),
            )
            key = wire.integer(entry, 35)
            instructions[key] = i
            members[home].append(key)
            for operand in i.operands:
                users[operand].append(key)
            for called in i.called:
                callers[called] = key
    return instructions, members, users, callers, roots


class _Inheritance:
    """What an instruction that XLA made inherits: its operands', else its users', else that of the loop around it."""

    def __init__(self, instructions, users, callers):
        self._instructions, self._users, self._callers = instructions, users, callers

    def scope(self, i: Instruction, key: int) -> Scope:
        return self._found(i, key, lambda x: x.scope if x.scope.named else None) or UNNAMED

    def source(self, i: Instruction, key: int) -> lines.Stack:
        return self._found(i, key, lambda x: x.source) or ()

    def _found(self, i: Instruction, key: int, of: Callable[[Instruction], Any]) -> Any:
        for neighbours in (lambda k: self._instructions[k].operands, lambda k: tuple(self._users.get(k, ()))):
            found = self._search(key, neighbours, 4, of)
            if found:
                return found
        caller = self._callers.get(i.computation)
        if caller is None or caller not in self._instructions:
            return None
        around = self._instructions[caller]
        return of(around) or self._found(around, caller, of)

    def _search(self, key: int, neighbours, depth: int, of: Callable[[Instruction], Any]) -> Any:
        for other in neighbours(key):
            i = self._instructions.get(other)
            if i is None or i.opcode in ("parameter", "constant"):
                continue
            if of(i):
                return of(i)
            if depth and i.opcode in SEES_THROUGH:
                found = self._search(other, neighbours, depth - 1, of)
                if found:
                    return found
        return None


def _work(i: Instruction, instructions: dict[int, Instruction]) -> int:
    """A rough count of operations, to divide a fusion's time among the scopes in it."""
    if i.opcode in FREE:
        return 0
    if i.opcode == "dynamic-update-slice" and len(i.operands) > 1:
        return instructions[i.operands[1]].elements  # in place: only the update is written
    if i.opcode == "dot" and i.operands and i.elements:
        # Multiply-adds of m×k · k×n from the three sizes alone: sqrt(mk · kn · mn) = mkn.
        sizes = [instructions[o].elements for o in i.operands[:2] if o in instructions]
        return max(i.elements, math.isqrt(math.prod(sizes) * i.elements))
    read = max((instructions[o].elements for o in i.operands if o in instructions), default=0)
    moved = max(i.elements, read) if i.opcode.startswith("reduce") else i.elements
    return moved * (10 if i.opcode in TRANSCENDENTAL else 1)


def _inside(
    i: Instruction, instructions: dict[int, Instruction], members: dict[int, list[int]]
) -> Iterator[Instruction]:
    """What a fusion or a call computes: XLA:CPU compiles a small loop, with all that is in it, to one call."""
    for inner in (instructions[k] for c in i.called for k in members.get(c, ())):
        if inner.opcode == "fusion" or inner.opcode in CONTAINERS:
            yield from _inside(inner, instructions, members)
        else:
            yield inner


def _op(key: int, i: Instruction, instructions, members, lookup: _Inheritance) -> Op:
    kind = CONTAINER if i.opcode in CONTAINERS else CALLBACK if "callback" in i.target else LEAF
    work: collections.Counter[Scope] = collections.Counter()
    written: collections.Counter[lines.Stack] = collections.Counter()
    if i.opcode in ("fusion", "call"):
        for inner in _inside(i, instructions, members):
            if inner.scope.named:
                work[inner.scope] += _work(inner, instructions)
            if inner.source:
                written[inner.source] += _work(inner, instructions)
    sources = tuple((stack, weight) for stack, weight in written.items() if weight)
    source = () if sources else i.source or lookup.source(i, key)
    sources = sources or (((source, 1),) if source else ())
    shares = tuple((scope, weight) for scope, weight in sorted(work.items()) if weight)
    if shares:
        return Op(kind, shares, inherited=False, opcode=i.opcode, sources=sources)
    if i.scope.named:
        return Op(kind, ((i.scope, 1),), inherited=False, opcode=i.opcode, sources=sources)
    return Op(kind, ((lookup.scope(i, key), 1),), inherited=True, opcode=i.opcode, sources=sources)
