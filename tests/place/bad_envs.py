"""A gymnasium environment that goes wrong, in processes of its own: no jax here."""

import os
import signal
import time

import gymnasium
import numpy as np


class Bad(gymnasium.Env):
    """Steps 15 times, then raises, hangs, or is killed."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how):
        self.how, self.steps = how, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 15:
            {"raises": self.raises, "hangs": self.hangs, "is killed": self.killed, "exits": self.exits}[self.how]()
        return np.zeros(4, np.float32), 1.0, False, False, {}

    def raises(self):
        raise RuntimeError("the motor is gone")

    def hangs(self):
        time.sleep(3600)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self):
        os._exit(7)


if "Bad-v0" not in gymnasium.registry:
    gymnasium.register("Bad-v0", entry_point=Bad)
