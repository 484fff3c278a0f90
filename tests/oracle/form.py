"""What a row of the tables of forms is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """One row.

    Attributes:
      out, ins: types.
      rlfx, loops: the two texts.
      at: what ``#0`` is drawn from: "", "point", "start", "end", "both", "slice", "window", "number".
      past: whether it depends on the past alone if its operands do.
      extends: whether it can be evaluated at t = T if its operands can.
      ended: whether it has a value at t = T of its own, whatever its operands have.
      full: its slices must not be empty.
      feature: the switch it belongs to, if any.
      until: the switch it needs in a program with ``until=``.
      batch: whether it needs a batch.
    """

    name: str
    out: str
    ins: str
    rlfx: str
    loops: str
    at: str = ""
    past: bool = True
    extends: bool = False
    ended: bool = False
    full: bool = False
    feature: str = ""
    until: str = ""
    batch: bool = False
    weight: int = 1
