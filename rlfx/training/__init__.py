"""What training takes beside a program: distributions of actions, and a loop that lasts."""

from rlfx.training.callbacks import CSV, Evaluate, Interrupt, Metrics, Progress, Stop, TensorBoard
from rlfx.training.checkpoints import Checkpoints, latest, save
from rlfx.training.distributions import Categorical, Normal, TanhNormal
from rlfx.training.guard import NaNGuard
from rlfx.training.loop import Call, Callback, Loop, Result, run
from rlfx.training.replay import Drawn, NStep, Priorities, draw_times, n_step

__all__ = [
    "CSV",
    "Call",
    "Callback",
    "Categorical",
    "Checkpoints",
    "Drawn",
    "Evaluate",
    "Interrupt",
    "Loop",
    "Metrics",
    "NStep",
    "NaNGuard",
    "Normal",
    "Priorities",
    "Progress",
    "Result",
    "Stop",
    "TanhNormal",
    "TensorBoard",
    "draw_times",
    "latest",
    "n_step",
    "run",
    "save",
]
