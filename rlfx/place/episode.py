"""Episodes of the dual policy (DOPPLER section 5.1): batched, compiled, sampled or replayed."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from rlfx.place.features import Features
from rlfx.place.policy import DualPolicy

Select = Literal["policy", "critical-path"]
Place = Literal["policy", "earliest"]


class Episode(NamedTuple):
    """B episodes of V steps.

    Attributes:
      task, device: int32 ``[B, V]``, what each step chose.
      state: float32 ``[B, V, D, 6]``, the device features that PLC saw.
    """

    task: Array
    device: Array
    state: Array

    def assignment(self) -> Array:
        """Device of each task, int32 ``[B, V]``."""
        return jax.vmap(lambda v, d: jnp.zeros_like(d).at[v].set(d))(self.task, self.device)

    def order(self) -> Array:
        """Step at which each task was chosen, int32 ``[B, V]``: SEL's order is the run-time priority."""
        steps = jnp.arange(self.task.shape[1], dtype=jnp.int32)
        return jax.vmap(lambda v: jnp.zeros_like(v).at[v].set(steps))(self.task)


def _mixture(logits: Array, mask: Array, epsilon: Array) -> Array:
    """Probabilities: the softmax over ``mask``, mixed with the uniform distribution over it."""
    weights = nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    allowed = mask.astype(jnp.float32)
    uniform = allowed / jnp.sum(allowed, axis=-1, keepdims=True)
    return (1.0 - epsilon) * weights + epsilon * uniform


def _draw(uniform: Array, probability: Array) -> Array:
    """Sample along the last axis by inversion."""
    total = jnp.cumsum(probability, axis=-1)
    hit = (total > uniform[..., None] * total[..., -1:]) & (probability > 0.0)
    return jnp.argmax(hit, axis=-1).astype(jnp.int32)


def _encode_now(policy: DualPolicy, params: dict, f: Features, placed: Array, ready: Array,
                on: Array) -> tuple[Any, Array]:  # fmt: skip
    """A message passing in each of B episodes: encodings, and loads ``[B, D, H]`` of tasks ``placed``, ``on`` devices.

    ``placed`` and ``ready`` are bool ``[B, V]``, ``on`` is ``[B, V, D]``.
    """
    progress = jnp.stack([placed, ready], axis=-1)
    encoding: Any = jax.vmap(lambda now: policy.apply(params, f, now, method="encode"))(progress)
    here = (on & placed[..., None]).astype(jnp.float32)
    return encoding, jnp.einsum("bvd,bvh->bdh", here, encoding.placed)


def rollout(
    policy: DualPolicy,
    params: dict,
    f: Features,
    key: Array,
    batch: int,
    epsilon: Array | float = 0.0,
    *,
    select: Select = "policy",
    place: Place = "policy",
    forced: tuple[Array, Array] | None = None,
    greedy: bool = False,
) -> Episode:
    """Assign all tasks, one a step (algorithm 3), in B episodes at once.

    Args:
      policy: the networks.
      params: their parameters.
      f: the problem's features.
      key: used once.
      batch: B.
      epsilon: share of uniformly random choices.
      select: SEL, or the longest path to an exit (the paper's Doppler-plc).
      place: PLC, or the device where the task starts earliest (Doppler-sel).
      forced: tasks and devices ``[B, V]`` to replay instead of choosing; only the features are computed.
      greedy: take the most probable choice instead of sampling.

    Returns:
      The episodes. The six device features are appendix D.2's five and the task's execution time there.
    """
    V, D = f.exec_time.shape
    once: Any = None if policy.per_step else policy.apply(params, f, method="encode")
    uniform = jax.random.uniform(key, (V, batch, 2), jnp.float32)
    lanes = jnp.arange(batch)
    depends = f.adjacency.astype(jnp.int32)

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        pending, device, begin, finish, free, work, load = carry
        u, force = inputs
        mask = pending == 0
        if policy.per_step:
            everywhere = device[..., None] == jnp.arange(D)[None, None, :]
            encoding, load = _encode_now(policy, params, f, pending < 0, mask, everywhere)
            select_logits, hidden = encoding.select, lambda v: encoding.task[lanes, v]
        else:
            select_logits, hidden = once.select[None], lambda v: once.task[v]
        if force is not None:
            v = force[0]
        elif select == "critical-path":
            v = jnp.argmax(jnp.where(mask, f.level[None], -jnp.inf), axis=1)
        else:
            p = _mixture(select_logits, mask, epsilon)
            v = jnp.argmax(p, axis=1) if greedy else _draw(u[:, 0], p)
        v = v.astype(jnp.int32)
        preds = f.preds[v]  # [B, P], V where absent
        there = (preds < V)[..., None]
        where = jnp.where(preds < V, device[lanes[:, None], jnp.minimum(preds, V - 1)], 0)
        on = (where[..., None] == jnp.arange(D)[None, None, :]) & there  # [B, P, D]
        ended = finish[lanes[:, None], jnp.minimum(preds, V - 1)][..., None]
        began = begin[lanes[:, None], jnp.minimum(preds, V - 1)][..., None]
        cost = f.exec_time[jnp.minimum(preds, V - 1), where][..., None]
        sent = f.transfer_time[jnp.minimum(preds, V - 1), where]  # [B, P, D]
        arrival = jnp.max(jnp.where(there, ended + sent, 0.0), axis=1, initial=0.0)  # [B, D]
        start = jnp.maximum(free, arrival)
        first = jnp.min(jnp.where(on, began, jnp.inf), axis=1, initial=jnp.inf)
        x = jnp.stack(
            [
                work,
                jnp.sum(jnp.where(on, cost, 0.0), axis=1),
                jnp.where(jnp.isfinite(first), first, 0.0),
                jnp.max(jnp.where(on, ended, 0.0), axis=1, initial=0.0),
                start,
                f.exec_time[v],
            ],
            axis=-1,
        )
        # Only differences between devices decide: times count from the earliest possible start.
        now = jnp.min(start, axis=1)[:, None, None]
        relative = x.at[..., 2:5].add(-now)
        relative = relative.at[..., 0].add(-jnp.min(work, axis=1, keepdims=True))
        if force is not None:
            d = force[1]
        elif place == "earliest":
            d = jnp.argmin(start, axis=1)
        else:
            logits = policy.apply(params, hidden(v), load, relative, method="devices")
            p = _mixture(logits, jnp.ones((1, D), bool), epsilon)
            d = jnp.argmax(p, axis=1) if greedy else _draw(u[:, 1], p)
        d = d.astype(jnp.int32)
        s = start[lanes, d]
        e = s + f.exec_time[v, d]
        carry = (
            (pending - depends[v]).at[lanes, v].set(-1),
            device.at[lanes, v].set(d),
            begin.at[lanes, v].set(s),
            finish.at[lanes, v].set(e),
            free.at[lanes, d].set(e),
            work.at[lanes, d].add(f.exec_time[v, d]),
            load if policy.per_step else load.at[lanes, d].add(once.placed[v]),
        )
        return carry, (v, d, relative)

    zeros = jnp.zeros((batch, V), jnp.float32)
    carry = (
        jnp.broadcast_to(depends.sum(axis=0, dtype=jnp.int32)[None], (batch, V)),
        jnp.zeros((batch, V), jnp.int32),
        zeros,
        zeros,
        jnp.zeros((batch, D), jnp.float32),
        jnp.zeros((batch, D), jnp.float32),
        jnp.zeros((batch, D, policy.hidden), jnp.float32),
    )
    force = None if forced is None else (forced[0].T, forced[1].T)
    _, (task, device, state) = jax.lax.scan(step, carry, (uniform, force), length=V)
    return Episode(task.T, device.T, state.transpose(1, 0, 2, 3))


def log_probability(
    policy: DualPolicy, params: dict, f: Features, episode: Episode, epsilon: Array | float = 0.0
) -> tuple[Array, Array, Array]:
    """Log-probabilities of an episode's choices, all steps in parallel.

    Returns:
      SEL's and PLC's log-probabilities, float32 ``[B]`` each, summed over steps, and the mean entropy, ``[B]``.
    """
    V, D = f.exec_time.shape
    step_of = episode.order()  # [B, V]
    steps = jnp.arange(V)[None, :, None]
    # A task is a candidate from the step after its last predecessor until its own.
    preds_done = jnp.max(jnp.where(f.adjacency.T[None], step_of[:, None, :], -1), axis=2)  # [B, V]
    mask = (preds_done[:, None, :] < steps) & (step_of[:, None, :] >= steps)  # [B, step, V]
    logits = _logits_by_step if policy.per_step else _logits_at_once
    select_logits, place_logits = logits(policy, params, f, episode, mask)
    select = _mixture(select_logits, mask, epsilon)
    chosen = jnp.take_along_axis(select, episode.task[..., None], axis=-1)[..., 0]
    place = _mixture(place_logits, jnp.ones((1, 1, D), bool), epsilon)
    placed = jnp.take_along_axis(place, episode.device[..., None], axis=-1)[..., 0]

    def entropy(p: Array) -> Array:
        return -jnp.mean(jnp.sum(jnp.where(p > 0.0, p * jnp.log(jnp.where(p > 0.0, p, 1.0)), 0.0), axis=-1), axis=1)

    return jnp.sum(jnp.log(chosen), axis=1), jnp.sum(jnp.log(placed), axis=1), entropy(select) + entropy(place)


def _logits_at_once(
    policy: DualPolicy, params: dict, f: Features, episode: Episode, mask: Array
) -> tuple[Array, Array]:
    """Logits of SEL and PLC, broadcastable to ``[B, step, V]`` and ``[B, step, D]``, from one message passing."""
    encoding: Any = policy.apply(params, f, method="encode")
    devices = jnp.arange(f.exec_time.shape[1])[None, None, :]
    onehot = (episode.device[..., None] == devices).astype(jnp.float32)  # [B, V, D]
    added = onehot[..., None] * encoding.placed[episode.task][:, :, None, :]  # [B, V, D, H]
    load = jnp.cumsum(added, axis=1) - added
    place: Any = policy.apply(params, encoding.task[episode.task], load, episode.state, method="devices")
    return encoding.select[None, None], place


def _logits_by_step(
    policy: DualPolicy, params: dict, f: Features, episode: Episode, mask: Array
) -> tuple[Array, Array]:
    """The same from a message passing at every step, each computed again for its gradient."""
    B, V = episode.task.shape
    devices = jnp.arange(f.exec_time.shape[1])[None, None, :]
    step_of, on = episode.order(), episode.assignment()[..., None] == devices

    @jax.checkpoint
    def at(step: Array) -> tuple[Array, Array]:
        encoding, load = _encode_now(policy, params, f, step_of < step, mask[:, step], on)
        task = encoding.task[jnp.arange(B), episode.task[:, step]]
        placed: Any = policy.apply(params, task, load, episode.state[:, step], method="devices")
        return encoding.select, placed

    select, place = jax.lax.map(at, jnp.arange(V))
    return select.swapaxes(0, 1), place.swapaxes(0, 1)
