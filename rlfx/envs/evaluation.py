"""How good a policy is: whole episodes, each counted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE, expect, function
from rlfx.envs.base import Environment, checked_environment
from rlfx.envs.episodes import select
from rlfx.errors import EnvError, located


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` saw of each episode.

    Attributes:
      returns: the undiscounted sums of rewards, ``float32[episodes]``.
      lengths: steps, ``int32[episodes]``.
      ended: whether it ended within ``max_steps``, ``bool[episodes]``.
    """

    returns: Any
    lengths: Any
    ended: Any

    @property
    def mean_return(self) -> Any:
        """The mean over episodes, ``float32[()]``."""
        return self.returns.mean()

    @property
    def mean_length(self) -> Any:
        """The mean over episodes, ``float32[()]``."""
        return self.lengths.astype(jnp.float32).mean()


def evaluate(
    env: Environment,
    policy: Callable[..., Any],
    params: Any,
    key: jax.Array,
    episodes: int = 100,
    *,
    memory: Any = None,
    max_steps: int = 100_000,
) -> Evaluation:
    """Play ``episodes`` whole episodes, all at once: each environment plays one, so short ones count no more than long ones.

    It is a pure function, compiled at its first call for an environment and a policy (the same objects: make the
    policy once). Inside ``jit`` and ``vmap`` it is a part of what is compiled there.

    Args:
      env: an environment, with automatic resets or without.
      policy: ``policy(params, obs, key) -> action``, of one observation; greedy ones need no ``key``. With ``memory`` it
        is ``policy(params, memory, obs, key) -> (action, memory)``.
      params: what the policy takes; moments of observations are a part of it: ``moments(obs)`` counts nothing.
      key: a typed key.
      episodes: how many episodes.
      memory: what a recurrent policy begins each episode with, a pytree of arrays of one environment.
      max_steps: where an episode that goes on is left, with ``ended`` False.

    Raises:
      EnvError: ``env`` is no environment or can't be hashed, a number is not a positive integer, or ``policy`` returned
        something else than an action (and memory like ``memory``).

    Example:
      >>> from rlfx.envs import make
      >>> result = evaluate(make("CartPole-v1"), lambda params, obs, key: jnp.int32(1), None, jax.random.key(0), 20)
      >>> result.returns.shape, bool(8 <= result.mean_return <= 11), bool(result.ended.all())
      ((20,), True, True)
    """
    checked_environment("evaluate", env)
    episodes = expect("episodes", episodes, POSITIVE, EnvError, of="evaluate")
    max_steps = expect("max_steps", max_steps, POSITIVE, EnvError, of="evaluate")
    if not callable(policy):
        fact = f"evaluate: the policy is {type(policy).__name__} ({policy!r}), which can't be called."
        raise EnvError(located(fact, fix="Give a function policy(params, obs, key) -> action."))
    takes = ("params", "obs", "key") if memory is None else ("params", "memory", "obs", "key")
    expect("policy", policy, function(*takes), EnvError, of="evaluate")
    for what in (env, policy):
        try:
            hash(what)
        except TypeError:
            fact = f"evaluate: {type(what).__name__} can't be hashed, so what is compiled for it can't be found again."
            raise EnvError(located(fact, fix="Make it a frozen dataclass, or a function.")) from None
    return _evaluate(env, policy, int(episodes), int(max_steps), params, memory, key)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _evaluate(env, policy, episodes, max_steps, params, memory, key):
    reset_key, play_key = jax.random.split(key)

    act = acting("evaluate", policy, params)

    def play(keys, state, memory, result):
        """One step of one environment, unless its episode has ended."""
        action, remembered = act(memory, env.observe(state), keys[0])
        after, step = env.step(keys[1], state, action)
        following = Evaluation(
            result.returns + step.reward.astype(jnp.float32), result.lengths + 1, step.terminated | step.truncated
        )
        # The environment plays on, uncounted: one on the host can't be held at a state that it has left.
        return after, *select(result.ended, (memory, result), (remembered, following))

    many = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (episodes, *jnp.shape(x))), tree)  # noqa: E731
    nothing = many(Evaluation(jnp.float32(0), jnp.int32(0), jnp.bool_(False)))
    states = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))

    def step_all(loop):
        time, *episode = loop
        keys = jax.random.split(jax.random.fold_in(play_key, time), (episodes, 2))
        return time + 1, *jax.vmap(play)(keys, *episode)

    def some_goes_on(loop):
        return (loop[0] < max_steps) & ~loop[3].ended.all()

    begin = (jnp.int32(0), states, many(memory), nothing)
    return jax.lax.while_loop(some_goes_on, step_all, begin)[3]


def acting(of: str, policy: Callable[..., Any], params: Any) -> Callable[[Any, Any, jax.Array], tuple[Any, Any]]:
    """``policy`` as a function of memory, observation and key to the action and the next memory, which is None without one.

    Raises:
      EnvError: of the function of this name (``of``): the policy returned no pair, or other memory than it was given.
    """

    def act(memory: Any, obs: Any, key: jax.Array) -> tuple[Any, Any]:
        if memory is None:
            return policy(params, obs, key), None
        given = policy(params, memory, obs, key)
        if not (isinstance(given, tuple) and len(given) == 2):
            fact = f"{of}: a policy with memory returned {type(given).__name__}."
            raise EnvError(located(fact, fix="Return (action, memory)."))
        action, remembered = given
        if _types(remembered) != _types(memory):
            fact = f"{of}: the policy was given memory {_types(memory)} and returned {_types(remembered)}."
            raise EnvError(located(fact, fix="Return memory like it, in structure, shapes and dtypes."))
        return action, jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), remembered, memory)

    return act


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves], structure
