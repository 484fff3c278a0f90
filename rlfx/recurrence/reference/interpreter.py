"""The meaning of a program: its equations evaluated point by point on demand, with memoisation, in plain eager JAX.

Slow and obvious on purpose: no scheduling, no masks, no symbolic lengths (the function is traced again at every concrete
timestep). Every compiled program is tested against it, values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, expect, one_of, optional
from rlfx.errors import ProgramError
from rlfx.recurrence.analysis.check import check
from rlfx.recurrence.ir.arguments import check_arguments, check_fit, validate_domain, validate_program, validate_start
from rlfx.recurrence.ir.derivatives import Function
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var
from rlfx.recurrence.ir.reasons import trace_arguments
from rlfx.recurrence.ir.trace import Signature, rewrap_shared, unwrap_shared
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.effects import is_effect
from rlfx.recurrence.language.kept import marks, unmarked
from rlfx.recurrence.language.precision import narrowed, widened
from rlfx.recurrence.language.primitives import custom_p
from rlfx.recurrence.reference.pointwise import AtPoint, Evaluation, array, stacked

tree = jax.tree_util


def reference(
    f: Callable[..., Any] | Program,
    *,
    length: int | None = None,
    batch: int | Mapping[str, int] | None = None,
    reduce: str = "mean",
    until: Callable[..., Any] | None = None,
    loss: bool | None = None,
    dim: str = "t",
) -> Callable[..., Any]:
    """The reference interpreter of a per-timestep function or a Program: the meaning that every plan must have.

    Args:
      f: a per-timestep function, or a traced Program (then the other arguments are the program's own).
      length, batch, reduce, until, dim: as for :func:`compile`.
      loss: whether f returns a loss, as for :func:`compile` (the default), or is unrolled, as for :func:`unroll`.

    Returns:
      A function with the arguments and results of the compiled one: ``run(params, carry, key=None, *, t0=0)``, leaves of
      the carry ``[B, ...]``, of aux ``[T, B, ...]`` where they vary with t and b. It runs eagerly, point by point, so that
      a debugger and NaN checks see values; it differentiates under ``jax.grad``; and it takes time and memory in proportion to
      T * B * equations. It computes what the results need, and nothing else: ``jax.debug.print`` of other values is silent.
      ``jax.jit`` makes one program of it, unless ends or the times of lookups are computed. Values equal those of
      every plan up to the order of floating-point sums.

    Raises:
      ProgramError, CausalityError, BoundaryError, DomainError, UnsupportedSliceOp: as :func:`compile` does.

    TimeRL's section 4 describes the same meaning by an interpreted schedule; here there is none.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def total(xs, carry, t):
      ...     return carry, rlfx.inputs(xs)[t:].sum()
      >>> rlfx.reference(total, length=3, loss=False)(jnp.array([1.0, 2.0, 3.0]), None)[1]
      Array([6., 5., 3.], dtype=float32)
    """
    if isinstance(f, Program):
        return _of_program(f)
    domain, f = replace(validate_domain(length, batch, until, dim), by_reference=True), validate_program(f)
    reduce = expect("reduce", reduce, one_of("mean", "sum"), ProgramError)
    expect("loss", loss, optional(BOOLEAN), ProgramError)

    def run(params: Any, carry: Any, key: Any = None, *, t0: int = 0) -> Any:
        with domain.names.spoken():
            start, arguments = _start(t0, domain), check_arguments(params, carry, key, domain)
            sig = signature_of(domain, loss is not False, params, carry, reduce, until)

            def program_at(t: int, stop: int) -> Program:
                return trace_arguments(f, replace(sig, domain=replace(domain, at=t, stop=stop)), arguments)

            return run_points(check(trace_arguments(f, sig, arguments)), program_at, arguments, carry, start)

    return run


def signature_of(
    domain: Domain, has_loss: bool, params: Any, carry: Any, reduce: str, until: Callable[..., Any] | None
) -> Signature:
    """What a function is traced for, to be interpreted: the programs that it calls are interpreted as well."""
    bare, shared = unwrap_shared(carry)
    trees = tree.tree_structure(params), tree.tree_structure(bare)
    return Signature(domain, has_loss, *trees, shared, reduce, until)


def _of_program(program: Program) -> Callable[..., Any]:
    def run(params: Any, carry: Any, key: Any = None, *, t0: int = 0) -> Any:
        start, arguments = _start(t0, program.domain), check_arguments(params, carry, key, program.domain)
        check_fit(program, arguments, params, carry)
        return run_points(program, lambda t, stop: concretize(program, t, stop), arguments, carry, start)

    return run


def _start(t0: Any, domain: Domain) -> int:
    with jax.ensure_compile_time_eval():  # a number, also while jax traces the reference
        return int(validate_start(t0, domain.length))


def concretize(program: Program, t: int, stop: int) -> Program:
    """The program at one concrete timestep: every symbolic length is an integer."""
    fresh = {}

    def var(v: Atom) -> Atom:
        if isinstance(v, Lit):
            return v
        if v not in fresh:
            fresh[v] = Var(v.id, tuple(J.evaluate_dim(d, t + 1, stop) for d in v.shape), v.dtype)
        return fresh[v]

    def equation(e: Equation) -> Equation:
        params = {k: J.evaluate_dims(p, t + 1, stop) for k, p in e.params.items() if k != "rlfx_static_indices"}
        if e.op is custom_p:
            params = {"custom": params["custom"].mapped(function)}
        return Equation(
            e.op, params, tuple(map(var, e.inputs)), tuple(map(var, e.outputs)), e.where, e.scope, e.has_effects
        )

    many = lambda vs: tuple(map(var, vs))  # noqa: E731

    def function(f: Function) -> Function:
        return Function(many(f.inputs), tuple(map(equation, f.equations)), many(f.outputs))

    p = program
    return replace(
        p,
        equations=tuple(map(equation, p.equations)),
        params=many(p.params),
        consts=many(p.consts),
        carry=many(p.carry),
        key=None if p.key is None else var(p.key),
        now=var(p.now),
        b=var(p.b),
        loss=None if p.loss is None else var(p.loss),
        next_carry=many(p.next_carry),
        aux=many(p.aux),
        ends=None if p.ends is None else var(p.ends),
        alive=None if p.alive is None else var(p.alive),
        dims={},
    )


def run_points(whole: Program, program_at: Callable[[int, int], Program], arguments: Any, carry: Any, t0: int) -> Any:
    """The results of a program, point by point; ``program_at``: the program at a timestep, for an end."""
    domain, batch = whole.domain, whole.domain.batch or 1
    cache: dict[tuple[int, int], AtPoint] = {}

    def at(t: int, stop: int) -> AtPoint:
        if (t, stop) not in cache:
            cache[t, stop] = AtPoint(program_at(t, stop))
        return cache[t, stop]

    # Each point has a gradient of its own: they are added up in at least float32.
    params = [widened(x) for x in arguments.params]

    def given(var: Var, program: Program, t: int, b: int) -> Any:
        if var in program.params:
            return narrowed(params[program.params.index(var)], var.dtype)
        if var in program.consts:
            return program.const_values[program.consts.index(var)]
        if var in program.carry:
            i = program.carry.index(var)
            return arguments.carry[i] if whole.shared[i] or domain.batch is None else arguments.carry[i][b]
        if var is program.key:
            return arguments.key
        return jnp.int32(t0 + t) if var is program.now else jnp.int32(b)

    evaluation = lambda stops: Evaluation(at, domain, batch, given, stops, t0)  # noqa: E731
    run = evaluation(_stops(evaluation, domain) if domain.until else [domain.length] * batch)
    stops = run.stops

    def out(get: Callable[[Program], Atom], t: int, b: int) -> Any:
        return array(run.value(get(run.at(t, b).program), t, b))

    longest = int(np.argmax(stops))
    for effects in (e for e in run.at(stops[longest] - 1, longest).program.equations if is_effect(e)):
        run.value(effects.outputs[0], stops[longest] - 1, longest)
    points = [(t, b) for b in range(batch) for t in range(stops[b])]
    losses = None
    if whole.loss is not None:
        losses = stacked([out(lambda p: p.loss, t, b) for t, b in points])
        losses = jnp.mean(losses) if whole.reduce == "mean" else jnp.sum(losses)
    final = []
    for i in range(len(whole.next_carry)):
        each = [out(lambda p, i=i: p.next_carry[i], stops[b] - 1, b) for b in range(batch)]
        latest = each[longest]  # what environments share goes on until the last of them ends
        final.append(latest if whole.shared[i] or domain.batch is None else stacked(each))
    lengths = jnp.asarray(stops if domain.batch is not None else stops[0], jnp.int32) if domain.until else None
    aux = []
    for i, mark in enumerate(marks(whole.trees["aux"])):
        leaf = _collect(run, out, whole, i, mark is not None)
        aux.append(leaf if mark is None else mark.kept_of(leaf, lengths))
    out_carry = rewrap_shared(tree.tree_unflatten(whole.trees["carry"], final), carry)
    out_aux = unmarked(tree.tree_unflatten(whole.trees["aux"], aux))
    extra = () if lengths is None else (lengths,)
    if whole.loss is None:
        return out_carry, out_aux, *extra
    return losses, (out_carry, out_aux, *extra)


def _stops(evaluation: Callable[[list[int]], Evaluation], domain: Domain) -> list[int]:
    """How many timesteps each environment has.

    A carry may read a sum over the environments that have not ended, so the ends are found in the order of time: what
    comes before a timestep needs only the ends before it, and for the others any bound will do.
    """
    batch = domain.batch or 1
    going = set(range(batch))
    run = evaluation([domain.length] * batch)
    for t in range(1, domain.length):
        ended = {b for b in going if int(run.value(run.at(t, b).program.ends, t, b)) < t}
        if ended:
            going -= ended
            run = evaluation([t - 1 if b in ended else n for b, n in enumerate(run.stops)])
    stops = list(run.stops)
    for b in going:
        last = run.at(domain.length - 1, b).program
        stops[b] = int(run.value(last.definitions()[last.ends].source, domain.length - 1, b))
    return stops


def _collect(run: Evaluation, out: Callable[..., Any], whole: Program, i: int, all_axes: bool) -> Any:
    """One leaf of aux with the axes of its domain; zeros after an environment's end."""
    dims = whole.aux_dims[i]
    batched = whole.domain.batch is not None
    if whole.loss is None or all_axes:
        dims = frozenset("tb" if batched else "t")
    envs = range(run.batch) if "b" in dims or whole.domain.until else (0,)

    def column(b: int) -> Any:
        if "t" not in dims:
            return out(lambda p: p.aux[i], 0, b)
        rows = [out(lambda p: p.aux[i], t, b) for t in range(run.stops[b])]
        rows += [jnp.zeros_like(rows[0])] * (run.domain.length - len(rows))
        return stacked(rows)

    columns = [column(b) for b in envs]
    if not batched or ("b" not in dims and not ("t" in dims and whole.domain.until)):
        return columns[0]
    return jnp.stack(columns, axis=1 if "t" in dims else 0)
