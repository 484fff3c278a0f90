"""``rlfx.compile`` and ``rlfx.unroll``: from a per-timestep function to one differentiable JAX function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from rlfx import _jaxpr as J
from rlfx import _target
from rlfx._checks import BOOLEAN, TEXT, expect, function, instance, one_of, optional
from rlfx._target import Target, target_of
from rlfx.errors import ProgramError, ProgramTypeError, ScheduleError, located
from rlfx.recurrence.analysis.check import check
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.api.differentiated import data_note, differentiated
from rlfx.recurrence.api.explain import Explanation
from rlfx.recurrence.api.pending import transformed
from rlfx.recurrence.gradient.mesh import Sharding
from rlfx.recurrence.gradient.passes import Passes, passes
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.arguments import (
    Arguments,
    check_arguments,
    check_fit,
    validate_domain,
    validate_prng,
    validate_program,
    validate_start,
)
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.reasons import trace_arguments
from rlfx.recurrence.ir.trace import Signature, rewrap_shared, unwrap_shared
from rlfx.recurrence.ir.verify import rewritten, verify
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.plan.budget import validate_budget
from rlfx.recurrence.plan.planner import Options, evaluator_of
from rlfx.recurrence.plan.room import free_bytes
from rlfx.recurrence.rewrite.lift import lift
from rlfx.recurrence.rewrite.present import present
from rlfx.recurrence.rewrite.softmax import divide_last
from rlfx.recurrence.rewrite.transposes import absorb_transposes
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan

tree = jax.tree_util

#: How the losses of all points become one.
REDUCTION = one_of("mean", "sum")

#: What every program goes through, in order; each means the same.
REWRITES: tuple[Callable[[Program], Program], ...] = (lift, present, absorb_transposes, divide_last)

_PROGRAM = instance(Program, "a program", "rlfx.trace(f, params, carry, length=T)")
_MESH = optional(instance((Mesh, AbstractMesh), "a mesh of devices", 'jax.make_mesh((n,), ("b",))'))
_PLAN = optional(instance(Plan, "a plan", 'rlfx.Plan("blocks", 25)'))
_TRANSFORM = optional(function("program"))
_TARGET = optional(_target.TARGET)


# -- the public functions --------------------------------------------------------------------------------------------


def trace(
    f: Callable,
    params: Any,
    carry: Any,
    key: Any = None,
    *,
    length: int,
    batch: int | None = None,
    reduce: str = "mean",
    until: Callable | None = None,
    loss: bool = True,
) -> Program:
    """Trace a per-timestep function to a Program: frozen, printable, the input and output of every transform.

    Args:
      f, length, batch, reduce, until: as for :func:`compile`; ``loss=False`` for a function as for :func:`unroll`.
      params, carry: arguments of the compiled function, or their shapes (``jax.ShapeDtypeStruct``).
      key: a random key; by default a program may use keys, and needs one when it is called.

    Returns:
      The Program. ``lower`` makes a function of it, ``reference`` evaluates it as it is.

    Raises:
      ProgramError and its subclasses, UnsupportedSliceOp: if it is no legal program.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def loss(w, x, t):
      ...     y = rlfx.series(w * x, end=0.0)
      ...     return y[t] - y[t + 1], x
      >>> rlfx.trace(loss, 2.0, jnp.float32(1.0), length=3)
      <Program loss: 8 equations, 2 reads>
    """
    domain, f = validate_domain(length, batch, until), validate_program(f)
    reduce, loss = expect("reduce", reduce, REDUCTION, ProgramError), expect("loss", loss, BOOLEAN, ProgramError)
    arguments = check_arguments(params, carry, jax.random.key(0) if key is None else key, domain)
    return _traced(f, params, carry, arguments, domain, loss, reduce, until)


def _traced(f, params, carry, arguments: Arguments, domain: Domain, loss: bool, reduce: str, until) -> Program:
    bare, shared = unwrap_shared(carry)
    trees = tree.tree_structure(params), tree.tree_structure(bare)
    sig = Signature(domain, loss, *trees, shared, reduce, until)
    traced = check(trace_arguments(f, sig, arguments))
    for rewrite in REWRITES:
        traced = rewritten(rewrite, traced)
    return transformed(f, traced)


def lower(program: Program, *, mesh: Mesh | AbstractMesh | None = None, mesh_axis: str | None = "b") -> Callable:
    """A Program as a function: ``fn(params, carry, key=None, *, t0=0)``, with the results of :func:`compile`.

    Args:
      program: what :func:`trace` returns, and perhaps transforms made of it.
      mesh, mesh_axis: as for :func:`compile`.

    Returns:
      A function of ``params`` and ``carry``, pytrees with the structure, shapes and dtypes that the program was traced for
      (leaves of the carry ``[B, ...]``), of one key, and of ``t0``, the absolute time of the first timestep, int32. It gives
      ``(loss, (carry, aux))``, or ``(carry, aux)`` of a program without a loss, as :func:`compile` and :func:`unroll` do.
      The program's transforms are followed as they are: no plan is chosen.

    Raises:
      ProgramError: ``program`` is none; when it is called, arguments that it was not traced for, or no key where it uses one.
      ScheduleError: the mesh has no such axis, or the program cannot be scheduled as its transforms ask.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> program = rlfx.trace(lambda w, x, t: (w * x, x + 1.0), 2.0, jnp.float32(1.0), length=3)
      >>> rlfx.lower(program)(2.0, jnp.float32(1.0))[0]
      Array(4., dtype=float32)
    """
    sharding = _sharding(mesh, mesh_axis)
    rule = GradientRule(expect("program", program, _PROGRAM, ProgramError), Options(), _here(sharding), sharding)

    def call(params: Any, carry: Any, key: Any = None, *, t0: Any = 0) -> Any:
        t0, arguments = validate_start(t0, program.domain.length), check_arguments(params, carry, key, program.domain)
        if (key is None) != (program.key is None) and program.key is not None:
            if _uses_key(program):
                raise ProgramError(located("The program uses random keys, but no key was given.", fix="Give key=...."))
            arguments = check_arguments(params, carry, jax.random.key(0), program.domain)
        check_fit(program, arguments, params, carry)
        return _results(rule, list(program.const_values), arguments, carry, t0)

    return call


def _uses_key(program: Program) -> bool:
    return any(program.key in e.inputs for e in program.equations)


def _sharding(mesh: Mesh | AbstractMesh | None, axis: str | None) -> Sharding | None:
    expect("mesh", mesh, _MESH, ScheduleError)
    expect("mesh_axis", axis, optional(TEXT), ScheduleError)
    if mesh is None or axis is None:
        return None
    if axis not in mesh.shape:
        raise ScheduleError(
            located(
                f"mesh_axis={axis!r} is not an axis of the mesh, which has {list(mesh.shape)}.",
                where=J.here(),
                fix='Name one of them, or make the mesh with jax.make_mesh((n,), ("b",)).',
            )
        )
    # The compiler places the environments itself: no axis of the mesh shows up in the types of the user's arrays.
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):  # of devices that are not here: rlfx.target("h200:8").mesh("b")
        abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, auto, abstract_device=mesh.abstract_device)
        return Sharding(abstract, axis)  # pyright: ignore[reportArgumentType]
    return Sharding(Mesh(mesh.devices, mesh.axis_names, axis_types=auto), axis)


def _here(sharding: Sharding | None) -> Target:
    """What the mesh is made of, or what jax runs on."""
    device = None if sharding is None else sharding.mesh.abstract_mesh.abstract_device
    return _target.target() if device is None else target_of(device)


def _results(rule: GradientRule, consts: list, arguments: Arguments, carry: Any, t0: Any) -> Any:
    program = rule.program
    key = () if arguments.key is None or program.key is None else (arguments.key,)
    flat = [*arguments.params, *consts, *arguments.carry, *key]
    loss, next_carry, aux, lengths = _call(rule, flat, t0)
    out_carry = rewrap_shared(tree.tree_unflatten(program.trees["carry"], next_carry), carry)
    out_aux = tree.tree_unflatten(program.trees["aux"], aux)
    extra = () if lengths is None else (lengths,)
    return (out_carry, out_aux, *extra) if program.loss is None else (loss, (out_carry, out_aux, *extra))


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program: a pure function that composes with jax.jit, grad, vmap and sharding.

    Call it as ``compiled(params, carry, key=None, *, t0=0)``; see :func:`compile` and :func:`unroll`.
    """

    f: Callable
    domain: Domain
    has_loss: bool
    reduce: str
    until: Callable | None
    sharding: Sharding | None = None
    transform: Callable[[Program], Program] | None = None
    options: Options = field(default_factory=Options)
    prng: Any = None
    target: Target | None = None
    _programs: dict = field(default_factory=dict, repr=False)

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
        t0 = validate_start(t0, self.domain.length)
        return _results(*self._prepare(params, carry, key), carry, t0)

    def trace(self, params: Any, carry: Any, key: Any = None) -> Program:
        """The program, traced for these arguments (arrays or shapes)."""
        rule, consts, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        return replace(rule.program, const_values=tuple(consts))

    def explain(
        self,
        params: Any,
        carry: Any,
        key: Any = None,
        *,
        wrt: Any = None,
        measure: bool = False,
        target: Target | str | None = None,
    ) -> Explanation:
        """What runs where, what is kept, and why: prints as text; ``.plot()`` draws it.

        Args:
          params, carry, key: arguments of the compiled function, arrays or shapes.
          wrt: as for :meth:`plan`: which leaves of ``params`` are differentiated.
          measure: compile the loss and its gradient, to have XLA's temporary bytes beside the predicted ones; for a target that
            is not here, what it launches there, too.
          target: another machine than the one it is compiled for: ``"a100"``.

        Raises:
          ProgramError: ``wrt`` is no prefix of ``params``, or marks no float.
          TargetError: the target is not here, and nothing that compiles for it is installed (with the line that installs it).
        """
        measure = expect("measure", measure, BOOLEAN, ProgramError)
        target = expect("target", target, _TARGET, ScheduleError)
        if target is not None and target != self.target:
            there = replace(self, target=target, _programs={})
            return there.explain(params, carry, key, wrt=wrt, measure=measure)
        rule, _, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        order = differentiated(rule.program, params, wrt)
        learner = rule.learner(frozenset(order))
        plan = rule.plan(learner, order)
        forward = self.options == Options() and rule.program.loss is None
        evaluator = evaluator_of(rule, order, (), None if forward else learner)
        if measure:
            evaluator.measured(plan)
        shown = rule.caching(plan) if plan.cached else rule
        free = free_bytes(rule.target, rule.split.own_devices)
        note = data_note(rule.program, order) if wrt is None and rule.program.loss is not None else None
        own = self._learner(shown, params, wrt)
        return Explanation(shown.program, own, plan, evaluator, self.options.memory_budget, free, note)

    def physical(self, params: Any, carry: Any, key: Any = None, *, wrt: Any = None) -> Passes:
        """How the program runs for these arguments (arrays or shapes): each stage of acting and of learning. Prints as text.

        What :meth:`explain` says comes from it, and the executor reads nothing else. ``wrt``: as for :meth:`plan`.

        Example:
          >>> import jax.numpy as jnp, rlfx
          >>> f = rlfx.compile(lambda w, x, t: (w * x, w * x), length=3)
          >>> print(f.physical(2.0, jnp.float32(1.0)))
          acting on cpu
          0  all t: 1 equations
          1  forward scan: 3 equations
          learning
          0  all t: 2 equations
          1  forward scan: 3 equations
          2  all t: 1 equations
        """
        rule, _, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        order = differentiated(rule.program, params, wrt)
        plan = rule.plan(rule.learner(frozenset(order)), order)
        shown = rule.caching(plan) if plan.cached else rule
        return passes(self._learner(shown, params, wrt), plan, rule.target, rule.split.batch)

    def plan(self, params: Any, carry: Any, key: Any = None, *, wrt: Any = None) -> Plan:
        """How the gradient of the loss with respect to ``params`` is computed for these arguments (arrays or shapes).

        A value: save it (``to_json``), and give it to ``compile(plan=)`` to have it again.

        Args:
          params, carry, key: arguments of the compiled function, arrays or shapes.
          wrt: which leaves of ``params`` the call differentiates: a pytree of bools, a prefix of ``params``, with one bool for
            each leaf or for a whole subtree. ``wrt=(True, False)`` of ``params=(weights, data)``, of which
            ``jax.grad(lambda w: loss_fn((w, data), carry)[0])`` is the call. None, the default: all floats.

        Raises:
          ProgramError: ``wrt`` is no such prefix, or marks no float.
        """
        rule, _, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        order = differentiated(rule.program, params, wrt)
        return rule.plan(rule.learner(frozenset(order)), order)

    def _learner(self, rule: GradientRule, params: Any, wrt: Any) -> Learner:
        return rule.learner(frozenset(differentiated(rule.program, params, wrt)))

    def _prepare(self, params: Any, carry: Any, key: Any) -> tuple[GradientRule, list, Arguments]:
        arguments = check_arguments(params, carry, key, self.domain, self.prng)
        traced_for = arguments.signature, J.surroundings()
        known = self._programs.get(traced_for)
        if known is not None:
            return (*known, arguments)
        program = traced = _traced(
            self.f, params, carry, arguments, self.domain, self.has_loss, self.reduce, self.until
        )
        if self.transform is not None:
            fix = "Return the program: transform=lambda p: rlfx.incrementalize(p, block_size=25)."
            program = expect("What transform returns", self.transform(program), _PROGRAM, ProgramError, fix=fix)
            program = verify(program, "transform=", traced)
        consts, target = list(program.const_values), self.target or _here(self.sharding)
        rule = GradientRule(replace(adapted(program, target), const_values=()), self.options, target, self.sharding)
        if not any(isinstance(c, J.Tracer) for c in consts):
            self._programs[traced_for] = (rule, consts)
            while len(self._programs) > SIGNATURES:
                del self._programs[next(iter(self._programs))]  # the oldest
        return rule, consts, arguments


#: For how many types of arguments a function keeps its program, and what XLA has made of it.
SIGNATURES = 64


def _call(rule: GradientRule, flat: list, t0: Any) -> tuple:
    try:
        # Compiled once where no jax.jit is around, and nothing but its body where there is one.
        return rule.once("call", lambda: jax.jit(rule, inline=True))(flat, t0)
    except J.UnexpectedTracerError as error:
        raise ProgramError(
            located(
                "A value leaked out of the traced program (it was stored outside of the function, in a list or an attribute, and "
                "is used in another trace).",
                where=J.leaked_from(error) or rule.program.where,
                fix="Return it from the program as aux instead of storing it.",
            )
        ) from error
    except TypeError as error:
        if "forward-mode" not in str(error) and "jvp" not in str(error):
            raise
        raise ProgramTypeError(
            located(
                "A compiled program has reverse-mode derivatives only (it re-schedules the backward pass).",
                where=J.here(),
                fix="Use jax.grad, jax.vjp or jax.jacrev; for a Jacobian-vector product of its loss, jnp.vdot the gradient "
                "with the direction.",
            )
        ) from error


def compile(
    f: Callable,
    *,
    length: int,
    batch: int | None = None,
    reduce: str = "mean",
    until: Callable | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    mesh_axis: str | None = "b",
    transform: Callable[[Program], Program] | None = None,
    plan: Plan | None = None,
    memory_budget: int | None = None,
    autotune: bool = False,
    prng: Any = None,
    target: Target | str | None = None,
) -> Compiled:
    """Compile a per-timestep function with a loss.

    Args:
      f: ``f(params, carry, t) -> (loss, carry)`` or ``(loss, carry, aux)``: one timestep of one environment.
      length: T, the number of timesteps.
      batch: B, the number of environments; every leaf of the carry then has a leading axis [B], unless it is wrapped in
        :class:`Shared`. None: no batch axis.
      reduce: how the losses of all points become one: ``"mean"`` or ``"sum"``.
      until: ``until(carry) -> bool`` of one environment, tested after each of its timesteps: it ends there.
      mesh, mesh_axis: split the environments over an axis of a mesh of devices: reductions over b become collectives,
        and keys stay what they are. ``mesh_axis=None`` leaves the mesh to the caller.
      transform: program to program, applied before lowering: ``lambda p: rlfx.incrementalize(p, block_size=25)``.
      plan: how the gradient is computed (``compiled.plan(...)`` of an earlier run); by default the compiler chooses.
      memory_budget: temporary bytes of one device that the loss and its gradient may take: the fastest plan that fits
        is found when it is first called (and compiled once, to compare with XLA's own number).
      autotune: compile the few best plans when it is first called, time them (on small numbers of the same shapes), and take
        the fastest. Save it: ``compiled.plan(...).to_json()``. A program with callbacks is not timed, for that would run them.
      prng: the generator of all the program's random numbers, as ``jax.random.key(seed, impl=prng)`` takes it; the key
        given seeds it. ``rlfx.envs.fast_prng`` is two to five times as fast on a CPU. None, the default: the generator of
        the key given, which is threefry for ``jax.random.key(seed)``.
      target: the machine to compile for, ``rlfx.target("h200")`` or its name: which rewrites pay there, which plan is fastest
        and what :meth:`Compiled.explain` says; a budget is met there (by its own compiler: TargetError if that is not
        installed). None, the default: the mesh's devices, or those that jax runs on.

    Returns:
      ``loss_fn(params, carry, key=None, *, t0=0) -> (loss, (carry, aux))``, pure and differentiable in reverse mode.
      ``carry`` is the carry after T timesteps; each leaf of ``aux`` has the axes [T], [B] with which it varies. With
      ``until=``, ``(loss, (carry, aux, lengths))``: the outputs are padded with zeros after each end.

    Raises:
      DomainError, ProgramError, ScheduleError: for an argument of another kind.
      ProgramError, CausalityError, BoundaryError, UnsupportedSliceOp: when it is first called, see those.
      ScheduleError, MemoryBudgetError: (then) if the plan is not legal for the program, or no plan fits the budget.

    TimeRL's recurrent tensors (section 4), compiled to one XLA program instead of an interpreted schedule.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> def loss(w, x, t):
      ...     y = rlfx.series(w * x, end=0.0)
      ...     return (y[t] - 0.5 * y[t + 1]) ** 2, x + 1.0
      >>> loss_fn = rlfx.compile(loss, length=3)
      >>> jax.grad(lambda w: loss_fn(w, jnp.float32(1.0))[0])(2.0)
      Array(12.333..., dtype=float32)
    """
    domain = validate_domain(length, batch, until)
    return Compiled(
        validate_program(f),
        domain,
        has_loss=True,
        reduce=expect("reduce", reduce, REDUCTION, ProgramError),
        until=until,
        sharding=_sharding(mesh, mesh_axis),
        transform=expect("transform", transform, _TRANSFORM, ProgramError),
        options=replace(_options(plan, memory_budget), autotune=expect("autotune", autotune, BOOLEAN, ScheduleError)),
        prng=validate_prng(prng),
        target=expect("target", target, _TARGET, ScheduleError),
    )


def _options(plan: Plan | None, memory_budget: int | None) -> Options:
    budget = None if memory_budget is None else validate_budget(memory_budget)
    return Options(expect("plan", plan, _PLAN, ScheduleError), budget)


def unroll(
    f: Callable,
    *,
    length: int,
    batch: int | None = None,
    until: Callable | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    mesh_axis: str | None = "b",
    transform: Callable[[Program], Program] | None = None,
    plan: Plan | None = None,
    memory_budget: int | None = None,
    prng: Any = None,
    target: Target | str | None = None,
) -> Compiled:
    """Compile a per-timestep function without a loss: ``f(params, carry, t) -> (carry, out)``.

    Any ``jax.lax.scan`` body is such a program: ``lambda params, c, t: body(c, rlfx.inputs(xs)[t])``.

    Args:
      f: one timestep of one environment.
      length, batch, until, mesh, mesh_axis, transform, prng, target: as for :func:`compile`.
      plan: how a derivative is computed. None, the default: at once, from what the call has stored. By another plan the
        derivative runs the program once more, block by block.
      memory_budget: temporary bytes of one device that the call and the pullback of all its outputs may take.

    Returns:
      ``fn(params, carry, key=None, *, t0=0) -> (carry, out)``, every leaf of ``out`` with leading axes [T, B].

    Raises:
      As :func:`compile`.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> running_sum = rlfx.unroll(lambda xs, c, t: (c + rlfx.inputs(xs)[t],) * 2, length=3)
      >>> running_sum(jnp.array([1.0, 2.0, 3.0]), jnp.float32(0.0))
      (Array(6., dtype=float32), Array([1., 3., 6.], dtype=float32))
    """
    domain = validate_domain(length, batch, until)
    return Compiled(
        validate_program(f),
        domain,
        has_loss=False,
        reduce="mean",
        until=until,
        sharding=_sharding(mesh, mesh_axis),
        transform=expect("transform", transform, _TRANSFORM, ProgramError),
        options=_options(plan, memory_budget),
        prng=validate_prng(prng),
        target=expect("target", target, _TARGET, ScheduleError),
    )
