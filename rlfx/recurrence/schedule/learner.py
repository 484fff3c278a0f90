"""The learner: the differentiable region of a program, what is stored for it, and what it evaluates again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, is_float
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_in_all, bytes_of, bytes_of_residuals
from rlfx.recurrence.analysis.graph import Graph, cyclic
from rlfx.recurrence.analysis.storage import BYTES_PER_FLOP, minimum_cut, work_of
from rlfx.recurrence.ir.behind import extends
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import Lookup, Point, Window
from rlfx.recurrence.language.primitives import across_p, aside_p, inputs_p, reduce_p, whole_p
from rlfx.recurrence.rewrite.caching import is_wide
from rlfx.recurrence.schedule.fusion import bytes_given
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.positions import followed
from rlfx.recurrence.schedule.schedule import Schedule, schedule
from rlfx.recurrence.schedule.tiling import filled_windows


@dataclass(frozen=True, eq=False)
class Learner:
    """How a gradient is computed: an acting pass that stores, and a region that is differentiated.

    Attributes:
      targets: what is differentiated.
      perturbed: the inputs with respect to which it is.
      active: the equations on a differentiable path.
      stored: values that the acting pass keeps for the region.
      beyond: values at t = T that it keeps.
      acting, region: their schedules; that of the region is for blocks of timesteps, whose values stay in the cache.
      outputs: what the acting pass must return anyway.
    """

    program: Program
    targets: tuple[Var, ...]
    perturbed: frozenset[Var]
    active: frozenset[Equation]
    stored: tuple[Var, ...]
    beyond: tuple[Var, ...]
    acting: Schedule
    region: Schedule
    outputs: Graph

    @cached_property
    def whole(self) -> Learner:
        """This one, or one for all timesteps at once alone, whose region evaluates products that both do otherwise.

        A block needs what other timesteps are worth (advantages) before it begins, so that acting evaluates the critic, and the
        learner again. All at once, the loss and the stopped value are of one evaluation.
        """
        if self.products <= frozenset(self.outputs.equations):  # acting returns what they make: none can be spared
            return self
        found = _cut(self.program, self.perturbed, self.active, self.targets, self.outputs, whole=True)
        return found if found.products < self.products else self

    def under(self, plan: Plan) -> Learner:
        """The cut that a plan runs: the ``whole`` one if it takes all timesteps, and as many environments as that one needs."""
        if plan.form != "at once" or self.program.directives.offload:
            return self
        return self if plan.environments is not None and self.whole.coupled is not None else self.whole

    @property
    def coupled(self) -> Equation | None:
        """What in the region needs all environments; None if some can be learned from at a time."""
        return next((e for e in self.region.equations if _couples(e)), None)

    @cached_property
    def twice(self) -> frozenset[Equation]:
        """The wide products with a derivative that acting evaluates, and the learner again; or the learner twice, in a loop."""
        evaluated = {*self.acting.equations, *self.region.in_loops}
        return frozenset(e for e in self.active if e in evaluated and is_wide(e, self.program))

    @cached_property
    def products(self) -> frozenset[Equation]:
        """The products that acting evaluates."""
        return frozenset(e for e in self.acting.equations if e.op in PRODUCTS)

    @cached_property
    def at_once(self) -> Schedule:
        """The schedule of the region for all timesteps at once."""
        return schedule(self.region.graph, differentiated=self.active, perturbed=self.perturbed)

    def region_of(self, steps: int | None, batch: int) -> Schedule:
        """The schedule of the region for some timesteps (None: all) and environments at a time."""
        asked, domain = self.program.directives.inside, self.program.domain
        if asked is None or not self.region.loops:
            return self.region
        part = (steps or domain.length) / domain.length
        if part * bytes_given(self.program, batch) <= asked.room:
            return self.region
        spared = sum(loop.spared for loop in self.at_once.loops) * batch / asked.batch
        return self.at_once if part * spared > asked.room else self.region

    @property
    def active_carry(self) -> tuple[Equation, ...]:
        """The recurrences through which the gradient flows backwards in time."""
        carried = set(self.program.next_carry)
        return tuple(e for e in self.active if e.is_read and e.source in carried)


def _couples(equation: Equation) -> bool:
    over_batch = equation.op is reduce_p and "b" in equation.params["over"]
    looks = equation.is_read and isinstance(equation.access, Lookup) and equation.access.across_batch
    return over_batch or looks or equation.op in (whole_p, across_p)


_FIXED = frozenset({reduce_p, whole_p, across_p, inputs_p})


def plan_learner(program: Program, perturbed: frozenset[Var], targets: tuple[Var, ...], outputs: Graph) -> Learner:
    """Cut the learner out of a program.

    Args:
      perturbed: inputs with respect to which derivatives are taken.
      targets: differentiated outputs: of the loss and aux at every point, of next carries at the last.
      outputs: the graph of what the acting pass must return anyway.
    """
    return _cut(program, perturbed, active_equations(program, perturbed, targets), targets, outputs)


def _cut(
    program: Program,
    perturbed: frozenset[Var],
    active: frozenset[Equation],
    targets: tuple[Var, ...],
    outputs: Graph,
    *,
    whole: bool = False,
) -> Learner:
    """The learner; ``whole``: one whose region may read other timesteps, and does what no output of acting needs."""
    last = frozenset(v for v in targets if v in set(program.next_carry))
    graph = Graph(program, frozenset(targets) - last, last)
    recurrent = cyclic(graph.nx)
    widened = _widened(graph.equations, program.domain)
    data = {v for e in program.equations if e.op is inputs_p for v in e.outputs}
    returned = set(outputs.equations)
    # If acting evaluates them, for what it stores: the learner does anyway.
    twice = (set(graph.equations) if whole else active) - returned

    def fixed(e: Equation) -> bool:
        around = e in recurrent and e not in widened
        if whole:
            of_all = e.op is aside_p and not program.dims_of(e.outputs[0])  # a sum over all points: a tile has its own alone
            return (around and e in returned) or e.op is inputs_p or of_all or e.has_effects
        return e.op in _FIXED or around or e.has_effects or (e.is_read and isinstance(e.access, (Point, Window)))

    cut = minimum_cut(
        program,
        graph.equations,
        targets,
        fixed=fixed,
        free=active.__contains__,
        kept=lambda v: v in data or "t" not in program.dims_of(v),
        follows=lambda e: whole,
        stays=lambda e: work_of(e, program) * BYTES_PER_FLOP if e in twice else 0.0,
    )
    given = set(cut.stored) | ({program.alive} if program.alive is not None else set())
    region = Graph(program, frozenset(targets) - last, last, given=frozenset(given))
    beyond = _beyond(region)
    if program.ends is not None:
        beyond |= {program.ends}
    wanted, all_beyond = outputs.wanted | given, outputs.wanted_beyond | beyond
    acting = Graph(program, wanted, outputs.wanted_last, all_beyond, roots=outputs.roots)
    order = {v: i for i, v in enumerate(v for e in program.equations for v in e.outputs)}
    return Learner(
        program,
        targets,
        perturbed,
        active,
        tuple(sorted(given, key=lambda v: order.get(v, -1))),
        tuple(sorted(beyond, key=lambda v: order.get(v, -1))),
        schedule(acting),
        schedule(region, differentiated=active, perturbed=perturbed, fuses=False),
        outputs,
    )


def _widened(equations: Iterable[Equation], domain: Domain) -> frozenset[Equation]:
    """What is a function of one value that has fewer bytes: the learner can make it from that one, also where it is part of a
    circle (an image that decides the action, which decides the next image, is pixels first)."""
    found: set[Equation] = set()
    wider: set[Var] = set()
    for e in equations:
        operands = [u for u in e.inputs if isinstance(u, Var)]
        if len(operands) == 1 and e.is_pointwise and not e.has_effects:
            (given,) = operands
            if given in wider or any(bytes_of(v, domain) > bytes_of(given, domain) for v in e.outputs):
                found.add(e)
                wider.update(e.outputs)
    return frozenset(found)


def _beyond(region: Graph) -> frozenset[Var]:
    found: set[Var] = set()
    for e in region.equations:
        if extends(e, region.program.domain):
            found |= region.extension(e.source, e).beyond
    return frozenset(found)


def activation_bytes(learner: Learner, batch: int, *, slices: bool = True) -> int:
    """Bytes of all values that one timestep of the region computes, in loops of the user's, too.

    But for windows, and what has their axis: where they are large they exist for a few timesteps at a time (``tiling.py``).
    Without ``slices``, of those of fixed shape.
    """
    program, domain = learner.program, learner.program.domain
    windows = followed(program, filled_windows(program, learner.active))

    def rows(v: Var) -> int:
        return batch if "b" in program.dims_of(v) else 1

    values = sum(
        bytes_of(v, domain) * rows(v)
        for e in learner.region.equations
        for v in e.outputs
        if is_float(v) and "t" in program.dims_of(v) and v not in windows and (slices or not J.symbolic_axes(v.shape))
    )
    loops = (e for e in learner.region.equations if e in learner.active and "t" in program.dims_of(e.outputs[0]))
    return values + sum(bytes_of_residuals(e, domain) * rows(e.outputs[0]) for e in loops)


def temporaries(plan: Plan, learner: Learner, batch: int, kept: Iterable[Var] = ()) -> float:
    """About how many bytes a plan takes: what is stored, with values that are ``kept``, too, and the activations of a tile."""
    program, domain = learner.program, learner.program.domain
    length, environments = plan.block or domain.length, plan.environments or batch
    stored = sum(bytes_in_all(v, program, batch) for v in {*learner.stored, *kept})
    held = length / domain.length if plan.form == "stream" else 1.0
    return stored * held + activation_bytes(learner, environments) * length
