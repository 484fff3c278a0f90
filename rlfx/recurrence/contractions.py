"""Weight gradients at the speed of forward products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.interpret import evaluate

tree = jax.tree_util

_ROWS = 256  # Below, a transposition costs what it saves.
_OVER_ROWS = (((0,), (0,)), ((), ()))
DOT, _JIT = J.primitives.dot_general_p, J.primitives.jit_p


def transposed_contractions(fn: Callable) -> Callable:
    """``fn`` with every ``x.T @ g`` of tall matrices computed from a transposed copy of ``x``.

    The gradient of ``x @ w`` with respect to ``w`` contracts over the rows of both operands. XLA's matrix product for CPUs
    reads the transposed operand across its rows, at half the speed of a forward product; a copy of it, transposed before,
    costs less than it saves. Differentiation writes ``g.T @ x``; it is ``x`` that is copied, since ``g`` comes out of
    elementwise operations that a transposed user would make run across their rows. Results differ by the order of sums.
    Where no operand is tall, and elsewhere than on a CPU, it is ``fn``.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = jax.grad(lambda w, x: (x @ w).sum())
      >>> transposed_contractions(gradient)(jnp.ones((2, 3)), jnp.ones((512, 2)))[0]
      Array([512., 512., 512.], dtype=float32)
    """
    if jax.default_backend() != "cpu":
        return fn

    def call(*args: Any) -> Any:
        flat, structure = tree.tree_flatten(args)
        closed, out = jax.make_jaxpr(lambda *xs: fn(*tree.tree_unflatten(structure, xs)), return_shape=True)(*flat)
        if not _has_tall(closed.jaxpr):
            return fn(*args)
        return tree.tree_unflatten(tree.tree_structure(out), evaluate(closed.jaxpr, closed.consts, flat, _rule))

    return call


def over_rows(eqn: Any, operands: list) -> list | None:
    """A contraction over the leading axes of both operands as one over rows; None if it is no such contraction.

    The gradient of ``x @ w`` at all points contracts over t and b. XLA:CPU makes a transposed copy of one operand for that,
    and reads the other across its rows, at a third of the speed of the same product over one axis. Results differ by the
    order of sums.

    Example:
      >>> import jax.numpy as jnp
      >>> from rlfx.recurrence.interpret import rewritten
      >>> gradient = jax.grad(lambda w, x: (x @ w).sum())
      >>> rewritten(gradient, {DOT: over_rows})(jnp.ones((2, 3)), jnp.ones((5, 4, 2)))[0]
      Array([20., 20., 20.], dtype=float32)
    """
    contracted, batched = eqn.params["dimension_numbers"]
    axes = tuple(range(len(contracted[0])))
    if len(axes) < 2 or contracted != (axes, axes) or batched != ((), ()):
        return None
    rows = [x.reshape(-1, *x.shape[len(axes) :]) for x in operands]
    return J.bind(DOT, eqn.params | {"dimension_numbers": _OVER_ROWS}, *rows)


def _rule(eqn: Any, operands: list) -> list | None:
    if eqn.primitive is _JIT and _has_tall(eqn):
        return evaluate(*J.body_of(eqn.params["jaxpr"]), operands, _rule)
    if eqn.primitive is J.SCAN and _has_tall(eqn):
        return J.bind(J.SCAN, eqn.params | {"jaxpr": _rewritten(eqn.params["jaxpr"])}, *operands)
    return [_contract(eqn.params, *operands)] if _is_tall(eqn) else None


def _rewritten(body: Any) -> Any:
    return jax.make_jaxpr(lambda *xs: evaluate(body.jaxpr, body.consts, xs, _rule))(*body.in_avals)


def _contract(params: dict, g: jax.Array, x: jax.Array) -> jax.Array:
    """``g.T @ x`` as ``(x.T @ g).T``; the barrier keeps the transposition from being folded into the product again."""
    copy = jax.lax.optimization_barrier(jnp.transpose(x))
    (out,) = J.bind(DOT, params | {"dimension_numbers": (((1,), (0,)), ((), ()))}, copy, g)
    return jnp.transpose(out)


def _has_tall(scope: Any) -> bool:
    """Whether a jaxpr, or an equation's body, contains a contraction to change."""
    if hasattr(scope, "eqns"):
        return any(_is_tall(e) or (e.primitive in (_JIT, J.SCAN) and _has_tall(e)) for e in scope.eqns)
    return _has_tall(J.body_of(scope.params["jaxpr"])[0])


def _is_tall(eqn: Any) -> bool:
    if eqn.primitive is not DOT or eqn.params["dimension_numbers"] != _OVER_ROWS:
        return False
    left, right = (x.aval for x in eqn.invars)
    return left.ndim == right.ndim == 2 and left.shape[0] >= max(_ROWS, right.shape[1])
