"""The call of a program that reads its own series at other indices of the program around it: ``x[i - 1, t + 1]``.

Each such series becomes a result of the call, over t; outside, a series over i, declared before the call and defined by it; each
read of it there is an operand of the call, which is read at t + 1 inside.

A call that reads this iteration, or some before and some after it, is two: one for the series, which must not need what is
read, and one for what reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.recurrence.api.pending import Directed
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.ir.returned import split_result
from rlfx.recurrence.language.crossing import Crossed, Crossing, Field
from rlfx.recurrence.language.domain import Domain, current_domain
from rlfx.recurrence.language.effects import SCOPE
from rlfx.recurrence.language.index import TIME, Index, Slice
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.series import Series, series
from rlfx.recurrence.language.solve import declare, define

tree = jax.tree_util


def curried(
    call: Callable[[Callable, Crossing, Any, bool], Any],
    program: Callable[[Callable, Crossing, Any], Program],
    f: Callable,
    noted: Crossing,
    domain: Domain,
    has_loss: bool,
    params: Any,
) -> Any:
    """What the call gives.

    Args:
      call: ``call(f, crossing, params, has_loss)``.
      program: the program of such a call, without a loss.
      f: the per-timestep function.
      noted: what it reads of other iterations.
    """
    if domain.until:
        raise told(
            ProgramError(
                located(
                    "A program with until= is read at other iterations: each of them ends at a time of its own.",
                    where=noted.reads[0].where,
                    fix="Return the series from it, and read what came back, which is zero after each end.",
                )
            )
        )
    axes = (domain.length, *(() if domain.batch is None else (domain.batch,)))
    like = lambda leaf: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype)  # noqa: E731
    known = []
    for own in noted.fields:
        leaves = tree.tree_unflatten(own.structure, [like(aval) for aval in own.avals])
        known.append(declare(leaves, *(_spread(edge, own, axes) for edge in own.around)))
    operands = tuple(_read(known[read.field], read.outer, len(axes)) for read in noted.reads)

    def called(wanted: Callable[[Any, Any], Any], loss: bool) -> tuple[Callable, Crossing]:
        """A function whose aux is ``wanted(aux, fields)``, perhaps with its loss, and what notes its reads."""
        crossing, step = Crossing(operands=()), getattr(f, "f", f)

        @functools.wraps(step)
        def function(both: Any, carry: Any, t: Any) -> Any:
            crossing.begin()
            crossing.operands = both[1]
            own_loss, carry, aux = split_result(step(both[0], carry, t), has_loss, f)
            results = carry, wanted(aux, tuple(_everywhere(own.at(TIME), t) for own in crossing.series))
            return (own_loss, *results) if loss else results

        return Directed(function, f.transforms) if isinstance(f, Directed) else function, crossing

    # What a call gives is the definition; its results go on from there, so that nothing is computed twice.
    if _one_way(noted.reads):
        out = call(*called(lambda aux, fields: (aux, fields), has_loss), (params, operands), has_loss)
        *loss, (carry, (aux, fields)) = out if has_loss else (out,)
        _define(known, fields)
        return (*loss, (carry, aux)) if has_loss else (carry, aux)
    first = called(lambda _, fields: fields, False)
    needed, carried = _needed(program(*first, (params, operands)), operands, noted.reads[0])
    state, fields = call(*first, (params, needed), False)
    _define(known, fields)
    out = call(*called(lambda aux, _: aux, has_loss), (params, operands), has_loss)
    *loss, (carry, aux) = out if has_loss else (out,)
    results = state if carried else carry, aux
    return (*loss, results) if has_loss else results


def _define(known: Sequence[Series], fields: Sequence) -> None:
    for one, value in zip(known, fields, strict=True):
        define(one, value, outer=True)


def _read(known: Series, outer: Any, axes: int) -> tuple[Any, Any]:
    """What a read gives outside, and which of its iterations count; several iterations are an axis behind those of the domain."""
    if isinstance(outer, Index):
        return known.at(outer), jnp.ones((), bool)
    behind = lambda value: tree.tree_map(lambda leaf: jnp.moveaxis(leaf, 0, axes), value)  # noqa: E731
    if isinstance(outer, Slice):
        every = known[:]
        return behind(every), jnp.ones(len(tree.tree_leaves(every)[0]), bool)
    there = series(jnp.bool_(True)).window(outer.lo, outer.hi, fill=False)
    return behind(known.window(outer.lo, outer.hi)), there


def _one_way(reads: Sequence[Crossed]) -> bool:
    """Whether all are of iterations before, or all of iterations after: then one call can give and take."""
    domain = current_domain("A read with two indices")
    i = domain.times()

    def side(outer: Any) -> int:
        if isinstance(outer, Index):
            at = domain.evaluate(outer)
            return -1 if (at < i).all() else 1 if (at > i).all() else 0
        return 0 if isinstance(outer, Slice) else -1 if outer.hi <= 0 else 1 if outer.lo > 0 else 0

    sides = {side(read.outer) for read in reads}
    return len(sides) == 1 and 0 not in sides


def _needed(program: Program, operands: tuple, read: Crossed) -> tuple[tuple, bool]:
    """The operands of the call that gives the fields, zeros for those that no field needs; whether its carry needs no others."""
    if any(e.has_effects or SCOPE in e.scope for e in program.equations):
        raise told(
            ProgramError(
                located(
                    f"{program.name} has an effect (rlfx.effect, or a callback of jax), and reads iterations that are not all "
                    "before its own: it is called twice for that, first for the series that is read.",
                    where=read.where,
                    fix="Have the effect in the program around it, of what comes back.",
                )
            )
        )
    seen, carried = (_behind(program, values) for values in (program.aux, program.next_carry))
    leaves, structure = tree.tree_flatten(operands)
    own = program.params[len(program.params) - len(leaves) :]
    zeros = lambda x: J.zero_keys(x.shape, x.dtype) if J.is_key(x) else jnp.zeros(x.shape, x.dtype)  # noqa: E731
    given = tree.tree_unflatten(structure, [x if v in seen else zeros(x) for x, v in zip(leaves, own, strict=True)])
    return given, all(v in seen for v in own if v in carried)


def _behind(program: Program, values: Sequence) -> set[Var]:
    """What some values are computed from."""
    seen: set[Var] = set()
    todo = [*values]
    while todo:
        var = todo.pop()
        if isinstance(var, Var) and var not in seen:
            seen.add(var)
            equation = program.definitions().get(var)
            todo += equation.inputs if equation else ()
    return seen


def _everywhere(value: Any, t: Any) -> Any:
    """The value with an entry for each t and b, of what may vary with neither."""
    b = 0 if t.domain.batch is None else t.index(t.domain.names.axis)
    always = t.now + b >= jnp.iinfo(jnp.int32).min
    return tree.tree_map(lambda leaf: jnp.where(always, leaf, leaf), value)


def _spread(edge: Any, own: Field, axes: tuple[int, ...]) -> Any:
    """A value over i, for all t and b; of each leaf."""
    if edge is None:
        return None
    lead = (1,) * len(axes)
    avals = tree.tree_unflatten(own.structure, own.avals)
    each = lambda v, a: jnp.broadcast_to(jnp.asarray(v, a.dtype), a.shape).reshape(lead + a.shape)  # noqa: E731
    return tree.tree_map(lambda v, part: tree.tree_map(lambda a: each(v, a), part), edge, avals)
