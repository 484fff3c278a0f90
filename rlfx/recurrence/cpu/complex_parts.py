"""Complex numbers by their parts: pairs of arrays of reals, whose arithmetic a CPU does many at a time.

XLA:CPU computes complex numbers one by one, a product through four multiplications of single numbers. Real and imaginary parts in
arrays of their own are vectorised, products with real numbers take half the work, and a part that is zero takes none. Rules say
what an equation does to the parts; one without a rule has its operands put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate, has_only_a_name

P = J.primitive


def is_complex(value: Any) -> bool:
    """Whether a value's numbers are complex."""
    return jnp.issubdtype(value.dtype, jnp.complexfloating)


@dataclass(frozen=True, eq=False)
class Parts:
    """A complex array.

    Attributes:
      re, im: its parts, arrays of reals; ``im`` None: zeros.
    """

    re: Any
    im: Any = None

    @classmethod
    def of(cls, value: Any) -> Parts:
        """The parts of an array; a real one has one."""
        if isinstance(value, Parts):
            return value
        if not is_complex(jnp.asarray(value)):
            return cls(value)
        if isinstance(value, (np.ndarray, np.generic, complex)) and not np.any(np.imag(value)):
            return cls(jnp.asarray(np.real(value)))
        return cls(jnp.real(value), jnp.imag(value))

    @property
    def both(self) -> tuple[Any, Any]:
        """Both parts as arrays."""
        return self.re, jnp.zeros_like(self.re) if self.im is None else self.im

    @property
    def whole(self) -> Any:
        """The complex array."""
        return jax.lax.complex(*self.both)

    def each(self, fn: Callable) -> Parts:
        """What is linear, of each part; zeros stay zeros."""
        return Parts(fn(self.re), None if self.im is None else fn(self.im))


# -- rules: ``(primitive, params, operands) -> outputs``, or None: this one is no such case -----------------------------------


def _linear(op: Any, params: Mapping, operands: Sequence) -> list:
    """The same of each part; operands that are not complex (indices, conditions) belong to both."""
    mine = [x for x in operands if isinstance(x, Parts)]
    ims = [x.both[1] if isinstance(x, Parts) else x for x in operands] if any(x.im is not None for x in mine) else None
    re = J.bind(op, dict(params), *(x.re if isinstance(x, Parts) else x for x in operands))
    return list(map(Parts, re, [None] * len(re) if ims is None else J.bind(op, dict(params), *ims)))


def _bilinear(op: Any, params: Mapping, operands: Sequence) -> list:
    """``(a + ib)(c + id) = ac - bd + i(ad + bc)``, without what is zero."""
    x, y = map(Parts.of, operands)  # dot_general takes a real one beside a complex one
    given = dict(params)
    if given.get("preferred_element_type") is not None:
        given["preferred_element_type"] = jnp.finfo(given["preferred_element_type"]).dtype

    def times(a: Any, b: Any) -> Any:
        return None if a is None or b is None else J.bind(op, given, a, b)[0]

    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    minus = times(x.im, y.im)
    re = times(x.re, y.re)
    return [Parts(re if minus is None else re - minus, added(times(x.re, y.im), times(x.im, y.re)))]


def _squared(op: Any, params: Mapping, operands: Sequence) -> list | None:
    (z,) = operands
    if params.get("y", 2) != 2:
        return None
    return [Parts(z.re * z.re) if z.im is None else Parts(z.re * z.re - z.im * z.im, 2.0 * z.re * z.im)]


def _divided(op: Any, params: Mapping, operands: Sequence) -> list | None:
    x, y = operands
    return [x.each(lambda part: J.bind(op, dict(params), part, y.re)[0])] if y.im is None else None


def _converted(op: Any, params: Mapping, operands: Sequence) -> list | None:
    if not jnp.issubdtype(params["new_dtype"], jnp.complexfloating):
        return None
    to = jnp.finfo(params["new_dtype"]).dtype
    return [Parts.of(operands[0]).each(lambda part: jax.lax.convert_element_type(part, to))]


def _gathered(op: Any, params: Mapping, operands: Sequence) -> list | None:
    return _linear(op, params, operands) if params["fill_value"] is None or params["mode"] is None else None


def _scanned(op: Any, params: Mapping, operands: Sequence) -> list:
    """A loop over parts. What it carries and puts out has both: a part that begins as zeros may not stay so."""
    consts, carried = J.scan_counts(dict(params))
    body = params["jaxpr"]
    full = [Parts(*x.both) if isinstance(x, Parts) and i >= consts else x for i, x in enumerate(operands)]

    def step(carry: Any, xs: Any) -> tuple:
        outs = by_parts(body.jaxpr, body.consts, [*_read(full[:consts]), *_read(carry), *_read(xs)])
        outs = [Parts(*x.both).both if isinstance(x, Parts) else x for x in outs]
        return outs[:carried], outs[carried:]

    leaves = [x.both if isinstance(x, Parts) else x for x in full]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, leaves[consts : consts + carried], leaves[consts + carried :], **options)
    return _read([*carry, *ys])


def _read(values: Sequence) -> list:
    """Pairs of arrays as parts."""
    return [Parts(*x) if isinstance(x, tuple) else x for x in values]


#: What is linear and moves or adds elements.
_LINEAR = frozenset(
    map(
        P,
        ("add", "sub", "neg", "reduce_sum", "cumsum", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice",
         "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "rev", "select_n", "copy", "name"),
    )
) | {J.ADD_ANY, J.SPLIT} | J.STACKING | J.STOP_GRADIENT  # fmt: skip

RULES: dict[Any, Callable[[Any, Mapping, Sequence], list | None]] = {
    **dict.fromkeys(_LINEAR, _linear),
    P("mul"): _bilinear,
    P("dot_general"): _bilinear,
    P("square"): _squared,
    P("integer_pow"): _squared,
    P("div"): _divided,
    P("gather"): _gathered,
    P("convert_element_type"): _converted,
    P("complex"): lambda op, params, operands: [Parts(*operands)],
    P("real"): lambda op, params, operands: [operands[0].re],
    P("imag"): lambda op, params, operands: [operands[0].both[1]],
    P("conj"): lambda op, params, operands: [
        Parts(operands[0].re, None if operands[0].im is None else -operands[0].im)
    ],
    J.SCAN: _scanned,
}


def outputs_of(op: Any, params: Mapping, operands: Sequence) -> list | None:
    """What an equation gives, from :class:`Parts` in place of complex operands; None: it has no rule."""
    if op not in RULES:
        return None
    return RULES[op](op, params, [Parts.of(x) if _has_complex_numbers(x) else x for x in operands])


def _has_complex_numbers(x: Any) -> bool:
    return isinstance(x, (Parts, complex)) or (hasattr(x, "dtype") and is_complex(x))


def by_parts(jaxpr: Any, consts: Sequence, args: Sequence) -> list:
    """The outputs of a jaxpr, with :class:`Parts` for complex arrays, of its arguments and of what it gives.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> closed = jax.make_jaxpr(lambda z: z * z)(jnp.complex64(1j))
      >>> (square,) = by_parts(closed.jaxpr, closed.consts, [Parts(jnp.float32(1.0), jnp.float32(2.0))])
      >>> float(square.re), float(square.im)
      (-3.0, 4.0)
    """

    def rule(eqn: Any, operands: list) -> list | None:
        if not any(map(_has_complex_numbers, operands)) and not any(is_complex(v.aval) for v in eqn.outvars):
            return None
        outs = outputs_of(eqn.primitive, eqn.params, operands)
        if outs is None:
            outs = J.bind_again(eqn, *(x.whole if isinstance(x, Parts) else x for x in operands))
        return [Parts.of(x) if _has_complex_numbers(x) else x for x in outs]

    given = [Parts.of(x) if _has_complex_numbers(x) else x for x in args]
    outs = evaluate(jaxpr, consts, given, rule, has_only_a_name)
    return [Parts.of(x) if _has_complex_numbers(x) else x for x in outs]
