"""A compiled program, as a value that is called, explained and planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, expect
from rlfx._target import Target
from rlfx._tracing import traces
from rlfx.errors import ProgramError, ScheduleError
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.api.call import results, starts
from rlfx.recurrence.api.curried import curried
from rlfx.recurrence.api.differentiated import data_note, differentiated
from rlfx.recurrence.api.explain import Explanation
from rlfx.recurrence.api.keeping import Keeping
from rlfx.recurrence.api.machine import TARGET, here
from rlfx.recurrence.api.traced import PROGRAM, traced
from rlfx.recurrence.gradient.mesh import Sharding
from rlfx.recurrence.gradient.passes import Passes, passes
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.arguments import Arguments, check_arguments, validate_start
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.ir.verify import verify
from rlfx.recurrence.language.crossing import Crossing
from rlfx.recurrence.language.domain import Domain, depth, interpreting
from rlfx.recurrence.plan.planner import Options, evaluator_of
from rlfx.recurrence.plan.room import free_on
from rlfx.recurrence.reference.nested import interpreted
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan

#: For how many types of arguments a function keeps its program, and what XLA has made of it.
SIGNATURES = 64


F = TypeVar("F", bound=Callable[..., Any])


def _in_its_names(method: F) -> F:
    """A method whose errors are told in the names of the program's dimensions."""

    @functools.wraps(method)
    def told(self: Compiled, *args: Any, **kwargs: Any) -> Any:
        with self.domain.names.spoken():
            return method(self, *args, **kwargs)

    return told  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program: a pure function that composes with jax.jit, grad, vmap and sharding.

    Call it as ``compiled(params, carry, key=None, *, t0=0)``; see :func:`compile` and :func:`unroll`.
    """

    f: Callable[..., Any]
    domain: Domain
    has_loss: bool
    reduce: str
    until: Callable[..., Any] | None
    sharding: Sharding | None = None
    transform: Callable[[Program], Program] | None = None
    options: Options = field(default_factory=Options)
    prng: Any = None
    target: Target | None = None
    _programs: dict = field(default_factory=dict, repr=False)

    @property
    def __name__(self) -> str:
        """That of the function: by it ``jax.jit`` calls its program, in profiles and in what XLA prints."""
        return getattr(self.f, "__name__", "program")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, or a pickle: not what calls have made, which is made again."""
        return {**self.__dict__, "_programs": {}}

    @_in_its_names
    def __call__(self, params: Any, carry: Any, key: Any = None, *, t0: Any = 0) -> Any:
        """Run T timesteps of B environments: a pure function, for ``jax.jit``, ``grad``, ``vmap`` and sharding.

        Args:
          params: a pytree of arrays, the same for all timesteps and environments.
          carry: the state before the first timestep, a pytree of arrays with a leading axis [B] (none without ``batch=``;
            none in what is wrapped in :class:`Shared`).
          key: one typed key, where the program uses ``t.key`` or ``t.key_for``. It may be used again with another ``t0``.
          t0: the absolute time of the first timestep, int32, traced or not: rollouts that follow one another go on with
            ``t0 + T``, and draw other numbers.

        Returns:
          ``(loss, (carry, aux))``, or ``(carry, aux)`` of :func:`unroll`; with ``until=`` the lengths ``int32[B]`` as well.
          ``loss`` is a scalar. ``carry`` is that after T timesteps, in the types of the argument. Each leaf of ``aux`` has
          the axes [T], [B] with which it varies, in this order, before its own.

        Raises:
          ProgramError: the function is not a program, or the arguments do not fit it; CausalityError, BoundaryError,
            DomainError, UnsupportedSliceOp: what it reads is not defined, with the source line and the fix.
          ScheduleError, MemoryBudgetError: the plan is not legal for the program, or none fits the budget.

        Example:
          >>> import jax.numpy as jnp, rlfx
          >>> f = rlfx.unroll(lambda w, x, t: (w * x, x), length=3, batch=2)
          >>> carry, aux = f(2.0, jnp.array([1.0, 10.0]))
          >>> carry, aux.shape
          (Array([ 8., 80.], dtype=float32), (3, 2))
        """
        begins, t0 = starts(t0), validate_start(t0, self.domain.length)
        if not depth():
            return results(*self._prepare(params, carry, key), carry, t0, begins)
        noted = Crossing()
        out = self._called(noted, params, carry, key, t0)
        if not noted.reads:
            return out

        def anew(f: Callable[..., Any], crossing: Crossing, has_loss: bool) -> Compiled:
            domain = replace(self.domain, crossing=crossing)
            options = self.options if has_loss == self.has_loss else replace(self.options, plan=None)
            return replace(self, f=f, domain=domain, has_loss=has_loss, options=options, _programs={})

        def call(f: Callable[..., Any], crossing: Crossing, given: Any, has_loss: bool) -> Any:
            return anew(f, crossing, has_loss)._called(crossing, given, carry, key, t0)

        def program(f: Callable[..., Any], crossing: Crossing, given: Any) -> Program:
            return anew(f, crossing, False)._prepare(given, carry, key)[0].program

        return curried(call, program, self.f, noted, self.domain, self.has_loss, params)

    def _called(self, crossing: Crossing, params: Any, carry: Any, key: Any, t0: Any) -> Any:
        """A call in another program; None if ``crossing`` notes that it reads other iterations of itself."""
        crossed = replace(self, domain=replace(self.domain, crossing=crossing))
        if interpreting():
            what = self.f, crossed.domain, self.has_loss, self.reduce, self.until, self.prng
            return interpreted(*what, (params, carry, key), t0)
        prepared = crossed._prepare(params, carry, key)
        return None if crossing.operands is None and crossing.reads else results(*prepared, carry, t0)

    @_in_its_names
    def trace(self, params: Any, carry: Any, key: Any = None) -> Program:
        """The program, traced for these arguments (arrays or shapes)."""
        rule, consts, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        return replace(rule.program, const_values=tuple(consts))

    @_in_its_names
    @traces
    def explain(
        self,
        params: Any,
        carry: Any,
        key: Any = None,
        *,
        wrt: Any = None,
        measure: bool = False,
        target: Target | str | None = None,
        verbose: bool = False,
    ) -> Explanation:
        """What runs where, what is kept, and why: prints as text; ``.plot()`` draws it.

        Args:
          params, carry, key: arguments of the compiled function, arrays or shapes.
          wrt: as for :meth:`plan`: which leaves of ``params`` are differentiated.
          measure: compile the loss and its gradient, to have XLA's temporary bytes beside the predicted ones; for a target that
            is not here, what it launches there, too.
          target: another machine than the one it is compiled for: ``"a100"``.
          verbose: print every value that each stage keeps, the programs that it calls, and the plans that were timed.

        What :func:`unroll` makes is explained without a gradient, unless ``wrt=``, or its ``plan=`` or budget, asks for one.

        Raises:
          ProgramError: ``wrt`` is no prefix of ``params``, or marks no float.
          TargetError: the target is not here, and nothing that compiles for it is installed (with the line that installs it).
        """
        measure = expect("measure", measure, BOOLEAN, ProgramError)
        verbose = expect("verbose", verbose, BOOLEAN, ProgramError)
        target = expect("target", target, TARGET, ScheduleError)
        if target is not None and target != self.target:
            there = replace(self, target=target, _programs={})
            return there.explain(params, carry, key, wrt=wrt, measure=measure, verbose=verbose)
        rule, order, plan = self._planned(params, carry, key, wrt)
        learner = rule.learner(frozenset(order))
        forward = self.options == Options() and rule.program.loss is None and wrt is None
        evaluator = evaluator_of(rule, order, (), None if forward else learner)
        if measure:
            evaluator.measured(plan)
        shown = rule.caching(plan, learner) if plan.cached else rule
        note = data_note(rule.program, order) if wrt is None and rule.program.loss is not None else None
        own = self._learner(shown, params, wrt)
        alone = rule.forward if forward else None
        budget, free = self.options.memory_budget, free_on(rule)
        return Explanation(shown.program, own, plan, evaluator, budget, free, note, alone, verbose)

    @_in_its_names
    @traces
    def physical(self, params: Any, carry: Any, key: Any = None, *, wrt: Any = None) -> Passes:
        """How the program runs for these arguments (arrays or shapes): each stage of acting and of learning. Prints as text.

        What :meth:`explain` says comes from it, and the executor reads nothing else. ``wrt``: as for :meth:`plan`.

        Example:
          >>> import jax.numpy as jnp, rlfx
          >>> f = rlfx.compile(lambda w, x, t: (w * x, w * x), length=3)
          >>> print(f.physical(2.0, jnp.float32(1.0)))
          acting and learning on cpu
          0  all t: 1 equations
          1  forward scan: 3 equations
          2  all t: 1 equations
        """
        rule, order, plan = self._planned(params, carry, key, wrt)
        shown = rule.caching(plan, rule.learner(frozenset(order))) if plan.cached else rule
        return passes(self._learner(shown, params, wrt), plan, rule.target, rule.split.batch)

    @_in_its_names
    def plan(self, params: Any, carry: Any, key: Any = None, *, wrt: Any = None) -> Plan:
        """How the gradient of the loss with respect to ``params`` is computed for these arguments (arrays or shapes).

        A value: save it (``to_json``), and give it to ``compile(plan=)`` to have it again.

        Args:
          params, carry, key: arguments of the compiled function, arrays or shapes.
          wrt: which leaves of ``params`` the call differentiates: a pytree of bools, a prefix of ``params``, with one bool for
            each leaf or for a whole subtree. ``wrt=(True, False)`` of ``params=(weights, data)``, of which
            ``jax.grad(lambda w: loss_fn((w, data), carry)[0])`` is the call. None, the default: all floats, but those that
            ``rlfx.inputs`` alone reads. ``rlfx.explain`` looks at the gradient itself.

        Raises:
          ProgramError: ``wrt`` is no such prefix, or marks no float.
        """
        return self._planned(params, carry, key, wrt)[-1]

    @traces
    def _planned(self, params: Any, carry: Any, key: Any, wrt: Any) -> tuple[GradientRule, tuple[Var, ...], Plan]:
        """The program for these arguments, what is differentiated, and by which plan."""
        rule = self._prepare(params, carry, jax.random.key(0) if key is None else key)[0].begun
        order = differentiated(rule.program, params, wrt)
        return rule, order, rule.plan(rule.learner(frozenset(order)), order)

    def _learner(self, rule: GradientRule, params: Any, wrt: Any) -> Learner:
        return rule.learner(frozenset(differentiated(rule.program, params, wrt)))

    def _prepare(self, params: Any, carry: Any, key: Any) -> tuple[GradientRule, list, Arguments]:
        arguments = check_arguments(params, carry, key, self.domain, self.prng)
        traced_for = arguments.signature, J.surroundings()
        known = self._programs.get(traced_for)
        if known is not None:
            *known, keeping = known
            return (*known, arguments if keeping is None else self._kept(keeping, params, carry, key))
        return self._made(traced_for, arguments, params, carry, key)

    @traces
    def _made(
        self, traced_for: Any, arguments: Arguments, params: Any, carry: Any, key: Any
    ) -> tuple[GradientRule, list, Arguments]:
        """The program for arguments of this type, traced and rewritten."""
        rest = self.domain, self.has_loss, self.reduce
        program = before = traced(self.f, params, carry, arguments, *rest, self.until)
        keeping = Keeping.of(self.f, self.has_loss, program)
        if keeping is not None:
            arguments = self._kept(keeping, params, carry, key)
            until = None if self.until is None else lambda state: self.until(state[0])  # type: ignore[misc]
            program = before = traced(keeping.function, params, keeping.carry(carry), arguments, *rest, until)
        if self.transform is not None:
            fix = "Return the program: transform=lambda p: rlfx.incrementalize(p, block_size=25)."
            program = expect("What transform returns", self.transform(program), PROGRAM, ProgramError, fix=fix)
            program = verify(program, "transform=", before)
        consts, target = list(program.const_values), self.target or here(self.sharding)
        devices = 1 if self.sharding is None else self.sharding.devices
        program = adapted(program, target, self.options.memory_budget is not None, devices, self.options.plan)
        among = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        sharding = self.sharding and replace(self.sharding, inside=depth() > 0, among=among)
        rule = GradientRule(replace(program, const_values=()), self.options, target, sharding)
        noted = self.domain.crossing is not None and self.domain.crossing.reads  # this is not yet what it means
        if not noted and not any(isinstance(c, J.Tracer) for c in consts):
            self._programs[traced_for] = (rule, consts, keeping)
            while len(self._programs) > SIGNATURES:
                del self._programs[next(iter(self._programs))]  # the oldest
        return rule, consts, arguments

    def _kept(self, keeping: Keeping, params: Any, carry: Any, key: Any) -> Arguments:
        arguments = check_arguments(params, keeping.carry(carry), key, self.domain, self.prng)
        return replace(arguments, keeping=keeping)
