"""Catching a falling ball with a paddle (bsuite)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import broadcasted_iota

from rlfx._checks import INT32, POSITIVE, integer
from rlfx.envs.base import Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CatchState:
    """Columns of ball and paddle, row of the ball, steps in the episode; ``int32[()]``."""

    ball_x: Any
    ball_y: Any
    paddle_x: Any
    time: Any


def below(key: jax.Array, n: int) -> jax.Array:
    """An integer in ``[0, n)`` from one 32-bit draw (``jax.random.randint`` takes two and a split); ``n <= 2^16``.

    Example:
      >>> int(below(jax.random.key(0), 1))
      0
    """
    return (((jax.random.bits(key, (), jnp.uint32) >> 16) * jnp.uint32(n)) >> 16).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Catch(Environment):
    """Catch-bsuite: gymnax's dynamics. The reward is 1 or -1 when the ball reaches the paddle's row, which terminates.

    Example:
      >>> env = Catch()
      >>> env.observe(env.reset(jax.random.key(0))).sum()
      Array(2., dtype=float32)
    """

    rows: int = parameter(10, integer(2, INT32))
    columns: int = parameter(5, POSITIVE)
    max_steps_in_episode: int = parameter(1000, POSITIVE)

    name = "Catch-bsuite"
    action_space = Discrete(3)

    @property
    def observation_space(self) -> Box:
        return Box(0.0, 1.0, (self.rows, self.columns))

    def reset(self, key: jax.Array) -> Any:
        return CatchState(below(key, self.columns), jnp.int32(0), jnp.int32(self.columns // 2), jnp.int32(0))

    def observe(self, state: Any) -> Any:
        row = broadcasted_iota(jnp.int32, (self.rows, self.columns), 0)
        column = broadcasted_iota(jnp.int32, (self.rows, self.columns), 1)
        ball = (row == state.ball_y) & (column == state.ball_x)
        paddle = (row == self.rows - 1) & (column == state.paddle_x)
        return (ball | paddle).astype(jnp.float32)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        paddle = jnp.clip(state.paddle_x + action - 1, 0, self.columns - 1)
        after = CatchState(state.ball_x, state.ball_y + 1, paddle, state.time + 1)
        landed = after.ball_y == self.rows - 1
        reward = jnp.where(landed, jnp.where(paddle == state.ball_x, jnp.float32(1), -1.0), 0.0)
        return after, Step(reward, landed, after.time >= self.max_steps_in_episode, self.observe(after))
