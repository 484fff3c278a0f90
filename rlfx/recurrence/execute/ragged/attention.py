"""Softmax and product in one, over slices whose length depends on t: masked once, divided once, tiles as they are."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.ragged.infinite import of_valid
from rlfx.recurrence.execute.ragged.part import Here, Part, align_contracted
from rlfx.recurrence.execute.ragged.tiles import in_one, pieces_along
from rlfx.recurrence.execute.ragged.tree_reduction import reduced
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.domain import may_be_empty

_DOT = J.primitive("dot_general")


def attend(point: Here, equation: Equation, scores: Part, values: Part) -> list[Part]:
    """The rule of ``attend_p``."""
    product = dict(equation.params)
    side, axes = product.pop("side"), product.pop("axes")
    contracted = product["dimension_numbers"][0]
    (axis,), (along,) = contracted[side], contracted[1 - side]
    shape, values_shape = (v.shape for v in equation.inputs)
    if point.perturbed:
        scores = point.cleaned(in_one(scores), shape)
    pairs = pieces_along(point, scores, values, (axis, along))
    if pairs is None:
        pairs = [align_contracted(point, in_one(scores), axis, in_one(values), along)]
    xs, vs = zip(*pairs, strict=True)
    masked = [point.masked(x, shape, -jnp.inf) for x in xs]
    highest = reduced(jnp.maximum, jnp.max, lax.stop_gradient(masked), axis, point.halves)
    empty = point.value(shape[axis]) <= 0 if may_be_empty(point.domain, shape[axis]) else None
    if empty is not None:  # what is masked less the highest is -inf, were it itself not so
        highest = jnp.where(empty, 0, highest)
    highest = jnp.expand_dims(highest, axis)
    if point.perturbed:  # an exponential of -inf has no derivative
        weights = [point.masked(replace(x, data=jnp.exp(x.data - highest)), shape, 0) for x in xs]
        divisor = functools.reduce(jnp.add, [jnp.sum(w, axis) for w in weights])
    else:
        weights = [jnp.exp(x - highest) for x in masked]
        divisor = reduced(jnp.add, jnp.sum, weights, axis, point.halves)
    if empty is not None:
        divisor = jnp.where(empty, 1, divisor)
    # The weights are 0 where the values are of other timesteps.
    kept = [v if v.raw else replace(v, data=point.masked(v, values_shape, 0)) for v in vs]
    products = [
        of_valid(point, product, w, v, side, along, values_shape[along]) for w, v in zip(weights, kept, strict=True)
    ]
    out = functools.reduce(jnp.add, products)
    return [Part(out / lax.broadcast_in_dim(divisor, out.shape, axes), (None,) * out.ndim)]
