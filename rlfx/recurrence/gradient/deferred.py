"""Weight gradients of a recurrence as one contraction after its backward loop, where that is faster.

``jax.lax.scan`` adds to the gradient of every weight at each timestep. With few rows a timestep those products are small, and the
sum is read and written each time. Deferred, the backward loop only puts out the cotangents of the products, and one contraction
over all timesteps and rows follows. TimeRL has no counterpart: its backward pass is a program of its own, scheduled like
any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.loops import Scan
from rlfx.recurrence.ir.interpret import evaluate
from rlfx.recurrence.language.precision import narrowed, widened

tree = jax.tree_util

_DOT = J.primitive("dot_general")


@dataclass(frozen=True)
class Product:
    """A product of a value of the loop with a weight.

    Attributes:
      eqn: the equation.
      weight: which of the consts.
      side: which operand the weight is.
    """

    eqn: Any
    weight: int
    side: int

    @property
    def value(self) -> Any:
        """The other operand."""
        return self.eqn.invars[1 - self.side]

    @property
    def rows(self) -> int:
        """How many rows of the value are multiplied with the weight."""
        contracted = self.eqn.params["dimension_numbers"][0][1 - self.side]
        return math.prod(n for i, n in enumerate(self.value.aval.shape) if i not in contracted)

    def of(self, value: Any, weight: Any) -> Any:
        """The product."""
        operands = (weight, value) if self.side == 0 else (value, weight)
        (out,) = J.bind(_DOT, dict(self.eqn.params), *operands)
        return out


@dataclass(frozen=True)
class Deferring(Scan):
    """As :class:`Scan`; in reverse mode, gradients of weights are contracted after the loop.

    Weights are what the loop only reads, multiplied with values of few rows. Gradients of all that it only reads are added
    up in at least float32. Where neither makes a difference, it is a ``Scan``.

    Attributes:
      most_rows: a timestep, at most, for which a contraction at the end is faster.
    """

    most_rows: int = 0

    def __call__(self, step: Callable, init: Any, xs: Any, backward: bool, going: Callable | None) -> tuple[Any, Any]:
        found = _contracted_after(self, step, init, xs, backward)
        return super().__call__(step, init, xs, backward, going) if found is None else found


def _contracted_after(by: Deferring, step: Callable, init: Any, xs: Any, backward: bool) -> tuple | None:
    """As the loop; None if there is nothing that comes after it."""
    leaves, structure = tree.tree_flatten((init, xs))
    split = len(tree.tree_leaves(init))
    at_t = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves[split:]]
    one = tree.tree_unflatten(structure, [*map(jax.typeof, leaves[:split]), *at_t])
    closed, outs = jax.make_jaxpr(step, return_shape=True)(*one)
    products = _products(closed.jaxpr, by.most_rows)
    if not products and all(widened(c) is c for c in closed.consts):
        return None
    loop = _Deferred(closed.jaxpr, tuple(products), split, backward, by.together(xs))
    consts = list(map(widened, closed.consts))
    return tree.tree_unflatten(tree.tree_structure(outs), loop(consts, leaves[:split], leaves[split:]))


def _products(jaxpr: Any, most_rows: int) -> list[Product]:
    """The products with weights, in order."""
    weights = {v: i for i, v in enumerate(jaxpr.constvars)}
    constant = set(weights)
    found = []
    for e in jaxpr.eqns:
        product = _product(e, weights) if e.primitive is _DOT else None
        if product and product.value not in constant and product.rows <= most_rows:
            found.append(product)
        if all(J.is_literal(v) or v in constant for v in e.invars):
            constant.update(e.outvars)
    return found


def _product(eqn: Any, weights: dict) -> Product | None:
    """A product of floats, without batch axes, of which one operand is a weight."""
    sides = [i for i, v in enumerate(eqn.invars) if not J.is_literal(v) and v in weights]
    batched = any(eqn.params["dimension_numbers"][1])
    if len(sides) != 1 or batched or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return None
    return Product(eqn, weights[eqn.invars[sides[0]]], sides[0])


@dataclass(frozen=True)
class _Deferred:
    jaxpr: Any
    products: tuple[Product, ...]
    split: int
    backward: bool
    unroll: int

    def __call__(self, consts: Sequence, init: Sequence, xs: Sequence) -> list:
        if not self.products:
            return self._run(consts, init, xs, None)[0]

        @jax.custom_vjp
        def run(consts, init, xs):
            return self._run(consts, init, xs, None)[0]

        def forward(consts, init, xs):
            length = xs[0].shape[0]
            taps = [
                jnp.zeros((length, *p.eqn.outvars[0].aval.shape), p.eqn.outvars[0].aval.dtype) for p in self.products
            ]
            # The products take the weights from outside, so that no gradient goes to them here; a derivative of this one does.
            run = functools.partial(self._run, weights=consts)
            outs, pullback, values = jax.vjp(run, consts, init, xs, taps, has_aux=True)
            return outs, (pullback, values, consts)

        def back(residuals, cotangents):
            pullback, values, consts = residuals
            grads, *rest, taps = pullback(cotangents)
            for p, value, tap in zip(self.products, values, taps, strict=True):
                weight = narrowed(consts[p.weight], self.jaxpr.constvars[p.weight].aval.dtype)
                _, of_weight = jax.vjp(lambda w, p=p, x=value: jax.vmap(lambda x: p.of(x, w))(x), weight)
                grads[p.weight] = grads[p.weight] + widened(of_weight(tap)[0])
            return grads, *rest

        run.defvjp(forward, back)
        return run(list(consts), list(init), list(xs))

    def _run(
        self, consts: Sequence, init: Sequence, xs: Sequence, taps: Sequence | None, weights: Sequence | None = None
    ) -> tuple[list, list]:
        """The loop; with taps, also the values that ``weights`` were multiplied with, in place of those among the consts."""

        def body(state, at_t):
            at_t, tapped = at_t
            outs, values = self._step(consts, [*state, *at_t], tapped, weights)
            return outs[: self.split], (outs[self.split :], values)

        state, (ys, values) = jax.lax.scan(body, list(init), (list(xs), taps), reverse=self.backward, unroll=self.unroll)
        return [*state, *ys], values

    def _step(
        self, consts: Sequence, args: Sequence, taps: Sequence | None, weights: Sequence | None
    ) -> tuple[list, list]:
        consts = [narrowed(c, v.aval.dtype) for c, v in zip(consts, self.jaxpr.constvars, strict=True)]
        numbers = {id(p.eqn): i for i, p in enumerate(self.products)}
        values = []

        def rule(eqn, operands):
            number = numbers.get(id(eqn))
            if number is None or taps is None or weights is None:
                return None
            product = self.products[number]
            value, weight = operands[1 - product.side], narrowed(weights[product.weight], operands[product.side].dtype)
            values.append(value)
            return [product.of(value, weight) + taps[number]]

        return evaluate(self.jaxpr, consts, args, rule), values
