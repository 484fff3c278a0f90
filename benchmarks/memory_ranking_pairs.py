"""How a static bound ranks the plans of a program, beside XLA's bytes."""

from __future__ import annotations

import itertools

#: Programs that need less are not looked at.
SMALL = 64 * 1024


def ranked(program: dict) -> tuple[int, int]:
    """``(alike, all)`` pairs of plans."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(program["plans"], 2)
        if max(a["exact"], b["exact"]) > max(SMALL, 1.02 * min(a["exact"], b["exact"]))
    ]
    alike = sum((a["exact"] < b["exact"]) == (a["bound"] < b["bound"]) and a["bound"] != b["bound"] for a, b in pairs)
    return alike, len(pairs)
