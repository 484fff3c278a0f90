"""A nineteenth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the eighteenth one led to: temporal cycle consistency of videos, quasimetric reinforcement learning, diffusion policy's U-Net
of chunks of actions, deep Lagrangian networks, and BYOL-Explore.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import chunks_by_hand, cycles_by_hand, foresight_by_hand, lagrangian_by_hand, quasimetric_by_hand

CASES = {
    "cycle consistency of 16x16 frames T=32 B=16": (
        cycles_by_hand.workload,
        {"length": 32, "batch": 16, "side": 16, "hidden": 64},
    ),
    "quasimetric RL T=16 B=64": (quasimetric_by_hand.workload, {"length": 16, "batch": 64, "hidden": 64}),
    "diffusion policy's U-Net T=24 B=8": (chunks_by_hand.workload, {"length": 24, "batch": 8, "width": 32}),
    "Lagrangian networks T=32 B=64, 4 steps": (lagrangian_by_hand.workload, {"length": 32, "batch": 64, "hidden": 64}),
    "BYOL-Explore T=64 B=32, 6 ahead": (foresight_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64}),
}

TINY = {
    cycles_by_hand.workload: {"length": 6, "batch": 4, "side": 8, "hidden": 8, "chunk": 2},
    quasimetric_by_hand.workload: {"length": 8, "batch": 4, "hidden": 8, "chunk": 2},
    chunks_by_hand.workload: {"length": 8, "batch": 4, "width": 8, "chunk": 8},
    lagrangian_by_hand.workload: {"length": 8, "batch": 4, "hidden": 8, "chunk": 8},
    foresight_by_hand.workload: {"length": 8, "batch": 4, "hidden": 8, "parts": 2},
}
