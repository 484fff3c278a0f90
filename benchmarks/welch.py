"""How far apart two arms are, relative to the second: of numbers of independent seeds, by Welch's test."""

from __future__ import annotations

from scipy import stats


def relative(first, second):
    """``{"difference": x, "interval": [low, high], "p_value": p}`` of the means of two arrays, the interval for 95%."""
    test, scale = stats.ttest_ind(first, second, equal_var=False), abs(second.mean())
    low, high = test.confidence_interval(0.95)
    return {
        "difference": float((first.mean() - second.mean()) / scale),
        "interval": [float(low / scale), float(high / scale)],
        "p_value": float(test.pvalue),
    }
