"""rlfx against programs by hand, on workloads that it was not tuned for. Ratios first.

    python -m benchmarks.untuned [--set tuning|held-out|looked-at|unseen|sealed|sealed-again|sealed-third|sealed-fourth|
                                  sealed-fifth|sealed-sixth|sealed-seventh|sealed-eighth|sealed-ninth|
                                  sealed-tenth|sealed-eleventh|sealed-twelfth|sealed-thirteenth|
                                  sealed-fourteenth|sealed-fifteenth|sealed-sixteenth|
                                  sealed-seventeenth|sealed-eighteenth|sealed-nineteenth|
                                  sealed-twentieth|sealed-twenty-first|sealed-twenty-second|ordinary|
                                  ordinary-more]
                                 [--only NAME ...] [--rounds 15] [--seconds 20] [--quick] [--malloc default|keeps-pages]
                                 [--cores 1] [--out FILE.json]

Every workload is a program as a user of rlfx writes it, `plain` as one usually writes it by hand, and the better forms that
an expert writes by hand (not in the sets `ordinary` and `ordinary-more`, of many learners). All draw the same random
numbers, and values and gradients are compared before anything is timed. Rounds are interleaved in one process on one core;
CPU seconds, medians, ratios of paired rounds with 95% intervals (bootstrap over rounds); temporary bytes are XLA's own.
`best` is the fastest form by hand. The sealed sets are for judging what tuning did: do not look at them while tuning, as
happened to those that are called held-out, looked-at and unseen. Rows are kept in benchmarks/results/untuned_<set>.json,
those of other workloads as they
were. `--malloc keeps-pages` starts anew with an environment in which glibc gives no memory back to the system, so that
large temporaries are not mapped anew in each call.
`--quick` takes tiny sizes, and keeps no rows.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

#: glibc: no mappings of their own for large blocks, nothing given back, one heap.
KEEPS_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
SETS = (
    "tuning", "held-out", "looked-at", "unseen", "sealed", "sealed-again", "sealed-third", "sealed-fourth", "sealed-fifth",
    "sealed-sixth", "sealed-seventh", "sealed-eighth", "sealed-ninth", "sealed-tenth", "sealed-eleventh", "sealed-twelfth",
    "sealed-thirteenth", "sealed-fourteenth", "sealed-fifteenth", "sealed-sixteenth", "sealed-seventeenth",
    "sealed-eighteenth", "sealed-nineteenth", "sealed-twentieth", "sealed-twenty-first", "sealed-twenty-second", "ordinary",
    "ordinary-more",
)  # fmt: skip
#: Those with better forms by hand, that nothing was tuned on when they were written.
UNTUNED = tuple(name for name in SETS if name not in ("tuning", "ordinary", "ordinary-more"))
RESULTS = Path(__file__).parents[1] / "results"


def parsed(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned", description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="tuning")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of workloads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a workload; five rounds are always run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing kept")
    parser.add_argument("--malloc", choices=("default", "keeps-pages"), default="default")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def module_of(name):
    """What has the workloads of a set."""
    return importlib.import_module(f".{name.replace('-', '_')}", __package__)


def cases_of(names, only=None):
    """``(set, workload, make, sizes)`` of those workloads of some sets whose names have one of the parts ``only``; None: all."""
    for name in names:
        for workload, case in module_of(name).CASES.items():
            if not only or any(part in workload for part in only):
                yield name, workload, *case


def keep_to(cores):
    """The last cores of the machine, before jax counts them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])


def about(args):
    import jax
    import jaxlib
    import numpy

    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": numpy.__version__}
    malloc = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))
    }
    return {
        "set": args.set, "device": str(jax.devices()[0]), "machine": machine(), "cores": args.cores,
        "malloc": {"name": args.malloc, "environment": malloc}, "versions": {**versions, "python": platform.python_version()},
    }  # fmt: skip


def machine():
    """The processor's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    named = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return named[0] if named else platform.machine()


def kept(path, header):
    """The rows measured before, if they are of the same machine and versions."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found["workloads"] if {k: found.get(k) for k in header} == header else {}


def main(argv=None):
    args = parsed(argv)
    if args.malloc == "keeps-pages" and not KEEPS_PAGES.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.untuned", *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, command, {**os.environ, **KEEPS_PAGES})
    keep_to(args.cores)

    from . import measure as m

    CASES, TINY = module_of(args.set).CASES, module_of(args.set).TINY
    cases = {workload: case for _, workload, *case in cases_of((args.set,), args.only)}
    if args.quick:
        cases = {f"{make.__module__.split('.')[-1]}.{make.__name__}": (make, TINY[make]) for make, _ in cases.values()}
    malloc = "" if args.malloc == "default" else "_pages_kept"
    header, path = about(args), args.out or RESULTS / f"untuned_{args.set.replace('-', '_')}{malloc}.json"
    rows = {} if args.quick else kept(path, header)
    print(m.HEADER, flush=True)
    measured, failed = {}, []
    for name, (make, sizes) in cases.items():
        began = time.perf_counter()
        try:
            found = m.measure(make(**sizes), args.rounds, args.seconds)
        except AssertionError as error:  # results differ: nothing was timed
            failed.append(f"{name}: {error}")
            continue
        context = {"date": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1), "sizes": sizes}
        rows[name] = measured[name] = {**context, **found}
        print(m.line(name, found), m.details(found), sep="\n", flush=True)
        print(f"    {len(found['cpu_s']['rlfx'])} rounds, {time.perf_counter() - began:.0f} s", flush=True)
        if not args.quick:
            ordered = {n: rows[n] for n in CASES if n in rows}
            path.write_text(json.dumps({**header, "means": m.summary(ordered), "workloads": ordered}, indent=1) + "\n")
    if measured:
        print(json.dumps(m.summary(measured), indent=1))
    if failed:
        raise SystemExit("Not measured, for their results differ:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
