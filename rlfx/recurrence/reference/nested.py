"""A program that is called in one that is interpreted by reference: it is interpreted, too, at each point that calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.check import check
from rlfx.recurrence.execute.outputs import aux_dims
from rlfx.recurrence.ir.arguments import Arguments, check_arguments, validate_start
from rlfx.recurrence.ir.program import Program
from rlfx.recurrence.ir.reasons import trace_arguments
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.kept import Every, Last, marks, unmarked
from rlfx.recurrence.reference.interpreter import run_points, signature_of

tree = jax.tree_util


def interpreted(
    f: Callable, domain: Domain, has_loss: bool, reduce: str, until: Callable | None, prng: Any, given: tuple, t0: Any
) -> Any:
    """What a compiled program gives for ``given``, its params, carry and key, as one equation of the program around it.

    The function is traced here, at every timestep and for every end, since it may close over values of that program; they
    become operands. The points are evaluated when these are known. None: it has reads with two indices, which are noted.
    """
    params, carry, key = given
    arguments = check_arguments(params, carry, key, domain, prng)
    sig = signature_of(domain, has_loss, params, carry, reduce, until)

    if domain.crossing is not None and domain.crossing.operands is None:
        trace_arguments(f, sig, arguments)  # which notes reads with two indices
        if domain.crossing.reads:
            return None

    def traced(**at: Any) -> Program:
        return trace_arguments(f, replace(sig, domain=replace(domain, **at)), arguments)

    length = domain.length
    stops = range(1, length + 1) if domain.until else (length,)
    whole = check(traced())
    points = {(t, stop): traced(at=t, stop=stop) for stop in stops for t in range(stop)}
    operands = [*arguments.params, *arguments.carry, *(() if key is None else (arguments.key,)), validate_start(t0)]
    flat, structure = tree.tree_flatten((operands, {k: p.const_values for k, p in points.items()}))

    def run(*flat: Any) -> list:
        (*own, start), consts = tree.tree_unflatten(structure, flat)
        n = len(arguments.params)
        m = n + len(arguments.carry)
        mine = replace(arguments, params=own[:n], carry=own[n:m], key=own[m] if key is not None else None)
        at = lambda t, stop: replace(points[t, stop], const_values=consts[t, stop])  # noqa: E731
        return tree.tree_leaves(run_points(whole, at, mine, carry, int(start)))

    outs = J.deferred(run, _types(whole, arguments))(*flat)
    return tree.tree_unflatten(_structure(whole, carry), outs)


def _types(program: Program, arguments: Arguments) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the results."""
    domain = program.domain
    sizes = {"t": domain.length, "b": domain.batch}
    out = [] if program.loss is None else [jax.ShapeDtypeStruct((), program.loss.dtype)]
    out += [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in arguments.carry]
    for v, written, mark in zip(program.aux, aux_dims(program), marks(program.trees["aux"]), strict=True):
        dims = written if mark is None else "b" if isinstance(mark, Last) else "tb"
        own = sizes | ({"t": mark.rows(domain.length)} if isinstance(mark, Every) else {})
        lead = tuple(own[d] for d in "tb" if d in dims and own[d] is not None)
        out.append(jax.ShapeDtypeStruct((*lead, *v.shape), v.dtype))
    if domain.until:
        out.append(jax.ShapeDtypeStruct(() if domain.batch is None else (domain.batch,), jnp.int32))
    return out


def _structure(program: Program, carry: Any) -> Any:
    """That of the results, as the interpreter gives them."""
    aux = unmarked(tree.tree_unflatten(program.trees["aux"], program.aux))
    results = (carry, aux, *((0,) if program.domain.until else ()))
    return tree.tree_structure(results if program.loss is None else (0, results))
