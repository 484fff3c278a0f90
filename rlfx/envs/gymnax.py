"""gymnax environments under the protocol (gymnax ≥ 1.0.1, whose steps tell termination from truncation)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import BOOLEAN, Kind, expect, installed, optional, scalar, shown
from rlfx.envs.base import Environment, Step, no_such, strong
from rlfx.envs.spaces import Box, Discrete
from rlfx.errors import EnvError, located

# Built-in environments whose observation needs more than the state (a key, or the state before the step).
_OBSERVES_MORE_THAN_STATE = frozenset({"MemoryChain-bsuite", "UmbrellaChain-bsuite"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedState:
    """A gymnax state with the observation it came with."""

    inner: Any
    obs: Any


def _steps(env: Any) -> Any:
    if not all(callable(getattr(env, name, None)) for name in ("reset_env", "step_env")):
        raise TypeError
    return env


_GYMNAX = Kind("an environment of gymnax", "env", _steps)


@contextlib.contextmanager
def _as_gymnax_expects():
    """gymnax counts on implicit dtype and rank promotion, and on 32 bits: many of its steps do not trace with x64."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


def _space(space: Any) -> Any:
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        return Box(np.asarray(space.low), np.asarray(space.high), tuple(space.shape), np.dtype(space.dtype))
    if isinstance(space, spaces.Dict):
        return {name: _space(child) for name, child in space.spaces.items()}
    return tuple(_space(child) for child in space.spaces)


class GymnaxEnvironment(Environment):
    """A gymnax environment and its parameters, without automatic reset.

    ``auto_reset(GymnaxEnvironment(env, params)).step`` equals ``env.step`` of gymnax, key by key.

    Args:
      env: a gymnax environment.
      params: its parameters; the default ones if None.
      store_observation: keep the observation in the state instead of computing it from the state. None: only where it
        has to be (built-in environments that observe a key, or the previous state, and every other environment).

    Example:
      >>> import gymnax
      >>> env = GymnaxEnvironment(*gymnax.make("Pendulum-v1"))
      >>> env.observe(env.reset(jax.random.key(0))).shape
      (3,)
    """

    def __init__(self, env: Any, params: Any = None, *, store_observation: bool | None = None):
        expect("env", env, _GYMNAX, EnvError, of="GymnaxEnvironment", fix='Give gymnax.make("CartPole-v1")[0].')
        stored = optional(BOOLEAN)
        store_observation = expect("store_observation", store_observation, stored, EnvError, of="GymnaxEnvironment")
        if params is not None and type(params) is not type(env.default_params):
            fact = f"GymnaxEnvironment: params of {env.name} is {shown(params)}."
            raise EnvError(located(fact, fix="Give env.default_params.replace(...), or None."))
        self.env = env
        self.params = env.default_params if params is None else params
        self.name = env.name
        if store_observation is None:
            store_observation = not _observes_state(env)
        self.store_observation = store_observation
        with _as_gymnax_expects():
            self.action_space = _space(env.action_space(self.params))
            obs = jax.eval_shape(env.reset_env, jax.random.key(0), self.params)[0]
            self.observation_space = _agreeing(_space(env.observation_space(self.params)), obs)

    def reset(self, key: jax.Array) -> Any:
        with _as_gymnax_expects():
            obs, state = self.env.reset_env(key, self.params)
            state = strong(state)
            return ObservedState(state, strong(obs)) if self.store_observation else state

    def observe(self, state: Any) -> Any:
        if self.store_observation:
            return state.obs
        with _as_gymnax_expects():
            return strong(self.env.observe(None, state, None, self.params))

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        inner = state.inner if self.store_observation else state
        with _as_gymnax_expects():
            obs, after, reward, terminated, info = self.env.step_env(key, inner, action, self.params)
            truncated = self.env.is_truncated(after, self.params)
            after = strong(after, like=inner)
            obs = strong(obs, like=state.obs) if self.store_observation else strong(obs)
            step = Step(
                reward=jnp.asarray(reward, jnp.float32).reshape(()),
                terminated=jnp.asarray(terminated, bool).reshape(()),
                truncated=jnp.asarray(truncated, bool).reshape(()),
                final_obs=obs,
                info=strong(info),
            )
        return ObservedState(after, obs) if self.store_observation else after, step


def _observes_state(env: Any) -> bool:
    return type(env).__module__.startswith("gymnax.") and env.name not in _OBSERVES_MORE_THAN_STATE


def _agreeing(space: Any, obs: Any) -> Any:
    """gymnax's declared dtypes do not always match what it returns (Catch): trust what it returns."""
    if isinstance(space, Box) and hasattr(obs, "shape") and (space.shape, space.dtype) != (obs.shape, obs.dtype):
        return Box(np.min(space.low), np.max(space.high), obs.shape, np.dtype(obs.dtype))
    return space


def available() -> tuple[str, ...]:
    """The names gymnax offers; none if gymnax is not installed."""
    if importlib.util.find_spec("gymnax") is None:
        return ()
    with _as_gymnax_expects():  # its modules make arrays
        from gymnax import registration

    return tuple(registration.registered_envs)


def make(name: str, **kwargs: Any) -> GymnaxEnvironment:
    """The gymnax environment ``name``; arguments that name a field of its parameters set it, others build it.

    Raises:
      EnvError: gymnax is not installed, or refuses the arguments.
    """
    installed(name, "gymnax", "envs", EnvError)
    if name not in available():
        raise no_such(f"gymnax has no environment {name!r}.", name, available(), f"It has {', '.join(available())}.")
    import gymnax

    with _as_gymnax_expects():
        default = gymnax.make(name)[1]
    fields = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    given = {k: expect(k, v, _kind(fields[k]), EnvError, of=name) for k, v in kwargs.items() if k in fields}
    try:
        with _as_gymnax_expects():
            env, params = gymnax.make(name, **{k: v for k, v in kwargs.items() if k not in fields})
    except TypeError as error:
        raise EnvError(located(f"{name}: {error}", fix=f"Its parameters are {', '.join(sorted(fields))}.")) from error
    return GymnaxEnvironment(env, params.replace(**given))


def _kind(default: Any) -> Kind:
    """What a parameter takes, by its default: gymnax itself takes anything, and fails in the first step."""
    if isinstance(default, bool):
        return BOOLEAN
    if isinstance(default, int):
        return scalar(whole=True)
    if isinstance(default, float):
        return scalar()
    return Kind("a parameter of gymnax's", repr(default), lambda value: value)
