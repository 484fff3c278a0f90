"""Environments that begin a new episode by themselves, end one after a while, or cut gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.envs.base import Environment, Step
from rlfx.errors import EnvError, located


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(Environment):
    """An environment made from another: whatever is not overridden is the inner environment's."""

    env: Any

    @property
    def name(self) -> str:
        return self.env.name

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


@dataclasses.dataclass(frozen=True, eq=False)
class _FreshReset(Wrapper):
    def transition(self, key, state, action):
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
class _CachedReset(Wrapper):
    cache: int = 1

    def reset(self, key):
        first = jax.vmap(self.env.reset)(jax.random.split(key, self.cache))
        return CachedResetState(jax.tree.map(lambda x: x[0], first), first, jnp.int32(1 % self.cache))

    def observe(self, state):
        return self.env.observe(state.inner)

    def transition(self, key, state, action):
        after, step = self.env.step(key, state.inner, action)
        done = step.terminated | step.truncated
        begin = jax.tree.map(lambda x: x[state.next], state.first)
        following = jnp.where(done, (state.next + 1) % self.cache, state.next)
        return CachedResetState(select(done, begin, after), state.first, following), step


@dataclasses.dataclass(frozen=True, eq=False)
class _OptimisticReset(Wrapper):
    ratio: int = 16

    def transition(self, key, state, action):
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
    new episode. The step's key is split into one for the dynamics and one for the reset, as gymnax does.

    Args:
      env: an environment without automatic reset.
      reset: ``"fresh"`` draws a new first state at every end; ``"cached"`` draws ``cache`` first states once, at
        ``reset``, and goes round them (for environments whose reset costs more than a step, such as brax);
        ``"optimistic"`` draws N / ``ratio`` first states at each step of N environments under ``vmap``, fresh ones as
        long as no more episodes end in that step; beyond that, episodes that end together begin alike (Craftax).
      cache: how many first states are kept per environment.
      ratio: environments for each first state that is drawn.

    Raises:
      EnvError: no such ``reset``; ``cache`` or ``ratio`` is not positive.

    Example:
      >>> from rlfx.envs import make, time_limit
      >>> env = auto_reset(time_limit(make("Catch-bsuite", auto_reset=False), 1))
      >>> state, step = env.step(jax.random.key(1), env.reset(jax.random.key(0)), jnp.int32(1))
      >>> bool(step.truncated), int(state.time)
      (True, 0)
    """
    if own := getattr(env, "with_auto_reset", None):  # a host environment resets where its state is
        return own()
    if reset == "fresh":
        return _FreshReset(env)
    if reset == "cached" and cache >= 1:
        return _CachedReset(env, cache)
    if reset == "optimistic" and ratio >= 1:
        return _OptimisticReset(env, ratio)
    fact = f"auto_reset does not know reset={reset!r}, cache={cache}, ratio={ratio}."
    fix = 'Use reset="fresh", reset="cached" with cache >= 1, or reset="optimistic" with ratio >= 1.'
    raise EnvError(located(fact, fix=fix))


@dataclasses.dataclass(frozen=True, eq=False)
class _StopGradient(Wrapper):
    def transition(self, key, state, action):
        return jax.lax.stop_gradient(self.env.step(key, state, action))


def stop_gradient(env: Environment) -> Environment:
    """``env`` with steps that carry no gradient: policies learn from what they sampled, not through the dynamics."""
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

    def reset(self, key):
        return TimedState(self.env.reset(key), jnp.int32(0))

    def observe(self, state):
        return self.env.observe(state.inner)

    def transition(self, key, state, action):
        after, step = self.env.step(key, state.inner, action)
        time = state.time + 1
        return TimedState(after, time), dataclasses.replace(step, truncated=step.truncated | (time >= self.limit))


def time_limit(env: Environment, steps: int) -> Environment:
    """``env``, truncated (not terminated) after ``steps`` steps. Apply it below :func:`auto_reset`.

    Raises:
      EnvError: ``steps`` is not positive.
    """
    if steps < 1:
        raise EnvError(located(f"time_limit of {steps} steps.", fix="An episode has at least one step."))
    return _TimeLimit(env, int(steps))
