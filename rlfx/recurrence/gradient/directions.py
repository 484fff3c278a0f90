"""One iteration of a loop and its derivative: which equations run on the way forward, which on the way back, what is kept.

``jax.lax.scan`` keeps what the linearised iteration reads: of a gate its value and its slope, a mask as wide as what it masks, a
state before and after it is masked. Here what the way back reads is a minimum cut of the iteration's equations: it makes again
what is cheap, from as few numbers as can be. (TimeRL, section 4, decides for each tensor of its graph; this is for the values
inside an iteration.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import bytes_of, flops_of_jaxpr_equation
from rlfx.recurrence.analysis.cuts import Network, units
from rlfx.recurrence.analysis.storage import BYTES_PER_FLOP
from rlfx.recurrence.ir.interpret import bound
from rlfx.recurrence.language.domain import Domain

_ONE = Domain(1)


#: What XLA makes again inside of what reads it.
_CHEAP = J.ARITHMETIC | J.LAYOUTS


@dataclass(frozen=True, eq=False)
class Body:
    """An iteration, as a jaxpr has it."""

    constvars: list
    invars: list
    eqns: list
    outvars: list


@dataclass(frozen=True, eq=False)
class Directions:
    """The equations of an iteration and of its derivative, each list in order, and the names of their values.

    Attributes:
      closed: the jaxpr of both.
      before: equations of what the loop only reads: evaluated once.
      forward: those of the iteration.
      again: of those, what the way back evaluates again.
      backward: those of the cotangents.
      consts, state, xs: the iteration's inputs.
      after, ys, values: its outputs, and what its products multiply weights with.
      kept: what is kept of an iteration for the way back.
      by_after, by_ys: the cotangents of those outputs that have one.
      to_consts, to_state, to_xs, to_taps: the cotangents of the inputs and of the products, by number: those that there are
        (of the state), that may be other than zero (of the others).
    """

    closed: Any
    before: list
    forward: list
    again: list
    backward: list
    consts: list
    state: list
    xs: list
    after: list
    ys: list
    values: list
    kept: list
    by_after: list
    by_ys: list
    to_consts: dict
    to_state: dict
    to_xs: dict
    to_taps: dict

    def outside(self, consts: Sequence) -> dict:
        """The values of what is the same in all iterations."""
        env = dict(zip([*self.closed.jaxpr.constvars, *self.consts], [*self.closed.consts, *consts], strict=True))
        evaluated(self.before, env)
        return env


def directions(closed: Any, consts: int, state: int, outs: int, taps: int) -> Directions:
    """Split the jaxpr of an iteration and its derivative.

    Args:
      closed: ``(*consts, *state, *xs, *by) -> (*after, *ys, *values, *cotangents)``; ``by`` and ``cotangents`` of what is
        inexact alone, and the cotangents of the products come last.
      consts, state: how many of the inputs.
      outs: how many outputs the iteration has.
      taps: how many products.
    """
    jaxpr = closed.jaxpr
    ins, after_and_ys = list(jaxpr.invars), jaxpr.outvars[:outs]
    count = len(ins) - sum(J.is_inexact(v.aval) for v in after_and_ys)
    named = {"consts": ins[:consts], "state": ins[consts : consts + state], "xs": ins[consts + state : count]}
    moving = sum(J.is_inexact(v.aval) for v in after_and_ys[:state])
    by = {"by_after": ins[count : count + moving], "by_ys": ins[count + moving :]}
    values, to_all = jaxpr.outvars[outs : outs + taps], iter(jaxpr.outvars[outs + taps :])

    before, forward, backward, moved = _parted(jaxpr, named["consts"], ins[count:])
    to = {f"to_{name}": {i: next(to_all) for i, v in enumerate(of) if J.is_inexact(v.aval)} for name, of in named.items()}
    to["to_taps"] = dict(enumerate(to_all))
    for name in ("to_consts", "to_xs", "to_taps"):
        to[name] = {i: v for i, v in to[name].items() if not J.is_literal(v) and v in moved}

    wanted = [v for of in to.values() for v in _variables(of.values())]
    backward = _needed(backward, wanted)
    given = {*jaxpr.constvars, *named["consts"], *named["xs"], *(v for e in before for v in e.outvars)}
    stacked = [v for v in values if v not in given]
    read = {v for v in _variables([*(v for e in backward for v in e.invars), *wanted]) if v not in moved and v not in given}
    kept, again = _cut(_needed(forward, read), read, given, {*stacked, *_variables(after_and_ys[state:])})
    kept = list(dict.fromkeys([*kept, *stacked]))
    forward = _needed(forward, [*_variables(after_and_ys), *kept], effects=True)
    return Directions(
        closed, before, forward, again, backward, **named, after=after_and_ys[:state], ys=after_and_ys[state:],
        values=values, kept=kept, **by, **to,
    )  # fmt: skip


def without_constants(closed: Any) -> tuple[Body, list]:
    """The body of a loop without what is the same in all iterations, and the values of that: constants, and what is made of them.

    A weight that an iteration makes of others (a part of it, one in another dtype) is a weight of the loop.
    """
    jaxpr = closed.jaxpr
    before, rest, _, _ = _parted(jaxpr, (), ())
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    evaluated(before, env)
    used = dict.fromkeys(v for v in _variables([*(v for e in rest for v in e.invars), *jaxpr.outvars]) if v in env)
    return Body(list(used), list(jaxpr.invars), rest, list(jaxpr.outvars)), [env[v] for v in used]


def _parted(jaxpr: Any, consts: Collection, cotangents: Collection) -> tuple[list, list, list, set]:
    """``(before, forward, backward, moved)``: equations of consts alone, the others, and what depends on cotangents."""
    known, moved = {*jaxpr.constvars, *consts}, set(cotangents)
    before, forward, backward = [], [], []
    for e in jaxpr.eqns:
        if not moved.isdisjoint(_variables(e.invars)):
            backward.append(e)
            moved.update(e.outvars)
        elif not e.effects and known.issuperset(_variables(e.invars)) and not _grows(e):
            before.append(e)
            known.update(e.outvars)
        else:
            forward.append(e)
    return before, forward, backward, moved


def _grows(e: Any) -> bool:
    """Whether a cheap equation makes more than it reads, as broadcasts do: in a loop it is part of what reads it."""
    made, read = (sum(bytes_of(v.aval, _ONE) for v in of) for of in (e.outvars, _variables(e.invars)))
    return e.primitive in _CHEAP and made > read


def _cut(equations: list, read: set, given: set, stacked: set) -> tuple[list, list]:
    """``(kept, again)``: the values to keep, and the equations that make what is ``read`` of them."""
    network = Network()
    made = {v: e for e in equations for v in e.outvars}
    values = dict.fromkeys([*made, *(v for e in equations for v in _variables(e.invars)), *read])
    values = [v for v in values if v not in given]
    for v in values:
        # On ties what comes later is kept: it is what was asked for, in its final form.
        network.add(("in", made.get(v, v)), ("out", v), units(0 if v in stacked else bytes_of(v.aval, _ONE)) + 1000)
        if v not in made:
            network.add("source", ("in", v))
    for e in equations:
        again = e.primitive in _CHEAP
        network.add("source", ("in", e), units(flops_of_jaxpr_equation(e) * BYTES_PER_FLOP) + 1 if again else None)
        for v in _variables(e.invars):
            if v not in given:
                network.add(("out", v), ("in", e))
    for v in read:
        network.add(("out", v), "sink")
    if not read:
        return [], []
    _, back = network.sides("source", "sink")
    again = _needed([e for e in equations if ("in", e) in back], read)
    made_again = {v for e in again for v in e.outvars}
    used = {*read, *(v for e in again for v in _variables(e.invars))}
    return [v for v in values if v in used and v not in made_again], again


def _needed(equations: Iterable, wanted: Iterable, effects: bool = False) -> list:
    """The equations that some values depend on, and those with effects."""
    needed, found = set(wanted), []
    for e in reversed(list(equations)):
        if not needed.isdisjoint(e.outvars) or (effects and e.effects):
            found.append(e)
            needed.update(_variables(e.invars))
    return found[::-1]


def _variables(atoms: Iterable) -> list:
    return [v for v in atoms if not J.is_literal(v)]


def value_in(env: dict) -> Callable:
    """The value of an atom."""
    return lambda atom: atom.val if J.is_literal(atom) else env[atom]


def evaluated(equations: Iterable, env: dict) -> None:
    """The values of equations, put to those that they are of."""
    read = value_in(env)
    for e in equations:
        env.update(zip(e.outvars, bound(e, [read(v) for v in e.invars]), strict=True))
