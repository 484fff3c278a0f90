"""The sort-free shuffle against jax.random.permutation, and unrolled threefry against jax's, on one core.

python benchmarks/random_speed.py [--rounds 9] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import recorded

from rlfx.prng import fast_prng
from rlfx.recurrence.language.shuffle import shuffle
from rlfx.threefry import threefry


def permute(permutation, n, times=8):
    def run(key):
        # The order is used, as a minibatch would: a sum weighted by position cannot be simplified away.
        weights = jnp.arange(n, dtype=jnp.int32)
        one = lambda total, key: (total + (permutation(key, n) * weights).sum(), None)  # noqa: E731
        return jax.lax.scan(one, jnp.int32(0), jax.random.split(key, times))[0]

    return run


def rollout_draws(envs):
    """What 128 steps of a rollout draw: an action and a possible reset for each environment."""

    def run(key):
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(envs))

        def draw(key, t):
            key = jax.random.fold_in(key, t)
            noise, reset = jax.random.gumbel(key, (2,)), jax.random.uniform(jax.random.split(key)[1], (4,))
            return noise.sum() + reset.sum()

        one = lambda total, t: (total + jax.vmap(draw, in_axes=(0, None))(keys, t).sum(), None)  # noqa: E731
        return jax.lax.scan(one, jnp.float32(0), jnp.arange(128))[0]

    return run


def measure(programs, rounds):
    """Median CPU milliseconds, and the median ratio to the first program's."""
    runs, compile_s = {}, {}
    for name, (fn, key) in programs.items():
        begin = time.perf_counter()
        runs[name] = jax.jit(fn).lower(key).compile(), key
        compile_s[name] = time.perf_counter() - begin
        jax.block_until_ready(runs[name][0](key))
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, key) in runs.items():
            begin = time.process_time()
            jax.block_until_ready(run(key))
            times[name].append(time.process_time() - begin)
    first = next(iter(times.values()))
    return {
        name: {
            "cpu_ms": 1e3 * statistics.median(t),
            "faster_by": statistics.median(a / b for a, b in zip(first, t, strict=True)),
            "trace_and_compile_s": compile_s[name],
        }
        for name, t in times.items()
    }


def show(title, rows):
    print(
        title + ": " + ", ".join(f"{k} {r['cpu_ms']:.2f} ms ({r['faster_by']:.2f}x)" for k, r in rows.items()),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192, 10007, 32768, 131072, 1_000_000])
    parser.add_argument("--envs", type=int, nargs="+", default=[4, 64, 256, 1024])
    parser.add_argument("--out")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    key, shuffles, draws = jax.random.key(0), {}, {}
    for n in args.lengths:
        arms = {"jax.random.permutation": jax.random.permutation, "rlfx.shuffle": shuffle}
        shuffles[n] = measure({name: (permute(fn, n), key) for name, fn in arms.items()}, args.rounds)
        show(f"8 permutations of {n}", shuffles[n])
    for envs in args.envs:
        keys = {"jax": key, "unrolled": jax.random.key(0, impl=threefry), "fast": jax.random.key(0, impl=fast_prng)}
        draws[envs] = measure({name: (rollout_draws(envs), k) for name, k in keys.items()}, args.rounds)
        show(f"draws of 128 steps of {envs} environments", draws[envs])
    if args.out:
        record = recorded.about("random_speed") | {
            "shuffle": shuffles,
            "rollout_draws": draws,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
