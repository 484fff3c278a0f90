"""Functions from environments to environments: statistics, normalisation, frame stacks, repeats and clips."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from rlfx._checks import POSITIVE, expect, number
from rlfx.envs.base import Environment, Step, checked_environment
from rlfx.envs.episodes import Wrapper, select
from rlfx.envs.spaces import Box, Space, is_space
from rlfx.errors import EnvError, located

_CLIP = number(above=0)
_BOUND = number(infinite=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrappedState:
    """The inner state, and what the wrapper remembers."""

    inner: Any
    memory: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Remembering(Wrapper):
    def observe(self, state: Any) -> Any:
        return self.env.observe(state.inner)


@dataclasses.dataclass(frozen=True, eq=False)
class _EpisodeStatistics(_Remembering):
    over_resets = same_steps = True

    def reset(self, key: jax.Array) -> Any:
        return WrappedState(self.env.reset(key), (jnp.float32(0), jnp.int32(0)))

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        inner, step = self.env.step(key, state.inner, action)
        total, length = state.memory[0] + step.reward, state.memory[1] + 1
        done = step.terminated | step.truncated
        memory = (jnp.where(done, 0.0, total), jnp.where(done, 0, length))
        info = {**step.info, "episode_return": total, "episode_length": length}
        return WrappedState(inner, memory), dataclasses.replace(step, info=info)


def episode_statistics(env: Environment) -> Environment:
    """``env`` whose ``info`` has ``episode_return`` (float32) and ``episode_length`` (int32) so far.

    They are those of the whole episode where the step is terminated or truncated.

    Example:
      >>> from rlfx.envs import make
      >>> env = episode_statistics(make("MountainCar-v0"))
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(0))
      >>> float(step.info["episode_return"]), int(step.info["episode_length"])
      (-1.0, 1)
    """
    checked_environment("episode_statistics", env)
    return _EpisodeStatistics(env)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Running mean and sum of squared deviations of ``count`` values (Welford), all float32."""

    count: Any
    mean: Any
    squares: Any

    @classmethod
    def of(cls, x: Any) -> Moments:
        """The moments of one value."""
        return cls(jnp.float32(1), x.astype(jnp.float32), jnp.zeros_like(x, jnp.float32))

    def after(self, x: Any) -> Moments:
        """With one more value."""
        count = self.count + 1
        gap = x - self.mean
        mean = self.mean + gap / count
        return Moments(count, mean, self.squares + gap * (x - mean))

    @property
    def deviation(self) -> Any:
        """The standard deviation; 1 until there are two values."""
        variance = jnp.where(self.count > 1, self.squares / jnp.maximum(self.count - 1, 1), 1.0)
        return jnp.sqrt(variance + 1e-8)


@dataclasses.dataclass(frozen=True, eq=False)
class _NormalizeObservation(_Remembering):
    over_resets = same_steps = endures = True
    clip: float = 10.0

    @property
    def observation_space(self) -> Space:
        return Box(-self.clip, self.clip, self.env.observation_space.shape)

    def reset(self, key: jax.Array) -> Any:
        inner = self.env.reset(key)
        return WrappedState(inner, Moments.of(self.env.observe(inner)))

    def _scaled(self, obs, moments):
        return jnp.clip((obs - moments.mean) / moments.deviation, -self.clip, self.clip)

    def observe(self, state: Any) -> Any:
        return self._scaled(self.env.observe(state.inner), state.memory)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        inner, step = self.env.step(key, state.inner, action)
        moments = state.memory.after(step.final_obs.astype(jnp.float32))
        final_obs = self._scaled(step.final_obs, moments)
        if self.env.resets:  # the first observation of the new episode counts, too
            moments = select(step.done, moments.after(self.env.observe(inner).astype(jnp.float32)), moments)
        return WrappedState(inner, moments), dataclasses.replace(step, final_obs=final_obs)


def normalize_observation(env: Environment, *, clip: float = 10.0) -> Environment:
    """``env`` with observations ``(obs - mean) / deviation`` clipped to ``±clip``, running moments in the state.

    The moments are those of one environment, through its episodes: ``auto_reset`` goes beneath it. Moments shared by a
    batch are a ``Shared`` carry of the program, not a property of an environment.

    Raises:
      EnvError: the observation is not one box, or ``clip`` is not positive.

    Example:
      >>> from rlfx.envs import make
      >>> env = normalize_observation(make("Pendulum-v1"))
      >>> env.observe(env.reset(jax.random.key(0)))
      Array([0., 0., 0.], dtype=float32)
    """
    checked_environment("normalize_observation", env)
    clip = expect("clip", clip, _CLIP, EnvError, of="normalize_observation")
    if not isinstance(env.observation_space, Box):
        fact = f"normalize_observation: {env.name} observes {env.observation_space}."
        raise EnvError(located(fact, fix="Normalise the numeric parts in the agent."))
    return _NormalizeObservation(env, clip)


@dataclasses.dataclass(frozen=True, eq=False)
class _NormalizeReward(_Remembering):
    over_resets = same_steps = endures = True
    gamma: float = 0.99
    clip: float = 10.0

    def reset(self, key: jax.Array) -> Any:
        return WrappedState(self.env.reset(key), (jnp.float32(0), Moments.of(jnp.float32(0))))

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        inner, step = self.env.step(key, state.inner, action)
        discounted = self.gamma * state.memory[0] + step.reward
        moments = state.memory[1].after(discounted)
        scaled = jnp.clip(step.reward / moments.deviation, -self.clip, self.clip)
        discounted = jnp.where(step.terminated | step.truncated, 0.0, discounted)
        info = {**step.info, "reward": step.reward}
        return WrappedState(inner, (discounted, moments)), dataclasses.replace(step, reward=scaled, info=info)


def normalize_reward(env: Environment, *, gamma: float = 0.99, clip: float = 10.0) -> Environment:
    """``env`` with rewards divided by the running deviation of their discounted sum; ``info["reward"]`` is the raw one.

    The deviation is that of one environment, through its episodes: ``auto_reset`` goes beneath it.

    Raises:
      EnvError: ``clip`` is not positive, or ``gamma`` not in [0, 1].

    Example:
      >>> from rlfx.envs import make
      >>> env = normalize_reward(make("Pendulum-v1"))
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.zeros(1))
      >>> bool(jnp.abs(step.reward) <= 10)
      True
    """
    checked_environment("normalize_reward", env)
    gamma = expect("gamma", gamma, number(0, 1), EnvError, of="normalize_reward")
    return _NormalizeReward(env, gamma, expect("clip", clip, _CLIP, EnvError, of="normalize_reward"))


@dataclasses.dataclass(frozen=True, eq=False)
class _FrameStack(_Remembering):
    over_resets = same_steps = True
    frames: int = 4

    @property
    def observation_space(self) -> Space:
        space = self.env.observation_space
        low, high = (np.broadcast_to(b, (self.frames, *space.shape)) for b in (space.low, space.high))
        return Box(low, high, (self.frames, *space.shape), space.dtype)

    def reset(self, key: jax.Array) -> Any:
        inner = self.env.reset(key)
        return WrappedState(inner, self._first(inner))

    def _first(self, inner):
        obs = self.env.observe(inner)
        return jnp.broadcast_to(obs, (self.frames, *obs.shape))

    def observe(self, state: Any) -> Any:
        return state.memory

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        inner, step = self.env.step(key, state.inner, action)
        frames = jnp.concatenate([state.memory[1:], step.final_obs[None]])
        begun = jnp.where(step.done, self._first(inner), frames) if self.env.resets else frames
        return WrappedState(inner, begun), dataclasses.replace(step, final_obs=frames)


def frame_stack(env: Environment, frames: int) -> Environment:
    """``env`` that observes its last ``frames`` observations, oldest first, on a new leading axis.

    An episode begins with copies of its first observation, also where ``env`` begins it by itself.

    Raises:
      EnvError: ``frames`` is not positive, or the observation is not one box.

    Example:
      >>> from rlfx.envs import auto_reset, make
      >>> env = auto_reset(frame_stack(make("CartPole-v1", auto_reset=False), 3))
      >>> env.observe(env.reset(jax.random.key(0))).shape
      (3, 4)
    """
    checked_environment("frame_stack", env)
    frames = expect("frames", frames, POSITIVE, EnvError, of="frame_stack")
    if not isinstance(env.observation_space, Box):
        fact = f"frame_stack of {env.name}, which observes {env.observation_space}."
        raise EnvError(located(fact, fix="Stack the frames of an environment that observes a Box."))
    return _FrameStack(env, frames)


@dataclasses.dataclass(frozen=True, eq=False)
class _ActionRepeat(Wrapper):
    over_resets = True
    repeats: int = 1

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        keys = jax.random.split(key, self.repeats)
        state, step = self.env.step(keys[0], state, action)
        for i in range(1, self.repeats):
            ended = step.terminated | step.truncated
            following, more = self.env.step(keys[i], state, action)
            more = dataclasses.replace(more, reward=step.reward + more.reward)
            state, step = select(ended, state, following), select(ended, step, more)
        return state, step


def action_repeat(env: Environment, repeats: int) -> Environment:
    """``env`` that takes each action ``repeats`` times, summing rewards, and stops where the episode ends.

    Raises:
      EnvError: ``repeats`` is not a positive integer.

    Example:
      >>> from rlfx.envs import make
      >>> env = action_repeat(make("MountainCar-v0", auto_reset=False), 4)
      >>> float(env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(0))[1].reward)
      -4.0
    """
    checked_environment("action_repeat", env)
    return _ActionRepeat(env, expect("repeats", repeats, POSITIVE, EnvError, of="action_repeat"))


@dataclasses.dataclass(frozen=True, eq=False)
class _ClipReward(Wrapper):
    over_resets = same_steps = True
    low: float = -1.0
    high: float = 1.0

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        state, step = self.env.step(key, state, action)
        return state, dataclasses.replace(step, reward=jnp.clip(step.reward, self.low, self.high))


def clip_reward(env: Environment, low: float = -1.0, high: float = 1.0) -> Environment:
    """``env`` with rewards clipped to ``[low, high]``.

    Raises:
      EnvError: ``low`` is not below ``high``.

    Example:
      >>> from rlfx.envs import make
      >>> env = clip_reward(make("Pendulum-v1"), -0.5, 0.5)
      >>> float(env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.zeros(1))[1].reward) >= -0.5
      True
    """
    checked_environment("clip_reward", env)
    low = expect("low", low, _BOUND, EnvError, of="clip_reward")
    high = expect("high", high, _BOUND, EnvError, of="clip_reward")
    if not low < high:
        raise EnvError(located(f"clip_reward: low={low:g}, high={high:g}.", fix="Give low < high."))
    return _ClipReward(env, low, high)


@dataclasses.dataclass(frozen=True, eq=False)
class _ClipAction(Wrapper):
    over_resets = same_steps = True

    @property
    def action_space(self) -> Space:
        space = self.env.action_space
        return Box(-jnp.inf, jnp.inf, space.shape, space.dtype)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        space = self.env.action_space
        return self.env.step(key, state, jnp.clip(action, space.low, space.high))


def clip_action(env: Environment) -> Environment:
    """``env`` that takes any numbers as actions, and clips them to the bounds of its action space.

    Raises:
      EnvError: the action space is not one box.

    Example:
      >>> from rlfx.envs import make
      >>> env = clip_action(make("MountainCarContinuous-v0"))
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.array([9.0]))
      >>> round(float(step.reward), 3)
      -0.1
    """
    checked_environment("clip_action", env)
    if not isinstance(env.action_space, Box):
        fact = f"clip_action: {env.name} takes {env.action_space}."
        raise EnvError(located(fact, fix="Only the actions of a Box can be clipped."))
    return _ClipAction(env)


@dataclasses.dataclass(frozen=True, eq=False)
class _CheckActions(Wrapper):
    over_resets = same_steps = True

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        spaces = jax.tree.leaves(self.env.action_space, is_leaf=is_space)
        for space, leaf in zip(spaces, jax.tree.leaves(action), strict=True):
            message = located(f"{self.name}: action {{action}} is outside {space}.", fix="Clip it, or mask the logits.")
            checkify.check(space.contains(leaf), message, action=leaf)
        return self.env.step(key, state, action)


def check_actions(env: Environment) -> Environment:
    """``env`` that checks every action inside ``jit``, for debugging: functionalise with ``checkify.checkify``.

    Example:
      >>> from rlfx.envs import make
      >>> env = check_actions(make("CartPole-v1"))
      >>> step = jax.jit(checkify.checkify(env.step))
      >>> error, _ = step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(2))
      >>> "CartPole-v1: action 2 is outside Discrete(n=2" in error.get()
      True
    """
    checked_environment("check_actions", env)
    return _CheckActions(env)
