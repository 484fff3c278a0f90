"""A program under one plan after another: what it computes, how many bytes that is estimated to take, and XLA's number."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx.ahead import kept
from rlfx.ahead.compilation import Compilation
from rlfx.errors import TargetError
from rlfx.recurrence.execute.host import JAXLIB
from rlfx.recurrence.execute.outputs import output_dims, outputs_of
from rlfx.recurrence.gradient.replanned import Added, mapped
from rlfx.recurrence.gradient.rule import Fixed, GradientRule
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.memory.estimate import estimate_temp_bytes
from rlfx.recurrence.memory.timeline import Timeline, timeline
from rlfx.recurrence.schedule.plan import Plan

#: How often a plan is timed.
ROUNDS = 5


@dataclass(frozen=True, eq=False)
class PlanEvaluator:
    """The loss of a program and its gradient, an unrolled program, or outputs and their pullback, on one device.

    Attributes:
      rule: of the program, if it is on one device: it keeps what is traced under a plan, and need not trace that again.
      targets: outputs whose cotangents are pulled back; None: the gradient of the loss, or no derivative without one.
      order: the inputs with respect to which the gradient is taken.
      batch: the environments of one device.
      target: that device.
      axes: those that ``jax.vmap`` adds around it, with which inputs vary: the program's, ``t0``, and the cotangents.
    """

    program: Program
    order: Sequence[Var]
    batch: int
    target: Target
    axes: tuple[Added, ...] = ()
    targets: tuple[Var, ...] | None = None
    rule: GradientRule | None = None
    _known: dict = field(default_factory=dict)

    def _once(self, what: str, plan: Plan, compute: Any) -> Any:
        if (what, plan) not in self._known:
            with jax.disable_jit(False):  # it is asked of the compiled program, also while someone debugs
                self._known[what, plan] = compute()
        return self._known[what, plan]

    @property
    def looked_at(self) -> list[Plan]:
        """The plans with an estimate so far."""
        return [plan for what, plan in self._known if what == "jaxpr"]

    def _rule(self, plan: Plan) -> GradientRule:
        """The program on one device, under a plan."""
        if self.rule is not None:
            return self.rule.under(plan)
        domain = self.program.domain
        local = replace(domain, batch=None if domain.batch is None else self.batch)
        return GradientRule(replace(self.program, domain=local), Fixed(plan), self.target)

    def _function(self, plan: Plan) -> tuple:
        domain = self.program.domain
        rule = self._rule(plan)
        inputs, split = rule.flat_inputs, rule.split.environment_axes

        def gradient(flat, t0, *cotangents):
            def outputs(leaves):
                mine = dict(zip(self.order, leaves, strict=True))
                loss, carry, aux, _ = found = rule([mine.get(v, x) for v, x in zip(inputs, flat, strict=True)], t0)
                if self.targets is None:
                    return loss, found
                by_var = dict(
                    zip(outputs_of(self.program), [*([] if loss is None else [loss]), *carry, *aux], strict=True)
                )
                return [by_var[v] for v in self.targets], found

            leaves = [x for v, x in zip(inputs, flat, strict=True) if v in self.order]
            if self.targets is not None:
                _, pull, found = jax.vjp(outputs, leaves, has_aux=True)
                return found, pull(list(cotangents))
            if self.program.loss is None:
                return rule(flat, t0)
            return jax.value_and_grad(outputs, has_aux=True)(leaves)

        def struct(i: int, v: Var | None):
            added = tuple(axis.size for axis in reversed(self.axes) if axis.varies[i])
            if v is None:
                return jax.ShapeDtypeStruct(added, jnp.int32)
            lead = (self.batch,) if "b" in self.program.dims_of(v) else ()
            own = [self.batch if axis == split.get(v) else n for axis, n in enumerate(v.shape)]
            return jax.ShapeDtypeStruct((*added, *lead, *own), v.dtype)

        def cotangent(i: int, v: Var):
            sizes = {"t": domain.length, "b": self.batch}
            own = [sizes[d] for d in ("t", "b") if d in output_dims(self.program, v)]
            added = tuple(axis.size for axis in reversed(self.axes) if axis.varies[i])
            return jax.ShapeDtypeStruct((*added, *own, *v.shape), v.dtype)

        n = len(inputs)
        flat = mapped(lambda *flat: gradient(flat[:n], *flat[n:]), self.axes)
        given = [cotangent(n + 1 + i, v) for i, v in enumerate(self.targets or ())]
        return flat, [*(struct(i, v) for i, v in enumerate((*inputs, None))), *given]

    def jaxpr(self, plan: Plan) -> Any:
        """What is computed, without dead code."""

        def compute():
            fn, arguments = self._function(plan)
            return J.without_dead_code(jax.make_jaxpr(fn)(*arguments))

        return self._once("jaxpr", plan, compute)

    def estimated(self, plan: Plan) -> int:
        """Temporary bytes by the static estimate; without those in host memory, where that is another one."""
        if plan.offload is not None and self.target.room.host:
            return self.timeline(plan).peak_device
        return self._once("estimated", plan, lambda: int(estimate_temp_bytes(self.jaxpr(plan))))

    def timeline(self, plan: Plan) -> Timeline:
        """The memory over time by the static estimate."""
        return self._once("timeline", plan, lambda: timeline(self.jaxpr(plan)))

    def measured(self, plan: Plan) -> int:
        """Temporary bytes by XLA: the program is compiled, for the target, wherever that is.

        (XLA assigns buffers before it generates machine code: less effort there gives the same number, several times sooner.)

        Raises:
          TargetError: the target is not here, and nothing that compiles for it is.
        """

        def compute():
            fn, arguments = self._function(plan)
            if not self.target.is_here:
                fn.__name__ = self.program.name
                try:
                    return self._once("compilation", plan, lambda: self.target.compile(fn, *arguments)).temp_bytes
                except TargetError as error:
                    if error.needed is None:
                        raise
                    return error.needed  # more than the device has
            return _temp_bytes(jax.jit(fn).lower(*arguments), self.target)

        return self._once("measured", plan, compute)

    def time(self, plans: Sequence[Plan]) -> dict[Plan, float]:
        """Seconds of one evaluation under each plan: compiled, and run in turns, on small numbers of the same shapes."""
        fresh = [plan for plan in plans if plan not in self.timed]
        made = {plan: self._function(plan) for plan in fresh}
        spent: dict[Plan, list[float]] = {plan: [] for plan in fresh}
        with jax.disable_jit(False):  # what is timed is the compiled program, also while someone debugs
            runs = {plan: jax.jit(fn).lower(*shapes).compile() for plan, (fn, shapes) in made.items()}
            with jax.ensure_compile_time_eval():  # a plan may be asked for while the caller is traced
                arguments = {plan: list(map(_some, shapes)) for plan, (_, shapes) in made.items()}
                for _ in range(ROUNDS + 1):  # the first one is not counted
                    for plan, run in runs.items():
                        start = time.perf_counter()
                        jax.block_until_ready(run(*arguments[plan]))
                        spent[plan].append(time.perf_counter() - start)
        for plan, times in spent.items():
            self._known["seconds", plan] = statistics.median(times[1:])
        return {plan: self._known["seconds", plan] for plan in plans}

    @property
    def timed(self) -> dict[Plan, float]:
        """Seconds of one evaluation under the plans that were timed."""
        return {plan: x for (what, plan), x in self._known.items() if what == "seconds"}

    @property
    def compiled(self) -> dict[Plan, int]:
        """Temporary bytes by XLA of the plans that were compiled."""
        return {plan: n for (what, plan), n in self._known.items() if what == "measured"}

    def compilation(self, plan: Plan) -> Compilation | None:
        """What a plan takes on a target that is not here, if it was compiled for it."""
        return self._known.get(("compilation", plan))


_TEMP_BYTES = "temp_bytes"


def _temp_bytes(lowered: Any, target: Target) -> int:
    """By XLA, which compiles the program for the machine at hand; or compiled the same one before, and the file is there."""
    made_by = [jax.__version__, JAXLIB, str(target), target.sooner, os.environ.get("XLA_FLAGS", "")]
    devices = [str(d.device_kind) for d in jax.devices()]
    key = kept.digest(lowered.as_text(), json.dumps([*made_by, devices, os.cpu_count()]))
    answer = kept.read(key, frozenset({_TEMP_BYTES}))
    if answer is None or not isinstance(answer[_TEMP_BYTES], int):
        compiled = lowered.compile(dict(target.sooner))
        answer = {_TEMP_BYTES: int(compiled.memory_analysis().temp_size_in_bytes)}
        kept.write(key, answer)
    return answer[_TEMP_BYTES]


def _some(struct: jax.ShapeDtypeStruct) -> jax.Array:
    if J.is_key(struct):
        return J.zero_keys(struct.shape, struct.dtype)
    return jnp.full(struct.shape, 0.1 if jnp.issubdtype(struct.dtype, jnp.inexact) else 0, struct.dtype)
