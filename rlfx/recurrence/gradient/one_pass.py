"""One pass: the acting loop itself is differentiated, so that a recurrence runs forward once.

The other forms act first and run the learner's recurrence forward again. That costs its operations once more, and saves what
the acting loop would keep of every timestep for its derivative. Where operations are slow to start, or residuals small, one pass
may be faster. (TimeRL derives all backward tensors from one forward program, too.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.execute.executor import execute
from rlfx.recurrence.execute.outputs import returned
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.gradient.counted import counted
from rlfx.recurrence.gradient.forms import Pass, learning_plan
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.language.precision import widened
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import REGISTER, Schedule, schedule


def find_one_pass(learner: Learner) -> Schedule | str:
    """Acting and learning as one schedule, of which derivatives are taken; or why there is none."""
    program, region = learner.program, learner.region
    if not region.loops:
        return "the gradient flows through no recurrence"
    if program.domain.until:
        return "environments end at different timesteps"
    for loop in region.loops:
        reader = next((e for e in loop.reads if loop.depth[e.source] != REGISTER), None)
        if reader is not None:  # a ring would be kept once for each timestep
            return f"the gradient flows through reads further back than the previous timestep ({reader.where})"
    outputs = frozenset(v for v in program.aux if isinstance(v, Var))
    acting = learner.acting.graph
    last, beyond = region.graph.wanted_last | acting.wanted_last, acting.wanted_beyond - frozenset(learner.beyond)
    whole = Graph(program, region.graph.wanted | outputs, last, beyond, roots=acting.roots)
    effect = next((e for e in whole.equations if e.has_effects), None)
    if effect is not None:
        return f"{effect.op.name} has an effect, which belongs to acting ({effect.where})"
    return schedule(whole, differentiated=learner.active, perturbed=learner.perturbed)


def one_pass_of(learner: Learner) -> Schedule:
    """As :func:`find_one_pass`, of a learner that has one."""
    found = find_one_pass(learner)
    assert isinstance(found, Schedule)
    return found


def one_pass(p: Pass, plan: Plan) -> tuple:
    """``(what a call returns, loss on this device, gradient)``, of acting and learning at once."""
    whole, domain = one_pass_of(p.learner), counted(p.learner, p.begins)
    run_by = learning_plan(whole, p.target, batch=p.extent.batch, counted=domain)

    def loss(leaves: Sequence) -> Any:
        own = {**p.env, **{v: Value(x, p.env[v].dims) for v, x in zip(p.order, leaves, strict=True)}}
        run = execute(run_by, own, p.t0, extent=p.extent)
        return p.objective(run, p.objective.share(run)), returned(run)

    (value, outputs), grads = p.learning(jax.value_and_grad(loss, has_aux=True))(p.leaves)
    return outputs, widened(value), list(map(widened, grads))
