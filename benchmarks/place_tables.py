"""The paper's other tables, one command each.

    python benchmarks/place_tables.py memory|shared|v100|synchronous|ablation|messages|transfer|equal_time|speed|repeat|emulated
        [--graphs chainmm ...] [--budget 2048] [--seeds 0 1 2]

Every command simulates on the machine it names, except ``emulated``, which runs the threaded runtime with the cost
model slept. Results go to benchmarks/results/place_<command>.json. Real kernels: benchmarks/place_real.py.
"""

import argparse
import datetime
import itertools
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.errors import PlacementError
from rlfx.place import baselines, execute, hardware, methods, simulate, train, workloads
from rlfx.place.explode import explode
from rlfx.place.policy import DualPolicy
from rlfx.place.problem import build

RESULTS = Path(__file__).parent / "results"
GRAPHS = tuple(workloads.WORKLOADS)
EPISODES = {"chainmm": 4096, "ffnn": 4096, "llama-block": 8192, "llama-layer": 8192}  # the paper's
COMPARED = ("one-device", "critical-path", "heft", "enumerate", "local-search", "doppler")
V100_ONE_DEVICE = {"chainmm": 0.0835, "ffnn": 0.0514, "llama-block": 0.1544, "llama-layer": 0.1050}  # table 9


def problem_of(name, machine, seconds=None):
    """A paper graph on a machine, one device's time fitted to the paper."""
    work = workloads.WORKLOADS[name]()
    graph = work.graph()
    return build(graph, machine.fitted(graph, seconds or work.one_device_seconds))


def row(problem, names, budget, seed=0):
    """Milliseconds by method; None where nothing that fits was found."""
    out = {}
    for name in names:
        try:
            out[name] = round(methods.solve(problem, name, jax.random.key(seed), budget).cost * 1e3, 3)
        except PlacementError as refusal:
            if "fits into memory" not in str(refusal):
                raise
            out[name] = None
    return out


RESTRICTED = ("one-device", "critical-path", "heft", "enumerate", "local-search", "anneal", "polish", "doppler")


def memory(graphs, budget, seeds):
    """Table 8: every device limited to a fraction of what the best assignment without a limit takes on one."""
    for name, link in itertools.product(graphs, (10e9, 2.5e9)):
        free = problem_of(name, hardware.p100_pcie(bandwidth=link))
        best = methods.solve(free, "polish", jax.random.key(0), budget)
        device, order = (jnp.asarray(x)[None] for x in best.assignment)
        peak = float(simulate.peak_memory(free, device, simulate.judged(free, device, order)[1]).max())
        for share in (0.8, 0.6):
            found = row(free.restricted(share * peak), RESTRICTED, budget)
            yield {
                "graph": name, "link_GB_s": link / 1e9, "share": share, "limit_GB": share * peak / 1e9,
                "unlimited_ms": round(best.cost * 1e3, 3), "ms": found,
            }  # fmt: skip


SHARED = ("critical-path", "heft", "enumerate", "local-search", "polish")


def shared(graphs, budget, seeds):
    """One lane for all that a device sends, as on PCIe, against a lane for each target."""
    for name in graphs:
        for link in (10e9, 2.5e9):
            machine = hardware.p100_pcie(bandwidth=link)
            own, one = problem_of(name, machine), problem_of(name, machine.with_shared_links())
            found = methods.solve(own, "polish", jax.random.key(0), budget)
            yield {
                "graph": name, "link_GB_s": link / 1e9, "lower_bound_ms": own.lower_bound() * 1e3,
                "own_lanes_ms": found.cost * 1e3, "ms": row(one, SHARED, budget),
                "the_same_on_one_lane_ms": float(baselines.evaluate(one, [found.assignment])[0]) * 1e3,
            }  # fmt: skip


def v100(graphs, budget, seeds):
    """Table 9: eight devices in two NVLink meshes."""
    for name in graphs:
        problem = problem_of(name, hardware.v100_meshes(), V100_ONE_DEVICE[name])
        found = row(problem, COMPARED, budget)
        yield {"graph": name, "lower_bound_ms": problem.lower_bound() * 1e3, "ms": found}


def synchronous(graphs, budget, seeds):
    """Table 1: the same assignment with a barrier after every meta-op, and without."""
    for name in graphs:
        for link in (10e9, 2.5e9):
            problem = problem_of(name, hardware.p100_pcie(bandwidth=link))
            for method in ("enumerate", "doppler"):
                result = methods.solve(problem, method, jax.random.key(0), budget)
                barrier = baselines.synchronous_seconds(problem, result.assignment)
                yield {
                    "graph": name, "link_GB_s": link / 1e9, "method": method, "work_conserving_ms": result.cost * 1e3,
                    "synchronous_ms": barrier * 1e3, "ratio": barrier / result.cost,
                }  # fmt: skip


def trained(policy, problem, seed, episodes, config=None, params=None):
    """Stages I and II, as ``policy`` of place_simulated.py; from given parameters, stage II alone."""
    k_init, k_imitate, k_learn = jax.random.split(jax.random.key(seed), 3)
    learner = train.start(k_init, problem, policy, params)
    if params is None:
        learner = train.imitate_critical_path(policy, learner, problem, k_imitate, steps=200)
    return train.learn(policy, learner, problem, k_learn, episodes=episodes, config=config or train.Training())


def ablation(graphs, episodes, seeds):
    """Table 3: SEL or PLC replaced by the critical path's rule; policy only, no search."""
    policy = DualPolicy()
    variants = {
        "both": train.Training(), "SEL only": train.Training(place="earliest"),
        "PLC only": train.Training(select="critical-path"),
    }  # fmt: skip
    for name in graphs:
        problem = problem_of(name, hardware.p100_pcie(bandwidth=2.5e9))
        found, last = {label: [] for label in variants}, {label: [] for label in variants}
        for seed in seeds:
            for label, config in variants.items():
                learner, (mean, _) = trained(policy, problem, seed, episodes[name], config)
                found[label].append(round(float(learner.cost) * 1e3, 3))
                last[label].append(round(float(mean[-8:].mean()) * 1e3, 3))
        yield {
            "graph": name, "link_GB_s": 2.5, "episodes": episodes[name], "seeds": seeds, "ms": found,
            "mean_of_last_episodes_ms": last, "lower_bound_ms": problem.lower_bound() * 1e3,
            "heuristics_ms": row(problem, ("critical-path", "enumerate"), 50),
        }  # fmt: skip


def messages(graphs, episodes, seeds):
    """Table 6: one message passing an episode, or one a step; policy only, ChainMM."""
    problem, episodes = problem_of("chainmm", hardware.p100_pcie(bandwidth=2.5e9)), episodes["chainmm"]
    for seed in seeds:
        for label, policy in (("per episode", DualPolicy()), ("per step", DualPolicy(per_step=True))):
            key = jax.random.key(seed)
            learner = train.start(key, problem, policy)
            learner = train.imitate_critical_path(policy, learner, problem, jax.random.fold_in(key, 1), steps=100)
            begin, cpu = time.perf_counter(), time.process_time()
            learner, (_, best) = train.learn(policy, learner, problem, jax.random.fold_in(key, 2), episodes=episodes)
            first = int(np.argmin(best)) + 1  # the update that found the best one
            batch = train.Training().batch
            yield {
                "graph": "chainmm", "link_GB_s": 2.5, "messages": label, "seed": seed, "episodes": episodes,
                "ms": float(learner.cost) * 1e3, "found_after_episodes": first * batch,
                "message_passings": first * (batch * problem.tasks if policy.per_step else 1),
                "seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
            }  # fmt: skip


def fastest(work, repeats=3):
    """Seconds of the fastest of a few runs after a first one, which compiles."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def search_in(problem, seconds, seed, starts, spent=0.0):
    """What ``polish`` finds in some seconds once it is compiled, its calls, and the seconds that it really took.

    The number of steps is a constant of the compiled search. Its time is therefore measured for 64 and 1024 steps; the
    line through both gives the number that takes ``seconds``, less what the starts took. Those steps are compiled by a
    first run, and the next ones are timed.
    """
    costs = baselines.evaluate(problem, starts)

    def search(calls):
        return methods.polish(problem, jax.random.key(seed), starts, costs, calls)

    short, long = fastest(lambda: search(64)), fastest(lambda: search(1024))
    each = (long - short) / 960
    calls = max(1, int((seconds - spent - (short - 64 * each)) / each))
    took = fastest(lambda: search(calls))
    return {
        "ms": search(calls).cost * 1e3, "calls": calls, "seconds": took + spent,
        "1024_calls_ms": search(1024).cost * 1e3, "1024_calls_seconds": long + spent,
    }  # fmt: skip


TRANSFERRED = ("ffnn", "chainmm")  # from these


def transfer(graphs, episodes, seeds):
    """Table 4: trained on a small graph, placed on a Llama graph after 0, 2k and 4k episodes."""
    policy, machine = DualPolicy(), hardware.p100_pcie(bandwidth=2.5e9)
    targets = {name: problem_of(name, machine) for name in graphs if name.startswith("llama")}
    for seed in seeds:
        sources = {n: trained(policy, problem_of(n, machine), seed, 4096)[0].params for n in TRANSFERRED}
        for target, problem in targets.items():
            full, _ = trained(policy, problem, seed, 4096)
            for source, params in sources.items():
                drawn = train.sample(policy, params, problem, jax.random.fold_in(jax.random.key(seed), 7), 16)
                few = [trained(policy, problem, seed, n, params=params)[0].cost for n in (2048, 4096)]
                yield {
                    "source": source, "target": target, "seed": seed,
                    "zero_shot_ms": baselines.best(problem, drawn)[1] * 1e3, "2k_ms": float(few[0]) * 1e3,
                    "4k_ms": float(few[1]) * 1e3, "full_4k_ms": float(full.cost) * 1e3,
                    "heuristics_ms": row(problem, ("critical-path", "enumerate"), 50),
                }  # fmt: skip


def equal_time(graphs, episodes, seeds):
    """A policy of ChainMM on a Llama graph, 16 samples, against search in the same seconds; all compiled before."""
    policy, machine = DualPolicy(), hardware.p100_pcie(bandwidth=2.5e9)
    params = {s: trained(policy, problem_of("chainmm", machine), s, 4096)[0].params for s in seeds}
    for target in (name for name in graphs if name.startswith("llama")):
        problem = problem_of(target, machine)
        for seed in seeds:

            def zero(seed=seed, problem=problem):
                key = jax.random.fold_in(jax.random.key(seed), 7)
                return baselines.best(problem, train.sample(policy, params[seed], problem, key, 16))[1]

            def path(seed=seed, problem=problem):
                return [baselines.list_schedule(problem, np.random.default_rng(seed))]

            seconds = fastest(zero)
            random = [baselines.random_assignment(problem, np.random.default_rng(seed))]
            yield {
                "source": "chainmm", "target": target, "seed": seed, "zero_shot_ms": zero() * 1e3,
                "zero_shot_seconds": seconds, "search_from_random": search_in(problem, seconds, seed, random),
                "search_from_one_list_schedule": search_in(problem, seconds, seed, path(), fastest(path)),
            }  # fmt: skip


def speed(graphs, episodes, seeds):
    """Training of one graph: stages I and II from nothing, compilation included, and episodes per second after it."""
    policy = DualPolicy()
    for name in graphs:
        problem = problem_of(name, hardware.p100_pcie(bandwidth=2.5e9))
        for count in (4096, 8192):
            jax.clear_caches()
            begin, cpu = time.perf_counter(), time.process_time()
            trained(policy, problem, seeds[0], count)
            full, full_cpu = time.perf_counter() - begin, time.process_time() - cpu
            learner = train.start(jax.random.key(1), problem, policy)
            begin, cpu = time.perf_counter(), time.process_time()
            train.learn(policy, learner, problem, jax.random.key(2), episodes=count)
            again, again_cpu = time.perf_counter() - begin, time.process_time() - cpu
            yield {
                "graph": name, "episodes": count, "training_seconds": full, "training_cpu_seconds": full_cpu,
                "episodes_per_s": count / again, "episodes_per_cpu_s": count / again_cpu,
            }  # fmt: skip


def repeat(graphs, budget, seeds, layers=4):
    """Appendix K: one block's placement repeated over a deep model, against placing the whole."""
    work = workloads.llama_block(512, 512, 8)

    def deep(x, weights):
        for i in range(layers):
            with jax.named_scope(f"layer{i}"):
                x = work.fn(x, weights[i])
        return x

    def shallow(x, weights):
        with jax.named_scope("layer0"):
            return work.fn(x, weights[0])

    splits = {k: v for k, v in work.splits.items() if not k.startswith("weights")}
    kwargs = {"splits": splits, "fuse": ()}
    one = explode(shallow, work.avals[0], (work.avals[1],), name="block", **kwargs)
    many = explode(deep, work.avals[0], (work.avals[1],) * layers, name="deep", **kwargs)
    machine = hardware.p100_pcie(bandwidth=2.5e9).fitted(one, 0.05)
    block, whole = build(one, machine), build(many, machine)
    result = methods.solve(block, "doppler", jax.random.key(0), budget)
    place = {n: (d, o) for n, d, o in zip(block.names, *result.assignment, strict=True)}
    layer = [int(n[5 : n.index("/")]) for n in whole.names]
    pairs = [place.get(f"layer0{n[n.index('/') :]}", (0, 0)) for n in whole.names]
    unknown = sum(f"layer0{n[n.index('/') :]}" not in place for n in whole.names)
    order = np.argsort(np.lexsort(([o for _, o in pairs], layer))).astype(np.int32)
    repeated = baselines.Assignment(np.array([d for d, _ in pairs], np.int32), order)
    found = row(whole, ("critical-path", "heft", "enumerate"), 50)
    yield {
        "layers": layers, "tasks": whole.tasks, "tasks_without_a_counterpart": unknown, "block_ms": result.cost * 1e3,
        "repeated_ms": float(baselines.evaluate(whole, [repeated])[0]) * 1e3,
        "lower_bound_ms": whole.lower_bound() * 1e3, "ms": found,
    }  # fmt: skip


def emulated(graphs, budget, seeds, count=20):
    """The threaded runtime with slept durations against the simulator: does the runtime do what the simulator says?"""
    for name in graphs:
        problem = problem_of(name, hardware.p100_pcie())
        rng = np.random.default_rng(0)
        pool = [baselines.enumerative(problem), baselines.heft(problem), baselines.list_schedule(problem, rng)]
        pool += [baselines.random_assignment(problem, rng) for _ in range(count - len(pool))]
        simulated = baselines.evaluate(problem, pool)
        real = np.array([execute.emulate(problem, a, slowdown=4.0).makespan for a in pool])
        ratio = real / simulated
        yield {
            "graph": name, "assignments": count, "pearson": float(np.corrcoef(simulated, real)[0, 1]),
            "real_over_simulated": [float(ratio.min()), float(np.median(ratio)), float(ratio.max())],
        }  # fmt: skip


COMMANDS = (memory, shared, v100, synchronous, ablation, messages, transfer, equal_time, speed, repeat, emulated)
NAMED_BY = (
    "graph", "link_GB_s", "share", "episodes", "method", "messages", "source", "target", "seed", "layers"
)  # fmt: skip


def merged(old, new):
    """Rows of earlier runs, those of the same graph, seed and so on replaced."""
    named = {tuple(r.get(k) for k in NAMED_BY) for r in new}
    return [r for r in old if tuple(r.get(k) for k in NAMED_BY) not in named] + new


def main():
    """Run commands and write JSON; rows of other graphs and seeds stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=[c.__name__ for c in COMMANDS], nargs="+")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--budget", type=int, help="simulator calls, or episodes; by default 2048, or the paper's")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    for name in args.command:
        out = RESULTS / f"place_{name}.json"
        old = json.loads(out.read_text())["rows"] if out.exists() else []
        if name in ("ablation", "messages"):
            budget = dict.fromkeys(GRAPHS, args.budget) if args.budget else EPISODES
        else:
            budget = args.budget or 2048
        rows = []
        for r in {c.__name__: c for c in COMMANDS}[name](args.graphs, budget, args.seeds):
            print(json.dumps(r), flush=True)
            rows.append({**r, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})
            if isinstance(budget, int) and name not in ("transfer", "equal_time", "speed", "emulated"):
                rows[-1]["budget"] = budget
            record = {
                "jax": jax.__version__, "device": f"{jnp.zeros(()).device} of {os.cpu_count()} cores",
                "rows": merged(old, rows),
            }  # fmt: skip
            out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
