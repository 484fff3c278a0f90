"""Graph and device features of the dual policy (DOPPLER appendix D), as arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from rlfx.place.problem import Problem


class Features(NamedTuple):
    """What the policy sees of a problem with V tasks, D devices, E directed edges. Costs are divided by ``scale``.

    Attributes:
      nodes: float32 ``[V, 5]``: computation, sums of incoming and outgoing communication, t-level, b-level.
      senders, receivers: int32 ``[2 E]``, every edge in both directions.
      edges: float32 ``[2 E, 2]``: communication cost, direction.
      entry_paths, exit_paths: float32 ``[V, V]``, rows average the tasks on the longest path to an entry, an exit.
      preds: int32 ``[V, P]``, predecessors, padded with V.
      adjacency: bool ``[V, V]``.
      exec_time: float32 ``[V, D]``.
      transfer_time: float32 ``[V, D, D]``.
      level: float32 ``[V]``, longest path to an exit.
      scale: float32, seconds; the longest path through the graph or the evenly spread work, whichever is longer.
    """

    nodes: Array
    senders: Array
    receivers: Array
    edges: Array
    entry_paths: Array
    exit_paths: Array
    preds: Array
    adjacency: Array
    exec_time: Array
    transfer_time: Array
    level: Array
    scale: Array


def _path_matrix(hops: np.ndarray) -> np.ndarray:
    """Row v averages the tasks met by following ``hops`` from v, v included."""
    size = len(hops)
    out = np.zeros((size, size), np.float32)
    for v in range(size):
        u, path = v, []
        while u >= 0:
            path.append(u)
            u = int(hops[u])
        out[v, path] = 1.0 / len(path)
    return out


def features(problem: Problem) -> Features:
    """Extract a problem's features.

    Communication costs are mean transfer times over links. The paper multiplies bytes by a factor of 4 instead, its fit
    of bytes to FLOP; seconds need no such factor, and carry over between machines.
    """
    V = problem.tasks
    (exit_cost, exit_hop), (entry_cost, entry_hop) = problem.to_exit, problem.from_entry
    scale = max(problem.lower_bound(), float(exit_cost.max()))
    comm = problem.mean_transfer.astype(np.float64)
    incoming = problem.adjacency.T @ comm
    outgoing = problem.adjacency.sum(axis=1) * comm
    columns = np.stack([problem.mean_exec, incoming, outgoing, exit_cost, entry_cost], axis=1)
    spread = np.maximum(np.abs(columns).max(axis=0), 1e-12)  # each column to [0, 1]: graphs share a range
    u, v = np.nonzero(problem.adjacency)
    width = max(1, int(problem.adjacency.sum(axis=0).max()))
    preds = np.full((V, width), V, np.int32)
    for w in range(V):
        ids = np.flatnonzero(problem.adjacency[:, w])
        preds[w, : len(ids)] = ids
    cost = comm[u] / max(comm.max(), 1e-12)
    edges = np.stack([np.concatenate([cost, cost]), np.repeat([0.0, 1.0], len(u))], axis=1)
    return Features(
        nodes=jnp.asarray(columns / spread, jnp.float32),
        senders=jnp.asarray(np.concatenate([u, v]), jnp.int32),
        receivers=jnp.asarray(np.concatenate([v, u]), jnp.int32),
        edges=jnp.asarray(edges, jnp.float32),
        entry_paths=jnp.asarray(_path_matrix(entry_hop)),
        exit_paths=jnp.asarray(_path_matrix(exit_hop)),
        preds=jnp.asarray(preds),
        adjacency=jnp.asarray(problem.adjacency),
        exec_time=jnp.asarray(problem.exec_time / scale, jnp.float32),
        transfer_time=jnp.asarray(problem.transfer_time / scale, jnp.float32),
        level=jnp.asarray(exit_cost / scale, jnp.float32),
        scale=jnp.asarray(scale, jnp.float32),
    )
