"""The rules of scalarising, for tiles: what has no tile is done as for scalars."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps import rules as R
from rlfx.transforms.steps.control import CONTROL_RULES
from rlfx.transforms.steps.products import Product, Weights
from rlfx.transforms.steps.random import RANDOM_RULES, threefry_block
from rlfx.transforms.steps.scalarize import Interpreter, array_of, is_known, unsupported, words_of
from rlfx.transforms.steps.tiles import WIDE, Counted, Mapped, Stacked, Tile, View

#: A structural operation gives a tile of so many pieces at most.
PIECES = 16

#: Of a matrix that is no operand of a product, so many numbers are loaded one by one.
MATRIX = 512


class TileInterpreter(Interpreter):
    """An interpreter that keeps wide values as tiles.

    Args:
      weights: makes an array that all environments share, of the function that computes it before the kernel, and its type.
      draws: whether wide random numbers are tiles.
    """

    def __init__(self, target: Any, weights: Callable[[Callable, Any], Weights], draws: bool):
        super().__init__(target, RULES)
        self.weights, self.draws, self.drawing = weights, draws, False

    def equation(self, eqn: Any, args: list, within: tuple = ()) -> list:
        """What all environments share is computed before the kernel, if it is wide."""
        op, shared = eqn.primitive, [isinstance(x, Weights) for x in args]
        if not any(shared):
            return super().equation(eqn, args, within)
        alone = all(here or is_known(x) for here, x in zip(shared, args, strict=True)) and not eqn.effects
        if alone and any(_is_wide(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            outers = [x.outer if isinstance(x, Weights) else lambda _, x=x: jnp.asarray(x) for x in args]
            bound = _once(lambda leaves: J.bind(op, eqn.params, *[outer(leaves) for outer in outers]))
            return [self.weights(lambda leaves, i=i: bound(leaves)[i], v.aval) for i, v in enumerate(eqn.outvars)]
        if op is not J.primitive("dot_general") and not J.sub_jaxprs(eqn.params):
            args = [self._one_by_one(x, eqn) if isinstance(x, Weights) and len(x.shape) > 1 else x for x in args]
        return super().equation(eqn, args, within)

    def _one_by_one(self, x: Weights, eqn: Any) -> np.ndarray:
        if x.size > MATRIX:
            raise unsupported(eqn, f"computes with {list(x.shape)} numbers that all environments share, each by itself")
        return x.elements()

    def elements(self, x: Any) -> np.ndarray:
        """Any representation as elements."""
        return x.elements() if isinstance(x, Tile) else super().elements(x)

    def rewritten(self, eqn: Any, args: list) -> list:
        if not any(isinstance(x, Tile) for x in args):
            return super().rewritten(eqn, args)
        rewrite, unknown = self.rewrite(eqn, args)
        return [self.mapped(rewrite, [args[i] for i in unknown], eqn)]

    def mapped(self, fn: Callable, args: list, eqn: Any) -> Tile:
        """An operation row by row, of tiles and what has the same shape or none."""
        self.count()
        return Mapped(fn, [self.operand(x, eqn) for x in args], eqn.outvars[0].aval.shape, eqn)

    def operand(self, x: Any, eqn: Any) -> Any:
        """A tile, or the one scalar that all rows are."""
        if isinstance(x, Tile):
            return x
        if is_known(x) and (counted := _progression(x)) is not None:
            return counted
        flat = list(self.elements(x).reshape(-1))
        first = flat[0]
        if all(
            e is first or (isinstance(e, np.generic) and isinstance(first, np.generic) and e == first) for e in flat
        ):
            return self.full(first)
        return Stacked([self.full(e) for e in flat], x.shape, eqn)

    def tile(self, x: Any, eqn: Any = None) -> Tile:
        """Any representation as a tile."""
        x = x.elements() if isinstance(x, Weights) and len(x.shape) > 1 else x
        return x if isinstance(x, Tile) else Stacked([self.full(e) for e in self.elements(x).reshape(-1)], x.shape, eqn)


def _is_wide(aval: Any) -> bool:
    return not J.is_key(aval) and math.prod(aval.shape) >= WIDE


def _once(fn: Callable) -> Callable:
    """A function of the shared leaves, computed once for the same ones."""
    kept: list = []

    def call(leaves):
        if not kept or kept[0] is not leaves:
            kept[:] = leaves, fn(leaves)
        return kept[1]

    return call


def _on_tiles(rule: Callable, other: Callable) -> Callable:
    """``rule`` where an argument is a tile, or a counter of random numbers that are; else the rule for scalars."""

    @functools.wraps(rule)
    def chosen(ip, eqn, args):
        tiles = any(isinstance(x, Tile) or (ip.drawing and is_known(x) and x.size >= WIDE) for x in args)
        return (rule if tiles else other)(ip, eqn, args)

    return chosen


def elementwise(ip: TileInterpreter, eqn: Any, args: list) -> list:
    return [ip.mapped(lambda *xs: J.bind(eqn.primitive, eqn.params, *xs)[0], args, eqn)]


def _progression(x: np.ndarray) -> Counted | None:
    """Whole numbers that differ by one and the same, as a tile."""
    flat = x.reshape(-1)
    if x.dtype.kind not in "iu" or x.dtype.itemsize > 4 or flat.size < WIDE:
        return None
    first, step = int(flat[0]), int(flat[1]) - int(flat[0])
    if step == 0 or (flat.astype(np.int64) != first + step * np.arange(flat.size)).any():
        return None
    return Counted(first, step, x.shape, x.dtype)


def random_bits(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Wide draws are tiles: the key type's own function, on the rows' numbers."""
    key, aval = eqn.invars[0].aval, eqn.outvars[0].aval
    if not ip.draws or key.shape or aval.size < WIDE or eqn.params["bit_width"] != 32:
        return RANDOM_RULES[eqn.primitive](ip, eqn, args)
    bits = F.key_function(key, "random_bits")
    words = words_of(np.asarray(args[0], object), F.key_shape(key))
    closed = F.trace(lambda w: bits(w, 32, aval.shape), jax.ShapeDtypeStruct(words.shape, jnp.uint32))
    before, ip.drawing = ip.drawing, True
    (found,) = ip.run(closed.jaxpr, closed.consts, [words])
    ip.drawing = before
    return [found]


def threefry(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Both words of each row."""

    def word(i):
        return lambda *xs: threefry_block(Plain, *xs)[i]

    return [ip.mapped(word(i), args, eqn) for i in (0, 1)]


class Plain:
    """Arithmetic on arrays, for functions of an interpreter's elements."""

    @staticmethod
    def apply(fn: Callable, *operands: Any) -> Any:
        return fn(*operands)


def select_n(ip: TileInterpreter, eqn: Any, args: list) -> list:
    if len(args) != 3 or eqn.invars[0].aval.dtype != bool:
        return R.select_n(ip, eqn, [ip.elements(x) for x in args])

    def select(which, x, y):
        if x.dtype != bool:
            return jax.lax.select(which, y, x)
        return jax.lax.select(which, y.astype(jnp.int32), x.astype(jnp.int32)) != 0

    return [ip.mapped(select, args, eqn)]


def structural(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Ranges of rows, moved: which ones, the primitive itself says of their numbers."""
    sizes = [x.size for x in args]
    offsets = np.cumsum([0, *sizes])
    numbers = [np.arange(n, dtype=np.int32).reshape(x.shape) + o for n, x, o in zip(sizes, args, offsets, strict=False)]
    moved = ip.fold(eqn.primitive, eqn.params, numbers)
    return [_moved(ip, eqn, args, at, offsets) for at in moved]


def _moved(ip: TileInterpreter, eqn: Any, args: list, at: np.ndarray, offsets: np.ndarray) -> Any:
    flat = at.reshape(-1)
    which = np.searchsorted(offsets, flat, side="right") - 1
    breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(which) != 0)) + 1
    runs = np.split(np.arange(flat.size), breaks)
    if at.size >= WIDE and len(runs) <= PIECES:
        found = [(int(which[run[0]]), int(flat[run[0]] - offsets[which[run[0]]]), len(run)) for run in runs]
        tiles = {i: ip.tile(args[i], eqn) for i, *_ in found}
        return View([(tiles[i], start, size) for i, start, size in found], at.shape, eqn)
    if at.size > WIDE * PIECES:
        raise unsupported(eqn, f"moves {at.size} numbers of a tile one by one")

    def one(i, place):
        x = args[i]
        return x.element(place) if isinstance(x, Tile) else ip.elements(x).reshape(-1)[place]

    return array_of([one(i, int(p - offsets[i])) for i, p in zip(which, flat, strict=True)], at.shape)


_REDUCED: Mapping[str, Callable] = {
    "reduce_sum": lambda x: x.sum(0, dtype=x.dtype),
    "reduce_max": lambda x: x.max(0),
    "reduce_min": lambda x: x.min(0),
    "reduce_and": lambda x: x.astype(jnp.int32).min(0) != 0,
    "reduce_or": lambda x: x.astype(jnp.int32).max(0) != 0,
}
"""How the rows of a part become one; how parts do, the table of axes says."""


def reduction(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Over all rows; of a part of the axes as for scalars."""
    (x,), aval = args, eqn.outvars[0].aval
    dtype = eqn.invars[0].aval.dtype
    if aval.size != 1 or (eqn.primitive.name in ("reduce_and", "reduce_or") and np.dtype(dtype).kind != "b"):
        return R.reduction(ip, eqn, [ip.elements(x)])
    rows, monoid = _REDUCED[eqn.primitive.name], REDUCTIONS[eqn.primitive]
    ip.count()
    parts = [rows(_full(ip, x.masked(*part, monoid.identity(dtype)))) for part in x.parts()]
    return [array_of([functools.reduce(monoid.combine, parts)], aval.shape)]


def _full(ip: TileInterpreter, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (x.shape[0], *ip.target.block))


def arg_reduction(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """The first row that is extreme; a NaN is, as for scalars."""
    (x,), aval = args, eqn.outvars[0].aval
    dtype = eqn.invars[0].aval.dtype
    if aval.size != 1 or not jnp.issubdtype(dtype, jnp.floating):
        return R.arg_reduction(ip, eqn, [ip.elements(x)])
    worst = -np.inf if eqn.primitive.name == "argmax" else np.inf
    rows = (lambda x: x.max(0)) if worst < 0 else (lambda x: x.min(0))
    parts = [(start, x.masked(start, size, worst), size) for start, size in x.parts()]
    best = functools.reduce(jnp.maximum if worst < 0 else jnp.minimum, [rows(p) for _, p, _ in parts])
    firsts = []
    for start, part, size in parts:
        at = jax.lax.broadcasted_iota(jnp.int32, part.shape, 0)
        extreme = (part == best[None, :]) & (at < size)
        number = jnp.where(extreme, at + start, jnp.full_like(at, x.size))
        nans = jnp.where((part != part) & (at < size), at + start, jnp.full_like(at, x.size))
        firsts.append((number.min(0), nans.min(0)))
    number, nan = (functools.reduce(jnp.minimum, column) for column in zip(*firsts, strict=True))
    index = jnp.where(nan < x.size, nan, number).astype(eqn.params["index_dtype"])
    return [array_of([index], aval.shape)]


def dot_general(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Of a vector with weights that all environments share; of two vectors, the sum of what their rows give."""
    (contract, batch), aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    if not any(isinstance(x, Tile) for x in args):
        return R.dot_general(ip, eqn, args)
    if not batch[0] and len(contract[0]) == 1:
        for (x, _), (w, axes) in (zip(args, contract, strict=True), list(zip(args, contract, strict=True))[::-1]):
            if len(x.shape) == 1 and isinstance(w, Weights) and len(w.shape) == 2:
                ip.count()
                product = Product(ip.tile(x, eqn), w, axes[0], eqn.params["precision"], aval.dtype, eqn)
                return [product if product.size >= WIDE else product.elements()]
        if all(len(x.shape) == 1 for x in args):
            ip.count()
            both = ip.mapped(lambda x, y: x.astype(aval.dtype) * y.astype(aval.dtype), args, eqn)
            both = Mapped(both.fn, both.operands, args[0].shape, eqn)
            parts = [_full(ip, both.masked(*part, 0)).sum(0) for part in both.parts()]
            return [array_of([functools.reduce(jnp.add, parts)], ())]
    shapes = " and ".join(str(list(x.shape)) for x in args)
    raise unsupported(
        eqn, f"multiplies {shapes}: a kernel multiplies a vector with weights that all environments share"
    )


def loop(rule: Callable) -> Callable:
    """Loops and branches: tiles are the same tiles inside a branch, but none goes through a loop that is not unrolled."""

    def run(ip, eqn, args):
        q = eqn.params
        if "length" in q and q["length"] > ip.target.loop and any(isinstance(x, Tile) for x in args):
            raise unsupported(eqn, f"runs {q['length']} iterations on a value that is a tile")
        return rule(ip, eqn, args)

    return run


def cond(ip: TileInterpreter, eqn: Any, args: list) -> list:
    """Every branch, then a selection; tiles stay tiles."""
    index, branches = ip.elements(args[0])[()], [J.body_of(b) for b in eqn.params["branches"]]
    if isinstance(index, np.generic) or len(branches) != 2:
        return CONTROL_RULES[J.primitive("cond")](ip, eqn, args)
    no, yes = (ip.run(*b, args[1:]) for b in branches)
    here = ip.apply(lambda x: x > 0, index)
    out = []
    for x, y, v in zip(no, yes, eqn.outvars, strict=True):
        if isinstance(x, Tile) or isinstance(y, Tile):
            operands = [ip.full(here), ip.operand(x, eqn), ip.operand(y, eqn)]
            out.append(Mapped(lambda c, a, b: jax.lax.select(c, b, a), operands, v.aval.shape, eqn))
        else:
            out.append(R.map_any(ip, lambda a, b: ip.select(here, b, a), [x, y], v.aval))
    return out


def _rules() -> dict[Any, Any]:
    tiled = {R.elementwise: elementwise, R.structural: structural, R.arg_reduction: arg_reduction, R.select_n: select_n}
    found = {op: _on_tiles(tiled[rule], rule) if rule in tiled else rule for op, rule in R.RULES.items()}
    for name in _REDUCED:
        found[J.primitive(name)] = _on_tiles(reduction, R.reduction)
    for name in ("scan", "while"):
        found[J.primitive(name)] = loop(R.RULES[J.primitive(name)])
    found[J.primitive("random_bits")] = random_bits
    found[J.primitive("threefry2x32")] = _on_tiles(threefry, RANDOM_RULES[J.primitive("threefry2x32")])
    return {**found, J.primitive("dot_general"): dot_general, J.primitive("cond"): cond}


RULES: Mapping[Any, Callable] = _rules()
"""Primitive → rule, as :data:`rlfx.transforms.steps.rules.RULES`."""
