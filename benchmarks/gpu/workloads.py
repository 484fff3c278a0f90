"""Workloads of ``benchmarks/untuned`` on the device, at sizes that fill one: every form's milliseconds, of wall time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from benchmarks.gpu.measures import median_ms
from benchmarks.untuned.measure import Workload, difference
from rlfx import _target


@dataclass(frozen=True)
class Case:
    """A workload of ``benchmarks.untuned``, and what is other here.

    Attributes:
      chosen: its set.
      name: its name there.
      others: sizes that fill a GPU.
      by_hand: the forms by hand beside ``plain``; None: all. Those in blocks of timesteps, which gain by a CPU's caches, and
        those that change a detail of a CPU are left out: each takes seconds to compile.
    """

    chosen: str
    name: str
    others: dict[str, int]
    by_hand: tuple[str, ...] | None = None


CASES: dict[str, Case] = {
    "V-trace T=80 B=1024": Case("tuning", "V-trace T=80 B=64", {"batch": 1024}),
    "GRU(128) T=128 B=512": Case("tuning", "GRU(128) T=128 B=64", {"batch": 512}),
    "decoding T=256 B=64": Case("tuning", "decoding T=256 B=8", {"batch": 64}),
    "attention gradient T=256 B=64": Case("tuning", "attention gradient T=256 B=8", {"batch": 64}),
    "image A2C 3x64x64 T=64 B=64": Case("tuning", "image A2C 3x64x64 T=64 B=16", {"batch": 64}),
    "n-step T=32 B=1024": Case("tuning", "n-step T=32 B=1024", {}),
    "16 seeds of PPO 4x4": Case("tuning", "16 seeds of PPO 4x4", {}),
    "world model T=48 B=256, 15 imagined": Case("held_out", "world model T=48 B=16, 15 imagined", {"batch": 256}),
    "51 quantiles T=128 B=256": Case("held_out", "51 quantiles T=128 B=16", {"batch": 256}),
    "population of 16 A2C": Case("held_out", "population of 16 A2C", {}),
}

#: Sets that nothing was tuned on for a GPU.
UNSEEN: dict[str, Case] = {
    "R2D2 T=120 B=512": Case("held_out", "R2D2 T=120 B=32", {"batch": 512}, ("cut", "cut, hoisted", "cut, joined")),
    "IMPALA residual CNN T=20 B=64": Case("held_out", "IMPALA residual CNN T=20 B=8", {"batch": 64}, ("NCHW",)),
    "local attention T=512 B=64": Case(
        "held_out", "local attention T=512 B=8", {"batch": 64}, ("dot_product_attention", "banded", "banded, by sequence")
    ),
    "multi-discrete PPO T=128 B=1024": Case(
        "held_out", "multi-discrete PPO T=128 B=32", {"batch": 1024}, ("joined", "not flattened, masks kept")
    ),
    "lookahead of depth 3, T=64 B=256": Case(
        "held_out", "lookahead of depth 3, T=64 B=16", {"batch": 256}, ("not flattened", "search in rows")
    ),
    "SAC T=60 B=256": Case(
        "held_out", "SAC T=60", {"batch": 256}, ("one by one", "one by one, drawn ahead", "one by one, rows")
    ),
    "16 units, T=16 B=65536": Case(
        "held_out", "16 units, T=16 B=4096", {"batch": 65536}, ("not flattened", "features first")
    ),
    "TD-MPC T=64 B=256, 5 steps": Case(
        "looked_at", "TD-MPC T=64 B=16, 5 steps", {"batch": 256}, ("sliced", "joined", "joined, sliced, unrolled")
    ),
    "Retrace T=2000 B=64": Case(
        "looked_at", "Retrace T=2000 B=4", {"batch": 64}, ("not flattened", "unrolled by 8", "associative")
    ),
    "LRU T=256 B=256": Case(
        "looked_at", "LRU T=256 B=16", {"batch": 256}, ("loop of each layer", "in reals", "in reals, unrolled by 8", "one loop")
    ),
    "CPC T=128 B=256, 4 steps": Case("looked_at", "CPC T=128 B=16, 4 steps", {"batch": 256}, ("hoisted", "by step")),
    "fast weights T=128 B=256": Case(
        "unseen", "fast weights T=128 B=16", {"batch": 256}, ("memory alone in the loop", "joined", "joined, sums, unrolled by 4")
    ),
    "QMIX T=64 B=256, 3 agents": Case(
        "unseen", "QMIX T=64 B=16, 3 agents", {"batch": 256},
        ("hoisted", "hoisted, joined", "hoisted, joined, unrolled by 4", "both networks together"),
    ),
    "RND T=128 B=512": Case(
        "unseen", "RND T=128 B=32", {"batch": 512}, ("surprise after the loop", "codes kept", "not flattened")
    ),
    "diffusion policy T=64 B=256, 5 steps": Case(
        "unseen", "diffusion policy T=64 B=16, 5 steps", {"batch": 256},
        ("not flattened", "first product split", "split, unrolled", "critics together"),
    ),
    "REDQ T=32 B=512, 8 critics": Case(
        "sealed", "REDQ T=32 B=32, 8 critics", {"batch": 512}, ("not flattened", "policy once", "one by one, policy once")
    ),
    "VariBAD T=60 B=128": Case("sealed", "VariBAD T=60 B=8", {"batch": 128}, ("hoisted", "hoisted, split")),
    "option-critic, 16 units, T=16 B=16384": Case(
        "sealed", "option-critic, 16 units, T=16 B=2048", {"batch": 16384},
        ("not flattened", "heads joined", "one pass, heads joined", "features first"),
    ),
    "MAPPO T=64 B=512, 4 agents": Case(
        "sealed", "MAPPO T=64 B=32, 4 agents", {"batch": 512},
        ("not flattened", "values late", "critic once", "first layers as one", "rows"),
    ),
    "GAIL T=32 B=1024, with a penalty on slopes": Case(
        "sealed_again", "GAIL T=32 B=64, with a penalty on slopes", {"batch": 1024},
        ("not flattened", "judged once", "slope written out, judged once", "points as one"),
    ),
    "MPO T=32 B=512, 20 actions": Case(
        "sealed_again", "MPO T=32 B=32, 20 actions", {"batch": 512}, ("not flattened", "one matrix", "split", "split, by moments")
    ),
    "FeUdal T=40 B=512": Case(
        "sealed_again", "FeUdal T=40 B=32", {"batch": 512},
        ("windows stacked", "one pass", "inputs hoisted", "weights after, gates kept"),
    ),
    "graph IQL T=32 B=256, 8 nodes": Case(
        "sealed_again", "graph IQL T=32 B=16, 8 nodes", {"batch": 256}, ("in rows", "by incidence", "split", "value once")
    ),
    "DRC(2, 2) on 8x8 boards T=16 B=64": Case(
        "sealed_third", "DRC(2, 2) on 8x8 boards T=16 B=4", {"batch": 64},
        ("hoisted", "hoisted, kernels after", "hoisted, patches", "sent on, mixed"),
    ),
    "PPO among 10 entities T=32 B=256": Case(
        "sealed_third", "PPO among 10 entities T=32 B=16", {"batch": 256}, ("batched", "joined", "joined, one pass")
    ),
    "two of 8 experts T=32 B=1024": Case(
        "sealed_third", "two of 8 experts T=32 B=64", {"batch": 1024},
        ("not flattened", "one by one", "weighed between", "batched", "joined"),
    ),
    "Never Give Up T=128 B=256, 64 remembered": Case(
        "sealed_third", "Never Give Up T=128 B=32, 64 remembered", {"batch": 256},
        ("one window at a time", "among pairs", "among pairs, split", "among pairs, split, once"),
    ),
    "AlphaStar's heads T=32 B=512, 12 units": Case(
        "sealed_sixth", "AlphaStar's heads T=32 B=32, 12 units", {"batch": 512},
        ("all queries at once", "sums of products", "two axes", "features first"),
    ),
    "Mamba IMPALA T=64 B=512": Case(
        "sealed_sixth", "Mamba IMPALA T=64 B=32", {"batch": 512},
        ("layer by layer, unrolled by 4", "factors before", "associative", "adjoint, channels last"),
    ),
    "MAML, 32 tasks, T=16 B=64": Case(
        "sealed_sixth", "MAML, 16 tasks, T=16 B=16", {"tasks": 32, "batch": 64},
        ("rows", "joined", "linearized", "forwards over backwards"),
    ),
    "noisy duelling DQN T=32 B=1024": Case(
        "sealed_sixth", "noisy duelling DQN T=32 B=128", {"batch": 1024},
        ("targets late", "first layers joined", "rows", "kept, by rows"),
    ),
    "TDC(lambda) through its updates T=128 B=512": Case(
        "sealed_sixth", "TDC(lambda) through its updates T=128 B=64", {"batch": 512},
        ("hoisted, unrolled by 4", "fewer sums", "derivative by hand", "features first, unrolled by 2"),
    ),
    "MuZero T=32 B=1024, 5 unrolled": Case(
        "sealed_fifth", "MuZero T=32 B=64, 5 unrolled", {"batch": 1024},
        ("heads state by state", "heads joined", "split, heads joined", "features first"),
    ),
    "recurrent PPO T=64 B=512, 8 minibatches": Case(
        "sealed_fifth", "recurrent PPO T=64 B=32, 8 minibatches", {"batch": 512},
        ("hoisted, unrolled by 4", "weights after, unrolled by 4", "weights after, drawn ahead, threefry unrolled"),
    ),
    "CQL T=32 B=512, 30 actions": Case(
        "sealed_fifth", "CQL T=32 B=32, 30 actions", {"batch": 512},
        ("together", "split", "both critics at once", "features first"),
    ),
    "DrQ T=16 B=128, 32x32": Case(
        "sealed_fifth", "DrQ T=16 B=16, 32x32", {"batch": 128},
        ("both shifts together", "shifts by products", "cut", "by patches"),
    ),
    "ensemble of 5 models H=15 B=1024": Case(
        "sealed_fifth", "ensemble of 5 models H=15 B=64", {"batch": 1024},
        ("members by products", "weights after, split", "weights after, members by products, threefry unrolled"),
    ),
    "contrastive goals T=16 B=512": Case(
        "sealed_fourth", "contrastive goals T=16 B=128", {"batch": 512}, ("goals once", "rows", "products", "written out")
    ),
    "TRPO T=64 B=512, 10 conjugate gradients": Case(
        "sealed_fourth", "TRPO T=64 B=32, 10 conjugate gradients", {"batch": 512},
        ("rows", "linearized once", "Gauss-Newton, once", "layers written out"),
    ),
    "DPO T=128, 64 pairs": Case(
        "sealed_fourth", "DPO T=128, 4 pairs", {"batch": 64},
        ("together", "library's attention", "divided last", "heads written out"),
    ),
    "POMO, 128 instances of 20 cities": Case(
        "sealed_fourth", "POMO, 16 instances of 20 cities", {"instances": 128},
        ("decided anew", "batched", "batched, anew, encoded once", "tables", "tables by products"),
    ),
    "DreamerV3's world model T=32 B=256": Case(
        "sealed_fourth", "DreamerV3's world model T=32 B=16", {"batch": 256},
        ("in one loop", "hoisted", "hoisted, heads joined", "weights after, heads joined"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A workload whose forms are compiled: ``{form: program}``."""

    name: str
    found: Workload
    programs: dict[str, Any]

    def arguments(self, form: str) -> tuple:
        """What a form is called with."""
        return self.found.arguments_of(form.partition(", ")[0] if form.startswith("rlfx") else form)


@contextlib.contextmanager
def rewriting(changes: str) -> Iterator[None]:
    """Programs that are traced in it are for a device with other rewrites: ``"unroll=1"``, or several with ``,`` between."""
    fields = {name: int(value) for name, value in (change.split("=") for change in changes.split(","))}
    known = _target.target_of
    _target.target_of = lambda device: replace(known(device), rewrites=replace(known(device).rewrites, **fields))
    try:
        yield
    finally:
        _target.target_of = known


def built(tiny: bool, name: str, variants: Sequence[str] = ()) -> Built:
    """All forms of one, with float32 products as float32; ``variants``: rlfx with other rewrites, too.

    Products as the device multiplies by default would round what decides actions: forms would act differently.
    """
    case = (CASES | UNSEEN)[name]
    cases = importlib.import_module(f"benchmarks.untuned.{case.chosen}")
    make, sizes = cases.CASES[case.name]
    found = make(**(cases.TINY[make] if tiny else {**sizes, **case.others}))
    chosen = [*found.forms] if case.by_hand is None else ["rlfx", "plain", *case.by_hand]
    with jax.default_matmul_precision("highest"):
        lowered = {form: jax.jit(found.forms[form]).lower(*found.arguments_of(form)) for form in chosen}
        for changes in variants:
            with rewriting(changes):
                again = make(**(cases.TINY[make] if tiny else {**sizes, **case.others})).forms["rlfx"]
                lowered[f"rlfx, {changes}"] = jax.jit(again).lower(*found.arguments_of("rlfx"))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # a compiler takes seconds, and no lock of Python's
            programs = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
    return Built(name, found, programs)


def measured(of: Built, rounds: int) -> tuple[dict, list[str]]:
    """All forms compared, and then timed."""
    row: dict[str, Any] = {"workload": of.name, "ms": {}, "MB": {}, "difference": {}}
    results = {}
    for form, run in of.programs.items():
        results[form] = jax.device_get(of.found.compared(run(*of.found.arguments_of(form))))
        row["MB"][form] = run.memory_analysis().temp_size_in_bytes / 1e6
        row["ms"][form] = median_ms(run, of.arguments(form), rounds)
    row["difference"] = {form: difference(result, results["plain"]) for form, result in results.items()}
    by_hand = {form: ms for form, ms in row["ms"].items() if not form.startswith("rlfx")}
    best = min(by_hand, key=lambda form: by_hand[form])
    ratios = {
        "of plain": row["ms"]["rlfx"] / by_hand["plain"],
        "of best": row["ms"]["rlfx"] / by_hand[best],
        "best": best,
    }
    rounding = max(d for form, d in row["difference"].items() if not form.startswith("rlfx"))  # hundreds of steps make it larger
    off = max(d for form, d in row["difference"].items() if form.startswith("rlfx"))
    return {**ratios, **row}, [f"{of.name}: {off:.1e}, by hand {rounding:.1e}"] if off > max(1e-3, 3 * rounding) else []


def workload(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """One of them, compiled and measured."""
    return measured(built(tiny, name), 3 if tiny else 15)
