"""The operations of products and convolutions of the learners of all held-out and sealed sets: rlfx's, the plain program's, and
those of the form by hand that was fastest.

    python -m benchmarks.untuned.work [--set SET ...] [--only NAME ...] [--json FILE]

Counted in traced programs, so that no machine, and nothing else that it does, has a part in them: iterations of loops as many
times as they run, of branches the one with the most, the bodies of ``while`` loops, which do not say how often they run, once.
What is computed twice, or for timesteps that have no use of it, shows here; what is slow for another cause does not.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.untuned.__main__ import SETS, UNTUNED, cases_of
from benchmarks.untuned.again import recorded

LEVEL = 1.06
_TO_FORMS = {"of_best": "best", "of_plain": "plain"}


def parsed(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned.work", description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="+", choices=SETS, default=UNTUNED)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of workloads")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def operations(jaxpr: Any) -> int:
    """Multiplications and additions of a jaxpr's products and convolutions."""
    from rlfx import _jaxpr as J

    total = 0
    for e in jaxpr.eqns:
        name = e.primitive.name
        inner = [operations(body) for body, _ in J.sub_jaxprs(dict(e.params))]
        if name == "dot_general":
            total += _of_product(e)
        elif name == "conv_general_dilated":
            total += _of_convolution(e)
        elif name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (e.params["length"] if name == "scan" else 1)
    return total


def _of_product(e: Any) -> int:
    (contracted, _), _ = e.params["dimension_numbers"]
    return 2 * e.outvars[0].aval.size * math.prod(e.invars[0].aval.shape[axis] for axis in contracted)


def _of_convolution(e: Any) -> int:
    kernel, out_features = e.invars[1].aval, e.params["dimension_numbers"].rhs_spec[0]
    return 2 * e.outvars[0].aval.size * kernel.size // kernel.shape[out_features]


def counted(workload: Any, best: str) -> dict[str, int]:
    """Of rlfx, the plain program and the form ``best``, without what nothing needs."""
    import jax

    from rlfx import _jaxpr as J

    def of(form: str) -> int:
        traced = jax.jit(workload.forms[form]).trace(*workload.arguments_of(form))
        return operations(J.without_dead_code(traced.jaxpr).jaxpr)

    return {name: of(form) for name, form in {"rlfx": "rlfx", "plain": "plain", "best": best}.items()}


def row_of(found: Mapping[str, int], best: str) -> dict[str, Any]:
    """A learner's counts, and rlfx's to the others; a form without any products is as one with one operation."""
    ratios = {key: max(found["rlfx"], 1) / max(found[to], 1) for key, to in _TO_FORMS.items()}
    return {"best": best, "operations": dict(found), **ratios}


def main(argv=None):
    args = parsed(argv)
    import jax

    from benchmarks.recorded import about, write

    rows, known = {}, recorded()
    for name, workload, make, sizes in cases_of(args.set, args.only):
        if workload not in known:
            print(f"not recorded: {name}: {workload}")
            continue
        best = known[workload]["best"]
        rows[workload] = row = {"set": name, **row_of(counted(make(**sizes), best), best)}
        of_others = f"{row['of_best']:5.2f} of the best's  {row['of_plain']:5.2f} of plain's"
        print(f"{of_others}  {row['operations']['rlfx'] / 1e6:7.1f} million  {workload}  [{best}]", flush=True)
        jax.clear_caches()  # of hundreds of programs
    if not rows:
        raise SystemExit("No learner of that name is recorded: --only takes parts of the names of workloads.")
    means = {key: statistics.geometric_mean(row[key] for row in rows.values()) for key in _TO_FORMS}
    above = sum(row["of_best"] > LEVEL for row in rows.values())
    print(len(rows), {k: round(v, 3) for k, v in means.items()}, f"above {LEVEL} of the best's: {above}")
    if args.json:
        write(args.json, about("work") | {"means": means, "workloads": rows})


if __name__ == "__main__":
    main()
