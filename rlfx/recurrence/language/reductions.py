"""Reductions over timesteps and environments, conditions on time, and calls on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, Kind, expect, function
from rlfx.errors import ProgramError, ProgramTypeError, UnsupportedSliceOp, located
from rlfx.recurrence.language.domain import Domain, current_domain
from rlfx.recurrence.language.names import BOTH
from rlfx.recurrence.language.nesting import check_axis
from rlfx.recurrence.language.operands import as_array, same_type
from rlfx.recurrence.language.primitives import now_p, reduce_p, whole_p
from rlfx.recurrence.language.time import without_time

tree = jax.tree_util


class Reduction(Protocol):
    """A function that reduces over some of t and b."""

    __name__: str

    def __call__(self, x: Any, over: str | tuple[str, ...] = BOTH) -> Any: ...


def _reduction(op: str) -> Reduction:
    def reduce(x: Any, over: str | tuple[str, ...] = BOTH) -> Any:
        domain = current_domain(f"rlfx.{op}")
        axes = (
            BOTH
            if over is BOTH
            else expect("over", over, _over(domain, "t" if op == "last" else "tb"), of=f"rlfx.{op}")
        )
        return reduced(op, x, axes)

    reduce.__name__ = reduce.__qualname__ = op
    return reduce


def reduced(op: str, x: Any, over: Iterable[str]) -> Any:
    """A reduction over some of t and b, whatever the program calls them."""
    domain = current_domain(f"rlfx.{op}")
    axes = tuple(a for a in over if a != "b" or domain.batch is not None)
    if not axes:
        return tree.tree_map(lambda leaf: _for(op, leaf), without_time(x))
    return tree.tree_map(lambda leaf: reduce_p.bind(_for(op, leaf), op=op, over=axes), without_time(x))


def _for(op: str, leaf: Any) -> Any:
    """The leaf in the dtype of jnp's reduction: a sum of booleans counts."""
    leaf = as_array(leaf, f"rlfx.{op}")
    if J.symbolic_axes(leaf.shape):
        fact = f"rlfx.{op} of a value whose length depends on t: at another timestep or in another environment it has "
        fact += "another length."
        fix = f"Reduce the slice itself, x[t:].{'sum' if op == 'last' else op}(), and give rlfx.{op} the number."
        raise UnsupportedSliceOp(located(fact, where=J.here(), fix=fix))
    if op == "last":
        return leaf
    try:
        like = jax.eval_shape(getattr(jnp, op), jax.ShapeDtypeStruct((1,), leaf.dtype))
    except TypeError:
        fact = f"rlfx.{op} takes numbers, got {J.short_dtype(leaf.dtype)}{list(leaf.shape)}."
        raise ProgramError(located(fact, where=J.here(), fix="Give numbers or booleans.")) from None
    return leaf.astype(like.dtype)


def _over(domain: Domain, allowed: str) -> Kind:
    """What ``over=`` takes in a program: the names of its dimension, its parallel axis, or both."""

    def take(over: Any) -> tuple[str, ...]:
        try:
            axes = domain.names.letters(over)
        except ValueError:
            check_axis(over)
            raise
        if set(axes) - set(allowed):
            raise ValueError
        return tuple(axes)

    if allowed == "t":
        return Kind('"t"', '"t"', take)
    return Kind('"t", "b" or both', '("t", "b")', take)


sum: Reduction = _reduction("sum")
mean: Reduction = _reduction("mean")
max: Reduction = _reduction("max")
min: Reduction = _reduction("min")
_last: Reduction = _reduction("last")

for _f, _what, _value in ((sum, "sum", 6.0), (mean, "mean", 1.5), (max, "maximum", 3.0), (min, "minimum", 0.0)):
    _f.__doc__ = f"""The {_what} of ``x`` (a pytree) over timesteps and environments: ``over`` is "t", "b" or both,
    by the names that the program has for them.

    The result no longer varies with those dimensions. Exact in every plan, sharded or in blocks; a program without a
    batch has one environment. Under ``until=`` only the timesteps before each environment's end count.

    Args:
      x: a pytree of arrays of numbers, ``[...]`` at each point.
      over: the dimensions that are reduced.

    Raises:
      DomainError: if ``over`` names another axis.
      ProgramError: if a leaf holds no numbers.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def f(_, carry, t):
      ...     return carry, rlfx.{_f.__name__}(t.astype(jnp.float32), over="t")
      >>> float(rlfx.unroll(f, length=4)(None, None)[1][0])
      {_value}
    """


def last(x: Any, over: str = "t") -> Any:
    """The value of ``x`` (a pytree) at the last timestep: T - 1, or each environment's own last one under ``until=``.

    Example:
      >>> import rlfx
      >>> rlfx.unroll(lambda _, carry, t: (carry, rlfx.last(t.now)), length=4)(None, None)[1].tolist()
      [3, 3, 3, 3]
    """
    return _last(x, over)


def std(x: Any, over: str | tuple[str, ...] = BOTH) -> Any:
    """The standard deviation (biased, as ``jnp.std``) of ``x`` (a pytree) over ``"t"``, ``"b"`` or both.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> x = jnp.array([1.0, 3.0])
      >>> rlfx.unroll(lambda x, carry, t: (carry, rlfx.std(rlfx.inputs(x)[t])), length=2)(x, None)[1]
      Array([1., 1.], dtype=float32)
    """

    def one(leaf):
        centred = leaf - mean(leaf, over)
        return jnp.sqrt(mean(jnp.real(centred * jnp.conj(centred)), over))

    return tree.tree_map(one, x)


def every(n: int, fn: Callable[[], Any], *, otherwise: Any) -> Any:
    """``fn()`` at the timesteps where ``(t0 + t) % n == 0``, and ``otherwise`` at the others.

    ``fn`` is executed at its timesteps alone: in a loop over timesteps as a branch, where all timesteps run at once of every
    n-th of them. Target networks, checkpoints, evaluations.

    Args:
      n: a positive integer.
      fn: takes nothing, returns a pytree like ``otherwise``. Reads of series belong outside of it.
      otherwise: the value at other timesteps, usually the previous one from the carry.

    Raises:
      DomainError: if ``n`` is not a positive integer.
      ProgramError: if ``fn()`` and ``otherwise`` differ in structure, shapes or dtypes.

    Example:
      >>> import rlfx
      >>> def f(_, kept, t):
      ...     kept = rlfx.every(3, lambda: t.now, otherwise=kept)
      ...     return kept, kept
      >>> rlfx.unroll(f, length=7)(None, jnp.int32(0))[1].tolist()
      [0, 0, 0, 3, 3, 3, 6]
    """
    current_domain("rlfx.every")
    n = expect("n", n, POSITIVE, of="rlfx.every")
    expect("fn", fn, function(), ProgramError, of="rlfx.every")
    otherwise, where = without_time(otherwise), J.here()

    def run() -> Any:
        value = without_time(fn())
        fix = "Return a value like otherwise from fn, in structure, shapes and dtypes (astype)."
        same_type(value, otherwise, "What fn of rlfx.every returns", "otherwise", fix, where=where)
        return value

    # One equation for each operation: the schedule finds n in them.
    return jax.lax.cond(jax.lax.rem(now_p.bind(), np.int32(n)) == 0, run, lambda: otherwise)


def shared(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` once for all environments, on arguments with their leading ``[B]`` axis.

    Its results do not vary with the environment, so they may become the next value of a :class:`Shared` carry. What
    ``fn`` closes over must not vary with the environment either (a ProgramError when the program is traced): that is what
    ``args`` are for. Without a batch it is ``fn(*args)``.

    Example:
      >>> import rlfx
      >>> def f(_, carry, t):
      ...     state, seen = carry
      ...     return (state, seen + rlfx.shared(lambda states: jnp.max(states), state)), None
      >>> carry = jnp.array([1.0, 5.0]), rlfx.Shared(jnp.float32(0.0))
      >>> rlfx.unroll(f, length=3, batch=2)(None, carry)[0][1].value
      Array(15., dtype=float32)
    """
    domain = current_domain("rlfx.shared")
    arguments = [f"x{i}" for i in range(len(args))]
    expect(
        "fn",
        fn,
        function(*arguments),
        ProgramError,
        of="rlfx.shared",
        fix="Give one argument of fn for each of its own.",
    )
    if domain.batch is None:
        return fn(*args)
    leaves, treedef = tree.tree_flatten(without_time(args))
    leaves = [as_array(leaf, "rlfx.shared") for leaf in leaves]
    structs = [jax.ShapeDtypeStruct((domain.batch,) + leaf.shape, leaf.dtype) for leaf in leaves]
    out_tree = []

    def flat(*batched):
        out, structure = tree.tree_flatten(fn(*tree.tree_unflatten(treedef, batched)))
        out_tree[:] = [structure]
        return out

    jaxpr, consts = J.make_jaxpr(flat)(*structs)
    out = whole_p.bind(*consts, *leaves, jaxpr=J.lift_consts(jaxpr), num_consts=len(consts))
    return tree.tree_unflatten(out_tree[0], out)


@tree.register_pytree_node_class
@dataclass(frozen=True)
class Shared:
    """Marks a part of the carry that all environments share: it has no ``[B]`` axis.

    The program receives and returns the bare value; the compiled function takes and returns it wrapped.

    Attributes:
      value: a pytree of arrays. Its next value must not vary with the environment.

    Example:
      >>> import rlfx
      >>> def f(_, carry, t):
      ...     x, total = carry
      ...     return (x, total + rlfx.sum(x, over="b")), None
      >>> carry = jnp.array([1.0, 2.0]), rlfx.Shared(jnp.float32(0.0))
      >>> rlfx.unroll(f, length=3, batch=2)(None, carry)[0][1].value
      Array(9., dtype=float32)
    """

    value: Any

    def __getitem__(self, index: Any) -> Any:
        """Refused: only programs are given the bare value."""
        fact = "A Shared is read as if it were what it wraps: outside of a program it is a part of a carry."
        raise ProgramTypeError(located(fact, where=J.here(), fix="Read its value: carry.params.value."))

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])
