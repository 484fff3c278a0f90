"""From a fresh process to a trained policy: seconds until greedy episodes of PPO on Pendulum reach the recipe's bar.

    python benchmarks/first_policy.py [--seeds 0 1 2] [--out FILE]

Each seed is a process of its own, one after another, that imports rlfx, traces, compiles and trains the recipe as its file
has it, one agent, and evaluates 100 greedy episodes as often as the file does. Nothing compiled is kept from one to the
next. `began` is when the first call began, `rows` are `[seconds since the process was started, steps, mean return]`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def train(seed: int, started: float) -> dict:
    import jax
    import ppo_continuous

    from rlfx.training import Evaluate, run

    recipe = ppo_continuous.FAMILY["pendulum"]()
    init_key, key = jax.random.split(jax.random.key(seed))
    agent, rows, began = jax.jit(recipe.init)(init_key), [], time.time() - started
    evaluation = Evaluate(
        lambda agent, key: recipe.evaluate(agent, key, 100),
        recipe.every,
        lambda update, found: rows.append((time.time() - started, update * recipe.steps, float(found["value"]))),
    )
    run(recipe.update, agent, key, updates=recipe.updates, per_call=recipe.per_call, callbacks=[evaluation])
    return {"seed": seed, "bar": recipe.bar, "began": began, "rows": rows, "cpu_seconds": time.process_time()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first_policy.json"))
    parser.add_argument(
        "--train", type=float, help="what the script starts: one seed, of a process started at this time"
    )
    args = parser.parse_args()
    if args.train is not None:
        print(json.dumps(train(args.seeds[0], args.train)))
        return
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    results = []
    for seed in args.seeds:
        command = [sys.executable, __file__, "--seeds", str(seed), "--train", repr(time.time())]
        out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.append(json.loads(out.splitlines()[-1]))
        print(results[-1], flush=True)

    import recorded  # imports jax, which is part of what is timed

    command = f"python benchmarks/first_policy.py --seeds {' '.join(map(str, args.seeds))}"
    cores = len(os.sched_getaffinity(0))
    recorded.write(args.out, recorded.about("first_policy") | {"command": command, "cores": cores, "results": results})


if __name__ == "__main__":
    main()
