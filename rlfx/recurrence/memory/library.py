"""What XLA:CPU hands to a library (YNNPACK): reductions, with the arithmetic before and after them, as one call.

A call reads its operands from memory, and nothing that the library lacks (a selection, a slice, a gather) is computed
inside: such operands get buffers that they would not have in a loop of XLA's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.flat import Flat
from rlfx.recurrence.memory.sizes import Node, is_preferred, names

_STARTERS = names("reduce_sum", "reduce_max", "reduce_min")
_SUPPORTED = {J.ADD_ANY} | names(
    "abs", "add", "broadcast_in_dim", "ceil", "convert_element_type", "div", "erf", "exp", "expm1", "floor", "integer_pow",
    "log", "log1p", "logistic", "max", "min", "mul", "neg", "pad", "pow", "round", "rsqrt", "sign", "sqrt", "square", "sub",
    "tanh",
)  # fmt: skip


def library_calls(flat: Flat, consumers: dict[int, list[Node]], in_memory: set[int]) -> dict[int, Node]:
    """For each operation that is part of a call, the last one of that call.

    Args:
      consumers: of each value, the operations that read it.
      in_memory: values that need a buffer.
    """
    calls: dict[int, Node] = {}
    for node in reversed(flat.nodes):
        if node.op not in _STARTERS or id(node) in calls or not _preferred(node):
            continue
        members, last = {id(node): node}, node
        while True:
            user = _only_user(last, consumers, in_memory)
            if user is not None and _supported(user) and id(user) not in calls:
                members[id(user)] = last = user
                continue
            above = next(_producers(members, calls, consumers, in_memory), None)
            if above is None:
                break
            members[id(above)] = above
        calls |= dict.fromkeys(members, last)
    return calls


def _only_user(node: Node, consumers: dict[int, list[Node]], in_memory: set[int]) -> Node | None:
    (out,) = node.outs
    users = {id(u): u for u in consumers.get(id(out), ())}
    return next(iter(users.values())) if len(users) == 1 and id(out) not in in_memory else None


def _producers(members: dict[int, Node], calls: dict, consumers: dict, in_memory: set[int]) -> Iterator[Node]:
    """Operations that compute for the call alone."""
    for member in members.values():
        for value in member.ins:
            node = value.node
            if node is None or id(node) in members or id(node) in calls or id(value) in in_memory:
                continue
            if _supported(node) and all(id(u) in members for u in consumers[id(value)]):
                yield node


def _supported(node: Node) -> bool:
    return (node.op in _SUPPORTED or node.op in _STARTERS) and _preferred(node)


def _preferred(node: Node) -> bool:
    return is_preferred((*node.ins, *node.outs))
