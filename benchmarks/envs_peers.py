"""CartPole with random actions and automatic resets elsewhere: gymnasium, envpool, PyTorch eager, C on all cores.

    python benchmarks/envs_peers.py [--sizes 16 256 4096] [--seconds 1] [--out FILE.json]

Needs numpy, and whatever of the peers is installed: the others are reported as missing. It imports neither jax nor rlfx,
so that it can run in an environment of its own. Steps a second of wall time, the best of three runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import importlib.util
import json
import os
import pathlib
import subprocess
import tempfile
import time
from importlib.metadata import version

import numpy as np

HERE = pathlib.Path(__file__).parent


def gymnasium_vector(n):
    """Python environments stepped one after the other."""
    import gymnasium

    env = gymnasium.make_vec("CartPole-v1", num_envs=n, vectorization_mode="sync")
    env.reset(seed=0)
    rng = np.random.default_rng(0)

    def run(k):
        for _ in range(k):
            env.step(rng.integers(0, 2, n))

    return run


def envpool_cores(n):
    """C++ environments on all cores."""
    import envpool

    env = envpool.make_gymnasium("CartPole-v1", num_envs=n)
    env.reset()
    rng = np.random.default_rng(0)

    def run(k):
        for _ in range(k):
            env.step(rng.integers(0, 2, n).astype(np.int32))

    return run


def torch_eager(n):
    """One batched tensor operation after the other."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state = torch.rand(4, n) * 0.1 - 0.05
    steps = torch.zeros(n, dtype=torch.int32)

    def step(state, steps):
        x, v, a, w = state
        force = torch.randint(0, 2, (n,)).float() * 20.0 - 10.0
        sin, cos = torch.sin(a), torch.cos(a)
        push = (force + 0.05 * w * w * sin) / 1.1
        acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - (0.1 / 1.1) * cos * cos))
        new = torch.stack([x + 0.02 * v, v + 0.02 * (push - (0.05 / 1.1) * acc * cos), a + 0.02 * w, w + 0.02 * acc])
        steps = steps + 1
        done = (new[0].abs() > 2.4) | (new[2].abs() > 0.20943951) | (steps >= 500)
        return torch.where(done, torch.rand(4, n) * 0.1 - 0.05, new), torch.where(done, 0, steps)

    def run(k):
        now, count = state, steps
        for _ in range(k):
            now, count = step(now, count)

    return run


def c_loop(n, workers):
    """``envs_cartpole.c``, vectorised, K steps a call; environments split over ``workers`` cores."""
    folder = pathlib.Path(tempfile.mkdtemp())
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(HERE / "envs_cartpole.c"), "-o", str(folder / "c.so"), "-lm"], check=True)
    rollout = ctypes.CDLL(str(folder / "c.so")).rollout
    keys = np.random.default_rng(0).integers(0, 2**32, (2, n), dtype=np.uint32)
    arrays = [
        *keys,
        *np.zeros((4, n), np.float32),
        np.zeros(n, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.int32),
    ]
    bounds = np.linspace(0, n, workers + 1).astype(int)
    pool = concurrent.futures.ThreadPoolExecutor(workers)

    def part(i, k):
        start, stop = bounds[i], bounds[i + 1]
        rollout(int(stop - start), k, *[ctypes.c_void_p(a[start:].ctypes.data) for a in arrays])

    def run(k):
        list(pool.map(part, range(workers), [k] * workers))

    return run


def rate(run, n, seconds):
    """The best of three runs of at least ``seconds``, in environment steps a second."""
    run(2)
    k, spent = 2, 0.0
    while spent < seconds / 4:
        k = min(2 * k, 10**6)
        start = time.perf_counter()
        run(k)
        spent = time.perf_counter() - start
    k = max(1, int(k * seconds / spent))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(k)
        times.append(time.perf_counter() - start)
    return n * k / min(times)


PEERS = {
    "gymnasium": (gymnasium_vector, 1024),
    "envpool": (envpool_cores, 2**14),
    "torch": (torch_eager, 2**18),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**i for i in range(4, 19, 2)])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "envs_peers.json")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows, missing = [], []
    makers = {f"C, {w} core{'s' * (w > 1)}": (lambda n, w=w: c_loop(n, w), 2**18) for w in sorted({1, cores})}
    for name, (make, largest) in {**PEERS, **makers}.items():
        if name in PEERS and importlib.util.find_spec(name) is None:
            missing.append(name)
            print(f"{name}: not installed", flush=True)
            continue
        for n in args.sizes:
            if n <= largest:
                rows.append({"peer": name, "N": n, "steps/s": rate(make(n), n, args.seconds)})
                print(f"{name:12} N={n:6} {rows[-1]['steps/s'] / 1e6:10.3f} M steps/s", flush=True)
    versions = {name: version(name) for name in ("numpy", *PEERS) if name not in missing}
    report = {
        "cores": cores,
        "clock": "wall",
        "versions": versions,
        "not installed": missing,
        "rows": rows,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
