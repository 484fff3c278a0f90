"""A set that was unseen until it was looked at: it is tuned on now."""

from __future__ import annotations

from . import contrastive, latent_consistency, linear_recurrence, retrace

CASES = {
    "TD-MPC T=64 B=16, 5 steps": (
        latent_consistency.workload,
        {"length": 64, "batch": 16, "steps": 5, "latent": 32, "hidden": 64},
    ),
    "Retrace T=2000 B=4": (retrace.workload, {"length": 2000, "batch": 4, "hidden": 128}),
    "LRU T=256 B=16": (linear_recurrence.workload, {"length": 256, "batch": 16, "width": 64, "state": 64}),
    "CPC T=128 B=16, 4 steps": (
        contrastive.workload,
        {"length": 128, "batch": 16, "steps": 4, "code": 32, "hidden": 64},
    ),
}

TINY = {
    latent_consistency.workload: {"length": 6, "batch": 2, "steps": 3, "latent": 4, "hidden": 8, "chunk": 2},
    retrace.workload: {"length": 8, "batch": 2, "hidden": 8, "chunk": 4},
    linear_recurrence.workload: {"length": 8, "batch": 2, "width": 8, "state": 4, "chunk": 4},
    contrastive.workload: {"length": 6, "batch": 2, "steps": 2, "code": 4, "hidden": 8, "chunk": 3},
}
