"""Scalarising: one environment's jaxpr, evaluated for a block of environments, with one array per scalar.

Every array of the per-environment program becomes a numpy array of *elements*. An element is a number known at trace
time, or a jax array over the environments of a block (``[]`` where it is the same for all). Concatenations, slices and
reshapes move elements about at trace time and leave nothing behind; gathers and scatters become selections; a typed key
is the tuple of its words. What remains is elementwise arithmetic on arrays of one shape: a structure of arrays for XLA,
registers for a kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import UnsupportedSliceOp, located
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.defined import Defined
from rlfx.transforms.steps.folding import fold

Rule = Callable[..., list]


class UnsupportedPrimitive(UnsupportedSliceOp):
    """A per-environment program does something that has no scalar form."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """Values kept as one array: ``array`` has shape ``[*shape]`` (the same for all) or ``[*shape, *block]``."""

    array: jax.Array
    shape: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        return self.array.ndim == len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the scalar program will run.

    Attributes:
      block: the shape of an element that varies between environments, ``(environments,)``.
      rewrites: primitives that the backend lacks, as functions of scalars built from primitives that it has.
      dense_matmul: whether products with many weights are left to a matrix product on stacked elements.
      loop: unroll inner loops of at most this many iterations; run longer ones as loops.
      limit: the largest program, in scalar operations of one step; compile time grows with it.
      widest: the bytes of the widest element that it computes with.
    """

    block: tuple[int, ...]
    rewrites: Mapping[Any, Callable] = dataclasses.field(default_factory=dict)
    dense_matmul: bool = False
    loop: int = 16
    limit: int = 20_000
    widest: int = 8


class Interpreter:
    """Evaluates jaxprs on elements.

    Args:
      target: what the scalar program runs on.
      rules: primitive → rule ``(interpreter, equation, arguments) -> outputs``.

    Raises:
      UnsupportedPrimitive: naming the primitive, the user's source line and what to do.
    """

    def __init__(self, target: Target, rules: Mapping[Any, Rule]):
        self.target, self.rules = target, rules
        self.operations, self.at = 0, None

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list:
        """The outputs of ``jaxpr``."""
        known = [known_if_empty(x, v.aval) for v, x in zip(jaxpr.invars, inputs, strict=True)]
        literal = lambda atom: np.asarray(atom.val, atom.aval.dtype)  # noqa: E731
        consts = [self.constant(c) for c in consts]
        return J.walk(jaxpr, consts, known, self.equation, literal=literal, constant=self.constant)

    def equation(self, eqn: Any, args: list, within: tuple = ()) -> list:
        """The outputs of one equation."""
        op, args = eqn.primitive, [known_if_empty(x, v.aval) for v, x in zip(eqn.invars, args, strict=True)]
        if all(is_known(x) for x in args) and not eqn.effects and not any(J.is_key(v.aval) for v in eqn.outvars):
            return self.fold(op, eqn.params, args)
        most = self.target.widest
        wide = [v.aval.dtype for v in eqn.outvars if not J.is_key(v.aval) and v.aval.dtype.itemsize > most]
        if wide and not J.sub_jaxprs(eqn.params):  # loops and branches: what they compute is looked at
            raise unsupported(eqn, f"makes {wide[0]}, and this backend has numbers of {8 * most} bits", NARROW)
        if op in self.target.rewrites and not _fine(self.target.rewrites[op], args, eqn):
            return self.rewritten(eqn, args)
        if op not in self.rules:
            raise unsupported(eqn)
        before, self.at = self.at, (eqn, self.operations)
        out = self.rules[op](self, eqn, args)
        self.at = before
        return out

    def count(self) -> None:
        """One more scalar operation."""
        self.operations += 1
        if self.operations > self.target.limit and self.at:
            eqn, before = self.at
            share = f"more than {self.target.limit} scalar operations, {self.operations - before} of them here"
            raise unsupported(eqn, f"makes the program too large: {share}")

    def fold(self, op: Any, params: dict, args: list) -> list:
        """Evaluate an equation whose inputs are all known, now."""
        return fold(op, params, args)

    def rewritten(self, eqn: Any, args: list) -> list:
        rewrite, unknown = self.rewrite(eqn, args)
        closed = F.trace(rewrite, *[jax.ShapeDtypeStruct((), eqn.invars[i].aval.dtype) for i in unknown])

        def one(*elements):
            return self.elements(self.run(closed.jaxpr, closed.consts, [cell(e) for e in elements])[0])[()]

        target = self.target  # what an operation is built from may be itself, of some numbers
        others = {op: fn for op, fn in target.rewrites.items() if op is not eqn.primitive}
        self.target = dataclasses.replace(target, rewrites=others)
        found = self.map(one, [args[i] for i in unknown], eqn.outvars[0].aval)
        self.target = target
        return [found]

    def rewrite(self, eqn: Any, args: list) -> tuple[Callable, list[int]]:
        """What an equation is on this backend, as a function of its first argument and the unknown ones, and which these are."""
        known, fn = [None, *map(_one, args[1:])], self.target.rewrites[eqn.primitive]

        def applied(*unknown: Any) -> Any:
            rest = iter(unknown)
            return fn(*[next(rest) if k is None else k for k in known], **eqn.params)

        return applied, [i for i, k in enumerate(known) if k is None]

    # -- representations ---------------------------------------------------------------------------------------------

    def constant(self, x: Any) -> Any:
        """A constant of a jaxpr: known, or a traced array that is the same for every environment."""
        if isinstance(x, jax.core.Tracer) or J.is_key(jax.typeof(x)):
            return self.uniform(x)
        return known(x)

    def uniform(self, x: jax.Array) -> Any:
        """A traced array that all environments share."""
        if J.is_key(jax.typeof(x)):
            words = jax.random.key_data(x)
            return keys_of(self.elements(Dense(words, words.shape)), x.shape)
        return Dense(x, x.shape)

    def elements(self, x: Any) -> np.ndarray:
        """Any representation as a numpy array of elements."""
        if isinstance(x, Dense):
            out = np.empty(x.shape, object)
            for i in np.ndindex(*x.shape):
                out[i] = x.array[i] if x.shape else x.array
            return out
        return x

    def dense(self, x: Any) -> jax.Array:
        """Any representation as one array ``[*shape, *block]``, or ``[*shape]`` where it is uniform."""
        if isinstance(x, Dense):
            return x.array
        if is_known(x):
            return jnp.asarray(x)
        flat = [self.full(e) for e in x.reshape(-1)]
        return jnp.stack(flat).reshape(*x.shape, *self.target.block)

    def full(self, element: Any) -> jax.Array:
        """An element as an array of the block's shape."""
        element = jnp.asarray(element)
        return element if element.shape == self.target.block else jnp.broadcast_to(element, self.target.block)

    # -- elementwise -------------------------------------------------------------------------------------------------

    def map(self, fn: Callable, args: Sequence[Any], aval: Any) -> np.ndarray:
        """``fn`` on corresponding elements; equal operands give one and the same result."""
        shape = aval.shape
        columns = [np.broadcast_to(self.elements(x), shape).reshape(-1) for x in args]
        out, seen = np.empty(math.prod(shape), object), {}
        for i, operands in enumerate(zip(*columns, strict=True)):
            token = tuple(("known", e.dtype.str, e.tobytes()) if isinstance(e, np.generic) else id(e) for e in operands)
            if token not in seen:
                # Keep the operands: an id means the same object only as long as the object lives.
                seen[token] = (fn(*operands), operands)
            out[i] = seen[token][0]
        return tidy(out.reshape(shape), aval)

    def bind(self, op: Any, params: dict, *operands: Any) -> Any:
        """One scalar operation: now if all operands are known, else on arrays of one shape."""
        if all(isinstance(x, np.generic) for x in operands):
            return self.fold(op, params, operands)[0][()]
        self.count()
        if all(jnp.ndim(x) == 0 for x in operands):
            return J.bind(op, params, *map(jnp.asarray, operands))[0]
        return J.bind(op, params, *map(self.full, operands))[0]

    def apply(self, fn: Callable, *operands: Any) -> Any:
        """``fn`` (of jax arrays) on elements, broadcast to one shape; known operands fold."""
        if all(isinstance(x, np.generic) for x in operands):
            with jax.ensure_compile_time_eval():
                return np.asarray(fn(*map(jnp.asarray, operands)))[()]
        self.count()
        if all(jnp.ndim(x) == 0 for x in operands):
            return fn(*map(jnp.asarray, operands))
        return fn(*map(self.full, operands))

    def select(self, condition: Any, on_true: Any, on_false: Any) -> Any:
        """An element by a condition; keys word by word."""
        if isinstance(condition, np.generic):
            return on_true if condition else on_false
        if on_true is on_false:
            return on_true
        if isinstance(on_true, tuple):
            return tuple(self.select(condition, x, y) for x, y in zip(on_true, on_false, strict=True))
        if isinstance(on_true, np.generic) and isinstance(on_false, np.generic) and same(on_true, on_false):
            return on_true
        if on_true.dtype == bool:  # Mosaic GPU neither selects nor negates predicates
            return self.apply(lambda c, x, y: jax.lax.select(c, _word(x), _word(y)) != 0, condition, on_true, on_false)
        return self.apply(lambda c, x, y: jax.lax.select(c, x, y), condition, on_true, on_false)

    def logical_and(self, conditions: Sequence[Any]) -> Any:
        """The conjunction of boolean elements."""
        rest = [c for c in conditions if not isinstance(c, np.generic)]
        if any(isinstance(c, np.generic) and not c for c in conditions):
            return np.bool_(False)
        total: Any = np.bool_(True)
        for c in rest:
            total = c if isinstance(total, np.generic) else self.apply(jnp.logical_and, total, c)
        return total

    def equals(self, element: Any, value: int) -> Any:
        """Whether an integer element is ``value``."""
        if isinstance(element, np.generic):
            return np.bool_(int(element) == value)
        if not np.iinfo(element.dtype).min <= value <= np.iinfo(element.dtype).max:
            return np.bool_(False)
        return self.apply(jax.lax.eq, element, np.asarray(value, element.dtype)[()])


# -- elements --------------------------------------------------------------------------------------------------------


def known(x: Any) -> np.ndarray:
    """A constant as a numeric numpy array."""
    return np.asarray(x)


def _one(x: Any) -> np.generic | None:
    """The number that all elements are, if it is known."""
    if not is_known(x) or not x.size or (x != x.reshape(-1)[0]).any():
        return None
    return x.reshape(-1)[0]


def _fine(rewrite: Any, args: Sequence[Any], eqn: Any) -> bool:
    """Whether the operation is defined as it is, for what is known of its second operand."""
    if not isinstance(rewrite, Defined):
        return False
    known = list(args[1].reshape(-1)) if is_known(args[1]) else [None]
    return all(rewrite.fine(eqn.invars[0].aval.dtype, y) for y in known)


def is_known(x: Any) -> bool:
    """Whether every element is a number already."""
    return isinstance(x, np.ndarray) and x.dtype != object


def cell(element: Any) -> np.ndarray:
    """One element as an array of shape ``()``."""
    if isinstance(element, np.generic):
        return np.asarray(element)
    out = np.empty((), object)
    out[()] = element
    return out


def array_of(elements: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """A numpy array of elements from a flat list (keys are tuples: numpy must not look inside)."""
    out = np.empty(len(elements), object)
    for i, element in enumerate(elements):
        out[i] = element
    return out.reshape(shape)


def boxed(x: np.ndarray) -> np.ndarray:
    """An array of elements that can be replaced one by one (``astype(object)`` makes Python numbers of known ones)."""
    return array_of(list(x.flat), x.shape)


def tidy(x: np.ndarray, aval: Any) -> np.ndarray:
    """An array of elements that are all known becomes a numeric one."""
    if x.dtype == object and not J.is_key(aval) and all(isinstance(e, np.generic) for e in x.flat):
        return np.array(list(x.flat), dtype=aval.dtype).reshape(x.shape)
    return x


def known_if_empty(x: Any, aval: Any) -> Any:
    """What has no element is known."""
    return tidy(x, aval) if isinstance(x, np.ndarray) and not x.size else x


def map_any(ip: Interpreter, fn: Any, args: list, aval: Any) -> np.ndarray:
    """Like ``Interpreter.map``, for elements that may be keys."""
    columns = [np.broadcast_to(ip.elements(x), aval.shape).reshape(-1) for x in args]
    return tidy(array_of([fn(*row) for row in zip(*columns, strict=True)], aval.shape), aval)


def _word(x: Any) -> jax.Array:
    return x.astype(jnp.int32)


def same(x: np.generic, y: np.generic) -> bool:
    """Whether two known elements are the same number, NaN included."""
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


def keys_of(words: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Keys from their words: ``words`` has the key's own axes last."""
    flat = words.reshape(math.prod(shape), -1)
    return array_of([tuple(row) for row in flat], tuple(shape))


def words_of(keys: np.ndarray, key_shape: Sequence[int]) -> np.ndarray:
    """The words of keys, with the key's own axes last."""
    flat = [word for key in keys.reshape(-1) for word in key]
    return array_of(flat, (*keys.shape, *key_shape))


_ADVICE = {
    "while": "Give the loop a fixed number of iterations (fori_loop, scan) and mask the rest.",
    "io_callback": "Host environments step outside the accelerator: leave them to the scan.",
    "pure_callback": "Move the host computation out of the step.",
    "debug_callback": "Remove jax.debug.print from the step.",
    "check": "Fuse the environment without debug checks.",
}


NARROW = "Give it, or the bounds of its loop, a dtype of 32 bits (jnp.float32, jnp.int32), or use another backend."


def unsupported(eqn: Any, why: str = "has no scalar form", fix: str | None = None) -> UnsupportedPrimitive:
    """The error for an equation: which primitive, where, and what to do."""
    name = eqn.primitive.name
    fact = f"fuse_steps: the primitive {name!r} {why}."
    fix = fix or _ADVICE.get(name, "Rewrite that line with elementwise operations, or leave the step unfused.")
    return UnsupportedPrimitive(located(fact, where=J.source_of(eqn), fix=fix))
