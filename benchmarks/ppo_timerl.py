"""TimeRL's workload: one-epoch PPO, T=250, 48-float observations, tanh MLP, one jit an iteration; rlfx against hand-written JAX.

    python benchmarks/ppo_timerl.py [--batch 64 512] [--hidden 64] [--rounds 15] [--compilations 5] [--cores 2] [--cached]
                                     [--out FILE.json]

Programs for the same mathematics, interleaved in one process: `hand` is the single-jit program that an expert writes
(rollout, then the loss on all of it, forward recomputed), `hand-chunked` the same with gradients accumulated over 10
timesteps at a time, `rlfx` the per-timestep function below, on one device (and on all, with --cores), and `rlfx, at once`
the same without the blocks that its plan chooses. Prints ratios first; losses and gradients are compared before anything
is timed. Tracing and compilation are medians of --compilations, each from cleared caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import recorded

import rlfx
from rlfx.recurrence.language.context import name_words

LENGTH, OBS, ACTIONS, GAMMA, LAM = 250, 48, 4, 0.99, 0.95


class Step(NamedTuple):
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array


def env_reset(key):
    return {"x": jax.random.normal(key, (OBS,)), "n": jnp.int32(0)}


def env_step(key, state, action):
    """A noisy linear system with 48 observed floats: cheap, and its observations are real arrays."""
    noise = jax.random.normal(key, (OBS,))
    x = 0.9 * state["x"] + 0.1 * jnp.roll(state["x"], 1) + 0.1 * noise + 0.05 * (action.astype(jnp.float32) - 1.5)
    n = state["n"] + 1
    terminated, truncated = jnp.abs(x[0]) > 2.5, n >= 100
    done = terminated | truncated
    new = {"x": jnp.where(done, noise, x), "n": jnp.where(done, 0, n)}
    return jax.lax.stop_gradient(new), Step(-jnp.mean(x**2), terminated, truncated, x)


def init(key, hidden):
    keys = jax.random.split(key, 6)

    def dense(k, i, o):
        return {"w": jax.random.normal(k, (i, o)) / np.float32(np.sqrt(i)), "b": jnp.zeros(o)}

    sizes = (OBS, hidden, hidden)
    trunk = [list(zip(sizes, (*sizes[1:], out), strict=True)) for out in (ACTIONS, 1)]
    return {
        "pi": [dense(k, *io) for k, io in zip(keys[:3], trunk[0], strict=True)],
        "v": [dense(k, *io) for k, io in zip(keys[3:], trunk[1], strict=True)],
    }


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def critic(params, obs):
    return mlp(params["v"], obs)[..., 0]


def point_loss(logits, value, log_prob, old, advantage, target):
    ratio = jnp.exp(log_prob - old)
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1)
    return policy + 0.5 * (value - target) ** 2 - 0.01 * entropy


def ppo(params, state, t):
    """One timestep of one environment."""
    obs = state["x"]
    logits, value = mlp(params["pi"], obs), critic(params, obs)
    action = jax.lax.stop_gradient(jax.random.categorical(t.key_for("action"), logits))
    state, step = env_step(t.key_for("env"), state, action)
    log_prob = jax.nn.log_softmax(logits)[action]
    next_value = rlfx.next_value(lambda o: critic(params, o), step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, next_value, gamma=GAMMA, lam=LAM))
    target = advantage + jax.lax.stop_gradient(value)
    scaled = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    return point_loss(logits, value, log_prob, jax.lax.stop_gradient(log_prob), scaled, target), state


def keys_of(key, name, environments, t):
    """Those that ``t.key_for(name)`` gives these environments: the hand-written programs draw the same numbers."""
    named = functools.reduce(jax.random.fold_in, name_words(name), key)
    return jax.vmap(lambda b: jax.random.fold_in(jax.random.fold_in(named, 2 * b + 1), 2 * t))(environments)


def hand_written(batch, chunk=None, mesh=None):
    """The same mathematics by hand; ``chunk`` timesteps of the learner at a time; the environments split over a mesh."""
    devices = 1 if mesh is None else mesh.size
    local = batch // devices

    def over_devices(x):
        return x if mesh is None else jax.lax.pmean(x, "b")

    def keys(key, name, t):
        first = 0 if mesh is None else jax.lax.axis_index("b") * local
        return keys_of(key, name, first + jnp.arange(local), t)

    def iteration(params, state, key):
        def act(state, t):
            obs = state["x"]
            logits, value = mlp(params["pi"], obs), critic(params, obs)
            action = jax.vmap(jax.random.categorical)(keys(key, "action", t), logits)
            state, step = jax.vmap(env_step)(keys(key, "env", t), state, action)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            cut = jax.lax.cond(
                step.truncated.any(), lambda: critic(params, step.final_obs), lambda: jnp.zeros_like(value)
            )
            return state, (obs, action, value, log_prob, step.reward, step.terminated, step.truncated, cut)

        state, (obs, action, value, old, reward, terminated, truncated, cut) = jax.lax.scan(
            act, state, jnp.arange(LENGTH)
        )
        following = jnp.concatenate([value[1:], critic(params, state["x"])[None]])
        following = jnp.where(truncated & ~terminated, cut, following)
        delta = reward + GAMMA * (1 - terminated.astype(jnp.float32)) * following - value
        going = GAMMA * LAM * (1 - (terminated | truncated).astype(jnp.float32))
        _, advantage = jax.lax.scan(
            lambda a, dg: (dg[0] + dg[1] * a,) * 2, jnp.zeros(local), (delta, going), reverse=True
        )
        mean = over_devices(advantage.mean())
        scaled = (advantage - mean) / (jnp.sqrt(over_devices(((advantage - mean) ** 2).mean())) + 1e-8)
        data = (obs, action, old, scaled, advantage + value)

        def loss(params, data):
            obs, action, old, scaled, target = data
            logits, value = mlp(params["pi"], obs), critic(params, obs)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
            return jnp.sum(point_loss(logits, value, log_prob, old, scaled, target)) / (LENGTH * local)

        # XLA:CPU is slow at weight gradients that contract over two axes: the learner sees rows.
        if chunk is None:
            rows = jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), data)
            return over_devices(jax.value_and_grad(loss)(params, rows)), state

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        parts = jax.tree.map(lambda x: x.reshape((LENGTH // chunk, chunk * local) + x.shape[2:]), data)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return over_devices(jax.lax.scan(add, zero, parts)[0]), state

    if mesh is None:
        return iteration
    whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("b")
    return jax.shard_map(
        iteration, mesh=mesh, in_specs=(whole, split, whole), out_specs=(whole, split), check_vma=False
    )


def compiled_by_rlfx(batch, mesh=None, *, plan=None, cached=False, transform=None):
    """The program above; ``cached``: its plan, and wide products are kept for the learner."""
    chosen = rlfx.compile(ppo, length=LENGTH, batch=batch, mesh=mesh, plan=plan, transform=transform)

    def iteration(params, state, key):
        loss_fn = chosen
        if cached:
            plan = dataclasses.replace(chosen.plan(params, state, key), cached=True)
            loss_fn = rlfx.compile(ppo, length=LENGTH, batch=batch, mesh=mesh, plan=plan, transform=transform)
        (loss, (state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, key)
        return (loss, grads), state

    return iteration


def compilation(fn, arguments):
    """The compiled program, and the seconds that tracing and compiling took."""
    start = time.perf_counter()
    lowered = jax.jit(fn).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, (traced - start, time.perf_counter() - traced)


def measure(programs, arguments, rounds, compilations=1):
    """Trace, compile, check against the first program, time interleaved; medians."""
    rows, executables, first = {}, {}, None
    built = {name: [] for name in programs}
    for _ in range(compilations):
        for name, fn in programs.items():
            jax.clear_caches()  # nothing that was traced or compiled before is found again
            executables[name], seconds = compilation(fn, arguments)
            built[name].append(seconds)
    for name in programs:
        trace_s, compile_s = (statistics.median(s) for s in zip(*built[name], strict=True))
        temp_mb = executables[name].memory_analysis().temp_size_in_bytes / 1e6
        rows[name] = {"trace_s": trace_s, "compile_s": compile_s, "temp_mb": temp_mb}
        (loss, grads), _ = executables[name](*arguments)
        first = first or (loss, grads)
        for a, b in zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(first), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in executables.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arguments))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for name, pairs in times.items():
        rows[name]["wall_ms"] = 1e3 * statistics.median(w for w, _ in pairs)
        rows[name]["cpu_ms"] = 1e3 * statistics.median(c for _, c in pairs)
    for name in programs:
        ratios = lambda i, name=name: statistics.median(  # noqa: E731
            a[i] / b[i] for a, b in zip(times[name], times["hand"], strict=True)
        )
        rows[name]["wall_ratio"], rows[name]["cpu_ratio"] = ratios(0), ratios(1)
        rows[name]["compile_ratio"] = statistics.median(
            a / b for (_, a), (_, b) in zip(built[name], built["hand"], strict=True)
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compilations", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--cached", action="store_true", help="also with activation caching")
    parser.add_argument("--out")
    args = parser.parse_args()
    mesh = rlfx.use_all_cores(args.cores) if args.cores > 1 else None
    results = []
    for batch in args.batch:
        params = init(jax.random.key(0), args.hidden)
        state = jax.vmap(env_reset)(jax.random.split(jax.random.key(1), batch))
        programs = {
            "hand": hand_written(batch),
            "hand-chunked": hand_written(batch, 10),
            "rlfx": compiled_by_rlfx(batch),
            "rlfx, at once": compiled_by_rlfx(batch, plan=rlfx.Plan()),
        }
        if mesh is not None:
            programs[f"rlfx on {args.cores} devices"] = compiled_by_rlfx(batch, mesh)
        if args.cached:
            programs["rlfx, cached"] = compiled_by_rlfx(batch, cached=True)
        if args.cached and mesh is not None:
            programs[f"rlfx, cached, on {args.cores} devices"] = compiled_by_rlfx(batch, mesh, cached=True)
        rows = measure(programs, (params, state, jax.random.key(2)), args.rounds, args.compilations)
        print(
            f"T={LENGTH} B={batch} hidden={args.hidden}: ratios to hand-written, then medians of {args.rounds} rounds"
        )
        for name, r in rows.items():
            print(
                f"  {name:20} wall {r['wall_ratio']:5.2f}x  cpu {r['cpu_ratio']:5.2f}x | {r['wall_ms']:8.1f} ms wall "
                f"{r['cpu_ms']:8.1f} ms cpu  temp {r['temp_mb']:7.1f} MB  trace {r['trace_s']:.2f} s  "
                f"compile {r['compile_s']:.2f} s ({r['compile_ratio']:.2f}x)"
            )
        results.append({"T": LENGTH, "B": batch, "hidden": args.hidden, "rounds": args.rounds, "programs": rows})
    if args.out:
        record = recorded.about("ppo_timerl", rlfx="0.1.0") | {
            "results": results,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
