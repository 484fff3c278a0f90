"""PEARL's composition on devices that differ: is the chosen assignment the fastest, and is an iteration as long as predicted?

    python benchmarks/place_pearl_grid.py grid [--batches 256 512]    # a core, and 40% of another: all assignments of all sizes
    python benchmarks/place_pearl_grid.py portability                 # one system on four machines
    python benchmarks/place_pearl_grid.py plot                        # docs/place-grid.png, from the results

Devices are ``core_devices(2)``. All threads of a device are pinned to its core. On a device slower than its core a process of a
higher priority (Linux, as root) takes the rest of every half millisecond. Linux' own quotas are accounted at its ticks of
4 ms: with 40% of every 4 ms a thread runs for 3.9 and stops for 8, and what takes less is not slowed at all. The system is
`examples/composed_dqn.py` with 4 updates for 256 transitions. Results: benchmarks/results/place_pearl_grid.json and
place_pearl_portability.json.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
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
from rlfx.place.compose import Composition, iteration_seconds, portability
from rlfx.place.pearl.forecast import Costs, predicted
from rlfx.place.pearl.rehearsal import rehearsed, woken

EXAMPLES, RESULTS = Path(dqn.__file__).parent, Path(__file__).parent / "results"
PERIOD = 5e-4  # seconds
TAKES = """
import os, sys, time
core, share, period = int(sys.argv[1]), *map(float, sys.argv[2:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
begin = time.perf_counter()
while True:
    while time.perf_counter() < begin + (1 - share) * period: pass
    begin += period
    time.sleep(max(0.0, begin - time.perf_counter()))
"""
LINK = 1e10  # bytes per second: what another core made is read where it is
REPEATS, ROUNDS, LAST = 3, 3, 10  # iterations of a rehearsal; rounds; iterations of a run that count
UNEQUAL = (1.0, 0.4)
MACHINES = {
    "one core": (1.0,), "two cores": (1.0, 1.0), "a core and 40%": UNEQUAL, "40% and a core": UNEQUAL[::-1]
}  # fmt: skip


class Core:
    """A core, or a share of it: where threads may run. The rest of it is taken by a process of a higher priority."""

    def __init__(self, core, share):
        self.core, self.other = core, None
        if share < 1:
            self.other = subprocess.Popen([sys.executable, "-I", "-c", TAKES, str(core), str(share), str(PERIOD)])

    def take(self, thread):
        """A thread computes here from now on, as long as its share allows."""
        os.sched_setaffinity(thread, {self.core})

    def close(self):
        if self.other is not None:
            self.other.kill()
            self.other.wait()


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
    everywhere = os.sched_getaffinity(0)
    core.take(threading.get_native_id())
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


def costs_of(system, state, cores, devices):
    """Seconds of each primitive on each device, rehearsed on its core."""
    columns = []
    for d, (core, device) in enumerate(zip(cores, devices, strict=True)):
        others = [*devices[:d], *devices[d + 1 :]]
        with on(core):
            columns.append(rehearsed(system, state, jax.random.key(0), device, others, REPEATS))
    ends = [lambda core=core: core.take(threading.get_native_id()) for core in (cores[0], cores[-1])]
    return Costs(tuple(columns), 0.0, woken(*ends))


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
    """Every assignment: predicted, tried and measured, and which of them is chosen.

    Rehearsals and runs take turns, in rounds whose medians count. What `pearl.composed` does with trials is done here with pinned
    threads: of the half with the shortest predictions, the one that was the fastest in a run of its own before the rounds.
    """
    state, bandwidth = system.init(jax.random.key(0)), np.full((len(devices),) * 2, LINK)
    work, everything = pearl.workload(system, state), list(itertools.product(range(len(devices)), repeat=3))
    found = {name: {where: [] for where in everything} for name in ("predicted", "equation_6", "trial", "rounds")}
    for round_ in range(ROUNDS + 2):  # the first compiles, the second is the trial
        costs = costs_of(system, state, cores, devices)
        for where in everything:
            places = Composition(*where, where[1], 1.0, 0.0)
            seconds = float(np.median(run(system, state, cores, devices, places))) if round_ else 0.0
            if round_ == 1:
                found["trial"][where].append(seconds)
            elif round_:
                found["rounds"][where].append(seconds)
            if round_ > 0:
                found["predicted"][where].append(predicted(costs, system, *where))
                table = costs.table(devices, bandwidth)
                found["equation_6"][where].append(iteration_seconds(table, work, *where))
    middle = {name: {w: round(1e3 * float(np.median(v)), 3) for w, v in of.items()} for name, of in found.items()}
    first = {where: found["predicted"][where][0] for where in everything}  # what is known when one is chosen
    tried = sorted(everything, key=first.__getitem__)[: max(1, len(everything) // 2)]
    rows = [
        {
            "actors_on": w[0], "replay_on": w[1], "learner_on": w[2], "median_ms": middle["rounds"][w],
            "chosen": w == min(tried, key=middle["trial"].__getitem__), "first_predicted": w == tried[0],
            "predicted_ms": middle["predicted"][w], "equation_6_ms": middle["equation_6"][w],
            "trial_ms": middle["trial"][w], "rounds_ms": [round(1e3 * x, 3) for x in found["rounds"][w]],
        }
        for w in everything
    ]  # fmt: skip
    columns = [
        {
            part: {str(name): round(1e3 * x, 3) for name, x in getattr(column, part).items()}
            for part in ("together", "apart")
        }
        for column in costs.columns
    ]
    wakes = round(1e6 * costs.wakes, 1)
    return {"assignments": rows, "last_rehearsal_ms": columns, "wakes_us": wakes, "load": round(os.getloadavg()[0], 1)}


def sized(batch=256, actors=1, fanout=8):
    return dqn.make(actors, 32 // actors, 8, updates=4, batch=batch, warmup=1_024, fanout=fanout)


def said(row):
    chosen = next(a for a in row["assignments"] if a["chosen"])
    times = [a["median_ms"] for a in row["assignments"]]
    ratios = [round(a["median_ms"] / a["predicted_ms"], 2) for a in row["assignments"]]
    print({k: v for k, v in row.items() if k not in ("assignments", "last_rehearsal_ms")}, "chosen", chosen["median_ms"],
          "fastest", min(times), "slowest", max(times), "measured / predicted", ratios, flush=True)  # fmt: skip


def grid(batches, actors, fanouts, out):
    """Assignments x batch x actors x fan-out; rows of other sizes stay."""
    devices, sizes = core_devices(2), ("batch", "actors", "fanout")
    record = recorded.about("place_pearl_grid", shares=str(UNEQUAL)) | {"rows": []}
    record["rows"] = json.loads(out.read_text())["rows"] if out.exists() else []
    for point in itertools.product(batches, actors, fanouts):
        begin, row = time.perf_counter(), dict(zip(sizes, point, strict=True))
        with machine(UNEQUAL) as cores:
            row |= compared(sized(*point), cores, devices)
        row["took_s"] = round(time.perf_counter() - begin, 1)
        said(row)
        rows = [r for r in record["rows"] if tuple(r[k] for k in sizes) != point]
        record["rows"] = sorted([*rows, row], key=lambda r: tuple(r[k] for k in sizes))
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
            throughput = 4 * row["batch"] / a["median_ms"]
            right.scatter(x, throughput, s=30 if a["chosen"] else 10, color="C3" if a["chosen"] else "grey")
    labels = [f"{row['batch']}, {row['actors']}, {row['fanout']}" for row in rows]
    right.set_xticks(range(len(rows)), labels, rotation=90)
    right.set(xlabel="batch, actors, fan-out", ylabel="transitions trained on per ms", title="red: chosen")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grid", "portability", "plot"])
    for name, default in {"batches": [256, 512], "actors": [1, 4], "fanouts": [2, 8, 32]}.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    args = parser.parse_args()
    if args.what == "portability":
        portable(RESULTS / "place_pearl_portability.json")
    if args.what == "grid":
        grid(args.batches, args.actors, args.fanouts, RESULTS / "place_pearl_grid.json")
    if args.what == "plot":
        plot(Path(__file__).parents[1] / "docs" / "place-grid.png")


if __name__ == "__main__":
    main()
