"""Memory over time for people: a line of text, and the figure."""

from __future__ import annotations

from typing import Any, Protocol

from rlfx.recurrence.analysis.cost import show_bytes
from rlfx.recurrence.memory.timeline import Timeline

#: The colours of TimeRL Fig. 11: while it acts, while it learns.
COLOURS = {False: "tab:red", True: "tab:orange"}


class Explained(Protocol):
    """What is known about the memory of a plan."""

    @property
    def timeline(self) -> Timeline: ...
    @property
    def predicted_bytes(self) -> int: ...
    @property
    def measured_bytes(self) -> int | None: ...
    @property
    def memory_budget(self) -> int | None: ...
    @property
    def free_bytes(self) -> int | None: ...
    @property
    def program(self) -> Any: ...


def memory_note(explained: Explained) -> str:
    """``predicted 22.5 MiB, measured by XLA 22.4 MiB, budget 25 MiB``; or why there is no prediction."""
    try:
        note = f"predicted {show_bytes(explained.predicted_bytes)}"
    except ValueError as error:  # a loop on data, a callback: jax says so when the gradient is traced
        return f"not predicted, the loss has no gradient: {str(error).split('. ')[0]}"
    host = explained.timeline.peak_host
    note += f" ({show_bytes(host)} of it in host memory)" if host else ""
    if explained.measured_bytes is not None:
        note += f", measured by XLA {show_bytes(explained.measured_bytes)}"
    limits = {"budget": explained.memory_budget, "free on the device": explained.free_bytes}
    return note + "".join(f", {name} {show_bytes(n)}" for name, n in limits.items() if n is not None)


def draw_timeline(axis: Any, explained: Explained) -> None:
    """Draw what is on the device (area), what is on the host (line), and the buffers for both, over estimated work."""
    timeline, mib = explained.timeline, 2.0**20
    edges = [0.0, *timeline.ends]

    def stairs(values: list[int], **style: Any) -> None:
        axis.stairs([v / mib for v in values], edges, **style)

    segments = timeline.segments
    stairs([s.filled for s in segments], fill=True, color="tab:blue", alpha=0.5, label="device, in use")
    stairs([s.device for s in segments], color="tab:blue", lw=1.2, label="device, buffers")
    if timeline.peak_host:
        stairs([s.filled_host for s in segments], fill=True, color="tab:green", alpha=0.3, label="host, in use")
        stairs([s.host for s in segments], color="tab:green", lw=1.2, label="host, buffers")
    for begin, end, learning in phases(timeline):
        axis.axvspan(begin, end, color=COLOURS[learning], alpha=0.12, lw=0)
    lines = {"measured by XLA": explained.measured_bytes, "budget": explained.memory_budget}
    for (label, value), style in zip(lines.items(), (":", "--"), strict=True):
        if value is not None:
            axis.axhline(value / mib, color="black", ls=style, lw=1, label=label)
    axis.set(
        xlim=(0, 1), ylim=(0, None), xlabel="estimated work (red: acting, orange: learning)", ylabel="temporary MiB"
    )
    axis.legend(fontsize=7, loc="upper left")


def phases(timeline: Timeline) -> list[tuple[float, float, bool]]:
    """``(begin, end, learning)`` of consecutive segments in the same phase, as shares of the whole."""
    found: list[tuple[float, float, bool]] = []
    begin = 0.0
    for segment, end in zip(timeline.segments, timeline.ends, strict=True):
        if found and found[-1][2] == segment.learning:
            found[-1] = (found[-1][0], end, segment.learning)
        else:
            found.append((begin, end, segment.learning))
        begin = end
    return found
