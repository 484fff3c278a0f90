"""Swinging up a pendulum with a limited torque."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE
from rlfx.envs.base import ABOVE_ZERO, REAL, Environment, Step, parameter
from rlfx.envs.spaces import Box
from rlfx.envs.trigonometry import sin, sin_cos, wrap_angle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendulumState:
    """Angle from upright in radians, angular velocity, ``float32[()]``; ``time`` counts steps, ``int32[()]``."""

    theta: Any
    theta_dot: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class Pendulum(Environment):
    """Pendulum-v1: gymnasium's dynamics; every episode is truncated after 200 steps.

    Example:
      >>> env = Pendulum()
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.array([0.5]))
      >>> bool(step.reward < 0)
      True
    """

    max_speed: float = parameter(8.0, ABOVE_ZERO)
    max_torque: float = parameter(2.0, ABOVE_ZERO)
    dt: float = parameter(0.05, ABOVE_ZERO)
    g: float = parameter(10.0, REAL)
    m: float = parameter(1.0, ABOVE_ZERO)
    l: float = parameter(1.0, ABOVE_ZERO)
    max_steps_in_episode: int = parameter(200, POSITIVE)

    name = "Pendulum-v1"

    @property
    def observation_space(self) -> Box:
        high = [1.0, 1.0, self.max_speed]
        return Box([-h for h in high], high, (3,))

    @property
    def action_space(self) -> Box:
        return Box(-self.max_torque, self.max_torque, (1,))

    def reset(self, key: jax.Array) -> Any:
        high = jnp.array([math.pi, 1.0], jnp.float32)
        theta, theta_dot = jax.random.uniform(key, (2,), jnp.float32, minval=-high, maxval=high)
        return PendulumState(theta, theta_dot, jnp.int32(0))

    def observe(self, state: Any) -> Any:
        s, c = sin_cos(state.theta)
        return jnp.stack([c, s, state.theta_dot])

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        u = jnp.clip(action[0], -self.max_torque, self.max_torque)
        angle = wrap_angle(state.theta)
        cost = angle * angle + 0.1 * (state.theta_dot * state.theta_dot) + 0.001 * (u * u)
        pull = (3 * self.g / (2 * self.l)) * sin(state.theta) + (3 / (self.m * self.l**2)) * u
        theta_dot = jnp.clip(state.theta_dot + pull * self.dt, -self.max_speed, self.max_speed)
        after = PendulumState(state.theta + theta_dot * self.dt, theta_dot, state.time + 1)
        truncated = after.time >= self.max_steps_in_episode
        return after, Step(-cost, jnp.zeros_like(truncated), truncated, self.observe(after))
