"""The critical chain of a simulated execution: the tasks that the makespan waited for, one after another."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rlfx.place.problem import Problem
from rlfx.place.simulate import Schedules


class Chain(NamedTuple):
    """What held an execution up.

    Attributes:
      on: bool ``[V]``, the tasks of the chain, those whose results were copied included.
      before: int32 ``[V]``, the task that ended on the same device at the moment each task began; itself if none.
    """

    on: Array
    before: Array


def chain(problem: Problem, device: Array, schedule: Schedules) -> Chain:
    """Walk back from the task that ends last to what it waited for, until something waited for nothing.

    A task begins when its device becomes free, or when its last input is there; a copy begins when its task ends, or
    when the copy before it on the same link has arrived. The simulator copies these times, so that they are equal
    exactly. Where several explain a time, an input comes before the device.

    Args:
      problem: V tasks on D devices.
      device: int32 ``[V]``.
      schedule: of this assignment alone: ``[V]`` and ``[V, D]``.
    """
    V, D = schedule.sent.shape
    producer, consumer = jnp.asarray(problem.edges).T
    start, finish, sent, arrived = schedule.start, schedule.finish, schedule.sent, schedule.arrived
    task = jnp.arange(V, dtype=jnp.int32)
    *_, turn = jax.lax.sort((device.astype(jnp.int32), start, finish, task), num_keys=3)  # by device, then time
    last = jnp.concatenate([turn[:1], turn[:-1]])
    touches = (device[last] == device[turn]) & (finish[last] == start[turn]) & (task > 0)
    before = jnp.zeros((V,), jnp.int32).at[turn].set(jnp.where(touches, last, turn))
    # An input that came over a link when its reader began, the first such one; V if none did.
    came = (device[producer] != device[consumer]) & (arrived[producer, device[consumer]] == start[consumer])
    remote = jnp.full((V,), V, jnp.int32).at[consumer].min(jnp.where(came, producer, V))
    # The copy before each on its link: results enter a link in the order in which their device ran them.
    spot = jnp.where(jnp.isfinite(sent[turn]), task[:, None], -1)  # [place in turn, target]
    latest = jax.lax.cummax(spot, axis=0)
    latest = jnp.concatenate([jnp.full((1, D), -1, jnp.int32), latest[:-1]])
    previous = turn[jnp.maximum(latest, 0)]
    to = jnp.arange(D)[None]
    shared = (latest >= 0) & (device[previous] == device[turn][:, None]) & (arrived[previous, to] == sent[turn])
    shared &= finish[turn][:, None] != sent[turn]
    waited = jnp.full((V, D), -1, jnp.int32).at[turn].set(jnp.where(shared, previous, -1))

    def go_on(state: tuple) -> Array:
        v, target, _, steps = state
        since = jnp.where(target < 0, start[v], sent[v, jnp.maximum(target, 0)])
        given = (target < 0) & (remote[v] == V) & (before[v] == v)  # it waited for a source, or for nothing
        return (since > 0.0) & ~given & (steps < 3 * V)

    def back(state: tuple) -> tuple:
        v, target, on, steps = state
        going = go_on(state)
        held, other = waited[v, jnp.maximum(target, 0)], remote[v]
        copying, far = target >= 0, other < V
        # A copy waited for the copy before it, or for its own task; a task for an input, or for the task before it.
        at = jnp.where(copying, jnp.where(held >= 0, held, v), jnp.where(far, other, before[v]))
        link = jnp.where(copying, jnp.where(held >= 0, target, -1), jnp.where(far, device[v].astype(jnp.int32), -1))
        return jnp.where(going, at, v), jnp.where(going, link, target), on.at[at].set(True), steps + 1

    end = jnp.argmax(finish).astype(jnp.int32)
    none = jnp.zeros((V,), bool).at[end].set(True)
    _, _, on, _ = jax.lax.while_loop(go_on, back, (end, jnp.int32(-1), none, jnp.int32(0)))
    return Chain(on, before)
