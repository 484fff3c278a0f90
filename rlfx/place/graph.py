"""Dataflow graphs: nodes that compute blocks of arrays, with costs and executable semantics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np

from rlfx._checks import instance
from rlfx._lazy import nx

Env = Mapping[int, jax.Array]
Role = Literal["input", "shard", "reduce"]


@dataclass(frozen=True)
class Step:
    """One computation inside a node: it reads blocks and defines blocks."""

    defines: tuple[int, ...]
    reads: tuple[int, ...]
    run: Callable[[Env], tuple[jax.Array, ...]]


@dataclass(frozen=True)
class Node:
    """A unit of placement.

    Attributes:
      name: meta-op and block index, as in ``hidden/dot_general[0,0,2]``.
      kind: ``input``, ``matmul``, ``elementwise``, ``reduction``, ``aggregate``, ``formation``, ``opaque``, ``fused``.
      meta: index into ``DataflowGraph.metas``.
      role: input block, shard of the original operation, or reduction of partial shards.
      steps: what it runs, in order.
      yields: the blocks that other nodes, or the caller, read.
      reads: the blocks it needs from other nodes.
      flops: floating-point operations.
      traffic: bytes of memory read and written.
      nbytes: bytes of its result, the size of a transfer.
      source: the user's line.
    """

    name: str
    kind: str
    meta: int
    role: Role
    steps: tuple[Step, ...]
    yields: tuple[int, ...]
    reads: tuple[int, ...]
    flops: float
    traffic: float
    nbytes: int
    source: str

    def run(self, env: Env) -> tuple[jax.Array, ...]:
        """Compute the node's blocks from an environment of blocks."""
        local = dict(env)
        for step in self.steps:
            local.update(zip(step.defines, step.run(local), strict=True))
        return tuple(local[b] for b in self.yields)


@dataclass(frozen=True)
class DataflowGraph:
    """A function as a graph of placed computations (DOPPLER section 2: nodes, edges, meta-ops).

    Attributes:
      nodes: in topological order, input blocks included.
      metas: names of the meta-ops, in the function's order.
      blocks: shape and dtype of every block.
      load: computes every input block from the flat arguments, ``load(args)[block]``.
      collect: assembles the function's flat results from an environment of blocks, with the blocks each reads.
      in_tree, out_tree, in_avals: the function's signature.
      name: the function's name.
    """

    nodes: tuple[Node, ...]
    metas: tuple[str, ...]
    blocks: tuple[jax.ShapeDtypeStruct, ...]
    load: Callable[[Sequence[jax.Array]], dict[int, jax.Array]]
    collect: tuple[tuple[tuple[int, ...], Callable[[Env], jax.Array]], ...]
    in_tree: Any
    out_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    name: str

    @cached_property
    def owner(self) -> dict[int, int]:
        """The node that yields each block."""
        return {block: i for i, node in enumerate(self.nodes) for block in node.yields}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (producer, consumer), each once."""
        return tuple((u, v) for v, node in enumerate(self.nodes) for u in sorted({self.owner[b] for b in node.reads}))

    @cached_property
    def tasks(self) -> tuple[int, ...]:
        """The nodes that run on a device: all but the inputs, which are available everywhere (Algorithm 1)."""
        return tuple(i for i, node in enumerate(self.nodes) if node.role != "input")

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The input blocks' nodes."""
        return tuple(i for i, node in enumerate(self.nodes) if node.role == "input")

    def networkx(self) -> nx.DiGraph[int]:
        """The graph for analysis and drawing."""
        graph = nx.DiGraph()
        for i, node in enumerate(self.nodes):
            graph.add_node(i, name=node.name, kind=node.kind, meta=self.metas[node.meta], role=node.role)
        graph.add_edges_from(self.edges)
        return graph

    def evaluate(self, *args: Any) -> Any:
        """Run every node in order on the current device: the graph's meaning, equal to the unsharded function.

        Example:
          >>> import jax.numpy as jnp
          >>> from rlfx.place import explode
          >>> graph = explode(lambda x: x @ x, jnp.eye(4), splits={"dot_general": (2, 2, 2)})
          >>> graph.evaluate(2 * jnp.eye(4))[0]
          Array([4., 0., 0., 0.], dtype=float32)
        """
        env = self.load(jax.tree.leaves(args))
        for i in self.tasks:
            node = self.nodes[i]
            env.update(zip(node.yields, node.run(env), strict=True))
        return jax.tree.unflatten(self.out_tree, [run(env) for _, run in self.collect])

    def summary(self) -> str:
        """Counts by kind, edges, and total work, one line.

        Example:
          >>> from rlfx.place import workloads
          >>> workloads.chainmm(size=8).graph().summary()
          'chainmm: 112 nodes (input 36, matmul 48, aggregate 20, elementwise 8), 160 edges, 3.5 kFLOP'
        """
        kinds: dict[str, int] = {}
        for node in self.nodes:
            kinds[node.kind] = kinds.get(node.kind, 0) + 1
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        flops = sum(node.flops for node in self.nodes)
        units = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (0.0, "kFLOP"))
        scale = next((max(s, 1e3), u) for s, u in units if flops >= s)
        return (
            f"{self.name}: {len(self.nodes)} nodes ({counts}), {len(self.edges)} edges, "
            f"{flops / scale[0]:.1f} {scale[1]}"
        )


GRAPH = instance(DataflowGraph, "a DataflowGraph", "rlfx.place.explode(fn, *args)")


def check(graph: DataflowGraph) -> None:
    """Verify the graph's invariants: every block has one owner that precedes its readers."""
    seen: set[int] = set()
    for node in graph.nodes:
        missing = set(node.reads) - seen
        assert not missing, f"{node.name} reads blocks {sorted(missing)} before they exist"
        assert not seen & set(node.yields), f"{node.name} yields a block twice"
        seen |= set(node.yields)
    for reads, _ in graph.collect:
        assert set(reads) <= seen
    assert np.all([node.nbytes >= 0 and node.flops >= 0 for node in graph.nodes])
