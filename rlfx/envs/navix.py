"""Navix' grid worlds (MiniGrid in JAX) under the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlfx.envs.outside import Outside, built, names
from rlfx.envs.spaces import Discrete


class NavixEnvironment(Outside):
    """A grid world of Navix, without its own resets, which come in the step *after* an episode's end."""

    def first(self, key):
        timestep = self.env.reset(key)
        return timestep.observation, timestep

    def following(self, key, state, action):
        after = self.env._step(state, action)
        return after.observation, after, after.reward, after.is_termination(), after.is_truncation(), dict(after.info)


def _registered():
    import navix

    return navix.registry()


def available() -> tuple[str, ...]:
    """The names Navix has registered; none if it is not installed."""
    return names("navix", _registered)


def make(name: str, **kwargs: Any) -> NavixEnvironment:
    """The environment ``name`` of Navix, such as ``"Navix-Empty-5x5-v0"``; ``kwargs`` are ``max_steps`` and those of its class.

    Raises:
      EnvError: Navix is not installed, has no such environment, or does not take the parameters.
    """

    def build(name, **kwargs):
        import navix

        return navix.make(name, **kwargs)

    env = built("navix", name, available(), build, kwargs)
    return NavixEnvironment(f"navix/{name}", env, Discrete(int(np.asarray(env.action_space.maximum)) + 1))
