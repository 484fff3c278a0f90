"""What transforms ask of a program's schedule; nothing of it changes what the program means."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Hosting:
    """Which stored values go to host memory.

    Attributes:
      names: those that ``jax.ad_checkpoint.checkpoint_name`` has named so.
      min_bytes: those that take at least as much, over the whole domain; None: none by size.
    """

    names: tuple[str, ...] = ()
    min_bytes: int | None = None


@dataclass(frozen=True)
class Leaving:
    """What nested loops (``lax.scan``) leave a loop over t for, if it can do without them.

    Attributes:
      start: bytes of memory traffic that starting one of their operations is worth.
      room: bytes that one may take at all timesteps together.
    """

    start: int
    room: int


@dataclass(frozen=True)
class Inside:
    """What a loop over t computes itself of what it could be given for all timesteps.

    Attributes:
      room: bytes that stay close to the processor: of what it is given within them nothing is computed in the loop.
      start: bytes of memory traffic that starting an operation is worth.
      batch: environments on a device.
    """

    room: int
    start: int
    batch: int


@dataclass(frozen=True)
class Directives:
    """What was asked for.

    Attributes:
      timesteps, environments: the size of the learner's blocks (``incrementalize``).
      vectorize: the axes over which everything that can leaves a loop.
      offload: which stored values go to the host.
      ahead: random numbers (what depends on timestep, environment and key alone) of at most so many bytes are computed before
        a loop that uses them, for all timesteps at once.
      start: bytes of memory traffic that starting an operation is worth: what a loop starts at every timestep leaves it for
        less.
      nested: when nested loops leave a loop over t that can do without them.
      inside: when a loop over t computes what it could be given.
      rows: products of fewer rows leave a loop over t that can do without them, where nothing more is kept for them.
      loops: what runs the loops of the acting pass, in place of ``lax.scan``: a ``Runner`` (``schedule/physical.py``) that also
        says which equations it starts together, ``takes(equation)``.
    """

    timesteps: int | None = None
    environments: int | None = None
    vectorize: tuple[str, ...] = ()
    offload: Hosting | None = None
    ahead: int | None = None
    start: int | None = None
    nested: Leaving | None = None
    inside: Inside | None = None
    rows: int | None = field(default=None, repr=False)  # a machine asks for it, whatever the program
    loops: Any = None

    @property
    def less_memory(self) -> bool:
        """Whether the program asks for less memory: for tiles, or for host memory."""
        return bool(self.timesteps or self.environments or self.offload)

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if f.repr)
        return ", ".join(f"{name}={value!r}" for name, value in given if value not in (None, ()))
