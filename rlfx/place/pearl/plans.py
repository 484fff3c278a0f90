"""Which of the host's threads act and which train: who does the work changes while a run goes on, what is done does not.

The work of an iteration is that of ``actors`` actors and ``sub_batches`` sub-batches. A plan says which threads act, and which
of the others take sub-batches of every update, on the actors' device (PEARL section 3.3.1, algorithm 1). The learner adds up
gradients in the order of sub-batches, whoever made them.
"""

from __future__ import annotations

import numpy as np

from rlfx.place.compose import Pools, reallocate
from rlfx.place.pearl.crew import Crew, Part


def acting(plan: Pools, actors: int, thread: int) -> range:
    """The actors that a thread acts for: all of them are dealt to the first ``plan.actors`` threads.

    Example:
      >>> [list(acting(Pools(2, 1, 0.3), 3, thread)) for thread in range(3)]
      [[0, 2], [1], []]
    """
    return range(thread, actors, plan.actors) if thread < plan.actors else range(0)


def helpers(plan: Pools, sub_batches: int) -> list[int]:
    """The threads that take the last sub-batches of an update, one each; the learner keeps one sub-batch at least.

    Example:
      >>> helpers(Pools(2, 2, 0.5), 6), helpers(Pools(2, 1, 1.0), 3), helpers(Pools(4, 0, 0.0), 4)
      ([2, 3, 2], [2, 2], [])
    """
    count = min(sub_batches - 1, round(plan.host_share * sub_batches)) if plan.trainers else 0
    return [plan.actors + p % plan.trainers for p in range(count)]


class Clock:
    """Seconds that threads took for what in which iteration, until they are looked at."""

    def __init__(self, on: bool):
        self.on = on
        self.seconds: dict[tuple[int, str, int], float] = {}

    def add(self, i: int, what: str, thread: int, seconds: float) -> None:
        """Of one thread, which alone writes it."""
        if self.on:
            self.seconds[i, what, thread] = self.seconds.get((i, what, thread), 0.0) + seconds

    def taken(self, i: int, what: str, threads: int) -> float:
        """Of the slowest thread."""
        return max(self.seconds.get((i, what, thread), 0.0) for thread in range(threads))

    def forget(self, before: int) -> None:
        """What was looked at."""
        for key in [key for key in list(self.seconds) if key[0] < before]:
            del self.seconds[key]


class Plans:
    """Which plan holds in which iteration: that of the next is made at the beginning of this one."""

    def __init__(self, crew: Crew, actors: int, sub_batches: int, ahead: int, begin: int, every: int | None):
        self.threads, self.sub_batches, self.ahead, self.begin, self.every = actors, sub_batches, ahead, begin, every
        self.clock = Clock(every is not None)
        self.made = [(begin, Pools(actors, 0, 0.0))]
        self.known = begin + ahead  # iterations up to this one have a plan
        self.changed = crew.condition()

    def take(self, part: Part, i: int) -> Pools:
        """The plan of an iteration, once there is one."""
        part.wait_for(self.changed, lambda: self.known >= i, f"the plan of iteration {i}")
        with self.changed:
            return next(plan for since, plan in reversed(self.made) if since <= i)

    def go_on(self, i: int, warm: int) -> None:
        """At the beginning of iteration ``i``: plan the iteration which its end lets actors begin."""
        now = following = self.made[-1][1]
        since = i - max(self.begin, warm, self.made[-1][0])  # of this plan alone
        if self.every is not None and since > 0 and since % self.every == 0:
            following = self._moved(now, range(i - self.every, i))
            self.clock.forget(i)
        with self.changed:
            self.known = i + self.ahead + 1
            if following != now:
                self.made.append((self.known, following))
            self.changed.notify_all()

    def _moved(self, now: Pools, iterations: range) -> Pools:
        """Algorithm 1, by medians over some iterations."""
        taken = [[self.clock.taken(i, what, self.threads) for i in iterations] for what in ("learn", "act", "train")]
        learner, actor, trainer = (float(np.median(row)) for row in taken)
        return reallocate(now, learner, actor, trainer, step=1 / self.sub_batches)
