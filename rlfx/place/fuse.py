"""Fusion of a named scope's nodes, block by block, into one node each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlfx._lazy import nx
from rlfx.errors import PlacementError, located
from rlfx.place.graph import Node


def _block_index(node: Node) -> str:
    return node.name[node.name.index("[") :]


def fuse_scopes(
    nodes: Sequence[Node],
    metas: list[str],
    scope_of: Sequence[tuple[str, ...]],
    fuse: Sequence[str],
    results: Sequence[tuple[tuple[int, ...], Any]],
    nbytes: Callable[..., int],
    label: str,
) -> list[Node]:
    """Merge the i-th shards of every operation in each fused scope (all must have equally many), in topological order.

    Traffic of a fused node counts what it reads from and yields to other nodes; blocks between its steps stay on chip.
    """
    if not fuse:
        return list(nodes)
    group_of: dict[int, tuple[str, int]] = {}
    for scope in fuse:
        members: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            if node.role != "input" and scope in scope_of[node.meta]:
                members.setdefault(node.meta, []).append(i)
        counts = {metas[m]: len(ids) for m, ids in members.items()}
        if len(set(counts.values())) > 1:
            raise PlacementError(
                located(
                    f"Scope {scope!r} of {label} cannot be fused: its operations have different numbers of nodes "
                    f"({', '.join(f'{m}: {c}' for m, c in counts.items())}).",
                    fix="Split all of them alike, or leave the scope unfused.",
                )
            )
        for ids in members.values():
            group_of.update((node, (scope, position)) for position, node in enumerate(ids))
    groups: dict[Any, list[int]] = {}
    for i in range(len(nodes)):
        groups.setdefault(group_of.get(i, i), []).append(i)
    keys = list(groups)
    number = {i: k for k, key in enumerate(keys) for i in groups[key]}
    owner = {b: number[i] for i, node in enumerate(nodes) for b in node.yields}
    quotient = nx.DiGraph()
    quotient.add_nodes_from(range(len(keys)))
    for i, node in enumerate(nodes):
        quotient.add_edges_from((owner[b], number[i]) for b in node.reads if owner[b] != number[i])
    if not nx.is_directed_acyclic_graph(quotient):
        cycle = [keys[u] for u, _ in nx.find_cycle(quotient)]
        raise PlacementError(
            located(
                f"Fusing {', '.join(map(repr, fuse))} of {label} makes a cycle through {cycle[0]}: a block of the "
                "scope needs other blocks of the same scope.",
                fix="Fuse a smaller scope, or split it along axes on which its blocks are independent.",
            )
        )
    wanted = {b for reads, _ in results for b in reads}
    for i, node in enumerate(nodes):
        wanted |= {b for b in node.reads if owner[b] != number[i]}
    first = {k: groups[key][0] for k, key in enumerate(keys)}
    return [
        _merge([nodes[i] for i in groups[keys[k]]], wanted, nbytes)
        for k in nx.lexicographical_topological_sort(quotient, key=first.get)
    ]


def _merge(members: Sequence[Node], wanted: set[int], nbytes: Callable[..., int]) -> Node:
    if len(members) == 1:
        return members[0]
    inside = {b for node in members for b in node.yields}
    reads = tuple(sorted({b for node in members for b in node.reads} - inside))
    yields = tuple(sorted(inside & wanted))
    scope = members[-1].name.rsplit("/", 1)[0]
    return Node(
        name=f"{scope}{_block_index(members[0])}",
        kind="fused",
        meta=members[0].meta,
        role="shard",
        steps=tuple(step for node in members for step in node.steps),
        yields=yields,
        reads=reads,
        flops=sum(node.flops for node in members),
        traffic=float(nbytes(*reads) + nbytes(*yields)),
        nbytes=nbytes(*yields),
        source=members[-1].source,
    )
