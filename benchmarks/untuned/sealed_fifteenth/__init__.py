"""A fifteenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the fourteenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import diverse_by_hand, entropies_by_hand, gated_by_hand, measures_by_hand, trees_by_hand

CASES = {
    "forward-backward T=16 B=64": (
        measures_by_hand.workload,
        {"length": 16, "batch": 64, "code": 32, "hidden": 128},
    ),
    "GTrXL T=64 B=16": (gated_by_hand.workload, {"length": 64, "batch": 16, "width": 64}),
    "EDAC T=16 B=32, 8 critics": (
        diverse_by_hand.workload,
        {"length": 16, "batch": 32, "members": 8, "hidden": 64},
    ),
    "APT T=32 B=64, 12 nearest": (
        entropies_by_hand.workload,
        {"length": 32, "batch": 64, "code": 16, "hidden": 64},
    ),
    "TreeQN T=16 B=32": (trees_by_hand.workload, {"length": 16, "batch": 32, "code": 64, "hidden": 64}),
}

TINY = {
    measures_by_hand.workload: {"length": 6, "batch": 5, "code": 3, "hidden": 4, "chunk": 2},
    gated_by_hand.workload: {"length": 32, "batch": 2, "width": 8, "chunk": 1},
    diverse_by_hand.workload: {"length": 4, "batch": 4, "members": 3, "hidden": 4, "chunk": 2},
    entropies_by_hand.workload: {"length": 4, "batch": 16, "code": 3, "hidden": 6, "chunk": 2},
    trees_by_hand.workload: {"length": 4, "batch": 4, "code": 4, "hidden": 4, "chunk": 2},
}
