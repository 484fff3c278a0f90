"""Host environments: a spawned process for each actor, which steps all of its environments a message; or none."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from rlfx._checks import TEXT, Kind, expect
from rlfx.envs import gymnasium
from rlfx.envs.base import Spaces
from rlfx.envs.spaces import Box, Discrete
from rlfx.errors import PartError, PlacementError, located
from rlfx.place.pearl.crew import Part
from rlfx.place.pearl.host_worker import Environments, step

WORKER = Path(__file__).with_name("host_worker.py")


def _items(value: Any) -> tuple:
    if not isinstance(value, (Mapping, tuple)):
        raise TypeError
    items = tuple(sorted(dict(value).items()))
    hash(items)  # a system is what programs are compiled for
    return items


_KWARGS = Kind("a mapping from names to hashable values", '{"max_episode_steps": 200}', _items)


@dataclass(frozen=True)
class HostEnvironment:
    """A gymnasium environment that actors step in processes of their own.

    Args:
      name: a name that gymnasium has; ``"module:Name-v0"`` imports the module that registers it first.
      kwargs: of ``gymnasium.make``.

    Raises:
      PlacementError: the name or the arguments are none.

    Example:
      >>> HostEnvironment("CartPole-v1", {"max_episode_steps": 9}).kwargs
      (('max_episode_steps', 9),)
    """

    name: str
    kwargs: Any = ()

    def __post_init__(self) -> None:
        expect("name", self.name, TEXT, PlacementError, of="HostEnvironment")
        object.__setattr__(self, "kwargs", expect("kwargs", self.kwargs, _KWARGS, PlacementError, of="HostEnvironment"))

    def spaces(self) -> Spaces:
        """Its spaces."""
        made = gymnasium.make(self.name, **dict(self.kwargs))
        if not isinstance(made.observation_space, Box) or not isinstance(made.action_space, (Box, Discrete)):
            fact = f"{self.name} has the spaces {made.observation_space} and {made.action_space}."
            raise PlacementError(located(fact, fix="Wrap it: observations are a Box, actions a Box or Discrete."))
        return made.spaces

    def step_seconds(self, steps: int = 300) -> float:
        """Seconds of a step with random actions in this process, resets included: a mean."""
        import gymnasium as peer

        env = peer.make(self.name, **dict(self.kwargs))
        env.reset(seed=0)
        env.action_space.seed(0)
        begin = time.perf_counter()
        for _ in range(steps):
            step(env, np.asarray(env.action_space.sample()))
        seconds = (time.perf_counter() - begin) / steps
        env.close()
        return seconds


class Process:
    """The process of one actor, as long as the context is open."""

    def __init__(self, part: Part, env: HostEnvironment, dtype: Any, seeds: Sequence[int]):
        self.part, self.env, self.dtype, self.seeds = part, env, np.dtype(dtype), [int(seed) for seed in seeds]

    def __enter__(self) -> Process:
        self.pipe, theirs = Pipe()
        assert isinstance(theirs, Connection)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # an interrupt is the caller's; the session, and with it the priority, is the same
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()  # so that its death ends the pipe
        self.ready = select.poll()  # made once: `Connection.poll` makes a selector for each message
        self.ready.register(self.pipe.fileno(), select.POLLIN)
        return self

    def __exit__(self, *_: Any) -> None:
        self.pipe.close()
        try:
            self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def first(self) -> np.ndarray:
        """Make the environments: their first observations ``[B, ...]``."""
        return self._ask((self.env.name, dict(self.env.kwargs), self.seeds, self.dtype.str), self.part)

    def step(self, actions: np.ndarray, by: Part) -> tuple[np.ndarray, ...]:
        """``(obs, final_obs, reward, terminated, truncated)``, each ``[B, ...]``, for the thread that acts."""
        return self._ask(actions, by)

    def _ask(self, message: Any, by: Part) -> Any:
        by.alive()
        try:
            self.pipe.send(message)
            while not self.ready.poll(100):
                if by.crew.stopped:
                    by.alive()
            answer = self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._error(f"ended with {self._code()}") from None
        if isinstance(answer, str):
            raise self._error(f"raised {answer}")
        return answer

    def _code(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its pipe closed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _error(self, what: str) -> PartError:
        fact = f"The part {self.part.name!r}: the process of its environments, {self.env.name}, {what}"
        fix = "Step the environment alone, in gymnasium, to see why."
        return PartError(located(fact, fix=fix), self.part.name)


class Here:
    """The environments of one actor in this process, stepped by the thread that acts, as long as the context is open."""

    def __init__(self, part: Part, env: HostEnvironment, dtype: Any, seeds: Sequence[int]):
        self.part, self.envs = part, Environments(env.name, dict(env.kwargs), seeds, np.dtype(dtype).str)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: Any) -> None:
        for env in self.envs.envs:
            env.close()

    def first(self) -> np.ndarray:
        """Their first observations ``[B, ...]``."""
        return self.envs.first()

    def step(self, actions: np.ndarray, by: Part) -> tuple[np.ndarray, ...]:
        """``(obs, final_obs, reward, terminated, truncated)``, each ``[B, ...]``."""
        by.alive()
        return self.envs.step(actions)
