"""The events of a trace as columns: a line's messages are decoded together, field by field, a block at a time.

A trace holds millions of events and few kinds of them. So nothing here is done for an event alone, but to find where its
message begins; and an event whose name says that it means nothing is left out before the rest of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from rlfx.errors import ProfileError
from rlfx.profile import wire

BLOCK = 1 << 14  # events
PIECE = 1 << 20  # bytes
NONE = np.iinfo(np.int64).min  # of a stat that an event does not have
EVENT, METADATA, OFFSET, DURATION, STAT = 0x22, 0x08, 0x10, 0x18, 0x22  # tags: field and wire type
UNSIGNED, SIGNED, TEXT, REFERENCE = 0x18, 0x20, 0x2A, 0x38


class Line(NamedTuple):
    """A line of a plane: a thread or a stream. `body` is its message, from the first event on."""

    number: int
    name: str
    start_ns: int
    body: memoryview


class Plane(NamedTuple):
    """A plane: names of its events and stats by id, and its lines."""

    name: str
    events: dict[int, str]
    stats: dict[int, str]
    lines: list[Line]


class Block(NamedTuple):
    """Events of a line: ns after the trace's start, the id of their name, and stats by name (`NONE` where missing).

    A stat that is a text is the index of it in `texts`.
    """

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    stats: dict[str, np.ndarray]
    texts: list[str]


def plane(data: memoryview) -> Plane:
    """Read all of a plane but the events of its lines."""
    found = wire.message(data)
    return Plane(wire.text(found, 2), _names(found, 4), _names(found, 5), [_line(raw) for raw in found.get(3, [])])


def _names(found: dict, number: int) -> dict[int, str]:
    out = {}
    for entry in found.get(number, []):
        pair = wire.message(entry)
        if 2 in pair:
            out[wire.integer(pair, 1)] = wire.text(wire.message(pair[2][-1]), 2)
    return out


def _line(data: memoryview) -> Line:
    """Fields are in order: what comes before the events is read, and where there is none, all of it."""
    head: dict[int, list] = {}
    at = 0
    while at < len(data) and data[at] != EVENT:
        number, value, at = wire.field(data, at)
        head.setdefault(number, []).append(value)
    return Line(wire.integer(head, 1), wire.text(head, 2), wire.integer(head, 3), data[at:])


def blocks(
    plane: Plane, line: Line, wanted: Callable[[str], bool], stats: tuple[str, ...], size: int = BLOCK
) -> Iterator[Block]:
    """Decode the events of a line whose names are wanted, with the named stats.

    Raises:
      ProfileError: a message ends before it should.
    """
    data = np.frombuffer(line.body, np.uint8)
    known = np.zeros(max(plane.events, default=0) + 2, bool)
    known[[i for i, name in plane.events.items() if wanted(name)]] = True
    for heads in _heads(line.body, size):
        try:
            length, starts = varints(data, heads + 1)
            yield _decoded(plane, line, data, starts, starts + length, known, stats)
        except IndexError:
            raise ProfileError(wire.truncated("an event runs past the end of its line")) from None


def _heads(data: memoryview, size: int) -> Iterator[np.ndarray]:
    """Where the events of a line begin, with their tags; a copy of part of the line is faster to look into."""
    heads: list[int] = []
    at, end = 0, len(data)
    while at < end:
        piece, inside = bytes(data[at : at + PIECE]), 0
        last = len(piece) - 12  # a tag and a size take less
        while inside < last and piece[inside] == EVENT:
            heads.append(at + inside)
            length = piece[inside + 1]
            inside += length + 2
            if length > 127:
                length, after = wire.varint(data, heads[-1] + 1)
                inside = after + length - at
        at += inside
        if at < end and inside < len(piece):  # another field, or an event near the end of the piece
            if data[at] == EVENT:
                heads.append(at)
            at = wire.field(data, at)[2]
        if at > end:
            raise ProfileError(wire.truncated("an event runs past the end of its line"))
        if len(heads) >= size:
            yield np.asarray(heads, np.int64)
            heads = []
    if heads:
        yield np.asarray(heads, np.int64)


def numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct integers, in order, and which of them each is: a table where their range is small, else by sorting.

    Example:
      >>> distinct, which = numbered(np.asarray([7, 5, 7]))
      >>> distinct.tolist(), which.tolist()
      ([5, 7], [1, 0, 1])
    """
    low = int(values.min()) if len(values) else 0
    span = int(values.max()) - low + 1 if len(values) else 0
    if span > 4 * len(values):
        return np.unique(values, return_inverse=True)
    seen = np.zeros(span, bool)
    seen[values - low] = True
    rank = np.cumsum(seen) - 1
    return np.flatnonzero(seen) + low, rank[values - low]


def firsts(which: np.ndarray, count: int) -> np.ndarray:
    """Where each of the numbers 0 to `count` - 1 comes first.

    Example:
      >>> firsts(np.asarray([1, 0, 1]), 2).tolist()
      [1, 0]
    """
    first = np.zeros(count, np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]
    return first


def varints(data: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Base-128 integers at many positions: `(values, positions after them)`.

    Example:
      >>> values, after = varints(np.asarray([0xAC, 0x02, 0x05], np.uint8), np.asarray([0, 2]))
      >>> values.tolist(), after.tolist()
      ([300, 5], [2, 3])
    """
    byte = data[at]
    value, after, shift = (byte & 0x7F).astype(np.uint64), at + 1, 7
    more = np.flatnonzero(byte > 0x7F)
    while len(more):
        byte = data[after[more]]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        after[more] += 1
        more, shift = more[byte > 0x7F], shift + 7
        if shift > 63 + 7:
            raise ProfileError(wire.truncated("an integer has more than 10 bytes"))
    return value.view(np.int64), after


_SIZES = {1: 8, 5: 4}


def _skipped(data: np.ndarray, at: np.ndarray, kind: int) -> np.ndarray:
    """Positions after fields of one wire type, whose tags have been read."""
    if kind in _SIZES:
        return at + _SIZES[kind]
    if kind not in (wire.VARINT, wire.LENGTH):
        raise ProfileError(wire.truncated(f"wire type {kind} does not exist"))
    value, after = varints(data, at)
    return after + value if kind == wire.LENGTH else after


def _decoded(plane, line, data, starts, stops, known, stats) -> Block:
    count = len(starts)
    columns = {tag: np.zeros(count, np.int64) for tag in (METADATA, OFFSET, DURATION)}
    at, keep = starts.copy(), np.ones(count, bool)
    owners, begins = [], []
    left = np.arange(count)
    while len(left):
        tags = data[at[left]]
        at[left] += 1
        for tag in np.flatnonzero(np.bincount(tags)).tolist():
            chosen = left[tags == tag]
            if tag in columns:
                columns[tag][chosen], at[chosen] = varints(data, at[chosen])
                if tag == METADATA:
                    keep[chosen] = known[np.clip(columns[tag][chosen], 0, len(known) - 1)]
            elif tag == STAT:
                size, begin = varints(data, at[chosen])
                at[chosen] = begin + size
                owners.append(chosen)
                begins.append(begin)
            else:
                at[chosen] = _skipped(data, at[chosen], tag & 7)
        left = left[(at[left] < stops[left]) & keep[left]]
    kept = np.flatnonzero(keep)
    start = line.start_ns + (columns[OFFSET][kept] + 500) // 1000
    end = start + (columns[DURATION][kept] + 500) // 1000
    found, texts = _stats(plane, data, owners, begins, count, stats)
    return Block(start, end, columns[METADATA][kept], {k: v[kept] for k, v in found.items()}, texts)


def _stats(plane, data, owners, begins, count, stats) -> tuple[dict[str, np.ndarray], list[str]]:
    out = {name: np.full(count, NONE) for name in stats}
    texts: list[str] = []
    seen: dict[str, int] = {}

    def text(value: str) -> int:
        if value not in seen:
            seen[value] = len(texts)
            texts.append(value)
        return seen[value]

    if not owners:
        return out, texts
    owner, at = np.concatenate(owners), np.concatenate(begins)
    number, at = varints(data, at + 1)  # the id of its name comes first
    for key, name in plane.stats.items():
        if name not in out:
            continue
        of = np.flatnonzero(number == key)
        tags = data[at[of]]
        for tag in np.flatnonzero(np.bincount(tags)).tolist():
            chosen = of[tags == tag]
            if tag in (UNSIGNED, SIGNED):
                out[name][owner[chosen]] = varints(data, at[chosen] + 1)[0]
            elif tag == REFERENCE:
                refers, which = numbered(varints(data, at[chosen] + 1)[0])
                index = np.asarray([text(plane.stats.get(int(r), "")) for r in refers], np.int64)
                out[name][owner[chosen]] = index[which]
            elif tag == TEXT:
                size, begin = varints(data, at[chosen] + 1)
                spans = zip(begin.tolist(), (begin + size).tolist(), strict=True)
                out[name][owner[chosen]] = [text(bytes(data[a:b]).decode("utf-8", "replace")) for a, b in spans]
    return out, texts
