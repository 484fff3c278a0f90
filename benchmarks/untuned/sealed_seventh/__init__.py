"""A seventh sealed set: learners whose families none of the others has, written before rlfx ran at full size, for judging what
the sixth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import messages, planning, similar, successors, top_half

CASES = {
    "SPR and MICo T=32 B=64, 4 steps": (
        similar.workload,
        {"length": 32, "batch": 64, "steps": 4, "code": 32, "hidden": 128},
    ),
    "successor features of 4 tasks T=32 B=64": (
        successors.workload,
        {"length": 32, "batch": 64, "tasks": 4, "features": 8, "hidden": 128},
    ),
    "TarMAC T=32 B=32, 4 agents": (messages.workload, {"length": 32, "batch": 32, "agents": 4, "hidden": 64}),
    "CEM T=32 B=32, 24 plans of 5": (
        planning.workload,
        {"length": 32, "batch": 32, "samples": 24, "horizon": 5, "elites": 6, "hidden": 32},
    ),
    "V-MPO T=64 B=128": (top_half.workload, {"length": 64, "batch": 128, "hidden": 128}),
}

TINY = {
    successors.workload: {"length": 6, "batch": 4, "tasks": 3, "features": 4, "hidden": 6, "chunk": 2},
    messages.workload: {"length": 8, "batch": 4, "agents": 3, "hidden": 6, "chunk": 2, "envs": 2},
    planning.workload: {
        "length": 6, "batch": 4, "samples": 7, "horizon": 3, "elites": 3, "hidden": 6, "chunk": 2, "envs": 2,
    },
    similar.workload: {"length": 8, "batch": 3, "steps": 3, "code": 4, "hidden": 6, "chunk": 2},
    top_half.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 2},
}  # fmt: skip
