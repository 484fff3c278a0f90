"""A process that steps gymnasium environments; a script of its own, which imports neither rlfx nor jax.

It answers each message of its pipe: first ``(name, kwargs, seeds, dtype)``, with the observations; then arrays of actions, with
what the steps returned. An exception is answered with its text. It ends when the pipe does.
"""

import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def step(env: Any, action: np.ndarray) -> tuple[Any, ...]:
    """One step, and a reset if the episode ends: the next observation, the one the step led to, reward and flags."""
    final, reward, terminated, truncated, _ = env.step(action.item() if action.ndim == 0 else action)
    obs = env.reset()[0] if terminated or truncated else final
    return obs, final, reward, terminated, truncated


class Environments:
    """Some environments of one name, each with its seed, stepped one after another."""

    def __init__(self, name: str, kwargs: Any, seeds: Any, dtype: str):
        import gymnasium

        self.dtype, self.seeds = np.dtype(dtype), seeds
        self.envs = [gymnasium.make(name, **kwargs) for _ in seeds]

    def first(self) -> np.ndarray:
        """Their first observations ``[B, ...]``."""
        return np.stack([env.reset(seed=s)[0] for env, s in zip(self.envs, self.seeds, strict=True)]).astype(self.dtype)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """``(obs, final_obs, reward, terminated, truncated)``, each ``[B, ...]``."""
        obs, final, reward, terminated, truncated = zip(*map(step, self.envs, actions), strict=True)
        return (
            np.stack(obs).astype(self.dtype),
            np.stack(final).astype(self.dtype),
            np.asarray(reward, np.float32),
            np.asarray(terminated, bool),
            np.asarray(truncated, bool),
        )


def serve(pipe: Connection) -> None:
    """Make the environments, then step them until the pipe closes."""
    envs = Environments(*pipe.recv())
    pipe.send(envs.first())
    while True:
        pipe.send(envs.step(pipe.recv()))


def main() -> int:
    """Serve the pipe whose descriptor is the first argument."""
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the other side has ended
        return 0
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
