"""Does it learn as well? Learning curves of PPO over many seeds.

    python benchmarks/ppo_learning.py shuffle [--seeds 20] [--envs CartPole-v1 Acrobot-v1 Catch-bsuite] [--out FILE]
    python benchmarks/ppo_learning.py peer --purejaxrl PATH [--seeds 20] [--out FILE]

`--out` adds to what the file has. With `--keep DIR`, the curves of every five seeds are kept there, and an interrupted run
goes on where it was.

`shuffle` trains the program of `ppo_full.py` with rlfx's sort-free shuffle and with `jax.random.permutation`; `peer`
trains it and PureJaxRL's own file on CartPole, both at PureJaxRL's own settings (4 environments, 500,000 steps). The area
under a learning curve is the mean over updates of the mean return of the episodes that ended in the update (or in the last
one in which any did). Reported: the difference of the mean areas relative to the second arm, and its 95% confidence
interval (Welch). Seeds of the two arms are different.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
import purejaxrl
import recorded
from ppo_full import make_train
from welch import relative

import rlfx.envs

SEEDS_AT_ONCE = 5
# environments at once, updates, learning rate
SETTINGS = {
    "CartPole-v1": (16, 100, 2.5e-3),
    "Acrobot-v1": (16, 120, 2.5e-3),
    "Catch-bsuite": (16, 60, 2.5e-3),
    "MountainCar-v0": (16, 300, 2.5e-3),
    "Breakout-MinAtar": (16, 400, 2.5e-3),
}


def episode_returns(score, done):
    """Mean return of the episodes that ended in each update, [updates]; NaN before the first end."""
    score, done = np.asarray(score), np.asarray(done)
    ended = done.sum((1, 2))
    total = np.where(done, score, 0.0).sum((1, 2))
    curve = np.where(ended > 0, total / np.maximum(ended, 1), np.nan)
    last = np.maximum.accumulate(np.where(np.isnan(curve), -1, np.arange(len(curve))))
    return np.where(last >= 0, curve[last], np.nan)


class Curves:
    """The learning curves of one arm, five seeds at a time, kept in a directory if there is one."""

    def __init__(self, name, train, keys, keep):
        self.name, self.keys, self.keep = name, keys, keep
        self.run = jax.jit(lambda keys: jax.lax.map(train, keys))  # a CPU gains nothing from a batch of seeds

    def parts(self):
        return range(0, len(self.keys), SEEDS_AT_ONCE)

    def part(self, start):
        path = self.keep and self.keep / f"{self.name}-{start}.npy"
        if path and path.exists():
            return np.load(path)
        rows = zip(*map(np.asarray, self.run(self.keys[start : start + SEEDS_AT_ONCE])), strict=True)
        rows = np.stack([episode_returns(score, done) for score, done in rows])
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, rows)
        return rows

    def all(self):
        return np.concatenate([self.part(start) for start in self.parts()])


def compare(first, second):
    """Areas under the curves, and the 95% interval of their relative difference."""
    start = int(max(np.isnan(first).sum(1).max(), np.isnan(second).sum(1).max()))
    a, b = (np.mean(c[:, start:], 1) for c in (first, second))
    return {
        "area": [float(a.mean()), float(b.mean())],
        "area_std": [float(a.std(ddof=1)), float(b.std(ddof=1))],
        "final": [float(c[:, -10:].mean()) for c in (first, second)],
        **relative(a, b),
        "areas": [np.round(a, 2).tolist(), np.round(b, 2).tolist()],
        "mean_curves": [np.round(c.mean(0)[:: max(1, c.shape[1] // 100)], 2).tolist() for c in (first, second)],
    }


def seeds_of_arms(key, seeds):
    """Twenty keys for the one arm and twenty for the other, in turn, so that more seeds keep the first ones."""
    keys = jax.random.split(key, 40 * -(-seeds // 20)).reshape(-1, 2, 20)
    return (keys[:, arm].reshape(-1)[:seeds] for arm in range(2))


def shuffle_arms(name, seeds, keep):
    envs, updates, rate = SETTINGS[name]
    env = rlfx.envs.make(name)
    first, second = seeds_of_arms(jax.random.key(20), seeds)
    ours = make_train(env, envs, updates, rate=rate)
    sorting = make_train(env, envs, updates, rate=rate, shuffle=jax.random.permutation)
    return (
        Curves(f"{name}-sort-free", lambda key: ours(key)[1], first, keep),
        Curves(f"{name}-sorting", lambda key: sorting(key)[1], second, keep),
    )


def peer_arms(checkout, seeds, keep):
    envs, updates = 4, int(5e5) // 128 // 4
    ours = make_train(rlfx.envs.make("CartPole-v1"), envs, updates)
    theirs = purejaxrl.make_train(checkout, NUM_ENVS=envs)

    def their_episodes(key):
        info = theirs(key)["metrics"]
        return info["returned_episode_returns"], info["returned_episode"]

    first, second = seeds_of_arms(jax.random.key(30), seeds)
    return (
        Curves("peer-rlfx", lambda key: ours(key)[1], first, keep),
        Curves("peer-purejaxrl", their_episodes, jax.random.key_data(second), keep),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shuffle", "peer"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="a directory for the curves")
    parser.add_argument("--envs", nargs="+", default=["CartPole-v1", "Acrobot-v1", "Catch-bsuite"], choices=SETTINGS)
    parser.add_argument("--purejaxrl")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.envs if args.what == "shuffle" else ["CartPole-v1"]:
        begin = time.perf_counter()
        if args.what == "shuffle":
            arms = shuffle_arms(name, args.seeds, args.keep)
        else:
            arms = peer_arms(args.purejaxrl, args.seeds, args.keep)
        row = {"seeds": args.seeds} | compare(*(arm.all() for arm in arms))
        low, high = row["interval"]
        print(
            f"{name}: difference of areas {row['difference']:+.1%}, 95% interval [{low:+.1%}, {high:+.1%}]; areas "
            f"{row['area'][0]:.1f} and {row['area'][1]:.1f}, at the end {row['final'][0]:.1f} and {row['final'][1]:.1f} "
            f"({args.seeds} seeds each, {time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        results[name] = row
    if args.out:
        arms = ["rlfx.shuffle", "jax.random.permutation"] if args.what == "shuffle" else ["rlfx", "PureJaxRL"]
        record = recorded.about(f"ppo_learning {args.what}") | {
            "arms": arms,
            "results": (json.loads(args.out.read_text())["results"] if args.out.exists() else {}) | results,
        }
        if args.what == "peer":
            record["purejaxrl"] = purejaxrl.COMMIT
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
