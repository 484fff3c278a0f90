"""The held-out set: for judging what tuning did. Do not look at its programs or its figures while tuning."""

from __future__ import annotations

from . import (
    impala,
    local_attention,
    lookahead,
    multi_discrete,
    population,
    quantiles,
    r2d2,
    sac,
    tiny_networks,
    world_model,
)

CASES = {
    "SAC": (sac.workload, {"length": 200, "batch": 8, "hidden": 128, "samples": 16}),
    "R2D2 T=120 B=32": (r2d2.workload, {"length": 120, "batch": 32, "burn": 40, "hidden": 128}),
    "IMPALA residual CNN T=20 B=8": (
        impala.workload,
        {"length": 20, "batch": 8, "side": 32, "channels": (16, 32), "hidden": 128},
    ),
    "local attention T=512 B=8": (local_attention.workload, {"length": 512, "batch": 8, "window": 32}),
    "multi-discrete PPO T=128 B=32": (multi_discrete.workload, {"length": 128, "batch": 32, "hidden": 64}),
    "world model T=48 B=16, 15 imagined": (
        world_model.workload,
        {"length": 48, "batch": 16, "hidden": 64, "horizon": 15},
    ),
    "lookahead of depth 3, T=64 B=16": (lookahead.workload, {"length": 64, "batch": 16, "hidden": 64, "depth": 3}),
    "51 quantiles T=128 B=16": (quantiles.workload, {"length": 128, "batch": 16, "hidden": 128, "count": 51}),
    "population of 16 A2C": (population.workload, {"members": 16, "length": 64, "batch": 8, "hidden": 64, "count": 3}),
    "16 units, T=16 B=4096": (tiny_networks.workload, {"length": 16, "batch": 4096, "hidden": 16}),
}

TINY = {
    sac.workload: {"length": 5, "batch": 2, "hidden": 8, "samples": 3, "capacity": 4},
    r2d2.workload: {"length": 12, "batch": 2, "burn": 4, "hidden": 4, "chunk": 4},
    impala.workload: {"length": 2, "batch": 2, "side": 8, "channels": (2, 3), "hidden": 4, "chunk": 2},
    local_attention.workload: {"length": 6, "batch": 2, "window": 2, "width": 8, "layers": 1},
    multi_discrete.workload: {"length": 4, "batch": 2, "hidden": 8, "chunk": 2},
    world_model.workload: {"length": 4, "batch": 2, "hidden": 4, "horizon": 3, "blocks": 2},
    lookahead.workload: {"length": 4, "batch": 2, "hidden": 4, "depth": 2, "chunk": 2},
    quantiles.workload: {"length": 6, "batch": 2, "hidden": 4, "count": 5, "chunk": 2},
    population.workload: {"members": 2, "length": 4, "batch": 2, "hidden": 4, "count": 2, "chunk": 2},
    tiny_networks.workload: {"length": 4, "batch": 3, "hidden": 4},
}
