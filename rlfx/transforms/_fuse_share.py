"""Which values of a scalar program to compute once: XLA's CPU fusion recomputes every shared one for each output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx

from rlfx import _jaxpr as J
from rlfx.transforms import _keys as F

_SINK = "sink"
WORD = 8
"""How much dearer it is to store an integer than a float."""


def share(step: Callable, block: int, *, overhead: int = 2000, store: int = 8) -> Callable:
    """``step`` (a function of flat lists of arrays), with barriers behind values that are worth keeping.

    A value is kept if computing it again for every output that needs it costs more operations than storing it does:
    ``store`` plus ``overhead / block`` (starting one more loop costs as much as about ``overhead`` operations). Only
    values without a post-dominator are candidates: where everything passes through a later value, that one is kept.
    Barriers change no number.
    """

    def shared_step(one: jax.Array, *args: Any):
        leaves, tree = jax.tree.flatten(args)
        outputs: list = []

        def flat(*xs):
            out = step(*jax.tree.unflatten(tree, xs))
            outputs.append(jax.tree.structure(out))
            return jax.tree.leaves(out)

        closed = F.trace(flat, *[jax.typeof(x) for x in leaves])
        kept = _worth_keeping(closed.jaxpr, store + overhead / block)
        return jax.tree.unflatten(outputs[0], _evaluate(closed, kept, leaves, one))

    return shared_step


def _worth_keeping(jaxpr: Any, price: float) -> set:
    """The variables to store."""
    producer = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    graph = nx.DiGraph()
    for i, eqn in enumerate(jaxpr.eqns):
        graph.add_edges_from((i, producer[x]) for x in eqn.invars if not J.is_literal(x) and x in producer)
    outputs: dict[int, int] = {}
    for n, x in enumerate(jaxpr.outvars):
        if not J.is_literal(x) and x in producer:
            outputs[producer[x]] = outputs.get(producer[x], 0) | 1 << n
            graph.add_edge(_SINK, producer[x])
    if not outputs:
        return set()
    # Edges point from consumers to producers: dominators from the sink are post-dominators of the program.
    above = nx.immediate_dominators(graph, _SINK)
    reached = dict(outputs)
    for i in reversed(range(len(jaxpr.eqns))):
        for j in graph.successors(i) if i in graph else ():
            reached[j] = reached.get(j, 0) | reached.get(i, 0)
    kept: set = set()
    cones: dict[int, frozenset] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        inputs = [cones[j] for j in (graph.successors(i) if i in graph else ())]
        cone = frozenset({i}).union(*inputs)
        again = reached.get(i, 0).bit_count() - 1
        dear = any(v.aval.dtype.kind in "iu" for v in eqn.outvars)  # two halves instead of one array
        if above.get(i) == _SINK and i not in outputs and len(cone) * again > price * (WORD if dear else 1):
            kept.add(i)
            cone = frozenset()
        cones[i] = cone if i not in outputs else frozenset()
    return {v for i in kept for v in jaxpr.eqns[i].outvars}


def _stored(x: jax.Array, one: jax.Array) -> jax.Array:
    """``x``, through a division by a 1 that XLA cannot see.

    XLA:CPU drops optimization barriers before it fuses, and never duplicates a division: this is the cheapest
    operation that makes it store a value. Words travel as two exact halves.
    """
    if x.dtype == jnp.float32:
        return x / one
    if x.dtype == bool:
        return x.astype(jnp.float32) / one > 0.5
    low, high = (x & x.dtype.type(0xFFFF)).astype(jnp.float32), (x.view(jnp.uint32) >> 16).astype(jnp.float32)
    word = (low / one).astype(jnp.uint32) | ((high / one).astype(jnp.uint32) << 16)
    return word.view(x.dtype)


def _evaluate(closed: Any, kept: set, args: list, one: jax.Array) -> list:
    env = dict(zip(closed.jaxpr.invars, args, strict=True)) | dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        inputs = [x.val if J.is_literal(x) else env[x] for x in eqn.invars]
        for v, value in zip(eqn.outvars, J.bind(eqn.primitive, eqn.params, *inputs), strict=True):
            env[v] = _stored(value, one) if v in kept else value
    return [x.val if J.is_literal(x) else env[x] for x in closed.jaxpr.outvars]
