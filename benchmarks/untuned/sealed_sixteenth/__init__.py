"""A sixteenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the fifteenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import energies_by_hand, modules_by_hand, rivals_by_hand, slots_by_hand, transport_by_hand

CASES = {
    "MADDPG of 4 agents T=16 B=64": (
        rivals_by_hand.workload,
        {"length": 16, "batch": 64, "agents": 4, "hidden": 64},
    ),
    "Sinkhorn imitation T=64 B=32": (
        transport_by_hand.workload,
        {"length": 64, "batch": 32, "experts": 48, "hidden": 64, "code": 16},
    ),
    "implicit cloning T=16 B=16": (energies_by_hand.workload, {"length": 16, "batch": 16, "hidden": 64}),
    "slot attention T=8 B=16": (
        slots_by_hand.workload,
        {"length": 8, "batch": 16, "side": 12, "width": 32, "slots": 4},
    ),
    "RIMs T=32 B=32": (modules_by_hand.workload, {"length": 32, "batch": 32, "modules": 6, "width": 32}),
}

TINY = {
    rivals_by_hand.workload: {"length": 4, "batch": 3, "agents": 3, "hidden": 5, "chunk": 2},
    transport_by_hand.workload: {"length": 6, "batch": 4, "experts": 5, "hidden": 6, "code": 3, "chunk": 2},
    energies_by_hand.workload: {"length": 4, "batch": 4, "hidden": 16, "chunk": 1},
    slots_by_hand.workload: {"length": 4, "batch": 3, "side": 6, "width": 4, "slots": 2, "chunk": 1},
    modules_by_hand.workload: {"length": 8, "batch": 4, "modules": 5, "width": 4, "again": 4, "chunk": 2},
}
