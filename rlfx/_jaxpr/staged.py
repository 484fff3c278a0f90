"""Calls that ``jax.vmap`` makes anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify, core, dtypes
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from rlfx._jaxpr.jaxprs import without_dead_code
from rlfx._jaxpr.rules import evaluate_again, zero_tangent_like

#: What a rule for linearization returns after its residuals, from jax 0.11 on.
NO_STRUCTURED_RESIDUALS = (None,) if "structured_residuals" in private_ad.LinearizeTrace.__annotations__ else ()


def linearizes(args: Sequence) -> bool:
    """Whether an equation of these would be linearized at once: by ``jax.grad``, with nothing between that keeps a jaxpr."""
    trace = core.trace_ctx.trace
    return isinstance(trace, private_ad.LinearizeTrace) and any(
        isinstance(x, private_ad.LinearizeTracer) and x._trace.tag is trace.tag for x in args
    )


def linearizes_staged(args: Sequence) -> bool:
    """As :func:`linearizes`, in a trace that keeps a jaxpr: ``jax.grad`` right inside of ``jax.jit``, or of a loop's body."""
    return linearizes(args) and isinstance(core.trace_ctx.trace.parent_trace, partial_eval.DynamicJaxprTrace)


def mapped(fn: Callable, added: tuple) -> Callable:
    """``fn`` over one more axis, as :class:`Staged` gives it to ``again``: every result has it, as its leading one."""
    size, varies, name = added
    named = {} if name is None else {"axis_name": name}
    return jax.vmap(fn, tuple(0 if v else None for v in varies), axis_size=size, **named)


class Staged(Primitive):
    """A call of ``params["jaxpr"]``, which ``jax.vmap`` replaces.

    ``again(args, (size, varies, name), **params)`` gives the parameters under one more axis, which is the leading one of
    those ``args`` that vary, and of all results. Its derivative is that of the body, or of what ``differentiable(**params)``
    gives, if it does: a function of the same arguments; ``derived`` makes one of it that can be differentiated. Results that
    nobody uses are dead code: ``params["used"]`` has those that are.
    """

    def __init__(
        self, name: str, again: Callable, differentiable: Callable | None = None, derived: Callable = lambda fn: fn
    ):
        super().__init__(name)
        self.multiple_results = True

        def run(*args, jaxpr, **_):
            return core.jaxpr_as_fun(jaxpr)(*args)

        def lowered(*args, jaxpr, **_):
            return evaluate_again(jaxpr, *args)

        def moved(primals, moving, *, used, **params):
            """The call as a function of the arguments that move alone."""
            fn = None if differentiable is None else differentiable(**params)

            def of(*new):
                args = (dict(enumerate(primals)) | dict(zip(moving, new, strict=True))).values()
                if fn is None:
                    return run(*args, **params)
                return [out for out, u in zip(fn(*args), used, strict=True) if u]

            return derived(of), [primals[i] for i in moving]

        def jvp(primals, tangents, **params):
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
            of, new = moved(primals, moving, **params)
            outs, dots = jax.jvp(of, new, [tangents[i] for i in moving])
            return outs, without_float0(outs, dots)

        def linearize(_, moves, *primals, **params):
            # jax's own way from a jvp forgets the names of scopes.
            moving = [i for i, m in enumerate(moves) if m]
            of, new = moved(primals, moving, **params)
            outs, pushed = jax.linearize(of, *new)

            def linear(*given):
                tangents = given[-len(moves) :]  # after residuals, structured or not
                return without_float0(outs, pushed(*(ad.instantiate_zeros(tangents[i]) for i in moving)))

            moved_out = [zero_tangent_like(o).aval.dtype != dtypes.float0 for o in outs]
            return outs, moved_out, (), *NO_STRUCTURED_RESIDUALS, linear

        def without_float0(outs, dots):
            return [zero_tangent_like(o) if d.dtype == dtypes.float0 else d for o, d in zip(outs, dots, strict=True)]

        def batch(axis, args, dims, *, used, **params):
            varies = tuple(d is not None for d in dims)
            if not any(varies):
                outs = self.bind(*args, used=used, **params)
                return outs, [None] * len(outs)
            args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
            name = None if axis.name is core.no_axis_name else axis.name
            params = again(args, (axis.size, varies, name), **params)
            outs = self.bind(*args, used=used, **params | {"jaxpr": without_dead_code(params["jaxpr"], used)})
            return outs, [0] * len(outs)

        def dce(wanted, eqn):
            if not any(wanted) and not eqn.effects:
                return [False] * len(eqn.invars), None
            jaxpr, left = without_dead_code(eqn.params["jaxpr"], wanted), iter(wanted)
            params = eqn.params | {"jaxpr": jaxpr, "used": tuple(u and next(left) for u in eqn.params["used"])}
            outvars = [v for v, u in zip(eqn.outvars, wanted, strict=True) if u]
            return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params, effects=jaxpr.effects)

        def checked(*given, jaxpr, **_):
            n = len(given) - len(jaxpr.in_avals)
            *context, error, enabled = given[:n]  # from jax 0.11 on, with a context
            return checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *given[n:])

        self.def_impl(run)
        self.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
        mlir.register_lowering(self, mlir.lower_fun(lowered, multiple_results=True))
        ad.primitive_jvps[self] = jvp
        private_ad.primitive_linearizations[self] = linearize
        batching.fancy_primitive_batchers[self] = batch
        partial_eval.dce_rules[self] = dce
        checkify.error_checks[self] = checked

    def call(self, *args: Any, jaxpr: Any, **params: Any) -> list:
        """Bind it, with all results."""
        jaxpr = without_dead_code(jaxpr)
        return self.bind(*args, jaxpr=jaxpr, used=(True,) * len(jaxpr.out_avals), **params)
