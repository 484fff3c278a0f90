"""Swinging up a two-link pendulum, driven at the joint (Sutton and Barto's book version)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE
from rlfx.envs.base import ABOVE_ZERO, Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete
from rlfx.envs.trigonometry import cos, sin, sin_cos, wrap_angle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcrobotState:
    """Joint angles in radians and velocities, ``float32[()]``; ``time`` counts steps, ``int32[()]``."""

    joint_angle1: Any
    joint_angle2: Any
    velocity_1: Any
    velocity_2: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class Acrobot(Environment):
    """Acrobot-v1: gymnasium's dynamics (one Runge-Kutta step for each action) without torque noise.

    Example:
      >>> env = Acrobot()
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(2))
      >>> float(step.reward)
      -1.0
    """

    dt: float = parameter(0.2, ABOVE_ZERO)
    max_vel_1: float = parameter(4 * math.pi, ABOVE_ZERO)
    max_vel_2: float = parameter(9 * math.pi, ABOVE_ZERO)
    max_steps_in_episode: int = parameter(500, POSITIVE)

    name = "Acrobot-v1"
    action_space = Discrete(3)

    @property
    def observation_space(self) -> Box:
        high = [1.0, 1.0, 1.0, 1.0, self.max_vel_1, self.max_vel_2]
        return Box([-h for h in high], high, (6,))

    def reset(self, key: jax.Array) -> Any:
        angle1, angle2, velocity1, velocity2 = jax.random.uniform(key, (4,), jnp.float32, minval=-0.1, maxval=0.1)
        return AcrobotState(angle1, angle2, velocity1, velocity2, jnp.int32(0))

    def observe(self, state: Any) -> Any:
        (s1, c1), (s2, c2) = sin_cos(state.joint_angle1), sin_cos(state.joint_angle2)
        return jnp.stack([c1, s1, c2, s2, state.velocity_1, state.velocity_2])

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        torque = action.astype(jnp.float32) - 1.0
        y = (state.joint_angle1, state.joint_angle2, state.velocity_1, state.velocity_2)
        k1 = _derivative(y, torque)
        k2 = _derivative(_along(y, k1, self.dt / 2), torque)
        k3 = _derivative(_along(y, k2, self.dt / 2), torque)
        k4 = _derivative(_along(y, k3, self.dt), torque)
        total = tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
        angle1, angle2, velocity1, velocity2 = _along(y, total, self.dt / 6)
        after = AcrobotState(
            wrap_angle(angle1),
            wrap_angle(angle2),
            jnp.clip(velocity1, -self.max_vel_1, self.max_vel_1),
            jnp.clip(velocity2, -self.max_vel_2, self.max_vel_2),
            state.time + 1,
        )
        swung = -cos(after.joint_angle1) - cos(after.joint_angle1 + after.joint_angle2) > 1.0
        reward = jnp.where(swung, jnp.float32(0), -1.0)
        return after, Step(reward, swung, after.time >= self.max_steps_in_episode, self.observe(after))


def _along(y, slope, dt):
    return tuple(a + dt * b for a, b in zip(y, slope, strict=True))


def _derivative(y, torque):
    """Two links of mass, length and moment of inertia 1, centres of mass at 0.5, gravity 9.8."""
    theta1, theta2, velocity1, velocity2 = y
    s2, c2 = sin_cos(theta2)
    d1 = 0.25 + (1.25 + c2) + 2.0
    d2 = 0.25 + 0.5 * c2 + 1.0
    phi2 = 4.9 * sin(theta1 + theta2)
    phi1 = -0.5 * (velocity2 * velocity2) * s2 - velocity2 * velocity1 * s2 + 14.7 * sin(theta1) + phi2
    ratio = d2 / d1
    acceleration2 = (torque + ratio * phi1 - 0.5 * (velocity1 * velocity1) * s2 - phi2) / (1.25 - d2 * ratio)
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return velocity1, velocity2, acceleration1, acceleration2
