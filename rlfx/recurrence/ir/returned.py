"""What a per-timestep function returned: a loss, the next carry, and whatever else; or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import shown
from rlfx.errors import ProgramError, ProgramTypeError, UnsupportedSliceOp, located
from rlfx.recurrence.language.history import SCOPE, History
from rlfx.recurrence.language.operands import NoArray, to_array

tree = jax.tree_util


def split_result(result: Any, has_loss: bool, f: Callable) -> tuple[Any, Any, Any]:
    """``(loss or None, next carry, aux or None)``."""
    form = "(loss, carry) or (loss, carry, aux)" if has_loss else "(carry, out)"
    sizes = (2, 3) if has_loss else (2,)
    if not isinstance(result, tuple) or len(result) not in sizes:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ProgramError(
            located(f"The program returned {got}, not {form}.", where=J.function_source(f), fix=f"Return {form}.")
        )
    if not has_loss:
        return None, result[0], result[1]
    return result[0], result[1], result[2] if len(result) == 3 else None


def check_loss(loss: Any, f: Callable) -> Any:
    """The loss, a float scalar."""
    if loss is None:
        raise ProgramError(
            located(
                "The loss of one timestep of one environment is a float scalar; it is None.",
                where=J.function_source(f),
                fix="Return a loss, or use rlfx.unroll for a program without one.",
            )
        )
    loss = as_returned(loss, f)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ProgramError(
            located(
                f"The loss of one timestep of one environment is a float scalar; it is {J.short_dtype(loss.dtype)}"
                f"{list(loss.shape)}.",
                where=J.function_source(f),
                fix="Reduce it in the program (jnp.mean), or return the rest as aux.",
            )
        )
    return loss


def as_returned(leaf: Any, f: Callable) -> Any:
    """A returned leaf as an array whose shape does not depend on t."""
    if isinstance(leaf, NoArray):
        fact = f"The program returned a {leaf.name}, which is not an array: {leaf.because}."
        raise ProgramTypeError(located(fact, where=J.function_source(f), fix=leaf.fix))
    try:
        value = to_array(leaf)
    except (TypeError, ValueError, OverflowError):
        fact = f"The program returned {type(leaf).__name__}, which is not an array: {shown(leaf)}."
        fix = "Return arrays, or a pytree of them."
        raise ProgramError(located(fact, where=J.function_source(f), fix=fix)) from None
    if J.symbolic_axes(value.shape):
        raise UnsupportedSliceOp(
            located(
                "The program returns a slice whose length depends on t, "
                f"{J.short_dtype(value.dtype)}{str(list(value.shape)).replace('tau', '(t + 1)')}.",
                where=J.function_source(f),
                fix="Reduce it, or return a window of fixed length: x.window(lo, hi, fill=v).",
            )
        )
    return value


def check_carry(carry: Any, next_carry: Any, f: Callable) -> list:
    """The leaves of the next carry, with the structure, shapes and dtypes of the carry, or an error with the path."""
    expected, got = tree.tree_structure(carry), tree.tree_structure(next_carry)
    where = J.function_source(f)
    if expected != got:
        raise ProgramError(
            located(
                f"The carry that the program returned has another structure than the carry it was given: {got} "
                f"instead of {expected}.",
                where=where,
                fix="Return a carry of the same pytree structure (the compiled function's second argument).",
            )
        )
    leaves = []
    paths = tree.tree_flatten_with_path(carry)[0]
    for (path, old), new in zip(paths, tree.tree_leaves(next_carry), strict=True):
        new = as_returned(new, f)
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ProgramError(
                located(
                    f"carry{tree.keystr(path)} comes back as {J.short_dtype(new.dtype)}{list(new.shape)}, and it was given as "
                    f"{J.short_dtype(old.dtype)}{list(old.shape)}.",
                    where=where,
                    fix="Return it with the type of the initial carry (astype, reshape), or give the initial carry the type "
                    "that the program returns.",
                )
            )
        leaves.append(new)
    return leaves


def stop_of(until: Callable, carry_tree: Any, leaves: list) -> Any:
    """Whether the environment ends with this next carry."""
    stop = as_returned(until(tree.tree_unflatten(carry_tree, leaves)), until)
    if stop.shape != () or stop.dtype != jnp.bool_:
        raise ProgramError(
            located(
                f"until(carry) must be a boolean scalar, for one environment; it is {J.short_dtype(stop.dtype)}"
                f"{list(stop.shape)}.",
                where=J.function_source(until),
                fix="Return a comparison of the carry's values.",
            )
        )
    return stop


def check_histories(carry_tree: Any, jaxpr: Any, given: Sequence, returned: Sequence) -> None:
    """No history is written and comes back as it was: it would stay what it began with.

    Args:
      given, returned: the leaves of the carry as inputs and outputs of the program's jaxpr.
    """
    carry = tree.tree_unflatten(carry_tree, range(len(given)))
    for path, part in tree.tree_flatten_with_path(carry, is_leaf=lambda x: isinstance(x, History))[0]:
        if not isinstance(part, History):
            continue
        same = {given[i] for i in tree.tree_leaves(part) if returned[i] is given[i]}
        writes = (e for e in jaxpr.eqns if SCOPE in J.scope_of(e) and not same.isdisjoint(J.variables(e.invars)))
        written = next(writes, None)
        if written is not None:
            name = f"carry{tree.keystr(path)}".partition("[<flat index")[0]
            fact = f"A value is written to the history {name}, and the program returns {name} as it was: "
            fact += "it stays what it began with."
            fix = "Return the series' .history in its place: x = rlfx.series(value, history=carry.buffer), and "
            fix += "carry._replace(buffer=x.history)."
            raise ProgramError(located(fact, where=J.source_of(written), fix=fix))
