"""``python -m tests.recurrence.nest_sweep SEEDS``: generated nests of these seeds against plain loops.

A line of JSON for each, as it comes: how it went, how far it was off, in processor seconds. XLA compiles quickly.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback

from tests.lanes import QUICK, flags

if __name__ == "__main__":  # pytest imports it, too
    os.environ["XLA_FLAGS"] = flags(QUICK)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests.recurrence import nests


def numbers(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="+", help="7, or 7:20 for 7 to 19")
    args = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    gc.set_threshold(200_000, 20, 50)
    for seed in (seed for text in args.seeds for seed in numbers(text)):
        began = time.process_time()
        try:
            found = nests.compared(nests.random_nest(seed), reference=seed % 20 in nests.BY_REFERENCE)
        except Exception:
            found = {"outcome": "raised", "error": traceback.format_exc()}
        print(json.dumps({"seed": seed, **found, "cpu_s": round(time.process_time() - began, 2)}), flush=True)
        if seed % 100 == 99:
            jax.clear_caches()  # of programs that do not come again


if __name__ == "__main__":
    main()
