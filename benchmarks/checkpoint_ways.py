"""What a checkpoint costs, by rlfx.training and by orbax's ways to write one file of bytes.

    python benchmarks/checkpoint_ways.py [--arrays 43] [--bytes 7680] [--saves 30] [--rounds 5] [--out FILE]

An agent as large as PPO's (three seeds of `ppo.py cartpole`), saved again and again, the last three kept. All of orbax's
write the same bytes by a handler that opens one file, so that what differs is orbax's own: its manager with two items (the
bytes, and JSON that says what they are), with one, with one and nothing removed; its two checkpointers, which remove nothing
and know of no steps. Processor seconds a save, of all threads and of the one that saves: medians of the rounds, imports and
the first save not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import recorded
from orbax.checkpoint import future

from rlfx.training import Checkpoints
from rlfx.training.loop import Call, Loop

KEEP = 3


class Handler(ocp.AsyncCheckpointHandler):
    """Bytes in a file."""

    async def _write(self, directory, arrays):
        with (directory / "arrays").open("wb") as file:
            for array in arrays:
                file.write(array)

    async def async_save(self, directory, args):
        return [future.CommitFutureAwaitingContractedSignals(self._write(directory, args.arrays), name="arrays")]

    def save(self, directory, args):
        asyncio.run(self._write(directory, args.arrays))

    def restore(self, directory, args):
        raise NotImplementedError


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Bytes(ocp.args.CheckpointArgs):
    arrays: list


def copies(agent):
    return [np.array(leaf) for leaf in agent.values()]


def ours(agent, directory, saves):
    loop = Loop(None, agent, jax.random.key(0), saves, 1)
    with Checkpoints(directory, keep=KEEP).opened(loop) as after:
        for i in range(saves):
            after(Call(i, i + 1, agent, None, False))


def managed(about, keep):
    def drive(agent, directory, saves):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        with ocp.CheckpointManager(directory, options=options) as manager:
            for i in range(saves):
                args = Bytes(copies(agent))
                if about:
                    text = [{"name": name, "type": str(leaf.dtype), "bytes": leaf.nbytes} for name, leaf in agent.items()]
                    args = ocp.args.Composite(agent=args, about=ocp.args.JsonSave({"leaves": text}))
                manager.save(i, args=args, force=True)

    return drive


def checkpointer(kind):
    def drive(agent, directory, saves):
        with kind(Handler()) as writer:
            for i in range(saves):
                writer.save(directory / str(i), args=Bytes(copies(agent)))

    return drive


WAYS = {
    "rlfx.training": ours,
    "orbax: manager, two items": managed(True, KEEP),
    "orbax: manager, one item": managed(False, KEEP),
    "orbax: manager, one item, nothing removed": managed(False, None),
    "orbax: AsyncCheckpointer": checkpointer(ocp.AsyncCheckpointer),
    "orbax: Checkpointer": checkpointer(ocp.Checkpointer),
}


def spent(way, agent, saves):
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time(), time.thread_time()
        way(agent, Path(folder), saves)
        return time.process_time() - begun[0], time.thread_time() - begun[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", type=int, default=43)
    parser.add_argument("--bytes", type=int, default=7680, help="of each array")
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint_ways.json"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # orbax's, of what it has not written yet
    agent = {f"x{i}": jnp.ones(args.bytes // 4) for i in range(args.arrays)}
    found = {name: [] for name in WAYS}
    for way in WAYS.values():
        spent(way, agent, 2)
    for _ in range(args.rounds):
        for name, way in WAYS.items():
            one, all_of_them = spent(way, agent, 1), spent(way, agent, 1 + args.saves)
            found[name].append([(after - before) / args.saves for before, after in zip(one, all_of_them, strict=True)])
    ways = {name: [statistics.median(x) for x in zip(*rounds, strict=True)] for name, rounds in found.items()}
    for name, (everywhere, here) in ways.items():
        print(f"{name}: {1000 * everywhere:.2f} ms, {1000 * here:.2f} ms of them in the thread that saves")
    command = f"python benchmarks/checkpoint_ways.py --saves {args.saves} --rounds {args.rounds}"
    about = recorded.about("checkpoint_ways", orbax=ocp.__version__) | {"command": command}
    sizes = {"arrays": args.arrays, "bytes": args.arrays * args.bytes, "rounds": args.rounds}
    recorded.write(args.out, about | sizes | {"ways": ways})


if __name__ == "__main__":
    main()
