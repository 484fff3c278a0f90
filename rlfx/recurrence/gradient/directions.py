"""One iteration of a loop and its derivative: which equations run on the way forward, which on the way back, what is kept.

``jax.lax.scan`` keeps what the linearised iteration reads: of a gate its value and its slope, a mask as wide as what it masks, a
state before and after it is masked. Here what the way back reads is a minimum cut of the iteration's equations: it makes again
what is cheap, from as few numbers as can be. (TimeRL, section 4, decides for each tensor of its graph; this is for the values
inside an iteration.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import bytes_of, flops_of_jaxpr_equation
from rlfx.recurrence.analysis.cuts import Network, units
from rlfx.recurrence.analysis.storage import BYTES_PER_FLOP
from rlfx.recurrence.ir.interpret import evaluate
from rlfx.recurrence.language.domain import Domain

_ONE = Domain(1)

#: What XLA makes again inside of what reads it.
_CHEAP = J.ARITHMETIC | J.LAYOUTS


@dataclass(frozen=True, eq=False)
class Body:
    """Equations with what they read and give, as a jaxpr has them: what ``evaluate`` takes."""

    constvars: list
    invars: list
    eqns: list
    outvars: list


@dataclass(frozen=True, eq=False)
class Directions:
    """An iteration and its derivative, in two ways.

    Attributes:
      before: from what the loop only reads to what both ways use of that, ``outside``; evaluated once.
      forward: ``(*state, *xs) -> (*after, *stacks)``, of ``outside``.
      backward: ``(*by_after, *xs, *kept, *by_ys) -> (*to_consts, *to_state, *stacks)``, of ``outside``.
      ys, kept: where among the stacks forwards what it puts out is, and what is kept of an iteration.
      values: for each product, where among ``(*xs, *kept)`` what it multiplies weights with is.
      to_consts, to_state: of which of the two there is a cotangent.
      to_xs, to_taps: for others, and for products, of which there is a cotangent: where among the stacks backwards it is.
    """

    before: Body
    forward: Body
    backward: Body
    ys: list[int]
    kept: list[int]
    values: list[int]
    to_consts: list[int]
    to_state: list[int]
    to_xs: dict[int, int]
    to_taps: dict[int, int]


def directions(jaxpr: Any, consts: int, state: int, outs: int, taps: int) -> Directions:
    """Split the jaxpr of an iteration and its derivative.

    Args:
      jaxpr: ``(*consts, *state, *xs, *by) -> (*after, *ys, *values, *cotangents)``; ``by`` and ``cotangents`` of what is
        inexact alone, and the cotangents of the products come last.
      consts, state: how many of the inputs.
      outs: how many outputs the iteration has.
      taps: how many products.
    """
    ins, after, ys = list(jaxpr.invars), jaxpr.outvars[:state], jaxpr.outvars[state:outs]
    count = len(ins) - sum(J.is_inexact(v.aval) for v in (*after, *ys))
    groups = {"consts": ins[:consts], "state": ins[consts : consts + state], "xs": ins[consts + state : count]}
    moving = count + sum(J.is_inexact(v.aval) for v in after)
    values, to_all = jaxpr.outvars[outs : outs + taps], iter(jaxpr.outvars[outs + taps :])

    before, forward, backward, moved = _parted(jaxpr, groups["consts"], ins[count:])
    to = {name: {i: next(to_all) for i, v in enumerate(of) if J.is_inexact(v.aval)} for name, of in groups.items()}
    to["taps"] = dict(enumerate(to_all))
    for name in ("consts", "xs", "taps"):  # the others are zero
        to[name] = {i: v for i, v in to[name].items() if not J.is_literal(v) and v in moved}

    wanted = [v for of in to.values() for v in J.variables(of.values())]
    backward = J.needed(backward, wanted)
    known = {*jaxpr.constvars, *groups["consts"], *(v for e in before for v in e.outvars)}
    given = {*known, *groups["xs"]}
    stacked = [v for v in values if v not in given]
    read = {v for v in (*_read(backward), *wanted) if v not in moved and v not in given}
    kept, again = _cut(J.needed(forward, read), read, given, {*stacked, *J.variables(ys)})
    kept = list(dict.fromkeys([*kept, *stacked]))
    forward = J.needed(forward, [*J.variables((*after, *ys)), *kept], effects=True)

    backward = [*again, *backward]
    used = [v for v in dict.fromkeys((*_read(forward), *_read(backward), *J.variables(jaxpr.outvars))) if v in known]
    put_out, of_stacks = _distinct([*ys, *kept])
    put_back, of_cotangents = _distinct([*to["xs"].values(), *to["taps"].values()])
    to_xs, to_taps = of_cotangents[: len(to["xs"])], of_cotangents[len(to["xs"]) :]
    place = {v: i for i, v in enumerate((*groups["xs"], *kept))}
    return Directions(
        before=Body(list(jaxpr.constvars), groups["consts"], before, used),
        forward=Body(used, [*groups["state"], *groups["xs"]], forward, [*after, *put_out]),
        backward=Body(
            used, [*ins[count:moving], *groups["xs"], *kept, *ins[moving:]], backward,
            [*to["consts"].values(), *to["state"].values(), *put_back],
        ),
        ys=of_stacks[: len(ys)], kept=of_stacks[len(ys) :], values=[place[v] for v in values],
        to_consts=list(to["consts"]), to_state=list(to["state"]),
        to_xs=dict(zip(to["xs"], to_xs, strict=True)), to_taps=dict(zip(to["taps"], to_taps, strict=True)),
    )  # fmt: skip


def without_constants(closed: Any) -> tuple[Body, list]:
    """The body of a loop without what is the same in all iterations, and the values of that: constants, and what is made of them.

    A weight that an iteration makes of others (a part of it, one in another dtype) is a weight of the loop.
    """
    jaxpr = closed.jaxpr
    before, rest, _, _ = _parted(jaxpr, (), ())
    known = {*jaxpr.constvars, *(v for e in before for v in e.outvars)}
    used = [v for v in dict.fromkeys((*_read(rest), *J.variables(jaxpr.outvars))) if v in known]
    outside = evaluate(Body(jaxpr.constvars, [], before, used), closed.consts, [])
    return Body(used, list(jaxpr.invars), rest, list(jaxpr.outvars)), outside


def _parted(jaxpr: Any, consts: Collection, cotangents: Collection) -> tuple[list, list, list, set]:
    """``(before, forward, backward, moved)``: equations of consts alone, the others, and what depends on cotangents."""
    known, moved = {*jaxpr.constvars, *consts}, set(cotangents)
    before, forward, backward = [], [], []
    for e in jaxpr.eqns:
        if not moved.isdisjoint(J.variables(e.invars)):
            backward.append(e)
            moved.update(e.outvars)
        elif not e.effects and known.issuperset(J.variables(e.invars)) and not _grows(e):
            before.append(e)
            known.update(e.outvars)
        else:
            forward.append(e)
    return before, forward, backward, moved


def _grows(e: Any) -> bool:
    """Whether a cheap equation makes more than it reads, as broadcasts do: in a loop it is part of what reads it."""
    made, read = (sum(bytes_of(v.aval, _ONE) for v in of) for of in (e.outvars, J.variables(e.invars)))
    return e.primitive in _CHEAP and made > read


def _cut(equations: list, read: set, given: set, stacked: set) -> tuple[list, list]:
    """``(kept, again)``: the values to keep, and the equations that make what is ``read`` of them."""
    network = Network()
    made = {v: e for e in equations for v in e.outvars}
    values = dict.fromkeys([*made, *_read(equations), *read])
    values = [v for v in values if v not in given]
    for v in values:
        # On ties what comes later is kept: it is what was asked for, in its final form.
        network.add(("in", made.get(v, v)), ("out", v), units(0 if v in stacked else bytes_of(v.aval, _ONE)) + 1000)
        if v not in made:
            network.add("source", ("in", v))
    for e in equations:
        again = e.primitive in _CHEAP
        network.add("source", ("in", e), units(flops_of_jaxpr_equation(e) * BYTES_PER_FLOP) + 1 if again else None)
        for v in J.variables(e.invars):
            if v not in given:
                network.add(("out", v), ("in", e))
    for v in read:
        network.add(("out", v), "sink")
    if not read:
        return [], []
    _, back = network.sides("source", "sink")
    again = J.needed([e for e in equations if ("in", e) in back], read)
    made_again = {v for e in again for v in e.outvars}
    used = {*read, *_read(again)}
    return [v for v in values if v in used and v not in made_again], again


def _read(equations: Sequence) -> list:
    """What equations read, of values that have a name."""
    return [v for e in equations for v in J.variables(e.invars)]


def _distinct(atoms: Sequence) -> tuple[list, list[int]]:
    """The atoms without those that come again, and where among them each is."""
    distinct = {id(atom): atom for atom in atoms}
    places = {key: place for place, key in enumerate(distinct)}
    return list(distinct.values()), [places[id(atom)] for atom in atoms]
