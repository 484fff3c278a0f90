"""A twenty-first sealed set: five learners as they are published and as libraries have them (A2C on stacked frames, IMPALA
with an LSTM, Muesli, PPO with curiosity, and GRPO of token sequences), written before rlfx ran at full size, for judging what
the sets before it led to.

Do not look at its programs or its figures while tuning.
"""

from __future__ import annotations

from . import completions_by_hand, curious_by_hand, muesli_by_hand, paddle_by_hand, recalled_by_hand

CASES = {
    "A2C from 4 frames of 20x20, T=16 B=16": (
        paddle_by_hand.workload,
        {"length": 16, "batch": 16, "side": 20, "channels": (16, 32), "hidden": 128},
    ),
    "IMPALA with an LSTM T=40 B=32": (recalled_by_hand.workload, {"length": 40, "batch": 32, "hidden": 128}),
    "Muesli T=30 B=32": (muesli_by_hand.workload, {"length": 30, "batch": 32, "hidden": 128}),
    "PPO with ICM T=64 B=32": (curious_by_hand.workload, {"length": 64, "batch": 32, "hidden": 64, "code": 32}),
    "GRPO of tokens T=48 B=24": (completions_by_hand.workload, {"length": 48, "batch": 24, "group": 6, "width": 64}),
}

TINY = {
    paddle_by_hand.workload: {"length": 8, "batch": 4, "side": 12, "channels": (3, 4), "hidden": 6, "chunk": 2},
    recalled_by_hand.workload: {"length": 6, "batch": 4, "hidden": 6, "envs": 2},
    muesli_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "envs": 2},
    curious_by_hand.workload: {"length": 8, "batch": 4, "hidden": 6, "code": 4, "chunk": 4},
    completions_by_hand.workload: {"length": 12, "batch": 4, "group": 2, "width": 8, "answers": 2},
}
