"""A program as a function of its flat inputs: plans, gradients, the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from rlfx import _jaxpr as J
from rlfx.errors import ScheduleError, located
from rlfx.recurrence.across import environment_axes
from rlfx.recurrence.budget import fit, within
from rlfx.recurrence.caching import with_caching
from rlfx.recurrence.check import whole_graph
from rlfx.recurrence.choose import EVALUATION, checked, choose
from rlfx.recurrence.deferred import deferring
from rlfx.recurrence.extent import Extent
from rlfx.recurrence.gradients import Pass
from rlfx.recurrence.graph import Graph
from rlfx.recurrence.held import hold
from rlfx.recurrence.host import hosted, hosting_of
from rlfx.recurrence.learner import Learner, is_float, plan_learner
from rlfx.recurrence.loops import while_going
from rlfx.recurrence.lower import execute
from rlfx.recurrence.outputs import (
    aux_dims,
    carry_dims,
    is_zero,
    loss_of,
    loss_sum,
    returned,
    share_of_mean,
    sum_by_var,
    target_of,
)
from rlfx.recurrence.plan import Plan
from rlfx.recurrence.planned import Added, planned
from rlfx.recurrence.precision import narrowed, widened
from rlfx.recurrence.program import Program, Var
from rlfx.recurrence.schedule import Schedule, schedule
from rlfx.recurrence.trial import Trial
from rlfx.recurrence.tune import tune
from rlfx.recurrence.values import Value, axis_of

tree = jax.tree_util


@dataclass(frozen=True)
class Sharding:
    """Over which axis of a mesh the environments are split."""

    mesh: Mesh
    axis: str

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.axis]


@dataclass(eq=False)
class Lowered:
    """A program as a function of its flat inputs, with the plans that it was lowered by (computed when first needed)."""

    program: Program
    sharding: Sharding | None = None
    _plans: dict = field(default_factory=dict)

    def __post_init__(self):
        batch = self.program.domain.batch
        if self.sharding is not None and (batch is None or batch % self.sharding.devices):
            raise ScheduleError(
                located(
                    f"batch={batch} cannot be split over the {self.sharding.devices} devices of mesh axis "
                    f"{self.sharding.axis!r}.",
                    fix="Give a batch that the number of devices divides, or mesh_axis=None to shard outside.",
                )
            )

        on_mesh = () if self.sharding is None else self.program.equations
        nested = [e for e in on_mesh if J.contains(e.op, dict(e.params), J.SHARD_MAP)]
        if self.sharding is not None and nested:
            raise ScheduleError(
                located(
                    f"{self.program.name} is split over the mesh axis {self.sharding.axis!r}, and calls what is itself split "
                    "over a mesh: jax.shard_map, or a program with mesh=.",
                    where=nested[0].where,
                    fix="Give mesh= to one of them alone.",
                )
            )

    # -- plans

    @property
    def forward(self) -> Schedule:
        """The schedule of a call without gradient."""
        return self._plan("forward", lambda: schedule(self._outputs(loss=True)))

    def learner(self, perturbed: frozenset[Var], everything: bool) -> Learner:
        """The plan of a gradient with respect to ``perturbed``: of the loss alone, or of every output."""
        program = self.program
        loss = () if program.loss is None else (program.loss,)
        rest = (*program.aux, *program.next_carry)
        targets = tuple(
            dict.fromkeys(v for v in ((*loss, *rest) if everything else loss) if isinstance(v, Var) and is_float(v))
        )
        return self._plan(
            (perturbed, everything),
            lambda: plan_learner(program, perturbed, targets, self._outputs(loss=False)),
        )

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

    def _plan(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    @property
    def _acting(self) -> dict:
        """How the loops of the acting pass are run."""
        return {"iterate": while_going, "loops": self.program.directives.get("loops")}

    # -- evaluation

    def __call__(self, flat: Sequence[Any], t0: Any) -> tuple:
        """``(loss or None, carry leaves, aux leaves, lengths or None)`` from the program's flat inputs."""

        axes = J.varying_axes([*flat, t0])  # inside a jax.shard_map of the user's

        def forward(flat, t0):
            return self._on_mesh(self._forward, self._flat_specs(), self._output_specs())(flat, t0)

        call = jax.custom_vjp(J.unchecked(forward, axes))
        rules = (J.unchecked(rule, axes) for rule in (self._forward_rule, self._backward_rule))
        call.defvjp(*rules, symbolic_zeros=True)
        return call(*J.varying((list(flat), t0), axes))

    def _forward(self, flat: Sequence, t0: Any) -> tuple:
        extent = self._extent()
        run = execute(self.forward, self._env(flat, extent), t0, extent=extent, **self._acting)
        return loss_of(run), *returned(run)

    # -- gradients

    def _forward_rule(self, flat, t0):
        values, t0 = [p.value for p in flat], t0.value
        perturbed = frozenset(v for v, p in zip(self.flat_inputs, flat, strict=True) if p.perturbed and is_float(v))
        marks = tuple(_Static(v in perturbed) for v in self.flat_inputs)
        if self.program.loss is not None:
            # The gradient of the loss is computed in the same pass as its value, and scaled afterwards.
            specs = (self._output_specs(), self._gradient_specs(perturbed))

            def evaluate(axes: tuple[Added, ...]) -> Callable:
                return self._on_mesh(
                    lambda f, t: self._loss_and_gradient(perturbed, f, t, axes), self._flat_specs(), specs
                )

            within = "memory_budget" in self.program.directives
            outputs, grads = planned(evaluate, values, t0) if within else evaluate(())(values, t0)
            return outputs, (grads, (values, t0), marks)
        if self.sharding is not None:
            return self._on_mesh(self._forward, self._flat_specs(), self._output_specs())(values, t0), (
                None,
                (values, t0),
                marks,
            )
        acted, _, pullback = self._differentiate(self.learner(perturbed, True), perturbed, values, t0, self._extent())
        return (None, *returned(acted)), (pullback, None, marks)

    def _backward_rule(self, residuals, cotangents):
        kept, arguments, marks = residuals
        perturbed = frozenset(v for v, m in zip(self.flat_inputs, marks, strict=True) if m.value)
        loss, carry, aux, _ = cotangents
        rest_is_zero = all(map(is_zero, (*tree.tree_leaves(carry), *tree.tree_leaves(aux))))
        if self.program.loss is not None and rest_is_zero:
            grads = None if is_zero(loss) else [_scaled(g, loss) for g in kept]
        else:
            self._refuse_plans()
            learner = self.learner(perturbed, True)
            by_var = sum_by_var(self.program, loss, carry, aux)
            targets = [by_var(v) for v in learner.targets]
            if arguments is None:
                (grads,) = kept(targets)
            else:
                grads = self._pull_all(learner, perturbed, arguments, targets)
        order = self._ordered(perturbed)
        found = {} if grads is None else {v: narrowed(g, v.dtype) for v, g in zip(order, grads, strict=True)}
        return [found.get(v) for v in self.flat_inputs], None

    def _refuse_plans(self) -> None:
        """Raise a ScheduleError if a plan or a budget was asked for: the gradient of all outputs is computed without."""
        asked = next((k for k in ("memory_budget", "plan") if k in self.program.directives), None)
        if self.program.loss is not None and asked is not None:
            raise ScheduleError(
                located(
                    f"{asked}= holds for the gradient of the loss alone; here a gradient flows through the carry or aux "
                    f"that {self.program.name} returns, too, which would be computed without it.",
                    where=self.program.where,
                    fix="Put what is differentiated into the loss, stop the gradient of the rest (jax.lax.stop_gradient), or "
                    f"compile without {asked}=.",
                )
            )

    def _pull_all(self, learner: Learner, perturbed: frozenset[Var], arguments: Any, cotangents: list) -> list:
        """Run again, and pull back the cotangents of every output."""

        def run(flat, t0, targets):
            *_, pullback = self._differentiate(learner, perturbed, flat, t0, self._extent())
            (grads,) = pullback([self._share(v, c) for v, c in zip(learner.targets, targets, strict=True)])
            return self._complete(perturbed, grads)[1]

        specs = [self._target_spec(v) for v in learner.targets]
        return self._on_mesh(run, self._flat_specs(), self._gradient_specs(perturbed), specs)(*arguments, cotangents)

    def _loss_and_gradient(
        self, perturbed: frozenset[Var], flat: Sequence, t0: Any, axes: tuple[Added, ...] = ()
    ) -> tuple:
        """``((loss, carry, aux, lengths), gradient of the loss)``; ``axes``: those that ``jax.vmap`` adds around it."""
        learner, extent = self.learner(perturbed, False), self._extent()
        if not learner.targets:
            run = execute(self.forward, self._env(flat, extent), t0, extent=extent, **self._acting)
            grads = [jnp.zeros_like(x) for v, x in zip(self.flat_inputs, flat, strict=True) if v in perturbed]
            return (loss_of(run), *returned(run)), grads
        order = self._ordered(perturbed)
        plan = self.plan(learner, order, extent.batch, axes)
        if plan.cached:
            return self.caching(plan)._loss_and_gradient(perturbed, flat, t0)
        env = self._env(flat, extent)
        on_host = hosted(learner, hosting_of(self.program, plan))
        one_pass = Pass(learner, order, env, t0, extent, loss_sum, share_of_mean, self._acting, on_host)
        acted, loss, grads = EVALUATION[plan.form](one_pass, plan)
        loss, grads = self._complete(perturbed, grads, loss)
        return (narrowed(loss, learner.program.loss.dtype), *returned(acted)), grads

    def plan(self, learner: Learner, order: Sequence[Var], batch: int, axes: tuple[Added, ...] = ()) -> Plan:
        """The plan that was asked for, or the one that costs least."""
        asked = self.program.directives.get("plan")
        if asked is not None:
            return checked(asked, learner, order, batch)
        devices = 1 if self.sharding is None else self.sharding.devices
        best = choose(learner, order, batch, jax.default_backend(), devices)
        budget, tuned = (self.program.directives.get(k) for k in ("memory_budget", "autotune"))
        if budget is None and not tuned:
            return best
        trial = self.trial(order, batch, axes)

        def planned() -> Plan:
            fitting = best if budget is None else fit(trial, learner, best, budget).plan
            fits = lambda plan: budget is None or within(trial, plan, budget)  # noqa: E731
            return tune(trial, learner, fitting, fits) if tuned else fitting

        return self._plan(("planned", learner.targets, trial), planned)

    def trial(self, order: Sequence[Var], batch: int, axes: tuple[Added, ...] = ()) -> Trial:
        """The loss and its gradient with respect to ``order``, for one device, under any plan."""
        make = lambda: Trial(self.program, tuple(order), batch, jax.default_backend(), axes)  # noqa: E731
        return self._plan(("trial", tuple(order), batch, axes), make)

    def caching(self, plan: Plan) -> Lowered:
        """This program with wide products that are kept, under the rest of the plan."""

        def lowered() -> Lowered:
            directives = {**self.program.directives, "plan": replace(plan, cached=False)}
            return Lowered(with_caching(replace(self.program, directives=directives)), self.sharding)

        return self._plan(("caching", plan), lowered)

    def _act(self, learner: Learner, flat: Sequence, t0: Any, extent: Extent) -> tuple:
        env = self._env(flat, extent)
        acted = execute(learner.acting, env, t0, extent=extent, **self._acting)
        return acted, dict(env), {v: acted.env[v] for v in learner.stored}, {v: acted.tail(v) for v in learner.tails}

    def _differentiate(
        self, learner: Learner, perturbed: frozenset[Var], flat: Sequence, t0: Any, extent: Extent
    ) -> tuple:
        """Run the acting pass; return it, the targets, and their pullback to the perturbed inputs."""
        acted, env, stored, tails = self._act(learner, flat, t0, extent)
        stored = hold(learner.region.graph, stored, extent)
        order = self._ordered(perturbed)

        def region(leaves: Sequence) -> list:
            own = env | stored | {v: Value(x, env[v].dims) for v, x in zip(order, leaves, strict=True)}
            run = execute(learner.region, own, t0, tails, extent, iterate=deferring)
            return [target_of(run, v) for v in learner.targets]

        return acted, *jax.vjp(region, [env[v].data for v in order])

    def _ordered(self, perturbed: frozenset[Var]) -> list[Var]:
        return [v for v in self.flat_inputs if v in perturbed]

    # -- the mesh

    @property
    def local_batch(self) -> int:
        """The environments of one device."""
        return (self.program.domain.batch or 1) // (1 if self.sharding is None else self.sharding.devices)

    def _extent(self) -> Extent:
        times = jnp.asarray(self.program.domain.times())
        if self.sharding is None:
            return Extent(times, self.local_batch)
        first = jax.lax.axis_index(self.sharding.axis) * self.local_batch
        return Extent(times, self.local_batch, first, self.sharding.axis)

    def _on_mesh(self, fn: Callable, in_specs: list, out_specs: Any, more: Any = None) -> Callable:
        """``fn(flat, t0)`` as every device of the mesh runs it on its environments."""
        if self.sharding is None:
            return fn
        specs = (in_specs, PartitionSpec(), *(() if more is None else (more,)))
        around = jax.sharding.get_abstract_mesh()
        if around.manual_axes:
            raise ScheduleError(
                located(
                    f"{self.program.name} is split over the mesh axis {self.sharding.axis!r}, but is called inside a "
                    f"jax.shard_map over {list(around.manual_axes)}.",
                    where=self.program.where,
                    fix="Compile it without mesh=, for the environments of one device; or call it outside of the shard_map.",
                )
            )
        return jax.shard_map(fn, mesh=self.sharding.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def _spec(self, dims: frozenset) -> PartitionSpec:
        if self.sharding is None or "b" not in dims:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (axis_of(dims, "b") or 0), self.sharding.axis)

    def _input_spec(self, var: Var) -> PartitionSpec:
        axis = self.environment_axes.get(var)
        if self.sharding is None or axis is None:
            return self._spec(self.program.dims_of(var))
        return PartitionSpec(*(None,) * axis, self.sharding.axis)

    @functools.cached_property
    def environment_axes(self) -> dict[Var, int]:
        """Which axis of the data among the inputs is split with the environments."""
        return environment_axes(self.program)

    def _flat_specs(self) -> list:
        return [self._input_spec(v) for v in self.flat_inputs]

    def _gradient_specs(self, perturbed: frozenset[Var]) -> list:
        return [self._input_spec(v) for v in self._ordered(perturbed)]

    def _output_specs(self) -> tuple:
        program = self.program
        carry = [self._spec(carry_dims(program, v)) for v in program.next_carry]
        aux = [self._spec(aux_dims(program, v)) for v in program.aux]
        lengths = self._spec(frozenset("b")) if program.domain.until else None
        return (None if program.loss is None else PartitionSpec()), carry, aux, lengths

    def _target_spec(self, var: Var) -> PartitionSpec:
        if var is self.program.loss:
            return PartitionSpec()
        return self._spec(
            carry_dims(self.program, var) if var in set(self.program.next_carry) else aux_dims(self.program, var)
        )

    def _share(self, var: Var, cotangent: Any) -> Any:
        """This device's part of the cotangent of a target: of a value that all devices have, one of their shares."""
        if self.sharding is None or self._target_spec(var) != PartitionSpec() or var is self.program.loss:
            return cotangent
        return cotangent / self.sharding.devices

    def _complete(self, perturbed: frozenset[Var], grads: list, loss: Any = None) -> tuple[Any, list]:
        """``(loss, gradients)``: of what all environments share, summed over the devices, which meet for it once."""
        if self.sharding is None:
            return loss, grads
        own = [self._input_spec(v) != PartitionSpec() for v in self._ordered(perturbed)]
        shared = [widened(g) for g, mine in zip(grads, own, strict=True) if not mine]
        loss, shared = jax.lax.psum((loss, shared), self.sharding.axis)
        summed = iter(shared)
        return loss, [g if mine else next(summed) for g, mine in zip(grads, own, strict=True)]

    # -- inputs

    @property
    def flat_inputs(self) -> tuple[Var, ...]:
        """The inputs in the order in which the arrays are given."""
        p = self.program
        return (*p.params, *p.consts, *p.carry, *(() if p.key is None else (p.key,)))

    def _env(self, flat: Sequence[Any], extent: Extent) -> dict[Var, Value]:
        program = self.program
        env = {v: Value(x, program.dims_of(v)) for v, x in zip(self.flat_inputs, flat, strict=True)}
        b = jnp.int32(0) if program.domain.batch is None else extent.environments()
        return env | {program.b: Value(b, program.dims_of(program.b))}


@tree.register_static
@dataclass(frozen=True)
class _Static:
    """A Python value that travels among residuals."""

    value: Any


def _scaled(gradient: Any, loss: Any) -> Any:
    """A gradient times the loss' cotangent, in the gradient's own dtype."""
    wide = np.promote_types(np.promote_types(np.float32, gradient.dtype), loss.dtype)
    return (gradient.astype(wide) * loss.astype(wide)).astype(gradient.dtype)
