"""A sixth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging what
the fifth one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import adapted, noisy, selective, traces, units

CASES = {
    "AlphaStar's heads T=32 B=32, 12 units": (units.workload, {"length": 32, "batch": 32, "units": 12, "hidden": 64}),
    "Mamba IMPALA T=64 B=32": (
        selective.workload,
        {"length": 64, "batch": 32, "width": 32, "inner": 64, "state": 8, "layers": 2},
    ),
    "MAML, 16 tasks, T=16 B=16": (adapted.workload, {"tasks": 16, "length": 16, "batch": 16, "hidden": 64}),
    "noisy duelling DQN T=32 B=128": (noisy.workload, {"length": 32, "batch": 128, "hidden": 128}),
    "TDC(lambda) through its updates T=128 B=64": (
        traces.workload,
        {"length": 128, "batch": 64, "hidden": 64, "features": 64},
    ),
}

TINY = {
    units.workload: {"length": 8, "batch": 3, "units": 5, "hidden": 8, "chunk": 2},
    selective.workload: {"length": 8, "batch": 4, "width": 4, "inner": 6, "state": 3, "layers": 2, "chunk": 2},
    adapted.workload: {"tasks": 4, "length": 5, "batch": 3, "hidden": 6, "chunk": 2},
    noisy.workload: {"length": 8, "batch": 3, "hidden": 6, "chunk": 2},
    traces.workload: {"length": 8, "batch": 4, "hidden": 6, "features": 5, "chunk": 2},
}
