"""An eleventh sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the tenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import dilated_by_hand, episodic_by_hand, mazes_by_hand, shaping_by_hand, tape_by_hand

CASES = {
    "dilated convolutions T=128 B=16": (dilated_by_hand.workload, {"length": 128, "batch": 16, "hidden": 64}),
    "episodic control T=32 B=32": (episodic_by_hand.workload, {"length": 32, "batch": 32, "hidden": 64, "entries": 256}),
    "external memory T=64 B=16": (tape_by_hand.workload, {"length": 64, "batch": 16, "hidden": 64}),
    "value iteration network T=32 B=64": (
        mazes_by_hand.workload,
        {"length": 32, "batch": 64, "side": 12, "iterations": 16, "hidden": 16},
    ),
    "LOLA T=32 B=128": (shaping_by_hand.workload, {"length": 32, "batch": 128, "hidden": 64}),
}

TINY = {
    dilated_by_hand.workload: {"length": 12, "batch": 4, "hidden": 6, "chunk": 2},
    episodic_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "entries": 32, "chunk": 16},
    tape_by_hand.workload: {"length": 8, "batch": 3, "hidden": 6, "chunk": 4},
    mazes_by_hand.workload: {"length": 7, "batch": 4, "side": 5, "iterations": 4, "hidden": 3, "chunk": 2},
    shaping_by_hand.workload: {"length": 10, "batch": 8, "hidden": 6},
}
