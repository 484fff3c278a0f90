"""JaxMARL's multi-agent environments under the protocol: observations and actions are dicts of agents."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx.envs.outside import Outside, built, names
from rlfx.envs.spaces import Box, Discrete


def _space(space: Any) -> Any:
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    return Box(np.asarray(space.low), np.asarray(space.high), tuple(space.shape), np.dtype(space.dtype))


class JaxMARLEnvironment(Outside):
    """An environment of JaxMARL: ``{"agent_0": ...}`` for observations and actions.

    The reward is the mean of the agents'; ``info["rewards"]`` and ``info["dones"]`` are those of each. The episode ends when all
    have: it is truncated where its number of steps is why (``max_steps`` of the environment), and terminated otherwise.
    """

    def first(self, key):
        return self.env.reset(key)

    def following(self, key, state, action):
        obs, after, rewards, dones, info = self.env.step_env(key, state, action)
        done = jnp.asarray(dones["__all__"], bool)
        limit = getattr(self.env, "max_steps", None)
        cut = done & (after.step >= limit) if limit is not None and hasattr(after, "step") else jnp.zeros((), bool)
        of_agents = {agent: jnp.asarray(rewards[agent], jnp.float32) for agent in self.env.agents}
        reward = sum(of_agents.values()) / len(of_agents)
        info = {**info, "rewards": of_agents, "dones": {agent: dones[agent] for agent in self.env.agents}}
        return obs, after, reward, done & ~cut, cut, info


def _registered():
    import jaxmarl

    return jaxmarl.registered_envs


def available() -> tuple[str, ...]:
    """The names JaxMARL has registered; none if it is not installed."""
    return names("jaxmarl", _registered)


def make(name: str, **kwargs: Any) -> JaxMARLEnvironment:
    """The environment ``name`` of JaxMARL, such as ``"MPE_simple_spread_v3"``; ``kwargs`` are those of its class.

    Raises:
      EnvError: JaxMARL is not installed, has no such environment, or does not take the parameters.
    """

    def build(name, **kwargs):
        import jaxmarl

        return jaxmarl.make(name, **kwargs)

    env = built("jaxmarl", name, available(), build, kwargs)
    return JaxMARLEnvironment(f"jaxmarl/{name}", env, {agent: _space(env.action_space(agent)) for agent in env.agents})
