"""Protocol-buffer wire format: just enough to read the messages that jax does not parse for us.

jax's `ProfileData` gives the events of a trace one by one, but neither thread ids, nor the profiler's own warnings, nor
the HLO modules that the profiler embeds in the metadata of a plane. They are read here, without protobuf or TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfx.errors import ProfileError, located

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read one base-128 integer: `(value, position after it)`.

    Example:
      >>> varint(memoryview(bytes([0xAC, 0x02])), 0)
      (300, 2)
    """
    value = shift = 0
    while True:
        if at >= len(data):
            raise ProfileError(truncated("an integer runs past the end of its message"))
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return value, at
        shift += 7


def truncated(detail: str) -> str:
    return located(
        f"The trace is truncated or not an XSpace: {detail}.",
        fix="Capture again; let the program leave `capture` before it exits, and copy the file whole.",
    )


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield `(field number, value)`: an integer for the numeric wire types, a view of the bytes for the others.

    Example:
      >>> [(number, value) for number, value in fields(memoryview(bytes([0x08, 0x05])))]
      [(1, 5)]
    """
    at = 0
    while at < len(data):
        number, value, at = field(data, at)
        yield number, value


def field(data: memoryview, at: int) -> tuple[int, int | memoryview, int]:
    """Read one field: `(number, value, position after it)`."""
    key, at = varint(data, at)
    number, kind = key >> 3, key & 7
    if kind == VARINT:
        return number, *varint(data, at)
    if kind == LENGTH:
        size, at = varint(data, at)
    elif kind in (FIXED64, FIXED32):
        size = 8 if kind == FIXED64 else 4
    else:
        raise ProfileError(truncated(f"wire type {kind} does not exist"))
    if at + size > len(data):
        raise ProfileError(truncated(f"field {number} has {len(data) - at} of {size} bytes"))
    chunk = data[at : at + size]
    return number, chunk if kind == LENGTH else int.from_bytes(chunk, "little"), at + size


def message(data: memoryview) -> dict[int, list[int | memoryview]]:
    """Collect the fields of one message by number."""
    found: dict[int, list[int | memoryview]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


def text(found: dict[int, list[int | memoryview]], number: int) -> str:
    """The last value of a string field, or the empty string."""
    return bytes(found[number][-1]).decode("utf-8", "replace") if number in found else ""


def integer(found: dict[int, list[int | memoryview]], number: int, default: int = 0) -> int:
    """The last value of an integer field, or `default`."""
    return int(found[number][-1]) if number in found else default


def integers(found: dict[int, list[int | memoryview]], number: int) -> list[int]:
    """All values of a repeated integer field, packed or not."""
    values: list[int] = []
    for item in found.get(number, []):
        if isinstance(item, int):
            values.append(item)
            continue
        at = 0
        while at < len(item):
            value, at = varint(item, at)
            values.append(value)
    return values
