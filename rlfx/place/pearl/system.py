"""An off-policy algorithm as pure functions and sizes, and all of its state as one pytree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx._checks import INT32, KEY, NATURAL, POSITIVE, expect, function, instance, integer, number
from rlfx._sum_tree import FANOUT
from rlfx.envs.base import Environment, Spaces
from rlfx.envs.spaces import Box, Discrete, is_space
from rlfx.errors import PlacementError, located
from rlfx.place import replay as rp
from rlfx.place.pearl.hosts import HostEnvironment


class Transition(NamedTuple):
    """What replay keeps of a timestep.

    Attributes:
      obs, action, reward, terminated, truncated: of the step.
      next_obs: what the step led to, before any reset.
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: Any


_ENVIRONMENT = instance(
    (Environment, HostEnvironment),
    "an environment",
    'rlfx.envs.make("CartPole-v1"), or HostEnvironment("CartPole-v1")',
)


@dataclass(frozen=True)
class System:
    """Actors, prioritised replay and a learner.

    In an iteration each actor takes ``length`` timesteps in each of its ``envs`` environments, and the learner makes
    ``updates`` updates of ``batch`` transitions.

    Args:
      env: a JAX environment that begins episodes anew by itself, or a :class:`HostEnvironment`.
      learner: ``learner(key) -> learner``: parameters, optimiser, target networks.
      weights: ``weights(learner) -> weights``: what the policy takes.
      policy: ``policy(weights, obs, key, t) -> action``, of one environment after ``t`` timesteps (int32).
      gradient: ``gradient(learner, transitions[b], weight[b], key) -> (gradient, errors[b], metrics)``: the mean over the
        sub-batch, priorities of its transitions, and anything to look at.
      apply: ``apply(learner, gradient) -> learner``.
      actors, envs, length: how many act, in how many environments each, for how many timesteps an iteration.
      updates, batch, sub_batches: how many updates an iteration, of how many transitions, sent to the learner in how many parts.
      capacity, warmup: transitions that replay holds; how many it has before the first update.
      ahead: iterations that actors may be ahead of the learner: their weights are as much older.
      alpha, beta: of prioritised replay (Schaul et al. 2016).
      fanout: of its sum tree; eight was the fastest on CPUs.

    Raises:
      PlacementError: an argument is not of its kind; sizes that do not go together.
    """

    env: Environment | HostEnvironment
    learner: Callable[..., Any]
    weights: Callable[..., Any]
    policy: Callable[..., Any]
    gradient: Callable[..., Any]
    apply: Callable[..., Any]
    actors: int = 1
    envs: int = 8
    length: int = 1
    updates: int = 1
    batch: int = 32
    sub_batches: int = 1
    capacity: int = 10_000
    warmup: int = 1_000
    ahead: int = 0
    alpha: float = 0.6
    beta: float = 0.4
    fanout: int = FANOUT

    def __post_init__(self) -> None:
        kinds = {
            "env": _ENVIRONMENT,
            "learner": function("key"),
            "weights": function("learner"),
            "policy": function("weights", "obs", "key", "t"),
            "gradient": function("learner", "transitions", "weight", "key"),
            "apply": function("learner", "gradient"),
            **dict.fromkeys(("actors", "envs", "length", "updates", "batch", "sub_batches", "capacity"), POSITIVE),
            **dict.fromkeys(("warmup", "ahead"), NATURAL),
            **dict.fromkeys(("alpha", "beta"), number(0)),
            "fanout": integer(2, INT32),
        }
        for name, kind in kinds.items():
            object.__setattr__(self, name, expect(name, getattr(self, name), kind, PlacementError, of="System"))
        if self.batch % self.sub_batches:
            fact = f"System: {self.sub_batches} sub-batches of a batch of {self.batch} are not of equal size."
            raise PlacementError(located(fact, fix="Give a divisor of batch as sub_batches."))
        if max(self.collected, self.warmup) > self.capacity:
            fact = f"System: replay of {self.capacity}, {self.collected} transitions an iteration, {self.warmup} to warm up."
            raise PlacementError(located(fact, fix="Give a capacity that is not less than either."))
        if isinstance(self.env, Environment) and not self.env.resets:
            fact = f"System: {self.env.name} does not begin a new episode after the last one."
            raise PlacementError(located(fact, fix="Give rlfx.envs.auto_reset(env)."))

    @property
    def collected(self) -> int:
        """Transitions of an iteration."""
        return self.actors * self.envs * self.length

    @property
    def warm(self) -> int:
        """The first iteration with updates: before it, replay has ``warmup`` transitions, and one at least."""
        return max(1, -(-self.warmup // self.collected))

    def version(self, iteration: Any) -> Any:
        """How many iterations of updates made the newest weights that there are before an iteration."""
        return max(0, iteration - self.warm)

    def update(self, iteration: int, u: int) -> int:
        """The number of an iteration's update, of all."""
        return (iteration - self.warm) * self.updates + u

    @property
    def spaces(self) -> Spaces:
        """Of the environment."""
        return self.env.spaces() if isinstance(self.env, HostEnvironment) else self.env.spaces

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration.

        Raises:
          PlacementError: the key is none.
        """
        key = expect("key", key, KEY, PlacementError, of="System.init")
        learner_key, env_key = jax.random.split(key)
        learner = jax.jit(self.learner)(learner_key)
        weights = jax.jit(self.weights)(learner)
        memory = rp.make_replay(self.capacity, example(self, weights)).data
        return State(
            jnp.int32(0),
            learner,
            (weights,) * (self.ahead + 1),
            rp.make_replay(self.capacity, jnp.zeros((0,), jnp.uint8), self.fanout),
            memory,
            tuple(_first(self, k) for k in jax.random.split(env_key, self.actors)),
        )


class State(NamedTuple):
    """All that a run changes, between two iterations.

    Attributes:
      iteration: how many were made, int32.
      learner: as :class:`System` makes it.
      weights: the newest ``ahead + 1`` versions, the oldest first: those that actors may still take.
      manager: priorities, and where the next transition goes: a `Replay` of transitions of no bytes.
      memory: the transitions, leaves ``[capacity, ...]``.
      actors: for each, the states of its JAX environments; nothing for those on the host, which begin anew.
    """

    iteration: jax.Array
    learner: Any
    weights: tuple[Any, ...]
    manager: rp.Replay
    memory: Any
    actors: tuple[Any, ...]


SYSTEM = instance(System, "a System", "System(env=..., learner=..., ...)")
STATE = instance(State, "a State", "system.init(jax.random.key(0))")


def check_state(system: System, state: Any, of: str) -> State:
    """A state of this system: as many actors and versions of weights, and a memory as large."""
    state = expect("state", state, STATE, PlacementError, of=of)
    sizes = len(state.actors), len(state.weights) - 1, jax.tree.leaves(state.memory)[0].shape[0]
    wanted = system.actors, system.ahead, system.capacity
    if sizes != wanted:
        fact = f"{of}: (actors, ahead, capacity) of the state are {sizes}, the system's are {wanted}."
        raise PlacementError(located(fact, fix="Give a state that this system made: system.init(key)."))
    return state


def example(system: System, weights: Any) -> Transition:
    """A transition of zeros."""
    spaces = system.spaces
    obs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spaces.observation, is_leaf=is_space)
    action = jax.eval_shape(system.policy, weights, obs, jax.random.key(0), jnp.int32(0))
    wanted = spaces.action
    if isinstance(wanted, (Box, Discrete)) and getattr(action, "shape", None) != wanted.shape:
        fact = f"System: the policy returns {action}, an action of the environment is {wanted}."
        raise PlacementError(located(fact, fix="Return one action, for one observation."))
    action = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), action)
    return Transition(obs, action, jnp.float32(0), jnp.bool_(False), jnp.bool_(False), obs)


def _first(system: System, key: jax.Array) -> Any:
    if isinstance(system.env, HostEnvironment):
        return ()
    return jax.vmap(system.env.reset)(jax.random.split(key, system.envs))
