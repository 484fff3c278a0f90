"""Programs whose complex numbers are computed by their parts. Before and after, of a linear recurrence with the carry c:

    h = y[t - 1] (start=c); y = a * h + u   ->   r = p[t - 1] (start=real c); i = q[t - 1] (start=imag c)
                                                 p = real a * r - imag a * i + real u; q = real a * i + imag a * r + imag u
                                                 y = complex p q

What the program takes and returns stays complex, so that derivatives keep jax's conventions: those of ``real``, ``imag`` and
``complex``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import bytes_of
from rlfx.recurrence.cpu.complex_parts import RULES, Parts, is_complex, outputs_of
from rlfx.recurrence.ir.build import Builder, live, substituted
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, with_equations
from rlfx.recurrence.language.primitives import inputs_p, read_p, reduce_p, series_p

#: Of the program's own primitives those that are linear; of reductions these.
_EACH, _SUMS = frozenset({series_p, inputs_p, read_p}), ("sum", "mean")


def with_reals(program: Program) -> Program:
    """The program with parts for complex values. Meaning-preserving (but for infinities); without such values ``program``."""
    if not any(is_complex(v) for e in program.equations for v in e.outputs):
        return program
    split = _Splitting(program)
    for e in program.equations:
        split.add(e)
    for v in (*program.next_carry, *program.aux):
        split.present(v)
    after = with_equations(program, split.build.equations)
    after = substituted(after, split.instead)
    return with_equations(after, live(after.equations, after))


def complex_numbers(program: Program, batch: int) -> int:
    """How many complex numbers the largest value has at a timestep of so many environments."""
    found = [v for e in program.equations for v in e.outputs if is_complex(v) and "t" in program.dims_of(v)]
    sizes = (bytes_of(v, program.domain) // np.dtype(v.dtype).itemsize for v in found)
    rows = (batch if "b" in program.dims_of(v) else 1 for v in found)
    return max((n * b for n, b in zip(sizes, rows, strict=True)), default=0)


class _Splitting:
    """The equations so far.

    Attributes:
      parts: of complex values: real and imaginary part (None: zeros).
      there: complex values that an equation gives, or that are arguments.
      promised: names for the parts of what is read at other times, perhaps before it is defined.
      instead: real values that are parts of others.
    """

    def __init__(self, program: Program):
        self.build = Builder(program)
        self.definition = program.definitions()
        self.parts: dict[Var, tuple[Atom, Atom | None]] = {}
        self.there: set[Var] = {v for v in program.inputs if is_complex(v)}
        self.instead: dict[Var, Atom] = {}
        read = dict.fromkeys(e.source for e in program.reads() if is_complex(e.source))
        self.promised = {v: (self._part_of(v), self._part_of(v)) for v in read}
        for v in self.promised.keys() & self.there:
            self._keep_promise(v, self._taken_apart(v))

    def _part_of(self, v: Atom) -> Var:
        return self.build.var(v.shape, np.dtype(jnp.finfo(v.dtype).dtype))

    def add(self, e: Equation) -> None:
        """Append an equation, on parts if it has a rule for them."""
        if not any(is_complex(v) for v in (*e.inputs, *e.outputs)):
            self.build.equations.append(e)
        elif e.op in _EACH or (e.op is reduce_p and e.params["op"] in _SUMS):
            self._each(e)
        elif not self._by_rule(e):
            for v in e.inputs:
                self.present(v)
            self.build.equations.append(e)
            for v in filter(is_complex, e.outputs):
                self.there.add(v)
                if v in self.promised:
                    self._keep_promise(v, self._taken_apart(v))

    def present(self, v: Atom | None) -> None:
        """Put a value together, if only its parts are there."""
        if isinstance(v, Var) and v in self.parts and v not in self.there:
            re, im = self.parts[v]
            ins = (re, self._zeros(v) if im is None else im)
            like = self.definition[v]
            self._append(like, J.primitive("complex"), {}, ins, (v,))
            self.there.add(v)

    def _append(self, like: Equation, op: Any, params: dict, ins: Sequence[Atom], outs: Sequence[Var]) -> None:
        self.build.equations.append(replace(like, op=op, params=params, inputs=tuple(ins), outputs=tuple(outs)))

    def _zeros(self, v: Atom) -> Lit:
        return Lit(np.zeros(v.shape, jnp.finfo(v.dtype).dtype))

    def _of(self, v: Atom) -> tuple[Atom, Atom | None]:
        """The parts of a complex value."""
        if isinstance(v, Lit):
            value = np.asarray(v.value)
            return Lit(np.real(value)), Lit(np.imag(value)) if np.any(np.imag(value)) else None
        if v not in self.parts:
            self.parts[v] = self._taken_apart(v)
        return self.parts[v]

    def _taken_apart(self, v: Var) -> tuple[Var, Var]:
        found = self._part_of(v), self._part_of(v)
        like = self.definition.get(v) or Equation(series_p, {}, (), ())
        for name, part in zip(("real", "imag"), found, strict=True):
            self._append(replace(like, has_effects=False), J.primitive(name), {}, (v,), (part,))
        return found

    def _keep_promise(self, v: Var, parts: tuple[Atom, Atom | None]) -> None:
        re, im = parts
        like = self.definition.get(v) or Equation(series_p, {}, (), ())
        for part, promised in zip((re, self._zeros(v) if im is None else im), self.promised[v], strict=True):
            self._append(replace(like, has_effects=False), series_p, {}, (part,), (promised,))
        self.parts[v] = self.promised[v]

    def _defined(self, v: Var, parts: tuple[Atom, Atom | None]) -> None:
        self.parts[v] = parts
        if v in self.promised:
            self._keep_promise(v, parts)

    def _each(self, e: Equation) -> None:
        """The same of each part: data, names, sums, and values at other times (indices are those of both)."""
        (out,), found = e.outputs, []
        if not is_complex(out):  # the index of a read may not be complex: nothing else is left
            self.build.equations.append(e)
            return
        for side in (0, 1):
            ins = []
            for i, v in enumerate(e.inputs):
                if not is_complex(v):
                    ins.append(v)
                elif e.is_read and i == 0:
                    ins.append(self.promised[e.source][side])
                else:
                    part = self._of(v)[side]
                    ins.append(self._zeros(v) if part is None else part)
            part = self._part_of(out)
            self._append(e, e.op, dict(e.params), ins, (part,))
            found.append(part)
        self._defined(out, (found[0], found[1]))

    def _by_rule(self, e: Equation) -> bool:
        """Append what a rule makes of an equation; whether there is one."""
        if e.op not in RULES or not e.is_pointwise or e.is_ragged or e.has_effects:
            return False
        given = [self._of(v) if is_complex(v) else (v, None) for v in e.inputs]
        flat = [x for pair in given for x in pair if x is not None]
        made: list = []

        def run(*values: Any) -> list:
            left = iter(values)
            pairs = [(next(left), None if im is None else next(left)) for _, im in given]
            operands = [Parts(*pair) if is_complex(v) else pair[0] for v, pair in zip(e.inputs, pairs, strict=True)]
            outs = outputs_of(e.op, e.params, operands)
            made.extend([None] if outs is None else [isinstance(x, Parts) and x.im is not None for x in outs])
            outs = outs or []
            return [y for x in outs for y in ((x.re, x.im) if isinstance(x, Parts) else (x,)) if y is not None]

        before = len(self.build.equations)
        found = iter(self.build.calls(run, flat, e))
        if made == [None]:
            del self.build.equations[before:]
            return False
        for v, has_two in zip(e.outputs, made, strict=True):
            first = next(found)
            second = next(found) if has_two else None
            if is_complex(v):
                self._defined(v, (first, second))
            elif isinstance(first, Var):
                self.instead[v] = self.instead.get(first, first)
            else:
                self._append(e, series_p, {}, (first,), (v,))
        return True
