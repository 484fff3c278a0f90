"""Programs in programs: a whole run, a meta-gradient, two roles. Ratios first.

    python benchmarks/nests.py [run meta roles] [--rounds 7] [--out benchmarks/results/nests.json]

`run`: 200 iterations of a rollout and a gradient as one call, against the same update in a hand-written scan: trace and compile
(processor seconds), iterations a second, temporary bytes at 10 and at 10,000 iterations. `meta`: the gradient of what 64 updates
reach, with and without `jax.checkpoint` around the update. `roles`: an iteration of acting and learning on one device; on two,
the actor one iteration behind; on two, the batch split.
Interleaved in one process, medians; `run` and `meta` by processor time, `roles` by the clock, with the load that there was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
import recorded

import rlfx

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import learned_rate
import two_roles
import whole_run
from ppo_cartpole import act, init_agent, ppo_loss

KEY = jax.random.key(0)


def interleaved(programs, arguments, rounds, clock=time.process_time):
    """Median seconds of each."""
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = clock()
            jax.block_until_ready(program(*arguments))
            times[name].append(clock() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def timed(fn):
    began = time.process_time()
    result = fn()
    return result, time.process_time() - began


def compiled(fn, *arguments):
    """The program, and the processor seconds of tracing and of compiling it."""
    lowered, trace = timed(lambda: jax.jit(fn).lower(*arguments))
    program, compile_ = timed(lowered.compile)
    return program, {
        "trace_s": round(trace, 2),
        "compile_s": round(compile_, 2),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
    }


# -- a whole run


def update_of():
    """With a program of its own, so that each is traced anew."""
    loss_fn = rlfx.compile(learned_rate.steer, length=learned_rate.T, batch=learned_rate.B)

    def update(rate, params, x, key):
        (loss, _), grads = jax.value_and_grad(lambda w: loss_fn(w, x, key), has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    return update


def run(rounds):
    params, x = learned_rate.init()
    rate = jnp.float32(0.01)
    keys_of = lambda n: rlfx.unroll(lambda _, c, i: (c, i.key), length=n, dim="i")(None, None, KEY)[1]  # noqa: E731

    def ours(n, keep=rlfx.Last):
        update = update_of()

        def iteration(rate, params, i):
            params, loss = update(rate, params, x, i.key)
            return params, keep(loss)

        return lambda rate, params: rlfx.unroll(iteration, length=n, dim="i")(rate, params, KEY)

    def by_hand(rate, params, update=update_of()):
        return jax.lax.scan(lambda w, key: update(rate, w, x, key), params, keys_of(200))

    alone = lambda rate, params: update_of()(rate, params, x, KEY)  # noqa: E731
    _, inner = compiled(alone, rate, params)
    programs, rows = {}, {"the inner program": inner}
    for name, fn in {"rlfx": ours(200, lambda loss: loss), "scan": by_hand}.items():
        programs[name], rows[name] = compiled(fn, rate, params)
    ends = [program(rate, params) for program in programs.values()]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *ends)
    for name, seconds in interleaved(programs, (rate, params), rounds).items():
        rows[name]["iterations_a_second"] = round(200 / seconds)
    memory = {n: compiled(ours(n), rate, params)[1]["temp_bytes"] for n in (10, 10_000)}
    ratio = lambda what, a, b: round(rows[a][what] / rows[b][what], 2)  # noqa: E731
    return {
        "trace_over_inner": ratio("trace_s", "rlfx", "the inner program"),
        "compile_over_scan": ratio("compile_s", "rlfx", "scan"),
        "speed_over_scan": ratio("iterations_a_second", "rlfx", "scan"),
        "temp_bytes_by_iterations": memory,
        "rows": rows,
    }


# -- a meta-gradient


def meta(rounds):
    programs, rows = {}, {}
    for name, checkpoint in {"checkpoint": True, "kept": False}.items():
        fn = jax.value_and_grad(learned_rate.make_reached(checkpoint=checkpoint))
        programs[name], rows[name] = compiled(fn, jnp.float32(0.01), KEY)
    values = [program(jnp.float32(0.01), KEY) for program in programs.values()]
    np.testing.assert_allclose(*values, rtol=1e-4)
    for name, seconds in interleaved(programs, (jnp.float32(0.01), KEY), rounds).items():
        rows[name]["ms"] = round(1e3 * seconds, 2)
    return {"time_over_kept": round(rows["checkpoint"]["ms"] / rows["kept"]["ms"], 2), "rows": rows}


# -- two roles


def roles(rounds, sizes=((128, 4), (128, 32), (32, 256)), iterations=8, epochs=4):
    found = []
    for length, batch in sizes:
        optimizer = whole_run.optimizer
        learner, carry = (lambda p, o, c: ((p, o), c))(*init_agent(KEY, optimizer, batch))
        keys = jax.random.split(KEY, iterations)
        rollouts = {n: rlfx.unroll(act, length=length, batch=n) for n in (batch, batch // 2)}

        def collect(learner, carry, key, n=batch, rollouts=rollouts):
            carry, (samples, _) = rollouts[n](learner[0], carry, key)
            return carry, samples

        def learn(learner, samples, key, axis=None):
            """Steps with all samples: what can be split without a change of meaning."""
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

            def step(learner, _):
                params, opt_state = learner
                grads = jax.grad(ppo_loss)(params, flat)
                grads = grads if axis is None else jax.lax.pmean(grads, axis)
                updates, opt_state = optimizer.update(grads, opt_state, params)
                return (jax.tree.map(jnp.add, params, updates), opt_state), None

            return jax.lax.scan(step, learner, None, length=epochs)[0]

        def one(learner, carry, keys, n=batch, axis=None, collect=collect, learn=learn):
            def iteration(both, key):
                learner, carry = both
                own = key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
                carry, samples = collect(learner, carry, own, n)
                return (learn(learner, samples, key, axis), carry), None

            return jax.lax.scan(iteration, (learner, carry), keys)[0]

        P, two = jax.sharding.PartitionSpec, jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
        split = jax.shard_map(
            lambda *args: one(*args, n=batch // 2, axis="d"),
            mesh=two,
            in_specs=(P(), P("d"), P()),
            out_specs=(P(), P("d")),
            check_vma=False,
        )
        behind = two_roles.pipelined(collect, learn, two_roles.role_mesh())
        pipelined = lambda learner, carry, keys: behind(learner, carry, (keys, keys))  # noqa: E731
        programs = {
            name: jax.jit(fn).lower(learner, carry, keys).compile()
            for name, fn in {"one device": one, "roles": pipelined, "split": split}.items()
        }
        begin = os.getloadavg()[0]
        seconds = interleaved(programs, (learner, carry, keys), rounds, time.perf_counter)
        found.append(
            {
                "timesteps": length,
                "environments": batch,
                "roles_over_one": round(seconds["one device"] / seconds["roles"], 2),
                "split_over_one": round(seconds["one device"] / seconds["split"], 2),
                "ms_an_iteration": {name: round(1e3 * s / iterations, 2) for name, s in seconds.items()},
                "load": [round(begin, 1), round(os.getloadavg()[0], 1)],
            }
        )
        print(found[-1], flush=True)
    return found


SECTIONS = {"run": run, "meta": meta, "roles": roles}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    record = recorded.about("nests")
    for name in args.sections or SECTIONS:
        record[name] = SECTIONS[name](args.rounds)
        print(name, record[name], flush=True)
        if args.out:
            recorded.write(args.out, record)


if __name__ == "__main__":
    main()
