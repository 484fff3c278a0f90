"""The tables of docs/envs.md: steps a second."""

from __future__ import annotations

from benchmarks.tables_markdown import markdown, read, rows, table

HIDDEN = {"hidden": lambda r: " x ".join(map(str, r["hidden"])), "environments": lambda r: str(r["envs"])}


def millions(rate: float) -> str:
    """Two digits, or whole numbers."""
    rate /= 1e6
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}" if rate >= 0.95 else f"{rate:.2f}"


def beside(rate: float, other: float, digits: int = 2) -> str:
    return f"{rate / 1e6:.{digits}f} ({rate / other:.2f}x)"


def throughput() -> str:
    def fused(r, keys):
        return max(v for k, v in r["steps/s"].items() if k.startswith("fused") and k.endswith(keys))

    def cell(keys):
        return lambda r: f"{fused(r, keys) / 1e6:.0f} ({fused(r, keys) / r['steps/s']['gymnax scan(vmap)']:.1f}x)"

    return table(
        rows("envs_throughput"),
        {
            "environment": lambda r: r["env"].split("-")[0],
            "N": lambda r: str(r["N"]),
            "gymnax": lambda r: f"{r['steps/s']['gymnax scan(vmap)'] / 1e6:.1f}",
            "fused, threefry": cell("threefry"),
            "fused, fast generator": cell("fast"),
            "of vectorised C": lambda r: f"{r['of C']:.2f}" if "of C" in r else "",
        },
    )


def rollouts() -> str:
    return table(
        rows("envs_ppo_rollouts"),
        HIDDEN
        | {
            "plain": lambda r: f"{r['steps/s']['plain, fast'] / 1e6:.2f}",
            "fused": lambda r: beside(r["steps/s"]["fused, fast"], r["steps/s"]["plain, fast"]),
        },
    )


WAYS = {"ours, fast keys": "plain, fast", "ours, fast keys, fused": "fused, fast"}


def updates() -> str:
    found = []
    for r in sorted(rows("envs_ppo"), key=lambda r: (-len(r["hidden"]), -r["hidden"][0], r["envs"])):
        rates = r["steps/s"]
        if r["learner"] == "4 epochs of 4 minibatches":
            found.append(r | {"part": "rollout", "rates": rates["rollout"]})
        found.append(r | {"part": f"training, {r['learner']}", "rates": rates["training"]})
    peer = "gymnax, plain, threefry"
    shown = {title: lambda r, w=w: beside(r["rates"][w], r["rates"][peer], 3) for title, w in WAYS.items()}
    return table(
        found,
        HIDDEN | {"part": lambda r: r["part"], "gymnax, threefry": lambda r: f"{r['rates'][peer] / 1e6:.3f}"} | shown,
    )


PEERS = {"gymnasium": "gymnasium", "envpool": "envpool", "PyTorch eager": "torch", "C": "C, 1 core"}
OURS = {
    "gymnax, jit a step": "gymnax, jit a step", "gymnax, XLA scan": "gymnax, XLA scan",
    "ours, XLA scan, fast keys": "rlfx, XLA scan, fast keys", "fused, threefry": "rlfx, fused, threefry",
    "fused, fast keys": "rlfx, fused, fast keys",
}  # fmt: skip


def peers() -> str:
    theirs = {(r["peer"], r["N"]): r["steps/s"] for r in rows("envs_peers")}

    def peer(title):
        return lambda r: millions(theirs[PEERS[title], r["N"]]) if (PEERS[title], r["N"]) in theirs else ""

    ours = {title: lambda r, k=k: millions(r["steps/s"][k]) for title, k in OURS.items()}
    columns = {p: peer(p) for p in PEERS if p != "C"} | ours | {"C": peer("C")}
    return table(read("envs_study")["rows"]["N"], {"N": lambda r: str(r["N"])} | columns)


def factors() -> str:
    """One call of 1000 steps over 1000 calls of one."""
    rate = {(r["N"], r["K"], r["S"], r["C"]): r["steps/s"] for r in read("envs_study")["rows"]["factors"]}
    ns, _, states, computes = (sorted(set(k)) for k in zip(*rate, strict=True))

    def gain(n, s, c):
        ratio = rate[n, 1000, s, c] / rate[n, 1, s, c]
        return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"

    body = [[f"C = {c}", *[gain(n, s, c) for n in ns for s in states]] for c in computes]
    return markdown(["", *[f"N = {n}: S = {s}" for n in ns for s in states]], body)


TABLES = {
    "envs-throughput": throughput, "envs-rollouts": rollouts, "envs-updates": updates, "envs-peers": peers,
    "envs-factors": factors,
}  # fmt: skip
