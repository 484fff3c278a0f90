"""The paper's other tables, one command each.

    python benchmarks/place_tables.py memory|v100|synchronous|ablation|messages|transfer|repeat|emulated [--budget 2048]

Every command simulates on the machine it names, except ``emulated``, which runs the threaded runtime with the cost
model slept. Results go to benchmarks/results/place_<command>.json. Real kernels: benchmarks/place_real.py.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.errors import PlacementError
from rlfx.place import baselines, execute, hardware, methods, train, workloads
from rlfx.place.explode import explode
from rlfx.place.policy import DualPolicy
from rlfx.place.problem import build

RESULTS = Path(__file__).parent / "results"
GRAPHS = tuple(workloads.WORKLOADS)
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


def memory(graphs, budget):
    """Table 8: every device limited to a fraction of what the whole graph needs."""
    for name in graphs:
        free = problem_of(name, hardware.p100_pcie())
        total = float(free.nbytes.sum() + free.input_bytes.sum())
        for limit in (8e9, 0.3 * total):
            problem = free.restricted(limit)
            found = row(problem, COMPARED, budget)
            yield {"graph": name, "limit_GB": limit / 1e9, "all_values_GB": total / 1e9, "ms": found}


def v100(graphs, budget):
    """Table 9: eight devices in two NVLink meshes."""
    for name in graphs:
        problem = problem_of(name, hardware.v100_meshes(), V100_ONE_DEVICE[name])
        found = row(problem, COMPARED, budget)
        yield {"graph": name, "lower_bound_ms": problem.lower_bound() * 1e3, "ms": found}


def synchronous(graphs, budget):
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


def ablation(graphs, episodes, seeds=3):
    """Table 3: SEL or PLC replaced by the critical path's rule; policy only, no search."""
    policy = DualPolicy()
    variants = {
        "both": train.Training(), "SEL only": train.Training(place="earliest"),
        "PLC only": train.Training(select="critical-path"),
    }  # fmt: skip
    for name in graphs:
        problem = problem_of(name, hardware.p100_pcie(bandwidth=2.5e9))
        found, last = {label: [] for label in variants}, {label: [] for label in variants}
        for seed in range(seeds):
            k_init, k_imitate, k_learn = jax.random.split(jax.random.key(seed), 3)
            learner = train.start(k_init, problem, policy)
            learner = train.imitate_critical_path(policy, learner, problem, k_imitate, steps=200)
            for label, config in variants.items():
                trained, (mean, _) = train.learn(policy, learner, problem, k_learn, episodes=episodes, config=config)
                found[label].append(round(float(trained.cost) * 1e3, 3))
                last[label].append(round(float(mean[-8:].mean()) * 1e3, 3))
        yield {
            "graph": name, "link_GB_s": 2.5, "episodes": episodes, "ms": found, "mean_of_last_episodes_ms": last,
            "lower_bound_ms": problem.lower_bound() * 1e3, "heuristics_ms": row(problem, ("critical-path",), 50),
        }  # fmt: skip


def messages(graphs, episodes):
    """Table 6: one message passing an episode, or one a step; policy only, ChainMM."""
    problem = problem_of("chainmm", hardware.p100_pcie(bandwidth=2.5e9))
    for label, policy in (("per episode", DualPolicy()), ("per step", DualPolicy(per_step=True))):
        for seed in range(2):
            key = jax.random.key(seed)
            learner = train.start(key, problem, policy)
            learner = train.imitate_critical_path(policy, learner, problem, jax.random.fold_in(key, 1), steps=100)
            begin, cpu = time.perf_counter(), time.process_time()
            trained, (_, best) = train.learn(policy, learner, problem, jax.random.fold_in(key, 2), episodes=episodes)
            first = int(np.argmin(best)) + 1  # the update that found the best one
            batch = train.Training().batch
            yield {
                "graph": "chainmm", "link_GB_s": 2.5, "messages": label, "seed": seed, "episodes": episodes,
                "ms": float(trained.cost) * 1e3, "found_after_episodes": first * batch,
                "message_passings": first * (batch * problem.tasks if policy.per_step else 1),
                "seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
            }  # fmt: skip


def transfer(graphs, budget):
    """Table 4: trained on a small graph, placed on a Llama graph after 0, 2k and 4k episodes; and search alone."""
    policy = DualPolicy()
    trained = {}
    for name in ("ffnn", "chainmm"):
        problem = problem_of(name, hardware.p100_pcie(bandwidth=2.5e9))
        learner = train.start(jax.random.key(0), problem, policy)
        learner = train.imitate_critical_path(policy, learner, problem, jax.random.key(1), steps=200)
        trained[name], _ = train.learn(policy, learner, problem, jax.random.key(2), episodes=4096)
    for target in ("llama-block", "llama-layer"):
        problem = problem_of(target, hardware.p100_pcie(bandwidth=2.5e9))
        full = train.start(jax.random.key(0), problem, policy)
        full = train.imitate_critical_path(policy, full, problem, jax.random.key(1), steps=200)
        full, _ = train.learn(policy, full, problem, jax.random.key(2), episodes=4096)
        heuristics = row(problem, ("critical-path", "enumerate"), 50)
        for source in ("ffnn", "chainmm"):
            params = trained[source].params
            sample = lambda k, p=params: train.sample(policy, p, problem, k, 16)  # noqa: E731
            sample(jax.random.key(0))
            begin = time.perf_counter()
            _, zero_cost = baselines.best(problem, sample(jax.random.key(1)))
            seconds = time.perf_counter() - begin
            few = {}
            for episodes in (2048, 4096):
                start = train.start(jax.random.key(3), problem, policy, params)
                tuned, _ = train.learn(policy, start, problem, jax.random.key(4), episodes=episodes)
                few[episodes] = round(float(tuned.cost) * 1e3, 3)
            calls, scratch = 16, None
            starts = [baselines.random_assignment(problem, np.random.default_rng(0))]
            costs = baselines.evaluate(problem, starts)
            methods.polish(problem, jax.random.key(0), starts, costs, 1024)
            while True:  # the largest power of two of calls that search makes in the policy's time
                begin = time.perf_counter()
                found = methods.polish(problem, jax.random.key(0), starts, costs, calls)
                if time.perf_counter() - begin > seconds and scratch is not None:
                    break
                scratch, calls = found.cost, 2 * calls
                if calls > 4096:
                    break
            yield {
                "source": source, "target": target, "zero_shot_ms": zero_cost * 1e3, "2k_ms": few[2048],
                "4k_ms": few[4096], "full_4k_ms": float(full.cost) * 1e3, "heuristics_ms": heuristics,
                "zero_shot_seconds": seconds, "search_from_scratch_same_time_ms": scratch * 1e3,
                "search_calls": calls // 2,
            }  # fmt: skip


def repeat(graphs, budget, layers=4):
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


def emulated(graphs, budget, count=20):
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


COMMANDS = (memory, v100, synchronous, ablation, messages, transfer, repeat, emulated)


def main():
    """Run one command and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=[c.__name__ for c in COMMANDS], nargs="+")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--budget", type=int, default=2048, help="simulator calls, or episodes")
    args = parser.parse_args()
    for name in args.command:
        rows = []
        for r in {c.__name__: c for c in COMMANDS}[name](args.graphs, args.budget):
            print(json.dumps(r), flush=True)
            rows.append(r)
            record = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "jax": jax.__version__,
                "device": f"{jnp.zeros(()).device}, two cores shared with other work",
                "budget": args.budget,
                "rows": rows,
            }
            (RESULTS / f"place_{name}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
