"""A twelfth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the eleventh one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import hindsight_by_hand, inverse_by_hand, memories_by_hand, planned_by_hand, strategies_by_hand

CASES = {
    "RDPG T=64 B=32": (memories_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64}),
    "differentiable control T=48 B=128": (planned_by_hand.workload, {"length": 48, "batch": 128, "hidden": 64}),
    "evolution strategies T=128 B=16, 32 pairs": (
        strategies_by_hand.workload,
        {"length": 128, "batch": 16, "pairs": 32, "hidden": 64},
    ),
    "DDPG with hindsight T=50 B=32": (hindsight_by_hand.workload, {"length": 50, "batch": 32, "hidden": 128}),
    "inverse dynamics of 16x16 frames T=32 B=16": (
        inverse_by_hand.workload,
        {"length": 32, "batch": 16, "side": 16, "channels": (16, 32), "hidden": 64},
    ),
}

TINY = {
    memories_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 2},
    planned_by_hand.workload: {"length": 6, "batch": 8, "hidden": 6, "chunk": 2},
    strategies_by_hand.workload: {"length": 6, "batch": 3, "pairs": 8, "hidden": 6, "chunk": 2},
    hindsight_by_hand.workload: {"length": 10, "batch": 4, "hidden": 6, "chunk": 5},
    inverse_by_hand.workload: {"length": 6, "batch": 4, "side": 9, "channels": (2, 3), "hidden": 6, "chunk": 2},
}
