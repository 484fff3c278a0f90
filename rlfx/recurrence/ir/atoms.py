"""The operands of equations: values of one point, and constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, eq=False)
class Var:
    """A value of one point (t, b). ``shape`` may contain symbolic dimensions."""

    id: int
    shape: tuple[int, ...]
    dtype: Any

    def __repr__(self) -> str:
        return name_of(self)


@dataclass(frozen=True, eq=False)
class Lit:
    """A constant that is written into an equation."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        return self.value.dtype if hasattr(self.value, "dtype") else jnp.result_type(self.value)

    def __repr__(self) -> str:
        return f"{np.asarray(self.value).item():g}" if np.ndim(self.value) == 0 else "literal"


Atom = Var | Lit


def name_of(var: Var) -> str:
    """A short name: a, b, ..., z, ba, bb, ..."""
    letters, n = "", var.id
    while True:
        letters = chr(ord("a") + n % 26) + letters
        n //= 26
        if n == 0:
            return letters
