"""PPO on CartPole, 4 epochs of 4 minibatches, on the device: its learner, its acting pass and whole updates."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.gpu.measures import EXACT, distance, median_ms
from rlfx.recurrence.ir.interpret import inlined
from rlfx.recurrence.rewrite.packed import packed

STEPS = 8  # of acting whose numbers are compared: later, a rounding may have chosen another action


def _agent(envs: int) -> tuple[Any, Any, Any]:
    import ppo_cartpole

    optimizer = ppo_cartpole.make_optimizer(100)
    return ppo_cartpole, optimizer, ppo_cartpole.init_agent(jax.random.key(0), optimizer, envs)


def epochs(tiny: bool, envs: int) -> tuple[dict, list[str]]:
    """Minibatch steps on vectors (what ``minibatch_epochs`` does on GPUs) against the same steps on arrays."""
    import optax

    example, optimizer, (params, opt_state, _) = _agent(envs)
    rows = envs * example.LENGTH // example.MINIBATCHES
    keys = jax.random.split(jax.random.key(1), 4)
    sample = example.Sample(
        jax.random.normal(keys[0], (rows, 4)), jax.random.randint(keys[1], (rows,), 0, 2),
        -0.7 + 0.1 * jax.random.normal(keys[2], (rows,)), jax.random.normal(keys[3], (rows,)), jnp.ones(rows),
    )  # fmt: skip

    def learn(learner, sample):
        params, opt_state = learner
        updates, opt_state = optimizer.update(jax.grad(example.ppo_loss)(params, sample), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    learner = params, opt_state
    row, results = {"environments": envs, "rows": rows}, []
    with jax.default_matmul_precision("highest"):
        alike = packed(learn, learner, sample, 1 << 16)
        assert alike is not None
        forms = {"arrays": (inlined(learn), learner), "vectors": (alike, alike.pack(learner))}
        for name, (fn, carry) in forms.items():
            run = jax.jit(lambda c, s, fn=fn: jax.lax.scan(lambda c, _: fn(c, s), c, None, length=16)[0])
            results.append(run(carry, sample))
            row[f"{name} ms"] = median_ms(run, (carry, sample), 3 if tiny else 15)
    row["difference"] = distance(alike.unpack(results[1]), results[0])
    return row, [f"{envs} environments: {row['difference']:.1e}"] if row["difference"] > EXACT else []


def acting(tiny: bool, envs: int) -> tuple[dict, list[str]]:
    """Acting with a policy as one kernel against a loop: the first steps have the same numbers; and times of 128 steps.

    ``chosen`` is what rlfx takes by itself after it has compared both; ``one kernel`` is the kernel in any case.
    """
    example, _, (params, _, carry) = _agent(envs)
    return compared(tiny, example.act, envs, params, carry, {"environments": envs})


def widths(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """The same, of policies of several widths: which of them are faster as one kernel?"""
    import kernel_limits

    act, *shapes = kernel_limits.NETWORKS[name]()
    envs = kernel_limits.BATCH
    keys = iter(jax.random.split(jax.random.key(0), 100))
    drawn = lambda s: jax.random.normal(next(keys), s.shape) / max(s.shape[0], 1) ** 0.5  # noqa: E731
    return compared(tiny, act, envs, *jax.tree.map(drawn, tuple(shapes)), {"network": name, "environments": envs})


def compared(tiny: bool, act: Any, envs: int, params: Any, carry: Any, row: dict) -> tuple[dict, list[str]]:
    """Milliseconds of acting as a loop, as rlfx chooses, and as one kernel; the difference of the last from the first."""
    kernel = {} if rlfx.target().platform == "cpu" else {"backend": "triton"}
    forms = {
        "loop": {}, "chosen": {"transform": rlfx.fuse_steps},
        "one kernel": {"transform": functools.partial(rlfx.fuse_steps, **kernel)},
    }  # fmt: skip
    results, key, length = [], jax.random.key(1), STEPS if tiny else 128
    with jax.default_matmul_precision("highest"):
        for name, options in forms.items():
            run = jax.jit(rlfx.unroll(act, length=length, batch=envs, **options))
            first = jax.tree.map(lambda y: y[:STEPS], run(params, carry, key)[1])
            results.append(first)
            row[f"{name} ms"] = median_ms(run, (params, carry, key), 3 if tiny else 15)
    row["difference"] = distance(results[2], results[0])
    return row, [f"{envs} environments: {row['difference']:.1e}"] if row["difference"] > EXACT else []


def ppo(tiny: bool, envs: int) -> tuple[dict, list[str]]:
    """Whole updates: by hand, by rlfx, and with acting as one kernel; milliseconds, and temporary bytes."""
    import by_hand

    example, optimizer, agent = _agent(envs)
    programs = {"hand": by_hand.ppo_update(optimizer, envs)}
    for name, options in (("rlfx", {}), ("one kernel", {"transform": rlfx.fuse_steps})):
        rollout = rlfx.unroll(example.act, length=example.LENGTH, batch=envs, **options)
        programs[name] = example.make_update(rollout, optimizer)
    row: dict[str, Any] = {"environments": envs}
    for name, fn in programs.items():
        run = jax.jit(fn).lower(agent, jax.random.key(1)).compile()
        row[f"{name} MB"] = run.memory_analysis().temp_size_in_bytes / 1e6
        row[f"{name} ms"] = median_ms(run, (agent, jax.random.key(1)), 3 if tiny else 15)
    return {"ratio": row["rlfx ms"] / row["hand ms"], **row}, []


def peer(tiny: bool, envs: int) -> tuple[dict, list[str]]:
    """Training as PureJaxRL trains, by PureJaxRL's own file and by rlfx: environment steps a second."""
    import ppo_full

    checkout = os.environ.get("RLFX_PUREJAXRL")
    if checkout is None:
        return {"environments": envs, "refused": "RLFX_PUREJAXRL names no checkout of PureJaxRL"}, []
    updates = 2 if tiny else 10
    programs = {n: p for n, p in ppo_full.programs(checkout, envs, updates, None).items() if n != "rlfx, gymnax"}
    env = rlfx.envs.make("CartPole-v1")
    fused = ppo_full.make_train(env, envs, updates, transform=rlfx.fuse_steps)
    programs["rlfx, one kernel"] = fused, programs["rlfx"][1]
    row: dict[str, Any] = {"environments": envs, "updates": updates}
    for name, (train, key) in programs.items():
        ms = median_ms(jax.jit(train), (key,), 3 if tiny else 7)
        row[f"{name}, steps/s"] = 1e3 * envs * ppo_full.LENGTH * updates / ms
    return {"ratio": row["rlfx, one kernel, steps/s"] / row["PureJaxRL, steps/s"], **row}, []
