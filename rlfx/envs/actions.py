"""Actions on the agent's scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.envs.base import Environment, Step, checked_environment
from rlfx.envs.episodes import Wrapper
from rlfx.envs.spaces import Box, Space
from rlfx.errors import EnvError, located


@dataclasses.dataclass(frozen=True, eq=False)
class _RescaleAction(Wrapper):
    over_resets = same_steps = True
    low: float = -1.0
    high: float = 1.0

    @property
    def action_space(self) -> Space:
        space = self.env.action_space
        return Box(self.low, self.high, space.shape, space.dtype)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        space = self.env.action_space
        share = (action - self.low) / (self.high - self.low)
        # This form meets both bounds exactly.
        return self.env.step(key, state, jnp.clip((1 - share) * space.low + share * space.high, space.low, space.high))


def rescale_action(env: Environment, low: float = -1.0, high: float = 1.0) -> Environment:
    """``env`` whose actions lie in ``[low, high]``, stretched to its own bounds: ``low`` is its lowest action.

    What lies outside of ``[low, high]`` (inside ``jit``, where it is not seen) is clipped to the bounds of ``env``.

    Raises:
      EnvError: the action space is not one box of floats with finite bounds, or not ``low < high``, two numbers.

    Example:
      >>> import jax
      >>> from rlfx.envs import make
      >>> env = rescale_action(make("Pendulum-v1"))
      >>> env.action_space
      Box(-1.0, 1.0, shape=(1,), dtype=float32)
    """
    checked_environment("rescale_action", env)
    space = env.action_space
    bounded = isinstance(space, Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all()
    if not bounded or not np.issubdtype(space.dtype, np.floating):
        fact = f"rescale_action: {env.name} takes {space}."
        raise EnvError(located(fact, fix="Only the actions of a Box of floats with finite bounds can be rescaled."))
    numbers = all(isinstance(x, (int, float, np.number)) and not isinstance(x, bool) for x in (low, high))
    if not (numbers and np.isfinite([low, high]).all() and low < high):
        raise EnvError(located(f"rescale_action: low={low!r}, high={high!r}.", fix="Give low < high, two numbers."))
    return _RescaleAction(env, float(low), float(high))
