"""A loop over time, and its derivative as a loop of rlfx's own: what is kept of an iteration is chosen, weights come after it.

``jax.lax.scan`` adds to the gradient of every weight at each timestep. With few rows a timestep those products are small, and the
sum is read and written each time. Here the way back only puts out the cotangents of such products, and one contraction over
all timesteps and rows follows. What the way back needs of an iteration is kept once, what is cheap is made again
(``directions.py``); a cotangent that several have is put out once. Where no derivative leaves windows of some timesteps
(``schedule/truncated.py``), the way back goes through all of them side by side: T / n of n times as many rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.divisors import divisors
from rlfx.recurrence.gradient.counted import if_needed, not_zero
from rlfx.recurrence.gradient.directions import Body, Directions, directions
from rlfx.recurrence.ir.interpret import evaluate
from rlfx.recurrence.language.precision import narrowed, wide, widened
from rlfx.recurrence.schedule.truncated import BurnIn, InWindows, Truncated

_DOT = J.primitive("dot_general")

#: Many times as much as a core has near it: what goes to memory and back takes longer than loops within loops to compile.
FAR = 8
#: Rows, at least, of a contraction: each reads the gradient that it adds to.
ROWS = 256


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
    def rows(self) -> int:
        """How many rows of the other operand are multiplied with the weight."""
        contracted, other = self.eqn.params["dimension_numbers"][0][1 - self.side], self.eqn.invars[1 - self.side]
        return math.prod(n for i, n in enumerate(other.aval.shape) if i not in contracted)

    def of(self, value: Any, weight: Any) -> Any:
        """The product."""
        operands = (weight, value) if self.side == 0 else (value, weight)
        (out,) = J.bind(_DOT, dict(self.eqn.params), *operands)
        return out

    def gradient(self, values: Any, weight: Any, cotangents: Any) -> Any:
        """The weight's, of all timesteps at once."""
        _, pullback = jax.vjp(lambda w: jax.vmap(lambda x: self.of(x, w))(values), weight)
        return pullback(cotangents)[0]


def products_of(body: Body) -> list[Product]:
    """The products with weights, what the loop only reads, in order."""
    weights = {v: i for i, v in enumerate(body.constvars)}
    found = (_product(e, weights) for e in body.eqns if e.primitive is _DOT)
    return [p for p in found if p is not None]


def _product(eqn: Any, weights: dict) -> Product | None:
    """A product of floats, without batch axes, of which one operand is a weight."""
    sides = [i for i, v in enumerate(eqn.invars) if not J.is_literal(v) and v in weights]
    batched = any(eqn.params["dimension_numbers"][1])
    if len(sides) != 1 or batched or not J.is_inexact(eqn.outvars[0].aval):
        return None
    return Product(eqn, weights[eqn.invars[sides[0]]], sides[0])


@dataclass(frozen=True, eq=False)
class Truncation:
    """Timesteps at whose ends no derivative goes back further: windows, or a burn-in.

    Attributes:
      at: which.
      holds: whether it is so, bool: a call knows, at which time it begins.
      agreed: a condition, on whichever device it holds.
    """

    at: Truncated
    holds: Any
    agreed: Callable

    def skipped(self, holds: Any, by_ys: Sequence) -> Any:
        """Whether a burn-in's way back is left out; ``by_ys``: the cotangents of what the iterations put out."""
        return holds & ~self.agreed(not_zero([x[: self.at.timesteps] for x in by_ys]))

    def block_of(self, length: int, most: int, fewest: int) -> int | None:
        """Timesteps of a block, of which a burn-in is some if it can be; ``fewest``: for a contraction; None: all."""
        fitting = [d for d in divisors(length) if fewest <= d <= min(most, length // 2)]
        return max((d for d in fitting if self.at.timesteps % d == 0), default=fitting[0] if fitting else None)


@dataclass(frozen=True, eq=False)
class OwnDerivative:
    """A loop, in reverse mode with a derivative of its own.

    Attributes:
      body: of an iteration, ``(*state, *at_t) -> (*state, *ys)``; its constants are what the loop only reads.
      products: those whose weights' gradients are contracted after the loop.
      split: how many inputs are state.
      backward: whether the loop goes from the last timestep to the first.
      unroll: how many iterations are one of the program's.
      truncation: of a loop forward in time, whose windows go back side by side, or whose burn-in is left out block by block.
      near: bytes that a core has near it, or None.
    """

    body: Body
    products: tuple[Product, ...]
    split: int
    backward: bool
    unroll: int
    truncation: Truncation | None = None
    near: float | None = None

    def __call__(self, consts: list, init: list, xs: list) -> list:
        """``[*state, *ys]``; ``consts`` may be wider than the body's, which is in what their gradients are added up."""
        run = jax.custom_vjp(self._run)
        run.defvjp(self._forward, self._back)
        return run(consts, init, xs, None if self.truncation is None else self.truncation.holds)

    def _run(self, consts: Sequence, init: list, xs: list, holds: Any) -> list:
        state, ys = self._scan(self.body, self._narrowed(consts), init, xs)
        return [*state, *ys]

    def _scan(self, body: Body, consts: Sequence, init: list, xs: list) -> tuple[list, list]:
        """The loop over time of a body ``(*state, *at_t) -> (*state, *stacks)``."""

        def iteration(state, at_t):
            outs = evaluate(body, consts, [*state, *at_t])
            return outs[: self.split], outs[self.split :]

        return jax.lax.scan(iteration, init, xs, reverse=self.backward, unroll=self.unroll)

    def _narrowed(self, consts: Sequence) -> list:
        return [narrowed(c, v.aval.dtype) for c, v in zip(consts, self.body.constvars, strict=True)]

    def _forward(self, consts: Sequence, init: list, xs: list, holds: Any) -> tuple[list, tuple]:
        ways, constants = self._ways
        outside = evaluate(ways.before, constants, consts)
        state, stacks = self._scan(ways.forward, outside, init, xs)
        return [*state, *(stacks[i] for i in ways.ys)], (consts, xs, [stacks[i] for i in ways.kept], holds)

    def _back(self, residuals: tuple, cotangents: Sequence) -> tuple:
        (ways, constants), (consts, xs, kept, holds) = self._ways, residuals
        outside, moving = evaluate(ways.before, constants, consts), len(ways.to_state)
        by = [x for x, v in zip(cotangents, self.body.outvars, strict=True) if J.is_inexact(v.aval)]
        given = consts, outside, by[:moving], [*xs, *kept, *by[moving:]]
        match self.truncation:
            case None:
                found = self._one_by_one(*given)
            case Truncation(BurnIn()) as burn_in:
                found = self._one_by_one(*given, burn_in.skipped(holds, by[moving:]))
            case Truncation(InWindows()):
                found = jax.lax.cond(holds, self._side_by_side, self._one_by_one, *given)
        sums, by_init, by_xs, of_products = found
        grads = dict(zip(ways.to_consts, sums, strict=True))
        for number, gradient in zip(ways.to_taps, of_products, strict=True):
            weight = self.products[number].weight
            grads[weight] = grads[weight] + gradient if weight in grads else gradient
        to_state, to_xs = dict(zip(ways.to_state, by_init, strict=True)), dict(zip(ways.to_xs, by_xs, strict=True))
        return _listed(grads, consts), _listed(to_state, cotangents[: self.split]), _listed(to_xs, xs), None

    def _one_by_one(
        self, consts: Sequence, outside: Sequence, by_last: Sequence, over: Sequence, skips: Any = None
    ) -> tuple:
        """The way back, timestep by timestep: ``(sums, by_init, by_xs, gradients of products)``.

        Cotangents of products are put out for a block of timesteps, and contracted while they are near. Where it ``skips`` the
        burn-in, its blocks are not computed.
        """
        back, (ways, _) = functools.partial(self._iteration_back, outside), self._ways

        def block(by_last, over):
            sums, by_first, stacks = self._summed(back, lambda x: x, consts, by_last, over)
            return (sums, self._of_products(consts, over, stacks)), by_first, [stacks[at] for at in ways.to_xs.values()]

        size = self._block_of(over[0].shape[0])
        if size is None:
            (sums, of_products), by_init, by_xs = block(by_last, over)
            return sums, by_init, by_xs, of_products

        def add(carry, at):
            (total, by_last), (begin, over) = carry, at
            compute = lambda: block(by_last, over)  # noqa: E731
            zero = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))  # noqa: E731
            needed = None if skips is None else ~skips | (begin + size > self.truncation.at.timesteps)
            found, by_first, by_xs = if_needed(needed, compute, zero)
            return (jax.tree.map(jnp.add, total, found), by_first), by_xs

        blocks = [x.reshape(-1, size, *x.shape[1:]) for x in over]
        zeros = [jnp.zeros_like(consts[i]) for i in ways.to_consts]
        first = (zeros, [jnp.zeros_like(consts[self.products[i].weight]) for i in ways.to_taps]), list(by_last)
        begins = jnp.arange(len(blocks[0]), dtype=jnp.int32) * size
        ((sums, of_products), by_init), by_xs = jax.lax.scan(add, first, (begins, blocks), reverse=not self.backward)
        return sums, by_init, [x.reshape(-1, *x.shape[2:]) for x in by_xs], of_products

    def _block_of(self, length: int) -> int | None:
        """Timesteps whose cotangents of products fit near a core, or of which a contraction has rows enough; None: all."""
        products = [self.products[i] for i in self._ways[0].to_taps]
        put_out = sum(p.eqn.outvars[0].aval.size * p.eqn.outvars[0].aval.dtype.itemsize for p in products)
        if self.truncation is not None and isinstance(self.truncation.at, BurnIn):
            fewest = -(-ROWS // max((p.rows for p in products), default=ROWS))
            most = length if self.near is None else max(fewest, int(self.near // max(1, put_out)))
            return self.truncation.block_of(length, most, fewest)
        if self.near is None or length * put_out <= FAR * self.near:
            return None
        enough = [d for d in divisors(length) if d * max(p.rows for p in products) >= ROWS]
        size = max(d for d in enough if d == enough[0] or d * put_out <= self.near) if enough else length
        return size if size < length else None

    def _side_by_side(self, consts: Sequence, outside: Sequence, by_last: Sequence, over: Sequence) -> tuple:
        """As :meth:`_one_by_one`, timestep by timestep of all windows at once."""
        size, ways = self.truncation.at.timesteps, self._ways[0]
        cut = lambda x: jnp.swapaxes(x.reshape(-1, size, *x.shape[1:]), 0, 1)  # noqa: E731
        over = list(map(cut, over))
        count = over[0].shape[1]
        by_last = [jnp.zeros((count, *x.shape), x.dtype).at[-1].set(x) for x in by_last]
        back = jax.vmap(functools.partial(self._iteration_back, outside))
        sums, by_first, stacks = self._summed(back, lambda x: x.sum(0), consts, by_last, over)
        by_xs = [jnp.swapaxes(stacks[at], 0, 1) for at in ways.to_xs.values()]
        by_xs = [x.reshape(count * size, *x.shape[2:]) for x in by_xs]
        in_order = lambda x: x.reshape(count * size, *x.shape[2:])  # of the way back: that of a sum is any  # noqa: E731
        of_products = self._of_products(consts, list(map(in_order, over)), list(map(in_order, stacks)))
        return sums, [x[0] for x in by_first], by_xs, of_products

    def _iteration_back(self, outside: Sequence, by_state: Sequence, at_t: Sequence) -> list:
        return evaluate(self._ways[0].backward, outside, [*by_state, *at_t])

    def _summed(self, back: Callable, total: Callable, consts: Sequence, by_last: Sequence, over: Sequence) -> tuple:
        """A loop over an iteration's way back: what the consts' gradients add up to, the state's, and stacks."""
        ways = self._ways[0]
        added, moving = len(ways.to_consts), len(ways.to_state)

        def iteration(carry, at_t):
            sums, by_state = carry
            outs = back(by_state, at_t)
            sums = [s + total(x) for s, x in zip(sums, outs[:added], strict=True)]
            return (sums, outs[added : added + moving]), outs[added + moving :]

        first = [jnp.zeros_like(consts[i]) for i in ways.to_consts], list(by_last)
        unroll = min(self.unroll, over[0].shape[0])
        (sums, by_first), stacks = jax.lax.scan(iteration, first, list(over), reverse=not self.backward, unroll=unroll)
        return sums, by_first, stacks

    def _of_products(self, consts: Sequence, over: Sequence, stacks: Sequence) -> list:
        """The weights' gradients that are contracted after the loop, in at least float32."""
        ways, weights = self._ways[0], self._narrowed(consts)
        found = []
        for number, place in ways.to_taps.items():
            product = self.products[number]
            found.append(widened(product.gradient(over[ways.values[number]], weights[product.weight], stacks[place])))
        return found

    @cached_property
    def _ways(self) -> tuple[Directions, list]:
        """Both ways of an iteration, and the constants of their jaxpr; traced when a derivative is first taken."""
        body = self.body
        given = [jax.ShapeDtypeStruct(v.aval.shape, wide(v.aval.dtype)) for v in body.constvars]
        n = len(given)
        given += [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        moves = [i for i, a in enumerate(given) if J.is_inexact(a)]
        by = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.outvars if J.is_inexact(v.aval)]

        def both(given, by):
            taps = [jnp.zeros(p.eqn.outvars[0].aval.shape, p.eqn.outvars[0].aval.dtype) for p in self.products]

            def iteration(moving, taps):
                args = list(given)
                for i, x in zip(moves, moving, strict=True):
                    args[i] = x
                outs, values = self._tapped(args[:n], args[n:], taps, given[:n])
                return [x for x in outs if J.is_inexact(x)], (outs, values)

            _, pullback, (outs, values) = jax.vjp(iteration, [given[i] for i in moves], taps, has_aux=True)
            return outs, values, *pullback(by)

        closed = jax.make_jaxpr(both)(given, by)
        return directions(closed.jaxpr, n, self.split, len(body.outvars), len(self.products)), closed.consts

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
