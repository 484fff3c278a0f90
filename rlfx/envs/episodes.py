"""Environments that begin a new episode by themselves, end one after a while, or cut gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rlfx._checks import POSITIVE, expect, one_of
from rlfx.envs.base import Environment, Step, checked_environment
from rlfx.errors import EnvError, located


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(Environment):
    """An environment made from another: whatever is not overridden is the inner environment's.

    Attributes:
      env: the inner environment.
      over_resets: it may stand above a reset: what it remembers of an episode ends with the episode.
      same_steps: one step of it is one step of ``env``: a time limit may go beneath it.
      endures: what it remembers goes through the ends of episodes: a reset has to go beneath it.
    """

    env: Any
    over_resets: ClassVar[bool] = False
    same_steps: ClassVar[bool] = False
    endures: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def resets(self) -> bool:
        return getattr(self.env, "resets", False)

    @property
    def observation_space(self) -> Any:
        return self.env.observation_space

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    def reset(self, key: jax.Array) -> Any:
        return self.env.reset(key)

    def observe(self, state: Any) -> Any:
        return self.env.observe(state)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        return self.env.step(key, state, action)


def select(condition: jax.Array, on_true: Any, on_false: Any) -> Any:
    """``on_true`` or ``on_false``, leaf by leaf, by one scalar condition (typed keys included)."""
    return jax.tree.map(lambda x, y: jax.lax.select(condition, x, y), on_true, on_false)


class _Reset(Wrapper):
    @property
    def resets(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class _FreshReset(_Reset):
    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        # The split is gymnax's, so that its environments give gymnax's trajectories.
        key_step, key_reset = jax.random.split(key)
        after, step = self.env.step(key_step, state, action)
        return select(step.terminated | step.truncated, self.env.reset(key_reset), after), step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedResetState:
    """The state, and the states that episodes begin with; ``next`` counts episodes."""

    inner: Any
    first: Any
    next: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _CachedReset(_Reset):
    cache: int = 1

    def reset(self, key: jax.Array) -> Any:
        first = jax.vmap(self.env.reset)(jax.random.split(key, self.cache))
        return CachedResetState(jax.tree.map(lambda x: x[0], first), first, jnp.int32(1 % self.cache))

    def observe(self, state: Any) -> Any:
        return self.env.observe(state.inner)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after, step = self.env.step(key, state.inner, action)
        done = step.terminated | step.truncated
        begin = jax.tree.map(lambda x: x[state.next], state.first)
        following = jnp.where(done, (state.next + 1) % self.cache, state.next)
        return CachedResetState(select(done, begin, after), state.first, following), step


@dataclasses.dataclass(frozen=True, eq=False)
class _OptimisticReset(_Reset):
    ratio: int = 16

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        key_step, key_reset = jax.random.split(key)
        after, step = self.env.step(key_step, state, action)
        return self._begin(step.terminated | step.truncated, key_reset, after), step

    @property
    def _begin(self):
        """``(done, key, state) -> state``: how a batch begins its new episodes is a rule of ``vmap``."""
        begin = jax.custom_batching.custom_vmap(lambda done, key, after: select(done, self.env.reset(key), after))

        @begin.def_vmap
        def few_for_all(size, batched, done, keys, after):
            done, keys, after = (x if all(jax.tree.leaves(b)) else _spread(x, b, size)
                                 for x, b in zip((done, keys, after), batched, strict=True))  # fmt: skip
            count = -(-size // self.ratio)
            (first,) = jnp.nonzero(done, size=count, fill_value=0)
            fresh = jax.vmap(self.env.reset)(keys[first])
            place = (jnp.cumsum(done) - 1) % count
            begun = jax.vmap(select)(done, jax.tree.map(lambda x: x[place], fresh), after)
            return begun, jax.tree.map(lambda _: True, begun)

        return begin


def _spread(tree: Any, batched: Any, size: int) -> Any:
    """With a leading axis also where a leaf is the same for the whole batch."""
    return jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x[None], (size, *x.shape)), tree, batched)


def auto_reset(env: Environment, *, reset: str = "fresh", cache: int = 1, ratio: int = 16) -> Environment:
    """``env``, beginning a new episode in the step in which the last one ended.

    ``Step.final_obs`` stays the true last observation; the state returned, and what is observed in it, belong to the
    new episode. The step's key is split into one for the dynamics and one for the reset, as gymnax does. The reset goes
    beneath wrappers whose memory outlives episodes (``normalize_observation``, ``normalize_reward``).

    Args:
      env: an environment without automatic reset.
      reset: ``"fresh"`` draws a new first state at every end; ``"cached"`` draws ``cache`` first states once, at
        ``reset``, and goes round them (for environments whose reset costs more than a step, such as brax);
        ``"optimistic"`` draws N / ``ratio`` first states at each step of N environments under ``vmap``, fresh ones as
        long as no more episodes end in that step; beyond that, episodes that end together begin alike (Craftax).
      cache: how many first states are kept per environment.
      ratio: environments for each first state that is drawn.

    Raises:
      EnvError: no such ``reset``; ``cache`` or ``ratio`` is not positive; ``env`` begins new episodes already.

    Example:
      >>> from rlfx.envs import make, time_limit
      >>> env = auto_reset(time_limit(make("Catch-bsuite", auto_reset=False), 1))
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(1))
      >>> bool(step.truncated), int(state.time)
      (True, 0)
    """
    checked_environment("auto_reset", env)
    reset = expect("reset", reset, one_of(*_RESETS), EnvError, of="auto_reset")
    cache = expect("cache", cache, POSITIVE, EnvError, of="auto_reset")
    ratio = expect("ratio", ratio, POSITIVE, EnvError, of="auto_reset")
    if env.resets and not hasattr(env, "with_auto_reset"):
        fact = f"auto_reset: {env.name} begins new episodes by itself already."
        raise EnvError(located(fact, fix=f"Leave it out, or begin with make({env.name!r}, auto_reset=False)."))
    return _resetting(env, lambda inner: _RESETS[reset](inner, cache, ratio))


_RESETS: dict[str, Callable[[Environment, int, int], Environment]] = {
    "fresh": lambda env, cache, ratio: _FreshReset(env),
    "cached": lambda env, cache, ratio: _CachedReset(env, cache),
    "optimistic": lambda env, cache, ratio: _OptimisticReset(env, ratio),
}


def _resetting(env: Any, begin: Callable[..., Any]) -> Environment:
    """``env`` with resets as far out as is right: ``begin`` adds them to an environment."""
    if own := getattr(env, "with_auto_reset", None):  # a host environment resets where its state is
        return own()
    if not _resets_inside(env):
        return begin(env)
    if isinstance(env, _TimeLimit):
        return time_limit(_resetting(env.env, begin), env.limit)
    if env.over_resets:
        return dataclasses.replace(env, env=_resetting(env.env, begin))
    fact = f"auto_reset of {type(env).__name__}: it stands above a wrapper or an environment that resets have to go beneath."
    raise EnvError(located(fact, fix="Apply auto_reset first, and this wrapper to its result."))


def _resets_inside(env: Any) -> bool:
    return isinstance(env, Wrapper) and (env.endures or hasattr(env.env, "with_auto_reset") or _resets_inside(env.env))


@dataclasses.dataclass(frozen=True, eq=False)
class _StopGradient(Wrapper):
    over_resets = same_steps = True

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        return jax.lax.stop_gradient(self.env.step(key, state, action))


def stop_gradient(env: Environment) -> Environment:
    """``env`` with steps that carry no gradient: policies learn from what they sampled, not through the dynamics.

    Example:
      >>> import jax.numpy as jnp
      >>> from rlfx.envs import Pendulum
      >>> env, key = stop_gradient(Pendulum()), jax.random.key(0)
      >>> jax.grad(lambda a: env.step(key, env.reset(key), a)[1].reward)(jnp.ones(1))
      Array([0.], dtype=float32)
    """
    checked_environment("stop_gradient", env)
    return _StopGradient(env)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TimedState:
    """A state, and the steps taken since the episode began."""

    inner: Any
    time: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _TimeLimit(Wrapper):
    limit: int = 1

    def reset(self, key: jax.Array) -> Any:
        return TimedState(self.env.reset(key), jnp.int32(0))

    def observe(self, state: Any) -> Any:
        return self.env.observe(state.inner)

    def transition(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, Step]:
        after, step = self.env.step(key, state.inner, action)
        time = state.time + 1
        return TimedState(after, time), dataclasses.replace(step, truncated=step.truncated | (time >= self.limit))


def time_limit(env: Environment, steps: int) -> Environment:
    """``env``, truncated (not terminated) after ``steps`` steps.

    Of an environment that resets itself, the limit goes beneath the reset: what is cut off begins anew.

    Raises:
      EnvError: ``steps`` is not a positive integer, or there is no way beneath the reset.

    Example:
      >>> from rlfx.envs import make
      >>> env = time_limit(make("Catch-bsuite"), 1)
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(1))
      >>> bool(step.truncated), int(env.observe(state)[0].sum())
      (True, 1)
    """
    checked_environment("time_limit", env)
    steps = expect("steps", steps, POSITIVE, EnvError, of="time_limit")
    if not env.resets:
        return _TimeLimit(env, steps)
    if isinstance(env, _Reset) or (isinstance(env, Wrapper) and env.same_steps):
        return dataclasses.replace(env, env=time_limit(env.env, steps))
    fact = f"time_limit of {type(env).__name__}, which begins new episodes by itself: they would go on past the limit."
    raise EnvError(
        located(fact, fix="Limit the time first, and then auto_reset (or give the environment its own limit).")
    )
