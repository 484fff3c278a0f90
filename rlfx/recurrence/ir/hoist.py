"""Accesses inside a ``cond`` or ``scan`` become operands of it, where they depend on nothing that it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate, has_only_a_name
from rlfx.recurrence.language.index import Lookup
from rlfx.recurrence.language.primitives import declare_p, now_p, read_p, series_p, whole_p


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A cond or scan whose inner accesses became operands.

    Attributes:
      equations: ``(primitive, params, positions, aval)``: what to evaluate before; positions index the old operands, or
        are literals.
      params: the new parameters of the equation.
      place: ``(old operands, hoisted values) -> new operands``.
      body: ``(jaxpr, consts)`` to inline on the new operands, instead of an equation with new parameters.
    """

    equations: list
    params: dict
    place: Callable
    body: tuple[Any, list] | None = None


def hoist(eqn: Any, wanted: Callable[[Any], bool]) -> Hoisted | None:
    """Move the equations that ``wanted`` selects out of the bodies of a cond or scan; None if one of them can't be."""
    if eqn.primitive is J.COND:
        bodies, offset = list(eqn.params["branches"]), 1
    elif eqn.primitive is J.SCAN and "num_consts" not in eqn.params:  # jax 0.11 and later
        return _hoist_by_tracing(eqn, wanted)
    elif "num_consts" in eqn.params and "jaxpr" in eqn.params:  # a scan, and our own calls of its form
        bodies, offset = [eqn.params["jaxpr"]], 0
    else:
        return None
    outer = len(eqn.invars)
    fixed = outer if eqn.primitive is J.COND else eqn.params["num_consts"]
    found: list = []
    plans = []
    for body in bodies:
        plan: list = []
        positions = {v: i + offset for i, v in enumerate(body.jaxpr.invars) if i + offset < fixed}
        if not _collect(body.jaxpr, positions, wanted, plan):
            return None
        plans.append((body, len(found), plan))
        found += plan
    avals = [aval for *_, aval in found]
    if any(J.symbolic_axes(a.shape) for a in avals):
        return None

    def rebuilt(body, first, plan):
        def fn(*args):
            extra, rest = args[: len(found)], args[len(found) :]
            return _replay(body.jaxpr, body.consts, rest, wanted, iter(extra[first : first + len(plan)]))

        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*avals, *(v.aval for v in body.jaxpr.invars))]
        traced = jax.make_jaxpr(fn)(*structs)
        return J.lift_consts(traced.jaxpr) if traced.consts else traced

    new_bodies = [rebuilt(*p) for p in plans]
    params = dict(eqn.params)
    if eqn.primitive is J.COND:
        params["branches"] = tuple(new_bodies)
        return Hoisted(found, params, lambda old, new: [old[0], *new, *old[1:]])
    params.update(jaxpr=new_bodies[0], num_consts=params["num_consts"] + len(found))
    if "linear" in params:
        params["linear"] = (False,) * len(found) + tuple(params["linear"])
    return Hoisted(found, params, lambda old, new: [*new, *old])


_INSIDE = {
    "cond": "a condition (jax.lax.cond or switch, rlfx.every)",
    "scan": "a loop (jax.lax.scan, map or fori_loop)",
    "while": "a loop without a known count (jax.lax.while_loop or fori_loop)",
}
_SLICE = "A slice of a series is read", "Reduce it before, s = x[:t + 1].sum(), and use s inside."
_LOOKUP = "A series is looked up", "Look up before what is needed, xs = x[indices], and use xs[i] inside."
_READ = "Another timestep is read", "Read it before, v = x[t - 1], and use v inside."
_NAMED = "A series is named and read", "Name and read it before, v = rlfx.series(a)[t - 1], and use v inside."
_SOLVED = "rlfx.solve stands", "Solve before, v = rlfx.solve(...), and use v inside."
_TOGETHER = (
    "Environments compute something together",
    "Do so before, v = rlfx.shared(fn, x), and use v inside; or put the condition inside: "
    "rlfx.shared(lambda x: rlfx.every(n, ...), x).",
)
_OTHER = "Other timesteps or environments are read", "Read them before, and use the value inside."


def why_not(eqn: Any, wanted: Callable[[Any], bool]) -> tuple[str, str]:
    """What stands in the bodies of a cond, scan or while that :func:`hoist` cannot move; and the fix."""
    found = list(_wanted(eqn.params, wanted))
    ops = {e.primitive: e for e in found}
    reads, sliced = ops.get(read_p), any(J.symbolic_axes(v.aval.shape) for e in found for v in e.outvars)
    if declare_p in ops:
        fact, fix = _SOLVED
    elif whole_p in ops:
        fact, fix = _TOGETHER
    elif sliced:
        fact, fix = _SLICE
    elif reads is None or not ops.keys() <= {read_p, series_p, now_p}:
        fact, fix = _OTHER
    elif isinstance(reads.params["access"], Lookup):
        fact, fix = _LOOKUP
    else:
        fact, fix = _NAMED if series_p in ops else _READ
    return (
        f"{fact} inside of {_INSIDE.get(eqn.primitive.name, eqn.primitive.name)}, and cannot be moved out of it.",
        fix,
    )


def _wanted(params: dict, wanted: Callable) -> Iterator[Any]:
    for jaxpr, _ in J.sub_jaxprs(params):
        for e in jaxpr.eqns:
            if wanted(e.primitive):
                yield e
            else:
                yield from _wanted(e.params, wanted)


def _hoist_by_tracing(eqn: Any, wanted: Callable) -> Hoisted | None:
    """As :func:`hoist`, for a scan: traced again with the hoisted values as constants of its body."""
    jaxpr, consts = J.body_of(eqn.params["jaxpr"])
    n_consts, n_carry = J.scan_counts(eqn.params)
    plan: list = []
    if not _collect(jaxpr, {v: i for i, v in enumerate(jaxpr.invars) if i < n_consts}, wanted, plan):
        return None
    avals = [aval for *_, aval in plan]
    if any(J.symbolic_axes(a.shape) for a in avals):
        return None

    def again(*args):
        early, rest = args[: len(plan)], args[len(plan) :]
        fixed, init, xs = rest[:n_consts], rest[n_consts : n_consts + n_carry], rest[n_consts + n_carry :]

        def body(carry, x):
            outs = _replay(jaxpr, consts, [*fixed, *carry, *x], wanted, iter(early))
            return outs[:n_carry], outs[n_carry:]

        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, list(init), list(xs), **options)
        return [*carry, *ys]

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*avals, *(v.aval for v in eqn.invars))]
    traced = jax.make_jaxpr(again)(*structs)
    return Hoisted(plan, {}, lambda old, new: [*new, *old], (traced.jaxpr, list(traced.consts)))


def _collect(jaxpr: Any, positions: dict, wanted: Callable, plan: list) -> bool:
    """List the wanted equations of a body in order; False if one depends on what the body computes."""
    hidden = []

    def visit(eqn: Any, where: list, within: tuple) -> list:  # what the body computes has no position
        if wanted(eqn.primitive):
            hidden.extend(w for w in where if w is None)
            hidden.extend(eqn.outvars[1:])
            plan.append((eqn.primitive, eqn.params, where, eqn.outvars[0].aval))
        else:
            hidden.extend(e for e in J.equations_in(eqn.params) if wanted(e.primitive))
        return [None] * len(eqn.outvars)

    args, consts = ([positions.get(v) for v in of] for of in (jaxpr.invars, jaxpr.constvars))
    itself, nowhere = (lambda atom: atom), (lambda value: None)
    J.walk(jaxpr, consts, args, visit, inlines=has_only_a_name, literal=itself, constant=nowhere)
    return not hidden


def _replay(jaxpr: Any, consts: Sequence, args: Sequence, wanted: Callable, values: Iterator) -> list:
    """Evaluate a body in which the wanted equations have their values from ``values``, in order."""

    def rule(eqn: Any, operands: list) -> list | None:
        return [next(values)] if wanted(eqn.primitive) else None

    return evaluate(jaxpr, consts, args, rule, has_only_a_name)
