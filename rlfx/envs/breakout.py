"""MinAtar's Breakout, with the wall of bricks in one machine word."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import broadcasted_iota

from rlfx._checks import POSITIVE
from rlfx.envs.base import Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete

_WALL = (1 << 30) - 1  # bit 10 * (row - 1) + column, rows 1 to 3: where bricks can be


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BreakoutState:
    """``bricks`` is ``uint32[()]``, ``strike`` ``bool[()]``, the rest ``int32[()]``.

    ``ball_dir`` is 0 to 3: up left, up right, down right, down left.
    """

    ball_y: Any
    ball_x: Any
    ball_dir: Any
    pos: Any
    bricks: Any
    strike: Any
    last_y: Any
    last_x: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class Breakout(Environment):
    """Breakout-MinAtar with the minimal action set (stay, left, right): gymnax's dynamics, 1,000 steps truncate.

    Gymnax keeps a 10 x 10 array of bricks; here they are the bits of one word, so the state is nine scalars, and a
    brick is tested, removed and counted without indexing. Observations are equal.

    Example:
      >>> env = Breakout()
      >>> env.observe(env.reset(jax.random.key(0))).sum(axis=(0, 1))
      Array([ 1.,  1.,  1., 30.], dtype=float32)
    """

    max_steps_in_episode: int = parameter(1000, POSITIVE)

    name = "Breakout-MinAtar"
    observation_space = Box(0.0, 1.0, (10, 10, 4))
    action_space = Discrete(3)

    def reset(self, key: jax.Array) -> Any:
        side = (jax.random.bits(key, (), jnp.uint32) >> 31).astype(jnp.int32)
        ball_x = 9 * side
        start = jnp.int32(3)
        return BreakoutState(
            start, ball_x, 2 + side, jnp.int32(4), jnp.uint32(_WALL), side > 1, start, ball_x, jnp.int32(0)
        )

    def observe(self, state: Any) -> Any:
        row, column = (broadcasted_iota(jnp.int32, (10, 10), axis) for axis in (0, 1))
        bit = jnp.clip(10 * (row - 1) + column, 0, 31).astype(jnp.uint32)
        paddle = (row == 9) & (column == state.pos)
        ball = (row == state.ball_y) & (column == state.ball_x)
        trail = (row == state.last_y) & (column == state.last_x)
        brick = (row >= 1) & (row <= 3) & (((state.bricks >> bit) & 1) == 1)
        return jnp.stack([paddle, ball, trail, brick], axis=-1).astype(jnp.float32)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        pos = jnp.clip(state.pos + jnp.where(action == 2, 1, jnp.where(action == 1, jnp.int32(-1), 0)), 0, 9)
        right = (state.ball_dir == 1) | (state.ball_dir == 2)
        x = state.ball_x + jnp.where(right, jnp.int32(1), -1)
        y = state.ball_y + jnp.where(state.ball_dir >= 2, jnp.int32(1), -1)
        # Directions flip left-right by xor 1, up-down by xor 3, and turn back by xor 2.
        turn = jnp.where((x < 0) | (x > 9), jnp.int32(1), 0)
        x = jnp.clip(x, 0, 9)
        ceiling = y < 0
        y = jnp.maximum(y, 0)
        turn = turn ^ jnp.where(ceiling, jnp.int32(3), 0)

        in_wall = ~ceiling & (y >= 1) & (y <= 3)
        bit = jnp.uint32(1) << jnp.where(in_wall, 10 * (y - 1) + x, 31).astype(jnp.uint32)
        touched = in_wall & ((state.bricks & bit) != 0)
        broken = touched & ~state.strike
        bricks = jnp.where(broken, state.bricks & ~bit, state.bricks)
        y = jnp.where(broken, state.ball_y, y)
        turn = turn ^ jnp.where(broken, jnp.int32(3), 0)

        bottom = ~touched & (y == 9)
        bricks = jnp.where(bottom & (bricks == 0), jnp.uint32(_WALL), bricks)
        above = bottom & (state.ball_x == pos)
        edge = bottom & ~above & (x == pos)
        y = jnp.where(above | edge, state.ball_y, y)
        turn = turn ^ jnp.where(above, 3, jnp.where(edge, jnp.int32(2), 0))
        lost = bottom & ~above & ~edge

        after = BreakoutState(
            y, x, state.ball_dir ^ turn, pos, bricks, touched, state.ball_y, state.ball_x, state.time + 1
        )
        return after, Step(
            broken.astype(jnp.float32), lost, after.time >= self.max_steps_in_episode, self.observe(after)
        )
