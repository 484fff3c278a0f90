"""Weight gradients at the speed of forward products: contractions over rows, as XLA:CPU does them best.

The gradient of ``x @ w`` with respect to ``w`` is ``x.T @ g``, a contraction over the many rows of both. On a CPU

* over t and b, XLA makes a transposed copy of one operand and reads the other across its rows, at a third of the speed of the
  same product over one axis;
* of ``x.T @ g`` and ``g.T @ x``, that with fewer columns on the left is up to ten times as fast;
* of several weights at once, ``[rows, members, n]`` of one input, it makes a turned copy: as a matrix, their gradient needs none;
* the columns of an operand with 32, 64, ... of them are read from the same few lines of the cache: on the left such a one is
  slower than another of up to twice as many columns; over up to 160 rows it calls a library that is faster by a quarter;
* of an ensemble's members, ``[rows, members, n]``, which are a batch of the product, it makes copies that are turned: members
  one by one take 0.9 (two of them) to 0.5 (eight) of the time;
* many small matrices are as in ``small_matrices.py``, and triangular systems of them as in ``triangles.py``.

What results differs by the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx.recurrence.analysis.divisors import divisor_up_to
from rlfx.recurrence.cpu.joined import CONCATENATE, put_together
from rlfx.recurrence.cpu.small_matrices import DOT, is_of_small_matrices, of_small_matrices
from rlfx.recurrence.cpu.triangles import SOLVE, is_of_small_systems, of_small_systems
from rlfx.recurrence.ir.interpret import rewritten, rewritten_body

#: With fewer rows, and a smaller wide operand, there is little to gain.
_ROWS, _LARGE = 256, 1 << 14
LINEAR_SOLVE = J.primitive("linear_solve")
OVER_ROWS, _IN_PARTS = (((0,), (0,)), ((), ())), (((1,), (1,)), ((0,), (0,)))
#: Rows of a part, the operands for which parts are faster (a multiple of so many columns on the left, at most so many on the
#: right), and how many parts there are at most (their products are added up at the end).
_PART, _ALIGNED, _WIDE, _MOST_PARTS = 160, 32, 128, 64
#: Smaller ones stay in their order: there is nothing to gain, and of many of them (under ``jax.vmap``), turned behind a barrier,
#: XLA:CPU (jaxlib 0.10) makes products in a layout that it cannot compile: the process ends.
_SMALL_ROWS, _SMALL_COLUMNS = 16, 4
#: So many members, of as many rows and columns, are taken one by one.
_MEMBERS, _ROWS_OF_MEMBER, _COLUMNS_OF_MEMBER = 16, 256, 256


def over_rows(eqn: Any, operands: list) -> list | None:
    """A contraction over the leading axes of both operands as one over rows, the narrow operand first, perhaps in parts.

    Returns:
      The product, or None if it is no such contraction.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = jax.grad(lambda w, x: (x @ w).sum())
      >>> rewritten(gradient, {DOT: over_rows})(jnp.ones((2, 3)), jnp.ones((64, 5, 2)))[0]
      Array([320., 320., 320.], dtype=float32)
    """
    axes = _leading_axes(eqn)
    if axes is None:
        return None
    rows, free = math.prod(operands[0].shape[:axes]), [x.shape[axes:] for x in operands]
    if rows < min(map(math.prod, free)):
        left, right = (x.reshape(rows, *shape) for x, shape in zip(operands, free, strict=True))
        return J.bind(DOT, eqn.params | {"dimension_numbers": OVER_ROWS}, left, right)
    return [_over_rows(eqn.params, *(x.reshape(rows, -1) for x in operands)).reshape(*free[0], *free[1])]


def by_members(eqn: Any, operands: list) -> list | None:
    """A contraction over rows for each member of an ensemble, as one for each; None if it is no such contraction."""
    if not _has_members(eqn):
        return None
    (left,), (right,) = eqn.params["dimension_numbers"][1]

    def rows(x: jax.Array, member: int, axis: int) -> jax.Array:
        return jax.lax.index_in_dim(x, member, axis, keepdims=False).reshape(-1, x.shape[-1])

    pairs = ((rows(operands[0], i, left), rows(operands[1], i, right)) for i in range(operands[0].shape[left]))
    return [jnp.stack([_over_rows(eqn.params, *pair) for pair in pairs])]


def contraction(eqn: Any, operands: list) -> list | None:
    """The rule for all of them."""
    return of_small_matrices(eqn, operands) or by_members(eqn, operands) or over_rows(eqn, operands)


def _over_rows(params: dict, left: jax.Array, right: jax.Array) -> jax.Array:
    """``left.T @ right``."""
    if len(left) < _SMALL_ROWS or max(left.shape[1], right.shape[1]) <= _SMALL_COLUMNS:
        return _product(params, left, right)
    as_it_is = _belongs_left(left.shape[1], right.shape[1])
    out = _product(params, *((left, right) if as_it_is else (right, left)))
    out = jax.lax.optimization_barrier(out)  # else a transposition of it is folded into the product
    return out if as_it_is else jnp.transpose(out)


def _belongs_left(columns: int, others: int) -> bool:
    """Whether an operand of so many columns is better on the left than another: the narrow one, or one beside aligned columns.

    Example:
      >>> [_belongs_left(6, 64), _belongs_left(64, 64), _belongs_left(134, 128), _belongs_left(300, 128)]
      [True, True, True, False]
    """
    narrow, wide = sorted((columns, others))
    beside = narrow % _ALIGNED == 0 and wide % _ALIGNED > 0 and wide <= 2 * narrow
    return columns == (wide if beside else narrow)


def _product(params: dict, left: jax.Array, right: jax.Array) -> jax.Array:
    """``left.T @ right``, as a sum of products over fewer rows where those are faster."""
    rows = divisor_up_to(len(left), _PART)
    exact = jnp.result_type(left, right).itemsize >= 4  # narrower numbers would be rounded part by part
    fitting = exact and left.shape[1] % _ALIGNED == 0 and right.shape[1] <= _WIDE
    if not fitting or rows < _PART // 2 or len(left) > _MOST_PARTS * rows:
        return J.bind(DOT, params | {"dimension_numbers": OVER_ROWS}, left, right)[0]
    parts = [x.reshape(-1, rows, x.shape[1]) for x in (left, right)]
    return jnp.sum(J.bind(DOT, params | {"dimension_numbers": _IN_PARTS}, *parts)[0], 0)


def _has_members(eqn: Any) -> bool:
    """Whether a product is a contraction over rows for each of a few members, whose axis is behind one of rows."""
    if eqn.primitive is not DOT:
        return False
    contracted, batched = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    if len(batched[0]) != 1 or not left.size or not right.size or max(left.shape[-1], right.shape[-1]) > _COLUMNS_OF_MEMBER:
        return False
    rows, members = left.size // left.shape[-1] // left.shape[batched[0][0]], left.shape[batched[0][0]]
    if not 1 < members <= _MEMBERS or rows < _ROWS_OF_MEMBER:
        return False
    in_order = all(list(axes) == sorted(axes) for axes in contracted)
    # All axes but the last are of rows, or the members'.
    others = [set(range(x.ndim - 1)) for x in (left, right)]
    complete = all({*axes, *b} == o for axes, b, o in zip(contracted, batched, others, strict=True))
    return in_order and complete and any(b[0] > 0 for b in batched)


def _leading_axes(eqn: Any) -> int | None:
    """Over how many leading axes of both operands a product contracts, if that is better done otherwise."""
    if eqn.primitive is not DOT:
        return None
    contracted, batched = eqn.params["dimension_numbers"]
    axes = tuple(range(len(contracted[0])))
    if not axes or contracted != (axes, axes) or batched != ((), ()):
        return None
    left, right = (v.aval for v in eqn.invars)
    if not left.size or not right.size:
        return None
    return len(axes) if len(axes) > 1 or _is_tall(left, right) else None


def _is_tall(left: Any, right: Any) -> bool:
    """Whether these are matrices whose rows are enough for the order of the operands to count."""
    if not left.ndim == right.ndim == 2:
        return False
    narrow, wide = sorted((left.shape[1], right.shape[1]))
    return left.shape[0] >= max(narrow, min(_ROWS, _LARGE // wide))


def _in_scan(eqn: Any, operands: list) -> list | None:
    """A scan whose body has such contractions."""
    return _with_body(eqn, operands, _changes, FAST)


def _with_body(eqn: Any, operands: list, changes: Callable[[Any], bool], rules: dict) -> list | None:
    """A scan whose body is evaluated by ``rules``, if ``changes`` is true of an equation of it."""
    body = eqn.params["jaxpr"]
    if not _has(changes, body.jaxpr):
        return None
    return J.bind(J.SCAN, eqn.params | {"jaxpr": rewritten_body(body, rules)}, *operands)


def _in_cond(eqn: Any, operands: list) -> list | None:
    """A ``lax.cond`` of which a branch has such contractions."""
    branches = eqn.params["branches"]
    if not any(has_contractions(body.jaxpr) for body in branches):
        return None
    return J.bind(J.COND, eqn.params | {"branches": tuple(map(fast_body, branches))}, *operands)


def _in_linear_solve(eqn: Any, operands: list) -> list | None:
    """A ``jnp.linalg.solve`` whose solution has such systems, or whose derivative has."""
    bodies = eqn.params["jaxprs"]
    if not any(body is not None and has_contractions(body.jaxpr) for body in bodies):
        return None
    fast = type(bodies)(*(body if body is None else fast_body(body) for body in bodies))
    return J.bind(LINEAR_SOLVE, eqn.params | {"jaxprs": fast}, *operands)


def fast_body(body: Any) -> Any:
    """A closed jaxpr with its contractions as a CPU does them best."""
    return rewritten_body(body, FAST)


def has_contractions(jaxpr: Any) -> bool:
    """Whether a jaxpr has contractions that are better done otherwise, in what it calls too."""
    return _has(_changes, jaxpr)


def _has(changes: Callable[[Any], bool], jaxpr: Any) -> bool:
    """Whether ``changes`` is true of an equation of a jaxpr, or of what it calls."""
    inside = [
        J.call_body(e.primitive, e.params)[0] for e in jaxpr.eqns if e.primitive in J.INLINED or e.primitive is J.SCAN
    ]
    inside += [branch.jaxpr for e in jaxpr.eqns if e.primitive is J.COND for branch in e.params["branches"]]
    inside += [b.jaxpr for e in jaxpr.eqns if e.primitive is LINEAR_SOLVE for b in e.params["jaxprs"] if b is not None]
    return any(map(changes, jaxpr.eqns)) or any(_has(changes, body) for body in inside)


def _changes(eqn: Any) -> bool:
    few = is_of_small_matrices(eqn) or is_of_small_systems(eqn)
    return few or _has_members(eqn) or _leading_axes(eqn) is not None


#: The rules of many small matrices alone: what has no derivative has no other contractions over rows.
SMALL = {DOT: of_small_matrices, SOLVE: of_small_systems, LINEAR_SOLVE: _in_linear_solve}

#: The rules for :func:`rlfx.recurrence.ir.interpret.rewritten`.
FAST = {
    **SMALL, DOT: contraction, CONCATENATE: put_together, J.SCAN: _in_scan, J.COND: _in_cond,
}  # fmt: skip


def as_matrices(eqn: Any, operands: Sequence[Any]) -> list | None:
    """A product of rows along several axes with weights, as one of a matrix: derivatives of any order are of matrices, too.

    Weights with fewer columns than rows are turned: so are the products that are their derivatives, the narrow operand first.

    Example:
      >>> (eqn,) = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((2, 3, 4)), jnp.ones((4, 5))).eqns
      >>> as_matrices(eqn, [jnp.ones((2, 3, 4)), jnp.ones((4, 5))])[0].shape
      (2, 3, 5)
    """
    if not _is_of_rows(eqn):
        return None
    contracted, batched = eqn.params["dimension_numbers"]
    x, w = operands
    if contracted[1] == (0,) and 1 < w.shape[1] < w.shape[0]:
        w, contracted = jax.lax.optimization_barrier(jnp.transpose(w)), (contracted[0], (1,))
    numbers = ((1,), contracted[1]), batched
    (rows,) = J.bind(DOT, eqn.params | {"dimension_numbers": numbers}, x.reshape(-1, x.shape[-1]), w)
    return [rows.reshape(*x.shape[:-1], rows.shape[-1])]


def _is_of_rows(eqn: Any) -> bool:
    """Whether a product is of rows along several axes with weights, or along one with weights that are turned."""
    if eqn.primitive is not DOT:
        return False
    contracted, batched = eqn.params["dimension_numbers"]
    x, w = (v.aval for v in eqn.invars)
    if batched != ((), ()) or contracted[0] != (x.ndim - 1,) or w.ndim != 2 or not x.size:
        return False
    turned = x.ndim == 2 and x.shape[0] >= _SMALL_ROWS and contracted[1] == (0,) and 1 < w.shape[1] < w.shape[0]
    return x.ndim > 2 or turned


def _matrices_in_scan(eqn: Any, operands: list) -> list | None:
    """A scan whose body has such products."""
    return _with_body(eqn, operands, _is_of_rows, MATRICES)


#: The rules for a function whose gradient is differentiated.
MATRICES = {DOT: as_matrices, J.SCAN: _matrices_in_scan}


def fast_contractions(fn: Callable, target: Target) -> Callable:
    """``fn`` with all contractions over rows, those inside scans too, as a CPU does them best; elsewhere it is ``fn``.

    Args:
      target: the machine that it runs on.

    Example:
      >>> import jax.numpy as jnp
      >>> from rlfx._target import target
      >>> gradient = jax.grad(lambda w, x: (x @ w).sum())
      >>> fast_contractions(gradient, target("cpu"))(jnp.ones((2, 3)), jnp.ones((512, 2)))[0]
      Array([512., 512., 512.], dtype=float32)
    """
    return rewritten(fn, FAST) if target.rewrites.contractions else fn


def by_matrices(fn: Callable, target: Target) -> Callable:
    """``fn``, whose gradient is to be taken, with all products of rows along several axes as those of a matrix; elsewhere ``fn``.

    Args:
      target: the machine that it runs on.

    Example:
      >>> from rlfx._target import target
      >>> by_matrices(jax.vmap(jnp.dot, (0, None)), target("cpu"))(jnp.ones((2, 3, 4)), jnp.ones((4, 5))).shape
      (2, 3, 5)
    """
    return rewritten(fn, MATRICES) if target.rewrites.contractions else fn
