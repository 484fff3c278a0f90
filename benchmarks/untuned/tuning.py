"""The tuning set: what the compiler may be tuned on. ``CASES[name] = (make, sizes)``; ``TINY`` are sizes for tests."""

from __future__ import annotations

from . import attention, dqn, gru, images, one_epoch, ppo, vtrace

CASES = {
    "GRU(128) T=128 B=16": (gru.workload, {"length": 128, "batch": 16, "hidden": 128}),
    "GRU(128) T=128 B=64": (gru.workload, {"length": 128, "batch": 64, "hidden": 128}),
    "GRU(64) T=1024 B=16": (gru.workload, {"length": 1024, "batch": 16, "hidden": 64}),
    "GRU(64) T=64 B=64": (gru.workload, {"length": 64, "batch": 64, "hidden": 64}),
    "GRU(64) T=64 B=128": (gru.workload, {"length": 64, "batch": 128, "hidden": 64}),
    "GRU(64) T=64 B=512": (gru.workload, {"length": 64, "batch": 512, "hidden": 64}),
    "GRU(64) T=64 B=2048": (gru.workload, {"length": 64, "batch": 2048, "hidden": 64}),
    "GRU(128) T=128 B=1": (gru.workload, {"length": 128, "batch": 1, "hidden": 128}),
    "GRU(128) T=1 B=64": (gru.workload, {"length": 1, "batch": 64, "hidden": 128}),
    "image A2C 3x64x64 T=64 B=16": (images.workload, {"length": 64, "batch": 16, "side": 64}),
    "image A2C 3x64x64 T=64 B=1": (images.workload, {"length": 64, "batch": 1, "side": 64}),
    "DQN, every step": (dqn.workload, {"length": 1000, "every": 1}),
    "DQN, every 4th": (dqn.workload, {"length": 1000, "every": 4}),
    "attention gradient T=256 B=8": (attention.gradient, {"length": 256, "batch": 8}),
    "attention gradient T=128 B=32": (attention.gradient, {"length": 128, "batch": 32}),
    "attention gradient T=512 B=8": (attention.gradient, {"length": 512, "batch": 8}),
    "attention gradient T=256 B=1": (attention.gradient, {"length": 256, "batch": 1}),
    "decoding T=256 B=8": (attention.decode, {"length": 256, "batch": 8}),
    "decoding T=1024 B=8": (attention.decode, {"length": 1024, "batch": 8}),
    "decoding T=256 B=1": (attention.decode, {"length": 256, "batch": 1}),
    "V-trace T=80 B=64": (vtrace.workload, {"length": 80, "batch": 64, "hidden": 256}),
    "V-trace T=240 B=64": (vtrace.workload, {"length": 240, "batch": 64, "hidden": 256}),
    "V-trace T=80 B=1": (vtrace.workload, {"length": 80, "batch": 1, "hidden": 256}),
    "V-trace T=1 B=64": (vtrace.workload, {"length": 1, "batch": 64, "hidden": 256}),
    "64 seeds of one-epoch PPO": (one_epoch.seeds, {"length": 128, "batch": 4, "hidden": 64, "count": 64}),
    "PPO 4x4 2x256": (ppo.workload, {"length": 512, "batch": 32, "hidden": 256}),
    "16 seeds of PPO 4x4": (ppo.seeds, {"length": 128, "batch": 4, "hidden": 64, "count": 16}),
    "n-step T=32 B=1024": (one_epoch.n_step, {"length": 32, "batch": 1024, "hidden": 64}),
    "n-step T=5 B=1024": (one_epoch.n_step, {"length": 5, "batch": 1024, "hidden": 64}),
}

TINY = {
    gru.workload: {"length": 4, "batch": 3, "hidden": 8, "chunk": 2},
    images.workload: {"length": 4, "batch": 2, "side": 20},
    dqn.workload: {"length": 12, "every": 4},
    attention.gradient: {"length": 5, "batch": 2, "width": 8, "layers": 1, "block": 2},
    attention.decode: {"length": 5, "batch": 2, "width": 8, "layers": 1},
    vtrace.workload: {"length": 5, "batch": 3, "hidden": 8},
    one_epoch.seeds: {"length": 4, "batch": 2, "hidden": 8, "count": 2, "chunk": 2},
    one_epoch.n_step: {"length": 6, "batch": 3, "hidden": 8},
    ppo.workload: {"length": 4, "batch": 4, "hidden": 8},
    ppo.seeds: {"length": 4, "batch": 4, "hidden": 8, "count": 2},
}
