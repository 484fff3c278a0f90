"""TimeRL's grid: PPO, one factor at a time, rlfx against hand-written full-batch and chunked JAX.

    python benchmarks/ppo_grid.py --factor T [--rounds 5] [--cores 2] [--out FILE.json]     # T, B, units or layers

Around T = 250 timesteps, B = 512 environments, 2 layers of 64 units and 48 floats an observation: T 125, 500, 2000; B 128,
512, 2048; units 16, 64, 256; layers 1, 4, 16. The programs are those of `ppo_timerl.py`, with the hand-written one also
split over the devices by hand, interleaved in one process; losses and gradients are compared before anything is timed.
`--out` adds the points to what the file has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ppo_timerl as timerl
import recorded

import rlfx

CENTRE = {"T": 250, "B": 512, "units": 64, "layers": 2}
FACTORS = {"T": (125, 500, 2000), "B": (128, 512, 2048), "units": (16, 64, 256), "layers": (1, 4, 16)}


def init(key, units, layers):
    """Parameters like `ppo_timerl.init`, of any depth."""

    def network(key, out):
        sizes = (timerl.OBS, *(units,) * layers, out)
        keys = jax.random.split(key, layers + 1)
        return [
            {"w": jax.random.normal(k, (i, o)) / np.float32(np.sqrt(i)), "b": jnp.zeros(o)}
            for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    policy, value = jax.random.split(key)
    return {"pi": network(policy, timerl.ACTIONS), "v": network(value, 1)}


def programs(point, mesh):
    timerl.LENGTH, batch = point["T"], point["B"]
    chunk = next(n for n in range(10, 0, -1) if point["T"] % n == 0)
    found = {
        "hand": timerl.hand_written(batch),
        "hand-chunked": timerl.hand_written(batch, chunk),
        "rlfx": timerl.compiled_by_rlfx(batch),
    }
    if mesh is not None:
        found[f"hand-chunked on {mesh.size} devices"] = timerl.hand_written(batch, chunk, mesh)
        found[f"rlfx on {mesh.size} devices"] = timerl.compiled_by_rlfx(batch, mesh)
    return found


def run(point, rounds, mesh):
    params = init(jax.random.key(0), point["units"], point["layers"])
    state = jax.vmap(timerl.env_reset)(jax.random.split(jax.random.key(1), point["B"]))
    rows = timerl.measure(programs(point, mesh), (params, state, jax.random.key(2)), rounds)
    print(" ".join(f"{k}={v}" for k, v in point.items()) + f": ratios to hand-written, medians of {rounds} rounds")
    for name, r in rows.items():
        print(
            f"  {name:26} wall {r['wall_ratio']:5.2f}x  cpu {r['cpu_ratio']:5.2f}x | {r['wall_ms']:8.1f} ms  temp "
            f"{r['temp_mb']:7.1f} MB a device  compile {r['compile_s']:.2f} s ({r['compile_ratio']:.2f}x)",
            flush=True,
        )
    return {**point, "rounds": rounds, "programs": rows}


def geometric_mean(results, name):
    ratios = [r["programs"][name]["wall_ratio"] for r in results if name in r["programs"]]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", choices=FACTORS, nargs="+", default=list(FACTORS))
    parser.add_argument("--values", type=int, nargs="+", help="of the factor, instead of the grid's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mesh = rlfx.use_all_cores(args.cores) if args.cores > 1 else None
    points = [CENTRE | {f: v} for f in args.factor for v in args.values or FACTORS[f]]
    results = [run(point, args.rounds, mesh) for point in points]
    if args.out:
        known = json.loads(args.out.read_text())["results"] if args.out.exists() else []
        results = [r for r in known if {k: r[k] for k in CENTRE} not in points] + results
        record = recorded.about("ppo_grid") | {
            "results": results,
        }
        recorded.write(args.out, record)
    for name in results[0]["programs"]:
        print(f"geometric mean of {len(results)} points: {name} {geometric_mean(results, name):.2f}x the time of hand")


if __name__ == "__main__":
    main()
