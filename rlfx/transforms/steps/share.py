"""Which values of a scalar program to compute once: XLA's CPU fusion recomputes every shared one for each output."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from rlfx import _jaxpr as J
from rlfx._lazy import nx
from rlfx.transforms.steps import keys as F

_SINK = "sink"
_STORE = 3
"""What storing a value costs, in operations on it."""
_LOOP = 50
"""What one more loop over the environments costs inside a compiled function, in operations on one environment."""
_ONE_FUNCTION = {"inlineable": "false", "xla_cpu_small_call": "true"}
_PRODUCTS = frozenset(F.named("dot_general"))


def one_function(fn: Callable) -> Callable:
    """``fn``, compiled by XLA:CPU as one function: loops in it dispatch nothing.

    XLA's own attributes for small loops. Without them every operation of every iteration is looked up and called, which
    costs as much as thousands of scalar operations. No matrix products inside; elsewhere than on CPU this is a call.
    """
    call = _call(fn)
    # Without the barrier XLA dies where a constant is both an argument here and the counter of a small loop elsewhere;
    # without a function around the call, outside of any other, there is no call, and it dies of the calls inside.
    return jax.jit(lambda *args: call(*jax.lax.optimization_barrier(args)))


def _call(fn: Callable) -> Callable:
    def inner(*args):
        with set_xla_metadata(**dict.fromkeys(_ONE_FUNCTION)):  # calls inside are inlined as ever
            return fn(*args)

    def call(*args):
        with set_xla_metadata(**_ONE_FUNCTION):
            return jax.jit(inner)(*args)

    return call


@dataclasses.dataclass(frozen=True)
class Staged:
    """A function of flat lists of arrays, cut into stages at the values that are worth keeping.

    Each stage is a call that XLA does not inline, so that what it returns is stored, and used by later stages as it is;
    everything else that a later stage needs, it computes again. Stages change no number.

    Attributes:
      closed: the function.
      tree: the structure of what it returns.
      kept: for each stage, the variables that it returns.
      fixed: how many of the first leaves are the same at each call. Operands of products that depend on them alone
        (transposed weights) are no part of the stages: :meth:`weights` computes them, before the loop.
    """

    closed: Any
    tree: Any
    kept: tuple[tuple[Any, ...], ...]
    fixed: int

    @property
    def has_products(self) -> bool:
        """Whether matrix products are left, which run between stages."""
        return any(e.primitive in _PRODUCTS for e in self.closed.jaxpr.eqns)

    def weights(self, fixed: Any) -> list:
        """The operands of products that are the same at each call, from the first argument."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.invars[: self.fixed], jax.tree.leaves(fixed), strict=True))
        env |= dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        values = _values_of(jaxpr.eqns, list(_weights(jaxpr, self.fixed)), env)
        # Behind a barrier: XLA would fold a transposition into the product, and run that twice as slowly.
        return jax.lax.optimization_barrier(list(values.values()))

    def __call__(self, weights: Sequence, *args: Any) -> Any:
        """The function's value at ``args``, given :meth:`weights` of the first one."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        env |= dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env |= dict(zip(_weights(jaxpr, self.fixed), weights, strict=True))
        products = {v: e for e in jaxpr.eqns if e.primitive in _PRODUCTS for v in e.outvars}
        between = _between if products else _staged
        for has_products, stages in itertools.groupby(self.kept, key=lambda kept: any(v in products for v in kept)):
            if has_products:
                env |= {v: _bind(products[v], env)[0] for kept in stages for v in kept}
            else:
                env |= between(jaxpr.eqns, list(stages), env)
        return jax.tree.unflatten(self.tree, [x.val if J.is_literal(x) else env[x] for x in jaxpr.outvars])


def staged(fn: Callable, avals: Sequence[Any], block: int) -> Staged:
    """``fn`` at these types, cut where computing a value again costs more than to store it, for ``block`` environments.

    Its first argument is the same at each call.
    """
    leaves, tree = jax.tree.flatten(tuple(avals))
    outputs: list = []

    def flat(*xs):
        out = fn(*jax.tree.unflatten(tree, xs))
        outputs.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    closed = F.trace(flat, *leaves)
    fixed = len(jax.tree.leaves(avals[0]))
    return Staged(closed, outputs[0], _stages(closed.jaxpr, fixed, _STORE + _LOOP / block), fixed)


def _stages(jaxpr: Any, fixed: int, price: float) -> tuple[tuple[Any, ...], ...]:
    """The variables that each stage keeps; the last one keeps the outputs."""
    weights = _weights(jaxpr, fixed)
    computed = {v for e in jaxpr.eqns for v in e.outvars if v not in weights}
    kept = _worth_keeping(jaxpr, price) & computed
    for e in jaxpr.eqns:
        if e.primitive in _PRODUCTS:
            kept |= computed.intersection((*e.outvars, *(x for x in e.invars if not J.is_literal(x))))
    level: dict = {}
    for e in jaxpr.eqns:  # products have levels of their own, odd ones
        before = max((level.get(x, 0) for x in e.invars if not J.is_literal(x)), default=0)
        is_kept, product = any(v in kept for v in e.outvars), e.primitive in _PRODUCTS
        after = before + 1 + (before + 1 + product) % 2 if is_kept else before
        level.update(dict.fromkeys(e.outvars, after))
    ordered = sorted((v for e in jaxpr.eqns for v in e.outvars if v in kept), key=level.__getitem__)
    stages = [tuple(vs) for _, vs in itertools.groupby(ordered, key=level.__getitem__)]
    outputs = dict.fromkeys(x for x in jaxpr.outvars if not J.is_literal(x) and x in computed and x not in kept)
    return (*stages, tuple(outputs))


def _worth_keeping(jaxpr: Any, price: float) -> set:
    """The variables whose computation, once more for each output that needs them, costs more than ``price``.

    Only values without a post-dominator are candidates: where everything passes through a later value, that one is kept.
    """
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
    for i in range(len(jaxpr.eqns)):
        inputs = [cones[j] for j in (graph.successors(i) if i in graph else ())]
        cone = frozenset({i}).union(*inputs)
        again = reached.get(i, 0).bit_count() - 1
        if above.get(i) == _SINK and i not in outputs and len(cone) * again > price:
            kept.add(i)
            cone = frozenset()
        cones[i] = cone if i not in outputs else frozenset()
    return {v for i in kept for v in jaxpr.eqns[i].outvars}


def _bind(eqn: Any, env: dict) -> list:
    return J.bind(eqn.primitive, eqn.params, *[x.val if J.is_literal(x) else env[x] for x in eqn.invars])


def _weights(jaxpr: Any, fixed: int) -> dict:
    """The operands of products that are computed from the first ``fixed`` inputs alone."""
    varying = set(jaxpr.invars[fixed:])
    for e in jaxpr.eqns:
        if any(not J.is_literal(x) and x in varying for x in e.invars):
            varying.update(e.outvars)
    computed = {v for e in jaxpr.eqns for v in e.outvars if v not in varying}
    operands = (x for e in jaxpr.eqns if e.primitive in _PRODUCTS for x in e.invars if not J.is_literal(x))
    return dict.fromkeys(x for x in operands if x in computed)


def _values_of(eqns: Sequence[Any], wanted: Sequence[Any], env: dict) -> dict:
    needed, given = _needed(eqns, env, wanted)
    return dict(zip(wanted, _values(needed, given, wanted, *[env[v] for v in given]), strict=True))


def _between(eqns: Sequence[Any], stages: Sequence[tuple], env: dict) -> dict:
    """The values of consecutive stages between products, in one function that calls a function for each."""
    wanted = [v for kept in stages for v in kept]
    if not wanted:
        return {}
    _, given = _needed(eqns, env, wanted)
    run = one_function(lambda *args: list(_staged(eqns, stages, dict(zip(given, args, strict=True))).values()))
    return dict(zip(wanted, run(*[env[v] for v in given]), strict=True))


def _staged(eqns: Sequence[Any], stages: Sequence[tuple], known: dict) -> dict:
    """The values of consecutive stages, each a call."""
    here, found = dict(known), {}
    for kept in stages:
        needed, used = _needed(eqns, here, kept)
        stage = _call(functools.partial(_values, needed, used, kept))
        values = dict(zip(kept, stage(*[here[v] for v in used]), strict=True))
        here.update(values)
        found.update(values)
    return found


def _needed(eqns: Sequence[Any], known: dict, wanted: Iterable[Any]) -> tuple[list, list]:
    """The equations behind ``wanted``, down to what is known; and what they use of it."""
    needed = J.needed(eqns, wanted, known)
    return needed, list(dict.fromkeys(x for e in needed[::-1] for x in J.variables(e.invars) if x in known))


def _values(eqns: Sequence[Any], given: Sequence[Any], wanted: Sequence[Any], *args: Any) -> list:
    env = dict(zip(given, args, strict=True))
    for e in eqns:
        env.update(zip(e.outvars, _bind(e, env), strict=True))
    return [env[v] for v in wanted]
