"""The text of an optimised HLO module as data: computations of instructions, their shapes, tuples and constants."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")

Computation = dict[str, "Instruction"]


@dataclass(frozen=True)
class Instruction:
    """One instruction, as its line has it."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found.group(1) if found else ""


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """Instructions by name, by computation; and the name of the entry."""
    found: dict[str, Computation] = {}
    entry, into = "", None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.rstrip().endswith("{"):
            is_entry = line.startswith("ENTRY ")
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line).group(1)  # pyright: ignore[reportOptionalMemberAccess]
            into = found.setdefault(name, {})
            entry = name if is_entry else entry
        elif into is not None and " = " in line:
            instruction = _instruction(line)
            if instruction is not None:
                into[instruction.name] = instruction
        elif line.startswith("}"):
            into = None
    return found, entry


def _instruction(line: str) -> Instruction | None:
    left, _, right = line.strip().partition(" = ")
    name = left.removeprefix("ROOT ").lstrip("%")
    end = _closing(right, 0) if right.startswith("(") else right.find(" ")
    opened = right.find("(", end)
    if end < 0 or opened < 0:
        return None
    shape, opcode = right[:end].strip(), right[end:opened].strip()
    closed = _closing(right, opened)
    operands = tuple(re.findall(r"%([\w.\-]+)", right[opened:closed]))
    return Instruction(name, shape, opcode, operands, right[opened:])


def _closing(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def bytes_of(shape: str) -> int:
    """Of a shape's text, ``f32[2,3]{1,0}`` or a tuple of such.

    Example:
      >>> bytes_of("(f32[2,3]{1,0}, bf16[4]{0}, pred[])")
      33
    """
    total = 0
    for kind, dims, _ in _SHAPE.findall(shape):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits.group()) if digits else 8)
        total += math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d) * bits // 8
    return total


def branches(i: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
    if listed:
        return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
    return [b for b in (i.attribute("true_computation"), i.attribute("false_computation")) if b]


def through(computation: Computation, name: str) -> str:
    """A value behind copies."""
    while name in computation and computation[name].opcode in ("copy", "bitcast") and computation[name].operands:
        name = computation[name].operands[0]
    return name


def member(computation: Computation, name: str, at: int) -> str:
    """The name of an element of a tuple."""
    i = computation.get(through(computation, name))
    return i.operands[at] if i is not None and i.opcode == "tuple" and at < len(i.operands) else ""


def element(computation: Computation, name: str) -> int | None:
    """Which element of the computation's parameter a value is."""
    i = computation.get(through(computation, name))
    if i is None or i.opcode != "get-tuple-element":
        return None
    source = computation.get(i.operands[0]) if i.operands else None
    at = i.attribute("index")
    return int(at) if at is not None and source is not None and source.opcode == "parameter" else None


def constant(computation: Computation, name: str) -> int | None:
    i = computation.get(through(computation, name))
    found = re.match(r"\((-?\d+)\)", i.rest) if i is not None and i.opcode == "constant" else None
    return int(found.group(1)) if found else None


def result_of(i: Instruction) -> str:
    """The shape of what an instruction gives; of the start of an asynchronous one, what its end gives."""
    if not i.opcode.endswith("-start") or not i.shape.startswith("("):
        return i.shape
    if i.shape.startswith("(("):  # operands, result or results, context
        given = i.shape[_closing(i.shape, 1) :].lstrip(", ")
        return given[: _closing(given, 0)] if given.startswith("(") else _first(given)
    if i.opcode == "copy-start" or i.opcode == "all-reduce-start":  # result, operand, context; results
        return _first(i.shape) if i.opcode == "copy-start" else i.shape
    return _first(i.shape.partition("]")[2]) or i.shape  # operand, result


def _first(shape: str) -> str:
    """The first array in a shape's text."""
    found = _SHAPE.search(shape)
    return found.group(0) if found else ""
