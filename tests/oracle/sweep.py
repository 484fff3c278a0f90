"""``python -m tests.oracle.sweep FIRST LAST``: trees of these seeds against the NumPy side; wrong ones are shrunk.

``--on`` switches features on (see ``features.py``), ``--only`` writes much of some features or forms.
"""

from __future__ import annotations

import argparse
import gc
import traceback
from collections import Counter

import jax

from tests.oracle import driver, grow, printed, shrink
from tests.oracle.features import FEATURES, ON
from tests.oracle.tree import Tree


def wrong_alike(verdict: driver.Verdict) -> frozenset[str]:
    """In which ways a tree is wrong: how it ran, and the exception if there was one."""
    return frozenset(": ".join(w.split(": ")[:2])[:60] if "Error: " in w else w.split(":")[0] for w in verdict.wrong)


def one_way(seed: int) -> dict:
    """How a tree of a long sweep runs: at once, every fourth one under a plan instead."""
    return {"plans": int(seed % 4 == 1), "at_once": seed % 4 != 1}


def smallest(tree: Tree, verdict: driver.Verdict, ways: dict) -> Tree:
    kinds = wrong_alike(verdict)

    def fails(candidate: Tree) -> bool:
        try:
            return bool(kinds & wrong_alike(driver.check(candidate, **ways)))
        except Exception:
            return False  # no program: it reads what is not there

    return shrink.shrink(tree, fails)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--on", default="", help="features, separated by commas")
    parser.add_argument("--only", default="", help="features or forms to have much of")
    parser.add_argument(
        "--plans", type=int, help="under how many plans, too; by default every fourth tree under one instead"
    )
    parser.add_argument("--shrink", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    gc.set_threshold(200_000, 20, 50)
    on, only = (frozenset(filter(None, x.split(","))) for x in (args.on, args.only))
    assert on <= set(FEATURES), f"no such feature: {', '.join(on - set(FEATURES))}"
    counts = Counter()
    for seed in range(args.first, args.last):
        tree = grow.chosen(seed, ON | on, only)
        ways = {"plans": args.plans} if args.plans is not None else one_way(seed)
        try:
            verdict = driver.check(tree, reference=seed % 50 == 0, **ways)
        except Exception:  # of the NumPy side, or of a plan: no verdict, and the sweep goes on
            counts["no verdict"] += 1
            print(f"\n{seed}: {tree}\n{traceback.format_exc()}", flush=True)
            continue
        counts[verdict.outcome] += 1
        if verdict.wrong or verdict.refused:
            if verdict.wrong and args.shrink:
                tree = smallest(tree, verdict, ways)
                verdict = driver.check(tree, **ways)
            print(f"\n{seed}: {tree}\n{printed.source(tree)}", *verdict.wrong, *verdict.refused, sep="\n", flush=True)
        if seed % 10 == 9:
            print(seed, dict(counts), flush=True)
        if seed % 50 == 49:
            jax.clear_caches()  # of programs that do not come again
    print(f"seeds {args.first} to {args.last - 1}:", dict(counts))


if __name__ == "__main__":
    main()
