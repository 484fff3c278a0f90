"""An eighth sealed set: five learners whose families none of the others has, written before rlfx ran at full size, for judging
what the seventh one led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import counterfactual, implicit, normalised, skills, texts

CASES = {
    "IQN T=32 B=32, 8 fractions": (implicit.workload, {"length": 32, "batch": 32, "count": 8, "hidden": 64}),
    "COMA T=32 B=64, 4 agents": (counterfactual.workload, {"length": 32, "batch": 64, "agents": 4, "hidden": 64}),
    "DIAYN T=32 B=128, 8 skills": (skills.workload, {"length": 32, "batch": 128, "skills": 8, "hidden": 64}),
    "PopArt-IMPALA T=48 B=32, 8 tasks": (normalised.workload, {"length": 48, "batch": 32, "tasks": 8, "hidden": 128}),
    "PPO of a GRU that writes T=32 B=32": (texts.workload, {"length": 32, "batch": 32, "words": 64, "hidden": 128}),
}

TINY = {
    implicit.workload: {"length": 8, "batch": 3, "count": 4, "hidden": 6, "chunk": 2},
    counterfactual.workload: {"length": 6, "batch": 4, "agents": 3, "hidden": 6, "chunk": 2},
    skills.workload: {"length": 6, "batch": 4, "skills": 3, "hidden": 6, "chunk": 2},
    normalised.workload: {"length": 8, "batch": 4, "tasks": 2, "hidden": 6, "chunk": 2},
    texts.workload: {"length": 8, "batch": 4, "words": 7, "hidden": 6},
}
