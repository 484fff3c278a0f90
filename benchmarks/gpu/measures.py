"""What the steps measure: differences, and milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

#: Differences from the CPU that are rounding: at full precision, and as jax multiplies by default (tf32, bfloat16 on a TPU).
EXACT, DEFAULT = 2e-4, 5e-2


def distance(one: Any, other: Any) -> float:
    """The largest difference in a leaf, relative to the largest number there."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / (np.abs(b).max() + 1e-6)))
    return worst


def median_ms(run: Callable, arguments: tuple, rounds: int) -> float:
    """Wall milliseconds of a call, compiled before."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
