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
    "concatenations": Feature(False, "of slices: wrong where the lengths add up to a constant; refused with shapes"),
    "series of slices": Feature(False, "reads of series whose value has a length that depends on t"),
    "lookups out of range": Feature(False, "they are clipped; they shall be NaN, or 0 for integers"),
    "lookups that clip": Feature(False, 'outside="clip" does not exist'),
    "custom derivatives": Feature(True),
    "lengths under until": Feature(False, "of slices that begin after an end: -1"),
    "slices after the end": Feature(False, "under until=: their length is -1, and sums over them are refused"),
    "shared under until": Feature(
        False, "a Shared carry is refused; and what shared() sees of ended environments is unsaid"
    ),
    "lookups of ended environments": Feature(False, "what they give is not said anywhere"),
    "integer rewards": Feature(True),
    "last discount": Feature(True),
    "strict 64-bit promotion": Feature(
        False, "s[t:t + 3][-1] with float64: its index is an int64, the length an int32"
    ),
    "boolean fill": Feature(False, "window(fill=False): AttributeError"),
    "unreached ends": Feature(False, "an end that no read reaches counts as a dependence, and closes a circle"),
    "vmap of lookups": Feature(False, "refused"),
    "names of slices": Feature(False, "checkpoint_name of a slice is refused"),
    "associative scans": Feature(False, "over slices: a TypeError"),
    "take along a slice": Feature(False, "take_along_axis of a slice is refused"),
    "maps over empty slices": Feature(False, "jax.vmap over a slice that may be empty is refused"),
    "slices in control flow": Feature(False, "refused"),
    "slices of slices": Feature(False, "x[:t + 1][-2:] and strides are refused"),
}

#: The names of those that are on.
ON = frozenset(k for k, f in FEATURES.items() if f.on)
