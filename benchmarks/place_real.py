"""Simulated against real execution of real kernels on CPU devices (figure 18), and stage III from measured times.

    python benchmarks/place_real.py [--graphs panels recurrent chainmm ffnn] [--assignments 60] [--online 64]

Devices are XLA's host devices, two on two cores. They share one pool of threads, which is never smaller than the number
of devices, and XLA splits a large kernel over it: one device then uses every core (the row "cores_used" measures it),
and no assignment is faster than another. ``chainmm`` and ``ffnn`` are such. In ``panels`` and ``recurrent`` every kernel
is a loop over products too small to be split, as in recurrent networks, so that a device is a core.

Two simulators are compared with the same executions: one whose machine model is measured with a matrix product, an
addition and transfers (``hardware.measured``), and one whose durations are those of every kernel and copy, measured
alone (``Executor.calibrated``). Results: benchmarks/results/place_real.json.
"""

import argparse
import datetime
import functools
import json
import operator
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--graphs", nargs="+", default=["panels", "recurrent", "chainmm", "ffnn"])
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--assignments", type=int, default=60)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--asynchronous", action="store_true", help="kernels run in XLA's pool, not the workers' threads")
parser.add_argument("--online", type=int, default=0, help="executions of stage III")
parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "place_real.json")
args = parser.parse_args()
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from scipy import stats  # noqa: E402

from rlfx.place import baselines, hardware, methods, train, workloads  # noqa: E402
from rlfx.place.execute import Executor  # noqa: E402
from rlfx.place.policy import DualPolicy  # noqa: E402
from rlfx.place.problem import build  # noqa: E402

jax.config.update("jax_cpu_enable_async_dispatch", args.asynchronous)  # read when the devices are made


def panels(rows=2048, width=256, grid=4, panel=64):
    """(A B) + (C (D E)) in blocks, A and C tall; each product of blocks is a loop over panels of some rows."""

    def product(x, w):
        return jax.lax.map(lambda r: r @ w, x.reshape(-1, panel, width)).reshape(x.shape[0], width)

    def matmul(x, y):
        return [[functools.reduce(operator.add, map(product, row, col)) for col in zip(*y, strict=True)]
                for row in x]  # fmt: skip

    def fn(A, B, C, D, E):
        left, right = matmul(A, B), matmul(C, matmul(D, E))
        return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(left, right, strict=True)]

    tall = [[jax.ShapeDtypeStruct((rows, width), jnp.float32)] * 2] * grid
    square = [[jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2] * 2
    return workloads.Workload("panels", fn, (tall, square, tall, square, square), {})


def recurrent(towers=8, depth=8, width=256, batch=32):
    """Towers of recurrent layers of unequal lengths; every other layer reads two towers."""

    def layer(x, w, steps):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + x), None), x, None, length=steps)[0]

    def fn(xs, ws):
        for i in range(depth):
            if i % 2:
                xs = [0.5 * (xs[j] + xs[(j + i) % towers]) for j in range(towers)]
            xs = [layer(x, ws[i], 25 * (1 + (3 * i + 5 * j) % 7)) for j, x in enumerate(xs)]
        return xs

    state, weight = jax.ShapeDtypeStruct((batch, width), jnp.float32), jax.ShapeDtypeStruct((width, width), jnp.float32)
    return workloads.Workload("recurrent", fn, ([state] * towers, [weight] * depth), {})


def biased(problem, rng):
    """A random assignment that prefers one device by a random amount: from balanced to everything on one."""
    share = rng.dirichlet(np.full(problem.devices, 0.7))
    device = rng.choice(problem.devices, problem.tasks, p=share).astype(np.int32)
    return baselines.Assignment(device, baselines.topological_order(problem))


def agreement(simulated, real):
    """Pearson, Spearman, and how much longer the real executions take."""
    ratio = real / simulated
    return {
        "pearson": float(stats.pearsonr(simulated, real).statistic),
        "spearman": float(stats.spearmanr(simulated, real).statistic),
        "real_over_simulated": [float(ratio.min()), float(np.median(ratio)), float(ratio.max())],
    }


def stage_three(problem, executor, flat, episodes):
    """Stages I and II in the simulator, then III with measured times: the policy's samples before and after."""
    policy = DualPolicy()
    learner = train.start(jax.random.key(1), problem, policy)
    learner = train.imitate_critical_path(policy, learner, problem, jax.random.key(2), steps=200)
    learner, _ = train.learn(policy, learner, problem, jax.random.key(3), episodes=2048)

    def measured(assignment):
        return executor.measure(flat, assignment, repeats=3)

    def samples(params):
        return [measured(a) for a in train.sample(policy, params, problem, jax.random.key(5), 16)]

    before = samples(learner.params)
    learner, times = train.learn_online(policy, learner, problem, measured, jax.random.key(4), episodes=episodes)
    after = samples(learner.params)
    return {
        "episodes": episodes, "policy_ms_before": 1e3 * float(np.median(before)),
        "policy_ms_after": 1e3 * float(np.median(after)), "best_seen_ms": 1e3 * float(times.min()),
    }  # fmt: skip


def cores_used(executor, one_device):
    """CPU seconds a second of a graph on one device alone."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        executor.run(one_device)
    return (time.process_time() - cpu) / (time.perf_counter() - begin)


def measure(work, devices):
    """One row: the executions of a graph under many assignments, and what two simulators say of them."""
    graph = work.graph()
    rough = build(graph, hardware.measured(devices))
    executor = Executor(graph, devices)
    flat = jax.tree.leaves(work.arguments(jax.random.key(0)))
    problem = executor.calibrated(rough, flat)
    rng = np.random.default_rng(0)
    found = methods.solve(problem, "polish", jax.random.key(0), 512).assignment
    pool = [found, baselines.enumerative(problem), baselines.heft(problem), baselines.one_device(problem)]
    pool += [biased(problem, rng) for _ in range(args.assignments - len(pool))]
    real = np.zeros((len(pool), args.repeats + 1))
    for i in range(args.repeats + 1):  # assignments in turn: the machine is faster at one time than at another
        for j, a in enumerate(pool):
            executor.load(flat, a)
            real[j, i] = executor.run(a)[0].makespan
    real = real[:, 1:]
    groups = [g for meta in problem.metas for g in meta if g]
    executor.load(flat, pool[3])
    cores = cores_used(executor, pool[3])
    executor.load(flat, found)
    executor.run_synchronous(found, groups)
    barrier = min(executor.run_synchronous(found, groups).makespan for _ in range(args.repeats))
    best = real.min(axis=1)
    simulated = {
        name: baselines.evaluate(p, pool).astype(float) for name, p in (("kernels", problem), ("rough", rough))
    }
    row = {
        "graph": work.name, "asynchronous": args.asynchronous, "devices": args.devices,
        "assignments": len(pool), "kernels": executor.programs,
        "cores_used_by_one_device": cores, "kernel_ms": 1e3 * float(np.median(problem.exec_time)),
        "calibrated": agreement(simulated["kernels"], best), "roofline": agreement(simulated["rough"], best),
        "random_only": agreement(simulated["kernels"][4:], best[4:]),
        "polish_ms": best[0] * 1e3, "one_device_ms": best[3] * 1e3, "synchronous_ms": barrier * 1e3,
    }  # fmt: skip
    if args.online:
        row["stage_three"] = stage_three(problem, executor, flat, args.online)
    print(row, flush=True)
    return {**row, "simulated_s": {k: v.tolist() for k, v in simulated.items()}, "real_s": real.tolist()}


def main():
    """Run and write JSON."""
    devices = jax.devices()
    makers = {
        "panels": panels, "recurrent": recurrent,
        "chainmm": lambda: workloads.chainmm(args.size), "ffnn": lambda: workloads.ffnn(4096, 64, 4096),
    }  # fmt: skip
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": f"{args.devices} XLA host devices on {os.cpu_count()} cores; fastest of {args.repeats} runs",
        "rows": list(json.loads(args.out.read_text())["rows"]) if args.out.exists() else [],
    }
    for name in args.graphs:
        rest = [r for r in record["rows"] if (r["graph"], r.get("asynchronous")) != (name, args.asynchronous)]
        record["rows"] = [*rest, measure(makers[name](), devices)]
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
