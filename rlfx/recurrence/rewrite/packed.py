"""Many small arrays as one: what is done to each of them alike is started once, where starting is dear.

An update of an optimiser does the same to every array of weights. Of its equations on arrays of the shapes of the carry, those
that are alike and can run at once are one equation, on a vector that has all their numbers (``alike.py``). Arrays that come out
of the last such equation stay a vector from one iteration to the next. Elementwise equations give the same bits; a sum of the
sums of several arrays is the sum of all their numbers, in another order. Sums over the rows of a batch, such as the gradients of
weights and biases, are added up in parts, and the parts of all of them at once (``partial_sums.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import inlined
from rlfx.recurrence.rewrite.alike import Work, nodes
from rlfx.recurrence.rewrite.partial_sums import PartialSums, added, in_parts, is_move, moved

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Pack:
    """Arrays one after another in a vector."""

    vector: jax.Array
    shapes: tuple[tuple[int, ...], ...]

    def array(self, i: int) -> jax.Array:
        """One of them."""
        start = sum(map(math.prod, self.shapes[:i]))
        return jax.lax.slice(self.vector, (start,), (start + math.prod(self.shapes[i]),)).reshape(self.shapes[i])


@dataclass(frozen=True, eq=False)
class Packed:
    """A function ``(carry, x) -> (carry, y)`` on carries of which some arrays are one.

    Attributes:
      groups: leaves of the carry that are a vector together.
      shapes: of all leaves.
      structure: of the carry.
      run: the function on leaves.
    """

    groups: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    structure: Any
    run: Callable[[Sequence[Any], Any], tuple[list, Any]]

    @property
    def inside(self) -> frozenset[int]:
        """Leaves that are in some vector."""
        return frozenset(i for group in self.groups for i in group)

    def pack(self, carry: Any) -> tuple[list, list]:
        """A carry as vectors, and what is not in them."""
        leaves, inside = tree.tree_leaves(carry), self.inside
        vectors = [_joined([leaves[i] for i in group]) for group in self.groups]
        return vectors, [x for i, x in enumerate(leaves) if i not in inside]

    def unpack(self, state: tuple[list, list]) -> Any:
        """The inverse of :meth:`pack`."""
        return tree.tree_unflatten(self.structure, [_array(*value) for value in self._read(state)])

    def __call__(self, state: tuple[list, list], x: Any) -> tuple[tuple[list, list], Any]:
        new, y = self.run(self._read(state), x)
        inside, vectors = self.inside, [_vector([new[i] for i in group]) for group in self.groups]
        rest = [_array(*value) for i, value in enumerate(new) if i not in inside]
        return (vectors, rest), y

    def _read(self, state: tuple[list, list]) -> list[tuple[Any, int]]:
        vectors, rest = state
        found: dict[int, tuple[Any, int]] = {}
        for vector, group in zip(vectors, self.groups, strict=True):
            pack = Pack(vector, tuple(self.shapes[i] for i in group))
            found.update({i: (pack, k) for k, i in enumerate(group)})
        others = iter(rest)
        return [found[i] if i in found else (next(others), 0) for i in range(len(self.shapes))]


def packed(fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any, x: Any, most: int) -> Packed | None:
    """``fn`` with what it does alike to arrays of at most so many numbers as one; None if there is nothing such.

    Args:
      fn: ``fn(carry, x) -> (carry, y)``, whose carry keeps its types.
      carry, x: shapes of its arguments.

    Example:
      >>> descend = lambda w, g: (jax.tree.map(lambda a, b: a - 0.1 * b, w, {"a": g[:2], "b": g[2:]}), None)
      >>> w = {"a": jnp.zeros(2), "b": jnp.zeros(4)}
      >>> found = packed(descend, w, jnp.ones(6), most=100)
      >>> state, _ = found(found.pack(w), jnp.ones(6))
      >>> [vector.shape for vector in state[0]], float(found.unpack(state)["b"][0])
      ([(6,)], -0.10000000149011612)
    """
    closed, out = jax.make_jaxpr(inlined(fn), return_shape=True)(carry, x)
    leaves, structure = tree.tree_flatten(carry)
    shapes = tuple(tuple(jnp.shape(leaf)) for leaf in leaves)
    small = {s for s in shapes if s and 0 < math.prod(s) <= most}
    if any(e.effects for e in closed.jaxpr.eqns) or not small:
        return None
    listed, last = nodes(closed.jaxpr, small), tree.tree_structure(out[1])

    def run(given: Sequence[tuple[Any, int]], x: Any) -> tuple[list, Any]:
        arguments = [*given, *((leaf, 0) for leaf in tree.tree_leaves(x))]
        found = _evaluated(closed, listed, arguments)
        ys = [_array(*value) for value in found[len(leaves) :]]
        return found[: len(leaves)], tree.tree_unflatten(last, ys)

    groups: list[tuple[int, ...]] = []

    def once(leaves: Sequence[Any], x: Any) -> list:
        new, _ = run([(leaf, 0) for leaf in leaves], x)
        strong = {i for i, leaf in enumerate(leaves) if not jax.typeof(leaf).weak_type}
        for pack in dict.fromkeys(v for v, _ in new if isinstance(v, Pack)):
            at = {k: i for i, (v, k) in enumerate(new) if v is pack}
            if len(at) == len(pack.shapes) == sum(v is pack for v, _ in new) and strong.issuperset(at.values()):
                groups.append(tuple(at[k] for k in range(len(at))))
        return []

    jax.eval_shape(once, leaves, x)
    return Packed(tuple(groups), shapes, structure, run) if groups else None


# -- what runs when


def _evaluated(closed: Any, nodes: Sequence[Work], arguments: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """The outputs, each an array or one of a pack: equations that are alike wait until nothing else can run.

    Then the first of them runs, with all that are like it.
    """
    jaxpr, env = closed.jaxpr, dict(zip(closed.jaxpr.invars, arguments, strict=True))
    env.update({v: (c, 0) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)})
    users: dict[Any, list[int]] = {}
    missing = []
    for i, node in enumerate(nodes):
        lacking = {v for v in node.inputs if v not in env}
        missing.append(len(lacking))
        for v in lacking:
            users.setdefault(v, []).append(i)
    alone: list[int] = []
    waiting: dict[Any, list[int]] = {}

    def ready(i: int) -> None:
        if nodes[i].key is None:
            alone.append(i)
        else:
            waiting.setdefault(nodes[i].key, []).append(i)

    def done(group: Sequence[int], values: Sequence[Sequence[tuple[Any, int]]]) -> None:
        for i, outs in zip(group, values, strict=True):
            for v, value in zip(nodes[i].outputs, outs, strict=True):
                env[v] = value
                for user in users.get(v, ()):
                    missing[user] -= 1
                    if not missing[user]:
                        ready(user)

    for i, count in enumerate(missing):
        if not count:
            ready(i)
    while alone or waiting:
        if alone:
            i = alone.pop(0)
            done([i], [_one(nodes[i], env)])
            continue
        key = min(waiting, key=lambda k: min(waiting[k]))
        for group in _aligned(sorted(waiting.pop(key)), nodes, env):
            done(group, _together([nodes[i] for i in group], env))
    return [(v.val, 0) if J.is_literal(v) else env[v] for v in jaxpr.outvars]


def _aligned(group: Sequence[int], nodes: Sequence[Work], env: dict) -> list[list[int]]:
    """Parts of a group that use the same packs."""
    parts: dict[Any, list[int]] = {}
    for i in group:
        packs = tuple(
            id(env[v][0]) if isinstance(env[v][0], Pack) else None
            for v in J.variables(nodes[i].eqn.invars)
            if v.aval.shape
        )
        parts.setdefault(packs, []).append(i)
    return list(parts.values())


def _one(node: Work, env: dict) -> list[tuple[Any, int]]:
    if not node.terms:
        first = node.eqn.invars[0] if node.inputs else None
        if first in node.inputs and isinstance(env[first][0], PartialSums) and is_move(node.eqn):
            return [(_scoped(node.eqn, lambda: moved(node.eqn, env[first][0])), 0)]
        operands = [_read(v, env) for v in node.eqn.invars]
        if node.in_parts:
            return [(_scoped(node.eqn, lambda: in_parts(node.eqn, operands)), 0)]
        return [(x, 0) for x in _bound(node.eqn, operands)]
    sums = [e for e in node.terms if e.primitive is J.primitive("reduce_sum")]
    whole = _whole([e.invars[0] for e in sums], env)
    if whole is None:
        local = dict(env)
        for e in node.terms:
            local.update(
                {v: (x, 0) for v, x in zip(e.outvars, _bound(e, [_read(v, local) for v in e.invars]), strict=True)}
            )
        return [local[node.outputs[0]]]
    made = {v for e in node.terms for v in e.outvars}
    others = [v for e in node.terms if e not in sums for v in e.invars if J.is_literal(v) or v not in made]
    total = _scoped(node.eqn, lambda: jnp.sum(whole.vector, dtype=node.outputs[0].aval.dtype))
    for v in others:
        total = total + _read(v, env)
    return [(total, 0)]


def _together(group: Sequence[Work], env: dict) -> list[list[tuple[Any, int]]]:
    """Alike equations as one."""
    first = group[0].eqn
    if len(group) == 1:
        return [_one(group[0], env)]
    shapes = tuple(tuple(node.outputs[0].aval.shape) for node in group)
    operands = []
    for k, v in enumerate(first.invars):
        if not v.aval.shape:
            operands.append(_read(v, env))
            continue
        atoms = [node.eqn.invars[k] for node in group]
        whole = _whole(atoms, env)
        operands.append(_whole_read(atoms, env) if whole is None else whole.vector)
    if first.primitive is J.primitive("broadcast_in_dim"):
        vector = jnp.broadcast_to(operands[0], (sum(map(math.prod, shapes)),))
    else:
        (vector,) = _bound(first, operands)
    pack = Pack(vector, shapes)
    return [[(pack, i)] for i in range(len(group))]


def _whole_read(atoms: Sequence[Any], env: dict) -> jax.Array:
    """Values as a vector. If they are sums of parts, those are added up at once, and the values are a pack from then on."""
    values = [None if J.is_literal(a) else env[a][0] for a in atoms]
    if sum(isinstance(value, PartialSums) for value in values) < 2:
        return _joined([_read(a, env) for a in atoms])
    vector = added(
        [
            v if isinstance(v, PartialSums) else PartialSums(_read(a, env)[None])
            for a, v in zip(atoms, values, strict=True)
        ]
    )
    pack = Pack(vector, tuple(tuple(a.aval.shape) for a in atoms))
    env.update({a: (pack, i) for i, a in enumerate(atoms) if not J.is_literal(a)})
    return vector


def _whole(atoms: Sequence[Any], env: dict) -> Pack | None:
    """The pack that these are, all of it in its order."""
    found = [(None, 0) if J.is_literal(v) else env[v] for v in atoms]
    pack = found[0][0]
    same = isinstance(pack, Pack) and len(pack.shapes) == len(found)
    return pack if same and all(v is pack and k == i for i, (v, k) in enumerate(found)) else None


def _read(atom: Any, env: dict) -> Any:
    if J.is_literal(atom):
        return atom.val
    return _array(*env[atom])


def _array(value: Any, k: int) -> Any:
    """A value that is an array, one of a pack, or a sum of parts."""
    if isinstance(value, PartialSums):
        return value.whole()
    return value.array(k) if isinstance(value, Pack) else value


def _joined(arrays: Sequence[Any]) -> jax.Array:
    return jnp.concatenate([jnp.reshape(x, -1) for x in arrays])


def _vector(values: Sequence[tuple[Any, int]]) -> jax.Array:
    pack = values[0][0]
    if isinstance(pack, Pack) and all(v is pack and k == i for i, (v, k) in enumerate(values)):
        return pack.vector
    return _joined([_array(*value) for value in values])


def _bound(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    return _scoped(eqn, lambda: J.bind_again(eqn, *operands))


def _scoped(eqn: Any, fn: Callable[[], Any]) -> Any:
    """What an equation gives, under its own scope and source line."""
    names = J.source_info_util.current_name_stack() + eqn.source_info.name_stack
    with J.source_info_util.user_context(eqn.source_info.traceback, name_stack=names):
        return fn()
