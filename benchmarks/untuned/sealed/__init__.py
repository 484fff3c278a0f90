"""The sealed set: families that no other set has, written before they were run, for judging what tuning did.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import agents, belief, ensemble, options

CASES = {
    "REDQ T=32 B=32, 8 critics": (ensemble.workload, {"length": 32, "batch": 32, "members": 8, "hidden": 64}),
    "VariBAD T=60 B=8": (belief.workload, {"length": 60, "batch": 8, "hidden": 64, "decoder": 32}),
    "option-critic, 16 units, T=16 B=2048": (
        options.workload,
        {"length": 16, "batch": 2048, "options": 4, "hidden": 16},
    ),
    "MAPPO T=64 B=32, 4 agents": (agents.workload, {"length": 64, "batch": 32, "agents": 4, "hidden": 64}),
}

TINY = {
    ensemble.workload: {"length": 6, "batch": 2, "members": 3, "hidden": 8, "chunk": 2},
    belief.workload: {"length": 6, "batch": 2, "hidden": 4, "decoder": 5, "chunk": 2},
    options.workload: {"length": 6, "batch": 3, "options": 2, "hidden": 4, "chunk": 2},
    agents.workload: {"length": 6, "batch": 2, "agents": 3, "hidden": 8, "chunk": 2},
}
