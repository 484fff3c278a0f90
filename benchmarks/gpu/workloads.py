"""Workloads of ``benchmarks/untuned`` on the device, at sizes that fill one: every form's milliseconds, of wall time."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.gpu.measures import median_ms
from benchmarks.untuned.measure import difference

#: Sets of ``benchmarks.untuned``, names there (parts of them), and sizes that are others here.
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "V-trace T=80 B=1024": ("tuning", "V-trace T=80 B=64", {"batch": 1024}),
    "GRU(128) T=128 B=512": ("tuning", "GRU(128) T=128 B=64", {"batch": 512}),
    "decoding T=256 B=64": ("tuning", "decoding T=256 B=8", {"batch": 64}),
    "attention gradient T=256 B=64": ("tuning", "attention gradient T=256 B=8", {"batch": 64}),
    "image A2C 3x64x64 T=64 B=64": ("tuning", "image A2C 3x64x64 T=64 B=16", {"batch": 64}),
    "n-step T=32 B=1024": ("tuning", "n-step T=32 B=1024", {}),
    "16 seeds of PPO 4x4": ("tuning", "16 seeds of PPO 4x4", {}),
    "world model T=48 B=256, 15 imagined": ("held_out", "world model T=48 B=16, 15 imagined", {"batch": 256}),
    "51 quantiles T=128 B=256": ("held_out", "51 quantiles T=128 B=16", {"batch": 256}),
    "population of 16 A2C": ("held_out", "population of 16 A2C", {}),
}


def workload(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """All forms of one, compared and then timed, with float32 products as float32.

    Products as the device multiplies by default would round what decides actions: forms would act differently.
    """
    import importlib

    chosen, known, others = CASES[name]
    cases = importlib.import_module(f"benchmarks.untuned.{chosen}")
    make, sizes = cases.CASES[known]
    found = make(**(cases.TINY[make] if tiny else {**sizes, **others}))
    row: dict[str, Any] = {"workload": name, "ms": {}, "MB": {}, "difference": {}}
    with jax.default_matmul_precision("highest"):
        programs = {form: jax.jit(fn).lower(*found.arguments_of(form)).compile() for form, fn in found.forms.items()}
        results = {}
        for form, run in programs.items():
            arguments = found.arguments_of(form)
            results[form] = jax.device_get(found.compared(run(*arguments)))
            row["MB"][form] = run.memory_analysis().temp_size_in_bytes / 1e6
            row["ms"][form] = median_ms(run, arguments, 3 if tiny else 15)
    row["difference"] = {form: difference(result, results["plain"]) for form, result in results.items()}
    by_hand = {form: ms for form, ms in row["ms"].items() if form != "rlfx"}
    best = min(by_hand, key=lambda form: by_hand[form])
    ratios = {
        "of plain": row["ms"]["rlfx"] / by_hand["plain"],
        "of best": row["ms"]["rlfx"] / by_hand[best],
        "best": best,
    }
    rounding = max(d for form, d in row["difference"].items() if form != "rlfx")  # hundreds of steps make it larger
    off = row["difference"]["rlfx"]
    return {**ratios, **row}, [f"{name}: {off:.1e}, by hand {rounding:.1e}"] if off > max(1e-3, 3 * rounding) else []
