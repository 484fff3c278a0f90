"""Programs as values: a tree of forms, with what it is run for. Neither side of the comparison is known here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CAPACITY = 3  # of the history in the carry


@dataclass(frozen=True)
class Node:
    """One form applied to its arguments.

    Attributes:
      form: a row of ``forms.FORMS``.
      args: the operands.
      at: what is no operand, as source: an index, the bounds of a slice, a number.
    """

    form: str
    args: tuple[Node, ...] = ()
    at: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tree:
    """A per-timestep program.

    Attributes:
      roots: what the program computes: its aux, and, weighted, its loss.
      carried: ``(name, node)`` of the next carry; ``k`` counts timesteps and needs no node.
      history: the node whose last values are kept across calls, or None.
      until: the number of ``carry["n"]`` at which an environment ends, or None.
      calls: into how many calls, one after the other, the 2 * T timesteps are cut (1: one call of T).
      float: the dtype of parameters and carry.
    """

    roots: tuple[Node, ...]
    carried: tuple[tuple[str, Node], ...]
    history: Node | None = None
    length: int = 3
    batch: int | None = 2
    reduce: str = "mean"
    until: int | None = None
    t0: int = 0
    calls: int = 1
    float: str = "float32"
    data: int = 0


def nodes(tree: Tree) -> list[Node]:
    """Every node once, operands before what uses them."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> Iterator[Node]:
        if node not in found:
            for arg in node.args:
                yield from visit(arg)
            if node not in found:
                found[node] = None
                yield node

    tops = [*tree.roots, *(n for _, n in tree.carried), *([tree.history] if tree.history else [])]
    return [n for top in tops for n in visit(top)]


def filled(template: str, node: Node, value: dict[Node, str], series: dict[Node, str], name: str) -> str:
    """A form's text: ``$0`` is the value of its first operand, ``@0`` that operand at all times, ``#0`` is ``at[0]``."""
    for i, arg in reversed(list(enumerate(node.args))):
        template = template.replace(f"${i}", value[arg]).replace(f"@{i}", series[arg])
    for i, text in enumerate(node.at):
        template = template.replace(f"#{i}", text)
    return template.replace("&", repr(name))


def numbers(tree: Tree) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``(params, carry)``: float64 and integers, with the environments' axis also where the program has no batch.

    No two of the floats are equal: at a tie, a difference would decide what the program does not. What is kept in 16 bits
    is a multiple of 1/128 below 2, the same in every float dtype.
    """
    rng = np.random.default_rng(tree.data)
    t, b = tree.length * tree.calls, tree.batch or 1

    def floats(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape)

    def distinct(*shape: int) -> np.ndarray:
        """At least 1.6 / size apart: maxima and comparisons among them are clear."""
        size = math.prod(shape)
        if size == 1:
            return floats(*shape)
        return (rng.permutation(size) + rng.uniform(0, 0.1)).reshape(shape) / (size - 1) * 1.6 - 0.8

    def short(*shape: int) -> np.ndarray:
        return rng.permutation(511)[: math.prod(shape)].reshape(shape) / 128 - 2

    params = {
        "a": floats(),
        "b": floats(),
        "w": floats(2),
        "W": floats(2, 2),
        "xs": distinct(t, b),
        "us": distinct(t, b, 2),
        "ts": distinct(t),
        "bs": distinct(b),
        "q": short(1)[0],  # bfloat16
        "lo": short(t, b) if t * b < 512 else floats(t, b),  # bfloat16
        "rw": rng.integers(-3, 4, (t, b)),  # int8
    }
    carry = {
        "h": distinct(b),
        "v": distinct(b, 2),
        "n": rng.integers(0, 4, b),
        "k": np.zeros(b, int),
        "m": floats(),
        "buffer": floats(b, CAPACITY),
        "zero": np.zeros((b, 0, 3)),
    }
    return params, carry


def replaced(tree: Tree, old: Node, new: Node) -> Tree:
    """The tree with ``new`` wherever ``old`` stands."""
    memo: dict[Node, Node] = {old: new}

    def swap(node: Node) -> Node:
        if node not in memo:
            memo[node] = dataclasses.replace(node, args=tuple(map(swap, node.args)))
        return memo[node]

    return dataclasses.replace(
        tree,
        roots=tuple(map(swap, tree.roots)),
        carried=tuple((k, swap(n)) for k, n in tree.carried),
        history=None if tree.history is None else swap(tree.history),
    )
