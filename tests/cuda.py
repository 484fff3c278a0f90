"""Lowering for a GPU that is not here: since jax 0.11 Pallas asks for the device's kind, which a mesh without devices has."""

from collections.abc import Callable
from typing import Any

import jax

from rlfx.ahead.machines import MACHINES
from rlfx.ahead.program import surroundings


def lowered(run: Callable, *args: Any) -> str:
    """What a jitted function is for CUDA, as text."""
    with jax.sharding.use_abstract_mesh(surroundings(MACHINES["h200"])):
        return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
