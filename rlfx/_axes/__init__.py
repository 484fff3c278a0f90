"""What the axes of a primitive's operands and results are to each other."""

from rlfx._axes.loops import SUM, Axes, Monoid, Nest, extreme_of
from rlfx._axes.rules import elementwise
from rlfx._axes.table import ARGUMENTS, CUMULATIVE, MATRICES, REDUCTIONS, TABLE, nest_of, resized

__all__ = [
    "ARGUMENTS",
    "CUMULATIVE",
    "MATRICES",
    "REDUCTIONS",
    "SUM",
    "TABLE",
    "Axes",
    "Monoid",
    "Nest",
    "elementwise",
    "extreme_of",
    "nest_of",
    "resized",
]
