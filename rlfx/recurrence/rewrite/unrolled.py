"""Short nested loops, as the user wrote them with ``lax.scan``, without a loop: a model rolled out over five steps, say.

A loop on a CPU writes what its derivative needs of every iteration into arrays, and reads it back; nothing is fused across
iterations, and the last one computes what nobody reads. Of few iterations, each of few operations, that is what takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._lazy import nx
from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.analysis.graph import cyclic
from rlfx.recurrence.ir.build import with_calls
from rlfx.recurrence.ir.program import Equation, Program, Var

#: Iterations that are equations of a recurrence, at most: what each multiplies is kept for all timesteps.
_FEW = 16


def with_unrolled(program: Program, most: int, multiplying: int | None = None) -> Program:
    """The program whose loops are unrolled where that makes at most so many equations; without such loops ``program``.

    Meaning-preserving. Those that the user unrolls in part stay as they are.

    Args:
      multiplying: equations of loops that have products; None: as of others. Of many iterations XLA computes what one has made
        of a product again for those behind it, and compiles for long (ten steps of a GRU: 1.1 to 1.8 of the time).
    """

    short = {e for e in program.equations if _is_short(e, most)}
    if multiplying is not None:
        short -= {e for e in short if J.contains(e.op, dict(e.params), PRODUCTS) and not _is_short(e, multiplying)}
    if not short:
        return program
    return replace(program, equations=tuple(_unrolled(e) if e in short else e for e in program.equations))


def with_recurrent_iterations(program: Program, most: int) -> Program:
    """The program with the equations of all iterations of short loops that multiply, where a timestep depends on them and they
    on the one before, and a gradient goes through them; without any it is ``program``. Meaning-preserving.

    Of spikes of some ticks, or of a cell that is asked several times: the gradients of their weights are contracted after the
    loop over time then, as those of a recurrence's own products are (``gradient/deferred.py``).
    """
    short = [e for e in program.equations if _is_short(e, most) and e.params["length"] <= _FEW]
    if not short or program.domain.batch is None:
        return program
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry))
    definition, graph = program.definitions(), nx.DiGraph()
    graph.add_edges_from(
        (definition[v], e) for e in program.equations for v in e.inputs if isinstance(v, Var) and v in definition
    )
    found = cyclic(graph) & active & set(short)
    return with_iterations(program, most, lambda eqn: eqn.primitive in PRODUCTS, found.__contains__)


def with_iterations(
    program: Program, most: int, of: Callable[[Any], bool], where: Callable[[Equation], bool] = lambda e: True
) -> Program:
    """The program with the equations of all iterations of such loops, so that rewrites see what they have in common.

    Without such loops it is ``program``.

    Args:
      of: whether it is worth it for a loop whose body has such an equation.
      where: which loops may be such.
    """

    def instead(e: Equation) -> Callable | None:
        short = _is_short(e, most) and not e.has_effects and where(e)
        return _iterations(e.params) if short and any(map(of, J.equations_in({"jaxpr": e.params["jaxpr"]}))) else None

    return with_calls(program, instead)


def _iterations(params: dict) -> Callable:
    """All iterations of a loop, one after the other."""
    body, length, (consts, carried) = params["jaxpr"], params["length"], J.scan_counts(params)

    def run(*args: Any) -> list:
        same, carry, each = args[:consts], args[consts : consts + carried], args[consts + carried :]
        made: list = [None] * length
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            now = [jax.lax.index_in_dim(x, i, 0, keepdims=False) for x in each]
            out = J.evaluate_again(body, *same, *carry, *now)
            carry, made[i] = out[: len(carry)], out[len(carry) :]
        return [*carry, *(jnp.stack(column) for column in zip(*made, strict=True))]

    return run


def _is_short(e: Equation, most: int) -> bool:
    if e.op is not J.SCAN or e.is_ragged or e.params["unroll"] != 1:  # of a loop over a slice the length depends on t
        return False
    return e.params["length"] >= 2 and not has_more_than(most // e.params["length"], e.params["jaxpr"].jaxpr)


def has_more_than(most: int, jaxpr: Any) -> bool:
    """Whether a jaxpr has more equations than that, with those of what it calls."""
    count, todo = 0, [jaxpr]
    while todo and count <= most:
        equations = todo.pop().eqns
        count += len(equations)
        if count <= most:
            todo += [body for e in equations for body, _ in J.sub_jaxprs(dict(e.params))]
    return count > most


def _unrolled(e: Equation) -> Equation:
    return replace(e, params={**e.params, "unroll": e.params["length"]})
