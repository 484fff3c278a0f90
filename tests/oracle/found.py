"""Trees that were wrong once, shrunk. Each stays in the default tests under the name of its cause."""

from __future__ import annotations

from tests.oracle.tree import Node, Tree

H, V, X = Node("h"), Node("v"), Node("x")
IDLE = (("h", H), ("v", V), ("n", Node("next")))


def span(at: str) -> Node:
    return Node("slice", (H,), (at,))


# values of loops that run backwards, and forwards over what comes of those
_AHEAD = [
    Node("discounted2", (span("t:"), span("t:"))),
    *(Node(f"bwd{i}", (H, X, H)) for i in (10,)),
    Node("fwd1", (Node("bwd9", (H, X, H)), X, H)),
]

FOUND = {
    "a reduction over environments in a loop, under until": Tree(
        tuple(Node(f"{op}_b", (x,)) for op in ("mean", "max") for x in _AHEAD), IDLE, length=4, batch=2, until=4
    ),
    "a product of two slices with float64": Tree(
        (Node("outer", (span("2 * t:2 * t + 2"), span("2 * t:2 * t + 2"))),),
        IDLE,
        length=3,
        batch=None,
        float="float64",
    ),
    "a 16-bit parameter, under a plan": Tree(
        (Node("multiply", (Node("param16"), X)), Node("multiply", (Node("low"), X))), IDLE, length=4, batch=2
    ),
}
