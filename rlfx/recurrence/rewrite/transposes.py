"""Transposes move behind what acts on elements, until a product or a reduction takes its operand in any order.

``einsum("thw,hw->th", keys, q)`` is a product of each head, ``[h, t]``, that is then turned to ``[t, h]``; the softmax over t and
the product with the values would do as well without. Turned, all scores are written once more forwards and twice backwards,
and reduced along an axis that is not the last. Before and after:

    y = x.T; z = exp(y - max(y, 0)); u = dot(z, v, contracting 0)   ->   z = exp(x - max(x, 1)); u = dot(z, v, contracting 1)

What has more users that need the order of axes than it has transposes stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations

_TRANSPOSE, _DOT, _BROADCAST = (J.primitive(p) for p in ("transpose", "dot_general", "broadcast_in_dim"))

#: What takes its operands in any order, or gives what it would otherwise give in another order.
_MOVED_BY = J.ELEMENTWISE | REDUCTIONS.keys() | {_TRANSPOSE, _DOT}


def absorb_transposes(program: Program) -> Program:
    """Let products and reductions take what each point has in the order in which it is. Meaning-preserving; idempotent.

    All transposes move, or those of them that do so alone, if fewer are left.
    """
    turned = [e.outputs[0] for e in program.equations if e.op is _TRANSPOSE and program.dims_of(e.outputs[0])]
    alone = [v for v in turned if any(e.op in _MOVED_BY for e in program.users.get(v, ()))] if len(turned) > 1 else []
    for v in (None, *alone) if turned else ():
        equations = _moved(program, turned, v)
        if equations is not None:
            return absorb_transposes(with_equations(program, live(tuple(equations), program)))
    return program


def _moved(program: Program, turned: Sequence[Var], only: Var | None) -> list[Equation] | None:
    """The equations after one transpose has moved, or all; None if no fewer are left."""
    places = [program.places[program.definitions()[v]] for v in turned]
    moving, first = _Moving(program, only), turned.index(only or turned[0])
    moving.build.equations, moving.turned = list(program.equations[: places[first]]), first  # nothing moves before it
    for e in program.equations[places[first] :]:
        moving.add(e)
        if only is not None and not moving.of and not moving.same:  # nor any more
            moving.turned += sum(place > program.places[e] for place in places)
            moving.build.equations += program.equations[program.places[e] + 1 :]
            break
    return moving.build.equations if moving.turned < len(turned) else None


class _Moving:
    """The equations so far.

    Attributes:
      of: values that are not there yet: each is the transpose of another one by a permutation.
      same: those that are another one as it is, turned back.
      only: the one transpose that moves; None: all.
      turned: how many values of points are transposed now.
    """

    def __init__(self, program: Program, only: Var | None):
        self.program, self.only, self.turned = program, only, 0
        self.build = Builder(program)
        self.definition = program.definitions()
        self.of: dict[Var, tuple[Var, tuple[int, ...]]] = {}
        self.same: dict[Var, Var] = {}
        self.needed = {v for v in program.returned if isinstance(v, Var)} | {e.source for e in program.equations if e.is_read}

    def add(self, e: Equation) -> None:
        """Append an equation, on operands as they are before they are transposed if it allows that."""
        if any(isinstance(v, Var) and v in self.same for v in e.inputs):
            e = dataclasses.replace(e, inputs=tuple(self.same.get(v, v) if isinstance(v, Var) else v for v in e.inputs))
        moved = [v for v in e.inputs if isinstance(v, Var) and v in self.of]
        if e.op is _TRANSPOSE and self.program.dims_of(e.outputs[0]) and (moved or self.only in (None, e.outputs[0])):
            (x,), order = e.inputs, tuple(e.params["permutation"])
            if isinstance(x, Var):
                base, before = self.of.get(x, (x, tuple(range(len(order)))))
                return self._later(e, base, tuple(before[a] for a in order))
        if moved and e.op in J.ELEMENTWISE and len(e.outputs) == 1:
            return self._elementwise(e, self.of[moved[0]][1])
        if moved and e.op in REDUCTIONS:
            return self._reduction(e, *self.of[moved[0]])
        if moved and e.op is _DOT:
            return self._product(e)
        self._keep(e)

    def _keep(self, e: Equation) -> None:
        for v in dict.fromkeys(e.inputs):
            if isinstance(v, Var):
                self._present(v)
        self.append(e)

    def append(self, e: Equation) -> None:
        """Append an equation as it is."""
        if e.op is _TRANSPOSE:
            self.turned += any(map(self.program.dims_of, (*e.inputs, *e.outputs)))
        self.build.equations.append(e)

    def _present(self, v: Var) -> None:
        """Transpose a value now."""
        if v in self.of:
            base, order = self.of.pop(v)
            like = self.definition[v]
            self.append(
                dataclasses.replace(like, op=_TRANSPOSE, params={"permutation": order}, inputs=(base,), outputs=(v,))
            )

    def _later(self, e: Equation, base: Var, order: tuple[int, ...]) -> None:
        """The output of an equation is a transpose of ``base``."""
        (out,) = e.outputs
        if order == tuple(range(len(order))) and out not in self.needed:
            self.same[out] = base
            return
        self.of[out] = base, order
        if out in self.needed:
            self._present(out)

    def _replaced(self, e: Equation, order: tuple[int, ...], inputs: Sequence[Atom], params: dict) -> None:
        """An equation on other operands, whose output is a transpose of what they give."""
        (out,) = e.outputs
        if order == tuple(range(len(order))):
            self.build.equations.append(dataclasses.replace(e, inputs=tuple(inputs), params=params))
            return
        base = self.build.var(tuple(out.shape[order.index(a)] for a in range(len(order))), out.dtype)
        self.build.equations.append(dataclasses.replace(e, inputs=tuple(inputs), params=params, outputs=(base,)))
        self._later(e, base, order)

    def _elementwise(self, e: Equation, order: tuple[int, ...]) -> None:
        inputs = [self._back(v, order, e) for v in e.inputs]
        self._replaced(e, order, inputs, e.params)

    def _back(self, v: Atom, order: tuple[int, ...], like: Equation) -> Atom:
        """A value of which ``v`` is the transpose: what is repeated along slices is repeated along other axes."""
        v = self.same.get(v, v) if isinstance(v, Var) else v
        if order == tuple(range(len(v.shape))) or not v.shape:
            return v
        if isinstance(v, Var) and v in self.of and self.of[v][1] == order:
            return self.of[v][0]
        e = self.definition.get(v) if isinstance(v, Var) and v not in self.of else None
        shape = tuple(v.shape[order.index(a)] for a in range(len(order)))
        if e is not None and e.op in J.STOP_GRADIENT:
            params, inputs = e.params, (self._back(e.inputs[0], order, like),)
        elif e is not None and e.op is _BROADCAST:
            at = [order[a] for a in e.params["broadcast_dimensions"]]
            params = {**e.params, "shape": shape, "broadcast_dimensions": tuple(sorted(at))}
            inputs = (self._back(e.inputs[0], tuple(sorted(at).index(a) for a in at), like), *e.inputs[1:])
        else:
            if isinstance(v, Var):
                self._present(v)
            e, params, inputs = like, {"permutation": tuple(order.index(a) for a in range(len(order)))}, (v,)
            e = dataclasses.replace(e, op=_TRANSPOSE)
        out = self.build.var(shape, v.dtype)
        self.append(dataclasses.replace(e, params=params, inputs=inputs, outputs=(out,)))
        return out

    def _reduction(self, e: Equation, base: Var, order: tuple[int, ...]) -> None:
        left = [order[a] for a in range(len(order)) if a not in e.params["axes"]]
        axes = tuple(sorted(order[a] for a in e.params["axes"]))
        self._replaced(e, tuple(sorted(left).index(a) for a in left), [base], {**e.params, "axes": axes})

    def _takes(self, v: Var, other: Atom, contracted: tuple[int, ...]) -> bool:
        """Whether a product takes what ``v`` is the transpose of: slices, and rows, added up along their last axis.

        Not with itself, so that what is computed of one side alone is.
        """
        base, order = self.of[v]
        return bool(J.symbolic_axes(v.shape)) or (base is not other and [order[a] for a in contracted] == [len(base.shape) - 1])

    def _product(self, e: Equation) -> None:
        contracted, batched = e.params["dimension_numbers"]
        inputs, numbers, result = [], [], list(range(len(batched[0])))
        for v, other, *sides in zip(e.inputs, e.inputs[::-1], contracted, batched, strict=True):
            if isinstance(v, Var) and v in self.of and not self._takes(v, other, sides[0]):
                self._present(v)
            base, order = (
                self.of.get(v, (v, tuple(range(len(v.shape))))) if isinstance(v, Var) else (v, range(len(v.shape)))
            )
            free = [order[a] for a in range(len(v.shape)) if a not in sides[0] and a not in sides[1]]
            first = len(result)
            result += [first + sorted(free).index(a) for a in free]
            inputs.append(base)
            numbers.append([tuple(order[a] for a in axes) for axes in sides])
        (c0, b0), (c1, b1) = numbers
        self._replaced(e, tuple(result), inputs, {**e.params, "dimension_numbers": ((c0, c1), (b0, b1))})
