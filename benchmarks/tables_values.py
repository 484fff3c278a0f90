"""Figures in running text, each from a file of results: ``<!-- value: NAME -->0.69x<!-- end -->``."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from benchmarks.memory_ranking_pairs import SMALL, ranked
from benchmarks.tables_markdown import markdown, read, times
from benchmarks.tables_nests import meta
from benchmarks.untuned.measure import ratios, summary


def grid(program: str) -> str:
    """The geometric mean over TimeRL's grid."""
    return times(statistics.geometric_mean(r["programs"][program]["wall_ratio"] for r in read("ppo_grid")["results"]))


def peer() -> str:
    found = read("ppo_learning_peer")["results"]["CartPole-v1"]
    low, high = found["interval"]
    return (
        f"areas {found['area'][0]:.1f} and {found['area'][1]:.1f}, difference {found['difference']:+.1%}, "
        f"95% interval [{low:+.1%}, {high:+.1%}]; at the end {found['final'][0]:.0f} and {found['final'][1]:.0f}"
    )


#: Of learners that were measured again on another machine.
OF_ANOTHER = {"best": "of_best", "there": "of_best_there", "plain": "of_plain", "memory": "memory_of_best"}


@functools.cache
def means_of(name: str) -> dict:
    return summary(read(f"untuned_{name}")["workloads"])


def untuned(name: str, of: str) -> str:
    """The geometric mean of times, with its 95% interval."""
    means = means_of(name)
    low, high = means[f"time_of_{of}_interval"]
    return f"{means[f'time_of_{of}']:.2f} [{low:.2f}, {high:.2f}]"


def memory(name: str) -> str:
    """Geometric means of temporary bytes: of plain, and of the best."""
    return " and ".join(f"{means_of(name)[f'memory_of_{of}']:.2f}" for of in ("plain", "best"))


def building() -> str:
    """How long all learners of the sets take to trace and to compile."""
    found = read("building")
    times = ", ".join(f"{stage} {ratio:.2f}x" for stage, ratio in found["means"].items())
    return f"{len(found['rows'])} learners, geometric means of plain's: {times}"


def work() -> str:
    """The operations of products of all learners of the sets."""
    found = read("untuned_work")
    more = sum(row["of_best"] > 1.06 for row in found["workloads"].values())
    means = " and ".join(f"{found['means'][f'of_{of}']:.2f} of {of}'s" for of in ("best", "plain"))
    return f"{len(found['workloads'])} learners, geometric means: {means}; above 1.06 of best's: {more}"


def another_machine(ratio: str) -> str:
    """A geometric mean over some learners on another machine."""
    found = read("another_machine")["means"]
    return f"{found[ratio]:.2f}"


def above_on_another(to: str) -> str:
    """How many of these learners take more than 1.05 of what the others take."""
    return str(sum(row[to] > 1.05 for row in read("another_machine")["workloads"].values()))


def built(name: str) -> str:
    """Tracing and compiling, of plain's."""
    return " and ".join(f"{means_of(name)[f'{what}_of_plain']:.2f}x" for what in ("trace", "compile"))


def slower(name: str) -> str:
    """The workloads that are slower than the best by more than 5%, or that there are none."""
    found = read(f"untuned_{name}")["workloads"]
    return "; ".join(n for n, r in found.items() if statistics.median(ratios(r, "best")) > 1.05) or "none"


def of_set(name: str) -> dict[str, Callable[[], str]]:
    """The figures of a set as it was at first, and its times after what it showed was mended."""
    key, after = name.replace("_", "-"), f"{name}_after"
    times_of = {f"{key}-{to}": functools.partial(untuned, name, to) for to in ("plain", "best")}
    times_after = {f"{key}-after-{to}": functools.partial(untuned, after, to) for to in ("plain", "best")}
    others = {f"{key}-{of.__name__}": functools.partial(of, name) for of in (memory, built, slower)}
    return times_of | times_after | others


def of_ordinary(name: str) -> dict[str, Callable[[], str]]:
    """What else is told of a set of ordinary learners, after what it showed was mended."""
    key, after = name.replace("_", "-"), f"{name}_after"
    built_and_slower = {f"{key}-{of.__name__}-after": functools.partial(of, after) for of in (built, slower)}
    return built_and_slower | {f"{key}-memory-after": lambda: f"{means_of(after)['memory_of_plain']:.2f}"}


def seeds() -> str:
    """The table of many seeds under `jax.vmap`."""
    body = [
        [str(r["seeds"]), *(f"{r['cpu_ms_per_seed'][k]:.1f}" for k in ("hand", "rlfx")), times(r["ratio"])]
        for r in read("nstep_seeds")["results"]
    ]
    return markdown(["seeds", "by hand, CPU ms a seed", "rlfx", "ratio"], body)


def ranking() -> str:
    """The table of how the static bound ranks plans."""
    results = read("memory_ranking")["results"]
    kinds = {
        "written: images, n-step and Monte-Carlo returns, GRU-like learners, attention": False,
        "generated": True,
    }
    body = []
    for kind, is_generated in kinds.items():
        mine = [r for r in results if r["name"].startswith("generated") == is_generated]
        alike, pairs = map(sum, zip(*map(ranked, mine), strict=True))
        ratios = [row["bound"] / row["exact"] for r in mine for row in r["plans"] if row["exact"] > SMALL]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        body.append([f"{kind} ({len(mine)})", f"{alike} of {pairs} pairs", spread])
    return markdown(["programs", "ranked as by XLA", "bound / exact, median (lowest to highest)"], body)


def steps_in_a_call(size: int, form: str) -> str:
    """What 1,000 steps in a call gain over one."""
    rates = {(r["N"], r["K"]): r["steps/s"][form] for r in read("envs_study")["rows"]["K"]}
    ratio = rates[size, 1000] / rates[size, 1]
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def least_to_most(values: list[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def attention(what: str, program: str, key: str) -> list[float]:
    """One program's figure in every row of attention that has it, and nothing of the devices' mesh."""
    found = [r["candidates"] for r in read("attention_blocks")["rows"] if r["what"] == what]
    return [c[program][key] for c in found if program in c]


def dot_product_attention(key: str) -> str:
    """`jax.nn.dot_product_attention` over the masked program."""
    of = [attention("gradient", program, key) for program in ("dpa", "[T, T]")]
    return least_to_most([a / b for a, b in zip(*of, strict=True)])


def least_gain(env: str, generator: str) -> str:
    """Fused steps over gymnax's scan, the least over numbers of environments from 64 on."""
    found = [r["steps/s"] for r in read("envs_throughput")["rows"] if r["env"].startswith(env) and r["N"] >= 64]
    gains = [max(v for k, v in r.items() if k.startswith("fused") and k.endswith(generator)) for r in found]
    ratios = [gain / r["gymnax scan(vmap)"] for gain, r in zip(gains, found, strict=True)]
    return f"{min(ratios):.1f}x"


def replayed() -> str:
    """What replaying costs at most, or gains at least."""
    found = [r["time_ratio"] for r in read("memory_images")["figures"] if r["plan"].startswith("replay")]
    return times(max(found))


def planning(budgeted: bool) -> str:
    found = [
        r["plan_and_compile_s"]
        for r in read("memory_images")["figures"]
        if r["budget"] != "plain" and (r["budget"] == "no budget") != budgeted
    ]
    return least_to_most(found)


def finished(kind: str) -> str:
    """The largest images with which a run ends under the limit of a process."""
    size = max(r["size"] for r in read("memory_images")["limit"] if r["kind"] == kind and r["finished"])
    return f"3x{size}x{size}"


def dispatched(how: str) -> str:
    (found,) = [r for r in read("envs_study")["rows"]["transitions"] if r["how"] == how]
    return f"{found['dispatched']:,}"


#: The sets that were measured once, before anything was mended.
AT_FIRST = (
    "unseen", "sealed", "sealed_again", "sealed_third", "sealed_fourth", "sealed_fifth", "sealed_sixth", "sealed_seventh",
    "sealed_eighth", "sealed_ninth", "sealed_tenth", "sealed_eleventh", "sealed_twelfth", "sealed_thirteenth",
    "sealed_fourteenth", "sealed_fifteenth", "sealed_sixteenth", "sealed_seventeenth",
    "sealed_eighteenth", "sealed_nineteenth", "sealed_twentieth", "sealed_twenty_first", "sealed_twenty_second",
    "ordinary", "ordinary_more",
)  # fmt: skip
TABLES = {"nstep-seeds": seeds, "memory-ranking": ranking}
VALUES = {
    "nests-meta": meta,
    "grid-chunked": lambda: grid("hand-chunked"),
    "grid-rlfx": lambda: grid("rlfx"),
    "grid-chunked-2": lambda: grid("hand-chunked on 2 devices"),
    "grid-rlfx-2": lambda: grid("rlfx on 2 devices"),
    "learning-peer": peer,
    "untuned-plain": lambda: untuned("tuning", "plain"),
    "untuned-best": lambda: untuned("tuning", "best"),
    "untuned-after-plain": lambda: untuned("tuning_after", "plain"),
    "untuned-after-best": lambda: untuned("tuning_after", "best"),
    "held-out-plain": lambda: untuned("held_out_after", "plain"),
    "held-out-best": lambda: untuned("held_out_after", "best"),
    "held-out-worst": lambda: f"{means_of('held_out_after')['worst_of_best']:.1f}",
    "held-out-slower": lambda: slower("held_out_after"),
    "held-out-memory": lambda: memory("held_out_after"),
    "looked-at-plain": lambda: untuned("looked_at", "plain"),
    "looked-at-best": lambda: untuned("looked_at", "best"),
    "looked-at-after-plain": lambda: untuned("looked_at_after", "plain"),
    "looked-at-after-best": lambda: untuned("looked_at_after", "best"),
    "looked-at-memory": lambda: memory("looked_at_after"),
    "unseen-pages": lambda: untuned("unseen_pages_kept", "best"),
    "unseen-after-memory": lambda: memory("unseen_after"),
    "unseen-after-built": lambda: built("unseen_after"),
    "unseen-after-pages": lambda: untuned("unseen_after_pages_kept", "best"),
    "unseen-after-pages-slower": lambda: slower("unseen_after_pages_kept"),
    "sealed-after-memory": lambda: memory("sealed_after"),
    "sealed-after-slower": lambda: slower("sealed_after"),
    "sealed-pages": lambda: untuned("sealed_pages_kept", "best"),
    "sealed-pages-slower": lambda: slower("sealed_pages_kept"),
    "sealed-again-after-memory": lambda: memory("sealed_again_after"),
    "sealed-again-pages": lambda: untuned("sealed_again_pages_kept", "best"),
    "sealed-again-pages-slower": lambda: slower("sealed_again_pages_kept"),
    "sealed-third-pages": lambda: untuned("sealed_third_pages_kept", "best"),
    "sealed-third-pages-slower": lambda: slower("sealed_third_pages_kept"),
    **{key: of for name in AT_FIRST for key, of in of_set(name).items()},
    **{key: of for name in ("ordinary", "ordinary_more") for key, of in of_ordinary(name).items()},
    "untuned-memory": lambda: memory("tuning"),
    "untuned-after-memory": lambda: memory("tuning_after"),
    "untuned-built": lambda: built("tuning"),
    "building": building,
    "work": work,
    "another-machine-learners": lambda: str(len(read("another_machine")["workloads"])),
    **{f"another-machine-{key}": functools.partial(another_machine, ratio) for key, ratio in OF_ANOTHER.items()},
    "another-machine-above": lambda: above_on_another("of_best"),
    "another-machine-above-plain": lambda: above_on_another("of_plain"),
    "untuned-after-built": lambda: built("tuning_after"),
    "untuned-after-slower": lambda: slower("tuning_after"),
    "attention-library-time": lambda: dot_product_attention("ms"),
    "attention-library-memory": lambda: dot_product_attention("temp_bytes"),
    "attention-compile": lambda: least_to_most(attention("gradient", "rlfx", "compile_s")),
    "attention-compile-decode": lambda: least_to_most(attention("decode", "rlfx", "compile_s")),
    "attention-compile-hand": lambda: least_to_most(attention("gradient", "[T, T]", "compile_s")),
    "envs-least-fast": lambda: least_gain("CartPole", "fast"),
    "envs-least-threefry": lambda: least_gain("CartPole", "threefry"),
    "images-replay": replayed,
    "images-planning": lambda: planning(True),
    "images-compiling": lambda: planning(False),
    "images-limit-plain": lambda: finished("plain"),
    "images-limit-rlfx": lambda: finished("rlfx"),
    "dispatched-jit": lambda: dispatched("jit a step"),
    "dispatched-scan": lambda: dispatched("XLA scan"),
    "dispatched-fused": lambda: dispatched("fused"),
    "calls-64-fused": lambda: steps_in_a_call(64, "auto"),
    "calls-4096-fused": lambda: steps_in_a_call(4096, "auto"),
    "calls-64-scan": lambda: steps_in_a_call(64, "vmap"),
    "calls-4096-scan": lambda: steps_in_a_call(4096, "vmap"),
}
