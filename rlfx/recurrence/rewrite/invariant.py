"""What a user's loop computes of what it only reads is computed before it: weights that are normalised, products with an input.

Inside of ``lax.scan``, jax differentiates it in every iteration, and keeps it for each. What is larger than all that it is
computed of stays, but products: it is cheap to make again, and long to read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.ir.build import with_calls
from rlfx.recurrence.ir.interpret import evaluate, inlined_body, scanned
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.rewrite.unrolled import has_more_than

#: Equations of a body, at most, that are traced once more: a physics engine has thousands.
_MOST = 256

#: What only arranges numbers is no reason to leave a loop.
_ARRANGED = frozenset(map(J.primitive, ("broadcast_in_dim", "reshape", "squeeze", "slice", "iota", "convert_element_type")))


def with_invariants_before(program: Program) -> Program:
    """The program with ``lax.scan`` of what varies alone; without anything else in one it is ``program``. Meaning-preserving,
    and idempotent.
    """
    found = with_calls(program, _instead)
    return program if found is program else with_invariants_before(found)  # of loops that have left another one


def _instead(e: Equation) -> Callable | None:
    if e.op is not J.SCAN or e.is_ragged or e.has_effects or has_more_than(_MOST, e.params["jaxpr"].jaxpr):
        return None
    consts, _ = J.scan_counts(dict(e.params))
    body = inlined_body(e.params["jaxpr"]) if consts else None
    leaving, before = ([], []) if body is None else _before(body.jaxpr, body.jaxpr.invars[:consts])
    return (lambda *operands: _loop(e.params, body, set(leaving), before, operands)) if leaving else None


@dataclass(frozen=True)
class _Origin:
    """How a value of a loop's body is made of what the loop reads.

    Attributes:
      of: which of these.
      works: whether numbers are computed, not only arranged.
      multiplies: whether a product is among it.
    """

    of: frozenset = field(default_factory=frozenset)
    works: bool = False
    multiplies: bool = False

    def fits(self, v: Any) -> bool:
        """Whether it is worth it to keep it while a loop runs."""
        return self.works and (self.multiplies or math.prod(v.aval.shape) <= sum(math.prod(x.aval.shape) for x in self.of))


def _before(jaxpr: Any, consts: Sequence[Any]) -> tuple[list, list]:
    """The equations of a body that leave the loop; and all that are computed before it for that. In order."""
    made: dict[Any, _Origin] = {v: _Origin(frozenset({v})) for v in consts}
    found: dict[Any, None] = {}
    for eqn in jaxpr.eqns:
        operands = _operands(eqn)
        if not eqn.effects and eqn.outvars and all(v in made for v in operands) and not _has_a_rule(eqn):
            of = [made[v] for v in operands]
            works = eqn.primitive not in _ARRANGED or any(m.works for m in of)
            product = eqn.primitive in PRODUCTS or any(m.multiplies for m in of)
            made |= dict.fromkeys(eqn.outvars, _Origin(frozenset().union(*(m.of for m in of)), works, product))
            found[eqn] = None
    leaving, needed = set(found), {v for v in jaxpr.outvars if not J.is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        if eqn in leaving and not all(made[v].fits(v) for v in eqn.outvars if v in needed):
            leaving.remove(eqn)
        if eqn not in leaving:
            needed.update(_operands(eqn))
    if not any(v in needed for eqn in leaving for v in eqn.outvars):
        return [], []
    before, wanted = leaving.copy(), {v for eqn in leaving for v in _operands(eqn)}
    for eqn in reversed(found):
        if eqn in leaving or not wanted.isdisjoint(eqn.outvars):
            before.add(eqn)
            wanted.update(_operands(eqn))
    return [eqn for eqn in found if eqn in leaving], [eqn for eqn in found if eqn in before]


def _operands(eqn: Any) -> list:
    return [v for v in eqn.invars if not J.is_literal(v)]


def _has_a_rule(eqn: Any) -> bool:
    """Whether it has a derivative that may not be linear: each iteration calls it with a cotangent of its own."""
    return J.contains(eqn.primitive, dict(eqn.params), {J.CUSTOM_VJP})


def _loop(params: Mapping[str, Any], body: Any, leaving: set, before: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The outputs of a loop that some equations have left."""
    consts, _ = J.scan_counts(dict(params))
    outs = [v for eqn in before for v in eqn.outvars]
    jaxpr = SimpleNamespace(constvars=body.jaxpr.constvars, invars=body.jaxpr.invars[:consts], eqns=before, outvars=outs)
    known = dict(zip(outs, evaluate(jaxpr, body.consts, operands[:consts]), strict=True))
    return scanned(params, body, operands, lambda eqn, _: [known[v] for v in eqn.outvars] if eqn in leaving else None)
