"""Smaller trees that still fail: fewer roots, subtrees replaced by their operands or by leaves, smaller domains.

Deterministic: the first smaller tree that fails is taken, until none does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.oracle.forms import FORMS
from tests.oracle.grow import extent, out
from tests.oracle.tree import Node, Tree, nodes, replaced

LEAVES = {"f": ("h", "x", "a"), "v": ("v", "w"), "i": ("n",), "b": ("even",)}
IDLE = (("h", Node("h")), ("v", Node("v")), ("n", Node("next")))


def size(tree: Tree) -> tuple[int, ...]:
    """What shrinking makes smaller, in order."""
    options = (tree.until is not None, tree.batch or 0, tree.length, tree.t0 != 0, tree.calls, tree.reduce != "sum")
    return (len(nodes(tree)), sum(len(n.args) for n in nodes(tree)), *map(int, options))


def smaller(tree: Tree) -> Iterator[Tree]:
    """Trees with less in them, what removes most first."""
    for root in tree.roots:
        if len(tree.roots) > 1:
            yield dataclasses.replace(tree, roots=(root,))
    for i in range(len(tree.roots)):
        if len(tree.roots) > 1:
            yield dataclasses.replace(tree, roots=tree.roots[:i] + tree.roots[i + 1 :])
    idle = dict(IDLE)
    for i, (name, node) in enumerate(tree.carried):
        if name in idle and node != idle[name]:
            yield dataclasses.replace(tree, carried=(*tree.carried[:i], (name, idle[name]), *tree.carried[i + 1 :]))
    for node in reversed(nodes(tree)):
        for arg in node.args:
            if out(arg) == out(node) and (out(node) not in "sw" or extent(arg) == extent(node)):
                yield replaced(tree, node, arg)
        for leaf in map(Node, LEAVES.get(out(node), ())):
            if node != leaf and node.form not in ("next", "stop", "vstop") and FORMS[node.form].ins:
                yield replaced(tree, node, leaf)
    for change in (
        {"until": None},
        {"batch": None},
        {"batch": (tree.batch or 2) - 1 or None},
        {"length": 1},
        {"length": tree.length // 2},
        {"length": tree.length - 1},
        {"t0": 0},
        {"calls": 1},
        {"reduce": "sum"},
    ):
        if all(getattr(tree, k) != v for k, v in change.items()) and change.get("length", 1) > 0:
            made = dataclasses.replace(tree, **change)
            if not (made.batch is None and any(FORMS[n.form].batch for n in nodes(made))):
                yield made


def shrink(tree: Tree, fails: Callable[[Tree], bool], *, tries: int = 400) -> Tree:
    """A smallest tree that ``fails``, of at most ``tries`` that are looked at."""
    progress = True
    while progress:
        progress = False
        for candidate in smaller(tree):
            if tries == 0:
                return tree
            if size(candidate) >= size(tree) or candidate.length == candidate.batch:
                continue
            tries -= 1
            if fails(candidate):
                tree, progress = candidate, True
                break
    return tree
