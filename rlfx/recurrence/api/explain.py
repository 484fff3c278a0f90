"""``explain``: what runs where, what is kept and why, as text and as a plot."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from rlfx.ahead.compilation import Compilation
from rlfx.errors import RlfxError, located
from rlfx.recurrence.analysis.cost import bytes_in_all, flops_of, points, show_bytes
from rlfx.recurrence.analysis.roles import Roles, roles
from rlfx.recurrence.api.brief import brief, described, functions
from rlfx.recurrence.execute.host import hosted, hosting_of
from rlfx.recurrence.gradient.called import Call
from rlfx.recurrence.gradient.forms import acting_plan
from rlfx.recurrence.gradient.passes import Passes, passes
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.memory.plot import draw_timeline, memory_note
from rlfx.recurrence.memory.timeline import Timeline
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.plan.predict import Cost, predict
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.physical import ExecutablePlan, Node, Repeated, Together
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import Schedule


@dataclass(frozen=True)
class StageSummary:
    """One stage, for people.

    Attributes:
      part: "acting" or "learner", or "in one pass".
      kind: "once", "all t", "forward scan", "backward scan", or their blocked forms.
      content: the user's functions and scopes that run in it, in order.
      keeps: values that it keeps for later stages, as text.
      notes: what it computes again, or how a recurrence is carried.
      kept_bytes, flops: over the whole domain.
      calls: the calls of other programs in it.
    """

    part: str
    kind: str
    content: tuple[str, ...]
    keeps: tuple[str, ...]
    notes: tuple[str, ...]
    kept_bytes: int
    flops: float
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, eq=False)
class Explanation:
    """The plan of a compiled program: ``print`` it, ``.plot()`` it, or read its fields.

    It prints in a short form: what runs step by step, at once and backwards, and why; what is kept, by your names; memory;
    what to change. ``verbose`` prints every value that each stage keeps, by the names that ``print(program)`` gives them,
    and the programs that it calls. Stages have the numbers of ``rlfx.profile``, which go on from acting to learning.
    In a notebook it is a table.

    Attributes:
      memory_budget: the one that was given.
      free_bytes: of one device, when this was made: without a budget, the plan fits into it. None: not known.
      forward: how the values alone are computed, where nothing is differentiated; else None.
      verbose: whether it prints all of it.
      note: what else to know: that most of what counts as differentiated is data.
      plan: in which form, and in which tiles, the gradient is computed.
      stages: the acting pass, then the learner's differentiated region.
      active_carry: carries through which the gradient flows backwards in time. A score-function loss has none: if it
        lists your environment's state, a ``stop_gradient`` is missing.
      stored_bytes: what the acting pass keeps for the learner.
      roles: of a program that calls others, which operations could run at once.
      timeline: the bytes on the device and on the host over time, by the static estimate.
      predicted_bytes: temporary bytes of one device by the static estimate.
      measured_bytes: by XLA, if the plan has been compiled (to meet a budget, or with ``explain(..., measure=True)``).
      compilation: what it takes on a target that is not here, if it has been compiled for that.
    """

    program: Program
    learner: Learner
    plan: Plan
    evaluator: PlanEvaluator
    memory_budget: int | None = None
    free_bytes: int | None = None
    note: str | None = None
    forward: Schedule | None = None
    verbose: bool = False

    @property
    def values_only(self) -> bool:
        """Whether nothing is differentiated: an unrolled program, unless ``wrt=``, ``plan=`` or a budget asks for its learner."""
        return self.forward is not None

    @property
    def cut(self) -> Learner:
        """What the plan makes of acting and learning."""
        return self.learner.under(self.plan)

    @property
    def timeline(self) -> Timeline:
        return self.evaluator.timeline(self.plan)

    @property
    def predicted_bytes(self) -> int:
        return self.evaluator.estimated(self.plan)

    @property
    def measured_bytes(self) -> int | None:
        return self.evaluator.compiled.get(self.plan)

    @property
    def compilation(self) -> Compilation | None:
        return self.evaluator.compilation(self.plan)

    @property
    def roles(self) -> Roles | None:
        """Of a program that calls others: what could run at once. None: it calls none, or not iteration by iteration."""
        return roles(self.program) if any(e.calls for e in self.program.equations) else None

    @property
    def cost(self) -> Cost:
        """What a loss and its gradient cost under the plan, by the cost model."""
        return predict(self.learner, self.plan, self.evaluator.batch, self.evaluator.target)

    @property
    def stages(self) -> tuple[StageSummary, ...]:
        return tuple(_stages(self.passes, self.program, None if self.values_only else self.cut, self.on_host))

    @property
    def passes(self) -> Passes:
        """How each stage runs."""
        if self.forward is not None:
            return Passes(acting_plan(self.forward, self.evaluator.target, self.evaluator.batch), None)
        return passes(self.learner, self.plan, self.evaluator.target, self.evaluator.batch)

    @property
    def on_host(self) -> frozenset[Var]:
        """What is kept in host memory."""
        return hosted(self.cut, hosting_of(self.program, self.plan))

    @property
    def stored_bytes(self) -> int:
        if self.values_only:
            return 0
        return sum(bytes_in_all(v, self.program) for v in self.cut.stored)

    @property
    def active_carry(self) -> tuple[str, ...]:
        """The leaves of the carry through which the gradient flows: ``("carry.memory",)``."""
        leaves = self.program.next_carry
        paths, _ = jax.tree_util.tree_flatten_with_path(
            jax.tree_util.tree_unflatten(self.program.trees["carry"], leaves)
        )
        active = [any(e.source is v for e in self.learner.active_carry) for v in leaves]
        return tuple(
            f"carry{jax.tree_util.keystr(path)}" for (path, _), flows in zip(paths, active, strict=True) if flows
        )

    def __str__(self) -> str:
        return self._in_full() if self.verbose else "\n".join([str(brief(self)), *self._roles_as_text()])

    def _roles_as_text(self) -> list[str]:
        return [] if (found := self.roles) is None else [f" {line}" for line in found.lines(self.program)]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._in_full())}</pre>" if self.verbose else brief(self).html

    def _in_full(self) -> str:
        lines = [f"{self.program.name}   {self.program.size}   {len(self.program.equations)} equations, stored for the "
                 f"learner: {show_bytes(self.stored_bytes)}"]  # fmt: skip
        lines += _as_text(self.stages)
        if not self.values_only:
            lines.append(f" plan: {self.plan}")
        lines.append(f" temporary memory: {memory_note(self)}")
        if self.program.loss is not None:
            lines.append(f" time, by the cost model: {self.cost.show(self.evaluator.target)}")
        lines += self._roles_as_text()
        if self.compilation is not None:
            lines += [f" {line}" for line in str(self.compilation).splitlines()]
        timed = sorted(self.evaluator.timed.items(), key=lambda pair: pair[1])
        lines += [f" timed: {1e3 * seconds:.4g} ms {plan!r}" for plan, seconds in timed]
        if self.note is not None:
            lines.append(f" note: {self.note}")
        if self.active_carry and not self.values_only:
            lines.append(f" the gradient flows through time in {', '.join(self.active_carry)}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw the dependence graph by stage, the bytes that each stage keeps, and the memory over time (TimeRL Fig. 11).

        Args:
          axes: three matplotlib axes; by default a new figure. The memory alone: :meth:`plot_memory`.

        Returns:
          The matplotlib figure.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise RlfxError(
                located("explain().plot() draws with matplotlib.", fix="pip install 'rlfx[plots]'")
            ) from error
        if axes is None:
            layout = plt.figure(figsize=(13, 9)).subplot_mosaic(
                [["graph", "bytes"], ["time", "time"]], width_ratios=(3, 2)
            )
            axes = layout["graph"], layout["bytes"], layout["time"]
        graph_axis, bytes_axis, time_axis = axes
        _draw_graph(graph_axis, self)
        stages = self.stages
        labels = [f"{s.part} {n}: {s.kind}" for n, s in enumerate(stages, 1)]
        bytes_axis.barh(labels, [s.kept_bytes / 2**20 for s in stages])
        bytes_axis.invert_yaxis()
        bytes_axis.set_xlabel("MiB kept for later stages")
        draw_timeline(time_axis, self)
        figure = graph_axis.figure
        length, batch = self.program.domain.names.size
        figure.suptitle(
            f"{self.program.name}: {length}={self.program.domain.length}, {batch}={self.program.domain.batch or 1}"
        )
        figure.tight_layout()
        return figure

    def plot_memory(self, axis: Any) -> None:
        """Draw the memory over time alone, on a matplotlib axis."""
        draw_timeline(axis, self)


def _as_text(stages: Iterable[StageSummary]) -> list[str]:
    """Stages as text: below each, those of the programs that it calls."""
    lines, previous = [], None
    for number, stage in enumerate(stages, 1):
        if stage.part != previous:
            lines.append(f" {stage.part}")
            previous = stage.part
        lines.append(f"  stage {number:<2} {stage.kind:<14} {' > '.join(stage.content) or '-'}")
        if stage.keeps:
            lines.append(f"{'':26}keeps: {', '.join(stage.keeps)}")
        lines += [f"{'':26}{note}" for note in stage.notes]
        for call in stage.calls:
            lines += [f"{'':10}| {line}" for line in _called(call)]
    return lines


def _called(call: Call) -> list[str]:
    """How a program runs that another one calls."""
    program, rule = call.program, call.rule
    title = f"{call}   {program.size}   {len(program.equations)} equations"
    if call.what == "pullback":  # of what has been shown where it was acted
        return [title]
    if call.what == "value":
        run = Passes(acting_plan(rule.forward, rule.target, rule.split.batch), None)
        return [title, *_as_text(_stages(run, program, None))]
    learner = rule.learner(call.perturbed)
    plan = rule.plan(learner, [v for v in rule.flat_inputs if v in call.perturbed])
    stages = _stages(passes(learner, plan, rule.target, rule.split.batch), program, learner.under(plan))
    return [title, *_as_text(stages), f" plan: {plan}"]


def _stages(
    run: Passes, program: Program, learner: Learner | None, on_host: frozenset[Var] = frozenset()
) -> list[StageSummary]:
    """The stages of acting, and then of learning; ``learner``: None where nothing is differentiated."""
    part = "in one pass" if run.acting.differentiated else "acting"
    kept = set() if run.acting.differentiated or learner is None else set(learner.stored)
    acting = _summaries(part, run.acting, program, kept, on_host)
    return acting if run.learning is None else [*acting, *_summaries("learner", run.learning, program, set())]


def _summaries(
    part: str, plan: ExecutablePlan, program: Program, kept: set[Var], on_host: frozenset[Var] = frozenset()
) -> list[StageSummary]:
    later = _uses_after(plan)
    out = []
    for n, node in enumerate(plan.nodes):
        equations = node.equations
        values = (
            node.loop.stacked
            if isinstance(node, Repeated)
            else [v for e in equations for v in e.outputs if v in later[n] or v in kept]
        )
        values = [v for v in values if not _trivial(v, program)]
        domain = program.domain
        out.append(
            StageSummary(
                part,
                _kind(node, program),
                _content(equations),
                tuple(_describe(v, program) + (" (host)" if v in on_host else "") for v in values),
                _notes(node, program),
                sum(bytes_in_all(v, program) for v in values),
                sum(
                    flops_of(e, domain) * points(program.dims_of(e.outputs[0]), domain) for e in equations if e.outputs
                ),
                tuple(dict.fromkeys(call for e in equations for call in e.calls)),
            )
        )
    return out


def _trivial(var: Var, program: Program) -> bool:
    return not program.dims_of(var) and not var.shape


def _uses_after(plan: ExecutablePlan) -> list[set[Var]]:
    """For each stage, the values that later stages use."""
    after: set[Var] = set(plan.graph.wanted)
    out: list[set[Var]] = []
    for node in reversed(plan.nodes):
        out.append(set(after))
        after |= {v for e in node.equations for v in e.inputs if isinstance(v, Var)}
    return out[::-1]


def _kind(node: Node, program: Program) -> str:
    if isinstance(node, Repeated):
        return node.kind
    return (
        f"all {program.domain.names.dim}"
        if any("t" in program.dims_of(v) for e in node.equations for v in e.outputs)
        else "once"
    )


def _content(equations: Iterable[Equation]) -> tuple[str, ...]:
    """The user's scopes, or functions; the first of many."""
    listed = functions(equations)
    return tuple(listed if len(listed) <= 8 else [*listed[:7], f"... {len(listed) - 7} more"])


def _describe(var: Var, program: Program) -> str:
    return f"{var!r} {described(var, program)}"


def _notes(node: Node, program: Program) -> tuple[str, ...]:
    """How a stage runs, and why a loop is one."""
    if isinstance(node, Together):
        return node.notes
    reads = (e for e in node.loop.reads if e.where not in ("carry", "until"))
    names = program.domain.names
    kinds = sorted({f"x[{names.text(str(e.access))}] ({reach_in(e.access, program.domain).kind})" for e in reads})
    return (*node.notes, *(["because of " + ", ".join(kinds)] if kinds else []))


def _draw_graph(axis: Any, explanation: Explanation) -> None:
    """Equations as points, one column a stage; reads of other timesteps as coloured lines."""
    program = explanation.program
    place: dict[Equation, tuple[float, float]] = {}
    titles: list[str] = []
    run = explanation.passes
    for plan in (run.acting, *(() if run.learning is None else (run.learning,))):
        for node in plan.nodes:
            for row, e in enumerate(node.equations):
                place.setdefault(e, (len(titles), -row / max(1, len(node.equations) - 1)))
            first = (_content(node.equations) or ("",))[0]
            titles.append(f"{len(titles) + 1}: {_kind(node, program)}\n{first}")
    definition = program.definitions()
    for e, (x, y) in place.items():
        for v in e.inputs:
            source = definition.get(v)
            if source in place:
                read = e.is_read and v is e.source
                axis.plot(
                    (place[source][0], x), (place[source][1], y), color="tab:red" if read else "0.85", lw=1.2 if read else 0.5,
                    zorder=2 if read else 1,
                )  # fmt: skip
    axis.scatter(*zip(*place.values(), strict=True), s=6, color="tab:blue", zorder=3)
    axis.set_xticks(range(len(titles)), titles, fontsize=8)
    axis.set_yticks([])
    axis.set_title("equations by stage; red: reads of other timesteps", fontsize=9)
