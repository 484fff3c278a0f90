"""A loop over time, and its derivative as a loop of rlfx's own: what is kept of an iteration is chosen, weights come after it.

``jax.lax.scan`` adds to the gradient of every weight at each timestep. With few rows a timestep those products are small, and the
sum is read and written each time. Here the way back only puts out the cotangents of such products, and one contraction over
all timesteps and rows follows. What the way back needs of an iteration is kept once, what is cheap is made again
(``directions.py``); a cotangent that several have is put out once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.gradient.directions import Body, Directions, directions, evaluated, value_in
from rlfx.recurrence.ir.interpret import evaluate
from rlfx.recurrence.language.precision import narrowed, wide, widened

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

    def gradient(self, values: Any, weight: Any, cotangents: Any) -> Any:
        """The weight's, of all timesteps at once."""
        _, pullback = jax.vjp(lambda w: jax.vmap(lambda x: self.of(x, w))(values), weight)
        return pullback(cotangents)[0]


@dataclass(frozen=True, eq=False)
class OwnDerivative:
    """A loop, in reverse mode with a derivative of its own.

    Attributes:
      body: of an iteration, ``(*state, *at_t) -> (*state, *ys)``; its constants are what the loop only reads.
      products: those whose weights' gradients are contracted after the loop.
      split: how many inputs are state.
      backward: whether the loop goes from the last timestep to the first.
      unroll: how many iterations are one of the program's.
    """

    body: Body
    products: tuple[Product, ...]
    split: int
    backward: bool
    unroll: int

    def __call__(self, consts: list, init: list, xs: list) -> list:
        """``[*state, *ys]``; ``consts`` may be wider than the body's, which is in what their gradients are added up."""
        run = jax.custom_vjp(self._run)
        run.defvjp(self._forward, self._back)
        return run(consts, init, xs)

    def _run(self, consts: Sequence, init: Sequence, xs: Sequence) -> list:
        def body(state, at_t):
            outs = evaluate(self.body, self._narrowed(consts), [*state, *at_t], lambda eqn, operands: None)
            return outs[: self.split], outs[self.split :]

        state, ys = jax.lax.scan(body, init, xs, reverse=self.backward, unroll=self.unroll)
        return [*state, *ys]

    def _narrowed(self, consts: Sequence) -> list:
        return [narrowed(c, v.aval.dtype) for c, v in zip(consts, self.body.constvars, strict=True)]

    def _forward(self, consts: Sequence, init: Sequence, xs: Sequence) -> tuple[list, tuple]:
        ways = self._ways
        outside, (stacked, of) = ways.outside(consts), _distinct([*ways.ys, *ways.kept])

        def body(state, at_t):
            env = outside | dict(zip([*ways.state, *ways.xs], [*state, *at_t], strict=True))
            evaluated(ways.forward, env)
            read = value_in(env)
            return list(map(read, ways.after)), list(map(read, stacked))

        state, stacks = jax.lax.scan(body, init, xs, reverse=self.backward, unroll=self.unroll)
        stacks = [stacks[i] for i in of]
        return [*state, *stacks[: len(ways.ys)]], (consts, xs, stacks[len(ways.ys) :])

    def _back(self, residuals: tuple, cotangents: Sequence) -> tuple[list, list, list]:
        ways, (consts, xs, kept) = self._ways, residuals
        outside, (put_out, of) = ways.outside(consts), _distinct([*ways.to_xs.values(), *ways.to_taps.values()])
        by = [x for x, v in zip(cotangents, [*ways.after, *ways.ys], strict=True) if J.is_inexact(v.aval)]
        names = [*ways.by_after, *ways.xs, *ways.kept, *ways.by_ys]

        def body(carry, at_t):
            sums, by_state = carry
            env = outside | dict(zip(names, [*by_state, *at_t[0], *at_t[1], *at_t[2]], strict=True))
            evaluated([*ways.again, *ways.backward], env)
            read = value_in(env)
            sums = [s + read(v) for s, v in zip(sums, ways.to_consts.values(), strict=True)]
            return (sums, list(map(read, ways.to_state.values()))), list(map(read, put_out))

        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in ways.to_consts.values()]
        first, over = (zeros, by[: len(ways.by_after)]), (xs, kept, by[len(ways.by_after) :])
        (sums, by_init), stacks = jax.lax.scan(body, first, over, reverse=not self.backward, unroll=self.unroll)
        stacks = [stacks[i] for i in of]
        grads: dict = dict(zip(ways.to_consts, sums, strict=True))
        stack_of = dict(zip([*ways.xs, *ways.kept], [*xs, *kept], strict=True))
        for number, tap in zip(ways.to_taps, stacks[len(ways.to_xs) :], strict=True):
            product, value = self.products[number], stack_of[ways.values[number]]
            found = widened(product.gradient(value, self._narrowed(consts)[product.weight], tap))
            grads[product.weight] = grads[product.weight] + found if product.weight in grads else found
        of_state, of_xs = zip(ways.to_state, by_init, strict=True), zip(ways.to_xs, stacks[: len(ways.to_xs)], strict=True)
        return _listed(grads, consts), _listed(dict(of_state), ways.state), _listed(dict(of_xs), xs)

    @cached_property
    def _ways(self) -> Directions:
        """Both ways of an iteration; traced when a derivative is first taken."""
        body = self.body
        given = [jax.ShapeDtypeStruct(v.aval.shape, wide(v.aval.dtype)) for v in body.constvars]
        n = len(given)
        given += [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        moves = [i for i, a in enumerate(given) if J.is_inexact(a)]
        by = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.outvars if J.is_inexact(v.aval)]
        taps = [jnp.zeros(p.eqn.outvars[0].aval.shape, p.eqn.outvars[0].aval.dtype) for p in self.products]

        def both(given, by):
            def iteration(moving, taps):
                args = list(given)
                for i, x in zip(moves, moving, strict=True):
                    args[i] = x
                outs, values = self._tapped(args[:n], args[n:], taps, given[:n])
                return [x for x in outs if J.is_inexact(x)], (outs, values)

            _, pullback, (outs, values) = jax.vjp(iteration, [given[i] for i in moves], taps, has_aux=True)
            return outs, values, *pullback(by)

        return directions(jax.make_jaxpr(both)(given, by), n, self.split, len(body.outvars), len(self.products))

    def _tapped(self, consts: Sequence, args: Sequence, taps: Sequence, weights: Sequence) -> tuple[list, list]:
        """An iteration whose products take ``weights``, and the values these are multiplied with.

        What flows back to ``taps`` is the cotangents of the products; to ``weights`` nothing does.
        """
        numbers = {id(p.eqn): i for i, p in enumerate(self.products)}
        weights, values = self._narrowed(weights), []

        def rule(eqn, operands):
            number = numbers.get(id(eqn))
            if number is None:
                return None
            product = self.products[number]
            values.append(operands[1 - product.side])
            return [_tap(product.of(values[-1], weights[product.weight]), taps[number])]

        return evaluate(self.body, self._narrowed(consts), args, rule), values


@jax.custom_jvp
def _tap(x: Any, tap: Any) -> Any:
    """``x``, with the cotangent of which that of ``tap`` is."""
    return x


_tap.defjvp(lambda primals, tangents: (primals[0], tangents[0] + tangents[1]))


def _listed(found: dict, like: Collection) -> list:
    """The cotangents of all inputs; None: zero, or of what has none."""
    return [found.get(i) for i in range(len(like))]


def _distinct(atoms: Sequence) -> tuple[list, list[int]]:
    """The atoms without those that come again, and where among them each is."""
    distinct = {id(atom): atom for atom in atoms}
    places = {key: place for place, key in enumerate(distinct)}
    return list(distinct.values()), [places[id(atom)] for atom in atoms]
