"""PPO with a small CNN on synthetic images, under a memory budget (TimeRL section 8.3 and Fig. 11).

    python benchmarks/memory_images.py figures      # time and bytes under shrinking budgets
    python benchmarks/memory_images.py limit        # what fits under a real limit of the process

Observations are arrays of their full size (nothing smaller to render them from). Figures are ratios to the same program
without blocks; process CPU time, medians of interleaved runs. ``limit`` starts one process a size with a limit on its
data (RLIMIT_DATA), and shows which of them finish.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import recorded

import rlfx
from rlfx.errors import MemoryBudgetError

RESULTS = pathlib.Path(__file__).parent / "results" / "memory_images.json"
ACTIONS = 4


def convolve(x, kernel):
    """A convolution with stride 2 of one image [C, H, W]."""
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x[None], kernel, (2, 2), "SAME", dimension_numbers=numbers)[0]


def parameters(key, size: int) -> dict:
    flat = 16 * (size // 4) ** 2
    shapes = {"c1": (8, 3, 3, 3), "c2": (16, 8, 3, 3), "dense": (flat, 64), "head": (64, ACTIONS + 1)}
    keys = jax.random.split(key, len(shapes))
    scale = {"c1": 0.2, "c2": 0.1, "dense": flat**-0.5, "head": 0.1}
    return {n: scale[n] * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def network(params, obs):
    hidden = jax.nn.relu(convolve(obs, params["c1"]))
    hidden = jax.nn.relu(convolve(hidden, params["c2"]))
    out = jnp.tanh(hidden.reshape(-1) @ params["dense"]) @ params["head"]
    return out[:ACTIONS], out[ACTIONS]


def moved(obs, action, key):
    noise = jax.random.uniform(key, (3, 1, obs.shape[-1]))
    return jax.lax.stop_gradient(0.9 * jnp.roll(obs, 1, axis=2) + 0.1 * noise + 0.01 * action.astype(jnp.float32))


def ppo(params, obs, t):
    """One epoch of PPO with GAE and normalised advantages."""
    logits, value = network(params, obs)
    action = jax.random.categorical(t.key_for("action"), logits)
    following = moved(obs, action, t.key_for("env"))
    old = rlfx.series(jax.lax.stop_gradient(value))
    delta = following[0, 0, 0] + 0.99 * old[t + 1] - old[t]
    advantage = jax.lax.stop_gradient(rlfx.solve(lambda a: delta + 0.95 * 0.99 * a[t + 1], end=0.0))
    normed = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-6)
    log_prob = jax.nn.log_softmax(logits)[action]
    ratio = jnp.exp(log_prob - jax.lax.stop_gradient(log_prob))
    actor = -jnp.minimum(ratio * normed, jnp.clip(ratio, 0.8, 1.2) * normed)
    return actor + 0.5 * (value - jax.lax.stop_gradient(old[t] + advantage)) ** 2, following


def n_step(params, obs, t):
    """REINFORCE with returns over 8 timesteps."""
    logits, _ = network(params, obs)
    action = jax.random.categorical(t.key_for("action"), logits)
    following = moved(obs, action, t.key_for("env"))
    reward = rlfx.series(following[0, 0, 0])
    returns = rlfx.discounted_sum(reward[t : t + 8], jnp.full_like(reward[t : t + 8], 0.99))
    return -jax.nn.log_softmax(logits)[action] * jax.lax.stop_gradient(returns), following


def build(program, size: int, length: int, batch: int, **options):
    fn = rlfx.compile(program, length=length, batch=batch, **options)
    arguments = parameters(jax.random.key(0), size), jnp.zeros((batch, 3, size, size))
    step = jax.jit(jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(1)), has_aux=True))
    begun = time.perf_counter()
    executable = step.lower(*arguments).compile()
    seconds = time.perf_counter() - begun
    return executable, arguments, fn.plan(*arguments), seconds


PROGRAMS = {"ppo": ppo, "n-step": n_step}


def figures(rounds: int, programs: list[str], grid: list[tuple[int, int, int]]) -> list[dict]:
    rows = []
    for name in programs:
        program = PROGRAMS[name]
        for size, length, batch in grid:
            plain, arguments, plan, seconds = build(program, size, length, batch, plan=rlfx.Plan())
            temp = plain.memory_analysis().temp_size_in_bytes
            stacked = length * batch * 3 * size * size * 4
            built = {"plain": (plain, plan, seconds, None)}
            budgets = {"stacked": stacked, "1/4": temp // 4, "1/16": temp // 16}
            for label, budget in (("no budget", None), *budgets.items()):
                try:
                    fitted, _, plan, seconds = build(program, size, length, batch, memory_budget=budget)
                    built[label] = (fitted, plan, seconds, budget)
                except MemoryBudgetError as error:
                    rows.append({"program": name, "size": size, "T": length, "B": batch, "budget": label,
                                 "refused": str(error).splitlines()[0]})  # fmt: skip
            times: dict[str, list[float]] = {label: [] for label in built}
            gradients: dict[str, dict] = {}
            for _ in range(rounds):
                for label, (executable, *_) in built.items():
                    begun = time.process_time()
                    _, gradients[label] = jax.block_until_ready(executable(*arguments))
                    times[label].append(time.process_time() - begun)
            expected = gradients["plain"]
            for label, (executable, plan, seconds, budget) in built.items():
                used = executable.memory_analysis().temp_size_in_bytes
                error = max(float(jnp.abs(gradients[label][k] - expected[k]).max()) for k in expected)
                rows.append({"program": name, "size": size, "T": length, "B": batch, "budget": label,
                             "budget_bytes": budget, "plan": f"{plan.form} {plan.block} {plan.environments}",
                             "time_ratio": float(np.median(times[label]) / np.median(times["plain"])),
                             "cpu_s": float(np.median(times[label])), "temp_bytes": used, "of_plain": used / temp,
                             "of_stacked_observations": used / stacked, "plan_and_compile_s": seconds,
                             "gradient_error": error})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


def one_under_limit(kind: str, size: int, length: int, batch: int, limit: int, budget: int) -> None:
    """Runs in a process of its own: the limit counts from what the process has once the program is compiled."""
    options = {"plan": rlfx.Plan()} if kind == "plain" else {"memory_budget": budget}
    executable, arguments, plan, _ = build(ppo, size, length, batch, **options)
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit,) * 2)
    loss = executable(*arguments)[0][0]
    print(json.dumps({"loss": float(loss), "plan": plan.form}))


def limited(limit: int, length: int, batch: int) -> list[dict]:
    rows = []
    for size in (16, 32, 64, 128, 256):
        for kind in ("plain", "rlfx"):
            command = [sys.executable, __file__, "one", kind, *map(str, (size, length, batch, limit, int(0.8 * limit)))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            last = (done.stdout.splitlines() or [""])[-1] if done.returncode == 0 else ""
            reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["killed"])[-1][:160]
            rows.append({"size": size, "T": length, "B": batch, "kind": kind, "limit_bytes": limit,
                         "finished": done.returncode == 0, "result": last, "reason": reason})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def save(part: str, rows: list[dict]) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured = {(row["size"], row.get("program")) for row in rows}
    rows = [row for row in known.get(part, []) if (row["size"], row.get("program")) not in measured] + rows
    rows.sort(key=lambda row: (list(PROGRAMS).index(row.get("program", "ppo")), row["size"]))
    recorded.write(RESULTS, known | recorded.about("memory_images") | {part: rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["figures", "limit", "one"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[32, 64, 128], help="pixels; other rows stay as they are"
    )
    args = parser.parse_args()
    if args.part == "one":
        kind, *numbers = args.rest
        one_under_limit(kind, *map(int, numbers))
    elif args.part == "figures":
        save("figures", figures(args.rounds, args.programs, [(size, 128, 16) for size in args.sizes]))
    else:
        save("limit", limited(320 << 20, 64, 16))


if __name__ == "__main__":
    main()
