"""What a function does of compiled programs: each call in it, explained with what it differentiates there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, CALLABLE, expect, is_array, shown
from rlfx._tracing import traces
from rlfx.errors import ProgramError, located
from rlfx.recurrence.analysis.active import is_float
from rlfx.recurrence.api.explain import Explanation
from rlfx.recurrence.gradient.called import Call
from rlfx.recurrence.gradient.replanned import Added
from rlfx.recurrence.plan.planner import Options, evaluator_of
from rlfx.recurrence.plan.room import free_on


@traces
def explain(f: Callable, *args: Any, measure: bool = False, verbose: bool = False) -> tuple[Explanation, ...]:
    """The calls of compiled programs in ``f(*args)``, each as it is made: what it differentiates, under which ``jax.vmap``.

    ``Compiled.explain`` is told what a call differentiates (``wrt=``); here the gradient itself says it. Nothing is computed.

    Args:
      f: any function that jax traces: a gradient, an update with its optimizer, a loop over updates.
      args: its arguments, arrays or shapes.
      measure, verbose: as for ``Compiled.explain``.

    Returns:
      An explanation for each call, in their order; calls that are alike once.

    Raises:
      ProgramError: ``f`` is no function, an argument no array, or it calls no compiled program. (One with effects in it is a
        part of its caller.)

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> def fit(params, carry, t):
      ...     w, data = params
      ...     return jnp.mean((jnp.tanh(rlfx.inputs(data)[t] @ w) - 1.0) ** 2), carry
      >>> fitted = rlfx.compile(fit, length=100, batch=8)
      >>> def update(w, data):
      ...     return w - 0.1 * jax.grad(lambda w: fitted((w, data), jnp.zeros(8))[0])(w)
      >>> (call,) = rlfx.explain(update, jnp.zeros((16, 16)), jnp.ones((100, 8, 16)))
      >>> call.plan.form, [v.shape for v in call.evaluator.order]  # no gradient of the data
      ('at once', [(16, 16)])
    """
    f = expect("f", f, CALLABLE, ProgramError)
    measure, verbose = (expect(*flag, BOOLEAN, ProgramError) for flag in (("measure", measure), ("verbose", verbose)))
    for leaf in jax.tree.leaves(args):
        if not is_array(leaf):
            fact = f"rlfx.explain traces f with its arguments, and one of them has a leaf that is {shown(leaf)}."
            raise ProgramError(located(fact, where=J.here(), fix="Give arrays or shapes, and bind the rest: functools.partial."))
    calls = dict.fromkeys(_calls(jax.make_jaxpr(f)(*args).jaxpr))
    if not calls:
        fact = f"{getattr(f, '__name__', 'f')} calls no compiled program whose plan could be told."
        fix = "Give the function that calls it: rlfx.explain(update, params, data)."
        raise ProgramError(located(fact, where=J.here(), fix=fix))
    return tuple(_explained(*call, measure, verbose) for call in calls)


def _calls(jaxpr: Any) -> Iterator[tuple[Call, tuple[Added, ...]]]:
    """The calls of programs, and the axes that ``jax.vmap`` has added; not the pullback of one that was seen."""
    for equation in jaxpr.eqns:
        of = equation.params.get("of")
        if isinstance(of, Call):
            if of.what != "pullback":
                yield Call(of.rule, of.what, of.perturbed, of.targets), equation.params["axes"]
        else:
            for body, _ in J.sub_jaxprs(dict(equation.params)):
                yield from _calls(body)


def _explained(call: Call, axes: tuple[Added, ...], measure: bool, verbose: bool) -> Explanation:
    rule, values = call.rule, call.what == "value"
    floats = frozenset(v for v in rule.program.params if is_float(v))
    perturbed = floats if values else call.perturbed
    order = tuple(v for v in rule.flat_inputs if v in perturbed)
    learner = rule.learner(perturbed, call.targets)
    forward = rule.forward if values else None
    plan = rule.plan(learner, order, axes)
    evaluator = evaluator_of(rule, order, axes, None if values else learner)
    if measure:
        evaluator.measured(plan)
    shown = rule.caching(plan, learner) if plan.cached else rule
    budget = rule.planner.memory_budget if isinstance(rule.planner, Options) else None
    return Explanation(
        shown.program, shown.learner(perturbed), plan, evaluator, budget, free_on(rule), None, forward, verbose
    )
