"""A fourteenth sealed set: four learners whose families none of the others has, written before rlfx ran at full size, for judging
what the thirteenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import demonstrated_by_hand, rules_by_hand, streaming_by_hand, truncated_by_hand

CASES = {
    "TQC T=16 B=16": (truncated_by_hand.workload, {"length": 16, "batch": 16, "hidden": 64}),
    "maximum entropy IRL of 12x12 maps T=32 B=64": (
        demonstrated_by_hand.workload,
        {"length": 32, "batch": 64, "side": 12, "hidden": 64},
    ),
    "LPG of 4 agents T=32 B=16": (rules_by_hand.workload, {"agents": 4, "length": 32, "batch": 16, "hidden": 64}),
    "stream AC(lambda) T=64 B=32": (streaming_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64}),
}

TINY = {
    truncated_by_hand.workload: {"length": 4, "batch": 4, "hidden": 4, "chunk": 2},
    demonstrated_by_hand.workload: {"length": 5, "batch": 4, "side": 3, "hidden": 4, "chunk": 2},
    rules_by_hand.workload: {"agents": 2, "length": 5, "batch": 3, "hidden": 4},
    streaming_by_hand.workload: {"length": 6, "batch": 4, "hidden": 4, "chunk": 2},
}
