"""Driving an underpowered car out of a valley, with a discrete or a continuous force."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE
from rlfx.envs.base import ABOVE_ZERO, REAL, Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete
from rlfx.envs.trigonometry import cos


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MountainCarState:
    """Position and velocity, ``float32[()]``; ``time`` counts steps, ``int32[()]``."""

    position: Any
    velocity: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class _Valley(Environment):
    min_position: float = parameter(-1.2, REAL)
    max_position: float = parameter(0.6, REAL)
    max_speed: float = parameter(0.07, ABOVE_ZERO)
    gravity: float = parameter(0.0025, REAL)
    goal_velocity: float = parameter(0.0, REAL)

    @property
    def observation_space(self) -> Box:
        return Box([self.min_position, -self.max_speed], [self.max_position, self.max_speed], (2,))

    def reset(self, key: jax.Array) -> Any:
        position = jax.random.uniform(key, (), jnp.float32, minval=-0.6, maxval=-0.4)
        return MountainCarState(position, jnp.zeros_like(position), jnp.int32(0))

    def observe(self, state: Any) -> Any:
        return jnp.stack([state.position, state.velocity])

    def roll(self, state: MountainCarState, push: jax.Array) -> MountainCarState:
        """One step with an acceleration; the left wall takes the velocity, the right end does not."""
        velocity = state.velocity + push - cos(3 * state.position) * self.gravity
        velocity = jnp.clip(velocity, -self.max_speed, self.max_speed)
        position = jnp.clip(state.position + velocity, self.min_position, self.max_position)
        velocity = jnp.where((position == self.min_position) & (velocity < 0), 0.0, velocity)
        return MountainCarState(position, velocity, state.time + 1)


@dataclasses.dataclass(frozen=True)
class MountainCar(_Valley):
    """MountainCar-v0: gymnasium's dynamics; the goal terminates, 200 steps truncate.

    Example:
      >>> env = MountainCar()
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(2))
      >>> float(step.reward)
      -1.0
    """

    goal_position: float = parameter(0.5, REAL)
    force: float = parameter(0.001, REAL)
    max_steps_in_episode: int = parameter(200, POSITIVE)

    name = "MountainCar-v0"
    action_space = Discrete(3)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after = self.roll(state, (action.astype(jnp.float32) - 1.0) * self.force)
        arrived = (after.position >= self.goal_position) & (after.velocity >= self.goal_velocity)
        return after, Step(jnp.float32(-1.0), arrived, after.time >= self.max_steps_in_episode, self.observe(after))


@dataclasses.dataclass(frozen=True)
class MountainCarContinuous(_Valley):
    """MountainCarContinuous-v0: gymnasium's dynamics (in gymnax's, the left wall leaves the velocity); 999 steps truncate.

    Example:
      >>> env = MountainCarContinuous()
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.array([1.0]))
      >>> round(float(step.reward), 3)
      -0.1
    """

    goal_position: float = parameter(0.45, REAL)
    power: float = parameter(0.0015, REAL)
    max_steps_in_episode: int = parameter(999, POSITIVE)

    name = "MountainCarContinuous-v0"
    action_space = Box(-1.0, 1.0, (1,))

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after = self.roll(state, jnp.clip(action[0], -1.0, 1.0) * self.power)
        arrived = (after.position >= self.goal_position) & (after.velocity >= self.goal_velocity)
        reward = -0.1 * (action[0] * action[0]) + jnp.where(arrived, jnp.float32(100), 0.0)
        return after, Step(reward, arrived, after.time >= self.max_steps_in_episode, self.observe(after))
