"""The meaning of a program: its equations evaluated point by point on demand, with memoisation, in plain eager JAX.

Slow and obvious on purpose: no scheduling, no masks, no symbolic lengths (the function is traced again at every concrete
timestep). Every compiled program is tested against it, values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import CausalityError, located
from rlfx.recurrence.access import reach_in
from rlfx.recurrence.arguments import check_arguments, validate_domain
from rlfx.recurrence.check import check
from rlfx.recurrence.domain import Domain
from rlfx.recurrence.index import Lookup, Point, Slice
from rlfx.recurrence.primitives import across_p, discounted_sum_p, inputs_p, read_p, reduce_p, series_p, whole_p
from rlfx.recurrence.program import Atom, Equation, Lit, Program, Var
from rlfx.recurrence.trace import Signature, rewrap_shared, trace_program, unwrap_shared

tree = jax.tree_util

#: Equations that are matched between the programs of different timesteps, by their order among their kind.
_MATCHED = (series_p, read_p, reduce_p, whole_p, across_p)


@dataclass(frozen=True, eq=False)
class _AtPoint:
    """A program at one concrete timestep of an environment with ``stop`` timesteps, with its equations indexed."""

    program: Program
    definition: dict[Var, tuple[Equation, int]] = field(init=False)
    ordinal: dict[Equation, tuple[Any, int]] = field(init=False)
    matched: dict[tuple[Any, int], Equation] = field(init=False)

    def __post_init__(self):
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_("definition", {v: (e, i) for e in self.program.equations for i, v in enumerate(e.outputs)})
        counts = dict.fromkeys(_MATCHED, 0)
        ordinal = {}
        for e in self.program.equations:
            if e.op in counts:
                ordinal[e] = (e.op, counts[e.op])
                counts[e.op] += 1
        set_("ordinal", ordinal)
        set_("matched", {k: e for e, k in ordinal.items()})


# A demand is (position in `program_at`, variable, t, b).
@dataclass(eq=False)
class _Evaluation:
    program_at: Callable[[int, int], _AtPoint]
    domain: Domain
    batch: int
    inputs: Callable[[Var, Program, int, int], Any]
    stops: list[int]
    memo: dict = field(default_factory=dict)

    def at(self, t: int, b: int) -> _AtPoint:
        stop = self.stops[b]
        return self.program_at(min(t, stop - 1), stop)

    def value(self, atom: Atom, t: int, b: int) -> Any:
        """The value at a point; everything it needs is evaluated first, without recursion."""
        if isinstance(atom, Lit):
            return atom.value
        stack, open_ = [(atom, t, b)], set()
        while stack:
            key = stack[-1]
            if key in self.memo:
                stack.pop()
                continue
            missing = [k for k in self._needs(*key) if not isinstance(k[0], Lit) and k not in self.memo]
            if missing:
                if any(k in open_ for k in missing):
                    raise CausalityError(
                        located(
                            f"The value at t = {key[1]} depends on itself.",
                            fix="Read a strictly earlier or later timestep.",
                        )
                    )
                open_.add(key)
                stack += missing
                continue
            self.memo[key] = self._compute(*key)
            open_.discard(key)
            stack.pop()
        return self.memo[atom, t, b]

    def _get(self, atom: Atom, t: int, b: int) -> Any:
        return atom.value if isinstance(atom, Lit) else self.memo[atom, t, b]

    # -- what a point needs

    def _needs(self, var: Var, t: int, b: int) -> list[tuple]:
        here = self.at(t, b)
        if var not in here.definition:
            return []
        equation, _ = here.definition[var]
        return self._points(equation, here, t, b)

    def _points(self, e: Equation, here: _AtPoint, t: int, b: int) -> list[tuple]:
        if e.op is reduce_p:
            return [(self._twin(e, here, s, c).inputs[0], s, c) for s, c in self._reduced(e, t, b)]
        if e.op is whole_p:
            n = e.params["num_consts"]
            consts = [(a, t, b) for a in e.inputs[:n]]
            return consts + [(a, t, c) for c in range(self.batch) for a in self._twin(e, here, t, c).inputs[n:]]
        if e.op is across_p:
            everyone = [(self._twin(e, here, t, c).inputs[0], t, c) for c in range(self.batch)]
            return everyone + [(a, t, b) for a in e.inputs[1:]]
        if not e.is_read:
            return [(a, t, b) for a in e.inputs]
        if isinstance(e.access, Lookup):
            keys = [(a, t, b) for a in e.inputs[1:]]
            if all(isinstance(a, Lit) or (a, t, b) in self.memo for a in e.inputs[1:]):
                keys += [self._read_key(e, here, s, c) for s, c in self._looked_up(e, t, b).reshape(-1, 2)]
            return keys
        if isinstance(e.access, Point):
            return [self._point_key(e, here, t, b)]
        keys = [self._read_key(e, here, s, b) for s in self._positions(e, t, b) if 0 <= s < self.stops[b]]
        return keys + [(a, t, b) for a in e.inputs[1:]]

    def _reduced(self, e: Equation, t: int, b: int) -> list[tuple[int, int]]:
        over = e.params["over"]
        if e.params["op"] == "last":
            return [(self.stops[b] - 1, b)]
        envs = range(self.batch) if "b" in over else (b,)
        return [(s, c) for c in envs for s in (range(self.stops[c]) if "t" in over else (t,)) if s < self.stops[c]]

    def _twin(self, e: Equation, here: _AtPoint, t: int, b: int) -> Equation:
        """The same equation of the program at another point."""
        return self.at(t, b).matched[here.ordinal[e]]

    def _read_key(self, e: Equation, here: _AtPoint, s: int, b: int) -> tuple:
        source = here.definition[e.source][0]
        return self._twin(source, here, int(s), int(b)).outputs[0], int(s), int(b)

    def _point_key(self, e: Equation, here: _AtPoint, t: int, b: int) -> tuple:
        stop = self.stops[b]
        s = int(e.access.index.evaluate(t, stop, low=min, high=max))
        if s < 0:
            return self._twin(e, here, 0, b).start, 0, b
        if s < stop or not self._ahead(e.access):  # after its end an environment sees what it saw before
            return self._read_key(e, here, s, b)
        last = self._twin(e, here, stop - 1, b)
        if last.end is not None:
            return last.end, stop - 1, b
        return last.source, stop, b  # demand extension: its equation at t = T

    def _ahead(self, access: Point) -> bool:
        found = reach_in(access, self.domain)
        return found.future or found.after_end

    def _positions(self, e: Equation, t: int, b: int) -> Iterable[int]:
        if isinstance(e.access, Slice):
            stop = self.stops[b]
            lo, hi = (int(i.evaluate(t, stop, low=min, high=max)) for i in (e.access.first, e.access.stop))
            return range(lo, hi)
        return range(t + e.access.lo, t + e.access.hi)

    def _looked_up(self, e: Equation, t: int, b: int) -> np.ndarray:
        i = np.clip(np.asarray(self._get(e.inputs[1], t, b)) - self.inputs_t0, 0, t)
        other = np.asarray(self._get(e.inputs[2], t, b)) if e.access.across_batch else np.full_like(i, b)
        return np.stack([i, np.clip(other, 0, self.batch - 1)], -1)

    inputs_t0: int = 0

    # -- its value

    def _compute(self, var: Var, t: int, b: int) -> Any:
        here = self.at(t, b)
        if var not in here.definition:
            return self.inputs(var, here.program, t, b)
        e, which = here.definition[var]
        return self._outputs(e, here, t, b)[which]

    def _outputs(self, e: Equation, here: _AtPoint, t: int, b: int) -> Sequence[Any]:
        if e.op is reduce_p:
            points = jnp.stack([jnp.asarray(self._get(*k)) for k in self._points(e, here, t, b)])
            op = e.params["op"]
            return [points[-1] if op == "last" else getattr(jnp, op)(points, axis=0).astype(points.dtype)]
        if e.op is whole_p:
            n = e.params["num_consts"]
            args = [self._get(a, t, b) for a in e.inputs[:n]]
            for i in range(n, len(e.inputs)):
                args.append(
                    jnp.stack(
                        [jnp.asarray(self._get(self._twin(e, here, t, c).inputs[i], t, c)) for c in range(self.batch)]
                    )
                )
            closed = e.params["jaxpr"]
            return J.jaxpr_as_fun(closed.jaxpr, closed.consts)(*args)
        if e.op is across_p:
            data = jnp.stack([self._get(self._twin(e, here, t, c).inputs[0], t, c) for c in range(self.batch)])
            return [data[jnp.asarray(self._get(e.inputs[2], t, b)), jnp.asarray(self._get(e.inputs[1], t, b))]]
        if e.is_read:
            return [self._read(e, here, t, b)]
        operands = [jnp.asarray(self._get(a, t, b)) for a in e.inputs]
        if e.op is series_p:
            return operands
        if e.op is discounted_sum_p:
            return [_discounted(*operands)]
        if e.op is inputs_p:
            index = {"t": t, "b": b}
            return [operands[0][tuple(index[a] for a in e.params["axes"])]]
        return J.bind(e.op, dict(e.params), *operands)

    def _read(self, e: Equation, here: _AtPoint, t: int, b: int) -> Any:
        if isinstance(e.access, Point):
            return jnp.asarray(self._get(*self._point_key(e, here, t, b)))
        if isinstance(e.access, Lookup):
            points = self._looked_up(e, t, b)
            found = [self._get(*self._read_key(e, here, s, c)) for s, c in points.reshape(-1, 2)]
            return jnp.stack(found).reshape(*points.shape[:-1], *e.outputs[0].shape[points.ndim - 1 :])
        rows = []
        for s in self._positions(e, t, b):
            inside = 0 <= s < self.stops[b]
            rows.append(self._get(*self._read_key(e, here, s, b)) if inside else self._get(e.inputs[1], t, b))
        out = e.outputs[0]
        return jnp.stack([jnp.asarray(r) for r in rows]) if rows else jnp.zeros((0, *out.shape[1:]), out.dtype)


def _discounted(rewards: Any, discounts: Any) -> Any:
    total = jnp.zeros(rewards.shape[1:], rewards.dtype)
    weight = jnp.ones_like(total)
    for k in range(rewards.shape[0]):
        total, weight = total + weight * rewards[k], weight * discounts[k]
    return total


# -- the public function ---------------------------------------------------------------------------------------------


def reference(
    f: Callable | Program,
    *,
    length: int | None = None,
    batch: int | None = None,
    reduce: str = "mean",
    until: Callable | None = None,
    loss: bool | None = None,
) -> Callable:
    """The reference interpreter of a per-timestep function or a Program: the meaning that every plan must have.

    Args:
      f: a per-timestep function, or a traced Program (then the other arguments are the program's own).
      length, batch, reduce, until: as for :func:`compile`.
      loss: whether f returns a loss, as for :func:`compile` (the default), or is unrolled, as for :func:`unroll`.

    Returns:
      A function with the arguments and results of the compiled one. It runs eagerly, differentiates under ``jax.grad``,
      and takes time and memory in proportion to T * B * equations.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def total(xs, carry, t):
      ...     return carry, rlfx.inputs(xs)[t:].sum()
      >>> rlfx.reference(total, length=3, loss=False)(jnp.array([1.0, 2.0, 3.0]), None)[1]
      Array([6., 5., 3.], dtype=float32)
    """
    if isinstance(f, Program):
        return _of_program(f)
    domain = validate_domain(length, batch, until)

    def run(params: Any, carry: Any, key: Any = None, *, t0: int = 0) -> Any:
        arguments = check_arguments(params, carry, key, domain)
        bare, shared = unwrap_shared(carry)
        has_loss = loss is not False

        def trace(d: Domain) -> Program:
            trees = tree.tree_structure(params), tree.tree_structure(bare)
            sig = Signature(d, has_loss, *trees, shared, reduce, until)
            return trace_program(f, sig, arguments.point_avals, arguments.key_aval)

        whole = check(trace(domain))

        def program_at(t: int, stop: int) -> Program:
            return trace(Domain(domain.length, domain.batch, domain.until, t, stop))

        return _run(whole, program_at, arguments, carry, t0)

    return run


def _of_program(program: Program) -> Callable:
    def run(params: Any, carry: Any, key: Any = None, *, t0: int = 0) -> Any:
        arguments = check_arguments(params, carry, key, program.domain)
        return _run(program, lambda t, stop: concretize(program, t, stop), arguments, carry, t0)

    return run


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
        return Equation(e.op, params, tuple(map(var, e.inputs)), tuple(map(var, e.outputs)), e.where, e.scope)

    many = lambda vs: tuple(map(var, vs))  # noqa: E731
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


def _run(whole: Program, program_at: Callable[[int, int], Program], arguments: Any, carry: Any, t0: int) -> Any:
    domain, batch = whole.domain, whole.domain.batch or 1
    cache: dict[tuple[int, int], _AtPoint] = {}

    def at(t: int, stop: int) -> _AtPoint:
        if (t, stop) not in cache:
            cache[t, stop] = _AtPoint(program_at(t, stop))
        return cache[t, stop]

    def given(var: Var, program: Program, t: int, b: int) -> Any:
        groups = ((program.params, arguments.params), (program.consts, program.const_values))
        for variables, values in groups:
            if var in variables:
                return values[variables.index(var)]
        if var in program.carry:
            i = program.carry.index(var)
            return arguments.carry[i] if whole.shared[i] or domain.batch is None else arguments.carry[i][b]
        if var is program.key:
            return arguments.key
        return jnp.int32(t0 + t) if var is program.now else jnp.int32(b)

    stops = _stops(at, domain, given) if domain.until else [domain.length] * batch
    run = _Evaluation(at, domain, batch, given, stops)
    run.inputs_t0 = int(t0)

    def out(get: Callable[[Program], Atom], t: int, b: int) -> Any:
        return jnp.asarray(run.value(get(run.at(t, b).program), t, b))

    points = [(t, b) for b in range(batch) for t in range(stops[b])]
    losses = None
    if whole.loss is not None:
        losses = jnp.stack([out(lambda p: p.loss, t, b) for t, b in points])
        losses = jnp.mean(losses) if whole.reduce == "mean" else jnp.sum(losses)
    final = []
    for i in range(len(whole.next_carry)):
        each = [out(lambda p, i=i: p.next_carry[i], stops[b] - 1, b) for b in range(batch)]
        final.append(each[0] if whole.shared[i] or domain.batch is None else jnp.stack(each))
    aux = [_collect(run, out, whole, i) for i in range(len(whole.aux))]
    out_carry = rewrap_shared(tree.tree_unflatten(whole.trees["carry"], final), carry)
    out_aux = tree.tree_unflatten(whole.trees["aux"], aux)
    extra = (jnp.asarray(stops if domain.batch is not None else stops[0], jnp.int32),) if domain.until else ()
    if whole.loss is None:
        return out_carry, out_aux, *extra
    return losses, (out_carry, out_aux, *extra)


def _stops(at: Callable, domain: Domain, given: Callable) -> list[int]:
    """How many timesteps each environment has.

    A carry may read a sum over the environments that have not ended, so the ends are found in the order of time: what
    comes before a timestep needs only the ends before it, and for the others any bound will do.
    """
    batch = domain.batch or 1
    going = set(range(batch))
    run = _Evaluation(at, domain, batch, given, [domain.length] * batch)
    for t in range(1, domain.length):
        ended = {b for b in going if int(run.value(run.at(t, b).program.ends, t, b)) < t}
        if ended:
            going -= ended
            run = _Evaluation(at, domain, batch, given, [t - 1 if b in ended else n for b, n in enumerate(run.stops)])
    stops = list(run.stops)
    for b in going:
        last = run.at(domain.length - 1, b).program
        stops[b] = int(run.value(last.definitions()[last.ends].source, domain.length - 1, b))
    return stops


def _collect(run: _Evaluation, out: Callable, whole: Program, i: int) -> Any:
    """One leaf of aux with the axes of its domain; zeros after an environment's end."""
    dims = whole.dims_of(whole.aux[i])
    batched = whole.domain.batch is not None
    if whole.loss is None:
        dims = frozenset("tb" if batched else "t")
    envs = range(run.batch) if "b" in dims or whole.domain.until else (0,)

    def column(b: int) -> Any:
        if "t" not in dims:
            return out(lambda p: p.aux[i], 0, b)
        rows = [out(lambda p: p.aux[i], t, b) for t in range(run.stops[b])]
        rows += [jnp.zeros_like(rows[0])] * (run.domain.length - len(rows))
        return jnp.stack(rows)

    columns = [column(b) for b in envs]
    if not batched or ("b" not in dims and not ("t" in dims and whole.domain.until)):
        return columns[0]
    return jnp.stack(columns, axis=1 if "t" in dims else 0)
