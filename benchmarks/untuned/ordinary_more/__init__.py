"""More ordinary learners, of other families, written as those of `ordinary`: as a user of rlfx does, and as the usual
program of arrays ``[T, B]``."""

from __future__ import annotations

from . import (
    beliefs,
    buffers,
    credits,
    imitators,
    memories,
    offline,
    restarts,
    restored,
    smoothing,
    whole,
)

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
    "belief, forwards and backwards T=128 B=64": (
        smoothing.smoothed, {"length": 128, "batch": 64, "states": 24, "hidden": 128},
    ),
    "particle filter T=32 B=16": (smoothing.particles, {"length": 32, "batch": 16, "count": 32, "hidden": 64}),
    "return shared out, whole episode T=128 B=16": (
        credits.shared, {"length": 128, "batch": 16, "width": 64, "layers": 2, "heads": 4},
    ),
    "GRUs forwards and backwards T=64 B=32": (credits.guessed, {"length": 64, "batch": 32, "hidden": 128}),
    "contrast with all timesteps T=64 B=32": (credits.contrast, {"length": 64, "batch": 32, "hidden": 128}),
    "HER T=32 B=32": (credits.goal, {"length": 32, "batch": 32, "hidden": 256}),
    "R2D2, stored states T=80 B=16": (restored.replayed, {"length": 80, "batch": 16, "hidden": 128}),
    "TD-MPC, eight ahead T=64 B=16": (restored.latent, {"length": 64, "batch": 16, "hidden": 128}),
    "fast weights T=64 B=16": (memories.fast, {"length": 64, "batch": 16, "width": 64, "layers": 2, "heads": 4}),
    "novelty of all that was seen T=128 B=16": (memories.novel, {"length": 128, "batch": 16, "hidden": 128}),
    "GAIL T=64 B=16": (imitators.gail, {"length": 64, "batch": 16, "hidden": 128}),
    "AIRL T=32 B=32": (imitators.airl, {"length": 32, "batch": 32, "hidden": 128}),
    "preferences, 3 members T=64 B=16": (imitators.preferred, {"length": 64, "batch": 16, "hidden": 128, "members": 3}),
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
    smoothing.smoothed: {"length": 12, "batch": 4, "states": 5, "hidden": 6},
    smoothing.particles: {"length": 8, "batch": 4, "count": 5, "hidden": 6},
    credits.shared: {"length": 12, "batch": 4, "width": 8, "layers": 2, "heads": 2},
    credits.guessed: {"length": 12, "batch": 4, "hidden": 6},
    credits.contrast: {"length": 12, "batch": 4, "hidden": 6},
    credits.goal: {"length": 12, "batch": 4, "hidden": 6},
    restored.replayed: {"length": 16, "batch": 4, "hidden": 6},
    restored.latent: {"length": 16, "batch": 4, "hidden": 6},
    memories.fast: {"length": 12, "batch": 4, "width": 8, "layers": 2, "heads": 2},
    memories.novel: {"length": 12, "batch": 4, "hidden": 6},
    imitators.gail: {"length": 8, "batch": 4, "hidden": 6},
    imitators.airl: {"length": 8, "batch": 4, "hidden": 6},
    imitators.preferred: {"length": 32, "batch": 4, "hidden": 6, "members": 3},
}
