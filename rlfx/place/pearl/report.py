"""What a run did, and how long who waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlfx.place.compose import Pools


@dataclass(frozen=True)
class Report:
    """How a run went.

    Attributes:
      iterations, updates, transitions: made in this run.
      reason: ``"finished"``, or what ``after`` returned.
      seconds: of each iteration, float64 ``[iterations]``.
      predicted: of an iteration, by the composition; None if none was given.
      busy: seconds in which each part did not wait, compilation included.
      waited: seconds in which it did.
      cpu: processor seconds of its thread, without XLA's own threads and without processes.
      ages: how many chunks of transitions were inserted by the age of the weights that chose their actions, in updates:
        those that the learner had made since, when the chunk could be drawn first.
      deferred: iterations whose insertion waited for priorities, as it would have overwritten what the learner held.
      peaks: the most items that each queue held.
      pools: from which iteration on how many threads of the host acted and trained, and the share of a batch that they trained.
    """

    iterations: int
    updates: int
    transitions: int
    reason: str
    seconds: np.ndarray
    predicted: float | None
    busy: Mapping[str, float]
    waited: Mapping[str, float]
    cpu: Mapping[str, float]
    ages: Mapping[int, int]
    deferred: int
    peaks: Mapping[str, int]
    pools: tuple[tuple[int, Pools], ...]

    @property
    def iteration(self) -> float:
        """Seconds of an iteration: the median of the second half, which compiles nothing."""
        return float(np.median(self.seconds[len(self.seconds) // 2 :])) if len(self.seconds) else 0.0

    def explain(self) -> str:
        """The report as text."""
        predicted = "" if self.predicted is None else f", predicted {1e3 * self.predicted:.2f}"
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(self.ages.items()))
        width = max(map(len, ["seconds", *self.busy]))
        return "\n".join(
            [
                f"{self.iterations} iterations ({self.reason}): {self.transitions} transitions, {self.updates} updates",
                f"{1e3 * self.iteration:.2f} ms an iteration{predicted}",
                f"  {'seconds':{width}s}  {'busy':>8s}  {'waited':>8s}  {'processor':>9s}",
                *(
                    f"  {name:{width}s}  {self.busy[name]:8.2f}  {self.waited[name]:8.2f}  {self.cpu[name]:9.2f}"
                    for name in self.busy
                ),
                f"age of the weights that acted, in updates: {ages}",
                f"insertions that waited for priorities: {self.deferred}",
                *(
                    f"from iteration {since} on: {pools.actors} threads acted, {pools.trainers} trained "
                    f"{100 * pools.host_share:.0f}% of a batch"
                    for since, pools in self.pools[1:]
                ),
            ]
        )
