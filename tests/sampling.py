"""Which cases of a long or a wide parametrisation run by default. The others are slow: ``make all`` runs them.

``spread`` is for seeds; ``met`` is for tables of several axes, of which every row runs by default, but not every pair of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest


def slow(case):
    """The case, as one that does not run by default."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def spread(cases: Sequence, count: int) -> list:
    """All cases; but for ``count`` of them, evenly spaced from the first, they are slow."""
    chosen = {i * len(cases) // count for i in range(count)}
    return [case if i in chosen else slow(case) for i, case in enumerate(cases)]


def met(*axes: Sequence) -> list[tuple]:
    """All combinations; slow are those that are not needed for every value of every axis to be met once."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    chosen = {tuple(i % len(axis) for axis in values) for i in range(longest)}
    indices = itertools.product(*(range(len(axis)) for axis in values))
    cases = ((at, tuple(axis[i] for axis, i in zip(values, at, strict=True))) for at in indices)
    return [case if at in chosen else slow(case) for at, case in cases]
