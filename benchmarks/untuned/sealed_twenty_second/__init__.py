"""A twenty-second sealed set: five learners as they are published and as libraries have them (TD3+BC, discrete SAC, a model-based
policy optimisation by an ensemble, Dreamer's behaviours in imagination, and Rainbow), written before rlfx ran at full size, for
judging what the sets before it led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import choosing_by_hand, cloned_by_hand, imagined_by_hand, latents_by_hand, rainbow_by_hand

CASES = {
    "TD3+BC T=32 B=16": (cloned_by_hand.workload, {"length": 32, "batch": 16, "hidden": 256}),
    "discrete SAC T=64 B=32": (choosing_by_hand.workload, {"length": 64, "batch": 32, "hidden": 128}),
    "MBPO T=16 B=16, 4 models": (imagined_by_hand.workload, {"length": 16, "batch": 16, "hidden": 128}),
    "Dreamer's behaviours T=16 B=8": (latents_by_hand.workload, {"length": 16, "batch": 8, "hidden": 128}),
    "Rainbow T=32 B=32": (rainbow_by_hand.workload, {"length": 32, "batch": 32, "hidden": 128}),
}

TINY = {
    cloned_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 2},
    choosing_by_hand.workload: {"length": 12, "batch": 4, "hidden": 6, "chunk": 4},
    imagined_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "chunk": 20, "block": 4},
    latents_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "states": 8},
    rainbow_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 4},
}
