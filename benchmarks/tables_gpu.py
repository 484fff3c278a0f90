"""The tables of docs/gpu.md: what ``make gpu`` measured on a device.

Steps in ``results/gpu`` ran one at a time; those in ``results/gpu/beside`` beside each other, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from benchmarks.gpu.workloads import CASES, UNSEEN
from benchmarks.tables_markdown import markdown, read, rows, table


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def numerics() -> str:
    columns = {"program": lambda r: r["program"], "float32 products": lambda r: difference(r["highest"])}
    return table(rows("gpu/beside/numerics"), {**columns, "tf32": lambda r: difference(r["default"])})


def kernels() -> str:
    def form(r, name):
        return f"{r['vmap ms'] / r[f'{name} ms']:.1f}x, {difference(r[name])}"

    columns = {"environment": lambda r: r["env"], "loop, ms": lambda r: ms(r["vmap ms"])}
    more = {"Triton": lambda r: form(r, "triton"), "Mosaic GPU": lambda r: form(r, "mosaic_gpu")}
    return table(rows("gpu/kernels"), {**columns, **more})


def acting() -> str:
    found = [{"name": f"CartPole, {r['environments']:,} environments", **r} for r in rows("gpu/acting")]
    found += [{"name": f"{r['network']}, {r['environments']:,} environments", **r} for r in rows("gpu/widths")]
    return table(found, {
        "policy": lambda r: r["name"], "loop, ms": lambda r: ms(r["loop ms"]), "one kernel, ms": lambda r: ms(r["one kernel ms"]),
        "what rlfx takes, ms": lambda r: ms(r["chosen ms"]), "difference": lambda r: difference(r["difference"]),
    })  # fmt: skip


def ppo() -> str:
    one_epoch = [{"name": f"one epoch, T 250, B {r['B']:,}", **r} for r in rows("gpu/updates")]
    four = [{"name": f"4 epochs of 4 minibatches, T 128, B {r['environments']:,}", **r} for r in rows("gpu/ppo")]

    def of_hand(r, name):
        return f"{ms(r[f'{name} ms'])} ({r[f'{name} ms'] / r['hand ms']:.2f})"

    return table(one_epoch + four, {
        "PPO": lambda r: r["name"], "by hand, ms": lambda r: ms(r["hand ms"]), "rlfx (of by hand)": lambda r: of_hand(r, "rlfx"),
        "acting as one kernel (of by hand)": lambda r: of_hand(r, "one kernel"),
        "MB by hand": lambda r: f"{r['hand MB']:,.0f}", "rlfx": lambda r: f"{r['rlfx MB']:,.0f}",
    })  # fmt: skip


def peer() -> str:
    def of_peer(r, name):
        there, here = r["PureJaxRL, steps/s"], r[f"{name}, steps/s"]
        return f"{here / 1e6:.1f} M ({here / there:.1f}x)"

    return table(rows("gpu/peer"), {
        "environments": lambda r: f"{r['environments']:,}", "PureJaxRL": lambda r: f"{r['PureJaxRL, steps/s'] / 1e6:.1f} M",
        "rlfx": lambda r: of_peer(r, "rlfx"), "acting as one kernel": lambda r: of_peer(r, "rlfx, one kernel"),
    })  # fmt: skip


def workloads_rows() -> list[dict]:
    return rows("gpu/workloads") + rows("gpu/workloads_too")


def unseen_rows(chosen: Collection[str]) -> list[dict]:
    """Of learners that no GPU was tuned for; some were measured again, after a rewrite had been taken out."""
    again = {r["workload"]: r for r in rows("gpu/unseen_again")}
    return [again.get(name, r) for r in rows("gpu/unseen") if (name := r["workload"]) in chosen]


def variants() -> str:
    """Milliseconds with one rewrite more, or less, of those with it as it was."""
    changes = {"one iteration at a time": "unroll=1", "8 at a time": "unroll=8", "gradients of weights after the loop":
               "deferred_rows=1073741824", "nested loops unrolled": "unrolled=512"}  # fmt: skip

    def of(change):
        return lambda r: f"{ms / r['ms']['rlfx']:.2f}" if (ms := r["ms"].get(f"rlfx, {change}")) else ""

    found = [r for r in rows("gpu/variants") if any(of(change)(r) for change in changes.values())]
    return table(found, {
        "workload": lambda r: r["workload"].split(" T=")[0], "4 at a time, ms": lambda r: ms(r["ms"]["rlfx"]),
        **{name: of(change) for name, change in changes.items()},
    })  # fmt: skip


def workloads() -> str:
    return of_forms(workloads_rows())


def of_forms(found: list[dict]) -> str:
    return table(found, {
        "workload": lambda r: r["workload"], "rlfx, ms": lambda r: ms(r["ms"]["rlfx"]),
        "of plain": lambda r: f"{r['of plain']:.2f}",
        "of the best by hand": lambda r: f"{r['of best']:.2f} ({r['best']} of {len(r['ms']) - 1})",
        "MB": lambda r: f"{r['MB']['rlfx']:,.0f}", "MB of the best": lambda r: f"{r['MB'][r['best']]:,.0f}",
    })  # fmt: skip


def mean_of(name: str, rows: list[dict]) -> str:
    found = [math.log(r[f"of {name}"]) for r in rows]
    return f"{math.exp(sum(found) / len(found)):.2f}"


def memory() -> str:
    def mb(value):
        return "" if value is None else f"{value / 1e6:,.0f}"

    def plan(r):
        offload = ", offloaded" if "offload=None" not in r["plan"] else ""
        block = r["plan"].partition("block=")[2].partition(",")[0]
        return ("at once" if block == "None" else f"blocks of {block}") + offload

    return table(rows("gpu/beside/memory"), {
        "budget, MB": lambda r: mb(r["budget"]) or "none", "plan": plan, "XLA's temporary MB": lambda r: mb(r["temp_bytes"]),
        "most in use, MB": lambda r: mb(r["peak_bytes"]),
    })  # fmt: skip


def recurrences() -> str:
    return table(rows("gpu/beside/recurrences"), {
        "T, B": lambda r: f"{r['T']:,}, {r['B']:,}", "loop, ms": lambda r: ms(r["loop ms"]),
        "associative scan, ms": lambda r: ms(r["associative scan ms"]), "difference": lambda r: difference(r["difference"]),
    })  # fmt: skip


def images() -> str:
    return table(rows("gpu/beside/images"), {
        "plan": lambda r: r["plan"], "device, MB": lambda r: f"{r['MB']:,.0f}", "host, MB": lambda r: f"{r['host MB']:,.0f}",
        "ms": lambda r: ms(r["ms"]), "difference": lambda r: difference(r["difference"]),
    })  # fmt: skip


def rollouts() -> str:
    found: dict[str, dict[int, dict]] = {}
    for r in rows("gpu/beside/rollouts"):
        found.setdefault(r["env"], {})[r["N"]] = r
    counts = sorted(next(iter(found.values())))
    most = lambda of: f"{max(r['fused, steps/s'] for r in of.values()) / 1e9:.1f} G"  # noqa: E731
    body = [[env, *[f"{of[n]['ratio']:.1f}" for n in counts], most(of)] for env, of in found.items()]
    return markdown(["environment", *[f"{n:,}" for n in counts], "steps a second, most"], body)


TABLES: Mapping = {
    "gpu-numerics": numerics, "gpu-kernels": kernels, "gpu-acting": acting, "gpu-ppo": ppo, "gpu-peer": peer,
    "gpu-workloads": workloads, "gpu-memory": memory, "gpu-recurrences": recurrences, "gpu-images": images,
    "gpu-rollouts": rollouts, "gpu-unseen": lambda: of_forms(unseen_rows(UNSEEN)),
    "gpu-known": lambda: of_forms(unseen_rows(CASES)), "gpu-variants": variants,
}  # fmt: skip

VALUES: Mapping = {
    "gpu-device": lambda: read("gpu/ppo")["device"]["kind"],
    "gpu-jax": lambda: read("gpu/ppo")["versions"]["jax"],
    "gpu-date": lambda: read("gpu/ppo")["date"],
    "gpu-of-best": lambda: mean_of("best", workloads_rows()),
    "gpu-of-plain": lambda: mean_of("plain", workloads_rows()),
    "gpu-unseen": lambda: str(len(unseen_rows(UNSEEN))),
    "gpu-unseen-best": lambda: mean_of("best", unseen_rows(UNSEEN)),
    "gpu-known-best": lambda: mean_of("best", unseen_rows(CASES)),
    "gpu-unseen-plain": lambda: mean_of("plain", unseen_rows(UNSEEN)),
    "gpu-unseen-different": lambda: difference(max(r["difference"]["rlfx"] for r in unseen_rows(UNSEEN))),
    "gpu-unseen-device": lambda: read("gpu/unseen")["device"]["kind"],
    "gpu-workloads": lambda: str(len(workloads_rows())),
    "gpu-highest": lambda: difference(max(r["highest"] for r in rows("gpu/beside/numerics"))),
    "gpu-tf32": lambda: difference(max(r["default"] for r in rows("gpu/beside/numerics"))),
}
