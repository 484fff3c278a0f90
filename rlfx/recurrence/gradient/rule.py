"""The gradient rule: a program as a function of its flat inputs, with its derivative by the plan that it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx._tracing import traces
from rlfx.recurrence.analysis.active import carried_equations, is_float
from rlfx.recurrence.analysis.check import whole_graph
from rlfx.recurrence.analysis.cost import multiplies_weights
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.cpu.contractions import by_matrices
from rlfx.recurrence.execute.executor import Execution, execute
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.held import hold
from rlfx.recurrence.execute.host import hosted, hosting_of
from rlfx.recurrence.execute.outputs import (
    Objective,
    as_cotangent,
    is_zero,
    loss_of,
    outputs_of,
    returned,
    scaled,
    sum_by_var,
    target_of,
)
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.gradient.called import Call, Static, called
from rlfx.recurrence.gradient.forms import Pass, acting_plan, learning_plan
from rlfx.recurrence.gradient.mesh import Sharding, Split
from rlfx.recurrence.gradient.replanned import Added, Turns, planned, typed
from rlfx.recurrence.gradient.table import FORMS
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.ir.verify import rewritten
from rlfx.recurrence.language.domain import depth
from rlfx.recurrence.language.precision import narrowed
from rlfx.recurrence.rewrite.caching import with_caching
from rlfx.recurrence.schedule.learner import Learner, plan_learner, temporaries
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import Schedule, schedule

_BODY = "body"

#: A loop over t that multiplies weights with fewer rows serves all copies under ``jax.vmap``.
_ROWS = 32


class Planner(Protocol):
    """How the plan of a gradient is found."""

    def replans(self, rule: GradientRule, learner: Learner) -> bool:
        """Whether ``jax.vmap`` around the program may ask for another plan."""
        ...

    def is_free(self, learner: Learner) -> bool:
        """Whether nobody asks for a plan, or for less memory."""
        ...

    def __call__(
        self, rule: GradientRule, learner: Learner, order: Sequence[Var], batch: int, axes: tuple[Added, ...] = ()
    ) -> Plan: ...


@dataclass(frozen=True)
class Fixed:
    """A planner that knows the plan."""

    plan: Plan

    def replans(self, *_: Any) -> bool:
        return False

    def is_free(self, *_: Any) -> bool:
        return False

    def __call__(self, *_: Any) -> Plan:
        return self.plan


@dataclass(eq=False)
class GradientRule:
    """A program as a function of its flat inputs.

    Attributes:
      planner: which plan the gradient of its loss runs by.
      target: the machine that it runs on.
      begins: whether ``t0`` is 0 in all calls: it is traced anyway.
    """

    program: Program
    planner: Planner
    target: Target
    sharding: Sharding | None = None
    begins: bool = False
    _known: dict = field(default_factory=dict)

    def __post_init__(self):
        self.split = Split(self.program, self.sharding)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` makes, made once for this program."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # -- schedules

    @property
    def forward(self) -> Schedule:
        """The schedule of a call without gradient."""
        return self.once("forward", lambda: schedule(self._outputs(loss=True)))

    def learner(self, perturbed: frozenset[Var], targets: Sequence[Var] | None = None) -> Learner:
        """The schedules of a gradient with respect to ``perturbed``: of some outputs; by default of the loss, or else of all."""
        program = self.program
        if targets is None:
            targets = [v for v in self.differentiable if program.loss in (None, v)]
        chosen = tuple(targets)
        return self.once(
            (perturbed, chosen), lambda: plan_learner(program, perturbed, chosen, self._outputs(loss=False))
        )

    @property
    def differentiable(self) -> tuple[Var, ...]:
        """The outputs that can have a cotangent."""
        return tuple(dict.fromkeys(v for v in outputs_of(self.program) if isinstance(v, Var) and is_float(v)))

    def _outputs(self, *, loss: bool) -> Graph:
        graph = whole_graph(self.program)
        program = self.program
        wanted, last = set(graph.wanted), set(graph.wanted_last)
        if not loss:
            wanted = {v for v in program.aux if isinstance(v, Var)}
        if program.ends is not None:
            wanted.add(program.alive)
            last.add(program.definitions()[program.ends].source)
        return Graph(program, frozenset(wanted), frozenset(last), roots=graph.roots)

    def plan(self, learner: Learner, order: Sequence[Var], axes: tuple[Added, ...] = ()) -> Plan:
        """The plan of a gradient; ``axes``: those that ``jax.vmap`` adds around it."""
        return self.planner(self, learner, order, self.split.batch, axes)

    def caching(self, plan: Plan, learner: Learner) -> GradientRule:
        """This program with the wide products that a learner evaluates twice kept, under the rest of the plan."""
        fixed, wide = Fixed(replace(plan, cached=False)), learner.twice

        def make() -> GradientRule:
            program = rewritten(functools.partial(with_caching, wide=wide), self.program, "with_caching")
            return GradientRule(program, fixed, self.target, self.sharding, self.begins)

        return self.once(("caching", plan, wide), make)

    def under(self, plan: Plan) -> GradientRule:
        """This program under a plan, with what does not depend on the plan."""
        return self.once(("under", plan), lambda: self._under(plan, self.target))

    @property
    def begun(self) -> GradientRule:
        """This program in calls with ``t0 = 0``."""
        known = {k: x for k, x in self._known.items() if isinstance(x, Schedule | Learner)}
        return self.once("begun", lambda: replace(self, begins=True, _known=known))

    @property
    def moved(self) -> GradientRule:
        """This program where its gradient is differentiated: all timesteps at once, by products of matrices."""
        pays = self.target.rewrites
        target = replace(self.target, rewrites=replace(pays, contractions=False, matrices=pays.contractions))
        return self.once("moved", lambda: self._under(Plan(), target))

    def _under(self, plan: Plan, target: Target) -> GradientRule:
        known = {k: x for k, x in self._known.items() if isinstance(x, Schedule | Learner)}
        return GradientRule(self.program, Fixed(plan), target, self.sharding, self.begins, known)

    def _run(self, schedule: Schedule, env: dict[Var, Value], t0: Any, extent: Extent) -> Execution:
        """An acting pass."""
        return execute(acting_plan(schedule, self.target, extent.batch), env, t0, extent=extent)

    # -- evaluation

    @traces
    def __call__(self, flat: Sequence[Any], t0: Any) -> tuple:
        """``(loss or None, carry leaves, aux leaves, lengths or None)`` from the program's flat inputs."""

        axes = J.varying_axes([*flat, t0])  # inside a jax.shard_map of the user's

        def forward(flat, t0):
            return self.split.over_devices(self._forward, self._input_specs, self.split.output_specs())(flat, t0)

        forward = J.unchecked(forward, axes)

        def differentiable() -> Callable:
            call = jax.custom_vjp(forward)
            rules = (J.unchecked(rule, axes) for rule in (self._forward_rule, self._backward_rule))
            call.defvjp(*rules, symbolic_zeros=True)
            return call

        return called(self, forward, differentiable, *J.varying((list(flat), t0), axes))

    def _forward(self, flat: Sequence, t0: Any) -> tuple:
        extent = self.split.extent()
        run = self._run(self.forward, self._env(flat, extent), t0, extent)
        return loss_of(run), *returned(run)

    # -- gradients

    @traces
    def _forward_rule(self, flat, t0):
        values, t0 = [p.value for p in flat], t0.value
        perturbed = frozenset(v for v, p in zip(self.flat_inputs, flat, strict=True) if p.perturbed and is_float(v))
        marks = tuple(Static(v in perturbed) for v in self.flat_inputs)
        outputs = self.split.output_specs()
        if self.program.loss is not None:
            # The gradient of the loss is computed in the same pass as its value, and scaled afterwards.
            specs = (outputs, self.split.input_specs(self._ordered(perturbed)))

            def evaluate(axes: tuple[Added, ...], rule: GradientRule = self) -> Callable:
                compute = functools.partial(rule._loss_and_gradient, perturbed, axes=axes)
                return rule.split.over_devices(compute, rule._input_specs, specs)

            # Traced once, also where jax.jit sees several calls: the forward rule runs for each of them.
            once = lambda types, body: self._body((_BODY, perturbed, types), body)  # noqa: E731
            found, grads = self._planned(self.learner(perturbed), perturbed, evaluate, values, t0, once=once)
            return found, (grads, (values, t0), marks)
        learner, order = self.learner(perturbed), self._ordered(perturbed)
        if self.sharding is not None or self.planner.replans(self, learner) or self.plan(learner, order) != Plan():
            found = self.split.over_devices(self._forward, self._input_specs, outputs)(values, t0)
            return found, (None, (values, t0), marks)
        differentiate = lambda _: functools.partial(self._differentiate, learner, perturbed)  # noqa: E731
        found, pullback = planned(differentiate, Call(self, "value and gradient", perturbed), values, t0)
        return found, (pullback, None, marks)

    @traces
    def _backward_rule(self, residuals, cotangents):
        kept, arguments, marks = residuals
        program = self.program
        perturbed = frozenset(v for v, m in zip(self.flat_inputs, marks, strict=True) if m.value)
        loss, carry, aux, _ = jax.tree.map(as_cotangent, cotangents)
        rest = [*carry, *aux]
        given = sum_by_var(program, [*(() if program.loss is None else (loss,)), *rest])
        targets = [v for v in self.differentiable if v in given]
        if not targets:
            grads = None
        elif program.loss is not None and all(map(is_zero, rest)):
            grads = [scaled(g, loss) for g in kept]
        elif arguments is None:
            shapes = dict(zip(outputs_of(program), (x.shape for x in rest), strict=True))
            every = self.learner(perturbed).targets
            cotangents = [given[v] if v in given else jnp.zeros(shapes[v], v.dtype) for v in every]
            pull = lambda _: lambda pullback, cotangents: pullback(cotangents)  # noqa: E731
            (grads,) = (
                planned(pull, Call(self, "pullback", perturbed), kept, cotangents) if depth() else kept(cotangents)
            )
        else:
            grads = self.pulled(perturbed, {v: given[v] for v in targets}, *arguments)
        order = self._ordered(perturbed)
        found = {} if grads is None else {v: narrowed(g, v.dtype) for v, g in zip(order, grads, strict=True)}
        return [found.get(v) for v in self.flat_inputs], None

    def pulled(self, perturbed: frozenset[Var], cotangents: dict[Var, Any], flat: Sequence, t0: Any) -> list:
        """Run again, and pull back the cotangents of some outputs, under the plan."""
        order, targets = self._ordered(perturbed), list(cotangents)

        def evaluate(axes: tuple[Added, ...], rule: GradientRule = self) -> Callable:
            def run(flat, t0, given):
                share = [rule.split.share(v, c) for v, c in zip(targets, given, strict=True)]
                return rule._gradient(perturbed, flat, t0, dict(zip(targets, share, strict=True)), axes)[2]

            specs = [rule.split.target_spec(v) for v in targets]
            return rule.split.over_devices(run, rule._input_specs, rule.split.input_specs(order), specs)

        learner = self.learner(perturbed, cotangents)  # type: ignore[arg-type]
        return self._planned(learner, perturbed, evaluate, flat, t0, list(cotangents.values()))

    def _planned(self, learner: Learner, perturbed: frozenset[Var], evaluate: Callable, *args: Any, **how: Any) -> Any:
        """What is evaluated under a plan, and by another one under ``jax.vmap`` if that may be better.

        One equation of what calls it: another program, or a function that is explained. Where that differentiates it once more
        (products with a Hessian), all timesteps are evaluated at once: what blocks leave to be computed again would be stored.
        Rows of all copies under ``jax.vmap`` are rows of one matrix there.
        """
        moved = functools.partial(evaluate, rule=self.moved) if self.planner.is_free(learner) else None
        how |= {"moved": moved, "together": lambda fn: by_matrices(fn, self.target), "turns": lambda: self._turns(learner)}
        return planned(evaluate, Call(self, "value and gradient", perturbed, learner.targets), *args, **how)

    def _turns(self, learner: Learner) -> Turns:
        """Copies under ``jax.vmap`` that are large for the cache are computed one after the other, by products of their own."""
        tile, turns, batch = self.target.room.tile, self.target.rewrites.turns, self.split.batch
        free = self.planner.is_free(learner) and self.sharding is None and J.has_one_device()
        if tile is None or not free or (each := temporaries(Plan(), learner, batch)) * turns < tile:
            return Turns()
        together = int(tile / each)
        loops = (*learner.acting.loops, *learner.region.loops)
        few = [loop.body for loop in loops if batch < _ROWS and multiplies_weights(loop.body, self.program)]
        through = any(multiplies_weights(carried_equations(body, self.program), self.program) for body in few)
        return Turns(None if few else together, None if through else together)

    def _body(self, key: Any, make: Callable[[], tuple]) -> tuple:
        """A jaxpr with the shapes of its results: kept if it belongs to no trace in progress."""
        if key in self._known:
            return self._known[key]
        made = make()
        return made if any(isinstance(c, J.Tracer) for c in made[0].consts) else self.once(key, lambda: made)

    def _loss_and_gradient(self, perturbed: frozenset[Var], flat: Sequence, t0: Any, axes: tuple[Added, ...] = ()):
        """``((loss, carry, aux, lengths), gradient of the loss)``; ``axes``: those that ``jax.vmap`` adds around it."""
        outputs, loss, grads = self._gradient(perturbed, flat, t0, None, axes)
        return (narrowed(loss, self.program.loss.dtype), *outputs), grads

    def _gradient(self, perturbed, flat: Sequence, t0: Any, cotangents: dict | None, axes: tuple[Added, ...]) -> tuple:
        """``(what a call returns, what is differentiated, its gradient)``: of the loss, or of the cotangents' outputs."""
        learner, extent = self.learner(perturbed, cotangents), self.split.extent()
        if not learner.targets:
            run = self._run(self.forward, self._env(flat, extent), t0, extent)
            zeros = [jnp.zeros_like(x) for v, x in zip(self.flat_inputs, flat, strict=True) if v in perturbed]
            return returned(run), loss_of(run), zeros
        order = self._ordered(perturbed)
        plan = self.plan(learner, order, axes)
        if cotangents is None and (known := self._looked_at(plan, perturbed, flat, t0)) is not None:
            (loss, *outputs), grads = known
            return tuple(outputs), loss, grads
        if plan.cached:
            other = self.caching(plan, learner)
            same = dict(zip(outputs_of(self.program), outputs_of(other.program), strict=True))
            given = None if cotangents is None else {same[v]: c for v, c in cotangents.items()}
            return other._gradient(perturbed, flat, t0, given, ())
        learner = learner.under(plan)
        on_host = hosted(learner, hosting_of(self.program, plan))
        objective = Objective(self.program, extent, cotangents)
        evaluation = Pass(learner, order, self._env(flat, extent), t0, extent, objective, self.target, on_host, self.begins)
        outputs, value, grads = FORMS[plan.form].evaluate(evaluation, plan)
        return outputs, *self.split.complete(order, grads, value)

    def _looked_at(self, plan: Plan, perturbed: frozenset[Var], flat: Sequence, t0: Any) -> tuple | None:
        """``((loss, carry, aux, lengths), gradient)`` under a plan whose jaxpr the planner made to know its bytes; else None."""
        other = self._known.get(("under", plan))
        if other is None or self.sharding is not None:
            return None
        # The planner knows shapes and dtypes, not which of them are weak.
        strong = [jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x for x in (*flat, t0)]
        leaves, types = typed((strong[:-1], strong[-1]))
        jaxpr, shapes = other._known.get((_BODY, perturbed, types), (None, None))
        if jaxpr is None:
            return None
        return jax.tree.unflatten(jax.tree.structure(shapes), J.evaluate_again(jaxpr, *leaves))

    def _differentiate(self, learner: Learner, perturbed: frozenset[Var], flat: Sequence, t0: Any) -> tuple:
        """Run the acting pass; return its results, and the pullback of all targets to the perturbed inputs."""
        extent = self.split.extent()
        env = self._env(flat, extent)
        acted = self._run(learner.acting, env, t0, extent)
        beyond = {v: acted.value_beyond(v) for v in learner.beyond}
        stored = dict(hold(learner.region.graph, {v: acted.env[v] for v in learner.stored}, extent))
        order = self._ordered(perturbed)

        def region(leaves: Sequence) -> list:
            own = env | stored | {v: Value(x, env[v].dims) for v, x in zip(order, leaves, strict=True)}
            scheduled = learner.region_of(None, extent.batch)
            plan = learning_plan(scheduled, self.target, batch=extent.batch, acting=learner.acting)
            run = execute(plan, own, t0, beyond, extent)
            return [target_of(run, v) for v in learner.targets]

        found, pullback = jax.vjp(region, [env[v].data for v in order])  # acting's loops do not run for what it has, too
        return (None, *returned(acted, dict(zip(learner.targets, found, strict=True)))), pullback

    # -- inputs

    @property
    def flat_inputs(self) -> tuple[Var, ...]:
        """The inputs in the order in which the arrays are given."""
        p = self.program
        return (*p.params, *p.consts, *p.carry, *(() if p.key is None else (p.key,)))

    @functools.cached_property
    def _input_specs(self) -> list:
        return self.split.input_specs(self.flat_inputs)

    def _ordered(self, perturbed: frozenset[Var]) -> list[Var]:
        return [v for v in self.flat_inputs if v in perturbed]

    def _env(self, flat: Sequence[Any], extent: Extent) -> dict[Var, Value]:
        program = self.program
        env = {v: Value(x, program.dims_of(v)) for v, x in zip(self.flat_inputs, flat, strict=True)}
        b = jnp.int32(0) if program.domain.batch is None else extent.environments()
        return env | {program.b: Value(b, program.dims_of(program.b))}
