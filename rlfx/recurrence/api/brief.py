"""The short form of ``explain``: what runs a step, at once and backwards, what is kept, how much memory, what to change."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import bytes_in_all, show_bytes
from rlfx.recurrence.ir.named import Named
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.memory.plot import memory_note
from rlfx.recurrence.schedule.physical import Node, Repeated, Together
from rlfx.recurrence.schedule.schedule import REGISTER

#: Of the stages' functions, of the reads of a loop and of what is kept, so many are named.
NAMED = 6


@dataclass(frozen=True)
class Row:
    """One stage: its number in the profiler, how it runs, the user's functions in it, and why it is so."""

    number: int
    how: str
    content: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class KeptValue:
    """One value that the learner needs of acting."""

    size: str
    type: str
    name: str
    where: str


@dataclass(frozen=True)
class Brief:
    """The short form. Prints as text; ``html`` for a notebook."""

    title: str
    passes: tuple[tuple[str, tuple[Row, ...]], ...]
    keeps: tuple[str, tuple[KeptValue, ...]] | None
    facts: tuple[tuple[str, str], ...]
    change: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.title]
        for heading, rows in self.passes:
            lines.append(f" {heading}")
            wide = max((len(row.how) for row in rows), default=0)
            for row in rows:
                lines.append(f"  {row.number:<2} {row.how:<{wide}}  {row.content}".rstrip())
                lines += [f"{'':{wide + 7}}{note}" for note in row.notes]
        if self.keeps is not None:
            heading, values = self.keeps
            lines.append(f" {heading}")
            widths = [max(len(text) for text in column) for column in zip(*map(_cells, values), strict=True)]
            for value in values:
                cells = (f"{text:<{width}}" for text, width in zip(_cells(value), widths, strict=True))
                lines.append(f"  {'  '.join(cells)}".rstrip())
        lines += [f" {name}: {text}" for name, text in self.facts]
        if self.change:
            lines += [" to change it:", *(f"  - {text}" for text in self.change)]
        return "\n".join(lines)

    @property
    def html(self) -> str:
        """As tables."""
        parts = [f"<p><b>{html.escape(self.title)}</b></p>"]
        for heading, rows in self.passes:
            cells = [(str(r.number), r.how, "<br>".join(map(html.escape, (r.content, *r.notes)))) for r in rows]
            body = "".join(
                f"<tr><td>{n}</td><td>{html.escape(how)}</td>{_LEFT}{what}</td></tr>" for n, how, what in cells
            )
            parts.append(f"<p>{html.escape(heading)}</p><table>{body}</table>")
        if self.keeps is not None:
            heading, values = self.keeps
            body = "".join(
                f"<tr>{''.join(f'{_LEFT}{html.escape(text)}</td>' for text in _cells(value))}</tr>" for value in values
            )
            parts.append(f"<p>{html.escape(heading)}</p><table>{body}</table>")
        facts = [f"<b>{html.escape(name)}</b>: {html.escape(text)}" for name, text in self.facts]
        facts += [f"<b>to change it</b>: {html.escape(text)}" for text in self.change]
        return "".join(parts) + f"<ul>{''.join(f'<li>{fact}</li>' for fact in facts)}</ul>"


_LEFT = '<td style="text-align:left">'


def _cells(value: KeptValue) -> tuple[str, str, str, str]:
    return value.size, value.type, value.name, value.where


def brief(explained: Any) -> Brief:
    """The short form of an :class:`Explanation`."""
    program: Program = explained.program
    named, run, differentiates = Named(program), explained.passes, not explained.values_only
    title = f"{program.name}: {program.size.replace(' ', ', ')}"
    title += ", the values and the gradient" if differentiates else ", the values; nothing is differentiated"
    if explained.evaluator.axes:
        title += f", mapped {' x '.join(str(axis.size) for axis in explained.evaluator.axes)} times by jax.vmap"
    one_pass = run.acting.differentiated
    passes = [("acting and learning, in one loop" if one_pass else "acting", _rows(run.acting.nodes, 1, named))]
    if run.learning is not None:
        how = "" if explained.plan.block else ", for all timesteps at once"
        how += f", {explained.plan.tile} at a time" if explained.plan.tile else ""
        passes.append(
            (
                program.domain.names.text(f"learning (evaluated and differentiated){how}"),
                _rows(run.learning.nodes, 1 + len(run.acting.nodes), named),
            )
        )
    keeps = _kept(explained, named) if differentiates and not one_pass else None
    return Brief(title, tuple(passes), keeps, tuple(_facts(explained)), tuple(_change(explained, keeps)))


def _rows(nodes: tuple[Node, ...], first: int, named: Named) -> tuple[Row, ...]:
    return tuple(
        Row(n, how_it_runs(node, named.program), _content(node.equations, named), tuple(_notes(node, named)))
        for n, node in enumerate(nodes, first)
    )


def how_it_runs(node: Node, program: Program) -> str:
    """``once``, ``all timesteps at once``, ``step by step, backwards``, ``associative scan``."""
    names = program.domain.names
    if isinstance(node, Together):
        over_time = any("t" in program.dims_of(v) for e in node.equations for v in e.outputs)
        return names.text("all timesteps at once") if over_time else "once"
    backwards = ", backwards" if node.loop.direction == "backward" else ""
    how = str(node.iteration) if node.runner is None else str(node.runner)
    return f"{'step by step' if how == 'scan' else how}{backwards}"


def functions(equations: Any) -> list[str]:
    """The user's scopes, or functions, in order of first appearance."""
    names: dict[str, None] = {}
    for e in equations:
        scope = e.scope.rsplit("/", 1)[-1] if e.scope else ""
        function = e.where.partition("(")[2].rstrip(")") if "(" in e.where else ""
        label = scope or function
        if label and label not in ("<lambda>", "<module>"):
            names[label.replace("rlfx.", "")] = None
    return list(names)


def _content(equations: Any, named: Named) -> str:
    """The functions that run in a stage, and the variables that have their values there."""
    listed = functions(equations)
    others = [name for name in listed if name != named.program.name] or listed
    variables = filter(None, (named.variable(v) for e in equations for v in e.outputs))
    text = _listed(others)
    made = _listed(variables)
    return f"{text}: {made}" if text and made else text or made


def _notes(node: Node, named: Named) -> Iterator[str]:
    """Why a loop is one, and what is special about how a stage runs."""
    domain = named.program.domain
    if isinstance(node, Repeated):
        carried = [named(e.source) for e in node.loop.reads if e.where == "carry"]
        if carried:
            yield f"a loop: {_listed(carried)} of {domain.names.dim} comes from {domain.names.dim} - 1"
        read: dict[str, None] = {}
        for e in node.loop.reads:
            if e.where not in ("carry", "until"):
                read[_read_of(e, named)] = None
        if read:
            yield f"a loop: it needs {_listed(read)}"
        rings = {named(v): n for v, n in node.loop.depth.items() if n != REGISTER}
        for name, n in rings.items():
            yield domain.names.text(f"it holds the last {n} timesteps of ") + name
        if node.restarted is not None:
            yield str(node.restarted)
        if node.said is not None:
            yield node.said
        if len(node.sections) > 1:
            yield next(note for note in node.notes if " sections of " in note)
    else:
        yield from node.notes


def _read_of(e: Equation, named: Named) -> str:
    """``returns[t + 1] (agent.py:12)``."""
    where = e.where.partition(" (")[0]
    name = named(e.source).removeprefix("inside ")
    name = name if name.replace(".", "_").isidentifier() else f"({name})"
    return f"{name}[{named.program.domain.names.text(str(e.access))}]" + (f" ({where})" if where else "")


def _listed(names: Any) -> str:
    listed = list(dict.fromkeys(names))
    more = f", and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def _kept(explained: Any, named: Named) -> tuple[str, tuple[KeptValue, ...]] | None:
    program, on_host = explained.program, explained.on_host
    sizes = {v: bytes_in_all(v, program) for v in explained.cut.stored}
    large = sorted((v for v in sizes if program.dims_of(v) or v.shape), key=lambda v: -sizes[v])
    if not large:
        return None
    rows = [
        KeptValue(
            show_bytes(sizes[v]),
            described(v, program),
            named(v) + (" (in host memory)" if v in on_host else ""),
            named.where(v),
        )
        for v in large
    ]
    rest = large[NAMED:]
    if rest:
        rows = [*rows[:NAMED], KeptValue(show_bytes(sum(sizes[v] for v in rest)), "", f"{len(rest)} more", "")]
    whole = show_bytes(explained.stored_bytes)
    if explained.plan.form in ("stream", "replay"):
        return (
            f"given from acting to learning: {whole} in all, of which {explained.plan.tile} are there at a time",
            tuple(rows),
        )
    return f"kept from acting for learning: {whole}", tuple(rows)


def described(var: Var, program: Program) -> str:
    """``f32[128,64,4]``."""
    domain, dims = program.domain, program.dims_of(var)
    lead = [str(n) for d, n in (("t", domain.length), ("b", domain.batch)) if d in dims and n]
    return f"{J.short_dtype(var.dtype)}[{','.join([*lead, *(str(d) for d in var.shape)])}]"


def _facts(explained: Any) -> Iterator[tuple[str, str]]:
    yield "temporary memory", memory_note(explained)
    if explained.program.loss is not None:
        yield "time, by the cost model", explained.cost.show(explained.evaluator.target).rpartition(": ")[2]
    if explained.active_carry and not explained.values_only:
        yield "the gradient flows through time in", _listed(explained.active_carry)
    if explained.note is not None:
        yield "note", explained.note
    if explained.compilation is not None:
        for n, line in enumerate(str(explained.compilation).splitlines()):
            yield ("compiled" if n == 0 else "        "), line.strip()


def _change(explained: Any, keeps: Any) -> Iterator[str]:
    """What to do about it, where there is something."""
    if explained.values_only:
        yield "with a gradient through the results: explain(..., wrt=True)"
        return
    if keeps is not None and explained.memory_budget is None and not explained.plan.offload:
        yield "less memory: compile(..., memory_budget=BYTES) takes the fastest plan that fits"
    if explained.active_carry:
        yield "if no gradient is meant to flow through time: jax.lax.stop_gradient on these parts of the returned carry"
    if explained.program.loss is not None and explained.measured_bytes is None:
        yield "XLA's own number of bytes: explain(..., measure=True)"
