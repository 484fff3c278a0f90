"""A loop that ends when nobody goes on, with derivatives of any order.

XLA's loop that ends so has no derivative in reverse mode. Of this one it is that of the same iterations, counted: those after
the last end change nothing. It is a call that ``jax.vmap`` makes anew, not a ``jax.custom_jvp``, whose rule jax applies before
it maps: a branch, or a program that is called inside, would be mapped as a part of a derivative, and then has no transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.values import zeros


def while_somebody(step: Callable, init: Any, xs: Any, going: Callable) -> tuple[Any, Any]:
    """``jax.lax.scan(step, init, xs)`` that ends after the first iteration that begins with ``not going(state)``.

    What that iteration puts out stands for those that are left out.
    """
    init, structure = jax.tree.flatten(init)
    xs, structure_of_xs = jax.tree.flatten(xs)
    length, n = xs[0].shape[0], len(init)

    def flat_step(*args: Any) -> list:
        kept, ys = step(jax.tree.unflatten(structure, args[:n]), jax.tree.unflatten(structure_of_xs, args[n:]))
        return [*jax.tree.leaves(kept), *ys]

    body, consts = J.make_jaxpr(flat_step)(*init, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs))
    test, test_consts = J.make_jaxpr(lambda *kept: going(jax.tree.unflatten(structure, kept)))(*init)
    closed = (list(consts), list(test_consts))
    operands, given = jax.tree.flatten((closed, list(init), list(xs)))

    def one(closed: tuple, kept: Sequence, ys: Sequence, i: Any, xs: Sequence) -> tuple:
        """An iteration: whether it was one, what is kept, what is stacked."""
        outs = J.jaxpr_as_fun(body, closed[0])(*kept, *(jnp.asarray(x)[i] for x in xs))
        goes_on = J.jaxpr_as_fun(test, closed[1])(*kept)[0]
        stacked = [jax.lax.dynamic_update_index_in_dim(a, y, i, 0) for a, y in zip(ys, outs[n:], strict=True)]
        return goes_on, outs[:n], stacked

    def begin(kept: Sequence) -> tuple:
        ys = [zeros((length, *v.aval.shape), v.aval.dtype) for v in body.outvars[n:]]
        return jnp.int32(0), jnp.bool_(True), list(kept), ys

    def ended(state: tuple) -> list:
        done, _, kept, ys = state
        last = jnp.minimum(jnp.arange(length, dtype=jnp.int32), done - 1)
        return [*kept, *(jnp.take(y, last, axis=0) for y in ys)]

    def run(*leaves: Any) -> list:
        closed, kept, xs = jax.tree.unflatten(given, leaves)
        step = lambda s: (s[0] + 1, *one(closed, s[2], s[3], s[0], xs))  # noqa: E731
        return ended(jax.lax.while_loop(lambda s: (s[0] < length) & s[1], step, begin(kept)))

    def of_all(*leaves: Any) -> list:
        """As ``run``. An iteration after the last is the first one once more, which nobody asks for: it is right there."""
        closed, first, xs = jax.tree.unflatten(given, leaves)

        def iteration(state: tuple, _: None) -> tuple:
            i, goes_on, kept, ys = state
            chosen = lambda new, old: [jax.lax.select(goes_on, x, y) for x, y in zip(new, old, strict=True)]  # noqa: E731
            at = jax.lax.select(goes_on, i, jnp.zeros_like(i))
            after, new, stacked = one(closed, chosen(kept, first), ys, at, xs)
            return (i + goes_on.astype(i.dtype), goes_on & after, chosen(new, kept), chosen(stacked, ys)), None

        return ended(jax.lax.scan(iteration, begin(first), None, length)[0])

    if body.effects:
        outs = run(*operands)
    else:
        whole = jax.make_jaxpr(run)(*operands)
        outs = _while_p.call(*operands, jaxpr=whole, body=whole, counted=of_all)
    return jax.tree.unflatten(structure, outs[:n]), outs[n:]


def _again(args: Sequence, added: tuple, *, jaxpr: Any, body: Any, counted: Callable) -> dict:
    """The parameters of the loop with one axis more."""
    mapped = J.mapped(J.jaxpr_as_fun(body.jaxpr, body.consts), added)
    whole = jax.make_jaxpr(mapped)(*args)
    return {"jaxpr": whole, "body": whole, "counted": J.mapped(counted, added)}


_while_p = J.Staged("rlfx_while", _again, lambda *, counted, **_: counted)
