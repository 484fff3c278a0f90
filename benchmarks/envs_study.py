"""The study of "Optimizing Data Collection in Deep RL" on this device, CartPole with random actions, with a plot.

    python benchmarks/envs_peers.py                     # first, perhaps with another Python that has more peers
    python benchmarks/envs_study.py [--sizes 16 256 4096] [--out FILE.json] [--plot FILE.png]

* throughput against N (its Figure 5): gymnax with one jitted call a step, gymnax as one XLA scan, our environment
  scanned, fused steps; beside the peers in ``results/envs_peers.json``
* transitions (Figure 6): calls from Python to XLA, and operations that XLA dispatches, for 1000 steps
* K steps in one call (Figure 8); state factor S and compute factor C (Figure 9)

Seconds are process CPU time on one core, the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re

import jax
from envs_throughput import HERE, gymnax_scan, ours, report, seconds  # sets XLA's flags before jax starts

from rlfx.envs import fast_prng

DISPATCHED = re.compile(
    r" (fusion|dot|copy|call|conditional|custom-call|while|reduce|rng-bit-generator|dynamic-[a-z-]+)\("
)


def jit_per_step(name, n, k):
    """gymnax with one jitted call for each step."""
    import gymnax

    env, params = gymnax.make(name)

    @jax.jit
    def step(state, key):
        key_action, key_step = jax.random.split(key)
        action = jax.vmap(env.action_space(params).sample)(jax.random.split(key_action, n))
        return jax.vmap(env.step, (0, 0, 0, None))(jax.random.split(key_step, n), state, action, params)[1]

    first = jax.jit(jax.vmap(env.reset, (0, None)))(jax.random.split(jax.random.key(0), n), params)[1]
    keys = list(jax.random.split(jax.random.key(1), k))

    def run():
        state = first
        for key in keys:
            state = step(state, key)
        return jax.block_until_ready(state)

    return run


def against_n(sizes, repeat, budget):
    rows = []
    for n in sizes:
        k = max(20, min(1000, budget // n))
        candidates = {
            "gymnax, jit a step": jit_per_step("CartPole-v1", n, k),
            "gymnax, XLA scan": gymnax_scan("CartPole-v1", n, k),
            "rlfx, XLA scan, fast keys": ours("CartPole-v1", n, k, impl=fast_prng, backend="vmap"),
            "rlfx, fused, threefry": ours("CartPole-v1", n, k, impl="threefry2x32", backend="auto"),
            "rlfx, fused, fast keys": ours("CartPole-v1", n, k, impl=fast_prng, backend="auto"),
        }
        rates = {name: n * k / s for name, s in seconds(candidates, repeat).items()}
        rows.append({"N": n, "K": k, "steps/s": rates})
        print(f"N={n:6} " + "  ".join(f"{name} {rate / 1e6:.2f}M" for name, rate in rates.items()), flush=True)
    return rows


def dispatched_in_loop(compiled_text):
    """Operations that XLA dispatches in one iteration of the largest loop; none in what is compiled as one function."""
    parts = {part.split(" ", 1)[0]: part for part in re.split(r"\n(?=%|ENTRY)", compiled_text)}
    callers = {
        callee: name for name, part in parts.items() for callee in re.findall(r"(?:body|to_apply)=(%[\w.\-]+)", part)
    }
    inside = {
        callee
        for part in parts.values()
        for line in part.splitlines()
        if "xla_cpu_small_call" in line
        for callee in re.findall(r" call\(.*to_apply=(%[\w.\-]+)", line)
    }

    def compiled(name):
        return name in inside or (name in callers and compiled(callers[name]))

    bodies = {name for part in parts.values() for name in re.findall(r"body=(%[\w.\-]+)", part)}
    return max((0 if compiled(name) else len(DISPATCHED.findall(parts[name])) for name in bodies), default=0)


def transitions(n=1024, k=1000):
    """For 1000 steps of 1024 environments."""
    import rlfx.envs
    from rlfx.transforms.fuse_steps import fuse_steps

    env, key = rlfx.envs.make("CartPole-v1"), jax.random.key(0, impl=fast_prng)
    states = jax.vmap(env.reset)(jax.random.split(key, n))

    def text(length, backend):
        run = fuse_steps(env, length, policy="random", outputs="statistics", backend=backend)
        return jax.jit(run).lower(key, states).compile().as_text()

    single = text(1, "vmap").split("ENTRY", 1)[1]
    rows = [
        {"how": "jit a step", "calls": k, "dispatched": k * len(DISPATCHED.findall(single))},
        {"how": "XLA scan", "calls": 1, "dispatched": k * dispatched_in_loop(text(k, "vmap"))},
        {"how": "fused", "calls": 1, "dispatched": k * dispatched_in_loop(text(k, "auto")) + 1},
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def against_k(repeat, n=1024):
    rows = []
    for k in (1, 10, 100, 1000):
        runs = {b: ours("CartPole-v1", n, k, impl=fast_prng, backend=b) for b in ("vmap", "auto")}
        timed = seconds({b: (lambda r=r, c=1000 // k: [r() for _ in range(c)]) for b, r in runs.items()}, repeat)
        rows.append({"N": n, "K": k, "steps/s": {b: n * 1000 / s for b, s in timed.items()}})
        print(rows[-1], flush=True)
    return rows


def against_factors(repeat, n=1024, k=100):
    rows = []
    for s, c in ((1, 1), (16, 1), (1, 16), (16, 16)):
        factors = {"state_factor": s, "compute_factor": c}
        runs = {b: ours("CartPole-parametric", n, k, impl=fast_prng, backend=b, **factors) for b in ("vmap", "auto")}
        timed = seconds(runs, repeat)
        rows.append({"N": n, "K": k, "S": s, "C": c, "steps/s": {b: n * k / t for b, t in timed.items()}})
        print(rows[-1], "fused", round(timed["vmap"] / timed["auto"], 2), "x", flush=True)
    return rows


def plot(study, peers, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    top, moves, many, factors = axes.flat
    lines = {name: [(r["N"], r["steps/s"][name]) for r in study["N"]] for name in study["N"][0]["steps/s"]}
    for row in peers["rows"]:
        lines.setdefault(row["peer"], []).append((row["N"], row["steps/s"]))
    for name, points in lines.items():
        top.plot(
            *zip(*points, strict=True), marker="o", markersize=3, linestyle="-" if "," in name else "--", label=name
        )
    top.set(
        xscale="log", yscale="log", xlabel="environments N", ylabel="environment steps/s", title="Throughput (Fig. 5)"
    )
    top.legend(fontsize=7)
    at = range(len(study["transitions"]))
    moves.bar([i - 0.2 for i in at], [r["calls"] for r in study["transitions"]], 0.4, label="Python to XLA calls")
    moves.bar(
        [i + 0.2 for i in at], [r["dispatched"] for r in study["transitions"]], 0.4, label="dispatched operations"
    )
    moves.set(yscale="log", title="Transitions of 1000 steps (Fig. 6)")
    moves.set_xticks(list(at), [r["how"] for r in study["transitions"]])
    moves.legend(fontsize=7)
    for b, label in (("vmap", "XLA scan"), ("auto", "fused")):
        many.plot([r["K"] for r in study["K"]], [r["steps/s"][b] for r in study["K"]], marker="o", label=label)
    many.set(xscale="log", yscale="log", xlabel="steps K in one call", ylabel="environment steps/s", title="K (Fig. 8)")
    many.legend(fontsize=7)
    labels = [f"S={r['S']}\nC={r['C']}" for r in study["S, C"]]
    factors.bar(labels, [r["steps/s"]["auto"] / r["steps/s"]["vmap"] for r in study["S, C"]])
    factors.set(ylabel="fused over XLA scan", title="State and compute factors (Fig. 9)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**i for i in range(4, 19, 2)])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=int, default=2_000_000, help="environment steps in one run")
    parser.add_argument("--peers", type=pathlib.Path, default=HERE / "results" / "envs_peers.json")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "envs_study.json")
    parser.add_argument("--plot", type=pathlib.Path, default=HERE.parent / "docs" / "envs-study.png")
    args = parser.parse_args()
    study = {
        "N": against_n(args.sizes, args.repeat, args.budget),
        "transitions": transitions(),
        "K": against_k(args.repeat),
        "S, C": against_factors(args.repeat),
    }
    args.out.write_text(json.dumps(report(study), indent=1) + "\n")
    peers = json.loads(args.peers.read_text()) if args.peers.exists() else {"rows": []}
    plot(study, peers, args.plot)


if __name__ == "__main__":
    main()
