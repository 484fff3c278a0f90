"""What the stages of training are worth, and what a supervised start gives Placeto: the paper's figure 3 and table 7.

    python benchmarks/place_training.py stages [--seeds 0 1 2]       # Llama-layer, all combinations of stages I, II and III
    python benchmarks/place_training.py pretrained [--seeds 0 1 2]   # FFNN and ChainMM

There are no four GPUs here. The system of `stages` is a second simulator that differs from the one of stage II in what
simulators get wrong: every task takes a factor of its own longer or shorter (lognormal, 0.2), one lane carries all that
a device sends, and every execution is noisy (0.05). Results: benchmarks/results/place_training_*.json.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import recorded
from place_tables import problem_of

from rlfx.place import baselines, hardware, train
from rlfx.place.placeto import train_placeto
from rlfx.place.policy import DualPolicy
from rlfx.place.simulate import makespan, noise

RESULTS = Path(__file__).parent / "results"
LINK = 10e9
STAGES = ("I", "II", "III", "I + II", "I + III", "II + III", "I + II + III")
SIMULATED, EXECUTED = 4096, 1024  # episodes of stage II, executions of stage III


class System:
    """What stage III executes on: seconds of an assignment, another number each time."""

    def __init__(self, name):
        problem = problem_of(name, hardware.p100_pcie(bandwidth=LINK).with_shared_links())
        factors = np.random.default_rng(17).lognormal(0.0, 0.2, problem.tasks).astype(np.float32)
        self.problem = replace(problem, exec_time=problem.exec_time * factors[:, None])
        self.key, self.executions = jax.random.key(23), 0

    def __call__(self, assignment):
        self.executions += 1
        factors = noise(jax.random.fold_in(self.key, self.executions), self.problem, 1, 0.05)
        device, order = assignment.device[None], assignment.order[None]
        found = makespan(self.problem, device, order, exec_noise=factors[0], transfer_noise=factors[1])
        return float(found[0])


def executed(system, assignment, runs=10):
    """Median milliseconds of some executions."""
    return round(1e3 * float(np.median([system(assignment) for _ in range(runs)])), 2)


def stages(seeds):
    """Each combination: what its best assignment takes, and the policy's executions along stage III."""
    problem, policy = problem_of("llama-layer", hardware.p100_pcie(bandwidth=LINK)), DualPolicy()
    for label in STAGES:
        which, row = label.split(" + "), {"stages": label, "best_ms": [], "policy_ms": [], "along_ms": []}
        for seed in seeds:
            keys, system = jax.random.split(jax.random.key(seed), 5), System("llama-layer")
            learner = train.start(keys[0], problem, policy)
            if "I" in which:
                learner = train.imitate_critical_path(policy, learner, problem, keys[1], steps=200)
            if "II" in which:
                learner, _ = train.learn(policy, learner, problem, keys[2], episodes=SIMULATED)
            best = baselines.Assignment(np.asarray(learner.device), np.asarray(learner.order))
            if "III" in which:
                learner, times = train.learn_online(policy, learner, problem, system, keys[3], episodes=EXECUTED)
                best = baselines.Assignment(np.asarray(learner.device), np.asarray(learner.order))
                row["along_ms"].append((1e3 * times.reshape(16, -1).mean(axis=1)).round(2).tolist())
            drawn = train.sample(policy, learner.params, problem, keys[4], 16)
            if which == ["I"]:
                best = baselines.best(problem, drawn)[0]
            row["best_ms"].append(executed(system, best))
            row["policy_ms"].append(round(1e3 * float(np.median([system(a) for a in drawn])), 2))
        yield row


def teachers(problem, seed, count=16):
    rng = np.random.default_rng(seed)
    return [baselines.list_schedule(problem, rng) for _ in range(count)]


def pretrained(seeds, episodes=2048):
    """Placeto from nothing and after imitation of the critical path, beside both stages of the dual policy."""
    policy = DualPolicy()
    for name in ("ffnn", "chainmm"):
        problem = problem_of(name, hardware.p100_pcie(bandwidth=LINK))
        row = {"graph": name, "episodes": episodes, "lower_bound_ms": round(1e3 * problem.lower_bound(), 2), "ms": {}}
        row["teachers_ms"] = [round(1e3 * baselines.best(problem, teachers(problem, s))[1], 2) for s in seeds]
        for seed in seeds:
            key = jax.random.key(seed)
            k_init, k_imitate, k_learn = jax.random.split(key, 3)
            learner = train.start(k_init, problem, policy)
            learner = train.imitate_critical_path(policy, learner, problem, k_imitate, steps=200)
            learner, _ = train.learn(policy, learner, problem, k_learn, episodes=episodes)
            found = {
                "Placeto": train_placeto(problem, key, episodes)[1],
                "Placeto, pre-trained": train_placeto(problem, key, episodes, teachers=teachers(problem, seed))[1],
                "dual policy, stages I and II": float(learner.cost),
            }
            for method, seconds in found.items():
                row["ms"].setdefault(method, []).append(round(1e3 * seconds, 2))
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stages", "pretrained"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    record = recorded.about("place_training") | {"rows": []}
    for row in {"stages": stages, "pretrained": pretrained}[args.what](args.seeds):
        print(row, flush=True)
        record["rows"].append(row)
        recorded.write(RESULTS / f"place_training_{args.what}.json", record)


if __name__ == "__main__":
    main()
