"""A fourth sealed set: five families that are much used now, written before rlfx ran at full size, for judging what the third
one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import dreams_by_hand, goals, preferences, tours_by_hand, trust

CASES = {
    "contrastive goals T=16 B=128": (goals.workload, {"length": 16, "batch": 128, "hidden": 64, "code": 32}),
    "TRPO T=64 B=32, 10 conjugate gradients": (
        trust.workload,
        {"length": 64, "batch": 32, "hidden": 64, "iterations": 10},
    ),
    "DPO T=128, 4 pairs": (
        preferences.workload,
        {"length": 128, "batch": 4, "words": 256, "width": 64, "layers": 2},
    ),
    "POMO, 16 instances of 20 cities": (
        tours_by_hand.workload,
        {"instances": 16, "cities": 20, "width": 64, "layers": 2},
    ),
    "DreamerV3's world model T=32 B=16": (
        dreams_by_hand.workload,
        {"length": 32, "batch": 16, "hidden": 128, "groups": 8, "classes": 16},
    ),
}

TINY = {
    goals.workload: {"length": 4, "batch": 5, "hidden": 6, "code": 3},
    trust.workload: {"length": 16, "batch": 8, "hidden": 6, "iterations": 3, "few": 2, "many": 4},
    preferences.workload: {"length": 9, "batch": 4, "words": 7, "width": 8, "layers": 1, "steps": 2},
    tours_by_hand.workload: {"instances": 4, "cities": 6, "width": 8, "layers": 1, "chunk": 2},
    dreams_by_hand.workload: {
        "length": 6, "batch": 3, "hidden": 8, "groups": 2, "classes": 3, "blocks": 2, "chunk": 3,
    },
}  # fmt: skip
