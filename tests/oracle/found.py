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

_OWN = Node("sum", (Node("s_mapped", (span(":t + 1"),)),))
_NOW = Node("sum", (Node("ragged_series", (H,)),))

FOUND = {
    "a reduction over environments in a loop, under until": Tree(
        tuple(Node(f"{op}_b", (x,)) for op in ("mean", "max") for x in _AHEAD), IDLE, length=4, batch=2, until=4
    ),
    "a product of two slices, bounds that are minima, attention to what may be empty, with float64": Tree(
        (
            Node("vsum", (Node("mix", (span("t:t + 3"), Node("vslice", (V,), ("t:t + 3",)))),)),
            Node("outer", (span("2 * t:2 * t + 2"), span("2 * t:2 * t + 2"))),
            Node("sum", (Node("s_softmax", (span("t // 3:t // 2 + 1"), H)),)),
            Node("sum", (Node("s_times", (span("t - t % 3:t - t % 3 + 3"), H)),)),
        ),
        IDLE,
        length=5,
        batch=None,
        until=3,
        float="float64",
    ),
    "of the past in a loop: a derivative of its own, and a name at its own timestep": Tree(
        (H,),
        (("h", Node("add", (_NOW, _OWN))), *IDLE[1:]),
        length=2,
        batch=3,
    ),
    "data of environments as results and as ends, under until": Tree(
        (Node("xb"), Node("bwd8", (X, H, Node("xb"))), Node("read_end", (X, Node("xb")), ("t + 1",))),
        IDLE,
        length=5,
        batch=2,
        until=4,
    ),
    "a 16-bit parameter, under a plan": Tree(
        (Node("multiply", (Node("param16"), X)), Node("multiply", (Node("low"), X))), IDLE, length=4, batch=2
    ),
}
