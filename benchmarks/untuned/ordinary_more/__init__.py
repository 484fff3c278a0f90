"""More ordinary learners, of other families, written as those of `ordinary`: as a user of rlfx does, and as the usual
program of arrays ``[T, B]``."""

from __future__ import annotations

from . import beliefs, buffers, judges, networks, offline, restarts, updates, values, whole

CASES = {
    "hidden Markov model, 32 states T=256 B=64": (beliefs.markov, {"length": 256, "batch": 64, "states": 32}),
    "belief that actions move T=64 B=16": (beliefs.acting, {"length": 64, "batch": 16, "states": 24, "hidden": 128}),
    "Kalman filter T=64 B=32": (beliefs.kalman, {"length": 64, "batch": 32, "states": 8}),
    "attention, whole episode T=128 B=16": (whole.hindsight, {"length": 128, "batch": 16, "width": 64, "heads": 4}),
    "hidden actions, whole episode T=64 B=16": (
        whole.filling, {"length": 64, "batch": 16, "width": 64, "layers": 2, "heads": 4},
    ),
    "task of all transitions T=64 B=32": (whole.task, {"length": 64, "batch": 32, "hidden": 128}),
    "PPO, stored states of a GRU T=128 B=16": (restarts.stored, {"length": 128, "batch": 16, "hidden": 128}),
    "neural ODE, eight ahead T=64 B=16": (restarts.neural, {"length": 64, "batch": 16, "hidden": 128}),
    "linear dynamics, eight ahead T=128 B=32": (restarts.linear, {"length": 128, "batch": 32, "hidden": 128, "width": 64}),
    "IQL T=32 B=32": (offline.iql, {"length": 32, "batch": 32, "hidden": 256}),
    "SAC-N T=16 B=16, 10 critics": (offline.sac_n, {"length": 16, "batch": 16, "hidden": 256, "members": 10}),
    "EDAC T=16 B=16, 8 critics": (offline.edac, {"length": 16, "batch": 16, "hidden": 256, "members": 8}),
    "priors that are random T=16 B=32, 10 members": (
        offline.priors, {"length": 16, "batch": 32, "hidden": 128, "members": 10},
    ),
    "DRQN, replay that begins later T=192 B=8": (buffers.drqn, {"length": 192, "batch": 8, "hidden": 64}),
    "mixture of experts T=32 B=32": (networks.experts, {"length": 32, "batch": 32, "width": 128}),
    "FiLM, three blocks T=64 B=32": (networks.film, {"length": 64, "batch": 32, "width": 128, "blocks": 3}),
    "hypernetwork T=32 B=32": (networks.hyper, {"length": 32, "batch": 32, "width": 64, "hidden": 64}),
    "S4D T=128 B=8": (networks.spaces, {"length": 128, "batch": 8, "width": 64, "layers": 2, "states": 8}),
    "GAIL T=32 B=32": (judges.gail, {"length": 32, "batch": 32, "hidden": 128}),
    "DIAYN T=64 B=32": (judges.diayn, {"length": 64, "batch": 32, "hidden": 128}),
    "contrastive predictions T=64 B=16": (judges.coding, {"length": 64, "batch": 16, "hidden": 128}),
    "CURL T=32 B=64": (judges.curl, {"length": 32, "batch": 64, "hidden": 128}),
    "TRPO T=64 B=32": (updates.trpo, {"length": 64, "batch": 32, "hidden": 64}),
    "UPGO T=64 B=32": (updates.upgo, {"length": 64, "batch": 32, "hidden": 128}),
    "PPG, auxiliary T=64 B=32": (updates.auxiliary, {"length": 64, "batch": 32, "hidden": 128}),
    "emphatic V-trace T=64 B=32": (updates.emphatic, {"length": 64, "batch": 32, "hidden": 128}),
    "NAF T=32 B=32": (values.naf, {"length": 32, "batch": 32, "hidden": 256}),
    "hindsight, goals drawn later T=64 B=32": (values.hindsight, {"length": 64, "batch": 32, "hidden": 128}),
}  # fmt: skip

TINY = {
    beliefs.markov: {"length": 12, "batch": 4, "states": 5},
    beliefs.acting: {"length": 12, "batch": 4, "states": 5, "hidden": 6},
    beliefs.kalman: {"length": 6, "batch": 3, "states": 4},
    whole.hindsight: {"length": 12, "batch": 4, "width": 8, "heads": 2},
    whole.filling: {"length": 12, "batch": 4, "width": 8, "layers": 2, "heads": 2},
    whole.task: {"length": 8, "batch": 4, "hidden": 6},
    restarts.stored: {"length": 16, "batch": 4, "hidden": 6},
    restarts.neural: {"length": 16, "batch": 4, "hidden": 6},
    restarts.linear: {"length": 16, "batch": 4, "hidden": 6, "width": 5},
    offline.iql: {"length": 8, "batch": 4, "hidden": 6},
    offline.sac_n: {"length": 8, "batch": 4, "hidden": 6, "members": 4},
    offline.edac: {"length": 8, "batch": 4, "hidden": 6, "members": 4},
    offline.priors: {"length": 8, "batch": 4, "hidden": 6, "members": 4},
    buffers.drqn: {"length": 80, "batch": 4, "hidden": 6},
    networks.experts: {"length": 8, "batch": 4, "width": 6},
    networks.film: {"length": 8, "batch": 4, "width": 6, "blocks": 2},
    networks.hyper: {"length": 8, "batch": 4, "width": 6, "hidden": 5},
    networks.spaces: {"length": 8, "batch": 4, "width": 6, "layers": 2, "states": 3},
    judges.gail: {"length": 8, "batch": 4, "hidden": 6},
    judges.diayn: {"length": 8, "batch": 4, "hidden": 6},
    judges.coding: {"length": 8, "batch": 4, "hidden": 6},
    judges.curl: {"length": 8, "batch": 4, "hidden": 6},
    updates.trpo: {"length": 8, "batch": 4, "hidden": 6},
    updates.upgo: {"length": 8, "batch": 4, "hidden": 6},
    updates.auxiliary: {"length": 8, "batch": 4, "hidden": 6},
    updates.emphatic: {"length": 8, "batch": 4, "hidden": 6},
    values.naf: {"length": 8, "batch": 4, "hidden": 6},
    values.hindsight: {"length": 8, "batch": 4, "hidden": 6},
}
