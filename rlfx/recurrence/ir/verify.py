"""Whether what a rewrite made is a program: every value defined once and before it is used, typed, with the right dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, infer_dims, name_of
from rlfx.recurrence.language.index import Point, Window
from rlfx.recurrence.language.primitives import aside_p, series_p


def rewritten(rewrite: Callable[[Program], Program], program: Program, name: str = "") -> Program:
    """``rewrite(program)``, verified.

    Args:
      name: what errors call the rewrite; by default the name of the function.

    Raises:
      ProgramError: if it is no program; the error names the rewrite.
    """
    after = rewrite(program)
    return after if after is program else verify(after, name or getattr(rewrite, "__name__", "a rewrite"), program)


def verify(program: Program, by: str, before: Program | None = None) -> Program:
    """The program, if it is one.

    Args:
      by: what made it.
      before: the program that it was made of: equations that are in it are taken to be typed.

    Raises:
      ProgramError: with the first value or equation that is wrong, and who made it.

    Example:
      >>> import dataclasses, jax.numpy as jnp, rlfx
      >>> program = rlfx.trace(lambda w, x, t: (w * x, x), 2.0, jnp.float32(1.0), length=3)
      >>> verify(program, "trace") is program
      True
      >>> verify(dataclasses.replace(program, equations=program.equations[1:]), "my_rewrite")
      Traceback (most recent call last):
      rlfx.errors.ProgramError: What my_rewrite made of <lambda> is no program: ...
    """
    known = frozenset() if before is None else frozenset(before.equations)
    wrong = next(_wrong(program, known), None)
    if wrong is None:
        for called in dict.fromkeys(c.program for e in program.equations if e not in known for c in e.calls):
            verify(called, by)
        return program
    fact, where = wrong
    raise ProgramError(
        located(
            f"What {by} made of {program.name} is no program: {fact}.",
            where=where or program.where,
            fix="Return a program whose values are defined once, before they are used, with dims=infer_dims(equations, ...).",
        )
    )


def _wrong(program: Program, known: frozenset[Equation]) -> Iterator[tuple[str, str]]:
    """What is wrong, and where; the first is the cause."""
    defined: set[Var] = set(program.inputs)
    everything = defined | {v for e in program.equations for v in e.outputs}
    typed = set(map(_types, known))
    for e in program.equations:
        early = e.operands if e.is_read else e.inputs
        for v in early:
            if isinstance(v, Var) and v not in defined:
                when = "before it is defined" if v in everything else "but nothing defines it"
                yield f"{e.op.name} uses {name_of(v)} {when}", e.where
        if e.is_read and e.source not in everything:
            yield f"a read of {name_of(e.source)}, which nothing defines", e.where
        for v in e.outputs:
            if v in defined:
                yield f"{name_of(v)} is defined twice", e.where
        defined.update(e.outputs)
        if e not in known and _types(e) not in typed and (fact := _ill_typed(e)) is not None:
            yield fact, e.where
    yield from _wrong_outputs(program, defined)
    given = {v: program.dims_of(v) for v in program.inputs}
    for v, dims in infer_dims(program.equations, given, program.alive).items():
        if program.dims_of(v) != dims:
            says = " and ".join(sorted(program.dims_of(v))) or "nothing"
            yield f"{name_of(v)} varies with {' and '.join(sorted(dims)) or 'nothing'}, and dims says with {says}", ""


def _wrong_outputs(program: Program, defined: set[Var]) -> Iterator[tuple[str, str]]:
    named: list[tuple[str, Atom | None]] = [
        ("the loss", program.loss),
        ("alive", program.alive),
        ("ends", program.ends),
    ]
    named += [(f"leaf {i} of the next carry", v) for i, v in enumerate(program.next_carry)]
    named += [(f"leaf {i} of aux", v) for i, v in enumerate(program.aux)]
    for name, v in named:
        if isinstance(v, Var) and v not in defined:
            yield f"{name} is {name_of(v)}, which nothing defines", ""
    if len(program.aux_dims) != len(program.aux):
        yield f"aux has {len(program.aux)} leaves, and aux_dims is of {len(program.aux_dims)}", ""
    for i, (v, dims) in enumerate(zip(program.aux, program.aux_dims, strict=False)):
        if more := program.dims_of(v) - dims:
            yield f"leaf {i} of aux varies with {' and '.join(sorted(more))}, and is returned without", ""
    if program.loss is not None and program.loss.shape != ():
        yield f"the loss has shape {list(program.loss.shape)}, not []", ""
    for i, (old, new) in enumerate(zip(program.carry, program.next_carry, strict=True)):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield f"leaf {i} of the carry is {_type(old)}, and becomes {_type(new)}", ""


def _types(e: Equation) -> tuple:
    """What the types of an equation hang on: equal for one that has been given other values of the same types."""
    return e.op, id(e.params), *((v.shape, v.dtype) for v in e.inputs), None, *((v.shape, v.dtype) for v in e.outputs)


def _ill_typed(e: Equation) -> str | None:
    """What is wrong with the types of an equation."""
    found = [_type(v) for v in e.outputs]
    if e.is_read:
        source, (out,) = e.source, e.outputs
        shape = {Point: out.shape, Window: out.shape[1:]}.get(type(e.access))
        if out.dtype != source.dtype or (shape is not None and shape != source.shape):
            return f"a read of {_type(source)} is {found[0]}"
        return None
    if e.op in (series_p, aside_p):
        expected = [_type(v) for v in e.inputs]
    else:
        types = [J.ShapedArray(v.shape, v.dtype) for v in e.inputs]
        params = {k: v for k, v in e.params.items() if not k.startswith("rlfx_")}  # those are notes of ours
        given = J.types_of(e.op, params, types)
        if isinstance(given, str):
            return f"{e.op.name} of {', '.join(map(_type, e.inputs)) or 'nothing'}: {given}"
        if given is None:
            return None
        expected = [_type(v) for v in given]
    return None if expected == found else f"{e.op.name} is {', '.join(expected)}, and is written as {', '.join(found)}"


def _type(v: Any) -> str:
    return f"{J.short_dtype(v.dtype)}[{','.join(str(d).replace(' ', '') for d in v.shape)}]"
