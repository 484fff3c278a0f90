"""What the adaptors of other packages share: observations that come with a step, and are kept beside the state."""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import installed, shown
from rlfx.envs.base import Environment, Step, no_such, strong
from rlfx.envs.gymnax import ObservedState, _as_gymnax_expects
from rlfx.envs.spaces import Box
from rlfx.errors import EnvError, located


@contextlib.contextmanager
def as_others_expect() -> Iterator[None]:
    """Implicit promotion, 32 bits, and no errors from warnings that are not ours."""
    with warnings.catch_warnings(), _as_gymnax_expects():
        warnings.simplefilter("ignore")
        yield


class Outside(Environment):
    """An environment of another package: what it observes is kept in the state, since only a reset and a step give it.

    A subclass gives :meth:`first` and :meth:`following` in the package's own words.

    Args:
      name: with the family's prefix.
      env: the package's environment.
      action_space: in our words; the observation space is that of the shapes and dtypes which a reset gives.
    """

    def __init__(self, name: str, env: Any, action_space: Any):
        self.name, self.env, self.action_space = name, env, action_space
        with as_others_expect():
            obs = jax.eval_shape(lambda key: strong(self.first(key)[0]), jax.random.key(0))
        self.observation_space = jax.tree.map(_any, obs)

    @abc.abstractmethod
    def first(self, key: jax.Array) -> tuple[Any, Any]:
        """The observation and the state of a new episode."""

    @abc.abstractmethod
    def following(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, dict]:
        """The observation, the state, the reward, whether the task ended, whether it was cut, and what else there is."""

    def reset(self, key: jax.Array) -> Any:
        with as_others_expect():
            obs, inner = self.first(key)
            return ObservedState(strong(inner), strong(obs))

    def observe(self, state: Any) -> Any:
        return state.obs

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        with as_others_expect():
            obs, inner, reward, terminated, truncated, info = self.following(key, state.inner, action)
            after = ObservedState(strong(inner, like=state.inner), strong(obs, like=state.obs))
            step = Step(
                reward=jnp.asarray(reward, jnp.float32),
                terminated=jnp.asarray(terminated, bool),
                truncated=jnp.asarray(truncated, bool),
                final_obs=after.obs,
                info=strong(info),
            )
        return after, step


def _any(x: Any) -> Box:
    """All arrays of a shape and a dtype."""
    if x.dtype == bool:
        return Box(False, True, x.shape, x.dtype)
    kind = np.iinfo(x.dtype) if np.issubdtype(x.dtype, np.integer) else None
    low, high = (-np.inf, np.inf) if kind is None else (kind.min, kind.max)
    return Box(low, high, x.shape, x.dtype)


def names(package: str, read: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """The names that a package offers; none if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ()
    with as_others_expect():
        return tuple(sorted(read()))


def built(
    family: str, name: str, available: tuple[str, ...], build: Callable[..., Any], kwargs: dict, package: str = ""
) -> Any:
    """What the package, named as the family if nothing else is said, makes of the name and the parameters.

    Raises:
      EnvError: the package is not installed, has no such environment, or does not take the parameters.
    """
    installed(f"{family}/{name}", package or family, family, EnvError)
    if name not in available:
        raise no_such(f"{family} has no environment {name!r}.", name, available, f"It has {', '.join(available)}.")
    try:
        with as_others_expect():
            return build(name, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{k}={shown(v)}" for k, v in kwargs.items()) or "no parameters"
        fact = f"{family}/{name} does not take {given}: {error}"
        raise EnvError(located(fact, fix=f"Its parameters are those of {family}'s own class.")) from error
