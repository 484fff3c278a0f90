"""Small changes of a source file, one at a time: what a test suite that looks at it must notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """One changed file: its text, and what was changed."""

    source: str
    line: int
    change: str


def _changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing about it different; None if nothing is known to change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            return ast.Compare(node.left, [_SWAPPED[type(op)]()], node.comparators)
        case ast.BoolOp():
            return ast.BoolOp(_SWAPPED[type(node.op)](), node.values)
        case ast.BinOp(op=op) if type(op) in _SWAPPED:
            return ast.BinOp(node.left, _SWAPPED[type(op)](), node.right)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int()):
            return ast.Constant(node.value + 1)
        case ast.Name(id=name) if name in _NAMES:
            return ast.Name(_NAMES[name], node.ctx)
        case ast.Attribute(attr=name) if name in _NAMES:
            return ast.Attribute(node.value, _NAMES[name], node.ctx)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return ast.Pass()
    return None


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """``(node, put something in its place)``, annotations, raised errors and texts apart."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "exc", "type_params"):
                continue
            if isinstance(value, ast.AST):
                yield value, lambda new, parent=parent, field=field: setattr(parent, field, new)
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        yield item, lambda new, value=value, i=i: value.__setitem__(i, new)


def _inside(tree: ast.AST, wanted: Callable[[ast.AST], bool]) -> set[int]:
    return {id(n) for top in ast.walk(tree) if wanted(top) for n in ast.walk(top)}


def _without_effect(node: ast.AST) -> bool:
    """Annotations, and errors with their texts."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "located")


def _annotations(tree: ast.AST) -> set[int]:
    found = [getattr(n, f, None) for n in ast.walk(tree) for f in ("annotation", "returns")]
    return {id(n) for top in found if top is not None for n in ast.walk(top)}


def count(source: str) -> int:
    """How many mutants a file has.

    Example:
      >>> count("def f(x, y):\\n    return x + 1 < y")
      3
    """
    return sum(1 for _ in _sites(ast.parse(source)))


def _sites(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, Callable]]:
    skipped = _inside(tree, _without_effect) | _annotations(tree)
    for node, put in _places(tree):
        new = _changed(node)
        if new is not None and id(node) not in skipped:
            yield node, new, put


def mutant(source: str, index: int) -> Mutant:
    """The ``index``-th of them.

    Example:
      >>> mutant("def f(x, y):\\n    return x + 1 < y", 0).change
      'x + 1 < y -> x + 1 <= y'
    """
    tree = ast.parse(source)
    node, new, put = next(site for i, site in enumerate(_sites(tree)) if i == index)
    before, line = ast.unparse(node), node.lineno  # type: ignore[attr-defined]
    put(ast.copy_location(copy.deepcopy(new), node))
    ast.fix_missing_locations(tree)
    return Mutant(ast.unparse(tree) + "\n", line, f"{before} -> {ast.unparse(new)}")
