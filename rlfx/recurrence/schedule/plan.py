"""Plans: in which form, and in tiles of which size, the gradient of a program is computed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, BYTES, POSITIVE, expect, one_of, optional, shown
from rlfx.errors import ScheduleError, located

#: What ``Plan.form`` may be.
FORMS = {
    "at once": "the learner runs for all timesteps at once",
    "blocks": "the learner runs in blocks of timesteps, gradients accumulate",
    "stream": "acting and learning alternate, chunk by chunk; the learner follows behind the actor",
    "replay": "acting keeps its state now and then; the learner runs in blocks, and acts each of them again",
    "one pass": "the acting loop is differentiated, a recurrence runs forward once",
}

#: Those that take all timesteps at a time.
WHOLE = ("at once", "one pass")

_FIELDS = {
    "form": one_of(*FORMS),
    "block": optional(POSITIVE),
    "environments": optional(POSITIVE),
    "offload": optional(BYTES),
    "cached": BOOLEAN,
}


@dataclass(frozen=True)
class Plan:
    """How the gradient of a program is computed. A value: it can be saved, compared and given to ``compile(plan=)``.

    Attributes:
      form: "at once", "blocks", "stream", "replay" or "one pass".
      block: timesteps at a time; None for "at once" and "one pass".
      environments: environments at a time, within a block or for all timesteps ("at once"); None for all of them.
      offload: stored values that take at least so many bytes, over the whole domain, are in host memory, and fetched one
        block ahead; None: only those that ``rlfx.offload`` names. Belongs to "blocks".
      cached: whether the acting pass keeps the values of wide products (256 operations an element or more), so that the
        learner computes their derivatives alone. Faster for layers of 256 units, at their bytes for every timestep.

    Example:
      >>> import rlfx
      >>> plan = rlfx.Plan("blocks", block=25)
      >>> rlfx.Plan.from_json(plan.to_json()) == plan
      True
    """

    form: str = "at once"
    block: int | None = None
    environments: int | None = None
    offload: int | None = None
    cached: bool = False

    def __post_init__(self) -> None:
        for name, kind in _FIELDS.items():
            object.__setattr__(self, name, expect(name, getattr(self, name), kind, ScheduleError, of="Plan"))
        if self.offload is not None and self.form != "blocks":
            fact = f"{self.form!r} fetches nothing from the host: offload is for 'blocks'."
            raise ScheduleError(located(fact, where=J.here(), fix='Use Plan("blocks", ...).'))
        if (self.block is None) != (self.form in WHOLE):
            fact = f"{self!r} is no plan: a block belongs to every form but {' and '.join(WHOLE)}."
            fix = 'Write Plan("at once"), or give the timesteps of a block: Plan("blocks", 25).'
            raise ScheduleError(located(fact, where=J.here(), fix=fix))

    def __str__(self) -> str:
        parts = [FORMS[self.form]]
        if self.tile:
            parts[0] += f" ({self.tile} at a time)"
        if self.cached:
            parts.append("it keeps the actor's wide products")
        if self.offload is not None:
            parts.append("what is stored is in host memory")
        return "; ".join(parts)

    @property
    def tile(self) -> str:
        """What the learner takes at a time, in words.

        Example:
          >>> Plan("blocks", 25, environments=1).tile
          '25 timesteps x 1 environment'
        """
        sizes = ((self.block, "timestep"), (self.environments, "environment"))
        return " x ".join(f"{n} {what}" + "s" * (n > 1) for n, what in sizes if n)

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
          ScheduleError: if the text is no plan.
        """
        try:
            fields: Any = json.loads(text)
        except (ValueError, TypeError):
            fields = None
        known = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or set(fields) - set(known):
            fact = f"This text is no plan: {shown(text)}."
            fix = f"Give what Plan.to_json wrote, an object with the fields {', '.join(known)}."
            raise ScheduleError(located(fact, where=J.here(), fix=fix))
        return cls(**fields)
