"""A twentieth sealed set: five learners whose families none of the others has (neural bandits that are sure of little, returns as
particles compared by kernels, safe control by an epigraph of margins and costs, slates drawn by a Plackett-Luce policy, and
coordination graphs of a team), written before rlfx ran at full size, for judging what the sets before it led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import confident_by_hand, coordination_by_hand, margins_by_hand, moments_by_hand, slates_by_hand

CASES = {
    "NeuralUCB T=64 B=32": (confident_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64}),
    "MMD-DQN T=32 B=32, 32 particles": (
        moments_by_hand.workload,
        {"length": 32, "batch": 32, "hidden": 128, "count": 32},
    ),
    "EFPPO T=128 B=64": (margins_by_hand.workload, {"length": 128, "batch": 64, "hidden": 64}),
    "slates of 24 items T=32 B=32": (slates_by_hand.workload, {"length": 32, "batch": 32, "hidden": 64}),
    "DCG T=32 B=16, 6 agents": (
        coordination_by_hand.workload,
        {"length": 32, "batch": 16, "agents": 6, "hidden": 64},
    ),
}

TINY = {
    confident_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "envs": 2, "block": 3},
    moments_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "count": 6, "chunk": 8},
    margins_by_hand.workload: {"length": 12, "batch": 4, "hidden": 6, "chunk": 2, "block": 4, "envs": 2},
    slates_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "envs": 2, "chunk": 2},
    coordination_by_hand.workload: {"length": 8, "batch": 4, "agents": 3, "hidden": 6, "chunk": 2, "envs": 2},
}
