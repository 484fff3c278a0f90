"""Products, and sums of them, that know their values: of ``x @ w + h @ u``, the gates of a recurrent cell, the sum is kept alone.

What leads from the products to such a sum (biases, the parts of a split) is linear, so that the derivative needs no value of it.
The sum, and what else is used of that, come from one equation, which knows their values: its derivative goes through each product
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._lazy import nx
from rlfx.recurrence.ir.build import Builder
from rlfx.recurrence.ir.program import Equation, Program, Var, with_equations

_SUB, _ADDED = J.primitive("sub"), frozenset(map(J.primitive, ("add", "sub")))
#: What moves elements, and adds them.
_LINEAR = _ADDED | {J.SPLIT, *map(J.primitive, ("slice", "squeeze", "reshape"))}


@dataclass(frozen=True, eq=False)
class Sum:
    """Equations whose values go into one sum or several; or a product alone.

    Attributes:
      members: in program order: products, and what is linear in them.
      products: of them.
      leaves: what they read of others.
      outputs: what others read of them.
      last: the last member that reads a leaf: all of them can be evaluated there.
    """

    members: tuple[Equation, ...]
    products: frozenset[Equation]
    leaves: tuple[Var, ...]
    outputs: tuple[Var, ...]
    last: Equation

    @classmethod
    def of_one(cls, product: Equation) -> Sum:
        """A product alone."""
        leaves = dict.fromkeys(v for v in product.inputs if isinstance(v, Var))
        return cls((product,), frozenset({product}), tuple(leaves), product.outputs, product)

    def moved(self, leaves: Sequence, tangents: Sequence) -> list:
        """The tangents of the outputs, from those of the leaves (None: it does not move, as no constant does)."""
        at, moving = (dict(zip(self.leaves, values, strict=True)) for values in (leaves, tangents))
        for e in self.members:
            ins = [moving[v] if isinstance(v, Var) else None for v in e.inputs]
            moving.update(zip(e.outputs, self._pushed(e, at, ins), strict=True))
        found = [moving[v] for v in self.outputs]
        return [jnp.zeros(v.shape, v.dtype) if x is None else x for v, x in zip(self.outputs, found, strict=True)]

    def _pushed(self, e: Equation, at: Mapping, moving: Sequence) -> Sequence:
        """The tangents of what a member gives."""
        if e in self.products:
            return [_product_moved(e, [at[v] for v in e.inputs], moving)]
        if e.op in _ADDED:
            return [_sum_moved(e, *moving)]
        return [None] * len(e.outputs) if moving[0] is None else J.bind(e.op, dict(e.params), *moving)

    def known(self, *args: Any) -> Any:
        """The outputs, from the leaves and their values, which are not on the path of the derivative."""
        count = len(self.leaves)

        @jax.custom_jvp
        def known(*args: Any) -> tuple:
            return tuple(args[count:])

        def derivative(primals: tuple, tangents: tuple) -> tuple:
            moving = [None if isinstance(x, _Zero) else x for x in tangents[:count]]
            return tuple(primals[count:]), tuple(self.moved(primals[:count], moving))

        known.defjvp(derivative, symbolic_zeros=True)
        return known(*args)

    def at(self, e: Equation, build: Builder, values: dict[Var, Var]) -> list[Equation]:
        """What takes the place of a member; ``values``: of what earlier ones gave, which this is added to."""
        place = self.members.index
        if place(e) > place(self.last):
            return []
        build.equations = []
        for member in self.members[place(e) :] if e is self.last else (e,):
            new = tuple(build.var(v.shape, v.dtype) for v in member.outputs)
            ins = tuple(values.get(v, v) if isinstance(v, Var) else v for v in member.inputs)
            build.equations.append(replace(member, inputs=ins, outputs=new))
            values |= zip(member.outputs, new, strict=True)
        if e is self.last:
            still = [build.call(jax.lax.stop_gradient, (values[v],), e) for v in self.outputs]
            build.calls(self.known, (*self.leaves, *still), e)
            build.equations[-1] = replace(build.equations[-1], outputs=self.outputs)
        return build.equations


_Zero = jax.custom_derivatives.SymbolicZero


def _product_moved(e: Equation, at: Sequence, moved: Sequence) -> Any:
    """The tangent of a product: of each operand that moves, with the other one as it is."""
    pairs = [(moved[0], at[1]), (at[0], moved[1])]
    terms = [J.bind(e.op, dict(e.params), a, b)[0] for a, b in pairs if a is not None and b is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _sum_moved(e: Equation, left: Any, right: Any) -> Any:
    if right is None:
        return left
    right = -right if e.op is _SUB else right
    return right if left is None else left + right


def sums_of(program: Program, wide: frozenset[Equation]) -> list[Sum]:
    """The sums of wide products of a program, each with what leads to it."""
    leading = _leading(program, wide)
    groups = nx.Graph()
    definition, users = program.definitions(), program.users
    for e in leading:
        groups.add_node(e)
        groups.add_edges_from((e, d) for v in e.inputs if (d := definition.get(v)) in leading)
    returned = {program.loss, *program.next_carry, *program.aux}
    found = []
    for group in nx.connected_components(groups):
        members = tuple(sorted(group, key=program.places.__getitem__))
        made = {v for e in members for v in e.outputs}
        outputs = [v for v in made if v in returned or any(u not in group for u in users.get(v, ()))]
        read = [v for e in members for v in e.inputs if isinstance(v, Var) and v not in made]
        reading = [e for e in members if any(isinstance(v, Var) and v not in made for v in e.inputs)]
        last = max(reading, key=program.places.__getitem__)
        one = Sum(members, wide & group, tuple(dict.fromkeys(read)), _in_order(outputs, members), last)
        if _fits(one, program, users):
            found.append(one)
    return found


def _in_order(values: Iterable[Var], members: Sequence[Equation]) -> tuple[Var, ...]:
    chosen = set(values)
    return tuple(v for e in members for v in e.outputs if v in chosen)


def _leading(program: Program, wide: frozenset[Equation]) -> frozenset[Equation]:
    """Sums of several products, and what leads from the products to them."""
    of_wide = {v for e in wide for v in e.outputs}
    linear, todo = set(wide), []
    for e in program.equations:
        moving = [v for v in e.inputs if isinstance(v, Var) and "t" in program.dims_of(v)]
        if e.op in _LINEAR and moving and of_wide.issuperset(moving) and not e.is_ragged:
            of_wide.update(e.outputs)
            linear.add(e)
            todo += [e] if len(set(moving)) > 1 else []
    definition, found = program.definitions(), set()
    while todo:
        e = todo.pop()
        if e in linear and e not in found:
            found.add(e)
            todo += [definition[v] for v in e.inputs if v in definition]
    return frozenset(found)


def _fits(one: Sum, program: Program, users: Mapping[Var, list[Equation]]) -> bool:
    """Whether it can be one equation: nothing of it is used before all of it can be evaluated, by one of its products, say."""
    place, group = program.places, set(one.members)
    made = {v for e in one.members for v in e.outputs}
    early = [
        u for v in made for u in users.get(v, ()) if u not in group and place[u] < place[one.last] and not u.is_read
    ]
    return not early and all(made.isdisjoint(e.inputs) for e in one.products)


def with_sums(program: Program, sums: Mapping[Equation, Sum]) -> Program:
    """The program in which sums know their values; ``sums``: the sum of each member."""
    build, values, found = Builder(program), {}, []
    for e in program.equations:
        found += sums[e].at(e, build, values) if e in sums else [e]
    return with_equations(program, found)
