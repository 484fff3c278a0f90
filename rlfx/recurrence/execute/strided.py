"""Branches that are taken at every n-th timestep, for all timesteps at once: computed of the rows that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.values import Value, Values, map_over, of_atom
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.schedule.strided import Strided


def run_strided(part: Strided, env: Values, times: Any) -> None:
    """Add what a ``cond`` gives to ``env``, its second branch taken at the absolute times t with ``t % n == at``.

    Args:
      env: its operands, for all timesteps of the execution; one of them varies with t.
      times: the absolute times, one after another; int32 [T].
    """
    e, n = part.equation, part.n
    with J.made_at(e.where, e.scope or f"rlfx.{e.op.name}"):
        operands = [of_atom(a, env) for a in e.inputs[1:]]
        env.update(zip(e.outputs, _strided(e, n, part.at, operands, times), strict=True))


def _strided(equation: Equation, n: int, at: int, operands: Sequence[Value], times: Any) -> list[Value]:
    size = times.shape[0]
    blocks = -(-size // n)
    first = (at - times[0]) % n  # of each n rows, the one that takes the branch
    dims = frozenset().union(*(x.dims for x in operands))
    others, taken = (_branch(b, dims, operands) for b in equation.params["branches"])
    row_of = lambda data: jax.lax.dynamic_index_in_dim(_by(data, n, blocks), first, 1, keepdims=False)  # noqa: E731
    rows = [row_of(x.data) if "t" in x.dims else x.data for x in operands]

    def one(data: Any, row: Any) -> Value:
        whole = jax.lax.dynamic_update_index_in_dim(_by(data, n, blocks), row, first, 1)
        return Value(whole.reshape(blocks * n, *data.shape[1:])[:size], dims)

    return [one(*pair) for pair in zip(others(*(x.data for x in operands)), taken(*rows), strict=True)]


def _branch(body: Any, dims: frozenset, operands: Sequence[Value]) -> Callable:
    return map_over(J.jaxpr_as_fun(*J.body_of(body)), dims, [x.dims for x in operands])


def _by(data: Any, n: int, blocks: int) -> Any:
    """[T, ...] as [blocks, n, ...]; what is missing of the last block is like the last row."""
    missing = blocks * n - data.shape[0]
    if missing:
        data = jnp.concatenate([data, jnp.broadcast_to(data[-1:], (missing, *data.shape[1:]))])
    return data.reshape(blocks, n, *data.shape[1:])
