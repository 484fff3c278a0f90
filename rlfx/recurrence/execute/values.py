"""Values of many points at once: an array with leading axes for t and b, and how equations are mapped over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.elementwise import at_once
from rlfx.recurrence.execute.extremes import largest_or_smallest
from rlfx.recurrence.ir.derivatives import Custom, with_derivative
from rlfx.recurrence.ir.program import NO_DIMS, Atom, Equation, Lit, Var
from rlfx.recurrence.language.primitives import aside_p, custom_p, discounted_sum_p, products_p, series_p
from rlfx.threefry import draw

AXES = ("t", "b")

#: What positions of a slice hold that are not valid: what was computed there, data of other timesteps as they are, or zeros.
COMPUTED, OTHERS, NOTHING = range(3)


@dataclass(frozen=True, eq=False)
class Value:
    """The value of a variable at all points of its dims, axes in the order t, b.

    Attributes:
      data: [T if "t" in dims][B if "b" in dims] + the shape at one point; a ragged axis has its largest length.
      dims: which of t and b the data has axes for.
      starts: for each axis of the point's shape, where the valid positions begin: None on ordinary axes; None as a whole
        for ordinary values. See :mod:`rlfx.recurrence.execute.ragged`.
      clean: whether positions that are not valid hold copies of valid data.
      raw: what else they hold: COMPUTED, OTHERS, NOTHING.
      before: how many of the point's axes lie before that of t, which is behind that of b then: those of a slice's products, as
        they are made. See :class:`Values`.
    """

    data: Any
    dims: frozenset = NO_DIMS
    starts: tuple | None = None
    clean: bool = True
    raw: int = COMPUTED
    before: int = 0

    @property
    def time_axis(self) -> int:
        """Where t's axis is, if it is there."""
        return time_axis(self.dims, self.before)

    @property
    def leading(self) -> Value:
        """This one with the axes of its dims first."""
        if not self.before:
            return self
        turned = jax.tree.map(lambda x: jnp.moveaxis(x, self.time_axis, 0), self.data)
        return replace(self, data=turned, before=0)


def time_axis(dims: frozenset, before: int) -> int:
    """Where t's axis is in data with axes for ``dims``, behind so many axes of the point, if any."""
    return before + ("b" in dims) if before else 0


class Values(dict):
    """Values by variable, with the axes of their dims first.

    A slice of a series times what varies with t is a product of each environment and head, ``[b, h, t, s]``. Turned to
    ``[t, b, h, s]`` and back for the next product, all of it would be written twice more, forwards and backwards; so it is turned
    for those alone that ask for it here. What computes with slices takes it as it is (:func:`as_made`).
    """

    def __getitem__(self, var: Var) -> Value:
        return super().__getitem__(var).leading

    def __iter__(self) -> Iterator:  # a method of its own, so that a copy has what `[]` gives
        return super().__iter__()

    def get(self, var: Any, default: Any = None) -> Any:
        value = super().get(var, default)
        return value.leading if isinstance(value, Value) else value

    def values(self) -> Any:
        return [x.leading for x in super().values()]

    def items(self) -> Any:
        return [(v, x.leading) for v, x in super().items()]


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros of any dtype, typed keys included."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return J.zero_keys(tuple(shape), dtype)
    return jnp.zeros(tuple(shape), dtype)


def expand(value: Value, dims: frozenset, sizes: Mapping[str, int]) -> Value:
    """The value with axes for at least ``dims``."""
    data, have = value.data, value.dims
    for position, axis in enumerate(AXES):
        if axis in dims and axis not in have:
            at = sum(1 for a in AXES[:position] if a in have)
            data = jnp.broadcast_to(jnp.expand_dims(data, at), data.shape[:at] + (sizes[axis],) + data.shape[at:])
            have = have | {axis}
    return replace(value, data=data, dims=have)


def axis_of(dims: frozenset, axis: str) -> int | None:
    """The position of t or b among the leading axes, None if it is not there."""
    return None if axis not in dims else sum(1 for a in AXES[: AXES.index(axis)] if a in dims)


def cut_environments(value: Value, first: Any, count: int) -> Value:
    """The value of consecutive environments."""
    axis = axis_of(value.dims, "b")
    if axis is None:
        return value
    return replace(value, data=jax.lax.dynamic_slice_in_dim(value.data, first, count, axis))


def cut_times(value: Value, first: Any, count: int) -> Value:
    """The value at consecutive timesteps; values that do not vary with t as they are."""
    if "t" not in value.dims:
        return value
    return replace(value, data=jax.lax.dynamic_slice_in_dim(value.data, first, count, 0))


def map_over(
    fn: Callable, dims: frozenset, values: Sequence[frozenset], time_axes: Sequence[int] = (), out_axes: Any = 0
) -> Callable:
    """``fn`` of one point, mapped over ``dims``; ``values`` are the dims of its arguments.

    Args:
      time_axes: where t's axis is in the arguments; by default the first one.
      out_axes: and in what it gives.
    """
    if "b" in dims:  # the inner map
        fn = jax.vmap(fn, tuple(0 if "b" in d else None for d in values))
    if "t" in dims:
        over = _over_times if "b" in dims else jax.vmap
        at = time_axes or (0,) * len(values)
        fn = over(fn, tuple(axis if "t" in d else None for d, axis in zip(values, at, strict=True)), out_axes)
    return fn


def _over_times(fn: Callable, in_axes: tuple, out_axes: Any) -> Callable:
    """As ``jax.vmap``, but that one timestep is no axis: XLA:CPU's reductions of ``[1, n, m]`` take up to 3x those of ``[n, m]``.

    A single environment is one: products of vectors take up to 6x those of ``[1, n]``.
    """

    def run(*args):
        if any(
            x.shape[axis] != 1
            for arg, axis in zip(args, in_axes, strict=True)
            if axis is not None
            for x in jax.tree.leaves(arg)
        ):
            return jax.vmap(fn, in_axes, out_axes)(*args)
        one = (x if axis is None else _without_axis(x, axis) for x, axis in zip(args, in_axes, strict=True))
        outs = fn(*one)
        if isinstance(out_axes, int):
            return _with_axis(outs, out_axes)
        return [_with_axis(out, axis) for out, axis in zip(outs, out_axes, strict=True)]

    return run


def _without_axis(x: Any, axis: int) -> Any:
    return jax.tree.map(lambda y: jax.lax.squeeze(y, (axis,)), x)


def _with_axis(x: Any, axis: int) -> Any:
    return jax.tree.map(lambda y: jnp.expand_dims(y, axis), x)


def of_atom(atom: Atom, env: Mapping[Var, Value]) -> Value:
    """The value of an atom."""
    return Value(jnp.asarray(atom.value)) if isinstance(atom, Lit) else env[atom]


def as_made(atom: Atom, env: dict[Var, Value]) -> Value:
    """As :func:`of_atom`, but that t may be behind axes of the point."""
    return of_atom(atom, env) if isinstance(atom, Lit) else dict.__getitem__(env, atom)


def read_by(equations: Sequence[Equation]) -> list[Var]:
    """What consecutive equations read that none of them gives."""
    defined = {v for e in equations for v in e.outputs}
    return list(dict.fromkeys(u for e in equations for u in e.inputs if isinstance(u, Var) and u not in defined))


def scope_of(equation: Equation) -> Any:
    """The names under which the user wrote an equation, and where, as a context."""
    return J.made_at(equation.where, equation.scope)


def evaluate_or_draw(equation: Equation, operands: Sequence[Any]) -> list:
    """As :func:`evaluate`; random numbers are drawn as the machine does it best."""
    if equation.op in J.DRAWS:
        return draw(equation.op, dict(equation.params), *map(_arrays, operands))
    return evaluate(equation, operands)


def evaluate(equation: Equation, operands: Sequence[Any]) -> list:
    """One pointwise equation on concrete operands or tracers of one point."""
    return meaning(equation.op, equation.params, *operands)


def meaning(op: Any, params: Mapping, *operands: Any) -> list:
    """What a primitive gives, ours or jax's."""
    if op in _MEANING:
        return _MEANING[op](params, *operands)
    arrays = list(map(_arrays, operands))
    if op in J.ELEMENTWISE and len(arrays) > 1 and all(x.ndim > 2 and x.shape == arrays[0].shape for x in arrays):
        arrays = J.alike(*arrays)
    return at_once(op, params, arrays) or J.bind(op, dict(params), *arrays)


def _arrays(x: Any) -> Any:
    return x if hasattr(x, "shape") else jnp.asarray(x)


def discounted_total(rewards: Any, discounts: Any) -> Any:
    """``r[0] + d[0] (r[1] + d[1] (...))``, from the far end: stable for discounts of zero. The last is not used."""
    if not rewards.shape[0]:
        return jnp.zeros(rewards.shape[1:], rewards.dtype)
    if rewards.shape[0] == 1:  # no loop of no iterations: jax has none without jit
        return rewards[0]

    def back(total, rd):
        return rd[0] + rd[1] * total, None

    total, _ = jax.lax.scan(back, rewards[-1], (rewards[:-1], discounts[:-1]), reverse=True)
    return total


def _products(params: Mapping, x: Any, w: Any) -> list:
    (out,) = J.bind(J.primitive("dot_general"), params["product"], x, w)
    return list(jax.lax.split(out, params["columns"]))


def _custom(params: Mapping, *operands: Any) -> list:
    custom: Custom = params["custom"]
    forward = lambda _, *xs: custom.primal.run(xs, jnp.asarray, evaluate)  # noqa: E731
    backward = lambda _, xs, cts: custom.backward.run([*xs, *cts], jnp.asarray, evaluate)  # noqa: E731
    return with_derivative(forward, backward, (), operands)


def _extreme(op: str, params: Mapping, x: Any) -> list:
    """A maximum or minimum whose derivative does not hang on how XLA rounds the elements, computed twice."""
    if not params["axes"] or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return J.bind(J.primitive(f"reduce_{op}"), dict(params), _arrays(x))
    return [largest_or_smallest(op, _arrays(x), tuple(params["axes"]))]


#: What our primitives mean at one point, and those of jax that are evaluated otherwise: ``(params, *operands) -> outputs``.
_MEANING: dict[Any, Callable[..., list]] = {
    **dict.fromkeys((series_p, aside_p), lambda _, x: [_arrays(x)]),
    discounted_sum_p: lambda _, rewards, discounts: [discounted_total(rewards, discounts)],
    products_p: _products,
    custom_p: _custom,
    J.primitive("reduce_max"): partial(_extreme, "max"),
    J.primitive("reduce_min"): partial(_extreme, "min"),
}
