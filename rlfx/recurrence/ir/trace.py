"""From a per-timestep Python function to a :class:`Program`: trace once, per environment, and flatten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ProgramError, UnsupportedSliceOp, located
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.behind import with_values_behind
from rlfx.recurrence.ir.flatten import Flattener
from rlfx.recurrence.ir.program import NO_DIMS, Atom, Equation, Lit, Program, Var, infer_dims
from rlfx.recurrence.ir.provenance import check_times, known_values
from rlfx.recurrence.ir.returned import as_returned, check_carry, check_histories, check_loss, split_result, stop_of
from rlfx.recurrence.language.context import Context
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.effects import SCOPE, effect_p, together
from rlfx.recurrence.language.explained import explained
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.language.primitives import across_p, inputs_p, now_p, read_p, reduce_p, series_p, whole_p
from rlfx.recurrence.language.reductions import Shared
from rlfx.recurrence.language.time import Time, without_time

tree = jax.tree_util


@dataclass(frozen=True)
class Signature:
    """What a program is traced for: the domain, and the flat avals and trees of its arguments."""

    domain: Domain
    has_loss: bool
    params_tree: Any
    carry_tree: Any  # without Shared wrappers
    shared: tuple[bool, ...]
    reduce: str = "mean"
    until: Callable | None = None


def unwrap_shared(carry: Any) -> tuple[Any, tuple[bool, ...]]:
    """The carry without its Shared wrappers, and for each leaf whether it was shared."""
    is_shared = lambda x: isinstance(x, Shared)  # noqa: E731
    bare = tree.tree_map(lambda x: x.value if is_shared(x) else x, carry, is_leaf=is_shared)
    flags: list[bool] = []
    for node in tree.tree_leaves(carry, is_leaf=is_shared):
        flags += [is_shared(node)] * (len(tree.tree_leaves(node.value)) if is_shared(node) else 1)
    return bare, tuple(flags)


def rewrap_shared(bare: Any, like: Any) -> Any:
    """``bare`` with the Shared wrappers of ``like``."""
    is_shared = lambda x: isinstance(x, Shared)  # noqa: E731
    outer = tree.tree_structure(like, is_leaf=is_shared)
    parts = outer.flatten_up_to(_same_outer(bare, like))
    nodes = tree.tree_leaves(like, is_leaf=is_shared)
    return tree.tree_unflatten(outer, [Shared(p) if is_shared(n) else p for p, n in zip(parts, nodes, strict=True)])


def _same_outer(bare: Any, like: Any) -> Any:
    return tree.tree_unflatten(tree.tree_structure(unwrap_shared(like)[0]), tree.tree_leaves(bare))


def trace_program(f: Callable, sig: Signature, avals: Sequence, key_aval: Any, *, name: str | None = None) -> Program:
    """Trace ``f(params, carry, t)`` at one point of the domain and flatten it to equations.

    Args:
      avals: shapes and dtypes of the flat params and the flat carry, the carry's without their [B] axis.
      key_aval: that of a typed key, or None.

    Raises:
      ProgramError: if f's results do not have the form of a program; see its subclasses.
    """
    n_params, n_carry = sig.params_tree.num_leaves, sig.carry_tree.num_leaves
    out: dict[str, Any] = {"where": J.function_source(f)}
    frame = J.here()

    def flat(*args):
        params = tree.tree_unflatten(sig.params_tree, args[:n_params])
        own = args[n_params : n_params + n_carry]
        given = tree.tree_unflatten(sig.carry_tree, own)
        carry = tree.tree_unflatten(sig.carry_tree, own)  # which f may change in place
        key, b = (args[-2] if key_aval is not None else None), args[-1]
        t = Time(now_p.bind(), TIME, Context(sig.domain, key, b))
        if sig.domain.crossing is not None:
            sig.domain.crossing.begin()
        result = without_time(f(params, carry, t))
        if sig.domain.crossing is not None:
            sig.domain.crossing.end()
        loss, next_carry, aux = split_result(result, sig.has_loss, f)
        next_carry = unwrap_shared(next_carry)[0]
        leaves = check_carry(given, next_carry, f)
        stop = [stop_of(sig.until, sig.carry_tree, leaves)] if sig.until else []
        aux_leaves, aux_tree = tree.tree_flatten(aux)
        out.update(aux_tree=aux_tree, n_aux=len(aux_leaves))
        flat_loss = [check_loss(loss, f)] if sig.has_loss else []
        return [*flat_loss, *leaves, *(as_returned(leaf, f) for leaf in aux_leaves), *stop]

    _refuse_ragged(avals, out["where"])
    index = jax.ShapeDtypeStruct((), jnp.int32)
    structs = [*avals, *([] if key_aval is None else [key_aval]), index]
    try:
        jaxpr, consts = J.make_jaxpr(flat, axes=sig.domain.axes(getattr(f, "__name__", "program")))(*structs)
    except Exception as error:
        ours = explained(error, frame)
        if ours is error:
            raise
        raise ours from error
    _refuse_ragged(consts, out["where"])
    begins, ends = jaxpr.invars[n_params:], jaxpr.outvars[int(sig.has_loss) :]
    check_histories(sig.carry_tree, jaxpr, begins[:n_carry], ends[:n_carry])
    return _assemble(name or getattr(f, "__name__", "program"), sig, jaxpr, consts, out, key_aval is not None)


def _refuse_ragged(arrays: Sequence, where: str) -> None:
    if any(J.symbolic_axes(jnp.shape(x)) for x in arrays):
        raise UnsupportedSliceOp(
            located(
                "A slice whose length depends on the time of an enclosing program is used in a program called inside of it.",
                where=where,
                fix="Reduce it before the inner program, or give that a window of fixed length: x.window(lo, hi, fill=v).",
            )
        )


def _assemble(name: str, sig: Signature, jaxpr: Any, consts: list, out: dict, has_key: bool) -> Program:
    n_params, n_carry = sig.params_tree.num_leaves, sig.carry_tree.num_leaves
    flat = Flattener(now=Var(0, (), jnp.dtype("int32")))
    next(flat.ids)
    const_vars = tuple(flat.var(v.aval) for v in jaxpr.constvars)
    args = [flat.var(v.aval) for v in jaxpr.invars]
    params, carry0 = tuple(args[:n_params]), tuple(args[n_params : n_params + n_carry])
    key, b = (args[-2] if has_key else None), args[-1]

    # The carry is a series like any other: carry[t] is what the program returned at t - 1, and the argument at t = 0.
    carried = [flat.var(v.aval) for v in jaxpr.invars[n_params : n_params + n_carry]]
    outputs = flat.run(jaxpr, const_vars, [*params, *carried, *args[n_params + n_carry :]])
    has_loss = int(sig.has_loss)
    loss = outputs[0] if sig.has_loss else None
    next_carry = outputs[has_loss : has_loss + n_carry]
    aux = tuple(outputs[has_loss + n_carry : has_loss + n_carry + out["n_aux"]])
    if isinstance(loss, Var) and loss in aux:  # one is a mean, the other a value at every point
        (loss,) = flat.emit(series_p, {}, [loss], [_aval_of(loss)])
    ends = alive = None
    if sig.until is not None:
        next_carry, ends, alive = _freeze(flat, carried, next_carry, outputs[-1], sig)
    _put_in_order(flat, alive, sig.domain)
    named = [flat.emit(series_p, {}, [v], [_aval_of(c)])[0] for v, c in zip(next_carry, carried, strict=True)]
    first = [
        Equation(read_p, _previous, (source, start), (var,), "carry")
        for source, start, var in zip(named, carry0, carried, strict=True)
    ]
    batch = {"b"} if sig.domain.batch is not None else set()
    given = {v: frozenset() for v in (*params, *const_vars)}
    given |= {v: frozenset() if s else frozenset(batch) for v, s in zip(carry0, sig.shared, strict=True)}
    given |= {flat.now: frozenset("t"), b: frozenset(batch)}
    if key is not None:
        given[key] = frozenset()
    written = (*first, *flat.tied())
    behind = with_values_behind(written, flat.now, sig.domain, lambda: infer_dims(written, given, alive), flat.var)
    equations = tuple(_within_reach(e, sig.domain) for e in behind)
    _check_lengths(equations)
    dims = infer_dims(equations, given, alive)
    _check_inputs(equations, dims)
    _check_closures(equations, dims)
    known = {v for v, known in zip(const_vars, known_values(consts), strict=True) if known}
    check_times(equations, flat.events, {flat.now, *known})
    _check_shared(equations, named, sig, dims, out["where"])
    return Program(
        name=name,
        domain=sig.domain,
        equations=equations,
        params=params,
        consts=const_vars,
        carry=carry0,
        key=key,
        now=flat.now,
        b=b,
        loss=loss,
        next_carry=tuple(named),
        aux=aux,
        dims=dims,
        shared=sig.shared,
        aux_dims=tuple(dims.get(v, NO_DIMS) if isinstance(v, Var) else NO_DIMS for v in aux),
        ends=ends,
        alive=alive,
        reduce=sig.reduce,
        const_values=tuple(consts),
        where=out["where"],
        trees={"params": sig.params_tree, "carry": sig.carry_tree, "aux": out["aux_tree"]},
    )


_previous = {"access": Point(TIME - 1), "size": None, "start": True, "end": False}


def _within_reach(equation: Equation, domain: Domain) -> Equation:
    """The read without a boundary value that no timestep reads: nothing depends on that."""
    if not equation.is_read or (equation.start is None and equation.end is None):
        return equation
    found = reach_in(equation.access, domain)
    start = equation.start if found.before_start else None
    end = equation.end if found.after_end else None
    params = {**equation.params, "start": start is not None, "end": end is not None}
    kept = (a for a in (start, end) if a is not None)
    return replace(equation, params=params, inputs=(equation.source, *kept))


def _aval_of(var: Var) -> Any:
    return J.ShapedArray(var.shape, var.dtype)


def _freeze(flat: Flattener, carried: list, proposed: list, stop: Atom, sig: Signature) -> tuple[list[Atom], Var, Var]:
    """Under ``until=``: an environment that has stopped keeps its carry, and counts its own timesteps.

    What all environments share is kept when the last of them has stopped.
    """
    boolean, int32 = J.ShapedArray((), jnp.dtype("bool")), J.ShapedArray((), jnp.dtype("int32"))
    alive, count = flat.var(boolean), flat.var(int32)

    def emit(op: str, inputs: list, aval: Any, **params) -> Var:
        return flat.emit(J.primitive(op), params, inputs, [aval])[0]

    any_alive = alive
    if any(sig.shared) and sig.domain.batch is not None:
        (any_alive,) = flat.emit(reduce_p, {"op": "max", "over": ("b",)}, [alive], [boolean])
    frozen: list[Atom] = []
    for old, new, is_shared in zip(carried, proposed, sig.shared, strict=True):
        frozen.append(emit("select_n", [any_alive if is_shared else alive, old, new], _aval_of(old)))
    goes_on = emit("and", [alive, emit("not", [stop], boolean)], boolean)
    as_int = emit("convert_element_type", [alive], int32, new_dtype=np.dtype("int32"), weak_type=False, sharding=None)
    counted = emit("add", [count, as_int], int32)
    for var, following, at_start in ((alive, goes_on, True), (count, counted, 0)):
        (named,) = flat.emit(series_p, {}, [following], [_aval_of(var)])
        value = np.asarray(at_start, var.dtype)
        flat.equations.insert(
            0, Equation(read_p, _previous, (named, Lit(value)), (var,), "until")
        )  # a read may look ahead
    return frozen, count, alive


def _put_in_order(flat: Flattener, alive: Var | None, domain: Domain) -> None:
    """The effects of a timestep become one equation, which reads what it gave one timestep before."""
    effects = [e for e in flat.equations if e.op is effect_p]
    if not effects:
        return
    flat.equations[:] = [e for e in flat.equations if e.op is not effect_p]
    int32, going = J.ShapedArray((), jnp.dtype("int32")), Lit(np.bool_(True)) if alive is None else alive
    order, leaves = flat.var(int32), [v for e in effects for v in e.inputs]
    operands, lead = [going, *leaves], () if domain.batch is None else (domain.batch,)
    structs = [jax.ShapeDtypeStruct((*lead, *jnp.shape(_value_of(v))), _value_of(v).dtype) for v in operands]
    calls = partial(together, [e.params for e in effects])
    jaxpr, consts = J.make_jaxpr(calls)(*(jax.ShapeDtypeStruct((), jnp.int32) for _ in range(2)), *structs)
    given, args, where = [Lit(c) for c in consts], [order, flat.now, *operands], effects[0].where
    if lead:
        params = {"jaxpr": J.lift_consts(jaxpr), "num_consts": len(given) + 2}
        (after,) = flat.emit(whole_p, params, [*given, *args], [int32], where, SCOPE, True)
    else:
        (after,) = flat.run(jaxpr, given, args, where)
    (named,) = flat.emit(series_p, {}, [after], [int32])
    flat.equations.insert(0, Equation(read_p, _previous, (named, Lit(np.int32(0))), (order,), "rlfx.effect"))


def _value_of(atom: Atom) -> Any:
    return atom.value if isinstance(atom, Lit) else atom


def _check_lengths(equations: Sequence[Equation]) -> None:
    """A value whose length depends on t has another length at every other timestep: no equation may put them together."""
    for e in equations:
        elsewhere = e.op in (reduce_p, whole_p, across_p) or (e.is_read and e.access != Point(TIME))
        if elsewhere and any(J.symbolic_axes(v.shape) for v in e.inputs):
            what = f"A read [{e.access}]" if e.is_read else f"rlfx.{e.params.get('op', e.op.name)}"
            raise UnsupportedSliceOp(
                located(
                    f"{what} of a value whose length depends on t: at another timestep or in another environment it has "
                    "another length.",
                    where=e.where,
                    fix="Reduce the slice first, rlfx.series(x[:t + 1].sum()), or take a window of fixed length, "
                    "x.window(lo, hi, fill=v).",
                )
            )


def _check_inputs(equations, dims: dict) -> None:
    for e in equations:
        if e.op is inputs_p and isinstance(e.inputs[0], Var) and dims[e.inputs[0]]:
            raise DomainError(
                located(
                    "rlfx.inputs takes data that are there before the program starts; this value varies with the timestep or "
                    "the environment.",
                    where=e.where,
                    fix="Give the data through params, or close over them; name a computed value with rlfx.series.",
                )
            )


def _check_closures(equations, dims: dict) -> None:
    for e in equations:
        closed_over = e.inputs[: e.params["num_consts"]] if e.op is whole_p else ()
        if any("b" in dims[v] for v in closed_over if isinstance(v, Var)):
            raise ProgramError(
                located(
                    "The function given to rlfx.shared is called once for all environments, but closes over a value of one "
                    "of them.",
                    where=e.where,
                    fix="Give it as an argument, rlfx.shared(lambda a, c: ..., a, c): arguments have all environments.",
                )
            )


def _check_shared(equations, named: list[Var], sig: Signature, dims: dict, where: str) -> None:
    for path_and_leaf, var, is_shared in zip(
        tree.tree_flatten_with_path(tree.tree_unflatten(sig.carry_tree, list(range(len(named)))))[0],
        named,
        sig.shared,
        strict=True,
    ):
        if is_shared and "b" in dims[var]:
            definitions = {v: e for e in equations for v in e.outputs}
            culprit = _first_varying(var, definitions, dims)
            raise ProgramError(
                located(
                    f"carry{tree.keystr(path_and_leaf[0])} is Shared by all environments, but its next value varies with "
                    "the environment.",
                    where=where if culprit.where == "carry" else culprit.where,
                    fix='Reduce it over the batch, rlfx.mean(x, over="b"), or compute it once with rlfx.shared(fn, ...).',
                )
            )


def _first_varying(var: Var, definitions: dict, dims: dict) -> Equation:
    """The user's last equation on the way to ``var`` that brings in the environment."""
    equation = definitions[var]
    # Through names, and what stops the carry when environments end.
    while (equation.op is series_p or not equation.where) and equation.inputs[-1] in definitions:
        equation = definitions[equation.inputs[-1]]
    return equation
