"""Balancing a pole on a cart (Barto, Sutton and Anderson 1983), and the variant with compute and state factors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE
from rlfx.envs.base import ABOVE_ZERO, REAL, Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete
from rlfx.envs.trigonometry import sin_cos


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CartPoleState:
    """Positions and velocities, ``float32[()]``; ``time`` counts steps, ``int32[()]``."""

    x: Any
    x_dot: Any
    theta: Any
    theta_dot: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class CartPole(Environment):
    """CartPole-v1: gymnasium's dynamics and time limit, reward 1 at every step.

    Example:
      >>> env = CartPole()
      >>> env.observe(env.reset(jax.random.key(0))).shape
      (4,)
    """

    gravity: float = parameter(9.8, REAL)
    masscart: float = parameter(1.0, ABOVE_ZERO)
    masspole: float = parameter(0.1, ABOVE_ZERO)
    length: float = parameter(0.5, ABOVE_ZERO)
    force_mag: float = parameter(10.0, REAL)
    tau: float = parameter(0.02, ABOVE_ZERO)
    theta_threshold_radians: float = parameter(12 * 2 * math.pi / 360, ABOVE_ZERO)
    x_threshold: float = parameter(2.4, ABOVE_ZERO)
    max_steps_in_episode: int = parameter(500, POSITIVE)

    name = "CartPole-v1"
    action_space = Discrete(2)

    @property
    def observation_space(self) -> Box:
        high = [self.x_threshold * 2, math.inf, self.theta_threshold_radians * 2, math.inf]
        return Box([-h for h in high], high, (4,))

    def reset(self, key: jax.Array) -> Any:
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), jnp.float32, minval=-0.05, maxval=0.05)
        return CartPoleState(x, x_dot, theta, theta_dot, jnp.int32(0))

    def observe(self, state: Any) -> Any:
        return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])

    def advance(self, state: CartPoleState, action: jax.Array) -> CartPoleState:
        """One Euler step of length ``tau``."""
        total_mass = self.masscart + self.masspole
        moment = self.masspole * self.length
        force = self.force_mag * (2.0 * action.astype(jnp.float32) - 1.0)
        sin, cos = sin_cos(state.theta)
        push = (force + moment * (state.theta_dot * state.theta_dot) * sin) * (1 / total_mass)
        theta_acc = (self.gravity * sin - cos * push) / (
            self.length * (4 / 3 - (self.masspole / total_mass) * (cos * cos))
        )
        x_acc = push - (moment / total_mass) * theta_acc * cos
        return CartPoleState(
            state.x + self.tau * state.x_dot,
            state.x_dot + self.tau * x_acc,
            state.theta + self.tau * state.theta_dot,
            state.theta_dot + self.tau * theta_acc,
            state.time + 1,
        )

    def finish(self, after: CartPoleState) -> Step:
        """The step that led to ``after``."""
        fallen = (jnp.abs(after.x) > self.x_threshold) | (jnp.abs(after.theta) > self.theta_threshold_radians)
        return Step(jnp.float32(1.0), fallen, after.time >= self.max_steps_in_episode, self.observe(after))

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after = self.advance(state, action)
        return after, self.finish(after)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParametricState:
    """CartPole's state and its ballast, ``float32[4 * (state_factor - 1)]``."""

    cartpole: CartPoleState
    ballast: Any


@dataclasses.dataclass(frozen=True)
class ParametricCartPole(Environment):
    """CartPole with ``compute_factor`` (C) times the arithmetic and ``state_factor`` (S) times the state.

    The complexity study of data_collection section 4.2: C integration steps of length ``tau / C`` for each action, and
    4 (S - 1) further state values that every step reads and writes. (The paper says only that C multiplies the
    simulation iterations and S the loads and stores.)

    Raises:
      EnvError: a factor below 1.

    Example:
      >>> env = ParametricCartPole(compute_factor=4, state_factor=3)
      >>> env.reset(jax.random.key(0)).ballast.shape
      (8,)
    """

    compute_factor: int = parameter(1, POSITIVE)
    state_factor: int = parameter(1, POSITIVE)

    name = "CartPole-parametric"
    action_space = Discrete(2)

    @property
    def cartpole(self) -> CartPole:
        return CartPole(tau=0.02 / self.compute_factor)

    @property
    def observation_space(self) -> Box:
        return self.cartpole.observation_space

    def reset(self, key: jax.Array) -> Any:
        return ParametricState(self.cartpole.reset(key), jnp.zeros(4 * (self.state_factor - 1), jnp.float32))

    def observe(self, state: Any) -> Any:
        return self.cartpole.observe(state.cartpole)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        def advance(_, inner):
            return dataclasses.replace(self.cartpole.advance(inner, action), time=state.cartpole.time + 1)

        after = jax.lax.fori_loop(0, self.compute_factor, advance, state.cartpole)
        return ParametricState(after, 0.99 * state.ballast + after.theta), self.cartpole.finish(after)
