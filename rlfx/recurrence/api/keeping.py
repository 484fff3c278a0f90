"""Outputs that are not kept for every timestep, as a part of the carry: a loop has one of it, however long it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.recurrence.api.pending import Directed
from rlfx.recurrence.execute.values import zeros
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.returned import as_returned, split_result
from rlfx.recurrence.language.kept import Every, Last, marks, unmarked

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Keeping:
    """A per-timestep function with a longer carry.

    Attributes:
      f: the user's.
      has_loss: whether it returns a loss.
      marks: how each leaf of aux is kept.
      types: shape and dtype of each at one point.
      length, batch: the domain's.
    """

    f: Callable
    has_loss: bool
    marks: tuple[Last | Every | None, ...]
    types: tuple[tuple, ...]
    length: int
    batch: int | None
    structure: Any

    @classmethod
    def of(cls, f: Callable, has_loss: bool, program: Program) -> Keeping | None:
        """Of a program whose outputs say so; else None."""
        found = tuple(marks(program.trees["aux"]))
        if not any(found):
            return None
        types = tuple((v.shape, v.dtype) for v in program.aux)
        return cls(f, has_loss, found, types, program.domain.length, program.domain.batch, program.trees["aux"])

    def carry(self, carry: Any) -> Any:
        """The carry of a call, with nothing kept so far."""
        lead = () if self.batch is None else (self.batch,)
        kept = [
            zeros((*lead, *self._rows(mark), *shape), dtype)
            for mark, (shape, dtype) in zip(self.marks, self.types, strict=True)
            if mark is not None
        ]
        return carry, jnp.zeros(lead, jnp.int32), kept

    def _rows(self, mark: Last | Every) -> tuple[int, ...]:
        return (mark.rows(self.length),) if isinstance(mark, Every) else ()

    @property
    def function(self) -> Callable:
        """What is compiled instead."""

        def keeping(params: Any, state: Any, t: Any) -> Any:
            carry, k, kept = state
            loss, carry, aux = split_result(getattr(self.f, "f", self.f)(params, carry, t), self.has_loss, self.f)
            left, rest, new = iter(kept), [], []
            for mark, leaf in zip(self.marks, tree.tree_leaves(aux), strict=True):
                if mark is None:
                    rest.append(leaf)
                else:
                    new.append(_updated(mark, next(left), as_returned(leaf, self.f), k))
            results = (carry, k + np.int32(1), new), rest
            return (loss, *results) if self.has_loss else results

        keeping.__name__ = getattr(self.f, "__name__", "program")
        keeping.__wrapped__ = self.f  # type: ignore[attr-defined]
        return Directed(keeping, self.f.transforms) if isinstance(self.f, Directed) else keeping

    def results(self, out: Any) -> Any:
        """What the user's function gives."""
        ((carry, _, kept), rest, *more) = out[1] if self.has_loss else out
        given, others = iter(kept), iter(rest)
        leaves = []
        for mark in self.marks:
            leaf = next(others if mark is None else given)
            rows_first = isinstance(mark, Every) and self.batch is not None
            leaves.append(jnp.swapaxes(leaf, 0, 1) if rows_first else leaf)
        results = (carry, unmarked(tree.tree_unflatten(self.structure, leaves)), *more)
        return (out[0], results) if self.has_loss else results


def _updated(mark: Last | Every, kept: Any, value: Any, k: Any) -> Any:
    if isinstance(mark, Last):
        return value
    row = k // np.int32(mark.n)
    here = jax.lax.dynamic_index_in_dim(kept, row, keepdims=False)
    value = jnp.where(k % np.int32(mark.n) == 0, value, here)
    return jax.lax.dynamic_update_index_in_dim(kept, value, row, 0)
