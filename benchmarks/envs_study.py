"""The study of "Optimizing Data Collection in Deep RL" on this device, CartPole with random actions, with a plot.

    python benchmarks/envs_peers.py                     # first, perhaps with another Python that has more peers
    python benchmarks/envs_study.py [--parts N transitions K factors] [--sizes 16 256 4096] [--out FILE.json]

* ``N``: throughput against N (its Figure 4): gymnax with one jitted call a step, gymnax as one XLA scan, our environment
  scanned, fused steps; beside the peers in ``results/envs_peers.json``
* ``transitions`` (Figure 6): calls from Python to XLA, and operations that XLA dispatches, for 1000 steps
* ``K``: K steps in one call (Figure 8)
* ``factors``: what K fused steps gain over one a call, by state factor S and compute factor C (Figure 9)

Each part (and ``factors`` for each ``--envs``) can be run alone: the file keeps what it has of the others. The plots show
the whole file.

Seconds are process CPU time on one core, the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re

import jax
import matplotlib
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


def against_k(repeat, sizes=(64, 4096), budget=4_000_000):
    rows = []
    for n in sizes:
        for k in (1, 10, 100, 1000):
            runs = {b: ours("CartPole-v1", n, k, impl=fast_prng, backend=b) for b in ("vmap", "auto")}
            rates = each(runs, n, k, repeat, budget)
            rows.append({"N": n, "K": k, "steps/s": rates})
            print(rows[-1], flush=True)
    return rows


def each(runs, n, k, repeat, budget):
    """Steps a second of functions that run K steps, called often enough to measure."""
    calls = max(1, min(1000, budget // n) // k)
    timed = seconds({name: (lambda r=r: [r() for _ in range(calls)]) for name, r in runs.items()}, repeat)
    return {name: n * k * calls / s for name, s in timed.items()}


def against_factors(repeat, n, ks=(1, 10, 100, 1000), budget=1_000_000):
    rows = []
    for s, c in itertools.product((1, 4, 16), (1, 4, 16)):
        for k in ks:
            run = ours("CartPole-parametric", n, k, impl=fast_prng, backend="auto", state_factor=s, compute_factor=c)
            rows.append(
                {"N": n, "K": k, "S": s, "C": c, "steps/s": each({"fused": run}, n, k, repeat, budget)["fused"]}
            )
        gain = " ".join(f"K={r['K']} {r['steps/s'] / rows[-len(ks)]['steps/s']:.1f}x" for r in rows[-len(ks) :])
        print(f"N={n} S={s} C={c}: {gain}", flush=True)
    return rows


def plot_throughput(study, peers, path):
    import matplotlib.pyplot as plt

    figure, (top, moves, many) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained", width_ratios=(3, 2, 2))
    lines = {name: [(r["N"], r["steps/s"][name]) for r in study["N"]] for name in study["N"][0]["steps/s"]}
    for row in peers["rows"]:
        lines.setdefault(row["peer"], []).append((row["N"], row["steps/s"]))
    for name, points in lines.items():
        style = "-" if name.startswith(("gymnax", "rlfx")) else "--"
        top.plot(*zip(*points, strict=True), marker="o", markersize=3, linestyle=style, label=name)
    top.set(
        xscale="log", yscale="log", xlabel="environments N", ylabel="environment steps/s", title="Throughput (Fig. 4)"
    )
    top.legend(fontsize=7, ncols=2)
    at = range(len(study["transitions"]))
    moves.bar([i - 0.2 for i in at], [r["calls"] for r in study["transitions"]], 0.4, label="Python to XLA calls")
    moves.bar(
        [i + 0.2 for i in at], [r["dispatched"] for r in study["transitions"]], 0.4, label="dispatched operations"
    )
    moves.set(yscale="log", title="Transitions of 1000 steps (Fig. 6)")
    moves.set_xticks(list(at), [r["how"] for r in study["transitions"]])
    moves.legend(fontsize=7)
    for n in sorted({r["N"] for r in study["K"]}):
        rows = [r for r in study["K"] if r["N"] == n]
        for b, label, style in (("vmap", "XLA scan", "--"), ("auto", "fused", "-")):
            many.plot(
                [r["K"] for r in rows], [r["steps/s"][b] for r in rows], style, marker="o", label=f"{label}, N={n}"
            )
    many.set(xscale="log", yscale="log", xlabel="steps K in one call", ylabel="environment steps/s", title="K (Fig. 8)")
    many.legend(fontsize=7)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def plot_factors(rows, path):
    """As Figure 9: N from left to right, K from top to bottom, S along each axis, a line for each C."""
    import matplotlib.pyplot as plt

    sizes, ks = sorted({r["N"] for r in rows}), sorted({r["K"] for r in rows} - {1})
    rate = {(r["N"], r["K"], r["S"], r["C"]): r["steps/s"] for r in rows}
    figure, axes = plt.subplots(
        len(ks), len(sizes), figsize=(8, 7), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for (i, k), (j, n) in itertools.product(enumerate(ks), enumerate(sizes)):
        for c in sorted({r["C"] for r in rows}):
            at = sorted({r["S"] for r in rows})
            axes[i, j].plot(at, [rate[n, k, s, c] / rate[n, 1, s, c] for s in at], marker="o", label=f"C={c}")
        axes[i, j].set(xscale="log", yscale="log", title=f"N={n}, K={k}")
        axes[i, j].set_xticks(at, at)
    figure.supxlabel("state factor S")
    figure.supylabel("K fused steps over one step a call")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=80)
    plt.close(figure)


PARTS = ("N", "transitions", "K", "factors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="none: the plots of what there is")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**i for i in range(4, 19, 2)])
    parser.add_argument("--envs", nargs="+", type=int, default=[64, 4096], help="N, of the part `factors`")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=int, default=2_000_000, help="environment steps in one run")
    parser.add_argument("--peers", type=pathlib.Path, default=HERE / "results" / "envs_peers.json")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "envs_study.json")
    parser.add_argument("--plots", type=pathlib.Path, default=HERE.parent / "docs")
    args = parser.parse_args()
    matplotlib.use("Agg")
    study = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    measure = {
        "N": lambda: merged(study.get("N", []), against_n(args.sizes, args.repeat, args.budget)),
        "transitions": transitions,
        "K": lambda: against_k(args.repeat),
        "factors": lambda: merged(study.get("factors", []), *[against_factors(args.repeat, n) for n in args.envs]),
    }
    for part in args.parts:
        study[part] = measure[part]()
        args.out.write_text(json.dumps(report(study), indent=1) + "\n")
    peers = json.loads(args.peers.read_text()) if args.peers.exists() else {"rows": []}
    if all(part in study for part in ("N", "transitions", "K")):
        plot_throughput(study, peers, args.plots / "envs-study.png")
    if "factors" in study:
        plot_factors(study["factors"], args.plots / "envs-factors.png")


def merged(before, *after):
    """Rows, without the earlier ones of the same N."""
    new = [row for rows in after for row in rows]
    kept = [row for row in before if row["N"] not in {r["N"] for r in new}]
    return sorted([*kept, *new], key=lambda r: r["N"])


if __name__ == "__main__":
    main()
