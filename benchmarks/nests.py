"""Programs in programs: a whole run, a meta-gradient, two roles. Ratios first.

    python benchmarks/nests.py [run meta roles] [--rounds 7] [--out benchmarks/results/nests.json]

`run`: 200 iterations as one call, of a rollout and its gradient and of PPO, against the same update in a hand-written scan:
compile (processor seconds, median of three), iterations a second, temporary bytes at 10 and at 10,000 iterations; what tracing,
planning and lowering take (median of seven programs made anew, without garbage collection), of what one iteration alone takes.
`meta`: the gradient of what 64 updates reach, with and without `jax.checkpoint` around the update. `roles`: an iteration of
acting and learning on one device; on two, the actor one iteration behind; on two, the batch split.
Interleaved in one process; `run` and `meta` by processor time, medians; `roles` by the clock, the least of three times as many
rounds (others use these cores), beside two devices that exchange nothing: what the machine gave them at most.
"""

from __future__ import annotations

import argparse
import gc
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


def interleaved(programs, arguments, rounds, clock=time.process_time, of=statistics.median):
    """Seconds of each: the median."""
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = clock()
            jax.block_until_ready(program(*arguments))
            times[name].append(clock() - began)
    return {name: of(each) for name, each in times.items()}


def timed(fn):
    """What it gives and its processor seconds: garbage of those before is not collected in them."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    result = fn()
    seconds = time.process_time() - began
    gc.enable()
    return result, seconds


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


def value_and_gradient():
    """A policy through time, 32 timesteps of 16 environments, and a gradient step."""
    params, x = learned_rate.init()
    rate = jnp.float32(0.01)

    def iteration_of():
        """With a program of its own, so that each is traced anew."""
        loss_fn = rlfx.compile(learned_rate.steer, length=learned_rate.T, batch=learned_rate.B)

        def update(params, key):
            (loss, _), grads = jax.value_and_grad(lambda w: loss_fn(w, x, key), has_aux=True)(params)
            return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

        return update

    return iteration_of, params


def ppo():
    """`examples/whole_run.py`: a rollout, 128 timesteps of 16 environments, 4 epochs of 4 minibatches."""

    def iteration_of():
        rollout = rlfx.unroll(act, length=128, batch=16)

        def update(agent, key):
            carry, (samples, (_, done)) = rollout(agent.params, agent.carry, key)
            learner = whole_run.epochs((agent.params, agent.opt_state), samples, jax.random.fold_in(key, 1))
            return whole_run.Agent(*learner, carry), 1000 * done.mean()

        return update

    return iteration_of, whole_run.init(KEY)


ITERATIONS, FRESH = 200, 7
RUNS = {"a value and gradient": value_and_gradient, "a PPO run": ppo}


def run(rounds):
    return {name: a_run(*case(), rounds) for name, case in RUNS.items()}


def a_run(iteration_of, state, rounds):
    keys_of = rlfx.unroll(lambda _, c, i: (c, i.key), length=ITERATIONS, dim="i")

    def alone():
        return iteration_of()

    def ours(n=ITERATIONS, keep=lambda log: log):
        update = iteration_of()

        def iteration(_, state, i):
            state, log = update(state, i.key)
            return state, keep(log)

        return lambda state, key: rlfx.unroll(iteration, length=n, dim="i")(None, state, key)

    def by_hand():
        update = iteration_of()
        return lambda state, key: jax.lax.scan(update, state, keys_of(None, None, key)[1])

    made = {"the inner program": alone, "rlfx": ours, "scan": by_hand}
    each = {name: [] for name in made}
    for make in made.values():
        jax.jit(make()).lower(state, KEY)  # what jax traces once a process
    for _ in range(FRESH):
        for name, make in made.items():
            each[name].append(timed(lambda make=make: jax.jit(make()).lower(state, KEY))[1])
    programs, rows = {}, {}
    for name, make in made.items():
        programs[name], rows[name] = compiled(make(), state, KEY)
        rows[name]["trace_s"] = round(statistics.median(each[name]), 3)
    built = {name: [] for name in ("rlfx", "scan")}
    for _ in range(3):
        for name, found in built.items():
            found.append(timed(jax.jit(made[name]()).lower(state, KEY).compile)[1])
    del programs["the inner program"]
    ends = [program(state, KEY) for program in programs.values()]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *ends)
    for name, seconds in interleaved(programs, (state, KEY), rounds).items():
        rows[name]["iterations_a_second"] = round(ITERATIONS / seconds)
        rows[name]["compile_s"] = round(statistics.median(built[name]), 2)
    memory = {n: compiled(ours(n, rlfx.Last), state, KEY)[1]["temp_bytes"] for n in (10, 10_000)}
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

SIZES = {"one environment": (2048, 1), "few": (512, 8), "more": (128, 64), "many": (32, 512)}


def roles(rounds, iterations=8, epochs=1):
    return [a_size(name, *size, rounds, iterations, epochs) for name, size in SIZES.items()]


def a_size(name, length, batch, rounds, iterations, epochs):
    optimizer = whole_run.optimizer
    learner, carry = (lambda p, o, c: ((p, o), c))(*init_agent(KEY, optimizer, batch))
    keys = jax.random.split(KEY, iterations)
    rollouts = {n: rlfx.unroll(act, length=length, batch=n) for n in (batch, batch // 2) if n}

    def collect(learner, carry, key, n=batch):
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

    def one(learner, carry, keys, n=batch, axis=None):
        def iteration(both, key):
            learner, carry = both
            own = key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
            carry, samples = collect(learner, carry, own, n)
            return (learn(learner, samples, key, axis), carry), None

        return jax.lax.scan(iteration, (learner, carry), keys)[0]

    def acting(learner, carry, keys):
        def rollout(carry, key):
            carry, samples = collect(learner, carry, key)
            return carry, jax.tree.map(jnp.sum, samples)  # all that it makes

        return jax.lax.scan(rollout, carry, keys)

    P, auto = jax.sharding.PartitionSpec, (jax.sharding.AxisType.Auto,)
    two = jax.make_mesh((2,), ("d",), axis_types=auto, devices=jax.devices()[:2])
    apart = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x[None], acting(*args)),
        mesh=two,
        in_specs=P(),
        out_specs=P("d"),
        check_vma=False,
    )
    behind = two_roles.pipelined(collect, learn, two_roles.role_mesh())
    made = {
        "one device": one,
        "acting alone": acting,
        "acting on each": apart,
        "roles": lambda learner, carry, keys: behind(learner, carry, (keys, keys)),
    }
    if batch > 1:
        made["split"] = jax.shard_map(
            lambda *args: one(*args, n=batch // 2, axis="d"),
            mesh=two,
            in_specs=(P(), P("d"), P()),
            out_specs=(P(), P("d")),
            check_vma=False,
        )
    programs = {name: jax.jit(fn).lower(learner, carry, keys).compile() for name, fn in made.items()}
    begin = os.getloadavg()[0]
    seconds = interleaved(programs, (learner, carry, keys), 3 * rounds, time.perf_counter, min)
    whole, acted = seconds["one device"], seconds["acting alone"]
    found = {
        "size": name,
        "timesteps": length,
        "environments": batch,
        "acting": round(acted / whole, 2),
        # An iteration of two roles takes as long as the longer of them.
        "bound_of_roles": round(whole / max(acted, whole - acted), 2),
        "two_that_exchange_nothing": round(2 * acted / seconds["acting on each"], 2),
        **{f"{way}_over_one": round(whole / seconds[way], 2) for way in ("roles", "split") if way in seconds},
        "ms_an_iteration": {name: round(1e3 * s / iterations, 2) for name, s in seconds.items()},
        "load": [round(begin, 1), round(os.getloadavg()[0], 1)],
    }
    print(found, flush=True)
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
