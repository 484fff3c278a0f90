"""Rules for loops and branches: their bodies run on blocks, with sums over the batch carried as sums of the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.transforms.blocks.flat import (
    PARTIAL,
    SAME,
    Array,
    Atom,
    Axis,
    Block,
    Blockwise,
    Const,
    Equation,
    Flat,
    Partial,
    Same,
    flatten,
    take,
)
from rlfx.transforms.blocks.rules import RULES, Axes, rule
from rlfx.transforms.blocks.scatter import partial_scatter

Kind = Axis | Partial | None

#: Linear in their only operand.
_LINEAR = frozenset(
    map(
        J.primitive,
        ("neg", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "reduce_sum", "rev", "copy", "cumsum"),
    )
)
_SUMS = frozenset({J.primitive("add"), J.primitive("sub"), J.ADD_ANY})


def _partial_rule(equation: Equation, kinds: Sequence[Kind], n: int, settled: bool) -> Blockwise | None:
    """What is linear in sums over blocks gives sums over blocks."""
    op = equation.op
    run = lambda block, ins: equation.bind(ins)  # noqa: E731
    everything = Blockwise(tuple(kinds), (PARTIAL,) * len(equation.outs), run)
    if op in _LINEAR:
        return everything
    if op is J.primitive("convert_element_type"):
        return everything if jnp.issubdtype(equation.outs[0].aval.dtype, jnp.floating) else None
    if op in _SUMS or op is J.primitive("concatenate"):
        zero = [isinstance(v, Const) and not jnp.any(v.value) for v in equation.ins]
        fits = all(k is PARTIAL or z or (k is None and not settled) for k, z in zip(kinds, zero, strict=True))
        return everything if fits else None
    if op is J.primitive("mul") or op is J.primitive("dot_general"):
        return everything if set(kinds) == {PARTIAL, None} else None
    if op is J.primitive("div"):
        return everything if kinds == [PARTIAL, None] else None
    if op is J.primitive("select_n"):
        return everything if kinds[0] is None and all(k is PARTIAL for k in kinds[1:]) else None
    if op is J.primitive("dynamic_slice"):
        return everything if not any(k is PARTIAL for k in kinds[1:]) else None
    if op is J.primitive("dynamic_update_slice"):
        return everything if kinds[1] is PARTIAL and kinds[0] is PARTIAL else None
    return partial_scatter(equation, kinds, n)


@dataclass(frozen=True)
class Body:
    """A program whose equations all run on one block."""

    flat: Flat
    kinds: dict[Array, Kind]
    rules: dict[Equation, Blockwise]

    def kind(self, atom: Atom) -> Kind:
        return self.kinds.get(atom) if isinstance(atom, Array) else None

    def run(self, block: Block, inputs: Sequence[Any], outs: Sequence[Kind]) -> list:
        """Results in the forms ``outs``."""
        env: dict[Array, Any] = dict(zip(self.flat.inputs, inputs, strict=True))

        def read(atom: Atom, demand: Any) -> Any:
            value = atom.value if isinstance(atom, Const) else env[atom]
            whole = isinstance(demand, Axis) and self.kind(atom) is None
            return take(jnp.asarray(value), demand, block) if whole else value

        for equation in self.flat.equations:
            found = self.rules.get(equation)
            if found is None:
                results = equation.bind([read(v, None) for v in equation.ins])
            else:
                assert found.run is not None
                results = found.run(block, [read(v, d) for v, d in zip(equation.ins, found.demands, strict=True)])
            env.update(zip(equation.outs, results, strict=True))
        return [read(v, kind) for v, kind in zip(self.flat.outputs, outs, strict=True)]


def propagate(flat: Flat, inputs: Sequence[Kind], n: int, settled: bool = True) -> Body | None:
    """Where the batch is in every value of a body; None if an equation needs more than its block.

    Until the forms of a loop's carry have ``settled``, a value without the batch may yet turn out to be a sum over blocks.
    """
    kinds: dict[Array, Kind] = dict(zip(flat.inputs, inputs, strict=True))
    body = Body(flat, kinds, {})
    for equation in flat.equations:
        ins = [body.kind(v) for v in equation.ins]
        if all(kind is None for kind in ins):
            kinds.update(dict.fromkeys(equation.outs))
            continue
        if PARTIAL in ins:
            found = _partial_rule(equation, ins, n, settled)
        else:
            apply = RULES.get(equation.op)
            found = apply(equation, ins, n) if apply is not None else None  # type: ignore[arg-type]
        if found is None or found.fold is not None:
            return None
        if any(kind is not None and kind != demand for kind, demand in zip(ins, found.demands, strict=True)):
            return None
        body.rules[equation] = found
        for value, kind in zip(equation.outs, found.outs, strict=True):
            kinds[value] = None if isinstance(kind, Same) else kind
    return body


def _settle(carried: list[Kind], run: Callable[[list[Kind]], list[Kind] | None]) -> list[Kind] | None:
    """The forms of a loop's carry: the least that the body maps to themselves."""
    while True:
        after = run(carried)
        if after is None:
            return None
        if any(old is not None and new not in (None, old) for old, new in zip(carried, after, strict=True)):
            return None
        if any(old is PARTIAL and new is None for old, new in zip(carried, after, strict=True)):
            return None
        joined = [old if new is None else new for old, new in zip(carried, after, strict=True)]
        if joined == carried:
            return carried
        carried = joined


def _demand(kind: Kind) -> Axis | None:
    return kind if isinstance(kind, Axis) else None


def _first_only(kind: Kind, value: Any, block: Block) -> Any:
    """The start of a sum over blocks counts once."""
    return jnp.where(block.is_first, value, jnp.zeros_like(value)) if kind is PARTIAL else value


def _result(kind: Kind, shift: int) -> Any:
    if isinstance(kind, Axis):
        return kind.at(kind.dim + shift)
    return PARTIAL if kind is PARTIAL else SAME


@rule("scan")
def _scan(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    params = equation.params
    consts, carry = J.scan_counts(params)
    jaxpr, body_consts = J.body_of(params["jaxpr"])
    flat = flatten(jaxpr)
    if any(a is not None and a.dim == 0 for a in axes[consts + carry :]):
        return None
    fixed = [None] * len(body_consts) + list(axes[:consts])
    slices = [None if a is None else a.at(a.dim - 1) for a in axes[consts + carry :]]

    def after(carried: list[Kind]) -> list[Kind] | None:
        body = propagate(flat, [*fixed, *carried, *slices], n, settled=False)
        return None if body is None else [body.kind(v) for v in flat.outputs[:carry]]

    carried = _settle(list(axes[consts : consts + carry]), after)
    body = None if carried is None else propagate(flat, [*fixed, *carried, *slices], n)
    if body is None or carried is None:
        return None
    outs = [*carried, *(body.kind(v) for v in flat.outputs[carry:])]

    def run(block: Block, ins: Sequence) -> list:
        held = [*body_consts, *ins[:consts]]
        init = [_first_only(k, v, block) for k, v in zip(carried, ins[consts : consts + carry], strict=True)]

        def step(state: list, x: list) -> tuple[list, list]:
            results = body.run(block, [*held, *state, *x], outs)
            return [jnp.asarray(r) for r in results[:carry]], results[carry:]

        init = [jnp.asarray(v) for v in init]
        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        state, ys = jax.lax.scan(step, init, list(ins[consts + carry :]), **options)
        return [*state, *ys]

    demands = (*axes[:consts], *map(_demand, carried), *axes[consts + carry :])
    return Blockwise(demands, tuple(_result(k, int(i >= carry)) for i, k in enumerate(outs)), run)


@rule("cond")
def _cond(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    if axes[0] is not None:
        return None
    branches = [J.body_of(b) for b in equation.params["branches"]]
    bodies = [propagate(flatten(j), [None] * len(c) + list(axes[1:]), n) for j, c in branches]
    found = [b for b in bodies if b is not None]
    if len(found) < len(bodies):
        return None
    outs: list[Kind] = []
    for kinds in zip(*([b.kind(v) for v in b.flat.outputs] for b in found), strict=True):
        distinct = set(kinds) - {None}
        if len(distinct) > 1 or (PARTIAL in distinct and None in kinds):
            return None
        outs.append(distinct.pop() if distinct else None)

    def run(block: Block, ins: Sequence) -> list:
        return jax.lax.switch(
            jnp.asarray(ins[0], jnp.int32),
            [
                lambda *ops, body=body, consts=consts: [jnp.asarray(v) for v in body.run(block, [*consts, *ops], outs)]
                for body, (_, consts) in zip(found, branches, strict=True)
            ],
            *ins[1:],
        )

    return Blockwise(tuple(axes), tuple(_result(k, 0) for k in outs), run)
