"""A fifth sealed set: five learners of every day whose families none of the others has, written before rlfx ran at full size, for
judging what the fourth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import conservative, ensembles, pixels, recurrent, unrolled

CASES = {
    "MuZero T=32 B=64, 5 unrolled": (unrolled.workload, {"length": 32, "batch": 64, "hidden": 64}),
    "recurrent PPO T=64 B=32, 8 minibatches": (recurrent.workload, {"length": 64, "batch": 32, "hidden": 64}),
    "CQL T=32 B=32, 30 actions": (conservative.workload, {"length": 32, "batch": 32, "hidden": 64, "count": 10}),
    "DrQ T=16 B=16, 32x32": (
        pixels.workload,
        {"length": 16, "batch": 16, "side": 32, "channels": 16, "code": 32, "hidden": 64},
    ),
    "ensemble of 5 models H=15 B=64": (
        ensembles.workload,
        {"length": 15, "batch": 64, "members": 5, "hidden": 64, "model": 128},
    ),
}

TINY = {
    unrolled.workload: {"length": 8, "batch": 3, "hidden": 8, "chunk": 2},
    recurrent.workload: {"length": 8, "batch": 8, "hidden": 8},
    conservative.workload: {"length": 4, "batch": 3, "hidden": 8, "count": 3, "chunk": 2},
    pixels.workload: {"length": 6, "batch": 2, "side": 9, "channels": 2, "code": 4, "hidden": 6},
    ensembles.workload: {"length": 4, "batch": 3, "members": 2, "hidden": 8, "model": 6},
}
