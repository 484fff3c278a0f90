"""Which plan: what is legal for a learner, and which of it costs least on a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlfx._target import Target
from rlfx.errors import ScheduleError, located
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_of, multiplies, starts_of
from rlfx.recurrence.analysis.divisors import divisor_near, divisor_up_to
from rlfx.recurrence.analysis.storage import work_of
from rlfx.recurrence.execute.host import JAXLIB, hosted, refuse
from rlfx.recurrence.gradient.following import reads_of_next
from rlfx.recurrence.gradient.stream import Stream, find_stream
from rlfx.recurrence.gradient.table import FORMS
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.plan.rows import ROWS, ROWS_OF_LAYERS, rows_of, rows_of_layers, rows_of_nested
from rlfx.recurrence.schedule.bands import is_window
from rlfx.recurrence.schedule.learner import Learner, activation_bytes, temporaries
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.tiling import ROWS_OF_BLOCK
from rlfx.recurrence.schedule.truncated import truncated

#: Rows of a product in a loop, at least: of fewer it reads the weights for nothing else.
ROWS_OF_LOOP = 4

#: In how many blocks, at least, values are fetched from the host.
HOST_BLOCKS = 8

#: How much of the rollout a stream holds at a time where blocks could store it.
OF_ROLLOUT = 1 / 8

#: Timesteps of a recurrence in a block, if it is not one: every block starts loops, forward and backward.
LOOPED = 8

#: Timesteps in a block whose last one reads the next: that is computed in both blocks.
FOLLOWED = 16

#: The part of a learner's work that all blocks together may compute again: what no timestep changes, each of them does.
AGAIN = 1 / 8

#: Operations that an iteration of a loop starts which multiplies nothing: XLA:CPU compiles it as one function, 10 to 30 ns each.
ALONE = 1 / 32

#: The part of a learner's work in loops over time from which on these decide how long a block is.
OF_WORK = 1 / 4

#: The part of a learner's work in loops over time from which on these run forward once, though blocks keep less.
MOSTLY = 2 / 5

#: How many times the memory that calls have again one pass may keep, and how many times as many bytes of weights it spares then:
#: what the system maps anew is moved as if it were so many times as much.
MANY, PAGED = 4, 2

#: The part of the work in a learner's loops that acting may differentiate beside it in its own: what is chosen at the ends,
#: an actor in a model (0.36 of it: 0.81 of the time; predictions of what comes, 0.49: 1.08).
BESIDE = 3 / 8

#: How much of the temporaries that are counted exists at a time in one pass, and of all timesteps at once: XLA took 0.35 to 0.73
#: of them (14 programs).
AT_A_TIME = 3 / 4


def why_not(form: str, learner: Learner) -> str | None:
    """Why a learner has no plan of a form; None if it has."""
    return FORMS[form].why_not(learner)


def why_not_environments(learner: Learner, order: Sequence[Var]) -> str | None:
    """Why a learner cannot take some of the environments at a time; None if it can."""
    program = learner.program
    if program.domain.batch is None:
        return "there is no batch"
    if any("b" in program.dims_of(v) for v in order):
        return "the gradient with respect to the carry is asked for"
    shared = {v for v, is_shared in zip(program.next_carry, program.shared, strict=True) if is_shared}
    if program.domain.until and shared & set(learner.targets):
        return "the gradient flows through a last carry that environments share, which the last of all leaves"
    coupled = learner.coupled
    return None if coupled is None else f"{coupled.op.name} needs all environments ({coupled.where})"


def checked(plan: Plan, learner: Learner, order: Sequence[Var], batch: int, target: Target) -> Plan:
    """A plan that was asked for. Of one timestep every form is all timesteps at once: nothing flows from one to another.

    Raises:
      ScheduleError: if it is not legal for the program, with the reason.
    """
    program = learner.program
    if plan.offload is not None:
        refuse(target.platform, JAXLIB)
    alone = program.domain.length == 1
    reason = None if alone else why_not(plan.form, learner)
    if reason is None and plan.environments is not None:
        reason = why_not_environments(learner, order)
    fix = "Leave the plan to the compiler. Where a gradient is in the way, stop it (jax.lax.stop_gradient)."
    if plan.environments is not None and program.domain.batch is None:
        fix = "Leave environments= out, or give batch=."
    if reason is None:
        reason, fix = _misfit(plan, program.domain.length, batch)
    if reason is None:
        return replace(plan, form="at once", block=None) if alone else plan
    fact = f"{program.name} cannot run by the plan {plan.form!r}: {reason}."
    raise ScheduleError(located(fact, where=program.where, fix=fix))


def _misfit(plan: Plan, length: int, batch: int) -> tuple[str | None, str]:
    """Which size of a plan is not one of the program's, and which would be; (None, "") if they are."""
    if plan.environments is not None and batch % plan.environments:
        fact = f"{plan.environments} environments at a time do not divide the {batch} that there are on a device"
        return fact, f"Give {divisor_up_to(batch, plan.environments)}, or another divisor of {batch}."
    if plan.block is not None and plan.block > length:
        return f"a block of {plan.block} timesteps is longer than T={length}", f"Give a block of at most {length}."
    return None, ""


def choose(
    learner: Learner,
    order: Sequence[Var],
    batch: int,
    target: Target,
    in_blocks: bool,
    copies: int = 1,
) -> Plan:
    """The plan that costs least: tiles that fit the cache, learned from while the rollout goes on where that is legal.

    Sizes that ``incrementalize`` asked for come first. A program without a loss is differentiated at once, from what it has
    stored when it was called: any other plan would act once more. ``in_blocks``: whether it may run in blocks of timesteps
    (``why_not``). ``copies``: how many of the program ``jax.vmap`` makes.
    """
    program = learner.program
    if program.loss is None:
        return Plan()
    asked, environments = program.directives.timesteps, program.directives.environments
    length = program.domain.length
    if not in_blocks and (asked or environments):
        return checked(Plan("blocks", length, environments), learner, order, batch, target)
    if not asked and environments is None and _once(learner, batch * copies, target, in_blocks):
        return Plan("one pass")
    if not in_blocks:
        return Plan(environments=resident_environments(learner, order, batch, target, copies))
    block = asked or cache_block(learner, environments or batch, target, length, copies)
    chunk = _streamed(learner, batch, block, target, copies)
    if chunk is not None:
        return checked(Plan("stream", chunk, environments), learner, order, batch, target)
    if hosted(learner, program.directives.offload):  # only a block of what is on the host is fetched at a time
        return Plan("blocks", min(block, max(1, length // HOST_BLOCKS)), environments)
    if block < length or environments is not None:
        return checked(Plan("blocks", block, environments), learner, order, batch, target)
    return Plan()


def _once(learner: Learner, batch: int, target: Target, in_blocks: bool) -> bool:
    """Whether a recurrence runs forward once, all its activations kept: where calls have that memory again.

    If nothing acts but what draws noise or adds up returns, blocks would run the recurrence twice: that takes longer than to
    write activations and to read them. What acts runs it forward once where two fifths of the work are in its loops (a policy
    with a memory, on a CPU: 0.78 to 0.96 of the time), or blocks of a timestep would move weights that no core's cache holds:
    each reads those of layers in no loop, and adds to their gradients. Where operations are slow to start, or there are no
    blocks, all timesteps at once would run it twice, too; if acting differentiates no more in its loops than the learner, or
    not much more where starting is fast, that is a loop more (R2D2 on an H200, compiled: 4,362 launches for 3,639; a policy
    through learnt dynamics, whose gradient flows through returns, on a CPU: 13.1 ms for 10.3; differentiable control: 12.3 for
    9.7). Not if a transform asks for loops of its own, which acting runs, or for data on the host, of which blocks are fetched.
    """
    asked = learner.program.directives
    if asked.loops is not None or asked.offload or not learner.region.loops:
        return False
    acting, learned = (frozenset(of.in_loops) for of in (learner.acting, learner.region))
    acted = {v for loop in learner.acting.loops if multiplies(loop.body) for v in _recurring(loop.body)}
    keeps_little = _keeps_little(learner, batch, target)
    if target.rewrites.starts or not in_blocks:
        work = lambda equations: sum(work_of(e, learner.program) for e in equations)  # noqa: E731
        more = (acting & learner.active) - learned
        worth = not more if target.rewrites.starts else keeps_little and work(more) <= BESIDE * work(learned)
    else:
        little = keeps_little and (
            _part_in_loops(learner) >= MOSTLY
            or _spares_weights(learner, batch, target)
            or any(truncated(learner.program, loop, learner.active) for loop in learner.region.loops)
        )
        little = little or (_keeps_little(learner, batch, target, MANY) and _spares_weights(learner, batch, target, PAGED))
        runs_twice = acted.isdisjoint({*learner.stored, *learner.beyond})
        worth = little or (runs_twice and _roomy(Plan("one pass"), learner, batch, target, AT_A_TIME))
    return worth and why_not("one pass", learner) is None


def kept_of(learner: Learner, batch: int) -> int:
    """Bytes that one pass keeps of a timestep: half of what is computed, of loops a third. The rest is fused, or made again."""
    domain = learner.program.domain
    inside = sum(bytes_of(v, domain) * batch for e in learner.region.in_loops for v in e.outputs)
    computed = activation_bytes(learner, batch)
    return max(0, computed - inside) // 2 + min(inside, computed) // 3


def _keeps_little(learner: Learner, batch: int, target: Target, times: int = 1) -> bool:
    """Whether what one pass keeps is memory that calls have again; or not more than some ``times`` of that."""
    room = target.room.unmapped
    return room is not None and kept_of(learner, batch) * learner.program.domain.length <= times * room


def _spares_weights(learner: Learner, batch: int, target: Target, times: int = 1) -> bool:
    """Whether blocks of one timestep move more bytes of weights and gradients through a slower cache than one pass keeps.

    ``times``: so many times what it keeps.
    """
    room, kept = target.room, times * kept_of(learner, batch)
    if room.tile is None:
        return False
    inside = frozenset(learner.region.in_loops)
    outside = _moved(learner, lambda e: e not in inside)
    return _moved(learner) > room.tile and outside > 2 * kept


def _moved(learner: Learner, among: Callable[[Equation], bool] = lambda e: True) -> int:
    """Bytes of the weights that products read, and of their gradients: what every block reads, and adds to."""
    program = learner.program
    params, products = {*program.params}, (e for e in learner.active if e.op in PRODUCTS and among(e))
    read = {v for e in products for v in e.inputs if isinstance(v, Var) and v in params}
    return 2 * sum(bytes_of(v, program.domain) for v in read)


def _recurring(body: Sequence[Equation]) -> set[Var]:
    """What a loop computes of other timesteps' values."""
    found: set[Var] = set()
    for e in body:
        if e.is_read or not found.isdisjoint(v for v in e.inputs if isinstance(v, Var)):
            found.update(e.outputs)
    return found


def _roomy(plan: Plan, learner: Learner, batch: int, target: Target, part: float = 1.0) -> bool:
    """Whether the temporaries of a plan, that ``part`` of them which exists at a time, are within what calls have again."""
    room = target.room.unmapped
    return room is not None and part * temporaries(plan, learner, batch) <= room


def _streamed(learner: Learner, batch: int, block: int, target: Target, copies: int) -> int | None:
    """Timesteps at a time of a stream, which stores nothing for all of them; None if a ``block`` of what is stored is better.

    What waits to be learned from is copied from chunk to chunk. Where that is much of the rollout, and what blocks store is
    memory that calls have again, blocks are faster by a tenth and more.
    """
    program, length = learner.program, learner.program.domain.length
    asked, environments = program.directives.timesteps, program.directives.environments
    stream = find_stream(learner) if why_not("stream", learner) is None else None
    if not isinstance(stream, Stream) or block >= length:
        return None
    room = length - stream.delay
    chunk = asked or _chunk(stream, learner, cache_block(learner, environments or batch, target, room, copies))
    held = (2 * stream.delay + chunk) / length
    stores = (
        not asked and held > OF_ROLLOUT and _roomy(Plan("blocks", block, environments), learner, batch * copies, target)
    )
    return None if chunk >= room or stores else chunk


def _chunk(stream: Stream, learner: Learner, fitting: int) -> int:
    """Timesteps that a stream acts, and learns from, at a time: those that fit the cache, or as many as make up for its buffers.

    Every chunk, however short, copies the values of all delayed timesteps twice: what was acted goes behind them, what was
    learned from leaves. It computes no less than that.
    """
    domain = learner.program.domain
    copied = 2 * stream.delay * sum(bytes_of(v, domain) for v in stream.buffered)
    fewest = -(-copied // max(1, activation_bytes(learner, 1)))
    return fitting if fewest <= fitting else divisor_near(domain.length - stream.delay, fewest)


def resident_environments(
    learner: Learner, order: Sequence[Var], batch: int, target: Target, copies: int = 1
) -> int | None:
    """Environments at a time of a learner that reads other timesteps; None: all of them.

    Windows of other timesteps are many times as large as what they read. If the activations of all environments and their
    cotangents are more than the memory that calls have again, as many are taken at a time as the machine's cache holds.
    Slices of the past, or the future, are as wide as T: of all environments, what is computed of them (scores, weights) goes to
    memory, or runs in blocks of timesteps that make a product for each environment; of two or more it is near.
    Recurrences run once for each tile, and have its rows: as long as they start in less time than activations take to memory.
    """
    domain, equations = learner.program.domain, learner.region.equations
    windows = [is_window(e, domain) for e in equations if e.is_ragged and e.is_read]
    wide, room = not all(windows), target.room
    each = activation_bytes(learner, 1, slices=wide) * domain.length * copies
    if room.tile is None or room.unmapped is None or (1 if wide else 2) * each * batch <= room.unmapped:
        return None
    if why_not_environments(learner, order) is not None:
        return None
    # One at a time may be slower than all: 5x for a sum over 16 timesteps. Blocks of windows have rows enough.
    fewest = 1 if windows and domain.length >= ROWS and not wide else 2
    count = divisor_up_to(batch, max(fewest, int(room.cache // each)))
    if learner.region.loops:
        fewest, again = ROWS_OF_LOOP, 3 * seconds_of_loops(learner, target) * (batch / count - 1)
        if again > 3 * each * batch / target.rates.bandwidth:
            return None
    return count if fewest <= count < batch else None


def seconds_of_loops(learner: Learner, target: Target) -> float:
    """About how long the loops over time of a region take to start their operations."""
    domain, loops = learner.program.domain, learner.region.loops
    starts = (
        sum(starts_of(e.op, e.params, domain) for e in loop.body) if multiplies(loop.body) else ALONE for loop in loops
    )
    return target.rates.overhead * domain.length * sum(starts)


def cache_block(learner: Learner, batch: int, target: Target, length: int, copies: int = 1) -> int:
    """Timesteps in a block: the divisor of ``length`` whose activations come closest to a core's own cache.

    Every block reads all weights, and adds to their gradients: it has rows enough to make up for that, as far as half of the
    machine's cache allows; of the memory that calls have again, if no core's cache holds the weights. So have copies of the
    program, each of which has weights of its own. A recurrence reads them at every timestep anyway, but starts its loops in
    every block: none of one timestep, which has no loops, or ``LOOPED``.
    Where most of the work is no part of it (imagination from every state), its rows are those that count. What no timestep
    changes (an encoder of the instance that all of them look at) is differentiated in every block: there are few then.
    """
    if target.room.tile is None:
        return length
    step = max(activation_bytes(learner, batch) * copies, 1)
    fitting = max(1, int(target.room.tile // step))
    kept = max(target.room.cache, target.room.unmapped or 0)  # memory that calls have again
    room = int(target.room.cache // (2 * step))
    if copies == 1 and _part_in_loops(learner) > OF_WORK:
        fitting = max(fitting, min(room, LOOPED)) if fitting > 1 else 1
    elif copies == 1:
        room = int(kept // (2 * step)) if _moved(learner) > target.room.tile else room
        again = FOLLOWED if reads_of_next(learner) else 1
        fitting = max(fitting, min(room, max(again, math.ceil(ROWS_OF_BLOCK / rows_of(learner, batch)))))
    else:
        fitting = max(fitting, min(int(target.room.cache // step), -(-ROWS // batch)))
    layers = ROWS_OF_LAYERS / rows_of_layers(learner, batch, target.room.tile) if copies == 1 else 0
    fewest = max(length / _most_blocks(learner), ROWS / rows_of_nested(learner, batch), layers)
    fitting = max(fitting, min(int(kept // step), math.ceil(fewest)))
    if fitting >= length:
        return length
    return divisor_near(length, fitting)


def _most_blocks(learner: Learner) -> float:
    """In how many blocks what no timestep changes may be computed, and differentiated."""
    program = learner.program
    work = {e: work_of(e, program) for e in learner.region.equations}
    fixed = sum(n for e, n in work.items() if e in learner.active and "t" not in program.dims_of(e.outputs[0]))
    return 1 + AGAIN * sum(work.values()) // fixed if fixed else math.inf


def _part_in_loops(learner: Learner) -> float:
    """Which part of the learner's work is in loops over time."""
    program, region = learner.program, learner.region
    work, inside = (sum(work_of(e, program) for e in of) for of in (region.equations, region.in_loops))
    return inside / work if work else 0.0
