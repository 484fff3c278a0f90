"""Jaxprs: closing them, their bodies, their dead code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jax._src import core
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr's atom is a literal."""
    return isinstance(atom, core.Literal)


def variables(atoms: Iterable) -> list:
    """Those of a jaxpr's atoms that are no literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def needed(equations: Sequence, wanted: Iterable, known: Collection = (), effects: bool = False) -> list:
    """The equations of a jaxpr that some values depend on, down to what is known, and those with ``effects``; in order."""
    missing, found = set(wanted), []
    for e in reversed(equations):
        if not missing.isdisjoint(e.outvars) or (effects and e.effects):
            found.append(e)
            missing.update(v for v in variables(e.invars) if v not in known)
    return found[::-1]


def closed(value: Any) -> tuple[Any, list] | None:
    """``(jaxpr, consts)`` of a jaxpr-valued parameter, or None if it is none."""
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr, list(value.consts)
    if isinstance(value, core.Jaxpr):
        return value, []
    return None


def body_of(value: Any) -> tuple[Any, list]:
    """``(jaxpr, consts)`` of a parameter that is a jaxpr."""
    pair = closed(value)
    assert pair is not None, f"not a jaxpr: {value!r}"
    return pair


def sub_jaxprs(params: dict) -> list[tuple[Any, list]]:
    """Every jaxpr among an equation's parameters, tuples of jaxprs included."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            pair = closed(item)
            if pair is not None:
                found.append(pair)
    return found


def close_with(jaxpr: Any, consts: Sequence) -> Any:
    """The closed jaxpr of ``jaxpr``."""
    return core.ClosedJaxpr(jaxpr, list(consts))


def lift_consts(jaxpr: Any) -> Any:
    """The closed jaxpr in which the constants of ``jaxpr`` are its first inputs."""
    return core.ClosedJaxpr(partial_eval.convert_constvars_jaxpr(jaxpr), ())


def without_dead_code(jaxpr: Any, used: Sequence[bool] | None = None) -> Any:
    """The closed jaxpr without the equations that no output needs, as XLA will see it; with those outputs that are used."""
    outs = [True] * len(jaxpr.jaxpr.outvars) if used is None else list(used)
    left, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, outs, instantiate=True)
    return core.ClosedJaxpr(left, jaxpr.consts)


def jaxpr_as_fun(jaxpr: Any, consts: Sequence) -> Callable:
    """A jaxpr as a function of its inputs, returning a list."""
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(consts)))


def call_body(primitive: Primitive, params: dict) -> tuple[Any, list]:
    """The body of a call-like equation (jit, custom_jvp, custom_vjp, remat) as ``(jaxpr, consts)``."""
    return sub_jaxprs(params)[0]


def scan_counts(params: dict) -> tuple[int, int]:
    """``(num_consts, num_carry)`` of a scan equation; jax 0.11 keeps them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)
