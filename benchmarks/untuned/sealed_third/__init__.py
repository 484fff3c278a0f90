"""A third sealed set: four families more, written before they were run, for judging what the second one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import boards, entities_by_hand, experts, novelty

CASES = {
    "DRC(2, 2) on 8x8 boards T=16 B=4": (
        boards.workload,
        {"length": 16, "batch": 4, "side": 8, "channels": 16, "layers": 2, "ticks": 2},
    ),
    "PPO among 10 entities T=32 B=16": (
        entities_by_hand.workload,
        {"length": 32, "batch": 16, "hidden": 32, "layers": 2},
    ),
    "two of 8 experts T=32 B=64": (
        experts.workload,
        {"length": 32, "batch": 64, "hidden": 64, "width": 128, "experts": 8},
    ),
    "Never Give Up T=128 B=32, 64 remembered": (
        novelty.workload,
        {"length": 128, "batch": 32, "hidden": 64, "size": 16, "memory": 64},
    ),
}

TINY = {
    boards.workload: {"length": 5, "batch": 2, "side": 3, "channels": 2, "layers": 2, "ticks": 2, "chunk": 2},
    entities_by_hand.workload: {"length": 6, "batch": 4, "hidden": 8, "layers": 1, "chunk": 3},
    experts.workload: {"length": 8, "batch": 3, "hidden": 5, "width": 4, "experts": 3, "chunk": 2, "rows": 4},
    novelty.workload: {"length": 12, "batch": 3, "hidden": 6, "size": 4, "memory": 7, "chunk": 2},
}
