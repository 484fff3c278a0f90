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
    V = device.shape[0]
    adjacency = jnp.asarray(problem.adjacency)
    start, finish, sent, arrived = schedule.start, schedule.finish, schedule.sent, schedule.arrived
    task = jnp.arange(V, dtype=jnp.int32)
    same = device[:, None] == device[None, :]
    ended = same & (finish[:, None] == start[None, :]) & (task[:, None] != task[None, :])  # [earlier, later]
    before = jnp.where(jnp.any(ended, axis=0), jnp.argmax(ended, axis=0).astype(jnp.int32), task)

    def go_on(state: tuple) -> Array:
        v, target, _, steps = state
        since = jnp.where(target < 0, start[v], sent[v, jnp.maximum(target, 0)])
        return (since > 0.0) & (steps < 3 * V)

    def back(state: tuple) -> tuple:
        v, target, on, steps = state
        on = on.at[v].set(True)
        d = device[v]
        # v began: an input that came over a link, else the task before it on the device (which may be an input).
        came = adjacency[:, v] & (device != d) & (arrived[:, d] == start[v])
        remote = jnp.any(came)
        from_task = (jnp.where(remote, jnp.argmax(came).astype(jnp.int32), before[v]), jnp.where(remote, d, -1))
        # a copy of v began: v's own end, else the copy before it on the link.
        to = jnp.maximum(target, 0)
        earlier = (device == d) & (arrived[:, to] == sent[v, to]) & (task != v)
        waited = (finish[v] != sent[v, to]) & jnp.any(earlier)
        from_copy = (jnp.where(waited, jnp.argmax(earlier).astype(jnp.int32), v), jnp.where(waited, target, -1))
        copying = target >= 0
        at = jnp.where(copying, from_copy[0], from_task[0]).astype(jnp.int32)
        target = jnp.where(copying, from_copy[1], from_task[1]).astype(jnp.int32)
        return at, target, on, steps + 1

    last = jnp.argmax(finish).astype(jnp.int32)
    none = jnp.zeros((V,), bool)
    v, _, on, _ = jax.lax.while_loop(go_on, back, (last, jnp.int32(-1), none, jnp.int32(0)))
    return Chain(on.at[v].set(True), before)
