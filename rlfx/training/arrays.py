"""The arrays of a checkpoint as one file, one behind the other: what orbax calls a handler. (Importing orbax takes seconds.)"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

_FILE = "arrays"


class Handler(ocp.AsyncCheckpointHandler):
    """Bytes in a file. orbax's own handler has a database, and metadata, of each array: most of what a small agent took."""

    async def _write(self, directory: Any, arrays: Sequence[np.ndarray]) -> None:
        if jax.process_index() == 0:
            with (directory / _FILE).open("wb") as file:
                for array in arrays:
                    file.write(array)

    async def async_save(self, directory: Any, args: Save) -> list[future.Future]:
        return [future.CommitFutureAwaitingContractedSignals(self._write(directory, args.arrays), name="arrays")]

    def save(self, directory: Any, args: Save) -> None:
        asyncio.run(self._write(directory, args.arrays))

    def restore(self, directory: Any, args: Restore) -> list[np.ndarray]:
        written = np.frombuffer((directory / _FILE).read_bytes(), np.uint8)
        if written.size != sum(args.sizes):
            raise ValueError(f"{written.size} bytes of {sum(args.sizes)}")
        return [written[begin:end] for begin, end in itertools.pairwise([0, *itertools.accumulate(args.sizes)])]


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """What to write, arrays of bytes: nobody else may write to them until it is done."""

    arrays: Sequence[np.ndarray]


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """How many bytes each array has."""

    sizes: Sequence[int]
