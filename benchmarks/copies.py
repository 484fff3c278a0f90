"""Copies of a gradient under `jax.vmap`, one after the other and all at once: members of a population, each with weights of its
own, and tasks whose weights take a step first (MAML), which the gradient goes through.

    python -m benchmarks.copies [--rounds 15] [--json FILE]

One core; both are the same program, by a target with and without `rewrites.turns`, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

import rlfx
from benchmarks import recorded
from benchmarks.untuned import common as c
from benchmarks.untuned.sealed_sixth.adapted import ACTIONS, OBS, actor_critic

KEY = jax.random.key(0)
CPU = rlfx.target("cpu")


def memory(params, h, t):
    """A recurrence that multiplies weights."""
    nets, data = params
    h = jnp.tanh(c.mlp(nets["pi"], jnp.concatenate([rlfx.inputs(data)[t]["obs"], h])))
    return (h**2).sum(), h


def population(loss: Callable) -> Callable:
    return jax.vmap(jax.value_and_grad(loss), (0, 0))


def tasks(loss: Callable) -> Callable:
    def of_task(p, data):
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, data)), data)

    def run(p, data):
        first = jax.tree.map(lambda w: w[0], p)  # of all tasks
        return jax.value_and_grad(lambda p: jax.vmap(of_task, (None, 0))(p, data).mean())(first)

    return run


PROGRAMS = {
    "population": (population, actor_critic),
    "population, recurrent": (population, memory),
    "tasks": (tasks, actor_critic),
    "tasks, recurrent": (tasks, memory),
}
#: (copies, timesteps, environments, units)
SIZES = [(8, 16, 16, 64), (8, 64, 32, 64), (16, 32, 64, 32), (32, 16, 32, 64), (4, 128, 32, 128), (64, 4, 4, 32)]


def built(make: Callable, program: Callable, size: tuple, turns: int) -> tuple:
    copies, length, batch, units = size
    state = units if program is memory else 0
    k = jax.random.split(KEY, 5)
    sizes = {"pi": (OBS + state, units, units, state or ACTIONS), "v": (OBS, units, units, 1)}
    nets = jax.vmap(lambda k: {n: c.mlp_params(k, s) for n, s in sizes.items()})(jax.random.split(k[0], copies))
    shape = copies, length, batch
    data = {
        "obs": jax.random.normal(k[1], (*shape, OBS)), "action": jax.random.randint(k[2], shape, 0, ACTIONS),
        "reward": jax.random.normal(k[3], shape), "done": jax.random.uniform(k[4], shape) < 0.05,
    }  # fmt: skip
    target = replace(CPU, rewrites=replace(CPU.rewrites, turns=turns))
    fn = rlfx.compile(program, length=length, batch=batch, target=target)
    carry = jnp.zeros((batch, state) if state else batch)
    loss = lambda p, data: fn((p, data), carry)[0]  # noqa: E731
    return jax.jit(make(loss)).lower(nets, data).compile(), (nets, data)


def measured(run: Callable, args: tuple) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - began


def compared(name: str, size: tuple, rounds: int) -> dict:
    make, program = PROGRAMS[name]
    both = [built(make, program, size, turns) for turns in (CPU.rewrites.turns, 0)]
    for run, args in both:
        jax.block_until_ready(run(*args))
    pairs = [[measured(*one) for one in both] for _ in range(rounds)]
    taken = [run.memory_analysis().temp_size_in_bytes for run, _ in both]
    with_it, without_it = (1e3 * statistics.median(x) for x in zip(*pairs, strict=True))
    row = {
        "program": name, "size": list(size), "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "in_turn_ms": round(with_it, 3), "at_once_ms": round(without_it, 3), "in_turn_bytes": taken[0], "at_once_bytes": taken[1],
    }  # fmt: skip
    print(f"{name:24} {size!s:20} {row['ratio']:5.2f}  {with_it:8.2f} ms in turn, {without_it:8.2f} at once; "
          f"{taken[0] / 2**20:7.2f} MiB, {taken[1] / 2**20:7.2f}", flush=True)  # fmt: skip
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [compared(name, size, args.rounds) for name in PROGRAMS for size in SIZES]
    if args.json:
        recorded.write(args.json, recorded.about("copies") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
