"""PPO on CartPole, 4 epochs of 4 minibatches, on the device: its learner, its acting pass and whole updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.gpu.measures import distance, median_ms
from rlfx.recurrence.ir.interpret import inlined
from rlfx.recurrence.rewrite.packed import packed

EXACT = 2e-4
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
    alike = packed(learn, learner, sample, 1 << 16)
    assert alike is not None
    forms = {"arrays": (inlined(learn), learner), "vectors": (alike, alike.pack(learner))}
    row, results = {"environments": envs, "rows": rows}, []
    with jax.default_matmul_precision("highest"):
        for name, (fn, carry) in forms.items():
            run = jax.jit(lambda c, s, fn=fn: jax.lax.scan(lambda c, _: fn(c, s), c, None, length=16)[0])
            results.append(run(carry, sample))
            row[f"{name} ms"] = median_ms(run, (carry, sample), 3 if tiny else 15)
    row["difference"] = distance(alike.unpack(results[1]), results[0])
    return row, [f"{envs} environments: {row['difference']:.1e}"] if row["difference"] > EXACT else []


def acting(tiny: bool, envs: int) -> tuple[dict, list[str]]:
    """Acting with a policy as one kernel against a loop: the first steps have the same numbers; and times of 128 steps."""
    example, _, (params, _, carry) = _agent(envs)
    row: dict[str, Any] = {"environments": envs}
    results = []
    with jax.default_matmul_precision("highest"):
        for name, options in (("loop", {}), ("one kernel", {"transform": rlfx.fuse_steps})):
            few, many = (
                jax.jit(rlfx.unroll(example.act, length=length, batch=envs, **options))
                for length in (STEPS, STEPS if tiny else example.LENGTH)
            )
            results.append(few(params, carry, jax.random.key(1)))
            row[f"{name} ms"] = median_ms(many, (params, carry, jax.random.key(1)), 3 if tiny else 15)
    row["difference"] = distance(*reversed(results))
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
