"""Branches and loops of a scalar program: selections, and iterations unrolled where they are few."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.scalarize import Interpreter, array_of, boxed, is_known, map_any, tidy, unsupported


def cond(ip: Interpreter, eqn: Any, args: list) -> list:
    """Every branch, then a selection; one branch, where the index is known."""
    index, branches = ip.elements(args[0])[()], [J.body_of(b) for b in eqn.params["branches"]]
    if isinstance(index, np.generic):
        return ip.run(*branches[min(max(int(index), 0), len(branches) - 1)], args[1:])
    outs = [[ip.elements(x) for x in ip.run(*b, args[1:])] for b in branches]
    chosen = outs[-1]
    for i in reversed(range(len(branches) - 1)):
        here = ip.equals(index, i) if i else ip.apply(lambda x: x <= 0, index)
        chosen = [
            map_any(ip, lambda a, b, here=here: ip.select(here, a, b), [x, y], v.aval)
            for x, y, v in zip(outs[i], chosen, eqn.outvars, strict=True)
        ]
    return chosen


def scan(ip: Interpreter, eqn: Any, args: list) -> list:
    """Unrolled where it is short; else a loop over the elements of its carry."""
    q = eqn.params
    jaxpr, consts_of = J.body_of(q["jaxpr"])
    n_consts, n_carry = J.scan_counts(q)
    consts, carry, xs = _split_at(args, n_consts, n_carry)
    if not xs and len(eqn.outvars) == n_carry and q["length"] > ip.target.loop:
        return _loop(ip, eqn, lambda c: ip.run(jaxpr, consts_of, [*consts, *c]), carry)
    if q["length"] > 64:
        raise unsupported(eqn, f"runs {q['length']} iterations with inputs or outputs of their own")
    xs, ys = [ip.elements(x) for x in xs], []
    order = range(q["length"])
    for i in reversed(order) if q["reverse"] else order:
        out = ip.run(jaxpr, consts_of, [*consts, *carry, *[_row(x, i) for x in xs]])
        carry, y = out[:n_carry], out[n_carry:]
        ys.append([ip.elements(v) for v in y])
    ys = ys[::-1] if q["reverse"] else ys
    stacked = (
        [np.stack([boxed(y) for y in column]) for column in zip(*ys, strict=True)]
        if ys
        else [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[n_carry:]]
    )
    return [*carry, *[tidy(y, v.aval) for y, v in zip(stacked, eqn.outvars[n_carry:], strict=True)]]


def _row(x: np.ndarray, i: int) -> np.ndarray:
    row = x[i]
    return row if isinstance(row, np.ndarray) else array_of([row], ()) if x.dtype == object else np.asarray(row)


def _split_at(args: list, *sizes: int) -> list[list]:
    bounds = list(itertools.accumulate(sizes, initial=0))
    return [*[args[a:b] for a, b in itertools.pairwise(bounds)], args[bounds[-1] :]]


def _loop(ip: Interpreter, eqn: Any, body: Any, carry: list) -> list:
    arrays = [ip.elements(x) for x in carry]
    layout = [(x.shape, v.aval) for x, v in zip(arrays, eqn.outvars, strict=True)]

    def pack(xs):
        return [
            ip.full(e)
            for x in xs
            for key in ip.elements(x).reshape(-1)
            for e in (key if isinstance(key, tuple) else (key,))
        ]

    def unpack(flat):
        out, flat = [], iter(flat)
        for shape, aval in layout:
            words = math.prod(F.key_shape(aval)) if J.is_key(aval) else 0
            take = [tuple(next(flat) for _ in range(words)) if words else next(flat) for _ in range(math.prod(shape))]
            out.append(array_of(take, shape))
        return out

    return unpack(jax.lax.fori_loop(0, eqn.params["length"], lambda _, c: pack(body(unpack(c))), pack(arrays)))


def while_loop(ip: Interpreter, eqn: Any, args: list) -> list:
    """Unrolled, where whether to go on is known at trace time."""
    q = eqn.params
    (test, test_consts), (body, body_consts) = J.body_of(q["cond_jaxpr"]), J.body_of(q["body_jaxpr"])
    of_test, of_body, carry = _split_at(args, q["cond_nconsts"], q["body_nconsts"])
    for _ in range(257):
        go_on = ip.run(test, test_consts, [*of_test, *carry])[0]
        if not is_known(go_on):
            raise unsupported(eqn, "runs until a condition on data")
        if not go_on[()]:
            return carry
        carry = ip.run(body, body_consts, [*of_body, *carry])
    raise unsupported(eqn, "runs more than 256 iterations")


#: As :data:`rlfx.transforms.steps.rules.RULES`.
CONTROL_RULES: dict[Any, Any] = {
    J.primitive("cond"): cond,
    J.primitive("scan"): scan,
    J.primitive("while"): while_loop,
}
