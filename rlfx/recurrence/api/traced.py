"""From a per-timestep function to the program that is compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax

from rlfx._checks import instance
from rlfx.recurrence.analysis.check import check
from rlfx.recurrence.api.pending import transformed
from rlfx.recurrence.ir.arguments import Arguments
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.reasons import trace_arguments
from rlfx.recurrence.ir.trace import Signature, unwrap_shared
from rlfx.recurrence.ir.verify import rewritten
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.rewrite.lift import lift
from rlfx.recurrence.rewrite.present import present
from rlfx.recurrence.rewrite.softmax import divide_last
from rlfx.recurrence.rewrite.transposes import absorb_transposes
from rlfx.recurrence.rewrite.unchanged import unchanged

tree = jax.tree_util

PROGRAM = instance(Program, "a program", "rlfx.trace(f, params, carry, length=T)")

#: What every program goes through, in order; each means the same.
REWRITES: tuple[Callable[[Program], Program], ...] = (unchanged, lift, present, absorb_transposes, divide_last)


def traced(f, params, carry, arguments: Arguments, domain: Domain, loss: bool, reduce: str, until) -> Program:
    """The program of a per-timestep function, checked and rewritten, with the transforms that wait for it."""
    bare, shared = unwrap_shared(carry)
    trees = tree.tree_structure(params), tree.tree_structure(bare)
    sig = Signature(domain, loss, *trees, shared, reduce, until)
    program = check(trace_arguments(f, sig, arguments))
    for rewrite in REWRITES:
        program = rewritten(rewrite, program)
    return transformed(f, program)
