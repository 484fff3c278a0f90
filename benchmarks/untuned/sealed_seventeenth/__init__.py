"""A seventeenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for
judging what the sixteenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import changes_by_hand, contexts_by_hand, kronecker_by_hand, processes_by_hand, spikes_by_hand

CASES = {
    "spiking actor critic T=64 B=32": (spikes_by_hand.workload, {"length": 64, "batch": 32, "hidden": 96}),
    "ACKTR's factors T=64 B=64": (kronecker_by_hand.workload, {"length": 64, "batch": 64, "hidden": 128}),
    "Gaussian processes T=25 B=128, 128 points": (
        processes_by_hand.workload,
        {"length": 25, "batch": 128, "points": 128, "hidden": 64},
    ),
    "PEARL T=32 B=64": (contexts_by_hand.workload, {"length": 32, "batch": 64, "hidden": 128}),
    "pixel control T=20 B=32": (changes_by_hand.workload, {"length": 20, "batch": 32, "side": 20, "hidden": 128}),
}

TINY = {
    spikes_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "again": 4, "chunk": 2},
    kronecker_by_hand.workload: {"length": 6, "batch": 4, "hidden": 5, "chunk": 2},
    processes_by_hand.workload: {"length": 5, "batch": 4, "points": 6, "hidden": 5, "chunk": 2},
    contexts_by_hand.workload: {"length": 6, "batch": 4, "hidden": 5, "chunk": 2},
    changes_by_hand.workload: {"length": 6, "batch": 4, "side": 16, "hidden": 6, "chunk": 2},
}
