"""A tenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the ninth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import catching_by_hand, crossed_by_hand, expansion_by_hand, segments, trials_by_hand

CASES = {
    "PQN at catch T=32 B=256": (catching_by_hand.workload, {"length": 32, "batch": 256, "hidden": 128}),
    "CrossQ T=16 B=32": (crossed_by_hand.workload, {"length": 16, "batch": 32, "hidden": 256}),
    "preferred segments T=64 B=64, 3 members": (segments.workload, {"length": 64, "batch": 64, "hidden": 128}),
    "RL^2 T=512 B=16": (trials_by_hand.workload, {"length": 512, "batch": 16, "hidden": 64, "chunk": 32}),
    "STEVE T=128 B=8, 4 models": (expansion_by_hand.workload, {"length": 128, "batch": 8, "hidden": 128}),
}

TINY = {
    catching_by_hand.workload: {"length": 12, "batch": 3, "hidden": 6, "chunk": 4},
    crossed_by_hand.workload: {"length": 4, "batch": 4, "hidden": 6},
    segments.workload: {"length": 6, "batch": 4, "hidden": 6, "chunk": 2},
    trials_by_hand.workload: {"length": 16, "batch": 3, "hidden": 6, "chunk": 4},
    expansion_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 4},
}
