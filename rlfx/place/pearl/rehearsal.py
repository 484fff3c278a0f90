"""Seconds of an iteration's primitives on one device: rehearsed call by call, as a run makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place.compose import PRIMITIVES
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.system import State, System

UPDATE = np.int32(0)


class Stopwatch:
    """Seconds by primitive; what a call returns is waited for."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PRIMITIVES, 0.0)

    def __call__(self, primitive: str, fn: Callable[..., Any], *args: Any) -> Any:
        """What the function returns."""
        begin = time.perf_counter()
        found = jax.block_until_ready(fn(*args))
        self.seconds[primitive] += time.perf_counter() - begin
        return found


def rehearsed(system: System, state: State, key: jax.Array, device: Any, repeats: int) -> dict[str, float]:
    """Medians over iterations after a first one, which compiles, with everything on one device; nothing is kept.

    Of actors with host environments it is the policy alone.
    """
    keys, state = jax.device_put((do.Keys.of(key), state), device)
    manager, memory = jax.tree.map(jnp.copy, (state.manager, state.memory))  # what is given is not donated
    taken = []
    for _ in range(repeats + 1):
        watch = Stopwatch()
        chunks = _acted(system, state, keys.act, device, watch)
        for _ in range(system.updates):
            manager = _updated(system, state.learner, manager, memory, keys, watch)
        memory = watch("insert", do.write, memory, UPDATE, chunks)
        manager = watch("insert", do.admit, system, manager)
        taken.append(watch.seconds)
    return {name: float(np.median([seconds[name] for seconds in taken[1:]])) for name in PRIMITIVES}


def _acted(system: System, state: State, key: jax.Array, device: Any, watch: Stopwatch) -> tuple:
    """What each actor collects; of host environments, which are not stepped, it is zeros."""
    weights = state.weights[0]
    if not isinstance(system.env, HostEnvironment):
        numbered = enumerate(state.actors)
        return tuple(watch("actors", do.act, system, weights, s, key, UPDATE, np.int32(a))[1] for a, s in numbered)
    obs = jax.tree.map(lambda x: np.zeros((system.envs, *x.shape[1:]), x.dtype), state.memory.obs)
    for a in range(system.actors):
        for t in range(system.length):
            watch("actors", do.choose, system, weights, obs, key, UPDATE, np.int32(a), np.int32(t))
    rows = system.envs * system.length
    chunk = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), state.memory)
    return (jax.device_put(chunk, device),) * system.actors


def _updated(system: System, learner: Any, manager: Any, memory: Any, keys: do.Keys, watch: Stopwatch) -> Any:
    """The manager after an update; the learner stays the same."""
    drawn = watch("sample", do.draw, system, manager, keys.draw, UPDATE)
    batches = [watch("sample", do.read, memory, indices) for indices in drawn.indices]
    if system.sub_batches == 1:
        found = watch("train", do.train, system, learner, batches[0], drawn.weight[0], keys.learn, UPDATE)
        return watch("update", do.reprioritise, system, manager, drawn.indices, (found[2],))
    total, errors = None, []
    for p, (batch, weight) in enumerate(zip(batches, drawn.weight, strict=True)):
        slope, error, _ = watch("train", do.gradient, system, learner, batch, weight, keys.learn, UPDATE, np.int32(p))
        total = slope if total is None else watch("train", do.added, total, slope)
        errors.append(error)
    watch("train", do.apply, system, learner, total)
    return watch("update", do.reprioritise, system, manager, drawn.indices, tuple(errors))
