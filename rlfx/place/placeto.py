"""Placeto (Addanki et al., 2019), the paper's learned baseline: one policy re-places tasks in a fixed order.

An episode starts from all tasks on one device and visits each once in topological order. At every step the graph is
embedded again, with the current placement among the features, so that an episode costs V message passings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from rlfx.place.baselines import Assignment
from rlfx.place.problem import Problem
from rlfx.place.simulate import objective, run_order


class Graph(NamedTuple):
    """Task features ``[V, 2]``, and neighbours above and below, int32 ``[V, P]``, padded with V."""

    nodes: Array
    above: Array
    below: Array


def _padded(mask: np.ndarray) -> np.ndarray:
    size = len(mask)
    out = np.full((size, max(1, int(mask.sum(axis=1).max()))), size, np.int32)
    for v in range(size):
        ids = np.flatnonzero(mask[v])
        out[v, : len(ids)] = ids
    return out


def graph_of(problem: Problem) -> Graph:
    """Placeto's view of a problem: run times and output sizes, each to [0, 1]."""
    columns = np.stack([problem.mean_exec, problem.nbytes], axis=1)
    return Graph(
        jnp.asarray(columns / columns.max(axis=0), jnp.float32),
        jnp.asarray(_padded(problem.adjacency.T)),
        jnp.asarray(_padded(problem.adjacency)),
    )


class Policy(nn.Module):
    """Message passing from above and from below, pooled around the current task.

    Attributes:
      devices: D.
      hidden: width.
      rounds: of message passing.
    """

    devices: int
    hidden: int = 16
    rounds: int = 2

    @nn.compact
    def __call__(self, g: Graph, device: Array, current: Array) -> Array:
        """Logits ``[D]`` for task ``current`` given the devices ``[V]`` of all tasks."""
        V = g.nodes.shape[0]
        position = jnp.arange(V)
        flags = jnp.stack([position == current, position < current], axis=1).astype(jnp.float32)
        placed = jax.nn.one_hot(device, self.devices, dtype=jnp.float32)
        h = nn.Dense(self.hidden)(jnp.concatenate([g.nodes, flags, placed], axis=1))
        ways = []
        for table in (g.above, g.below):
            e = h
            for _ in range(self.rounds):
                sent = jnp.concatenate([nn.relu(nn.Dense(self.hidden)(e)), jnp.zeros((1, self.hidden), jnp.float32)])
                e = h + nn.relu(nn.Dense(self.hidden)(jnp.sum(sent[table], axis=1)))
            padded = jnp.concatenate([e, jnp.zeros((1, self.hidden), jnp.float32)])
            ways += [e[current], jnp.sum(padded[table[current]], axis=0)]
        pooled = jnp.concatenate([*ways, jnp.mean(h, axis=0)])
        return nn.Dense(self.devices)(nn.relu(nn.Dense(self.hidden)(pooled)))


def _episode(
    policy: Policy, params: dict, g: Graph, key: Array, epsilon: Array, forced: Array | None = None
) -> tuple[Array, Array, Array]:
    """One episode: devices ``[V]``, their log-probability and mean entropy, differentiable in ``params``.

    ``forced`` are the devices of a teacher, int32 ``[V]``, which are taken instead of drawn ones.
    """
    V = g.nodes.shape[0]

    @jax.checkpoint
    def step(device: Array, inputs: tuple) -> tuple[Array, tuple]:
        v, k, given = inputs
        p = (1.0 - epsilon) * nn.softmax(policy.apply(params, g, device, v)) + epsilon / policy.devices
        drawn = jax.random.categorical(k, jnp.log(jax.lax.stop_gradient(p))).astype(jnp.int32)
        d = drawn if forced is None else given
        return device.at[v].set(d), (jnp.log(p[d]), -jnp.sum(p * jnp.log(p + 1e-9)))

    start = jnp.zeros((V,), jnp.int32)
    given = start if forced is None else forced
    device, (log_p, entropy) = jax.lax.scan(step, start, (jnp.arange(V), jax.random.split(key, V), given))
    return device, jnp.sum(log_p), jnp.mean(entropy)


def _optimiser() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def _descended(params: dict, state: optax.OptState, grads: dict, rate: Array | float) -> tuple[dict, optax.OptState]:
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        updates, state = _optimiser().update(grads, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state


@partial(jax.jit, static_argnames=("policy", "steps"))
def _imitate(policy: Policy, params: dict, g: Graph, teachers: Array, key: Array, *, steps: int) -> dict:
    """Parameters under which the teachers' devices, int32 ``[N, V]``, are likely: one of them a step."""
    zero = jnp.float32(1e-3)  # of random choices, so that no logarithm is infinite

    def step(carry: tuple, key: Array) -> tuple[tuple, None]:
        params, state = carry
        forced = teachers[jax.random.randint(key, (), 0, teachers.shape[0], jnp.int32)]
        grads = jax.grad(lambda p: -_episode(policy, p, g, key, zero, forced)[1] / forced.shape[0])(params)
        return _descended(params, state, grads, 1e-3), None

    return jax.lax.scan(step, (params, _optimiser().init(params)), jax.random.split(key, steps))[0][0]


@partial(jax.jit, static_argnames=("policy", "updates", "batch", "limited"))
def _train(policy: Policy, problem: Problem, g: Graph, order: Array, params: dict, key: Array, *, updates: int,
           batch: int, limited: bool) -> tuple[Array, Array]:  # fmt: skip
    V = g.nodes.shape[0]
    orders = jnp.broadcast_to(order[None], (batch, V))

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        params, state, best_device, best_cost = carry
        key, progress = inputs
        epsilon, rate = 0.5 * (1.0 - progress), 1e-3 * (1.0 - 0.999 * progress)

        def loss(params: dict) -> tuple[Array, tuple[Array, Array]]:
            device, log_p, entropy = jax.vmap(lambda k: _episode(policy, params, g, k, epsilon))(
                jax.random.split(key, batch)
            )
            cost = objective(problem, device, orders, limited=limited)
            advantage = -(cost - jnp.mean(cost)) / (jnp.std(cost) + 1e-9)
            value = -jnp.mean(jax.lax.stop_gradient(advantage) * log_p) / V - 1e-2 * jnp.mean(entropy)
            return value, (device, cost)

        grads, (device, cost) = jax.grad(loss, has_aux=True)(params)
        params, state = _descended(params, state, grads, rate)
        i = jnp.argmin(cost)
        best_device = jnp.where(cost[i] < best_cost, device[i], best_device)
        return (params, state, best_device, jnp.minimum(best_cost, cost[i])), None

    start = jnp.zeros((V,), jnp.int32)  # where every episode starts counts as a solution
    start_cost = jnp.min(objective(problem, jnp.broadcast_to(start[None], (batch, V)), orders, limited=limited))
    carry = (params, _optimiser().init(params), start, start_cost)
    progress = jnp.arange(updates, dtype=jnp.float32) / updates
    (_, _, device, cost), _ = jax.lax.scan(step, carry, (jax.random.split(key, updates), progress))
    return device, cost


def train_placeto(
    problem: Problem, key: Array, budget: int, batch: int = 8, teachers: Sequence[Assignment] = (), steps: int = 200
) -> tuple[Assignment, float]:
    """Train with REINFORCE on the simulator; ``budget`` episodes, the paper's exploration and learning rates.

    With ``teachers``, their devices are imitated before, ``steps`` times one of them (the paper's table 7).

    Returns:
      The best assignment seen, with critical-path order, and its cost in seconds.
    """
    batch = min(batch, budget)
    order, policy, g = run_order(problem, "critical-path"), Policy(problem.devices), graph_of(problem)
    k_init, k_run = jax.random.split(key)
    params = jax.jit(policy.init)(k_init, g, jnp.zeros((problem.tasks,), jnp.int32), jnp.int32(0))
    if teachers:
        k_imitate, k_run = jax.random.split(k_run)
        devices = jnp.asarray(np.stack([t.device for t in teachers]), jnp.int32)
        params = _imitate(policy, params, g, devices, k_imitate, steps=steps)
    device, cost = _train(
        policy, problem, g, jnp.asarray(order), params, k_run, updates=max(1, budget // batch), batch=batch,
        limited=problem.memory_may_bind,
    )  # fmt: skip
    return Assignment(np.asarray(device), order), float(cost)
