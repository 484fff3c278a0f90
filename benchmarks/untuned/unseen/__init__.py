"""The unseen set: other families than tuning, held-out and looked-at, written after those had been looked at.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import curiosity, diffusion, fast_weights, mixing

CASES = {
    "fast weights T=128 B=16": (fast_weights.workload, {"length": 128, "batch": 16, "width": 64, "memory": 32}),
    "QMIX T=64 B=16, 3 agents": (
        mixing.workload,
        {"length": 64, "batch": 16, "agents": 3, "hidden": 64, "mixed": 32},
    ),
    "RND T=128 B=32": (curiosity.workload, {"length": 128, "batch": 32, "hidden": 64, "code": 32}),
    "diffusion policy T=64 B=16, 5 steps": (diffusion.workload, {"length": 64, "batch": 16, "steps": 5, "hidden": 128}),
}

TINY = {
    fast_weights.workload: {"length": 8, "batch": 2, "width": 8, "memory": 4, "chunk": 4},
    mixing.workload: {"length": 8, "batch": 2, "agents": 2, "hidden": 4, "mixed": 4, "chunk": 4},
    curiosity.workload: {"length": 6, "batch": 2, "hidden": 8, "code": 4, "chunk": 2},
    diffusion.workload: {"length": 6, "batch": 2, "steps": 3, "hidden": 8, "chunk": 2},
}
