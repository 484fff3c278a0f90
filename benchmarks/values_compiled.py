"""Figures in the running text of docs/targets.md: what was compiled and counted, and not run."""

from __future__ import annotations

from benchmarks.tables_markdown import rows, times

MIDDLE = "PPO 4x4, 1,024 environments"


def on(form: str, machine: str = "h200") -> list[dict]:
    return [r for r in rows("launches") if (r["target"], r["form"]) == (machine, form)]


def compiled(program: str, form: str) -> dict:
    (found,) = [r for r in on(form) if r["program"] == program]
    return found


def acting_kernels(of: str) -> int:
    """Kernels of one acting step, or of all of them, of PPO's loop over timesteps."""
    loop = compiled(MIDDLE, "rlfx")["loops"][0]
    return loop["kernels"] * (loop["trips"] if of == "all" else 1)


def minibatches() -> int:
    """How many minibatch steps an update has."""
    outer = compiled(MIDDLE, "one kernel")["loops"][0]
    return outer["trips"] * outer["loops"][0]["trips"]


def minibatch_kernels(form: str, machine: str = "h200") -> str:
    """Kernels of a minibatch step: least to most over the numbers of environments."""
    loops = [r["loops"][-1] for r in on(form, machine) if r["program"].startswith("PPO 4x4")]
    kernels = sorted({loop["loops"][0]["kernels"] for loop in loops})
    return " to ".join(dict.fromkeys([str(kernels[0]), str(kernels[-1])]))


def epochs_launches() -> int:
    """Launches of the minibatch steps and of what goes around them."""
    outer = compiled(MIDDLE, "one kernel")["loops"][0]
    return outer["trips"] * (outer["kernels"] + outer["loops"][0]["trips"] * outer["loops"][0]["kernels"])


def recurrent(form: str) -> str:
    """Kernels a step, forward and backward."""
    return " and ".join(str(loop["kernels"]) for loop in compiled("recurrent PPO's learner (T 256, B 512)", form)["loops"])


def planned(program: str, plan: str) -> dict:
    (found,) = [r for r in rows("targets") if (r["program"], r.get("plan")) == (program, plan)]
    return found


def over_at_once(key: str) -> float:
    return planned("PPO, one epoch", "budget 1/8")[key] / planned("PPO, one epoch", "at once")[key]


def estimate(program: str, plan: str) -> str:
    """The static estimate over XLA's bytes."""
    found = planned(program, plan)
    return f"{found['estimated_bytes'] / found['temp_bytes']:.2f}"


def kernel(key: str) -> int:
    return compiled(MIDDLE, "one kernel")["acting"][0][key]


def offloaded() -> dict:
    """Images as float32, offloaded, on an H200."""
    (found,) = [r for r in rows("fits_images") if (r["program"], r["target"]) == ("float32, offload", "h200")]
    return found


def meanwhile(kind: str) -> str:
    """Kernels that are launched between start and end of a copy."""
    return str(min(x["behind"] for x in offloaded()["host_transfers"] if x["kind"] == kind))


def outside() -> int:
    """Launches of an update outside of its epochs."""
    return compiled(MIDDLE, "one kernel")["launches"] - epochs_launches()


def ahead_compiled() -> str:
    """How many examples, plans and kernels were compiled for each machine, how many wait, and how many fail."""
    found: dict[str, list[dict]] = {}
    for r in rows("examples_ahead"):
        found.setdefault(r["target"], []).append(r)

    def said(machine: str, of: list[dict]) -> str:
        wait, fail = (sum(key in r for r in of) for key in ("refused", "error"))
        more = (f", {wait} wait for a later jaxlib" if wait else "") + (f", {fail} fail" if fail else "")
        return f"{len(of) - wait - fail} of {len(of)} compile for {machine}{more}"

    return "; ".join(said(machine, of) for machine, of in found.items())


TABLES: dict = {}
VALUES = {
    "launches-acting": lambda: f"{acting_kernels('one')}",
    "launches-acting-all": lambda: f"{acting_kernels('all'):,}",
    "launches-of": lambda: f"{compiled(MIDDLE, 'rlfx')['launches']:,}",
    "launches-one-kernel": lambda: f"{compiled(MIDDLE, 'one kernel')['launches']:,}",
    "launches-outside": lambda: str(outside()),
    "images-device": lambda: f"{offloaded()['temp_bytes'] / 1e9:.1f} GB",
    "images-host": lambda: f"{offloaded()['host_bytes'] / 1e9:.0f}",
    "images-out": lambda: meanwhile("to host"),
    "images-back": lambda: meanwhile("to device"),
    "launches-epochs": lambda: f"{epochs_launches():,}",
    "launches-minibatches": lambda: str(minibatches()),
    "launches-minibatch": lambda: minibatch_kernels("rlfx"),
    "launches-minibatch-hand": lambda: minibatch_kernels("by hand"),
    "launches-minibatch-a100": lambda: minibatch_kernels("rlfx", "a100"),
    "launches-minibatch-t4": lambda: minibatch_kernels("rlfx", "t4"),
    "launches-registers": lambda: str(kernel("registers")),
    "launches-shared": lambda: f"{kernel('shared_bytes'):,}",
    "launches-spills": lambda: str(kernel("spill_bytes")),
    "launches-gru": lambda: recurrent("rlfx"),
    "launches-gru-hand": lambda: recurrent("by hand"),
    "ahead-programs": lambda: str(len({r["program"] for r in rows("examples_ahead")})),
    "ahead-compiled": ahead_compiled,
    "targets-budget-memory": lambda: times(over_at_once("temp_bytes")),
    "targets-budget-launches": lambda: f"{over_at_once('launches'):.1f}x",
    "targets-estimate-ppo": lambda: estimate("PPO, one epoch", "at once"),
    "targets-estimate-budget": lambda: estimate("PPO, one epoch", "budget 1/8"),
    "targets-estimate-gru": lambda: estimate("recurrent PPO's learner", "at once"),
    "targets-estimate-attention": lambda: estimate("attention", "at once"),
}
