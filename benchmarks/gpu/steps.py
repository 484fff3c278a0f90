"""The steps, most valuable first: each a function of ``tiny`` (sizes for a test) that returns JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.gpu.programs import LEARNERS, init
from rlfx.envs import fast_prng
from rlfx.errors import RlfxError
from rlfx.transforms.fuse_steps import fuse_steps

ENVS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "Catch-bsuite", "Breakout-MinAtar")
#: Differences from the CPU that are rounding: at full precision, and as jax multiplies by default (tf32, bfloat16 on a TPU).
EXACT, DEFAULT = 2e-4, 5e-2


@dataclass(frozen=True)
class Step:
    """One thing to find out.

    Attributes:
      run: ``run(tiny) -> JSON``; ``"wrong"`` in it lists what is not right.
      seconds: after which it is ended.
    """

    run: Callable[[bool], dict]
    seconds: int


def distance(one: Any, other: Any) -> float:
    """The largest difference in a leaf, relative to the largest number there."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / (np.abs(b).max() + 1e-6)))
    return worst


def median_ms(run: Callable, arguments: tuple, rounds: int) -> float:
    """Wall milliseconds of a call, compiled before."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def machine_here() -> rlfx.Target:
    """The device; a CPU as an accelerator runs programs, so that there is something to compare."""
    here, gpu = rlfx.target(), rlfx.target("h200")
    return here if here.platform != "cpu" else replace(here, rates=gpu.rates, rewrites=gpu.rewrites)


def numerics(tiny: bool) -> dict:
    """Losses, results and gradients on this device against those of a CPU, by the CPU's own program."""
    length, batch = (12, 4) if tiny else (64, 32)
    rows, wrong = [], []
    for name, learner in LEARNERS.items():
        arguments = jax.device_get(
            (init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (batch, *learner.carry)))
        )

        def evaluated(target: Any, device: Any, precision: str, learner=learner, arguments=arguments) -> Any:
            with jax.default_device(device), jax.default_matmul_precision(precision):
                fn = rlfx.compile(learner.f, length=length, batch=batch, target=target, **learner.options)
                run = jax.jit(jax.value_and_grad(lambda p, c, key: fn(p, c, key), has_aux=True))
                return jax.device_get(run(*arguments, jax.random.key(2)))

        expected = evaluated("cpu", jax.devices("cpu")[0], "highest")
        row = {"program": name}
        for precision, most in (("highest", EXACT), ("default", DEFAULT)):
            row[precision] = distance(evaluated(machine_here(), jax.devices()[0], precision), expected)
            if row[precision] > most:
                wrong.append(f"{name} at {precision} precision: {row[precision]:.1e}")
        rows.append(row)
    return {"rows": rows, "wrong": wrong}


def kernels(tiny: bool) -> dict:
    """Fused environment steps against ``scan(vmap(step))``: the same numbers; each backend that this device has."""
    n, k = (8, 5) if tiny else (1024, 100)
    backends = {"gpu": ("triton", "mosaic_gpu"), "tpu": ("tpu",)}.get(jax.default_backend(), ("scan", "interpret"))
    rows, wrong = [], []
    for name in ENVS[:2] if tiny else ENVS:
        env = rlfx.envs.make(name)
        key = jax.random.key(0, impl=fast_prng)
        states = jax.vmap(env.reset)(jax.random.split(key, n))

        def fused(backend: str, env=env):
            return jax.jit(fuse_steps(env, k, policy="random", outputs="statistics", backend=backend))

        loop = fused("vmap")
        expected = loop(key, states)
        row = {"env": name, "N": n, "K": k, "vmap ms": median_ms(loop, (key, states), 5)}
        for backend in backends:
            try:
                run = fused(backend)
                row[backend] = distance(run(key, states), expected)
                row[f"{backend} ms"] = median_ms(run, (key, states), 5)
            except Exception as error:
                row[backend] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                if not isinstance(error, RlfxError):  # what a backend refuses in our words is a result
                    wrong.append(f"{name}, {backend}: {row[backend]}")
                continue
            if row[backend] > EXACT:
                wrong.append(f"{name}, {backend}: {row[backend]:.1e}")
        rows.append(row)
    return {"rows": rows, "wrong": wrong}


def memory(tiny: bool) -> dict:
    """Budgets against XLA's temporary bytes, and the bytes that the allocator had in use at most."""
    import ppo_timerl

    batch = 32 if tiny else 8192
    params = ppo_timerl.init(jax.random.key(0), 64)
    state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    arguments = params, state, jax.random.key(2)

    def made(budget: int | None) -> tuple:
        plan = rlfx.Plan() if budget is None else None  # a default fits the caches of some machines, and is small itself
        fn = rlfx.compile(ppo_timerl.ppo, length=ppo_timerl.LENGTH, batch=batch, memory_budget=budget, plan=plan)
        run = jax.jit(jax.value_and_grad(fn, has_aux=True)).lower(*arguments).compile()
        return fn.explain(*arguments), run, int(run.memory_analysis().temp_size_in_bytes)

    whole = made(None)
    budgets = [whole[-1] // share for share in (8, 4, 2)]
    rows, wrong = [], []
    for budget in (*budgets, None):  # the allocator's peak is that of all runs so far: the smallest comes first
        explained, run, found = whole if budget is None else made(budget)
        row = {"budget": budget, "temp_bytes": found, "ms": median_ms(run, arguments, 5), "plan": repr(explained.plan)}
        stats = jax.devices()[0].memory_stats() or {}
        rows.append({**row, "peak_bytes": stats.get("peak_bytes_in_use"), "free_bytes": explained.free_bytes})
        if budget is not None and found > budget:
            wrong.append(f"{found} temporary bytes under a budget of {budget}")
    return {"rows": rows, "wrong": wrong}


def recurrences(tiny: bool) -> dict:
    """Returns as an associative scan and as a loop."""
    here = rlfx.target()
    targets = {
        name: replace(here, rewrites=replace(here.rewrites, affine=affine))
        for name, affine in (("loop", False), ("associative scan", True))
    }
    rows, wrong = [], []
    for length, batch in ((16, 4),) if tiny else ((128, 64), (250, 1024), (2000, 1024), (250, 65536)):
        rewards = jax.random.normal(jax.random.key(0), (length, batch))

        def returns(p, c, t):
            r = rlfx.inputs(p, axes="tb")
            return rlfx.discounted_sum(r[t:], jnp.full_like(r[t:], 0.99)) ** 2, c

        row, results = {"T": length, "B": batch}, []
        for name, target in targets.items():
            fn = rlfx.compile(returns, length=length, batch=batch, target=target)
            run = jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, None)[0]))
            results.append(jax.device_get(run(rewards)))
            row[f"{name} ms"] = median_ms(run, (rewards,), 10)
        row["difference"] = distance(*results)
        if row["difference"] > EXACT:
            wrong.append(f"T={length}, B={batch}: {row['difference']:.1e}")
        rows.append(row)
    return {"rows": rows, "wrong": wrong}


def updates(tiny: bool) -> dict:
    """One-epoch PPO of TimeRL's size, by hand and by rlfx: milliseconds, and temporary bytes."""
    import ppo_timerl

    rows = []
    for batch in (8,) if tiny else (64, 512, 4096, 16384):
        params = ppo_timerl.init(jax.random.key(0), 64)
        state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
        arguments = (params, state, jax.random.key(2))
        programs = {"hand": ppo_timerl.hand_written(batch), "rlfx": ppo_timerl.compiled_by_rlfx(batch)}
        row: dict[str, Any] = {"B": batch, "T": ppo_timerl.LENGTH}
        for name, fn in programs.items():
            run = jax.jit(fn).lower(*arguments).compile()
            row[f"{name} MB"] = run.memory_analysis().temp_size_in_bytes / 1e6
            row[f"{name} ms"] = median_ms(run, arguments, 3 if tiny else 15)
        rows.append({"ratio": row["rlfx ms"] / row["hand ms"], **row})
    return {"rows": rows, "wrong": []}


def rollouts(tiny: bool) -> dict:
    """Random rollouts, fused and not, by the number of environments: steps a second."""
    rows = []
    for name in ENVS[:1] if tiny else ENVS:
        for n in (16,) if tiny else (2**6, 2**8, 2**10, 2**12, 2**14, 2**16):
            k = 10 if tiny else 200
            row: dict[str, Any] = {"env": name, "N": n, "K": k}
            for label, options in (("fused", {}), ("not fused", {"backend": "vmap"})):
                run = rlfx.envs.random_rollout(name, n, k, **options)
                row[f"{label}, steps/s"] = n * k / (1e-3 * median_ms(run, (jax.random.key(0),), 3 if tiny else 7))
            rows.append({"ratio": row["fused, steps/s"] / row["not fused, steps/s"], **row})
    return {"rows": rows, "wrong": []}


def trace(tiny: bool) -> dict:
    """A trace of a real device, read by ``rlfx.profile``: what it says of one-epoch PPO."""
    import tempfile

    import ppo_timerl

    from rlfx import profile

    batch = 8 if tiny else 1024
    params = ppo_timerl.init(jax.random.key(0), 64)
    state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    run = jax.jit(ppo_timerl.compiled_by_rlfx(batch))
    jax.block_until_ready(run(params, state, jax.random.key(2)))
    with tempfile.TemporaryDirectory() as folder:
        with profile.capture(folder) as captured:
            for i in range(2 if tiny else 10):
                jax.block_until_ready(run(params, state, jax.random.key(i)))
        report = captured.report()
        return {"verdict": str(report.verdict), "text": str(report)[:4000], "wrong": []}


STEPS = {
    "numerics": Step(numerics, 150),
    "kernels": Step(kernels, 150),
    "memory": Step(memory, 90),
    "recurrences": Step(recurrences, 60),
    "updates": Step(updates, 90),
    "rollouts": Step(rollouts, 120),
    "trace": Step(trace, 60),
}
