"""A thirteenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the twelfth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import bandits_by_hand, bootstrapped_by_hand, frames_by_hand, particles_by_hand, subgoals_by_hand

CASES = {
    "DVRL T=32 B=16, 8 particles": (particles_by_hand.workload, {"length": 32, "batch": 16, "hidden": 32}),
    "ALPaCA bandit T=64 B=32": (
        bandits_by_hand.workload,
        {"length": 64, "batch": 32, "hidden": 64, "features": 16},
    ),
    "bootstrapped DQN T=32 B=32, 10 members": (
        bootstrapped_by_hand.workload,
        {"length": 32, "batch": 32, "members": 10, "hidden": 32},
    ),
    "PlaNet of 16x16 frames T=16 B=16": (
        frames_by_hand.workload,
        {"length": 16, "batch": 16, "side": 16, "channels": (8, 16), "hidden": 64},
    ),
    "HIRO T=32 B=16, 10 subgoals": (subgoals_by_hand.workload, {"length": 32, "batch": 16, "count": 10, "hidden": 64}),
}

TINY = {
    particles_by_hand.workload: {"length": 5, "batch": 2, "hidden": 4, "chunk": 1},
    bandits_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "features": 3, "chunk": 2},
    bootstrapped_by_hand.workload: {"length": 5, "batch": 4, "members": 3, "hidden": 4, "chunk": 2},
    frames_by_hand.workload: {"length": 4, "batch": 4, "side": 8, "channels": (2, 3), "hidden": 4, "chunk": 4},
    subgoals_by_hand.workload: {"length": 10, "batch": 4, "count": 5, "hidden": 6, "chunk": 2},
}
