"""The examples are scripts beside each other, as are the hand-written computations: importable by name."""

import sys
from pathlib import Path

import jax
import pytest

here = Path(__file__).parent
sys.path[:0] = [str(here.parents[1] / "examples"), str(here)]


@pytest.fixture
def lenient():
    """optax and flax count on implicit dtype and rank promotion, as jax allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
