"""Reductions over timesteps and environments, conditions on time, and calls on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, Kind, expect, function
from rlfx.errors import ProgramError, located
from rlfx.recurrence.language.domain import current_domain
from rlfx.recurrence.language.operands import as_array, same_type
from rlfx.recurrence.language.primitives import now_p, reduce_p, whole_p
from rlfx.recurrence.language.time import without_time

tree = jax.tree_util


def _reduction(op: str) -> Callable:
    def reduce(x: Any, over: str | tuple[str, ...] = ("t", "b")) -> Any:
        domain = current_domain(f"rlfx.{op}")
        over = expect("over", over, _LAST if op == "last" else _OVER, of=f"rlfx.{op}")
        axes = tuple(a for a in ("t", "b") if a in over)
        if domain.batch is None:
            axes = tuple(a for a in axes if a != "b")
        if not axes:
            return tree.tree_map(lambda leaf: _for(op, leaf), without_time(x))
        return tree.tree_map(lambda leaf: reduce_p.bind(_for(op, leaf), op=op, over=axes), without_time(x))

    reduce.__name__ = reduce.__qualname__ = op
    return reduce


def _for(op: str, leaf: Any) -> Any:
    """The leaf in the dtype of jnp's reduction: a sum of booleans counts."""
    leaf = as_array(leaf, f"rlfx.{op}")
    if op == "last":
        return leaf
    try:
        like = jax.eval_shape(getattr(jnp, op), jax.ShapeDtypeStruct((1,), leaf.dtype))
    except TypeError:
        fact = f"rlfx.{op} takes numbers, got {J.short_dtype(leaf.dtype)}{list(leaf.shape)}."
        raise ProgramError(located(fact, where=J.here(), fix="Give numbers or booleans.")) from None
    return leaf.astype(like.dtype)


def _axes(*allowed: str) -> Callable:
    def take(over: Any) -> str:
        axes = "".join(over) if isinstance(over, (str, tuple, list)) else None
        if not axes or set(axes) - set(allowed):
            raise ValueError
        return axes

    return take


_OVER = Kind('"t", "b" or both', '("t", "b")', _axes("t", "b"))
_LAST = Kind('"t"', '"t"', _axes("t"))


sum = _reduction("sum")
mean = _reduction("mean")
max = _reduction("max")
min = _reduction("min")
_last = _reduction("last")

for _f, _what in ((sum, "sum"), (mean, "mean"), (max, "maximum"), (min, "minimum")):
    _f.__doc__ = f"""The {_what} of ``x`` (a pytree) over timesteps and environments: ``over`` is "t", "b" or both.

    The result no longer varies with those dimensions. Exact in every plan, sharded or in blocks; a program without a
    batch has one environment. Under ``until=`` only the timesteps before each environment's end count.

    Raises:
      DomainError: if ``over`` names another axis.
    """


def last(x: Any, over: str = "t") -> Any:
    """The value of ``x`` (a pytree) at the last timestep: T - 1, or each environment's own last one under ``until=``."""
    return _last(x, over)


def std(x: Any, over: str | tuple[str, ...] = ("t", "b")) -> Any:
    """The standard deviation (biased, as ``jnp.std``) of ``x`` (a pytree) over ``"t"``, ``"b"`` or both."""

    def one(leaf):
        centred = leaf - mean(leaf, over)
        return jnp.sqrt(mean(jnp.real(centred * jnp.conj(centred)), over))

    return tree.tree_map(one, x)


def every(n: int, fn: Callable[[], Any], *, otherwise: Any) -> Any:
    """``fn()`` at the timesteps where ``(t0 + t) % n == 0``, and ``otherwise`` at the others.

    In a sequential loop ``fn`` is executed only at its timesteps. Target networks, checkpoints, evaluations.

    Args:
      n: a positive integer.
      fn: takes nothing, returns a pytree like ``otherwise``. Reads of series belong outside of it.
      otherwise: the value at other timesteps, usually the previous one from the carry.

    Raises:
      DomainError: if ``n`` is not a positive integer.
      ProgramError: if ``fn()`` and ``otherwise`` differ in structure, shapes or dtypes.
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

    return jax.lax.cond(now_p.bind() % np.int32(n) == 0, run, lambda: otherwise)


def shared(fn: Callable, *args: Any) -> Any:
    """Call ``fn`` once for all environments, on arguments with their leading ``[B]`` axis.

    Its results do not vary with the environment, so they may become the next value of a :class:`Shared` carry. What
    ``fn`` closes over must not vary with the environment either (a ProgramError when the program is traced): that is what
    ``args`` are for. Without a batch it is ``fn(*args)``.
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
    """

    value: Any

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])
