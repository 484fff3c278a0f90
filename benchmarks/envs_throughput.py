"""Environment steps per second on one core: gymnax's scan(vmap(step)), ours unfused and fused, a vectorised C loop.

    python benchmarks/envs_throughput.py                # every environment, N = 16 ... 65536
    python benchmarks/envs_throughput.py --envs CartPole-v1 --sizes 64 4096

Seconds are process CPU time, the median of several interleaved runs, on one core (XLA's own threads are off); ratios
come first. Random actions and automatic resets everywhere; each candidate returns statistics, no trajectory.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np

import rlfx.envs
from rlfx.envs import fast_prng
from rlfx.transforms.fuse_steps import fuse_steps

HERE = pathlib.Path(__file__).parent
ENVS = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "Catch-bsuite", "Breakout-MinAtar"]
SIZES = [16, 64, 256, 1024, 4096, 16384, 65536]


def gymnax_scan(name, n, k):
    """gymnax as its users run it: scan over a vmapped, automatically resetting step, threefry keys."""
    import gymnax

    env, params = gymnax.make(name)

    def body(carry, key):
        state, total = carry
        key_action, key_step = jax.random.split(key)
        action = jax.vmap(env.action_space(params).sample)(jax.random.split(key_action, n))
        _, state, reward, *_ = jax.vmap(env.step, (0, 0, 0, None))(jax.random.split(key_step, n), state, action, params)
        return (state, total + reward.reshape(n)), None

    def run(key, state):
        return jax.lax.scan(body, (state, jnp.zeros(n)), jax.random.split(key, k))[0]

    state = jax.jit(jax.vmap(env.reset, (0, None)))(jax.random.split(jax.random.key(0), n), params)[1]
    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(jax.random.key(1), state))


def ours(name, n, k, *, impl, backend, tile=None, **options):
    env = rlfx.envs.make(name, **options)
    key = jax.random.key(0, impl=impl)
    states = jax.jit(jax.vmap(env.reset))(jax.random.split(key, n))
    run = jax.jit(fuse_steps(env, k, policy="random", outputs="statistics", backend=backend, tile=tile))
    return lambda: jax.block_until_ready(run(key, states))


def c_loop(n, k):
    folder = pathlib.Path(tempfile.mkdtemp())
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(HERE / "envs_cartpole.c"), "-o", str(folder / "c.so"), "-lm"], check=True)
    library = ctypes.CDLL(str(folder / "c.so"))
    keys = np.random.default_rng(0).integers(0, 2**32, (2, n), dtype=np.uint32)
    floats = [np.zeros(n, np.float32) for _ in range(4)]
    reward, t, episodes = np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*keys, *floats, t, reward, episodes)]
    keep = (keys, floats, reward, t, episodes)

    def run():
        library.rollout(n, k, *pointers)
        return keep

    run()
    assert 15 < n * k / episodes.sum() < 30 or k < 50, "CartPole's random episodes last 22 steps"
    return run


def seconds(candidates: dict, repeat: int) -> dict[str, float]:
    """Median process CPU seconds of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeat):
        for name, run in candidates.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def throughput(name, n, repeat, budget):
    k = max(20, min(1000, budget // n))
    candidates = {"gymnax scan(vmap)": gymnax_scan(name, n, k)}
    for label, impl in (("threefry", "threefry2x32"), ("fast", fast_prng)):
        candidates[f"fused scan {label}"] = ours(name, n, k, impl=impl, backend="scan")
        if n >= 256:
            candidates[f"fused tile 256 {label}"] = ours(name, n, k, impl=impl, backend="tile", tile=256)
    if name == "CartPole-v1":
        candidates["C vectorised"] = c_loop(n, k)
    timed = seconds(candidates, repeat)
    rates = {label: n * k / s for label, s in timed.items()}
    best = {label: max(r for c, r in rates.items() if label in c and "C v" not in c) for label in ("threefry", "fast")}
    base = rates["gymnax scan(vmap)"]
    row = {
        "env": name,
        "N": n,
        "K": k,
        "over gymnax, fast": best["fast"] / base,
        "over gymnax, threefry": best["threefry"] / base,
        "steps/s": rates,
    }
    if "C vectorised" in rates:
        row["of C"] = best["fast"] / rates["C vectorised"]
    print(
        f"{name:17} N={n:6}  {row['over gymnax, fast']:5.1f}x fast  {row['over gymnax, threefry']:4.1f}x threefry"
        + (f"  {row['of C']:.2f} of C" if "of C" in row else "")
        + "   "
        + "  ".join(f"{c} {r / 1e6:.1f}M" for c, r in rates.items()),
        flush=True,
    )
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--budget", type=int, default=2_000_000, help="environment steps in one run")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    parser.add_argument("--append", action="store_true", help="keep the file's rows of other environments and sizes")
    args = parser.parse_args()
    out = args.out or HERE / "results" / "envs_throughput.json"
    out.parent.mkdir(exist_ok=True)
    rows = {(r["env"], r["N"]): r for r in earlier(out, args.append)}
    for name in args.envs:
        for n in args.sizes:
            rows[name, n] = throughput(name, n, args.repeat, args.budget)
            ordered = sorted(
                rows.values(), key=lambda r: (ENVS.index(r["env"]) if r["env"] in ENVS else len(ENVS), r["N"])
            )
            out.write_text(json.dumps(report(ordered), indent=1) + "\n")


def earlier(out, append):
    """The rows of a run of which this one is another piece."""
    return json.loads(out.read_text())["rows"] if append and out.exists() else []


def report(rows):
    """What was measured, and on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "cpu": cpu_name(),
        "load average": os.getloadavg(),
        "jax": jax.__version__,
        "gymnax": importlib.metadata.version("gymnax"),
        "clock": "process CPU time",
        "rows": rows,
    }


def cpu_name() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else ""


if __name__ == "__main__":
    main()
