"""The evaluation of one equation with ragged operands or outputs, at all points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS
from rlfx.errors import UnsupportedSliceOp
from rlfx.recurrence.execute.ragged import reductions, shapes, slices
from rlfx.recurrence.execute.ragged.attention import attend
from rlfx.recurrence.execute.ragged.custom import custom_rule
from rlfx.recurrence.execute.ragged.part import Here, Part, unsupported
from rlfx.recurrence.execute.ragged.tiles import joined, tiled_product, tiled_reduction, tilewise, tilewise_unperturbed
from rlfx.recurrence.execute.values import COMPUTED, Value, map_over, time_axis
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.primitives import attend_p, custom_p
from rlfx.recurrence.schedule.physical import ExecutablePlan
from rlfx.recurrence.schedule.tiling import POSITIONWISE


def evaluate_ragged(
    equation: Equation, values: Sequence[Value], domain: Domain, t: Value, n: Any, plan: ExecutablePlan
) -> list[Value]:
    """Evaluate an equation with ragged operands or outputs at all points.

    Args:
      values: its operands.
      t: the time within the domain: all of them, or a scalar inside a loop.
      n: the length: the integer T, or a Value under ``until=``.
      plan: of the execution: whether it may be differentiated, and what pays on its target.
    """
    rule = rule_of(equation)
    length = n if isinstance(n, Value) else Value(n)
    # What acting and learning compute of all timesteps alike, XLA computes once.
    perturbed = plan.differentiated or "t" in t.dims
    # Many rows at once are reduced by XLA:CPU's library, as fast as by halves and compiled sooner.
    halves = plan.target.rewrites.tree_reductions and "t" not in t.dims
    meta: list[tuple] = []  # (starts, clean) of each output: what belongs to no trace

    def at(point_t, point_n, *data):
        data = data if equation.op in _TILED else map(joined, data)
        parts = [Part(d, v.starts or (None,) * np.ndim(d), v.clean, v.raw) for d, v in zip(data, values, strict=True)]
        outs = rule(Here(domain, point_t, point_n, perturbed, halves), equation, *parts)
        meta[:] = [(o.starts if o.ragged else None, o.clean) for o in outs]
        return [o.data for o in outs]

    kept = (v.raw for v in values if v.starts is not None) if equation.op in _KEEPS_RAW else ()
    raw = min(kept, default=COMPUTED)
    data = [v.data for v in values]
    dims = frozenset().union(*(v.dims for v in values)) if values else frozenset()
    # Inside a loop nothing is shared by all t: what is not valid is cleaned there, unless no derivative can come of it.
    if ("t" in t.dims or not perturbed) and "t" not in dims and _keeps_sharing(equation, values):
        mapped = map_over(lambda *d: at(None, None, *d), dims, [v.dims for v in values])
        outs = mapped(*data)
        return [Value(d, dims, starts, False, raw) for d, (starts, _) in zip(outs, meta, strict=True)]
    dims = dims | t.dims | (length.dims if isinstance(n, Value) else frozenset())
    before = [_before(v.shape) if "t" in dims else 0 for v in equation.outputs]
    given = [t, length, *values]
    axes = [v.time_axis for v in given], [time_axis(dims, i) for i in before]
    outs = map_over(at, dims, [v.dims for v in given], *axes)(t.data, length.data, *data)
    return [Value(d, dims, starts, clean, raw, i) for d, (starts, clean), i in zip(outs, meta, before, strict=True)]


def _before(shape: Sequence) -> int:
    """How many axes of an output lie before that of t: those before the one whose length depends on t."""
    return next(iter(J.symbolic_axes(shape)), 0)


def rule_of(equation: Equation) -> Callable[..., list[Part]]:
    """The rule of an equation with ragged operands or outputs."""
    rule = RULES.get(equation.op)
    if rule is None:
        raise unsupported(equation, f"{equation.op.name} has no meaning on a slice whose length depends on t")
    return rule


def _keeps_sharing(equation: Equation, values: Sequence[Value]) -> bool:
    """Whether the rule acts on positions one by one, alike at every t: then what is shared by all t stays so."""
    ragged = [v for v in values if v.starts is not None]
    if not ragged or not _acts_on_positions(equation):
        return False
    keys = {tuple((i - len(v.starts), str(s)) for i, s in enumerate(v.starts) if s is not None) for v in ragged}
    return len(keys) == 1


def _acts_on_positions(equation: Equation) -> bool:
    if equation.op is custom_p:
        try:
            return equation.params["custom"].only(POSITIONWISE)
        except UnsupportedSliceOp:  # it has a derivative without meaning here: raised where it is needed
            return False
    return equation.op in POSITIONWISE


def _scan(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    params = equation.params
    length, (n_consts, n_carry) = params["length"], J.scan_counts(dict(params))
    consts, init, xs = parts[:n_consts], parts[n_consts : n_consts + n_carry], parts[n_consts + n_carry :]
    if not J.is_symbolic(length) or any(p.ragged for p in (*consts, *init)) or any(p.ragged != (0,) for p in xs):
        raise unsupported(
            equation, "A scan over something else than the timesteps of a slice whose length depends on t"
        )
    body = J.jaxpr_as_fun(*J.body_of(params["jaxpr"]))
    width, n = point.width(length), point.value(length)
    front = [
        point.cleaned(point.aligned(p, 0, 0, width), v.shape)
        for p, v in zip(xs, equation.inputs[-len(xs) :], strict=True)
    ]
    front = [
        point.cleaned(Part(p.data, p.starts, False), v.shape)
        for p, v in zip(front, equation.inputs[-len(xs) :], strict=True)
    ]

    def step(carry, ix):
        i, x = ix
        out = body(*(c.data for c in consts), *carry, *x)
        following = [jnp.where(i < n, new, old) for new, old in zip(out[:n_carry], carry, strict=True)]
        return following, out[n_carry:]

    final, ys = lax.scan(
        step, [p.data for p in init], (lax.iota(jnp.int32, width), [p.data for p in front]), reverse=params["reverse"]
    )
    return [*(Part(c, (None,) * c.ndim) for c in final), *(Part(y, (0,) + (None,) * (y.ndim - 1), False) for y in ys)]


#: ``(point, equation, *operands) -> outputs``, by primitive.
RULES: dict[Any, Callable[..., list[Part]]] = {**shapes.RULES, **reductions.RULES, **slices.RULES, J.SCAN: _scan}
RULES[custom_p] = custom_rule(rule_of)

#: What only picks and moves data: that of other timesteps stays such.
_KEEPS_RAW = shapes.MOVES | {J.primitive(n) for n in ("rev", "slice", "dynamic_slice", "gather")}

#: The rules that take tiles of a ragged axis one by one.
_TILED = {
    **{op: tilewise_unperturbed(RULES[op]) for op in J.ELEMENTWISE},
    **{op: tilewise(RULES[op]) for op in (*shapes.MOVES, J.primitive("broadcast_in_dim"))},
    **{op: tiled_reduction(RULES[op], monoid.combine) for op, monoid in REDUCTIONS.items()},
    J.primitive("dot_general"): tiled_product(RULES[J.primitive("dot_general")]),
    attend_p: attend,
}
RULES |= _TILED
