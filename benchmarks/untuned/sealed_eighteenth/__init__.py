"""An eighteenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for
judging what the seventeenth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import conditioned_by_hand, crowds_by_hand, latent_actions_by_hand, phases_by_hand, searched_by_hand

CASES = {
    "decision transformer T=32 B=16": (conditioned_by_hand.workload, {"length": 32, "batch": 16, "width": 64}),
    "latent actions T=16 B=16": (
        latent_actions_by_hand.workload,
        {"length": 16, "batch": 16, "side": 16, "hidden": 128},
    ),
    "AlphaZero T=32 B=32, 24 simulations": (
        searched_by_hand.workload,
        {"length": 32, "batch": 32, "simulations": 24, "hidden": 64},
    ),
    "mean-field tolls T=16 B=32, 10 rounds": (
        crowds_by_hand.workload,
        {"length": 16, "batch": 32, "rounds": 10, "side": 5, "hidden": 32},
    ),
    "PPG T=64 B=32": (phases_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64}),
}

TINY = {
    conditioned_by_hand.workload: {"length": 8, "batch": 4, "width": 8, "chunk": 1},
    latent_actions_by_hand.workload: {"length": 6, "batch": 4, "side": 8, "hidden": 8, "chunk": 8},
    searched_by_hand.workload: {"length": 6, "batch": 4, "simulations": 6, "hidden": 8, "envs": 2},
    crowds_by_hand.workload: {"length": 5, "batch": 4, "rounds": 3, "side": 3, "hidden": 6, "chunk": 2},
    phases_by_hand.workload: {"length": 8, "batch": 4, "hidden": 8},
}
