"""Updates of several models on two cores: placed, as one program on one core, and as one program on both.

    python benchmarks/place_stages.py [--updates NAME ...] [--rounds 5] [--calls 8]

Devices are ``core_devices(2)``: one thread each. Calls of the three take turns, each is waited for, and the state is donated.
Medians of rounds, and the least; on a machine with other work, medians of those in which others took less than a tenth of
one core, or of all where none was such (what they took is in the results). Large results come from memory that the system
maps anew in every call unless malloc keeps it (up to a fifth of the time, and different from run to run): it is told to keep
it, for all three. ``handover`` is a chain of stages of almost no work, each on the device that the one before is not on.
Results: benchmarks/results/place_stages.json.
"""

import argparse
import os
import sys
import time
from pathlib import Path

KEPT = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "268435456"}
if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in KEPT.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import place_updates  # noqa: E402
import recorded  # noqa: E402

from rlfx.place import Assignment, assign_stages, core_devices, hardware  # noqa: E402
from rlfx.place.resident import StageExecutor  # noqa: E402
from rlfx.place.stages import staged, staged_problem  # noqa: E402

QUIET = 0.1  # cores
OUT = Path(__file__).parent / "results" / "place_stages.json"


def busy():
    """Core seconds that all processes of the machine have computed for."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def copied(tree, device):
    return jax.tree.map(lambda x: jax.device_put(x, device).copy(), tree)


def undisturbed(rounds):
    """Rounds in which others hardly computed, or all of them."""
    return [t for t in rounds if t["others"] < QUIET] or rounds


def update(name, cores, rounds, calls):
    fn, state, args = place_updates.UPDATES[name]()
    constant = place_updates.CONSTANT.get(name, ())
    here = jax.devices()[0]
    placed = assign_stages(
        fn, copied(state, cores[0]), *jax.device_put(args, cores[0]), carry=1, donate_argnums=(0,), constant_argnums=constant,
        devices=cores,
    )  # fmt: skip
    print(placed.explain(), flush=True)
    one = jax.jit(fn, donate_argnums=0)
    programs = {"one core": (one, cores[0]), "placed": (placed, cores[0]), "one program on both": (one, here)}
    states = {who: copied(state, device) for who, (_, device) in programs.items()}
    given = {who: jax.device_put(args, device) for who, (_, device) in programs.items()}
    for who, (call, _) in programs.items():
        for _ in range(2):
            states[who], _ = jax.block_until_ready(call(states[who], *given[who]))
    taken = {who: [] for who in programs}
    for _ in range(rounds):
        for who, (call, _) in programs.items():
            begin, used, all_used = time.perf_counter(), time.process_time(), busy()
            for _ in range(calls):
                states[who], _ = jax.block_until_ready(call(states[who], *given[who]))
            seconds, used = time.perf_counter() - begin, time.process_time() - used
            others = max(busy() - all_used - used, 0.0) / seconds
            taken[who].append({"ms": 1e3 * seconds / calls, "cpu_ms": 1e3 * used / calls, "others": round(others, 2)})
    row = {
        "update": name, "stages": placed.problem.tasks, "predicted_ms": 1e3 * placed.seconds, "alone_ms": 1e3 * placed.alone,
        "ms": {who: float(np.median([t["ms"] for t in undisturbed(ts)])) for who, ts in taken.items()},
        "least_ms": {who: min(t["ms"] for t in ts) for who, ts in taken.items()},
        "undisturbed": {who: sum(t["others"] < QUIET for t in ts) for who, ts in taken.items()},
        "rounds": taken,
    }  # fmt: skip
    print({k: v for k, v in row.items() if k != "rounds"}, flush=True)
    return row


def handover(cores, stages=40, rounds=30):
    """Seconds that a stage of almost no work takes where its input is, and where another device made it."""

    def chain(x):
        for i in range(stages):
            with jax.named_scope(f"s{i}"):
                x = jnp.sin(x)
        return x

    x = jnp.ones((4,))
    graph = staged(chain, x, names=[f"s{i}" for i in range(stages)])
    problem = staged_problem(graph, hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e9))
    executor = StageExecutor(graph, problem, cores)
    order = np.arange(stages, dtype=np.int32)
    found = {}
    for who, device in (("same device", np.zeros(stages, np.int32)), ("other device", order % 2)):
        assignment, times = Assignment(device, order), []
        for _ in range(rounds):
            begin = time.perf_counter()
            jax.block_until_ready(executor([x], assignment))
            times.append((time.perf_counter() - begin) / stages)
        found[who] = {"median_us": 1e6 * float(np.median(times)), "least_us": 1e6 * min(times)}
    print(found, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", nargs="*", default=list(place_updates.UPDATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    cores = core_devices(2)
    record = recorded.about("place_stages", malloc="keeps what is freed") | {"handover": [handover(cores)], "rows": []}
    for name in args.updates:
        record["rows"].append(update(name, cores, args.rounds, args.calls))
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
