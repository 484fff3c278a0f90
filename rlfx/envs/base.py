"""The environment protocol: pure functions of one environment; batch with ``jax.vmap``, never by hand."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import KEY, Kind, expect, instance, scalar
from rlfx.envs.spaces import Box, Discrete, Space, is_space
from rlfx.errors import EnvError, located

STEP_SCOPE = "rlfx.env.step"
"""The ``jax.named_scope`` of every environment step: how a compiler recognises equations it must not run beyond T."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What one step returns beside the next state.

    Attributes:
      reward: ``float32[()]``.
      terminated: ``bool[()]``, the task ended: the value of what follows is zero.
      truncated: ``bool[()]``, the episode was cut (a time limit): what follows has a value, that of ``final_obs``.
      final_obs: the observation this step led to, *before* any automatic reset.
      info: a dict of arrays, the same structure at every step.
    """

    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any
    info: Any = dataclasses.field(default_factory=dict)

    @property
    def done(self) -> Any:
        """Whether the episode ended here, either way; ``bool[()]``."""
        return self.terminated | self.truncated

    def replace(self, **changes: Any) -> Step:
        """This step with other values for some fields: ``step.replace(reward=0.1 * step.reward)``."""
        return dataclasses.replace(self, **changes)


class Spaces(NamedTuple):
    """The observation and the action space of an environment.

    Attributes:
      observation: what ``env.observe`` gives.
      action: what ``env.step`` takes.
    """

    observation: Space
    action: Space


REAL = scalar()
ABOVE_ZERO = scalar(above=0)


def parameter(default: Any, kind: Kind) -> Any:
    """A field of an environment that is a dataclass: what it is by default, and the kind that it must be of."""
    return dataclasses.field(default=default, metadata={"kind": kind})


class Environment(abc.ABC):
    """One environment, as pure functions on frozen pytrees.

    A subclass gives ``name``, the two spaces, and :meth:`reset`, :meth:`observe` and :meth:`transition`; users call
    :meth:`step`. State in and state out have equal structure, shapes and dtypes, so that ``jax.lax.scan`` can carry it.

    Example:
      >>> from rlfx.envs import make
      >>> env = make("CartPole-v1")
      >>> state = env.reset(jax.random.key(0))
      >>> state, step = env.step(jax.random.key(1), state, jnp.int32(1))
      >>> env.observe(state).shape, step.reward
      ((4,), Array(1., dtype=float32))
    """

    name: str
    observation_space: Space
    action_space: Space
    resets: bool = False
    """Whether the step that ends an episode begins the next one (``auto_reset`` does; say so if yours does)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """``reset`` is given a key, as ``step`` is, whoever wrote it."""
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(reset := vars(cls).get("reset")):
            cls.reset = _with_key(reset)

    def __post_init__(self) -> None:
        """Of a dataclass: every parameter is of its kind."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if kind := field.metadata.get("kind"):
                value = expect(field.name, getattr(self, field.name), kind, EnvError, of=type(self).__name__)
                object.__setattr__(self, field.name, value)

    @property
    def spaces(self) -> Spaces:
        """The observation and the action space."""
        return Spaces(self.observation_space, self.action_space)

    @abc.abstractmethod
    def reset(self, key: jax.Array) -> Any:
        """The first state of an episode, a frozen pytree of arrays. What is no key is an EnvError."""

    @abc.abstractmethod
    def observe(self, state: Any) -> Any:
        """What the agent sees in ``state``: a value of ``observation_space``."""

    @abc.abstractmethod
    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        """The dynamics, without checks: the next state, and what the step returned."""

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        """One step: ``(next state, Step)``. ``key`` is used once, ``action`` is a value of ``action_space``.

        Raises:
          EnvError: the key is none, or the action has the wrong shape or dtype, or is a concrete value outside the space.
        """
        key = expect("key", key, KEY, EnvError, of=f"{self.name}: step")
        action = checked_action(self, action)
        with jax.named_scope(STEP_SCOPE):
            return self.transition(key, state, action)


def _with_key(reset: Callable[..., Any]) -> Callable[..., Any]:
    """A ``reset`` whose key is checked."""

    @functools.wraps(reset)
    def checked(self: Any, key: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self, "name", type(self).__name__)
        return reset(self, expect("key", key, KEY, EnvError, of=f"{name}: reset"), *args, **kwargs)

    return checked


def checked_action(env: Any, action: Any) -> Any:
    """The action as arrays of the space's dtype; wrong structures, shapes, dtypes and concrete values are errors."""
    spaces, tree = jax.tree.flatten(env.action_space, is_leaf=is_space)
    leaves, action_tree = jax.tree.flatten(action)
    if tree != action_tree:
        fact = f"{env.name}: the action has structure {action_tree}, the action space has {tree}."
        raise EnvError(located(fact, fix=f"Give a value of {env.action_space}."))
    return jax.tree.unflatten(tree, [_checked_leaf(env.name, s, a) for s, a in zip(spaces, leaves, strict=True)])


def _checked_leaf(name: str, space: Discrete | Box, action: Any) -> jax.Array:
    try:
        action = jnp.asarray(action)
    except (TypeError, ValueError, OverflowError):
        fact = f"{name}: the action is {type(action).__name__} ({action!r}), not an array."
        raise EnvError(located(fact, fix=f"Give a value of {space}.")) from None
    kinds = [np.integer] if isinstance(space, Discrete) else [np.integer, np.floating]
    if action.shape != space.shape:
        hint = " Steps take one environment: batch them with jax.vmap." if action.ndim > len(space.shape) else ""
        fact = f"{name}: the action has shape {action.shape}, the action space {space} needs {space.shape}."
        raise EnvError(located(fact, fix=f"Reshape the action to {space.shape}.{hint}"))
    if not any(jnp.issubdtype(action.dtype, kind) for kind in kinds):
        fact = f"{name}: the action has dtype {action.dtype}, the action space {space} needs {np.dtype(space.dtype)}."
        raise EnvError(located(fact, fix=f"Cast it: action.astype({np.dtype(space.dtype).name!r})."))
    action = action.astype(space.dtype)
    if not isinstance(action, jax.core.Tracer) and not _holds(space, action):
        clip = "Clip it: rlfx.envs.clip_action(env)."
        fix = f"Actions are 0, ..., {space.n - 1}." if isinstance(space, Discrete) else clip
        raise EnvError(located(f"{name}: action {action} is outside {space}.", fix=fix))
    return action


def _holds(space: Discrete | Box, action: jax.Array) -> bool:
    """Whether a known action is inside, also while a function that closes over it is traced."""
    with jax.ensure_compile_time_eval():
        return bool(space.contains(action))


_ENVIRONMENT = instance(Environment, "an environment", 'rlfx.envs.make("CartPole-v1")')


def checked_environment(user: str, env: Any) -> Any:
    """The environment that ``user``, a function, was given; an EnvError if it is none."""
    fix = "Give what rlfx.envs.make returns, or an rlfx.envs.Environment."
    return expect("env", env, _ENVIRONMENT, EnvError, of=user, fix=fix)


def no_such(fact: str, name: str, names: Iterable[str], otherwise: str) -> EnvError:
    """The error for a name that does not exist: suggests the nearest ones."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return EnvError(located(fact, fix=f"Did you mean {', '.join(map(repr, near))}?" if near else otherwise))


def strong(tree: Any, like: Any = None) -> Any:
    """Arrays without weak types (of the dtypes of ``like``, where given), so that a scan can carry them."""

    def cast(x, ref):
        dtype = ref.dtype if hasattr(ref, "dtype") else jnp.asarray(ref).dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return x
        return jax.lax.convert_element_type(jnp.asarray(x), dtype)

    return jax.tree.map(cast, tree, tree if like is None else like)
