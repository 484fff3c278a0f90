"""A program as its machine computes it fast: the rewrites that pay there."""

from __future__ import annotations

import functools
from dataclasses import replace

from rlfx._target import Target
from rlfx.recurrence.cpu.convolution import with_channels_last
from rlfx.recurrence.cpu.shared_bodies import with_fast_bodies
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.verify import rewritten
from rlfx.recurrence.rewrite.picks import with_picks


def adapted(program: Program, target: Target, memory_first: bool = False) -> Program:
    """The program for a target, with the same meaning.

    ``memory_first``: nothing is stored to start fewer operations.
    """
    pays = target.rewrites
    if pays.contractions:
        program = rewritten(with_fast_bodies, program)
    if pays.channels_last:
        program = rewritten(with_channels_last, program)
    if pays.picks:
        program = rewritten(functools.partial(with_picks, most=pays.picks), program, "with_picks")
    if pays.starts and not memory_first:
        start = int(target.rates.overhead * target.rates.bandwidth)
        ahead = None if program.directives.loops is not None else target.room.draws  # fused steps draw in their kernel
        program = replace(program, directives=replace(program.directives, start=start, ahead=ahead))
    return program
