"""An environment of any observation size that costs next to nothing: for memory and throughput measurements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import POSITIVE, each, one_of
from rlfx.envs.base import Environment, Step, parameter
from rlfx.envs.spaces import Box, Discrete
from rlfx.errors import EnvError, located


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SyntheticState:
    """What the images of an episode are drawn from, ``uint32[()]``, and the step, ``int32[()]``."""

    seed: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class SyntheticImages(Environment):
    """Noise images with one bright band; the right action is the index of the band.

    The image is a hash of (episode, step, pixel) below 128, plus 128 in the band of rows that is the answer, so that
    observations of any size cost one pass of integer arithmetic, cannot be compressed, and can be learned from.

    Args:
      obs_shape: shape of an observation; the first axis is cut into ``num_actions`` bands.
      obs_dtype: ``"uint8"``, or ``"float32"`` (scaled to [0, 1]).
      num_actions: how many bands.
      episode_length: steps until truncation.

    Example:
      >>> env = SyntheticImages(obs_shape=(84, 84, 4))
      >>> env.observe(env.reset(jax.random.key(0))).dtype
      dtype('uint8')
    """

    obs_shape: tuple[int, ...] = parameter((84, 84, 4), each(POSITIVE, "the shape of an image", "(84, 84, 4)"))
    obs_dtype: str = parameter("uint8", one_of("uint8", "float32"))
    num_actions: int = parameter(4, POSITIVE)
    episode_length: int = parameter(100, POSITIVE)

    name = "SyntheticImages-v0"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_actions > (self.obs_shape or (0,))[0]:
            fact = f"SyntheticImages: {self.num_actions} bands do not fit into the first axis of an image {self.obs_shape}."
            raise EnvError(located(fact, fix="Give obs_shape=(rows, ...), with a row for each of num_actions."))

    @property
    def observation_space(self) -> Box:
        return Box(0, 255 if self.obs_dtype == "uint8" else 1.0, self.obs_shape, np.dtype(self.obs_dtype))

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.num_actions)

    def reset(self, key: jax.Array) -> Any:
        return SyntheticState(jax.random.bits(key, (), jnp.uint32), jnp.int32(0))

    def answer(self, state: SyntheticState) -> jax.Array:
        """The action that is rewarded in ``state``; ``int32[()]``."""
        return (((_mix(_moment(state)) >> 16) * jnp.uint32(self.num_actions)) >> 16).astype(jnp.int32)

    def observe(self, state: Any) -> Any:
        pixel = jax.lax.iota(jnp.uint32, math.prod(self.obs_shape)).reshape(self.obs_shape)
        noise = _mix(pixel * jnp.uint32(0x9E3779B9) ^ _moment(state)) >> 25
        row = jax.lax.broadcasted_iota(jnp.int32, self.obs_shape, 0)
        band = row * self.num_actions // self.obs_shape[0] == self.answer(state)
        image = noise + jnp.where(band, jnp.uint32(128), jnp.uint32(0))
        return image.astype(jnp.uint8) if self.obs_dtype == "uint8" else image.astype(jnp.float32) / 255

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after = SyntheticState(state.seed, state.time + 1)
        reward = (action == self.answer(state)).astype(jnp.float32)
        truncated = after.time >= self.episode_length
        return after, Step(reward, jnp.zeros_like(truncated), truncated, self.observe(after))


def _moment(state: SyntheticState) -> jax.Array:
    return _mix(state.seed + state.time.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words whose output bits look independent of its input's (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
