"""Long index expressions, generated: read where Python's integers say, or refused; none takes long."""

from __future__ import annotations

import time

import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError

T = 11
GROUPS, EACH = 8, 10


def grown(rng: np.random.Generator, operations: int):
    """``f(t, minimum, maximum)``: an expression of so many //, %, minimum and maximum, within [0, T)."""
    steps = [(rng.integers(4), int(rng.integers(1, 4)), int(rng.integers(2, 6))) for _ in range(operations)]

    def f(t, minimum, maximum):
        e = t
        for kind, a, n in steps:
            match kind:
                case 0:
                    e = (e * a + 1) // n
                case 1:
                    e = e * a - e % n
                case 2:
                    e = maximum(e - a, t // n)
                case _:
                    e = minimum(e + a * t, 3 * n + t)
        return e % T

    return f


@pytest.mark.parametrize("group", range(GROUPS))
def test_reads_at_long_expressions(group: int):
    """Eighty of them, of 3 to 12 operations: the value of the timestep that the same expression of integers gives."""
    rng = np.random.default_rng(group)
    indices = [grown(rng, int(rng.integers(3, 13))) for _ in range(EACH)]
    began, kept, refused = time.process_time(), [], []

    def program(p, c, t):
        x = rlfx.series(1.0 * t + 0.5)
        read = []
        for i, f in enumerate(indices):
            try:
                read.append(x[f(t, rlfx.minimum, rlfx.maximum)])
                kept.append(i)
            except DomainError as error:
                refused.append(str(error))
        return c, tuple(read)

    found = rlfx.unroll(program, length=T)(None, None)[1]
    assert time.process_time() - began < 60
    assert all("at most 64 are analysed" in text for text in refused)
    assert len(kept) >= EACH // 2
    for i, x in zip(kept, found, strict=True):
        np.testing.assert_array_equal(x, [indices[i](t, min, max) + 0.5 for t in range(T)])
