"""Reads of the next timestep in blocks: a block's last timestep reads of the first one behind it, from what is stored of that.

An inverse model tells the action between the codes of t and t + 1, a residual gradient moves the value of t + 1, too. All that is
between what acting stores and such a read is of one timestep, so a block computes it for its own and for one more. The
gradient of that one's share in this block is added here; what it has in the loss of its own is the next block's.
(A halo of one timestep, as stencils have.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.errors import BoundaryError
from rlfx.recurrence.execute.host import fetched_times
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.ir.access import is_shift
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.primitives import inputs_p
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.schedule import Parallel


def reads_of_next(learner: Learner) -> tuple[Equation, ...]:
    """The reads of the next timestep through which a gradient flows."""
    return tuple(filter(_reads_next, learner.region.equations))


def timesteps_together(learner: Learner, but: Callable[[Equation], bool] = lambda e: False) -> str | None:
    """Why timesteps have no gradients of their own, in any order: reads of others, all ``but`` some; None if they have."""
    equations = [e for s in learner.region.stages if isinstance(s, Parallel) for e in s.equations]
    reader = next((e for e in equations if not e.is_simultaneous and not but(e)), None)
    if reader is not None or learner.region.loops:
        at = "" if reader is None else f" ({reader.where})"
        if reader is not None and reader.op is inputs_p:
            return f"the gradient with respect to data is asked for{at}"
        return f"the gradient flows through reads of other timesteps{at}"
    return None


def find_following(learner: Learner) -> frozenset[Var] | str:
    """What blocks need of the timestep behind them, of what is stored. Or why there are no such blocks."""
    program, reads = learner.program, reads_of_next(learner)
    if reads and program.domain.until:
        return f"x[t + 1] is read, where environments end at other timesteps ({reads[0].where})"
    reason = timesteps_together(learner, but=_reads_next)
    if reason is not None:
        return reason
    found: set[Var] = set()
    for e in reads:
        if "t" not in program.dims_of(e.source):
            continue
        try:
            extension = learner.region.graph.extension(e.source, e)
        except BoundaryError:
            return f"x[t + 1] is of what reads other timesteps, too ({e.where})"
        if extension.last:
            return f"x[t + 1] is of what reads other timesteps, too ({e.where})"
        found |= extension.beyond
    return frozenset(found)


def _reads_next(e: Equation) -> bool:
    return e.is_read and is_shift(e.access) == 1


def behind(
    stored: Mapping[Var, Value], needed: frozenset[Var], beyond: Mapping[Var, Value], on_host: frozenset[Var], at: Any
) -> dict[Var, Value]:
    """What is stored of timestep ``at``, one past a block; at T what ``beyond`` has, or what nobody reads."""
    found = dict(beyond)
    for v in needed:
        x = stored[v]
        last = x.data.shape[0] - 1
        i = jnp.minimum(at, last)
        data = fetched_times(x, i, 1)[0] if v in on_host else jax.lax.dynamic_index_in_dim(x.data, i, keepdims=False)
        if v in beyond:
            data = jnp.where(at > last, beyond[v].data, data)
        found[v] = replace(x, data=data, dims=x.dims - {"t"})
    return found
