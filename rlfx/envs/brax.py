"""brax's rigid-body simulators under the protocol: typed keys, time limits and automatic resets of our own."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE, TEXT, Kind, expect, installed, one_of, optional, shown
from rlfx.envs.base import Environment, Step, no_such, strong
from rlfx.envs.episodes import time_limit
from rlfx.envs.gymnax import _as_gymnax_expects
from rlfx.envs.spaces import Box
from rlfx.errors import EnvError, located

BACKENDS = ("generalized", "positional", "spring", "mjx")


@contextlib.contextmanager
def _as_brax_expects():
    """brax counts on implicit promotion; it and its dependencies warn that they are no longer maintained."""
    with warnings.catch_warnings(), _as_gymnax_expects():
        warnings.simplefilter("ignore")
        yield


def _envs() -> Any:
    """``brax.envs``; its import prints what it did not find."""
    with _as_brax_expects(), contextlib.redirect_stdout(io.StringIO()):
        import brax.envs
    return brax.envs


def _resets(env: Any) -> Any:
    if isinstance(env, type) or not all(hasattr(env, name) for name in ("reset", "step", "action_size")):
        raise TypeError
    return env


_BRAX = Kind("an environment of brax", 'brax.envs.get_environment("ant")', _resets)


class BraxEnvironment(Environment):
    """A brax environment without brax's training wrappers, which fail with typed keys under ``scan``.

    ``terminated`` is brax's ``done`` (the robot fell); brax has no truncation of its own. The state is brax's own.

    Example:
      >>> from rlfx.envs import make
      >>> env = make("brax/fast", auto_reset=False)
      >>> env.observe(env.reset(jax.random.key(0))).shape
      (2,)
    """

    def __init__(self, name: str, env: Any):
        name = expect("name", name, TEXT, EnvError, of="BraxEnvironment")
        expect("env", env, _BRAX, EnvError, of="BraxEnvironment")
        self.name, self.env = f"brax/{name}", env
        with _as_brax_expects():
            state = jax.eval_shape(env.reset, jax.random.key(0))
        self.observation_space = jax.tree.map(lambda x: Box(-jnp.inf, jnp.inf, x.shape, x.dtype), state.obs)
        self.action_space = Box(-1.0, 1.0, (env.action_size,))

    def reset(self, key: jax.Array) -> Any:
        with _as_brax_expects():
            return strong(self.env.reset(key))

    def observe(self, state: Any) -> Any:
        return state.obs

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        with _as_brax_expects():
            after = strong(self.env.step(state, action), like=state)
        step = Step(
            reward=after.reward.astype(jnp.float32),
            terminated=after.done.astype(bool),
            truncated=jnp.zeros((), bool),
            final_obs=after.obs,
            info=dict(after.metrics),
        )
        return after, step


def available() -> tuple[str, ...]:
    """The names brax has registered; none if it is not installed."""
    if importlib.util.find_spec("brax") is None:
        return ()
    return tuple(sorted(_envs()._envs))


def make(name: str, *, backend: str | None = None, episode_length: int = 1000, **kwargs: Any) -> Environment:
    """The brax environment ``name``, truncated after ``episode_length`` steps.

    Args:
      name: a name that brax registers, such as ``"ant"``.
      backend: the physics pipeline: ``"generalized"``, ``"positional"``, ``"spring"`` or ``"mjx"``; brax's default if
        None.
      episode_length: steps until truncation.
      **kwargs: of brax's environment.

    Raises:
      EnvError: brax is not installed, or has no such environment.
    """
    installed(f"brax/{name}", "brax", "envs", EnvError)
    if name not in available():
        raise no_such(f"brax has no environment {name!r}.", name, available(), f"It has {', '.join(available())}.")
    backend = expect("backend", backend, optional(one_of(*BACKENDS)), EnvError, of=f"brax/{name}")
    episode_length = expect("episode_length", episode_length, POSITIVE, EnvError, of=f"brax/{name}")
    options = kwargs if backend is None else {**kwargs, "backend": backend}
    try:
        with _as_brax_expects():
            env = _envs().get_environment(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        fact = f"brax/{name} does not take {', '.join(f'{k}={shown(v)}' for k, v in options.items())}: {error}"
        raise EnvError(located(fact, fix="Its parameters are those of the class in brax.envs.")) from error
    return time_limit(BraxEnvironment(name, env), episode_length)
