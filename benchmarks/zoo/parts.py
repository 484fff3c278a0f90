"""What the entries share: weights, data, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IN, HIDDEN, ENTITIES, TOKENS, SIDE, CHANNELS = 16, 64, 8, 16, 10, 4


@dataclass(frozen=True)
class Entry:
    """Something that a timestep computes.

    Attributes:
      fn: ``fn(params, x)``, a number; of a recurrence ``fn(params, state, x)``, a number and the next state.
      params: by name.
      shape: of ``x`` at one point.
      start: the state at one point that a recurrence begins with; None of any other.
    """

    fn: Callable
    params: dict[str, Any]
    shape: tuple[int, ...]
    start: Any = None


NETWORKS: dict[str, Entry] = {}
RECURRENCES: dict[str, Entry] = {}


def network(*shape: int, **params: Any) -> Callable:
    """Keeps a function of points ``x[shape]`` under its name."""

    def keep(fn: Callable) -> Callable:
        NETWORKS[fn.__name__] = Entry(fn, params, shape or (IN,))
        return fn

    return keep


def recurrence(start: Any, **params: Any) -> Callable:
    """Keeps a function of a state and ``x[IN]`` under its name."""

    def keep(fn: Callable) -> Callable:
        RECURRENCES[fn.__name__] = Entry(fn, params, (IN,), start)
        return fn

    return keep


def weights(seed: int, *shape: int) -> jax.Array:
    """Normal numbers, over the root of the first axis of matrices."""
    return jax.random.normal(jax.random.key(seed), shape) / np.float32(shape[0] ** 0.5 if len(shape) > 1 else 1.0)


def square(y: Any) -> Any:
    return jnp.sum(jnp.square(y))


LAYERS = {"a": weights(1, IN, HIDDEN), "b": weights(2, HIDDEN, HIDDEN), "c": weights(3, HIDDEN, IN)}


def hidden(p: Any, x: Any) -> Any:
    """Two layers."""
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])
