"""The user's names of a program's values: what is assigned to a variable has its name, anything else is its expression."""

from __future__ import annotations

import ast
import functools
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.atoms import Var

if TYPE_CHECKING:
    from rlfx.recurrence.ir.program import Equation, Program

#: Of longer expressions, so many characters are shown.
WIDTH = 60


@dataclass(frozen=True, eq=False)
class Named:
    """The names of one program's values."""

    program: Program

    def __call__(self, var: Var) -> str:
        """``action`` if the source assigns the value to it; ``inside action`` if it is computed on the way there; else the
        expression that makes it, a leaf of the arguments, or the compiler's own name."""
        if var in self._inputs:
            return self._inputs[var]
        if var in self._series:
            return self._series[var]
        equation = self.program.definitions().get(var)
        if equation is None:
            return repr(var)
        if equation.where == "carry" and equation.is_read:
            return self(equation.source)
        text, assigned = _expression(equation.where)
        if not text:
            return repr(var)
        if len(assigned) == 1:
            text = assigned[0]
        return text if self._leaves(var, equation) and len(assigned) < 2 else f"inside {text}"

    def variable(self, var: Var) -> str | None:
        """The variable to which the source assigns the value, if it is one."""
        equation = self.program.definitions().get(var)
        assigned = () if equation is None else _expression(equation.where)[1]
        return assigned[0] if len(assigned) == 1 and equation is not None and self._leaves(var, equation) else None

    def written(self, var: Var) -> str | None:
        """What stands beside its equation: its variable; of the carry's values, which leaf it is."""
        equation = self.program.definitions().get(var)
        is_carry = equation is not None and equation.where == "carry" and equation.is_read
        return self(var) if is_carry else self.variable(var)

    def where(self, var: Var) -> str:
        """``agent.py:12``, where it is computed; "" if that is not known."""
        equation = self.program.definitions().get(var)
        return "" if equation is None else equation.where.partition(" (")[0] if ":" in equation.where else ""

    def _leaves(self, var: Var, equation: Equation) -> bool:
        """Whether it is a value of its expression: used elsewhere, or a result."""
        mine = _span(equation.where)
        users = self.program.users.get(var, ())
        return not users or any(_span(e.where) != mine for e in users)

    @functools.cached_property
    def _inputs(self) -> dict[Var, str]:
        program = self.program
        given = {**_leaves("params", program.trees.get("params"), program.params),
                 **_leaves("carry", program.trees.get("carry"), program.carry)}  # fmt: skip
        given |= dict.fromkeys(program.consts, "a constant")
        return given | ({} if program.key is None else {program.key: "key"})

    @functools.cached_property
    def _series(self) -> dict[Var, str]:
        """What the carry is, as a series."""
        leaves = [v for v in self.program.next_carry if isinstance(v, Var)]
        if len(leaves) != len(self.program.next_carry):
            return {}
        return _leaves("carry", self.program.trees.get("carry"), leaves)


def _leaves(name: str, structure: object, leaves: object) -> dict[Var, str]:
    """Each leaf of an argument, by its path: ``params['hidden']``."""
    leaves = tuple(leaves)  # type: ignore[arg-type]
    if structure is None or structure.num_leaves != len(leaves):  # type: ignore[attr-defined]
        return {}
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree_util.tree_unflatten(structure, range(len(leaves))))
    return {leaves[i]: f"{name}{jax.tree_util.keystr(path)}" for path, i in paths}


def _span(where: str) -> tuple:
    frame = getattr(where, "frame", None)
    return (where,) if frame is None else (frame.file_name, *frame[2:])


def _expression(where: str) -> tuple[str, tuple[str, ...]]:
    """The text of the expression at a source line, and the names that its statement gives to it; "" if it is not known."""
    frame = where.frame if isinstance(where, J.Source) else None
    if frame is None or not frame.end_line:
        return "", ()
    return _read(*_span(where), "".join(linecache.getlines(frame.file_name)))


@functools.lru_cache(maxsize=4096)
def _read(file: str, first: int, start: int, last: int, stop: int, source: str) -> tuple[str, tuple[str, ...]]:
    try:
        statements = _statements(source)
    except (SyntaxError, ValueError):
        return "", ()
    lines = [line.encode() for line in source.splitlines()[first - 1 : last]]  # columns are those of the bytes
    if len(lines) != last - first + 1:
        return "", ()
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    targets = statements.get((first, start, last, stop), ())
    return (text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."), targets


@functools.lru_cache(maxsize=64)
def _statements(source: str) -> dict[tuple, tuple[str, ...]]:
    """The names that assignments give to a value, by where that value stands."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if len(targets) == 1 and (value := getattr(node, "value", None)) is not None:
            parts = targets[0].elts if isinstance(targets[0], (ast.Tuple, ast.List)) else targets
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(parts) else [value]
            names = [ast.unparse(part) for part in parts]
            for v, own in zip(
                values, [(n,) for n in names] if len(values) == len(names) else [tuple(names)], strict=True
            ):
                found[v.lineno, v.col_offset, v.end_lineno, v.end_col_offset] = own
    return found
