"""Affine loops in a logarithmic number of steps: ``h[t] = a[t] * h[t - 1] + b[t]`` by an associative scan.

One iteration after another, a loop of T timesteps starts its operations T times; on a GPU that is most of the time of returns
and advantages. Here ``a`` and ``b`` are computed for all timesteps at once, two neighbours are put together, then four (Blelloch
1990), and all else that the loop computes follows from the states, at once. TimeRL and hand-written programs run such loops
one by one. The derivative is a recurrence of the same kind, the other way round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate, inlined
from rlfx.recurrence.schedule.affine import (
    ADD,
    COPY,
    DIV,
    MUL,
    NEG,
    SELECT,
    SUB,
    Operation,
    State,
    is_affine,
    order_of,
)
from rlfx.recurrence.schedule.physical import Iteration
from rlfx.recurrence.schedule.schedule import Loop
from rlfx.recurrence.schedule.truncated import Truncated

tree = jax.tree_util


@dataclass(frozen=True)
class AffineScan:
    """Iterations that are affine as an associative scan, others as ``other`` has them."""

    other: Iteration

    @property
    def differentiable(self) -> bool:
        return self.other.differentiable

    def of(self, loop: Loop) -> Iteration:
        return self if is_affine(loop) else self.other.of(loop)

    def rolled(self) -> Iteration:
        return replace(self, other=self.other.rolled())

    def truncated(self, at: Truncated, holds: Any, agreed: Callable) -> Iteration:
        return self

    def __str__(self) -> str:
        return "associative scan"

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple[Any, Any]:
        found = None if going is not None else _solved(step, init, xs, backward)
        return self.other(step, init, xs, backward, going) if found is None else found


def _solved(step: Callable, init: Any, xs: Any, backward: bool) -> tuple[Any, Any] | None:
    """As ``lax.scan``; None where a state is not affine after all (an environment keeps it by what it is, say)."""
    (state, structure), slices = tree.tree_flatten(init), tree.tree_leaves(xs)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    closed, (_, out) = jax.make_jaxpr(inlined(step), return_shape=True)(init, one)
    n, jaxpr = len(state), closed.jaxpr
    operations = [Operation(e.primitive, tuple(map(_name, e.invars)), tuple(e.outvars)) for e in jaxpr.eqns]
    after = [_name(v) for v in jaxpr.outvars[:n]]
    states = {i: State(frozenset({jaxpr.invars[i]}), after[i]) for i in range(n)}
    order = None if jaxpr.effects else order_of(operations, states)
    if order is None:
        return None
    before: dict[int, Any] = {}
    last = list(state)
    for i in order:
        h = _states(closed, i, state[i], before, slices, backward)
        before[i] = _shifted(h, state[i], backward)
        last[i] = h[0 if backward else -1]
    rest = J.without_dead_code(closed, [False] * n + [True] * (len(jaxpr.outvars) - n))
    ys = jax.vmap(J.jaxpr_as_fun(rest.jaxpr, rest.consts))(*(before[i] for i in range(n)), *slices)
    return tree.tree_unflatten(structure, last), tree.tree_unflatten(tree.tree_structure(out), ys)


def _name(atom: Any) -> Any:
    return None if J.is_literal(atom) else atom


def _shifted(h: Any, init: Any, backward: bool) -> Any:
    """The states before the iterations."""
    return jnp.concatenate([h[1:], init[None]] if backward else [init[None], h[:-1]])


def _states(closed: Any, i: int, init: Any, before: dict[int, Any], slices: Sequence, backward: bool) -> Any:
    """State ``i`` after every iteration, from those of which it is known before every iteration."""
    mine = J.without_dead_code(closed, [j == i for j in range(len(closed.jaxpr.outvars))])
    count = len(closed.jaxpr.invars) - len(slices)

    def line(known: dict, at_t: Sequence) -> tuple:
        own = Line(jnp.ones_like(init), jnp.zeros_like(init))
        args = [own if j == i else known.get(j) for j in range(count)]
        (found,) = evaluate(mine.jaxpr, mine.consts, [*args, *at_t], _rule)
        return (found.slope, found.value) if isinstance(found, Line) else (None, jnp.asarray(found))

    slope, value = jax.vmap(line)(before, list(slices))
    return value if slope is None else recurrence(slope, value, init, backward)


# -- coefficients


@dataclass(frozen=True)
class Line:
    """``slope * state + value``."""

    slope: Any
    value: Any


def _line(x: Any) -> Line:
    return x if isinstance(x, Line) else Line(jnp.zeros_like(x), x)


def _mul(x: Any, y: Any) -> Line:
    line, factor = (x, y) if isinstance(x, Line) else (y, x)
    return Line(line.slope * factor, line.value * factor)


def _select(which: Any, *cases: Any) -> Line:
    cases = tuple(map(_line, cases))
    return Line(jax.lax.select_n(which, *(c.slope for c in cases)), jax.lax.select_n(which, *(c.value for c in cases)))


def _add(x: Any, y: Any) -> Line:
    return Line(_line(x).slope + _line(y).slope, _line(x).value + _line(y).value)


#: What operations make of lines: ``(*operands) -> line``. (Those of ``schedule/affine.py``.)
_LINES: dict[Any, Callable[..., Line]] = {
    NEG: lambda x: Line(-x.slope, -x.value),
    COPY: lambda x: x,
    ADD: _add,
    SUB: lambda x, y: Line(_line(x).slope - _line(y).slope, _line(x).value - _line(y).value),
    MUL: _mul,
    DIV: lambda x, y: Line(x.slope / y, x.value / y),
    SELECT: _select,
}


def _rule(eqn: Any, operands: list) -> list | None:
    if not any(isinstance(x, Line) for x in operands):
        return None
    return [_LINES[eqn.primitive](*operands)]


# -- the recurrence


def recurrence(slopes: Any, values: Any, init: Any, backward: bool = False) -> Any:
    """``h[t] = slopes[t] * h[t - 1] + values[t]`` from ``h[-1] = init``, element by element; backward: ``h[t + 1]``, ``h[T]``.

    Args:
      slopes, values: [T, ...], of one dtype.
      init: [...].

    Returns:
      [T, ...]. A slope of zero ends what was before, however large.

    Example:
      >>> import jax.numpy as jnp
      >>> recurrence(jnp.full(4, 2.0), jnp.ones(4), jnp.float32(0.0))
      Array([ 1.,  3.,  7., 15.], dtype=float32)
    """
    return (_differentiable if J.is_inexact(jax.typeof(values)) else _recurrence)(slopes, values, init, backward)


def _recurrence(slopes: Any, values: Any, init: Any, backward: bool) -> Any:
    first = -1 if backward else 0
    values = values.at[first].add(slopes[first] * init)
    return jax.lax.associative_scan(_then, (slopes, values), reverse=backward)[1]


def _then(one: tuple, two: tuple) -> tuple:
    """One map after another. Zero times what has overflowed is zero: iterations one by one never meet it."""
    (a, b), (c, d) = one, two
    product = jnp.where((a == 0) | (c == 0), jnp.zeros_like(a), a * c)
    return product, jnp.where(b == 0, d, c * b + d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable(slopes: Any, values: Any, init: Any, backward: bool) -> Any:
    return _recurrence(slopes, values, init, backward)


def _forward(slopes: Any, values: Any, init: Any, backward: bool) -> tuple:
    h = _differentiable(slopes, values, init, backward)
    return h, (slopes, h, init)


def _back(backward: bool, residuals: tuple, cotangent: Any) -> tuple:
    slopes, h, init = residuals
    slope = slopes[-1 if backward else 0]
    zero = jnp.zeros_like(init)
    own: Any = _differentiable(_shifted(slopes, zero, not backward), cotangent, zero, not backward)
    return own * _shifted(h, init, backward), own, (own[-1] if backward else own[0]) * slope


_differentiable.defvjp(_forward, _back)
