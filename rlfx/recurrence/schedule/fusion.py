"""What a loop over t could be given for all timesteps it computes itself, if that costs less than to keep it.

The opposite of ``fission.py``. Products with inputs, ``x[t] @ w`` in the gates of a recurrent cell, need no recurrence: before
the loop they are one product of many rows. Their values at all timesteps then go to memory and back, several times the size
of what they are computed from. In the loop a product has the rows of one timestep, and nothing is kept. So do outer products,
``k[t][:, None] * v[t]``, and what else is large and made of little: all of it comes from two vectors of a timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_in_all, bytes_of, starts_of
from rlfx.recurrence.analysis.cuts import Network, units
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.ir.directives import Inside
from rlfx.recurrence.ir.program import Equation, Program, Var

#: What is kept is written and read.
_TWICE = 2.0
#: How much faster than memory the cache is from which a loop reads weights at every timestep.
_NEAR = 8.0
#: Bytes that are as close to a core as can be: what only grows is not computed in a loop to spare less than that.
CLOSE = 1 << 15


def fused(
    graph: Graph, levels: Mapping[Equation, int], level: int, needed: AbstractSet[Equation], products: bool
) -> frozenset[Equation]:
    """The equations of earlier stages that a loop computes itself; none if what it is given of them stays close by.

    Args:
      levels: of all equations.
      level: of what can run inside the loop.
      needed: what the loop evaluates in any case.
      products: whether it may compute products, too, each of which starts by itself; what only grows is fused with what reads it.
    """
    program, asked = graph.program, graph.program.directives.inside
    if asked is None or "t" in program.directives.vectorize:
        return frozenset()
    for multiplies, room in ((True, asked.room), (False, min(asked.room, CLOSE)))[not products :]:
        could = _candidates(graph, levels, level, needed, multiplies)
        if not any(e.op in PRODUCTS if multiplies else grows(e, program) for e in could):
            continue
        given = [v for e in could for v in e.outputs if not needed.isdisjoint(graph.users.get(v, ()))]
        leaves = sum(bytes_in_all(v, program, asked.batch) for v in given) > room
        if leaves and (inside := _cheapest(could, needed, graph, asked)):
            return inside
    return frozenset()


def grows(e: Equation, program: Program) -> bool:
    """Whether a pointwise equation makes much more than it reads of a timestep, as outer products do: ``k[:, None] * v``."""
    if e.op in PRODUCTS or not e.is_pointwise or not any("t" in program.dims_of(v) for v in e.outputs):
        return False
    read = sum(bytes_of(v, program.domain) for v in e.inputs if isinstance(v, Var) and "t" in program.dims_of(v))
    return sum(bytes_of(v, program.domain) for v in e.outputs) >= 2 * read > 0


def bytes_given(program: Program, batch: int, products: bool = True) -> int:
    """Bytes, at all timesteps of some environments, of what grows and of ``products``: loops over t are given no more."""
    made = (e for e in program.equations if (products and e.op in PRODUCTS) or grows(e, program))
    found = [v for e in made for v in e.outputs if "t" in program.dims_of(v)]
    return sum(bytes_in_all(v, program, batch) for v in found)


def bytes_spared(inside: AbstractSet[Equation], graph: Graph) -> int:
    """Bytes, at all timesteps, of what the rest of a loop reads of equations that it computes itself."""
    asked, program = graph.program.directives.inside, graph.program
    others = lambda v: any(user not in inside for user in graph.users.get(v, ()))  # noqa: E731
    return sum(
        bytes_in_all(v, program, asked.batch) for e in inside for v in e.outputs if asked is not None and others(v)
    )


def _candidates(
    graph: Graph, levels: Mapping[Equation, int], level: int, needed: AbstractSet[Equation], products: bool
) -> set[Equation]:
    """What the loop may compute, with ``products`` or without: nothing before it, and no other timestep of it, uses it."""
    program, found = graph.program, set()

    def may(e: Equation) -> bool:
        known = levels[e] < level and all("t" in program.dims_of(v) for v in e.outputs)
        loops = e.op in (J.SCAN, J.WHILE, J.COND) or e.calls or (e.op in PRODUCTS and not products)
        return known and e.is_pointwise and not (e.is_ragged or e.has_effects or loops)

    def now_or_later(v: Var) -> bool:
        if program.domain.until and v in graph.complete:  # a loop that has ended computes nothing
            return False
        return all(
            not user.is_read if user in needed or user in found else levels[user] > level and user.end is not v
            for user in graph.users.get(v, ())
        )

    for component in reversed(graph.components):  # users come first
        (e, *more) = component
        if not more and may(e) and all(map(now_or_later, e.outputs)):
            found.add(e)
    return found


def _cheapest(could: AbstractSet, needed: AbstractSet, graph: Graph, asked: Inside) -> frozenset[Equation]:
    """Those that it costs least to compute inside: a minimum cut.

    What is computed before the loop and read in it is written and read; what is computed in it starts at every timestep, and
    reads its weights. If a value is computed inside, so is all that uses it.
    """
    program = graph.program
    network = Network()
    for e in could:
        network.add("before", e, units(_work_inside(e, program, asked)))
        for v in e.outputs:
            network.add(e, v, units(_TWICE * bytes_in_all(v, program, asked.batch)))
            for user in graph.users.get(v, ()):
                if user in could:
                    network.add(v, user)
                    network.add(user, e)
                elif user in needed:
                    network.add(v, "inside")
    _, inside = network.sides("before", "inside")
    return frozenset(e for e in could if e in inside)


def _work_inside(e: Equation, program: Program, asked: Inside) -> float:
    """What it costs more to compute an equation timestep by timestep, in bytes of memory traffic."""
    read = [v for v in e.inputs if isinstance(v, Var) and not program.dims_of(v)] if e.op in PRODUCTS else []
    weights = sum(bytes_of(v, program.domain) for v in read)
    return program.domain.length * (asked.start * starts_of(e.op, e.params, program.domain) + weights / _NEAR)
