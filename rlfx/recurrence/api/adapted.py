"""A program as its machine computes it fast: the rewrites that pay there."""

from __future__ import annotations

import functools
from dataclasses import replace

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx.recurrence.analysis.cost import is_counted_loop
from rlfx.recurrence.cpu.convolution import with_channels_last
from rlfx.recurrence.cpu.dense import with_dense_convolutions
from rlfx.recurrence.cpu.elementwise import with_fast_elements
from rlfx.recurrence.cpu.shared_bodies import with_fast_bodies
from rlfx.recurrence.ir.directives import Inside, Leaving
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.verify import rewritten
from rlfx.recurrence.rewrite.apart import with_parts_apart
from rlfx.recurrence.rewrite.begun import with_begun
from rlfx.recurrence.rewrite.between import with_distances_between
from rlfx.recurrence.rewrite.branches import with_branches_chosen
from rlfx.recurrence.rewrite.chosen import with_chosen_first
from rlfx.recurrence.rewrite.contracted import with_contractions
from rlfx.recurrence.rewrite.distances import with_distances
from rlfx.recurrence.rewrite.ends import with_ends_alone
from rlfx.recurrence.rewrite.entries import with_entries_first
from rlfx.recurrence.rewrite.invariant import with_invariants_before
from rlfx.recurrence.rewrite.merged import merged
from rlfx.recurrence.rewrite.narrow import with_narrow
from rlfx.recurrence.rewrite.now_and_then import with_now_and_then
from rlfx.recurrence.rewrite.one_hot import with_rows_taken
from rlfx.recurrence.rewrite.outer import with_outer_sums
from rlfx.recurrence.rewrite.pairs import with_loops_over_pairs
from rlfx.recurrence.rewrite.patches import FEW, with_patches
from rlfx.recurrence.rewrite.picks import with_picks
from rlfx.recurrence.rewrite.prototypes import with_prototypes
from rlfx.recurrence.rewrite.reals import complex_numbers, with_reals
from rlfx.recurrence.rewrite.rows import with_rows_first
from rlfx.recurrence.rewrite.shares import with_shares
from rlfx.recurrence.rewrite.spread import with_spread_after
from rlfx.recurrence.rewrite.stopped import with_stops
from rlfx.recurrence.rewrite.taken import with_taken_first
from rlfx.recurrence.rewrite.transposes import absorb_transposes
from rlfx.recurrence.rewrite.units import without_unit_axes
from rlfx.recurrence.rewrite.unrolled import with_recurrent_iterations, with_unrolled
from rlfx.recurrence.schedule.fusion import CLOSE, bytes_given
from rlfx.recurrence.schedule.plan import WHOLE, Plan


def adapted(
    program: Program, target: Target, memory_first: bool = False, devices: int = 1, plan: Plan | None = None
) -> Program:
    """The program for a target, with the same meaning.

    Args:
      memory_first: nothing is stored to start fewer operations.
      devices: that share its environments.
      plan: one that is asked for.
    """
    pays = target.rewrites
    own = (program.domain.batch or 1) // devices
    program = rewritten(with_branches_chosen, program)
    whole = plan is None or plan.form in WHOLE or plan.form == "blocks"
    if whole and not memory_first and program.directives.timesteps is None:
        program = rewritten(with_ends_alone, program)
    given = program = rewritten(with_invariants_before, program)
    program = rewritten(with_rows_first, rewritten(without_unit_axes, program))
    if program is not given:  # what was written has absorbed its own
        program = rewritten(absorb_transposes, program)
    if pays.rows_taken:
        program = rewritten(with_rows_taken, program)
    if pays.entries:
        program = rewritten(functools.partial(with_entries_first, times=pays.entries), program, "with_entries_first")
    program = rewritten(with_shares, rewritten(with_outer_sums, program))
    if pays.branches:
        program = rewritten(with_begun, rewritten(with_now_and_then, program))
    if pays.reals and complex_numbers(program, own) >= pays.reals:
        program = rewritten(with_reals, program)
    if pays.apart:
        program = rewritten(with_chosen_first, rewritten(with_taken_first, program))
    if pays.contracted:
        program = rewritten(functools.partial(with_contractions, fewest=pays.contracted), program, "with_contractions")
    if pays.contractions:
        program = rewritten(with_fast_elements, rewritten(with_fast_bodies, program))
    if pays.dense:
        program = rewritten(with_dense_convolutions, program)
    if pays.patches and not memory_first:
        program = rewritten(functools.partial(with_narrow, unrolled=pays.unrolled), program, "with_narrow")
    if pays.channels_last:
        program = rewritten(with_channels_last, program)
    if pays.patches:
        few = 0 if memory_first else FEW
        program = rewritten(functools.partial(with_patches, most=pays.patches, few=few), program, "with_patches")
    if pays.unrolled and not memory_first and own <= pays.deferred_rows:
        most = pays.unrolled
        program = rewritten(functools.partial(with_recurrent_iterations, most=most), program, "with_recurrent_iterations")
    if pays.unrolled:
        most = pays.unrolled  # where starting is dear, products are no reason for a loop
        multiplying = None if pays.starts else most * 3 // 8
        program = rewritten(functools.partial(with_unrolled, most=most, multiplying=multiplying), program, "with_unrolled")
    if pays.apart:
        program = rewritten(with_parts_apart, rewritten(with_spread_after, program))
    if pays.picks:  # of products of rows, too
        program = rewritten(functools.partial(with_picks, most=pays.picks), program, "with_picks")
    if pays.pairs:
        program = rewritten(functools.partial(with_prototypes, fewest=pays.pairs), program, "with_prototypes")
        program = rewritten(functools.partial(with_distances, fewest=pays.pairs), program, "with_distances")
        program = rewritten(functools.partial(with_distances_between, fewest=pays.pairs), program, "with_distances_between")
        program = rewritten(functools.partial(with_loops_over_pairs, fewest=pays.pairs), program, "with_loops_over_pairs")
    program = rewritten(with_stops, merged(program))  # what is merged has the same types: nothing to verify
    asked, start, room = program.directives, int(target.rates.overhead * target.rates.bandwidth), target.room
    small = asked.less_memory or (plan is not None and plan.block is not None)
    draws = pays.starts or (not small and any(e.op in J.RANDOM for e in program.equations))
    if draws and not memory_first and asked.loops is None:  # fused steps draw in their kernel
        asked = replace(asked, ahead=room.draws)
    if not memory_first and pays.starts:
        asked = replace(asked, start=start)
    if not (memory_first or asked.loops is not None or program.domain.until) and any(
        map(is_counted_loop, program.equations)
    ):
        asked = replace(asked, nested=Leaving(start, room.at_once if room.tile is None else room.cache))
    if pays.leaving_rows and not (memory_first or small) and asked.loops is None:
        asked = replace(asked, rows=pays.leaving_rows)
    if pays.inside and room.tile is not None and asked.loops is None:
        close = room.tile // 2  # what a loop is given is read while it writes as much
        if bytes_given(program, own) > close or bytes_given(program, own, products=False) > CLOSE:
            asked = replace(asked, inside=Inside(close, start, own))
    return program if asked is program.directives else replace(program, directives=asked)
