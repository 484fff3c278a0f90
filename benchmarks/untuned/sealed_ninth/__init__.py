"""A ninth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the eighth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import categorical_by_hand, channels, expectile, flows, simulated

CASES = {
    "SHAC T=512 B=8, windows of 32": (simulated.workload, {"length": 512, "batch": 8, "window": 32, "hidden": 64}),
    "C51 of 10x10 boards T=32 B=16": (
        categorical_by_hand.workload,
        {"length": 32, "batch": 16, "side": 10, "channels": 16, "hidden": 128},
    ),
    "implicit Q-learning T=32 B=32": (expectile.workload, {"length": 32, "batch": 32, "hidden": 256}),
    "DIAL T=32 B=32, 3 agents": (channels.workload, {"length": 32, "batch": 32, "agents": 3, "hidden": 64}),
    "GFlowNet of bags T=64 B=64": (flows.workload, {"length": 64, "batch": 64, "kinds": 8, "hidden": 256}),
}

TINY = {
    simulated.workload: {"length": 16, "batch": 2, "window": 4, "hidden": 6, "chunk": 4},
    categorical_by_hand.workload: {"length": 8, "batch": 3, "side": 5, "channels": 2, "hidden": 6, "chunk": 4},
    expectile.workload: {"length": 8, "batch": 4, "hidden": 6, "chunk": 2},
    channels.workload: {"length": 6, "batch": 2, "agents": 3, "hidden": 5, "chunk": 2},
    flows.workload: {"length": 8, "batch": 4, "kinds": 3, "hidden": 6, "chunk": 2},
}
