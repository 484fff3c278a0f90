"""A second sealed set: four families more, written before they were run, for judging what the first one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import graphs, hierarchy, imitation, sampled_actions

CASES = {
    "GAIL T=32 B=64, with a penalty on slopes": (imitation.workload, {"length": 32, "batch": 64, "hidden": 64}),
    "MPO T=32 B=32, 20 actions": (sampled_actions.workload, {"length": 32, "batch": 32, "samples": 20, "hidden": 64}),
    "FeUdal T=40 B=32": (hierarchy.workload, {"length": 40, "batch": 32, "hidden": 64}),
    "graph IQL T=32 B=16, 8 nodes": (graphs.workload, {"length": 32, "batch": 16, "hidden": 32}),
}

TINY = {
    imitation.workload: {"length": 6, "batch": 2, "hidden": 8, "chunk": 2},
    sampled_actions.workload: {"length": 6, "batch": 2, "samples": 3, "hidden": 8, "chunk": 2},
    hierarchy.workload: {"length": 8, "batch": 2, "hidden": 6, "chunk": 2},
    graphs.workload: {"length": 8, "batch": 2, "hidden": 4, "chunk": 2},
}
