"""``rlfx.compile`` and ``rlfx.unroll``: from a per-timestep function to one differentiable JAX function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, expect, function, instance, one_of, optional
from rlfx._target import Target
from rlfx.errors import ProgramError, ScheduleError, located
from rlfx.recurrence.api.call import results, starts
from rlfx.recurrence.api.compiled import Compiled
from rlfx.recurrence.api.machine import TARGET, here, sharding_of
from rlfx.recurrence.api.traced import PROGRAM, traced
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.arguments import (
    check_arguments,
    check_fit,
    validate_domain,
    validate_prng,
    validate_program,
    validate_start,
)
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.language.kept import marks
from rlfx.recurrence.plan.budget import validate_budget
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.plan import Plan

#: How the losses of all points become one.
REDUCTION = one_of("mean", "sum")

_PLAN = optional(instance(Plan, "a plan", 'rlfx.Plan("blocks", 25)'))
_TRANSFORM = optional(function("program"))


def trace(
    f: Callable[..., Any],
    params: Any,
    carry: Any,
    key: Any = None,
    *,
    length: int,
    batch: int | Mapping[str, int] | None = None,
    reduce: str = "mean",
    until: Callable[..., Any] | None = None,
    dim: str = "t",
    loss: bool = True,
) -> Program:
    """Trace a per-timestep function to a Program: frozen, printable, the input and output of every transform.

    Args:
      f, length, batch, reduce, until, dim: as for :func:`compile`; ``loss=False`` for a function as for :func:`unroll`.
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
      <Program loss: 7 equations, 1 reads>
    """
    domain, f = validate_domain(length, batch, until, dim), validate_program(f)
    reduce, loss = expect("reduce", reduce, REDUCTION, ProgramError), expect("loss", loss, BOOLEAN, ProgramError)
    with domain.names.spoken():
        arguments = check_arguments(params, carry, jax.random.key(0) if key is None else key, domain)
        return traced(f, params, carry, arguments, domain, loss, reduce, until)


def lower(program: Program, *, mesh: Mesh | AbstractMesh | None = None, mesh_axis: str | None = "b") -> Callable[..., Any]:
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
    sharding = sharding_of(mesh, mesh_axis)
    rule = GradientRule(expect("program", program, PROGRAM, ProgramError), Options(), here(sharding), sharding)

    if any(marks(program.trees["aux"])):
        fact = f"{program.name} returns rlfx.Last or rlfx.Every, which are kept by the compiled function, not by its program."
        fix = "Compile it: rlfx.compile(f, transform=...), rlfx.unroll(f, transform=...)."
        raise ProgramError(located(fact, where=program.where, fix=fix))

    def call(params: Any, carry: Any, key: Any = None, *, t0: Any = 0) -> Any:
        with program.domain.names.spoken():
            return run(params, carry, key, t0)

    def run(params: Any, carry: Any, key: Any, t0: Any) -> Any:
        begins, t0 = starts(t0), validate_start(t0, program.domain.length)
        arguments = check_arguments(params, carry, key, program.domain)
        if (key is None) != (program.key is None) and program.key is not None:
            if _uses_key(program):
                raise ProgramError(located("The program uses random keys, but no key was given.", fix="Give key=...."))
            arguments = check_arguments(params, carry, jax.random.key(0), program.domain)
        check_fit(program, arguments, params, carry)
        return results(rule, list(program.const_values), arguments, carry, t0, begins)

    return call


def _uses_key(program: Program) -> bool:
    return any(program.key in e.inputs for e in program.equations)


def compile(
    f: Callable[..., Any],
    *,
    length: int,
    batch: int | Mapping[str, int] | None = None,
    reduce: str = "mean",
    until: Callable[..., Any] | None = None,
    dim: str = "t",
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
        :class:`Shared`. None: no batch axis. ``{"p": 8}``: of 8, and called p.
      reduce: how the losses of all points become one: ``"mean"`` or ``"sum"``.
      until: ``until(carry) -> bool`` of one environment, tested after each of its timesteps: it ends there.
      dim: what the program's dimension is called, in ``over=``, in errors and in what is printed. Programs that are called in
        each other have names of their own: ``dim="i"`` of the iterations around the timesteps.
      mesh, mesh_axis: split the environments over an axis of a mesh of devices: reductions over b become collectives,
        and keys stay what they are. ``mesh_axis=None`` leaves the mesh to the caller.
      transform: program to program, applied before lowering: ``lambda p: rlfx.incrementalize(p, block_size=25)``.
      plan: how the gradient is computed (``compiled.plan(...)`` of an earlier run), whatever a transform asked for; by default
        the compiler chooses.
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
    domain = validate_domain(length, batch, until, dim)
    return Compiled(
        validate_program(f),
        domain,
        has_loss=True,
        reduce=expect("reduce", reduce, REDUCTION, ProgramError),
        until=until,
        sharding=sharding_of(mesh, mesh_axis),
        transform=expect("transform", transform, _TRANSFORM, ProgramError),
        options=_options(plan, memory_budget, autotune),
        prng=validate_prng(prng),
        target=expect("target", target, TARGET, ScheduleError),
    )


def _options(plan: Plan | None, memory_budget: int | None, autotune: bool = False) -> Options:
    plan, tuned = expect("plan", plan, _PLAN, ScheduleError), expect("autotune", autotune, BOOLEAN, ScheduleError)
    budget = None if memory_budget is None else validate_budget(memory_budget)
    other = "memory_budget=" if budget is not None else "autotune=" if tuned else None
    if plan is not None and other:
        fact = f"plan= is given beside {other}: a plan that is given is taken as it is, and leaves nothing to choose."
        fix = "Leave one of them out; explain(..., measure=True) of the compiled function says what its plan takes."
        raise ScheduleError(located(fact, where=J.here(), fix=fix))
    return Options(plan, budget, tuned)


def unroll(
    f: Callable[..., Any],
    *,
    length: int,
    batch: int | Mapping[str, int] | None = None,
    until: Callable[..., Any] | None = None,
    dim: str = "t",
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
      length, batch, until, dim, mesh, mesh_axis, transform, prng, target: as for :func:`compile`.
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
    domain = validate_domain(length, batch, until, dim)
    return Compiled(
        validate_program(f),
        domain,
        has_loss=False,
        reduce="mean",
        until=until,
        sharding=sharding_of(mesh, mesh_axis),
        transform=expect("transform", transform, _TRANSFORM, ProgramError),
        options=_options(plan, memory_budget),
        prng=validate_prng(prng),
        target=expect("target", target, TARGET, ScheduleError),
    )
