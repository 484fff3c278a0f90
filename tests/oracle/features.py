"""What the generator may write. A feature that is off names the reason; switch it on when that is mended.

``python -m tests.oracle.sweep 0 50 --on "custom derivatives" --only "custom derivatives"`` tries one that is off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    on: bool
    reason: str = ""


FEATURES: dict[str, Feature] = {
    "beyond": Feature(True),
    "results of scans over slices": Feature(True),
    "infinities outside": Feature(True),
    "NumPy integers": Feature(True),
    "concatenations": Feature(True),
    "series of slices": Feature(True),
    "lookups out of range": Feature(True),
    "lookups that clip": Feature(True),
    "custom derivatives": Feature(True),
    "lengths under until": Feature(True),
    "slices after the end": Feature(True),
    "shared under until": Feature(True),
    "lookups of ended environments": Feature(True),
    "values of ended environments": Feature(
        False,
        "rlfx.shared and lookups see their last carry; what is computed from it and from other timesteps is unsaid",
    ),
    "integer rewards": Feature(True),
    "last discount": Feature(True),
    "strict 64-bit promotion": Feature(True),
    "boolean fill": Feature(True),
    "unreached ends": Feature(True),
    "vmap of lookups": Feature(True),
    "names of slices": Feature(True),
    "associative scans": Feature(False, "refused: lax.scan and jnp.cumsum are meant"),
    "take along a slice": Feature(True),
    "maps over empty slices": Feature(True),
    "slices in control flow": Feature(False, "refused: a slice inside cond and switch"),
    "slices of slices": Feature(True),
    "running values": Feature(False, "written after the seeds that tests name, which would grow otherwise; a test has it on"),
    "values behind ends": Feature(False, "as running values"),
}

#: The names of those that are on.
ON = frozenset(k for k, f in FEATURES.items() if f.on)
