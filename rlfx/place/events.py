"""The simulator's loop: the next task in time, found in blocks and told to its readers, O(V + E) memory.

Tasks are laid out by device, then priority, in blocks of about the square root of their number; no block spans two
devices. A block remembers when the first of its ready tasks could start, so that the next task in time is the minimum
over blocks, then over one block: a step costs O(sqrt(V)), not O(V). A task tells its readers in runs of ``WIDTH``, one run
a step, so that every assignment of a batch takes equally many steps, whatever runs when.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rlfx.place.problem import Problem

WIDTH = 4  # readers told in a step
LANES = 16  # numbers that a minimum takes at once
INSIDE = "promise_in_bounds"


class Layout(NamedTuple):
    """Places of V tasks of B assignments in N blocks of W.

    Attributes:
      place: int32 ``[B, V]``, of each task.
      task: int32 ``[B, N, W]``, at each place; 0 where there is none.
      device: int32 ``[B, N]``, of each block.
    """

    place: Array
    task: Array
    device: Array


def block_size(V: int) -> int:
    """A power of two near the square root of V, at least 8."""
    return max(8, 1 << V.bit_length() // 2)


def layout(device: Array, priority: Array, D: int) -> Layout:
    """Places by device, then priority, then number; each device begins a block. ``device``, ``priority``: ``[B, V]``."""
    B, V = device.shape
    W = block_size(V)
    N = -(-V // W) + D + 1  # the last one is empty: what is told to nobody goes there
    N += -N % LANES
    lanes = jnp.arange(B)[:, None]
    number = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), (B, V))
    on, _, by_place = jax.lax.sort((device, priority, number), dimension=1, num_keys=3)
    count = jnp.zeros((B, D), jnp.int32).at[lanes, device].add(1)
    blocks = (count + W - 1) // W
    first_block = jnp.cumsum(blocks, axis=1, dtype=jnp.int32) - blocks
    shift = first_block * W - (jnp.cumsum(count, axis=1, dtype=jnp.int32) - count)  # [B, D]
    spot = number + jnp.take_along_axis(shift, on, axis=1)
    place = jnp.zeros((B, V), jnp.int32).at[lanes, by_place].set(spot)
    task = jnp.zeros((B, N * W), jnp.int32).at[lanes, spot].set(by_place).reshape(B, N, W)
    owner = (
        jnp.sum(jnp.arange(N, dtype=jnp.int32)[None, :, None] >= first_block[:, None, :], axis=2, dtype=jnp.int32) - 1
    )
    return Layout(place, task, owner)


def copies(problem: Problem, device: Array, noise: Array | None) -> Array:
    """Seconds of each copy that an assignment makes, float32 ``[B, V, D]``; infinite where none is made."""
    B, V = device.shape
    D = problem.exec_time.shape[1]
    edges = jnp.asarray(problem.edges)
    read_on = jnp.zeros((B, V, D), bool).at[jnp.arange(B)[:, None], edges[:, 0], device[:, edges[:, 1]]].set(True)
    away = device[..., None] != jnp.arange(D, dtype=jnp.int32)[None, None]
    seconds = jnp.asarray(problem.transfer_time)[jnp.arange(V)[None], device]
    if noise is not None:
        seconds = seconds * noise
    return jnp.where(read_on & away, seconds, jnp.inf)


def in_turn(lane: Array, link: Array, ended: Array, seconds: Array, made: Array) -> tuple[Array, Array, Array]:
    """Copies of one result by lanes that several targets may share, to the lowest target first: sent, arrived, lanes free.

    ``lane``: int32 ``[B, D]``, of each target; ``link``: when each lane is free, ``[B, D]``; ``ended``: ``[B]``; the others:
    ``[B, D]``.
    """
    every, sent, landed = jnp.arange(lane.shape[1], dtype=jnp.int32), [], []
    for t in range(lane.shape[1]):
        mine = lane[:, t : t + 1] == every[None]
        sent.append(jnp.maximum(ended, jnp.max(jnp.where(mine, link, 0.0), axis=1)))
        landed.append(sent[-1] + seconds[:, t])
        link = jnp.where(mine & made[:, t : t + 1], landed[-1][:, None], link)
    return jnp.stack(sent, axis=1), jnp.stack(landed, axis=1), link


def sources(problem: Problem, device: Array) -> tuple[Array, Array]:
    """When the last source that each task reads is on its device, float32 ``[B, V]``, and each link is free, ``[B, D, D]``.

    Sources are sent when a call begins, one after another on each link, by their number, then the target's.
    """
    B, V = device.shape
    D = problem.exec_time.shape[1]
    source, reader = jnp.asarray(problem.source_edges).T
    where = jnp.asarray(problem.source_home)
    home = jnp.where(where < 0, 0, device[:, jnp.maximum(where, 0)])  # [B, S]
    every, lanes = jnp.arange(D, dtype=jnp.int32), jnp.arange(B)
    lane, shared = jnp.asarray(problem.lane), problem.lane.shape[0] > 0
    read_on = jnp.zeros((*home.shape, D), bool).at[lanes[:, None], source, device[:, reader]].set(True)
    sent = read_on & (home[..., None] != every[None, None])

    def send(link: Array, one: tuple) -> tuple[Array, Array]:
        seconds, home, sent = one  # [D, D], [B], [B, D]
        if shared:
            when = in_turn(lane[home], link[lanes, home], jnp.zeros((B,), jnp.float32), seconds[home], sent)
            return link.at[lanes, home].set(when[2]), jnp.where(sent, when[1], 0.0)
        there = jnp.where(sent, link[lanes, home] + seconds[home], link[lanes, home])
        return link.at[lanes, home].set(there), jnp.where(sent, there, 0.0)

    seconds = jnp.asarray(problem.source_time)
    link, there = jax.lax.scan(send, jnp.zeros((B, D, D), jnp.float32), (seconds, home.T, sent.swapaxes(0, 1)))
    when = there[source[None], lanes[:, None], device[:, reader]]  # [B, Q]
    return jnp.zeros((B, V), jnp.float32).at[:, reader].max(when), link


def least(numbers: Array) -> Array:
    """Minima of rows, halves at a time: on CPUs, XLA makes vectors of these, and none of a reduction."""
    while numbers.shape[1] > LANES:
        half = -(-numbers.shape[1] // 2)
        numbers = jnp.minimum(numbers[:, :half], numbers[:, -half:])
    return jnp.min(numbers, axis=1)


def soonest(times: Array) -> Array:
    """Minima of rows of times. None is negative, so that their bits as integers are in their order, and integers are not NaN."""
    least_bits = least(jax.lax.bitcast_convert_type(times, jnp.int32))
    return jax.lax.bitcast_convert_type(least_bits, jnp.float32)


def run(problem: Problem, device: Array, priority: Array, fifo: bool, exec_noise: Any, transfer_noise: Any, *,
        recorded: bool) -> tuple[Array, Array]:  # fmt: skip
    """Makespans ``[B]``, and if ``recorded`` start, finish, D times sent and D times arrived of each task, ``[B, V, 2 + 2 D]``.

    Args:
      problem: V tasks on D devices.
      device, priority: int32 ``[B, V]``.
      fifo, exec_noise, transfer_noise: see :func:`rlfx.place.simulate.simulate`.
      recorded: whether times are kept.
    """
    B, V = device.shape
    D = problem.exec_time.shape[1]
    spots = layout(device, priority, D)
    N, W = spots.task.shape[1:]
    edges = jnp.asarray(problem.edges)
    lanes, lane, shared = jnp.arange(B, dtype=jnp.int32), jnp.asarray(problem.lane), problem.lane.shape[0] > 0
    outdegree = jnp.zeros((V,), jnp.int32).at[edges[:, 0]].add(1)
    indegree = jnp.zeros((V,), jnp.int32).at[edges[:, 1]].add(1)
    stop = jnp.cumsum(outdegree, dtype=jnp.int32)
    begin = stop - outdegree
    steps = jnp.sum(jnp.maximum(1, (outdegree + WIDTH - 1) // WIDTH), dtype=jnp.int32)
    consumer = jnp.concatenate([edges[:, 1].astype(jnp.int32), jnp.zeros((WIDTH,), jnp.int32)])
    seconds = jnp.take_along_axis(jnp.asarray(problem.exec_time)[None], device[..., None], axis=2)[..., 0]
    if exec_noise is not None:
        seconds = seconds * exec_noise
    # Barriers keep the noisy durations out of the loop, where a multiply could be contracted with an add.
    seconds, copy = jax.lax.optimization_barrier((seconds, copies(problem, device, transfer_noise)))
    waiting = jnp.full((B, N * W), 1 << 30, jnp.int32).at[lanes[:, None], spots.place].set(indegree[None])
    waiting, owner = waiting.reshape(B, N, W), spots.device
    flat_device, places, tasks = device.reshape(-1), spots.place.reshape(-1), spots.task.reshape(-1)
    seconds, copy = seconds.reshape(-1), copy.reshape(-1, D)
    every, block, within, ahead = (jnp.arange(n, dtype=jnp.int32)[None] for n in (D, N, W, WIDTH))

    def rows(flat: Array, index: Array) -> Array:
        return flat.reshape(B * N, W).at[index].get(mode=INSIDE)

    def step(_: Array, carry: tuple) -> tuple:
        arrival, pending, first, free, link, making, there, at, end, record = carry
        telling = at < end  # [B]: a task has readers left to tell
        ready = jnp.maximum(first, free)  # [B, N]
        now = soonest(ready)
        b = least(jnp.where(ready == now[:, None], block, N - 1))
        if fifo:
            tied = (ready == now[:, None]) & (owner == owner[lanes, b][:, None])
            came = jnp.where(tied, first, jnp.inf)
            b = least(jnp.where(came == soonest(came)[:, None], block, N - 1))
        row_at = lanes * N + b
        row = jnp.where(rows(pending, row_at) == 0, rows(arrival, row_at), jnp.inf)  # [B, W]
        start = row if fifo else jnp.maximum(row, free.reshape(-1).at[row_at].get(mode=INSIDE)[:, None])
        earliest = first.reshape(-1).at[row_at].get(mode=INSIDE) if fifo else now  # the least of them
        j = least(jnp.where(start == earliest[:, None], within, W - 1))
        v = jnp.where(telling, making, tasks.at[row_at * W + j].get(mode=INSIDE))
        lane_v = lanes * V + v
        d = flat_device.at[lane_v].get(mode=INSIDE)
        done = now + seconds.at[lane_v].get(mode=INSIDE)
        cost = copy.at[lane_v].get(mode=INSIDE)  # [B, D]
        before = link.reshape(-1, D).at[lanes * D + d].get(mode=INSIDE)
        made = jnp.isfinite(cost)
        if shared:
            sent, landed, following = in_turn(lane[d], before, done, cost, made)
        else:  # a lane for each target
            sent = jnp.maximum(done[:, None], before)
            landed = following = sent + cost
        there = jnp.where(telling[:, None], there, jnp.where(every == d[:, None], done[:, None], landed))
        free = jnp.where((owner == d[:, None]) & ~telling[:, None], done[:, None], free)
        rest = soonest(jnp.where(within == j[:, None], jnp.inf, row))
        first = jnp.where((block == b[:, None]) & ~telling[:, None], rest[:, None], first)
        at, end = jnp.where(telling, at, begin[v]), jnp.where(telling, end, stop[v])
        # The task leaves (its count goes below zero), and a run of its readers hears of it.
        reader = consumer.at[at[:, None] + ahead].get(mode=INSIDE)  # [B, WIDTH]
        told = at[:, None] + ahead < end[:, None]
        place = jnp.where(told, places.at[lanes[:, None] * V + reader].get(mode=INSIDE), (N - 1) * W)
        spot = lanes[:, None] * (N * W) + place
        at_device = flat_device.at[lanes[:, None] * V + reader].get(mode=INSIDE)
        heard = jnp.max(jnp.where(at_device[..., None] == every[None], there[:, None, :], 0.0), axis=2)
        when = jnp.maximum(heard, arrival.at[spot].get(mode=INSIDE))
        left = pending.at[spot].get(mode=INSIDE) - 1
        opens = jnp.where(told & (left == 0), when, jnp.inf)
        for k in range(WIDTH):
            first = jnp.minimum(first, jnp.where(block == (place // W)[:, k : k + 1], opens[:, k : k + 1], jnp.inf))
        gone = jnp.where(telling, lanes * (N * W) + (N - 1) * W, row_at * W + j)
        # What is written depends on all that is read, so that the arrays are written where they are.
        left = jnp.concatenate([left, jnp.where(telling, 1 << 30, -1)[:, None]], axis=1)
        arrival = arrival.at[spot].set(when, mode=INSIDE)
        pending = pending.at[jnp.concatenate([spot, gone[:, None]], 1)].set(left, mode=INSIDE)
        sends = (every == d[:, None]) & ~telling[:, None]
        link = jnp.where(sends[..., None] & (made | shared)[:, None], following[:, None], link)
        if recorded:
            kept = jnp.concatenate([now[:, None], done[:, None], jnp.where(made, sent, jnp.inf), landed], axis=1)
            record = record.at[jnp.where(telling, B * V + lanes, lane_v)].set(kept, mode=INSIDE)
        return arrival, pending, first, free, link, v, there, at + WIDTH, end, record

    none = jnp.zeros((B,), jnp.int32)
    arrival, link = jnp.zeros((B, N * W), jnp.float32), jnp.zeros((B, D, D), jnp.float32)
    if problem.source_bytes.shape[0]:
        given, link = sources(problem, device)
        arrival = arrival.at[lanes[:, None], spots.place].set(given)
    carry = (
        arrival.reshape(-1),
        waiting.reshape(-1),
        jnp.min(jnp.where(waiting == 0, arrival.reshape(B, N, W), jnp.inf), axis=2),
        jnp.zeros((B, N), jnp.float32),
        link,
        none,
        jnp.zeros((B, D), jnp.float32),
        none,
        none,
        jnp.zeros(((B * V + B) if recorded else 0, 2 + 2 * D), jnp.float32),
    )
    _, _, _, free, *_, record = jax.lax.fori_loop(0, steps, step, carry)
    return jnp.max(free, axis=1), record[: B * V].reshape(B, -1, 2 + 2 * D)
