"""Self-play with tree search in 1 to 8 worker processes, as in RL-Scope's section 4.3: the actors of OpenSpiel's AlphaZero.

    python benchmarks/profile_selfplay.py [--seconds 4] [--workers 1 2 4 8]

Needs the package `open_spiel` (2.0.2, with flax and optax): its actors play Connect Four, each in a process of its own, by a
search in Python that asks a small network in jax at each new position. Nothing of it is changed, and operations are named from
outside. All workers begin their captures when the last of them has compiled. Writes benchmarks/results/profile_selfplay.json.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from rlfx import profile
from rlfx.profile import outside
from rlfx.profile.capture import machine
from rlfx.profile.tables import grid

RESULT = pathlib.Path(__file__).parent / "results/profile_selfplay.json"
ALPHA_ZERO = "open_spiel.python.algorithms.alpha_zero"
OPERATIONS = (
    "search=open_spiel.python.algorithms.mcts:MCTSBot.mcts_search",
    f"inference={ALPHA_ZERO}.evaluator:AlphaZeroEvaluator._inference",
)
SEARCHES = 25  # positions that are tried before a move


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of a capture")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    parser.add_argument("--as-worker", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_worker:
        work(arguments.as_worker, arguments.directory, arguments.seconds)
        return
    rows = []
    for count in arguments.workers:
        rows.append(together(count, arguments.seconds))
        result = {"machine": machine(), "date": datetime.date.today().isoformat(), "seconds": arguments.seconds,
                  "searches": SEARCHES, "rows": rows}  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    body = [
        [str(r["workers"]), f"{r['positions_per_cpu_s']:,.0f}", f"{r['device_busy']:.1%}", r["verdict"]] for r in rows
    ]  # fmt: skip
    print(grid(["workers", "positions/CPU s", "device busy", "verdict"], body))


def together(count: int, seconds: float) -> dict:
    """So many workers at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [sys.executable, __file__, "--seconds", str(seconds), "--directory", name]
        workers = [
            subprocess.Popen([*command, "--as-worker", f"worker_{i}"], stdout=subprocess.DEVNULL) for i in range(count)
        ]
        while len(list(folder.glob("*.ready"))) < count and not any(w.poll() for w in workers):
            time.sleep(0.05)
        (folder / "go").touch()
        if any(w.wait() for w in workers):
            raise SystemExit("A worker failed.")
        cpu = [float(path.read_text()) for path in folder.glob("*.cpu")]
        return summary(count, profile.read(folder), sum(cpu))


def summary(count: int, report: profile.Report, cpu: float) -> dict:
    """Of a report of all workers, which took so many CPU seconds together: what their captures took is in them."""
    host: collections.Counter = collections.Counter()
    operations: collections.Counter = collections.Counter()
    for row, ns in report.rows.items():
        host[row.host] += ns / report.window_ns
        operations[row.path[-1] if row.path else "(none)"] += ns / report.window_ns
    asked = sum(
        n for p in report.processes for (_, path), n in p.timeline.operations.items() if path[-1:] == ("inference",)
    )
    busy = [sum(ns for row, ns in p.sweep.rows.items() if row.device != "idle") / 1e9 for p in report.processes]
    return {
        "workers": count, "seconds": report.span_ns / 1e9, "moves": report.steps,
        "positions": asked, "positions_per_s": asked / report.span_ns * 1e9,
        "cpu_seconds": cpu, "positions_per_cpu_s": asked / cpu,
        "calls_per_position": report.count("python", "backend") / max(asked, 1),
        "load": os.getloadavg()[0] / (os.cpu_count() or 1),
        "device_busy": report.device_busy, "device_bound": report.device_bound,
        "naive_utilisation": report.naive_utilisation, "busy_s": statistics.mean(busy),
        "window_s": statistics.mean(p.window_ns for p in report.processes) / 1e9, "host": dict(host),
        "operations": dict(operations), "limits": report.limits(), "verdict": report.verdict, "problems": report.problems,
    }  # fmt: skip


def work(name: str, folder: pathlib.Path, seconds: float) -> None:
    """One actor: games against itself for so many seconds."""
    named = [outside.parse(text) for text in OPERATIONS]
    with outside.naming(named):
        import pyspiel
        from open_spiel.python.algorithms.alpha_zero import alpha_zero, evaluator

        game = pyspiel.load_game("connect_four")
        config = alpha_zero.Config(
            game="connect_four", path=str(folder / name), learning_rate=1e-3, weight_decay=1e-4,
            decouple_weight_decay=False, train_batch_size=32, replay_buffer_size=4096, replay_buffer_reuse=4, max_steps=1,
            checkpoint_freq=25, actors=1, evaluators=0, evaluation_window=50, eval_levels=7, uct_c=2, max_simulations=SEARCHES,
            policy_alpha=1.0, policy_epsilon=0.25, temperature=1, temperature_drop=4, nn_model="mlp", nn_width=128,
            nn_depth=2, observation_shape=game.observation_tensor_shape(), output_size=game.num_distinct_actions(),
            verbose=False, quiet=True,
        )  # fmt: skip
        asked = evaluator.AlphaZeroEvaluator(game, alpha_zero._init_model_from_config(config))
        bot = alpha_zero._init_bot(config, game, asked, False)
        bot.mcts_search(game.new_initial_state())  # compiles
        (folder / f"{name}.ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        with profile.capture(folder, process=name) as session, profile.phase("self-play"):
            cpu, end = time.process_time(), time.perf_counter() + seconds
            while time.perf_counter() < end:
                session.steps += play(game, bot, end)
            (folder / f"{name}.cpu").write_text(str(time.process_time() - cpu))


def play(game, bot, end: float) -> int:
    """A game, as `alpha_zero._play_game` plays it; the number of its moves until `end`."""
    import numpy as np

    state, moves = game.new_initial_state(), 0
    while not state.is_terminal() and time.perf_counter() < end:
        root = bot.mcts_search(state)
        counts = np.zeros(game.num_distinct_actions())
        for child in root.children:
            counts[child.action] = child.explore_count
        state.apply_action(np.random.choice(len(counts), p=counts / counts.sum()))
        moves += 1
    return moves


if __name__ == "__main__":
    main()
