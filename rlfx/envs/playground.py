"""MuJoCo Playground's robots under the protocol."""

from __future__ import annotations

from typing import Any

from rlfx._checks import POSITIVE, expect
from rlfx.envs.base import Environment
from rlfx.envs.episodes import time_limit
from rlfx.envs.outside import Outside, built, names
from rlfx.envs.spaces import Box
from rlfx.errors import EnvError

PACKAGE = "mujoco_playground"


class PlaygroundEnvironment(Outside):
    """An environment of MuJoCo Playground, without its wrappers.

    ``terminated`` is its ``done``; it has no truncation of its own. ``info`` of a step is its metrics.
    """

    def first(self, key):
        state = self.env.reset(key)
        return state.obs, state

    def following(self, key, state, action):
        state = self.env.step(state, action)
        return state.obs, state, state.reward, state.done, False, dict(state.metrics)


def _registry() -> Any:
    from mujoco_playground import registry

    return registry


def available() -> tuple[str, ...]:
    """The names Playground has registered; none if it is not installed."""
    return names(PACKAGE, lambda: _registry().ALL_ENVS)


def make(name: str, *, episode_length: int | None = None, impl: str = "jax", **kwargs: Any) -> Environment:
    """The environment ``name`` of MuJoCo Playground, truncated after ``episode_length`` steps.

    Args:
      name: a name that Playground registers, such as ``"CartpoleBalance"``.
      episode_length: steps until truncation; that of its configuration if None.
      impl: MJX's ``"jax"``, or ``"warp"`` (kernels of their own for each robot, which a CPU compiles for a minute).
      **kwargs: other fields of its configuration.

    Raises:
      EnvError: Playground is not installed, has no such environment, or its configuration has no such field.
    """
    limits = []

    def build(name, **overrides):
        registry = _registry()
        limits.append(registry.get_default_config(name).episode_length)
        try:
            return registry.load(name, config_overrides=overrides)
        except (KeyError, AttributeError) as error:
            fact, _, _ = str(error.args[0]).partition(" Other fields")  # all of the configuration follows
            raise ValueError(fact) from error

    env = built("playground", name, available(), build, {"impl": impl, **kwargs}, package=PACKAGE)
    length = limits[0] if episode_length is None else episode_length
    length = expect("episode_length", length, POSITIVE, EnvError, of=f"playground/{name}")
    return time_limit(PlaygroundEnvironment(f"playground/{name}", env, Box(-1.0, 1.0, (env.action_size,))), length)
