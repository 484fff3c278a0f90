"""The primitives by which a per-timestep program reads other timesteps: what tracing records, and nothing executes.

Each carries static parameters only (an index expression, not an array); the reference interpreter and the lowering give
them their meaning.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.recurrence.language.index import Lookup, Point


def _outside() -> Exception:
    return ProgramError(
        located(
            "A value of a per-timestep program is used outside of it.",
            where=J.here(),
            fix="Use rlfx.series, rlfx.solve and the values read from them only inside the function given to "
            "rlfx.compile or rlfx.unroll, and return what you need as aux.",
        )
    )


def _primitive(name: str, abstract_eval, **kwargs):
    return J.new_primitive(name, abstract_eval, outside=_outside, **kwargs)


def _same(aval: Any, **_) -> Any:
    return J.ShapedArray(aval.shape, aval.dtype)


def _read_aval(source: Any, *operands: Any, access: Any, size: Any, **_) -> Any:
    if isinstance(access, Lookup):
        return J.ShapedArray(operands[0].shape + source.shape, source.dtype, weak_type=source.weak_type)
    lead = () if isinstance(access, Point) else (size,)
    return J.ShapedArray(lead + source.shape, source.dtype, weak_type=source.weak_type)


#: ``series_p(value; name)``: names a value, so that it can be read at other times. The identity.
series_p = _primitive("series", _same)
#: ``read_p(source, *operands; access, size, start, end)``: the source at other times. ``start`` and ``end`` say whether
#: the boundary values are among the operands (in that order); a Window has its fill, a Lookup its indices there.
read_p = _primitive("read", _read_aval)
#: ``declare_p(; shape, dtype, weak_type)``: the series that a ``solve`` defines, before its definition is known.
declare_p = _primitive("declare", lambda *, shape, dtype, weak_type: J.ShapedArray(shape, dtype, weak_type=weak_type))
#: ``define_p(declared, value; outer)``: ties the knot. Returns the value. ``outer``: the series is one of the program around, to
#: which a function that is differentiated here does not belong: reads of it are constants.
define_p = _primitive("define", lambda declared, value, *, outer: _same(value))
#: ``reduce_p(x; op, over)``: a reduction over timesteps and environments. ``op="any"`` is of the environments of one device:
#: it may decide whether something is computed, never what its result is, and devices do not wait for each other.
#: ``outer``: of the product of several, how they are multiplied (``ir/outer.py``).
reduce_p = _primitive(
    "reduce", lambda x, *_, op, over, outer=None: J.ShapedArray(x.shape if outer is None else outer.shape, x.dtype)
)
#: ``inputs_p(xs; axes)``: element ``(t, b)`` of data given from outside.
inputs_p = _primitive("inputs", lambda xs, *, axes: J.ShapedArray(xs.shape[len(axes) :], xs.dtype))
#: ``whole_p(*args; jaxpr, num_consts)``: one call on the whole batch; its results do not vary with b.
whole_p = _primitive(
    "shared",
    lambda *_, jaxpr, num_consts: ([_same(v.aval) for v in jaxpr.jaxpr.outvars], jaxpr.effects),
    multiple_results=True,
    effectful=True,
)
#: ``across_p(data, i, b)``: ``data[i]`` of environment ``b``.
across_p = _primitive("across", lambda data, i, b: J.ShapedArray(i.shape + data.shape[1:], data.dtype))
#: ``discounted_sum_p(rewards, discounts)``: ``sum_k rewards[k] * prod_{j<k} discounts[j]``.
discounted_sum_p = _primitive("discounted_sum", lambda r, d: J.ShapedArray(r.shape[1:], r.dtype))
#: ``now_p()``: the absolute time ``t0 + t``.
now_p = _primitive("now", lambda: J.ShapedArray((), jnp.dtype("int32")))

#: By this name (of ``jax.ad_checkpoint.checkpoint_name``) flattening knows an integer that is a bound of a slice.
EVENT = "rlfx.event"

# What flattening and rewriting put into programs, and tracing never meets:

#: ``attend_p(x, v; side, axes, **product)``: the softmax of x, along the axis that is contracted, times v: ``dot_general`` with
#: the parameters ``product``, of which x is the operand ``side``. The other axes of x become ``axes`` of the result.
attend_p = J.Primitive("attend")
#: ``products_p(x, w; product, columns)``: ``x @ w`` with the parameters ``product``, cut into pieces of so many columns.
products_p = J.Primitive("products")

#: ``aside_p(x)``: x, for an equation whose derivative is another one than that through x (``rewrite/shares.py``). The identity.
aside_p = J.Primitive("aside")
#: ``custom_p(*operands; custom)``: a call with a derivative of its own, of slices whose length depends on t.
custom_p = J.Primitive("custom_derivative")
custom_p.multiple_results = True

#: Everything that reaches beyond one point of the domain, or is resolved by the tracer.
ACCESS_PRIMITIVES = frozenset(
    {series_p, read_p, declare_p, define_p, reduce_p, inputs_p, whole_p, across_p, discounted_sum_p, now_p}
)


# -- jax.vmap and jax.grad inside a program --------------------------------------------------------------------------


def _series_batch(args, dims, **params):
    return series_p.bind(args[0], **params), dims[0]


def _read_batch(args, dims, *, access, **params):
    if isinstance(access, Lookup) and dims[0] is None:
        pairs = zip(args[1:], dims[1:], strict=True)
        indices = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        return read_p.bind(args[0], *jnp.broadcast_arrays(*indices), access=access, **params), 0
    if isinstance(access, Lookup) or any(d is not None for d in dims[1:]) or dims[0] is None:
        raise ProgramError(
            located(
                f"jax.vmap inside the program maps over the boundary value or the index of a read ([{access}]).",
                where=J.here(),
                fix="Read the series outside of the vmap, and map over what was read.",
            )
        )
    lead = 0 if isinstance(access, Point) else 1
    source = jnp.moveaxis(args[0], dims[0], 0)
    return read_p.bind(source, *args[1:], access=access, **params), lead


def _reduce_batch(args, dims, **params):
    return reduce_p.bind(args[0], **params), dims[0]


J.define_batching(series_p, _series_batch)
J.define_batching(read_p, _read_batch)
J.define_batching(reduce_p, _reduce_batch)


def _refuse_derivative(primitive):
    def rule(primals, tangents, **params):
        if all(J.is_zero_tangent(t) for t in tangents):
            out = primitive.bind(*primals, **params)
            return out, J.zero_tangent_like(out)
        raise ProgramError(
            located(
                f"jax.grad inside the program differentiates through a {primitive.name} of other timesteps.",
                where=J.here(),
                fix="Differentiate the compiled program (jax.grad(loss_fn)), or read the series outside of the "
                "differentiated function, which makes it a constant there.",
            )
        )

    return rule


def _series_jvp(primals, tangents, **params):
    return series_p.bind(*primals, **params), tangents[0]


def _define_jvp(primals, tangents, *, outer):
    if outer:
        return define_p.bind(*primals, outer=True), tangents[1]
    return _refuse_derivative(define_p)(primals, tangents, outer=False)


J.define_jvp(series_p, _series_jvp)
J.define_jvp(define_p, _define_jvp)
for _p in (read_p, reduce_p, discounted_sum_p, across_p, inputs_p):
    J.define_jvp(_p, _refuse_derivative(_p))
