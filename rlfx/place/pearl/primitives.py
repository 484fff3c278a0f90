"""The five primitives as compiled functions: each runs where its arguments are; and an iteration's updates as one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place import replay as rp
from rlfx.place.pearl.system import System, Transition

compiled = partial(jax.jit, static_argnums=0)

LEAST = 1e-3  # added to every error: nothing is never drawn again


class Keys(NamedTuple):
    """A key for each who draws; numbers are folded in, so that a run may end and go on anywhere."""

    act: jax.Array
    draw: jax.Array
    learn: jax.Array

    @classmethod
    def of(cls, key: jax.Array) -> Keys:
        """From the key of a run."""
        return cls(*jax.random.split(key, 3))


def _key(key: jax.Array, *numbers: Any) -> jax.Array:
    for i in numbers:
        key = jax.random.fold_in(key, i)
    return key


@compiled
def act(
    system: System, weights: Any, states: Any, key: jax.Array, iteration: Any, actor: Any
) -> tuple[Any, Transition]:
    """An actor's part of an iteration: the states of its environments, and transitions ``[length * envs, ...]``."""

    def step(states, t):
        env_key = _key(key, iteration, actor, t, 1)
        obs = jax.vmap(system.env.observe)(states)
        action = choose(system, weights, obs, key, iteration, actor, t)
        states, out = jax.vmap(system.env.step)(jax.random.split(env_key, system.envs), states, action)
        return states, Transition(obs, action, out.reward, out.terminated, out.truncated, out.final_obs)

    states, transitions = jax.lax.scan(step, states, jnp.arange(system.length, dtype=jnp.int32))
    return states, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), transitions)


@compiled
def choose(system: System, weights: Any, obs: Any, key: jax.Array, iteration: Any, actor: Any, t: Any) -> Any:
    """The actions of an actor's environments in timestep ``t`` of an iteration, ``[envs, ...]``."""
    keys = jax.random.split(_key(key, iteration, actor, t, 0), system.envs)
    now = jnp.asarray(iteration, jnp.int32) * system.length + t
    return jax.vmap(system.policy, in_axes=(None, 0, 0, None))(weights, obs, keys, now)


class Drawn(NamedTuple):
    """Indices and importance weights of a batch, a ``[b]`` for each sub-batch; whether the next insertion misses them."""

    indices: tuple
    weight: tuple
    free: jax.Array


@compiled
def draw(system: System, manager: rp.Replay, key: jax.Array, update: Any) -> Drawn:
    """What an update reads, by priority."""
    indices, probability = rp.sample_indices(manager.tree, _key(key, update), system.batch)
    weight = rp.importance_weights(probability, manager.size, system.beta)
    free = rp.collision_free(manager, system.collected, indices)
    indices, weight = (tuple(jnp.split(x, system.sub_batches)) for x in (indices, weight))
    return Drawn(indices, weight, free)


@jax.jit
def read(memory: Any, indices: jax.Array) -> Any:
    """Transitions of the experience memory."""
    return jax.tree.map(lambda ring: ring[indices], memory)


@partial(jax.jit, donate_argnums=0)
def write(memory: Any, position: Any, chunks: tuple) -> Any:
    """The transitions of all actors, over the oldest."""
    new = jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)
    count, capacity = (jax.tree.leaves(x)[0].shape[0] for x in (new, memory))
    slots = (position + jnp.arange(count, dtype=jnp.int32)) % capacity
    return jax.tree.map(lambda ring, x: ring.at[slots].set(x.astype(ring.dtype)), memory, new)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def admit(system: System, manager: rp.Replay) -> rp.Replay:
    """Priorities for the transitions of an iteration: the largest so far."""
    return rp.insert(manager, jnp.zeros((system.collected, 0), jnp.uint8))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def reprioritise(system: System, manager: rp.Replay, indices: tuple, errors: tuple) -> rp.Replay:
    """The learner's errors as priorities."""
    both = jnp.concatenate(indices), jnp.abs(jnp.concatenate(errors)) + LEAST
    return rp.update_priorities(manager, *both, alpha=system.alpha)


@compiled
def gradient(system: System, learner: Any, batch: Any, weight: Any, key: jax.Array, update: Any, part: Any) -> tuple:
    """Of a sub-batch: ``(gradient, errors, metrics)``."""
    return system.gradient(learner, batch, weight, _key(key, update, part))


@jax.jit
def added(total: Any, found: Any) -> Any:
    """The sum of gradients so far and of one more: a program of its own, so that it gives the same bits whoever made them."""
    return jax.tree.map(jnp.add, total, found)


@compiled
def apply(system: System, learner: Any, total: Any) -> tuple[Any, Any]:
    """The learner after an update, and its weights; nothing is donated, as actors may still read the last ones."""
    learner = system.apply(learner, jax.tree.map(lambda g: g / system.sub_batches, total))
    return learner, system.weights(learner)


@compiled
def train(system: System, learner: Any, batch: Any, weight: Any, key: jax.Array, update: Any) -> tuple:
    """An update from a batch in one part: ``(learner, weights, errors, metrics)``."""
    total, errors, metrics = gradient(system, learner, batch, weight, key, update, jnp.int32(0))
    return *apply(system, learner, total), errors, metrics


#: The most updates of one program: a run that is stopped waits for its end, and one that hangs is known by its length.
AT_ONCE = 16


class Updated(NamedTuple):
    """What some updates lead to, but for the last one's priorities: an insertion may come before them.

    Attributes:
      manager: with the priorities of all updates but the last.
      learner, weights: after the last.
      drawn, errors, metrics: of the last.
    """

    manager: rp.Replay
    learner: Any
    weights: Any
    drawn: Drawn
    errors: jax.Array
    metrics: Any


# In one program XLA would compute parts of one primitive in loops of another, with other roundings.
_drawn, _read, _trained = J.computed_once(draw, (0,)), J.computed_once(read), J.computed_once(train, (0,))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def updated(
    system: System, count: int, manager: rp.Replay, memory: Any, learner: Any, keys: Keys, update: Any
) -> Updated:  # fmt: skip
    """So many updates from number ``update`` on, each from a batch in one part, one after another."""
    update = jnp.asarray(update, jnp.int32)

    def once(manager: rp.Replay, learner: Any, u: Any) -> Updated:
        drawn = _drawn(system, manager, keys.draw, update + u)
        batch = _read(memory, drawn.indices[0])
        learner, weights, errors, metrics = _trained(system, learner, batch, drawn.weight[0], keys.learn, update + u)
        return Updated(manager, learner, weights, drawn, errors, metrics)

    def whole(carry: tuple, u: Any) -> tuple[tuple, None]:
        made = once(carry[0], carry[1], u)
        return (reprioritise(system, made.manager, made.drawn.indices, (made.errors,)), made.learner), None

    (manager, learner), _ = jax.lax.scan(whole, (manager, learner), jnp.arange(count - 1, dtype=jnp.int32))
    return once(manager, learner, jnp.int32(count - 1))


def all_updated(
    system: System, manager: rp.Replay, memory: Any, learner: Any, keys: Keys, update: int
) -> Iterator[Updated]:
    """The updates of an iteration from number ``update`` on: what each program of some of them gives, the last one last."""
    for u in range(0, system.updates, AT_ONCE):
        count = min(AT_ONCE, system.updates - u)
        made = updated(system, count, manager, memory, learner, keys, np.int32(update + u))
        yield made
        if u + count < system.updates:
            manager = reprioritise(system, made.manager, made.drawn.indices, (made.errors,))
            learner = made.learner


@partial(jax.jit, static_argnums=(0, 7), donate_argnums=(1, 2))
def closed(
    system: System, manager: rp.Replay, memory: Any, position: Any, chunks: tuple, indices: jax.Array, errors: Any, first: bool
) -> tuple[rp.Replay, Any]:  # fmt: skip
    """The end of an iteration: what was collected, ``first`` or after the priorities of the last update."""
    memory = write(memory, position, chunks)
    manager = admit(system, manager) if first else manager
    manager = reprioritise(system, manager, (indices,), (errors,))
    return manager if first else admit(system, manager), memory
