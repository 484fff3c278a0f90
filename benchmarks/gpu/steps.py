"""The steps, most valuable first: each a list of items, and a function that gives a row of JSON for one of them.

``tiny`` asks for sizes that only test the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.gpu import agents
from benchmarks.gpu.images import PLANS, images
from benchmarks.gpu.measures import DEFAULT, EXACT, distance, median_ms
from benchmarks.gpu.programs import LEARNERS, init
from benchmarks.gpu.workloads import CASES, workload
from rlfx.envs import fast_prng
from rlfx.errors import RlfxError
from rlfx.transforms.fuse_steps import fuse_steps

ENVS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "Catch-bsuite", "Breakout-MinAtar")


@dataclass(frozen=True)
class Step:
    """One thing to find out.

    Attributes:
      items: ``items(tiny)``, of what.
      row: ``row(tiny, item) -> (JSON, what is not right)``.
      seconds: after which it is ended; the rows that it has by then are kept.
    """

    items: Callable[[bool], Sequence[Any]]
    row: Callable[[bool, Any], tuple[dict, list[str]]]
    seconds: int


def machine_here() -> rlfx.Target:
    """The device; a CPU as an accelerator runs programs, so that there is something to compare."""
    here, gpu = rlfx.target(), rlfx.target("h200")
    return here if here.platform != "cpu" else replace(here, rates=gpu.rates, rewrites=gpu.rewrites)


def numerics(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """Losses, results and gradients on this device against those of a CPU, by the CPU's own program."""
    length, batch = (12, 4) if tiny else (64, 32)
    learner = LEARNERS[name]
    arguments = jax.device_get((init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (batch, *learner.carry))))

    def evaluated(target: Any, device: Any, precision: str) -> Any:
        with jax.default_device(device), jax.default_matmul_precision(precision):
            fn = rlfx.compile(learner.f, length=length, batch=batch, target=target, **learner.options)
            run = jax.jit(jax.value_and_grad(lambda p, c, key: fn(p, c, key), has_aux=True))
            return jax.device_get(run(*arguments, jax.random.key(2)))

    expected = evaluated("cpu", jax.devices("cpu")[0], "highest")
    row: dict[str, Any] = {"program": name}
    wrong = []
    for precision, most in (("highest", EXACT), ("default", DEFAULT)):
        row[precision] = distance(evaluated(machine_here(), jax.devices()[0], precision), expected)
        if row[precision] > most:
            wrong.append(f"{name} at {precision} precision: {row[precision]:.1e}")
    return row, wrong


def kernels(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """Fused environment steps against ``scan(vmap(step))``: the same numbers; each backend that this device has."""
    n, k = (8, 5) if tiny else (1024, 100)
    backends = {"gpu": ("triton", "mosaic_gpu"), "tpu": ("tpu",)}.get(rlfx.target().platform, ("scan", "interpret"))
    env = rlfx.envs.make(name)
    key = jax.random.key(0, impl=fast_prng)
    states = jax.vmap(env.reset)(jax.random.split(key, n))

    def fused(backend: str):
        return jax.jit(fuse_steps(env, k, policy="random", outputs="statistics", backend=backend))

    loop = fused("vmap")
    expected = loop(key, states)
    row: dict[str, Any] = {"env": name, "N": n, "K": k, "vmap ms": median_ms(loop, (key, states), 5)}
    wrong = []
    for backend in backends:
        try:
            run = fused(backend)
            row[backend] = distance(run(key, states), expected)
            row[f"{backend} ms"] = median_ms(run, (key, states), 5)
        except Exception as error:
            row[backend] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            if not isinstance(error, RlfxError):  # what a backend refuses in our words is a result
                wrong.append(f"{name}, {backend}: {row[backend]}")
            continue
        if row[backend] > EXACT:
            wrong.append(f"{name}, {backend}: {row[backend]:.1e}")
    return row, wrong


@functools.cache
def _timerl(tiny: bool, budget: int | None) -> tuple:
    """One-epoch PPO under a budget: what explains it, the program, its temporary bytes, and its arguments."""
    import ppo_timerl

    batch = 32 if tiny else 8192
    params = ppo_timerl.init(jax.random.key(0), 64)
    state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    arguments = params, state, jax.random.key(2)
    plan = rlfx.Plan() if budget is None else None  # a default fits the caches of some machines, and is small itself
    fn = rlfx.compile(ppo_timerl.ppo, length=ppo_timerl.LENGTH, batch=batch, memory_budget=budget, plan=plan)
    run = jax.jit(jax.value_and_grad(fn, has_aux=True)).lower(*arguments).compile()
    return fn.explain(*arguments), run, int(run.memory_analysis().temp_size_in_bytes), arguments


def memory(tiny: bool, share: int) -> tuple[dict, list[str]]:
    """Budgets against XLA's temporary bytes, and the bytes that the allocator had in use at most.

    The allocator's peak is that of all runs so far: the smallest budget comes first.
    """
    budget = None if share == 1 else _timerl(tiny, None)[2] // share
    explained, run, found, arguments = _timerl(tiny, budget)
    row = {"budget": budget, "temp_bytes": found, "ms": median_ms(run, arguments, 5), "plan": repr(explained.plan)}
    stats = jax.devices()[0].memory_stats() or {}
    row |= {"peak_bytes": stats.get("peak_bytes_in_use"), "free_bytes": explained.free_bytes}
    over = budget is not None and found > budget
    return row, [f"{found} temporary bytes under a budget of {budget}"] if over else []


def recurrences(tiny: bool, size: tuple[int, int]) -> tuple[dict, list[str]]:
    """Returns as an associative scan and as a loop."""
    length, batch = size
    here = rlfx.target()
    rewards = jax.random.normal(jax.random.key(0), (length, batch))

    def returns(p, c, t):
        r = rlfx.inputs(p, axes="tb")
        return rlfx.discounted_sum(r[t:], jnp.full_like(r[t:], 0.99)) ** 2, c

    row: dict[str, Any] = {"T": length, "B": batch}
    results = []
    for name, affine in (("loop", False), ("associative scan", True)):
        target = replace(here, rewrites=replace(here.rewrites, affine=affine))
        fn = rlfx.compile(returns, length=length, batch=batch, target=target)
        run = jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, None)[0]))
        results.append(jax.device_get(run(rewards)))
        row[f"{name} ms"] = median_ms(run, (rewards,), 10)
    row["difference"] = distance(*results)
    return row, [f"T={length}, B={batch}: {row['difference']:.1e}"] if row["difference"] > EXACT else []


def updates(tiny: bool, batch: int) -> tuple[dict, list[str]]:
    """One-epoch PPO of TimeRL's size, by hand and by rlfx: milliseconds, and temporary bytes."""
    import ppo_timerl

    params = ppo_timerl.init(jax.random.key(0), 64)
    state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    arguments = (params, state, jax.random.key(2))
    programs = {"hand": ppo_timerl.hand_written(batch), "rlfx": ppo_timerl.compiled_by_rlfx(batch)}
    programs["one kernel"] = ppo_timerl.compiled_by_rlfx(batch, transform=fuse_steps)
    row: dict[str, Any] = {"B": batch, "T": ppo_timerl.LENGTH}
    for name, fn in programs.items():
        run = jax.jit(fn).lower(*arguments).compile()
        row[f"{name} MB"] = run.memory_analysis().temp_size_in_bytes / 1e6
        row[f"{name} ms"] = median_ms(run, arguments, 3 if tiny else 15)
    return {"ratio": row["rlfx ms"] / row["hand ms"], **row}, []


def rollouts(tiny: bool, item: tuple[str, int]) -> tuple[dict, list[str]]:
    """Random rollouts, fused and not, by the number of environments: steps a second."""
    (name, n), k = item, 10 if tiny else 200
    row: dict[str, Any] = {"env": name, "N": n, "K": k}
    for label, options in (("fused", {}), ("not fused", {"backend": "vmap"})):
        run = rlfx.envs.random_rollout(name, n, k, **options)
        row[f"{label}, steps/s"] = n * k / (1e-3 * median_ms(run, (jax.random.key(0),), 3 if tiny else 7))
    return {"ratio": row["fused, steps/s"] / row["not fused, steps/s"], **row}, []


def trace(tiny: bool, batch: int) -> tuple[dict, list[str]]:
    """A trace of a real device, read by ``rlfx.profile``: what it says of one-epoch PPO."""
    import tempfile

    import ppo_timerl

    from rlfx import profile

    jax.config.update("jax_enable_compilation_cache", False)  # what comes from there has no names of operations
    params = ppo_timerl.init(jax.random.key(0), 64)
    state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    # Kernels that are launched together, as a graph, have no names.
    options = {} if rlfx.target().platform == "cpu" else {"xla_gpu_enable_command_buffer": ""}
    run = jax.jit(ppo_timerl.compiled_by_rlfx(batch)).lower(params, state, jax.random.key(2)).compile(options)
    jax.block_until_ready(run(params, state, jax.random.key(2)))
    with tempfile.TemporaryDirectory() as folder:
        with profile.capture(folder) as captured:
            for i in range(2 if tiny else 10):
                jax.block_until_ready(run(params, state, jax.random.key(i)))
        report = captured.report()
        return {"B": batch, "verdict": str(report.verdict), "text": str(report)[:4000]}, []


SIZES = ((128, 64), (250, 1024), (2000, 1024), (250, 65536))
COUNTS = (2**6, 2**10, 2**16, 2**8, 2**12, 2**14)  # the most telling first

WIDTHS = ("2 layers of 64", "GRU of 64", "3 layers of 128", "2 layers of 256")

STEPS = {
    "numerics": Step(lambda tiny: [*LEARNERS], numerics, 150),
    "epochs": Step(lambda tiny: [64] if tiny else [64, 1024], agents.epochs, 60),
    "kernels": Step(lambda tiny: ENVS[:2] if tiny else ENVS, kernels, 120),
    "acting": Step(lambda tiny: [16] if tiny else [64, 1024], agents.acting, 90),
    "ppo": Step(lambda tiny: [16] if tiny else [64, 1024, 4096], agents.ppo, 120),
    "images": Step(lambda tiny: [*PLANS], images, 90),
    "peer": Step(lambda tiny: [16] if tiny else [64, 1024], agents.peer, 90),
    "workloads": Step(lambda tiny: [*CASES][: 1 if tiny else 5], workload, 150),
    "workloads_too": Step(lambda tiny: [*CASES][5 : 6 if tiny else None], workload, 150),
    "updates": Step(lambda tiny: [8] if tiny else [512, 64, 4096, 16384], updates, 90),
    "memory": Step(lambda tiny: (8, 4, 2, 1), memory, 90),
    "recurrences": Step(lambda tiny: [(16, 4)] if tiny else SIZES, recurrences, 60),
    "widths": Step(lambda tiny: WIDTHS[:1] if tiny else WIDTHS, agents.widths, 120),
    "rollouts": Step(
        lambda tiny: [(ENVS[0], 16)] if tiny else [(name, n) for n in COUNTS for name in ENVS], rollouts, 120
    ),
    "trace": Step(lambda tiny: [8 if tiny else 1024], trace, 60),
}
