"""The window again, with some of it at another cost: how long would the program take?

Every thread of Python and the device have a clock. Who acts advances its own by what that costs; who begins to act was
woken, or launched, by those that acted until then, and goes on from the latest of their clocks. With all costs 1 the
window comes out as it was. It is work that is conserved: who acts keeps its order, and waits only for what it waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlfx.profile.attributed import Process
from rlfx.profile.rules import BUSY, CALLBACK, DEVICE, FETCH
from rlfx.profile.sweep import ACTING
from rlfx.profile.timeline import CONTAINER, Context

LEAF = "leaf"
HOSTS = ("main", "program")


@dataclass(frozen=True)
class Replay:
    """A window, made ready to be replayed at several costs: stretches in which the same actors act, in order.

    `of` and `combo` say which combinations a stretch has, for `ns` each; `paid` is what profiling cost in them, by actor.
    """

    process: Process
    acts: np.ndarray  # of each stretch, by actor
    before: np.ndarray  # the combination right before each stretch
    of: np.ndarray
    combo: np.ndarray
    ns: np.ndarray
    paid: np.ndarray

    @classmethod
    def of_process(cls, process: Process, paid: Mapping[str, float] | None = None) -> Replay:
        """Args:
        process: as it was captured.
        paid: ns that each event of a kind (`rlfx.profile.overhead.EVENTS`) cost while it was captured; nothing by default.
        """
        sweep = process.sweep
        acts = _acting(process)
        _, code = np.unique(acts, axis=0, return_inverse=True)
        edges = np.flatnonzero(np.diff(code.reshape(-1)[sweep.combo], prepend=-1))
        stretch = np.zeros(len(sweep.combo), np.int64)
        stretch[edges[1:]] = 1
        keys, pair = np.unique(np.cumsum(stretch) * len(acts) + sweep.combo, return_inverse=True)
        of, combo = np.divmod(keys, len(acts))
        ns = np.bincount(pair, np.diff(sweep.bounds), len(keys))
        spent = _paid(process, paid or {}, acts.shape[1], pair, len(keys))
        return cls(process, acts[sweep.combo[edges]], sweep.combo[np.maximum(edges - 1, 0)], of, combo, ns, spent)

    def scaled(self, factor: float) -> Replay:
        """With events that cost so many times what they cost here."""
        return dataclasses.replace(self, paid=self.paid * factor)

    def lasts(self, cost: np.ndarray) -> float:
        """How long the window would take.

        Args:
          cost: for each of `process.sweep.contexts` what an instant in it costs, 0 to 1. For a thread that waits: how
            much of what it waits for it still waits for.

        Returns:
          ns; those of the window if every cost is 1 and nothing was paid.
        """
        costs = _costs(self.process, cost)
        spent = (self.ns[:, None] - self.paid) * costs[self.combo]
        runs = np.stack([np.bincount(self.of, column, len(self.acts)) for column in spent.T], axis=1)
        clocks = [0.0] * self.acts.shape[1]
        acted = [True] * len(clocks)
        stretches = zip(self.acts.tolist(), np.maximum(runs, 0.0).tolist(), costs[self.before].tolist(), strict=True)
        for acting, taken, wait in stretches:
            woken = max((c for c, was in zip(clocks, acted, strict=True) if was), default=max(clocks))
            for i, now in enumerate(acting):
                if now:
                    if not acted[i] and woken > clocks[i]:
                        clocks[i] += wait[i] * (woken - clocks[i])
                    clocks[i] += taken[i]
            if not any(acting):
                clocks = [max(clocks) + min(taken)] * len(clocks)
            acted = acting
        return max(clocks)


def _actors(process: Process) -> tuple[list[int], list[int]]:
    """Tracks of the threads of Python, an actor each; and all the others, which are the device together."""
    lines = process.sweep.tracks
    hosts = [i for i, line in enumerate(lines) if line.kind in HOSTS]
    return hosts, [i for i, line in enumerate(lines) if line.kind not in HOSTS]


def _acting(process: Process) -> np.ndarray:
    """By combination and actor: does it act?"""
    (hosts, others), sweep = _actors(process), process.sweep
    acts = np.zeros((len(sweep.columns), len(hosts) + 1), bool)
    for row, (column, attribution) in enumerate(zip(sweep.columns, sweep.attributions, strict=True)):
        acts[row, :-1] = [_acts(sweep.contexts[column[track]], attribution.state == BUSY) for track in hosts]
        acts[row, -1] = bool(_working(process, [column[track] for track in others]))
    return acts


def _costs(process: Process, cost: np.ndarray) -> np.ndarray:
    """By combination and actor: what an instant costs."""
    (hosts, others), sweep = _actors(process), process.sweep
    costs = np.ones((len(sweep.columns), len(hosts) + 1))
    for row, column in enumerate(sweep.columns):
        costs[row, :-1] = [1.0 if sweep.contexts[column[t]].state is None else cost[column[t]] for t in hosts]
        costs[row, -1] = max((cost[c] for c in _working(process, [column[t] for t in others])), default=1.0)
    return costs


def _working(process: Process, contexts: list[int]) -> list[int]:
    """Those in which the device works: on instructions and callbacks, else on programs that are open."""
    known = process.sweep.contexts
    leaves = [c for c in contexts if known[c].device == LEAF or known[c].state == CALLBACK]
    return leaves or [c for c in contexts if known[c].device]


def _acts(context: Context, busy: bool) -> bool:
    if context.state == FETCH:
        return not busy
    return context.state in ACTING or context.state == DEVICE or (context.device == CONTAINER and context.state is None)


def _paid(process: Process, paid: Mapping[str, float], actors: int, pair: np.ndarray, count: int) -> np.ndarray:
    """ns that profiling cost in each pair of stretch and combination, for each actor."""
    (hosts, _), sweep = _actors(process), process.sweep
    known = {id(line): i for i, line in enumerate(sweep.tracks)}
    places = [known.get(id(track.line), -1) for track in process.timeline.tracks]
    actor = np.asarray([hosts.index(at) if at in hosts else actors - 1 for at in places])
    parallel = np.asarray([max(1, a.parallel) for a in sweep.attributions])
    out = np.zeros((count, actors))
    for kind, marks in process.timeline.paid.items():
        if paid.get(kind):
            at = np.clip(np.searchsorted(sweep.bounds, marks.times, "right") - 1, 0, len(sweep.combo) - 1)
            who = actor[marks.lines]
            shared = np.where(who == actors - 1, parallel[sweep.combo[at]], 1)
            np.add.at(out, (pair[at], who), paid[kind] / shared)
    return out
