"""The dual policy: SEL chooses the next task, PLC its device (DOPPLER section 5.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from rlfx.place.features import Features

GREED = 8.0  # first value of PLC's weight on waiting
LATEST = 8.0  # waits, in durations of the task, beyond which devices are equally late


class Encoding(NamedTuple):
    """What one message passing over the graph yields; it serves a whole episode, and a whole batch (section 5.3).

    Attributes:
      select: float32 ``[V]``, SEL's logits.
      task: float32 ``[V, H]``, PLC's hidden layer, the task's share.
      placed: float32 ``[V, H]``, PLC's hidden layer, what a task adds to the device it is on.
    """

    select: Array
    task: Array
    placed: Array


class DualPolicy(nn.Module):
    """SEL and PLC over a shared message-passing encoder.

    PLC's first layer acts on the concatenation ``[H[v], h_d, Y[d], Z[v]]``; it is computed as a sum of products, so
    that the parts that do not change during an episode are computed once. Sums over paths and devices are means here,
    so that graphs of different sizes share weights.

    Attributes:
      hidden: width of every layer.
      rounds: of message passing (K).
      per_step: pass messages at every step of an episode, with what is placed and what is ready among the features of
        the tasks, instead of once an episode: the ablation of appendix H.3.
    """

    hidden: int = 32
    rounds: int = 2
    per_step: bool = False

    def setup(self) -> None:
        """Create the layers."""
        dense = nn.Dense
        self.embed = dense(self.hidden)
        self.message = [nn.Sequential([dense(self.hidden), nn.leaky_relu]) for _ in range(self.rounds)]
        self.update = [dense(self.hidden) for _ in range(self.rounds)]
        self.own = nn.Sequential([dense(self.hidden), nn.leaky_relu, dense(self.hidden)])
        self.select = nn.Sequential([dense(self.hidden), nn.leaky_relu, dense(1)])
        self.place_task = dense(self.hidden)
        self.place_load = dense(self.hidden, use_bias=False)
        self.place_device = nn.Sequential([dense(self.hidden), nn.leaky_relu, dense(self.hidden)])
        self.place = dense(1, kernel_init=nn.initializers.normal(1e-2))
        self.greed = self.param("greed", nn.initializers.constant(GREED), ())

    def encode(self, f: Features, progress: Array | None = None) -> Encoding:
        """Message passing, then everything that depends on the graph alone.

        Args:
          f: of the problem.
          progress: bool ``[V, 2]``, which tasks are placed and which are ready; read if ``per_step``.
        """
        V = f.nodes.shape[0]
        if self.per_step:
            now = jnp.zeros((V, 2), jnp.float32) if progress is None else progress.astype(jnp.float32)
            f = f._replace(nodes=jnp.concatenate([f.nodes, now], axis=1))
        h = self.embed(f.nodes)
        degree = jnp.zeros((V, 1), jnp.float32).at[f.receivers].add(1.0)
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(jnp.concatenate([h[f.senders], h[f.receivers], f.edges], axis=-1))
            total = jnp.zeros((V, self.hidden), jnp.float32).at[f.receivers].add(sent) / jnp.maximum(degree, 1.0)
            h = nn.leaky_relu(update(jnp.concatenate([h, total], axis=-1))) + h
        z = self.own(f.nodes)
        select = self.select(jnp.concatenate([h, f.entry_paths @ h, f.exit_paths @ h, z], axis=-1))[:, 0]
        return Encoding(select, self.place_task(jnp.concatenate([h, z], axis=-1)), self.place_load(h) / V)

    def devices(self, task: Array, load: Array, x: Array) -> Array:
        """PLC's logits ``[..., D]`` from task ``[..., H]``, load ``[..., D, H]``, device features ``[..., D, 6]``.

        The network's logits correct a rule: a device on which the task starts later, by its own duration, is less
        likely by a factor of exp(greed), which is learned too. Untrained, PLC prefers where the task starts earliest.
        """
        hidden = nn.leaky_relu(task[..., None, :] + load + self.place_device(x))
        duration = jnp.mean(x[..., 5], axis=-1, keepdims=True)
        later = x[..., 4] / jnp.maximum(duration, 1e-9)
        return self.place(hidden)[..., 0] - self.greed * jnp.minimum(later, LATEST)

    def __call__(self, f: Features, x: Array) -> tuple[Encoding, Array]:
        """Touch every layer, for initialisation."""
        encoding = self.encode(f)
        return encoding, self.devices(encoding.task[0], jnp.zeros((x.shape[0], self.hidden), jnp.float32), x)


def initialise(key: jax.Array, f: Features, policy: DualPolicy = DualPolicy()) -> Any:
    """Parameters for problems with any number of tasks and devices."""
    return policy.init(key, f, jnp.zeros((f.exec_time.shape[1], 6), jnp.float32))
