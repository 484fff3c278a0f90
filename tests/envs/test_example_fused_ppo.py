"""The example trains alike with and without fused steps, and its acting loop is fused."""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def test_fused_ppo_learns_what_ppo_learns():
    import fused_ppo

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as jax is by default
        plain, _, _ = fused_ppo.train(envs=8, updates=3)
        fused, rate, plan = fused_ppo.train(fused_ppo.fuse_steps, envs=8, updates=3)
    np.testing.assert_allclose(plain, fused, rtol=1e-2)
    assert rate > 0
    assert "fused: its steps are one scalarised program" in str(plan)
