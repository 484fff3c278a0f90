"""How often the plan that is chosen without measuring is within 10% of the fastest of its family, which is found by timing all.

    python -m benchmarks.plan_choice [--set fresh|held-out|unseen|tuning] [--only NAME ...] [--rounds 7] [--again 15]

The family of a program: every form that is legal for its learner, blocks of timesteps of T by quarters down to 1, and of half and
twice the chosen size, a quarter of the environments at a time, or half and twice as many as were chosen, each with and without
the actor's wide products kept, and the chosen plan. All are compiled, their losses and gradients compared, and timed in
interleaved rounds of one process on one core (CPU seconds). The chosen plan and the three that seemed fastest are then timed
again, in rounds of their own: the least of many noisy medians is too small. What was lost is the median of paired rounds, chosen
to fastest. ``fresh`` are the programs of benchmarks/plan_programs.py, on which nothing was fitted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import time
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np

import rlfx
from benchmarks import plan_programs, recorded
from benchmarks.untuned import held_out, tuning, unseen
from benchmarks.untuned.measure import MOST_CALLS, SECONDS_A_MEASUREMENT, difference, once
from rlfx import Plan
from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.plan.choose import why_not, why_not_environments
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.rewrite.caching import is_wide
from rlfx.recurrence.schedule.plan import FORMS, WHOLE

SETS = {"fresh": plan_programs, "held-out": held_out, "unseen": unseen, "tuning": tuning}

RESULTS = pathlib.Path(__file__).parent / "results" / "plan_choice.json"
#: What the chosen plan may lose.
WITHIN = 1.1
#: How many of the fastest are timed again.
FINALISTS = 3
#: A plan that takes this much more than the fastest in its first two rounds is timed no more.
HOPELESS = 1.5


def parsed(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_choice", description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=tuple(SETS), default="fresh")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of programs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--again", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing kept")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args(argv)


@contextlib.contextmanager
def planned_by(planner) -> Iterator[None]:
    """Whatever is compiled meanwhile is planned so."""
    compiled = rlfx.compile
    with mock.patch.object(rlfx, "compile", lambda *a, **k: dataclasses.replace(compiled(*a, **k), options=planner)):
        yield


def made(make, sizes):
    """A program's loss and gradient, and its arguments; of a workload with peers its form by rlfx."""
    found = make(**sizes)
    if isinstance(found, tuple):
        return found
    return found.forms["rlfx"], found.arguments_of("rlfx")


@dataclasses.dataclass(frozen=True)
class Noted(Options):
    """The planner that there is, which notes what it chose, and every plan that is legal."""

    notes: dict = dataclasses.field(default_factory=dict)

    def __call__(self, rule, learner, order, batch, axes=()):
        chosen = super().__call__(rule, learner, order, batch, axes)
        if learner.program.loss is not None:
            plans = [chosen, *family(chosen, learner, order, batch)]
            self.notes.update({"chosen": chosen, "family": tuple(dict.fromkeys(plans))})
        return chosen


def family(chosen, learner, order, batch):
    """The plans of a learner: forms, blocks of timesteps, some of the environments at a time, wide products kept or not.

    Blocks are T by quarters down to 1, and half and twice the block that was chosen; of environments a quarter, all timesteps at
    a time also half and twice as many as were chosen.
    """
    length = learner.program.domain.length
    wanted = {length >> i for i in range(2, length.bit_length(), 2)} | {1}
    if chosen.block:
        wanted |= {chosen.block // 2, 2 * chosen.block}
    blocks = sorted({n for size in wanted if 0 < size < length and (n := divisor_near(length, size)) < length})
    parts = batch % 4 == 0 and why_not_environments(learner, order) is None
    some = chosen.environments or batch // 4
    several = {n for n in (batch // 4, some // 2, 2 * some) if parts and 0 < n < batch and batch % n == 0}
    found = []
    for form in FORMS:
        if why_not(form, learner) is not None:
            continue
        found += [Plan(form)] if form in WHOLE else [Plan(form, block) for block in blocks]
        if form == "at once":
            found += [Plan(form, environments=n) for n in sorted(several)]
        if parts and form == "blocks" and blocks:
            found.append(Plan(form, blocks[-1], batch // 4))
    keeps = any(is_wide(e, learner.program) for e in learner.active)
    return found + [dataclasses.replace(plan, cached=True) for plan in found if keeps]


def short(plan):
    """``blocks of 4 x 16, kept``: timesteps, environments, and wide products."""
    sizes = " x ".join(str(n) for n in (plan.block, plan.environments) if n)
    return plan.form + (f" of {sizes}" if sizes else "") + (", kept" if plan.cached else "")


def build(make, sizes, planner):
    """The compiled program, and its arguments."""
    with planned_by(planner):
        fn, arguments = made(make, sizes)
        return jax.jit(fn).lower(*arguments).compile(), arguments


def timed(programs, rounds, arguments):
    """CPU seconds of a call, a list for each program; one that is far behind is left out after two rounds."""
    fastest = min(once(p, arguments)[0] for p in programs.values())
    calls = int(np.clip(SECONDS_A_MEASUREMENT / max(fastest, 1e-6), 1, MOST_CALLS))
    names, times = list(programs), {name: [] for name in programs}
    gc.collect()
    gc.disable()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(once(programs[name], arguments, calls)[0])
        if i == 1:
            least = min(min(t) for t in times.values())
            names = [name for name in names if min(times[name]) <= HOPELESS * least]
    gc.enable()
    return times


def measure(make, sizes, rounds, again):
    """A program under all its plans; None if it has none to choose from."""
    noted = Noted()
    program, arguments = build(make, sizes, noted)
    if not noted.notes:
        return None
    chosen = noted.notes["chosen"]
    expected = jax.device_get(program(*arguments))
    programs, differs = {chosen: program}, {}
    for plan in noted.notes["family"][1:]:
        programs[plan], _ = build(make, sizes, Options(plan=plan))
    for plan, one in programs.items():
        differs[plan] = difference(jax.device_get(one(*arguments)), expected)
        assert differs[plan] < 1e-3, f"{plan} differs from {chosen} by {differs[plan]:.1e}"
    if not rounds:
        return None
    times = timed(programs, rounds, arguments)
    whole = {plan: t for plan, t in times.items() if len(t) == rounds}
    ranked = sorted(whole, key=lambda plan: float(np.median(whole[plan])))
    finalists = list(dict.fromkeys([chosen, *ranked[:FINALISTS]]))
    finals = timed({plan: programs[plan] for plan in finalists}, again, arguments)
    finals = {plan: t for plan, t in finals.items() if len(t) == again or plan == chosen}
    best = min(finals, key=lambda plan: float(np.median(finals[plan])))
    n = len(finals[chosen])
    return {
        "chosen": short(chosen),
        "best": short(best),
        "lost": float(np.median(np.array(finals[chosen]) / np.array(finals[best][:n]))),
        "plans": [
            {
                **{k: v for k, v in dataclasses.asdict(plan).items() if v},
                "cpu_ms": 1e3 * float(np.median(t)),
                "rounds": len(t),
                "temp_bytes": programs[plan].memory_analysis().temp_size_in_bytes,
            }
            for plan, t in times.items()
        ],
        "again_ms": {short(plan): 1e3 * float(np.median(t)) for plan, t in finals.items()},
    }


def main(argv=None):
    args = parsed(argv)
    if hasattr(os, "sched_setaffinity"):  # before jax counts the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    found, tiny = SETS[args.set].CASES, SETS[args.set].TINY
    found = {n: case for n, case in found.items() if not args.only or any(part in n for part in args.only)}
    if args.quick:
        found = {f"{make.__name__}": (make, tiny[make]) for make, _ in found.values()}
    rows = json.loads(args.out.read_text())["sets"] if args.out.exists() else {}
    for name, (make, sizes) in found.items():
        began = time.process_time()
        row = measure(make, sizes, args.rounds, args.again)
        if row is None:
            continue
        print(f"{row['lost']:.2f} of {len(row['plans'])} plans  {name}: {row['chosen']} | {row['best']}", flush=True)
        for plan in sorted(row["plans"], key=lambda p: p["cpu_ms"])[:6]:
            print("      ", plan)
        print(f"    again {row['again_ms']}, {time.process_time() - began:.0f} s", flush=True)
        if not args.quick:
            context = {"load": round(os.getloadavg()[0], 1), "sizes": sizes}
            rows.setdefault(args.set, {})[name] = context | row
            recorded.write(args.out, recorded.about("plan_choice") | {"within": WITHIN, "sets": rows})
    mine = [row["lost"] for row in rows.get(args.set, {}).values()]
    print(f"{args.set}: within 10% of the best: {sum(lost <= WITHIN for lost in mine)} of {len(mine)}")


if __name__ == "__main__":
    main()
