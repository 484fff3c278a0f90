"""The cost model: how long a gradient takes under a plan, from operations, bytes, and what a target does in a second."""

from __future__ import annotations

from dataclasses import dataclass

from rlfx._target import Target
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_in_all, bytes_of, flops_of, points, show_bytes, starts_of
from rlfx.recurrence.gradient.replay import Replay, find_replay
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.schedule.learner import Learner, activation_bytes
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import Loop, Schedule

#: Backward, a product has one product for each operand, and every other operation about one for itself.
_BACKWARD = 2.0


@dataclass(frozen=True)
class Cost:
    """What one evaluation of a loss and its gradient costs.

    Attributes:
      flops: of products, in acting and learning.
      elements: other operations.
      moved: bytes to and from memory.
      started: operations that are started.
    """

    flops: float
    elements: float
    moved: float
    started: float

    def seconds(self, target: Target) -> float:
        """About how long it takes."""
        rates = target.rates
        busy = self.flops / rates.flops + self.elements / rates.elements
        return busy + self.moved / rates.bandwidth + self.started * rates.overhead

    def show(self, target: Target) -> str:
        """As text, for a target."""
        seconds = self.seconds(target)
        return (
            f"{self.flops / 1e9:.3g} GFLOP in products, {self.elements / 1e6:.3g} M other operations, "
            f"{show_bytes(self.moved)} moved: about {1e3 * seconds:.3g} ms on this {target.name}"
        )


def predict(learner: Learner, plan: Plan, batch: int, target: Target) -> Cost:
    """The cost of a loss and its gradient under a plan, on a device that has ``batch`` environments.

    Acting writes what it stores, and the learner reads it; activations of a tile that does not fit the cache go to memory
    and back; each tile adds to the gradient of every parameter. Replaying acts again, but for what it keeps.
    """
    learner, program = learner.under(plan), learner.program
    length = program.domain.length
    acting = _acting(learner, plan)
    forward = [_work(schedule, batch) for schedule in acting]
    region = _work(learner.region, batch)
    block, environments = plan.block or length, plan.environments or batch
    again = -(-batch // environments)  # loops over time run for each tile of environments
    tiles = -(-length // block) * again
    activations = activation_bytes(learner, batch) * length
    tile = activations * (block / length) * (environments / batch)
    spilled = activations * (1.0 + _BACKWARD) if tile > target.room.cache else 0.0
    learning = _BACKWARD + (0.0 if plan.form == "one pass" else 1.0)  # which runs the region forward no second time
    held = block if plan.form in ("stream", "replay") else length
    domain = program.domain
    whole = sum(bytes_in_all(v, program, batch) for v in learner.stored)
    stored = activations if plan.form == "one pass" else whole * held / length
    parameters = sum(bytes_of(v, program.domain) for v in program.params)
    return Cost(
        flops=sum(flops for flops, _ in forward) + learning * region[0],
        elements=sum(elements for _, elements in forward) + learning * region[1],
        moved=2.0 * stored + spilled + 3.0 * parameters * tiles,
        started=sum(_started(schedule, domain, 1, 1) for schedule in acting)
        + learning * _started(learner.region, domain, tiles, again),
    )


def _acting(learner: Learner, plan: Plan) -> tuple[Schedule, ...]:
    """What acts: the acting pass, and what a plan acts again."""
    replay = find_replay(learner) if plan.form == "replay" else None
    return (replay.acting, replay.again) if isinstance(replay, Replay) else (learner.acting,)


def _work(schedule: Schedule, batch: int) -> tuple[float, float]:
    """``(operations of products, other operations)`` of a schedule."""
    program = schedule.graph.program
    flops = elements = 0.0
    for e in schedule.equations:
        if not e.outputs:
            continue
        work = flops_of(e, program.domain) * points(program.dims_of(e.outputs[0]), program.domain, batch)
        flops, elements = (flops + work, elements) if e.op in PRODUCTS else (flops, elements + work)
    return flops, elements


def _started(schedule: Schedule, domain: Domain, tiles: int, again: int) -> float:
    """How many operations are started: those of a loop at every timestep, ``again`` for each tile of environments."""
    return sum(
        (domain.length * again if isinstance(s, Loop) else tiles) * starts_of(e.op, e.params, domain)
        for s in schedule.stages
        for e in s.equations
    )
