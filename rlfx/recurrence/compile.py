"""``rlfx.compile`` and ``rlfx.unroll``: from a per-timestep function to one differentiable JAX function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.arguments import Arguments, check_arguments, validate_domain
from rlfx.recurrence.check import check, whole_graph
from rlfx.recurrence.domain import Domain
from rlfx.recurrence.explain import Explanation
from rlfx.recurrence.graph import Graph
from rlfx.recurrence.learner import Learner, is_float, plan_learner
from rlfx.recurrence.lift import lift
from rlfx.recurrence.lower import Execution, execute, reduce_value
from rlfx.recurrence.program import NO_DIMS, Lit, Program, Var
from rlfx.recurrence.schedule import Schedule, schedule
from rlfx.recurrence.trace import Signature, rewrap_shared, trace_program, unwrap_shared
from rlfx.recurrence.values import Value, expand, of_atom

tree = jax.tree_util


@dataclass(eq=False)
class Lowered:
    """A program as a function of its flat inputs, with the plans that it was lowered by (computed when first needed)."""

    program: Program
    _plans: dict = field(default_factory=dict)

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
        wanted = graph.wanted | ({self.program.ends} if isinstance(self.program.ends, Var) else set())
        if not loss:
            wanted = {v for v in self.program.aux if isinstance(v, Var)} | (wanted & {self.program.ends})
        return Graph(self.program, frozenset(wanted), graph.wanted_last)

    def _plan(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    # -- evaluation

    def __call__(self, flat: Sequence[Any], t0: Any) -> tuple:
        """``(loss or None, carry leaves, aux leaves, lengths or None)`` from the program's flat inputs."""
        return self._differentiable(list(flat), t0)

    @property
    def _differentiable(self) -> Callable:
        @jax.custom_vjp
        def call(flat, t0):
            run = execute(self.forward, self._env(flat), t0)
            return self._loss(run), *self._returned(run)

        call.defvjp(self._forward_rule, self._backward_rule, symbolic_zeros=True)
        return call

    def _forward_rule(self, flat, t0):
        values = [p.value for p in flat]
        perturbed = frozenset(v for v, p in zip(self._flat_inputs, flat, strict=True) if p.perturbed and is_float(v))
        everything = self.program.loss is None
        learner = self.learner(perturbed, everything)
        acted, (targets, pullback) = self._differentiate(learner, perturbed, values, t0.value)
        loss = None if everything else targets[0]
        saved = (pullback, None if everything else (values, t0.value))
        marks = tuple(_Static(v in perturbed) for v in self._flat_inputs)
        return (loss, *self._returned(acted)), (saved, marks)

    def _backward_rule(self, residuals, cotangents):
        (pullback, arguments), marks = residuals
        perturbed = frozenset(v for v, m in zip(self._flat_inputs, marks, strict=True) if m.value)
        loss, carry, aux, _ = cotangents
        rest_is_zero = all(map(_is_zero, (*tree.tree_leaves(carry), *tree.tree_leaves(aux))))
        if arguments is None or not rest_is_zero:
            learner = self.learner(perturbed, True)
            by_var = _sum_by_var(self.program, loss, carry, aux)
            if arguments is not None:
                _, (_, pullback) = self._differentiate(learner, perturbed, *arguments)
            (grads,) = pullback([by_var(v) for v in learner.targets])
        elif _is_zero(loss):
            grads = None
        else:
            (grads,) = pullback([loss])
        found = {} if grads is None else dict(zip(self._ordered(perturbed), grads, strict=True))
        return [found.get(v) for v in self._flat_inputs], None

    def _differentiate(self, learner: Learner, perturbed: frozenset[Var], flat: Sequence, t0: Any) -> tuple:
        """Run the acting pass; return it, and the targets with their pullback to the perturbed inputs."""
        env = self._env(flat)
        acted = execute(learner.acting, env, t0)
        known = dict(env) | {v: acted.env[v] for v in learner.stored}
        tails = {v: acted.tail(v) for v in learner.tails}
        order = self._ordered(perturbed)

        def region(leaves: Sequence) -> list:
            own = known | {v: Value(x, known[v].dims) for v, x in zip(order, leaves, strict=True)}
            run = execute(learner.region, own, t0, tails)
            return [self._target(run, v) for v in learner.targets]

        return acted, jax.vjp(region, [env[v].data for v in order])

    def _ordered(self, perturbed: frozenset[Var]) -> list[Var]:
        return [v for v in self._flat_inputs if v in perturbed]

    @property
    def _flat_inputs(self) -> tuple[Var, ...]:
        p = self.program
        return (*p.params, *p.consts, *p.carry, *(() if p.key is None else (p.key,)))

    def _env(self, flat: Sequence[Any]) -> dict[Var, Value]:
        program, batch = self.program, self.program.domain.batch
        env = {v: Value(x, program.dims_of(v)) for v, x in zip(self._flat_inputs, flat, strict=True)}
        b = jnp.int32(0) if batch is None else jnp.arange(batch, dtype=jnp.int32)
        return env | {program.b: Value(b, program.dims_of(program.b))}

    # -- outputs

    def _target(self, run: Execution, var: Var) -> Any:
        program = self.program
        if var is program.loss:
            return self._loss(run)
        dims = program.dims_of(var)
        if var in set(program.next_carry):
            return expand(run.last(var), self._carry_dims(var), run.sizes).data
        return self._padded(run, expand(run.env[var], self._out_dims(dims), run.sizes)).data

    def _loss(self, run: Execution) -> Any:
        if self.program.loss is None:
            return None
        value = of_atom(self.program.loss, run.env)
        over = ("t", "b") if self.program.domain.batch is not None else ("t",)
        if self.program.domain.until:
            return reduce_value(self.program.reduce, value, over, run.sizes, self._alive(run)).data
        return reduce_value(self.program.reduce, expand(value, frozenset(over), run.sizes), over, run.sizes).data

    def _alive(self, run: Execution) -> Value:
        return run.valid(run.env, run.times)

    def _carry_dims(self, var: Var) -> frozenset:
        shared = self.program.shared[self.program.next_carry.index(var)]
        return NO_DIMS if shared or self.program.domain.batch is None else frozenset("b")

    def _out_dims(self, dims: frozenset) -> frozenset:
        """An unrolled program's outputs have every axis, as those of ``lax.scan``; aux has the axes of its domain."""
        batch = set() if self.program.domain.batch is None else {"b"}
        return frozenset({"t", *batch}) if self.program.loss is None else dims

    def _padded(self, run: Execution, value: Value) -> Value:
        """Under ``until=``, zeros after each environment's end."""
        if not self.program.domain.until or "t" not in value.dims:
            return value
        alive = self._alive(run)
        dims = value.dims | alive.dims
        wide, mask = expand(value, dims, run.sizes).data, expand(alive, dims, run.sizes).data
        mask = mask.reshape(mask.shape + (1,) * (wide.ndim - mask.ndim))
        return Value(jnp.where(mask, wide, jnp.zeros_like(wide)), dims)

    def _returned(self, run: Execution) -> tuple:
        program = self.program
        carry = [expand(run.last(v), self._carry_dims(v), run.sizes).data for v in program.next_carry]
        aux = [
            self._padded(run, expand(of_atom(v, run.env), self._out_dims(program.dims_of(v)), run.sizes)).data
            for v in program.aux
        ]
        lengths = run.length.data if program.domain.until else None
        return carry, aux, lengths


@tree.register_static
@dataclass(frozen=True)
class _Static:
    """A Python value that travels among residuals."""

    value: Any


def _is_zero(cotangent: Any) -> bool:
    return (
        isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        or cotangent is None
        or getattr(cotangent, "dtype", None) == jax.dtypes.float0
    )


def _sum_by_var(program: Program, loss: Any, carry: list, aux: list) -> Callable[[Var], Any]:
    """The cotangent of each target; one value may be returned in several places."""
    pairs = [(program.loss, loss), *zip(program.next_carry, carry, strict=True), *zip(program.aux, aux, strict=True)]

    def of(var: Var) -> Any:
        mine = [c for v, c in pairs if v is var]
        given = [c for c in mine if not _is_zero(c)]
        if not given:
            return jnp.zeros(mine[0].shape, mine[0].dtype)
        return sum(given[1:], start=given[0])

    return of


# -- the public functions --------------------------------------------------------------------------------------------


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
    _programs: dict = field(default_factory=dict, repr=False)

    def __call__(self, params: Any, carry: Any, key: Any = None, *, t0: Any = 0) -> Any:
        lowered, consts, arguments = self._prepare(params, carry, key)
        flat = [*arguments.params, *consts, *arguments.carry, *(() if arguments.key is None else (arguments.key,))]
        loss, next_carry, aux, lengths = _call(lowered, flat, jnp.asarray(t0, jnp.int32))
        program = lowered.program
        bare = tree.tree_unflatten(program.trees["carry"], next_carry)
        out_carry = rewrap_shared(bare, carry)
        out_aux = tree.tree_unflatten(program.trees["aux"], aux)
        extra = () if lengths is None else (lengths,)
        if not self.has_loss:
            return out_carry, out_aux, *extra
        return loss, (out_carry, out_aux, *extra)

    def trace(self, params: Any, carry: Any, key: Any = None) -> Program:
        """The program, traced for these arguments (arrays or shapes)."""
        lowered, consts, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        return _with_consts(lowered.program, consts)

    def explain(self, params: Any, carry: Any, key: Any = None) -> Explanation:
        """What runs where, what is kept, and why: prints as text; ``.plot()`` draws it."""
        lowered, _, _ = self._prepare(params, carry, jax.random.key(0) if key is None else key)
        perturbed = frozenset(v for v in lowered.program.params if is_float(v))
        return Explanation(lowered.program, lowered.learner(perturbed, lowered.program.loss is None))

    def _prepare(self, params: Any, carry: Any, key: Any) -> tuple[Lowered, list, Arguments]:
        arguments = check_arguments(params, carry, key, self.domain)
        known = self._programs.get(arguments.signature)
        if known is not None:
            return (*known, arguments)
        bare, shared = unwrap_shared(carry)
        sig = Signature(
            self.domain,
            self.has_loss,
            tree.tree_structure(params),
            tree.tree_structure(bare),
            shared,
            self.reduce,
            self.until,
        )
        program = lift(check(trace_program(self.f, sig, arguments.point_avals, arguments.key_aval)))
        consts = list(program.const_values)
        lowered = Lowered(_with_consts(program, ()))
        if not any(isinstance(c, J.Tracer) for c in consts):
            self._programs[arguments.signature] = (lowered, consts)
        return lowered, consts, arguments


def _with_consts(program: Program, consts: Sequence) -> Program:
    return Program(**{**program.__dict__, "const_values": tuple(consts)})


def _call(lowered: Lowered, flat: list, t0: Any) -> tuple:
    try:
        return lowered(flat, t0)
    except TypeError as error:
        if "forward-mode" not in str(error) and "jvp" not in str(error):
            raise
        raise TypeError(
            "A compiled program has reverse-mode derivatives only (it re-schedules the backward pass).\n"
            "  Fix: Use jax.grad, jax.vjp or jax.jacrev; for a Jacobian-vector product of its loss, jnp.vdot the gradient "
            "with the direction."
        ) from error


def compile(
    f: Callable,
    *,
    length: int,
    batch: int | None = None,
    reduce: str = "mean",
    until: Callable | None = None,
) -> Compiled:
    """Compile a per-timestep function with a loss.

    Args:
      f: ``f(params, carry, t) -> (loss, carry)`` or ``(loss, carry, aux)``: one timestep of one environment.
      length: T, the number of timesteps.
      batch: B, the number of environments; every leaf of the carry then has a leading axis [B], unless it is wrapped in
        :class:`Shared`. None: no batch axis.
      reduce: how the losses of all points become one: ``"mean"`` or ``"sum"``.
      until: ``until(carry) -> bool`` of one environment, tested after each of its timesteps: it ends there.

    Returns:
      ``loss_fn(params, carry, key=None, *, t0=0) -> (loss, (carry, aux))``, pure and differentiable in reverse mode.
      ``carry`` is the carry after T timesteps; each leaf of ``aux`` has the axes [T], [B] with which it varies. With
      ``until=``, ``(loss, (carry, aux, lengths))``: the outputs are padded with zeros after each end.

    Raises:
      ProgramError, CausalityError, BoundaryError, UnsupportedSliceOp: when it is first called, see those.

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
    return Compiled(f, validate_domain(length, batch, until), True, _validate_reduce(reduce), until)


def unroll(f: Callable, *, length: int, batch: int | None = None, until: Callable | None = None) -> Compiled:
    """Compile a per-timestep function without a loss: ``f(params, carry, t) -> (carry, out)``.

    Any ``jax.lax.scan`` body is such a program: ``lambda params, c, t: body(c, rlfx.inputs(xs)[t])``.

    Args:
      f: one timestep of one environment.
      length, batch, until: as for :func:`compile`.

    Returns:
      ``fn(params, carry, key=None, *, t0=0) -> (carry, out)``, every leaf of ``out`` with leading axes [T, B].

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> running_sum = rlfx.unroll(lambda xs, c, t: (c + rlfx.inputs(xs)[t],) * 2, length=3)
      >>> running_sum(jnp.array([1.0, 2.0, 3.0]), jnp.float32(0.0))
      (Array(6., dtype=float32), Array([1., 3., 6.], dtype=float32))
    """
    return Compiled(f, validate_domain(length, batch, until), False, "mean", until)


def _validate_reduce(reduce: str) -> str:
    from rlfx.errors import ProgramError, located

    if reduce not in ("mean", "sum"):
        raise ProgramError(located(f'reduce is "mean" or "sum", got {reduce!r}.', fix="Choose one of them."))
    return reduce


_ = (Lit, Mapping)
