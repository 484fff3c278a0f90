"""gymnasium environments under the protocol: host code, called once for the whole batch, in order."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from rlfx._checks import BOOLEAN, TEXT, expect, installed, optional, shown
from rlfx.envs import info as infos
from rlfx.envs.base import Environment, Step
from rlfx.envs.spaces import Box, Discrete, is_space
from rlfx.errors import EnvError, located


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostState:
    """A ticket for an environment on the host: which batch, which one of it, and how many steps it has taken."""

    batch: Any
    slot: Any
    clock: Any
    obs: Any


class GymnasiumEnvironment(Environment):
    """A gymnasium environment. ``jax.vmap`` of it steps N copies in one ordered host call.

    Host environments have state that jax does not see, so a state can be stepped once: stepping an old one (a
    recomputation, a second rollout from the same states) is an error and not a silently wrong trajectory. A reset
    begins a new batch and closes the last one of this object. Without ``resets`` an episode that has ended stays so: steps
    after its end give its last observation again, with no reward.

    ``step.info`` has the numbers of gymnasium's: those that a first step gives, which is tried when the environment is made.
    They are of the step, not of the reset that may follow it; text and other objects stay on the host.

    Args:
      name: a registered gymnasium name.
      resets: begin a new episode on the host in the step in which the last one ended.
      info: which entries are kept, each with its value where a step has none: ``{"lap_finished": False}``. ``{}`` keeps
        none, and no step is tried.
      **kwargs: passed to ``gymnasium.make``.

    Raises:
      EnvError: gymnasium is not installed, has no such environment, or a dependency of it is missing; or it does not take
        the parameters, or ``info`` is no dict of numbers. A step whose info lacks what the first one had is one, too.

    Example:
      >>> env = GymnasiumEnvironment("CartPole-v1", resets=True)
      >>> env.observation_space.shape, env.action_space.n
      ((4,), 2)
      >>> env = GymnasiumEnvironment("FrozenLake-v1")
      >>> _, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(0))
      >>> {name: round(float(value), 2) for name, value in step.info.items()}
      {'prob': 0.33}
    """

    def __init__(self, name: str, *, resets: bool = False, info: dict[str, Any] | None = None, **kwargs: Any):
        name = expect("name", name, TEXT, EnvError, of="GymnasiumEnvironment")
        resets = expect("resets", resets, BOOLEAN, EnvError, of=f"gymnasium/{name}")
        info = expect("info", info, optional(infos.INFO), EnvError, of=f"gymnasium/{name}")
        self.name, self.resets, self.info, self.kwargs = name, resets, info, kwargs
        self._make, one = _maker(name, kwargs)
        self.observation_space, self.action_space = _space(one.observation_space), _space(one.action_space)
        self._info = infos.numeric(_first_info(one)) if info is None else info
        one.close()
        self._envs: list = []
        self._clocks: np.ndarray = np.zeros(0, np.int64)
        self._ends: dict[int, tuple] = {}
        self._batch = 0
        spaces = self.observation_space
        leaves = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), spaces, is_leaf=is_space)
        flag, reward = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
        ticket = jax.ShapeDtypeStruct((), jnp.int32)
        self._reset = _batched_callback(self._host_reset, (ticket, ticket, leaves))
        said = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._info)
        self._step = _batched_callback(self._host_step, (leaves, leaves, reward, flag, flag, said))

    def with_auto_reset(self) -> GymnasiumEnvironment:
        """The same environment, resetting itself on the host."""
        return GymnasiumEnvironment(self.name, resets=True, info=self.info, **self.kwargs)

    def reset(self, key: jax.Array) -> Any:
        batch, slot, obs = self._reset(jax.random.bits(key, (), jnp.uint32))
        return HostState(batch, slot, jnp.int32(0), obs)

    def observe(self, state: Any) -> Any:
        return state.obs

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        obs, final_obs, reward, terminated, truncated, info = self._step(state.batch, state.slot, state.clock, action)
        after = HostState(state.batch, state.slot, state.clock + 1, obs)
        return after, Step(reward, terminated, truncated, final_obs, info)

    # -- on the host -------------------------------------------------------------------------------------------------

    def _host_reset(self, seeds: np.ndarray):
        for env in self._envs:
            env.close()
        self._batch += 1
        self._envs = [self._make() for _ in seeds]
        self._clocks, self._ends = np.zeros(len(seeds), np.int64), {}
        first = [env.reset(seed=int(seed))[0] for env, seed in zip(self._envs, seeds, strict=True)]
        slots = np.arange(len(seeds), dtype=np.int32)
        return np.full_like(slots, self._batch), slots, self._stack(first)

    def _host_step(self, batches: np.ndarray, slots: np.ndarray, clocks: np.ndarray, actions: Any):
        slots = np.minimum(slots, len(self._clocks) - 1)  # those of an earlier, larger batch are stale
        over = np.isin(slots, list(self._ends)) & (clocks >= self._clocks[slots])
        if ((batches != self._batch) | ((clocks != self._clocks[slots]) & ~over)).any():
            fact = f"gymnasium/{self.name}: a state that was stepped before, or of an earlier reset, is stepped again."
            fix = "Host environments cannot go back: step the newest states, once each, and evaluate on another object of `make`."
            raise EnvError(located(fact, fix=fix))
        results = [
            self._ends[slot] if ended else self._one(slot, jax.tree.map(lambda a, i=i: np.asarray(a)[i], actions))
            for i, (slot, ended) in enumerate(zip(slots.tolist(), over, strict=True))
        ]
        obs, final, *scalars, info = zip(*results, strict=True)
        return (
            self._stack(obs),
            self._stack(final),
            *(np.asarray(x, d) for x, d in zip(scalars, (np.float32, bool, bool), strict=True)),
            jax.tree.map(lambda *xs: np.stack(xs), *info),
        )

    def _one(self, slot: int, action: Any):
        """One step of one environment; what steps after the end of its episode give is kept."""
        action = int(action) if isinstance(self.action_space, Discrete) and not self.action_space.shape else action
        final, reward, terminated, truncated, info = self._envs[slot].step(action)
        info = infos.read(f"gymnasium/{self.name}", self._info, info, default=self.info is not None)
        self._clocks[slot] += 1
        ended = terminated or truncated
        obs = self._envs[slot].reset()[0] if self.resets and ended else final
        if ended and not self.resets:
            self._ends[slot] = final, final, 0.0, terminated, truncated, info
        return obs, final, reward, terminated, truncated, info

    def _stack(self, observations: Any):
        return jax.tree.map(
            lambda s, *xs: np.stack([np.asarray(x, s.dtype) for x in xs]),
            self.observation_space,
            *observations,
            is_leaf=is_space,
        )


def _batched_callback(host: Any, one: Any):
    """An ordered callback that ``vmap`` (once, or nested) turns into one call for the whole batch."""

    def with_axes(lead: tuple[int, ...]):
        @custom_vmap
        def call(*args):
            def flat(*xs):
                n = math.prod(lead)
                xs = jax.tree.map(lambda x: np.asarray(x).reshape((n, *np.shape(x)[len(lead) :])), xs)
                out = host(*xs)
                return jax.tree.map(lambda x: x.reshape((*lead, *x.shape[1:])), out)

            shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype), one)
            return io_callback(flat, shapes, *args, ordered=True)

        @call.def_vmap
        def batched(size, is_batched, *args):
            full = jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(is_batched))
            out = with_axes((size, *lead))(*full)
            return out, jax.tree.map(lambda _: True, out)

        return call

    return with_axes(())


def _first_info(env: Any) -> dict[str, Any]:
    """What a first step says."""
    env.reset(seed=0)
    env.action_space.seed(0)
    return env.step(env.action_space.sample())[4]


def _space(space: Any) -> Any:
    import gymnasium.spaces as g

    if isinstance(space, g.Discrete) and int(space.start) == 0:
        return Discrete(int(space.n))
    if isinstance(space, g.Discrete):
        fact = f"gymnasium space {space} begins at {space.start}, and a Discrete begins at 0."
        raise EnvError(located(fact, fix="Shift it: gymnasium.wrappers.TransformAction or TransformObservation, with start=0."))
    if isinstance(space, g.MultiDiscrete) and len({*space.nvec.flat}) == 1 and not np.any(space.start):
        return Discrete(int(space.nvec.flat[0]), shape=tuple(space.nvec.shape))
    if isinstance(space, g.MultiDiscrete):
        fact = f"gymnasium space {space} has no counterpart here: its choices are of different sizes, or do not begin at 0."
        raise EnvError(located(fact, fix="Wrap it into a Tuple or a Dict of Discrete, one for each choice."))
    if isinstance(space, g.Box):
        dtype = infos.narrowed(space.dtype)
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        low, high = (np.clip(b, limits.min, limits.max) for b in (space.low, space.high))
        return Box(low, high, space.shape, dtype)
    if isinstance(space, g.MultiBinary):
        return Box(0, 1, tuple(space.shape), np.dtype("int8"))
    if isinstance(space, g.Dict):
        return {name: _space(child) for name, child in space.spaces.items()}
    if isinstance(space, g.Tuple):
        return tuple(_space(child) for child in space.spaces)
    raise EnvError(located(f"gymnasium space {space} has no counterpart here.", fix="Wrap it into Discrete or Box."))


def available() -> tuple[str, ...]:
    """The names gymnasium has registered; none if it is not installed."""
    if importlib.util.find_spec("gymnasium") is None:
        return ()
    import gymnasium

    return tuple(sorted(gymnasium.registry))


def make(name: str, **kwargs: Any) -> GymnasiumEnvironment:
    """The gymnasium environment ``name``; see :class:`GymnasiumEnvironment`."""
    return GymnasiumEnvironment(name, **kwargs)


def _maker(name: str, kwargs: dict[str, Any]) -> tuple[Callable[[], Any], Any]:
    """A function that makes environments on the host, and the first that it made."""
    installed(f"gymnasium/{name}", "gymnasium", "gymnasium", EnvError)
    import gymnasium

    def host() -> Any:
        return gymnasium.make(name, **kwargs)

    try:
        return host, host()
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise EnvError(located(f"gymnasium/{name}: {error}", fix="pip install the package it names.")) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise EnvError(located(f"gymnasium/{name}: {error}", fix="See rlfx.envs.list_envs().")) from error
    except (gymnasium.error.Error, TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{k}={shown(v)}" for k, v in kwargs.items())
        fact = f"gymnasium/{name} does not take {given or 'to be made'}: {error}"
        raise EnvError(located(fact, fix=f"Its parameters are those of gymnasium.make({name!r}).")) from error
