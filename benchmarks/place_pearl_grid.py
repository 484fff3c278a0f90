"""PEARL's composition on devices that differ: is the chosen assignment the fastest, and is an iteration as long as predicted?

    python benchmarks/place_pearl_grid.py grid [--batches 256 1024]   # a core, and 40% of another: all assignments of all sizes,
                                                                     # after one system on four machines
    python benchmarks/place_pearl_grid.py portability                # that alone
    python benchmarks/place_pearl_grid.py plot                       # docs/place-grid.png, from the results

Devices are ``core_devices(2)``. All threads of a device are pinned to its core, and a device slower than its core is in a control
group with a quota of processor time (Linux, as root). Its primitives are measured under the same quota. The system is
`examples/composed_dqn.py` with 16 updates for 256 transitions. Results: benchmarks/results/place_pearl_grid.json and
place_pearl_portability.json.
"""

import argparse
import ast
import itertools
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import recorded

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import composed_dqn as dqn

from rlfx.place import core_devices, pearl
from rlfx.place.compose import PRIMITIVES, Composition, Table, compose, iteration_seconds, portability

EXAMPLES, RESULTS = Path(dqn.__file__).parent, Path(__file__).parent / "results"
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 4000  # microseconds
LINK = 1e10  # bytes per second: what another core made is read where it is
LAST = 12  # iterations that count
UNEQUAL = (1.0, 0.4)
MACHINES = {
    "one core": (1.0,), "two cores": (1.0, 1.0), "a core and 40%": UNEQUAL, "40% and a core": UNEQUAL[::-1]
}  # fmt: skip


class Core:
    """A core, or a share of it: where threads may run."""

    def __init__(self, core, share):
        self.core, self.group = core, GROUPS / f"rlfx_core_{core}_{os.getpid()}" if share < 1 else GROUPS
        if share < 1:
            self.group.mkdir()
            (self.group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self.group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD)))
            (self.group / "cpu.shares").write_text("29154")  # a quota, not a lower priority

    def take(self, thread):
        """A thread computes here from now on, as long as its share allows."""
        os.sched_setaffinity(thread, {self.core})
        (self.group / "tasks").write_text(str(thread))

    def close(self):
        if self.group != GROUPS:
            for thread in (self.group / "tasks").read_text().split():
                (GROUPS / "tasks").write_text(thread)
            self.group.rmdir()


@contextmanager
def machine(shares):
    """A core for each share."""
    made = [Core(core, share) for core, share in zip(sorted(os.sched_getaffinity(0)), shares, strict=False)]
    try:
        yield made
    finally:
        for core in made:
            core.close()


@contextmanager
def on(core):
    """This thread on a core."""
    everywhere, me = os.sched_getaffinity(0), threading.get_native_id()
    core.take(me)
    try:
        yield
    finally:
        (GROUPS / "tasks").write_text(str(me))
        os.sched_setaffinity(me, everywhere)


def table_of(system, state, cores, devices):
    """Seconds of each primitive on each device, measured on its core and under its quota."""
    columns = []
    for core, device in zip(cores, devices, strict=True):
        pearl.measured(system, state, [device], np.full((1, 1), LINK), 1)  # compiles
        with on(core):
            columns.append(pearl.measured(system, state, [device], np.full((1, 1), LINK), 9).seconds)
    seconds = {name: np.concatenate([column[name] for column in columns]) for name in PRIMITIVES}
    return Table(tuple(map(str, devices)), seconds, np.full((len(devices),) * 2, LINK))


def run(system, state, cores, devices, places):
    """Seconds of the last iterations, each thread on the core of its part's device."""
    core_of = {"actor": cores[places.actors], "replay": cores[places.replay], "learner": cores[places.learner]}

    def pin(call):
        if call.iteration == 1:
            for thread in threading.enumerate():
                core = next((core for name, core in core_of.items() if thread.name.startswith(name)), None)
                if core is not None:
                    core.take(thread.native_id)

    n = system.warm + 3 + LAST
    _, report = pearl.run(
        system, state, jax.random.key(1), composition=places, devices=devices, iterations=n, after=pin
    )
    return report.seconds[-LAST:]


def compared(system, cores, devices):
    """Every assignment: predicted, measured, and which of them is chosen."""
    state = system.init(jax.random.key(0))
    table, work, rows = table_of(system, state, cores, devices), pearl.workload(system, state), []
    chosen = min((compose(table, work, actors) for actors in range(len(devices))), key=lambda c: c.iteration)
    for actors, replay, learner in itertools.product(range(len(devices)), repeat=3):
        seconds = iteration_seconds(table, work, actors, replay, learner)
        taken = run(system, state, cores, devices, Composition(actors, replay, learner, replay, seconds, 0.0))
        rows.append({
            "actors_on": actors, "replay_on": replay, "learner_on": learner,
            "chosen": (actors, replay, learner) == (chosen.actors, chosen.replay, chosen.learner),
            "predicted_ms": round(1e3 * seconds, 3), "median_ms": round(1e3 * float(np.median(taken)), 3),
            "mean_ms": round(1e3 * float(taken.mean()), 3),
        })  # fmt: skip
    primitives = {name: (1e3 * row).round(3).tolist() for name, row in table.seconds.items()}
    return {"assignments": rows, "primitives_ms": primitives, "load": round(os.getloadavg()[0], 1)}


def sized(batch=256, actors=1, fanout=8):
    return dqn.make(actors, 32 // actors, 8, updates=16, batch=batch, warmup=1_024, fanout=fanout)


def said(row):
    chosen = next(a for a in row["assignments"] if a["chosen"])
    times = [a["median_ms"] for a in row["assignments"]]
    ratios = [round(a["median_ms"] / a["predicted_ms"], 2) for a in row["assignments"]]
    print({k: v for k, v in row.items() if k not in ("assignments", "primitives_ms")}, "chosen", chosen["median_ms"],
          "fastest", min(times), "slowest", max(times), "measured / predicted", ratios, flush=True)  # fmt: skip


def grid(batches, out):
    """Assignments x batch x actors x fan-out."""
    devices, record = core_devices(2), recorded.about("place_pearl_grid", shares=str(UNEQUAL)) | {"rows": []}
    with machine(UNEQUAL) as cores:
        for batch, actors, fanout in itertools.product(batches, (1, 4), (2, 8, 32)):
            begin = time.perf_counter()
            row = {"batch": batch, "actors": actors, "fanout": fanout}
            row |= compared(sized(batch, actors, fanout), cores, devices)
            record["rows"].append(row | {"took_s": round(time.perf_counter() - begin, 1)})
            said(record["rows"][-1])
            recorded.write(out, record)


def portable(out):
    """The same system on machines of other devices: throughput of the composition, and of each fixed assignment."""
    record = recorded.about("place_pearl_portability") | {"rows": [], "lines": lines()}
    system = sized(batch=512, actors=2)
    for name, shares in MACHINES.items():
        with machine(shares) as cores:
            record["rows"].append({"machine": name} | compared(system, cores, core_devices(len(shares))))
            said(record["rows"][-1])
    best = [min(a["median_ms"] for a in row["assignments"]) for row in record["rows"]]
    fixed = {}
    for where in itertools.product(range(2), repeat=3):
        times = [_of(row, where) for row in record["rows"]]
        # A device that a machine does not have runs nothing.
        fixed["".join(map(str, where))] = portability([b / t if t else 0.0 for b, t in zip(best, times, strict=True)])
    chosen = [next(a["median_ms"] for a in row["assignments"] if a["chosen"]) for row in record["rows"]]
    record["portability"] = {
        "composed": portability([b / t for b, t in zip(best, chosen, strict=True)]), "fixed": fixed
    }  # fmt: skip
    print(record["portability"], flush=True)
    recorded.write(out, record)


def _of(row, where):
    names = ("actors_on", "replay_on", "learner_on")
    return next((a["median_ms"] for a in row["assignments"] if tuple(a[n] for n in names) == where), None)


def lines():
    """Lines of code without comments and docstrings: of composed examples, of sequential ones, and of the runtime below."""
    place = Path(__file__).parents[1] / "rlfx" / "place"
    files = {
        "DQN, composed": [EXAMPLES / "composed_dqn.py"], "SAC, composed": [EXAMPLES / "composed_sac.py"],
        "SAC, one after another": [EXAMPLES / "sac.py"], "DQN's family, one after another": [EXAMPLES / "dqn_family.py"],
        "the runtime": [*sorted((place / "pearl").glob("*.py")), place / "compose.py", place / "replay.py"],
    }  # fmt: skip
    return {name: sum(map(code_lines, paths)) for name, paths in files.items()}


def code_lines(path):
    """Lines that hold a token of code."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return len(ast.unparse(tree).splitlines()) - sum(not line for line in ast.unparse(tree).splitlines())


def plot(path):
    """Predicted against measured, and what the choice is worth, for every point of the grid."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads((RESULTS / "place_pearl_grid.json").read_text())["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    batches = sorted({row["batch"] for row in rows})
    for batch, colour in zip(batches, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False):
        points = [a for row in rows if row["batch"] == batch for a in row["assignments"]]
        left.scatter([a["predicted_ms"] for a in points], [a["median_ms"] for a in points], s=12, color=colour,
                     label=f"batch {batch}")  # fmt: skip
    ends = [min(left.get_xlim()[0], left.get_ylim()[0]), max(left.get_xlim()[1], left.get_ylim()[1])]
    ends[0] = max(ends[0], 1.0)
    left.plot(ends, ends, color="grey", lw=1)
    left.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="grey", alpha=0.2, lw=0)
    left.set(xlabel="predicted, ms an iteration", ylabel="measured, ms", xscale="log", yscale="log")
    left.legend()
    for x, row in enumerate(rows):
        for a in row["assignments"]:
            throughput = 16 * row["batch"] / a["median_ms"]
            right.scatter(x, throughput, s=30 if a["chosen"] else 10, color="C3" if a["chosen"] else "grey")
    labels = [f"{row['batch']}, {row['actors']}, {row['fanout']}" for row in rows]
    right.set_xticks(range(len(rows)), labels, rotation=90)
    right.set(xlabel="batch, actors, fan-out", ylabel="transitions trained on per ms", title="red: chosen")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grid", "portability", "plot"])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    if args.what in ("grid", "portability"):
        portable(RESULTS / "place_pearl_portability.json")
    if args.what == "grid":
        grid(args.batches, RESULTS / "place_pearl_grid.json")
    if args.what == "plot":
        plot(Path(__file__).parents[1] / "docs" / "place-grid.png")


if __name__ == "__main__":
    main()
