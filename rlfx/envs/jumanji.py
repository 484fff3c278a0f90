"""Jumanji's environments under the protocol."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx.envs.outside import Outside, built, names
from rlfx.envs.spaces import Box, Discrete


def _space(spec: Any) -> Any:
    if hasattr(spec, "num_values") and np.ndim(spec.num_values) == 0:
        return Discrete(int(spec.num_values), spec.dtype)
    if hasattr(spec, "num_values"):
        return Box(0, np.asarray(spec.num_values) - 1, spec.shape, spec.dtype)
    return Box(np.asarray(spec.minimum), np.asarray(spec.maximum), spec.shape, spec.dtype)


class JumanjiEnvironment(Outside):
    """An environment of Jumanji, without wrappers; observations are its named tuples, masks of actions included.

    A last step whose discount is 0 terminates, another one truncates. With several agents the reward is the sum of theirs, and
    ``info["rewards"]`` and ``info["discounts"]`` are those of each.
    """

    def first(self, key):
        state, timestep = self.env.reset(key)
        return timestep.observation, state

    def following(self, key, state, action):
        state, timestep = self.env.step(state, action)
        last, ended = timestep.last(), (timestep.discount == 0).all()
        each = {"rewards": timestep.reward, "discounts": timestep.discount} if jnp.ndim(timestep.reward) else {}
        return (
            timestep.observation, state, timestep.reward.sum(), last & ended, last & ~ended, {**timestep.extras, **each}
        )  # fmt: skip


def _registered():
    import jumanji

    return jumanji.registered_environments()


def available() -> tuple[str, ...]:
    """The names Jumanji has registered; none if it is not installed."""
    return names("jumanji", _registered)


def make(name: str, **kwargs: Any) -> JumanjiEnvironment:
    """The environment ``name`` of Jumanji; ``kwargs`` are those of its class.

    Raises:
      EnvError: Jumanji is not installed, has no such environment, or does not take the parameters.
    """

    def build(name, **kwargs):
        import jumanji

        return jumanji.make(name, **kwargs)

    env = built("jumanji", name, available(), build, kwargs)
    return JumanjiEnvironment(f"jumanji/{name}", env, _space(env.action_spec))
