"""REINFORCE with n-step returns, and Monte Carlo, B=512: rlfx against hand-written JAX; memory against the length.

    python benchmarks/nstep_reinforce.py [--n 8 32 64 0] [--batch 512] [--rounds 7] [--cores 2] [--out FILE.json]
    python benchmarks/nstep_reinforce.py --memory [--lengths 250 1000 4000 8000] [--n 32 0] [--out FILE.json]
    python benchmarks/nstep_reinforce.py --seeds 1 16 128 [--batch 16] [--out FILE.json]

n = 0 is Monte Carlo. TimeRL's workload: 48 floats an observation, tanh MLP of 2 x 64, T=250, environment and networks of
`ppo_timerl.py`. `hand` is the single-jit program an expert writes: rollout, n-step returns, the loss on everything.
`--memory` compiles only, and prints XLA's temporary bytes. `--seeds` is the cost of a seed when vmapped over many.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import ppo_timerl as timerl
import recorded

import rlfx


def reinforce(n):
    """One timestep of one environment: -log pi(a) times the return of the next n rewards."""

    def act(params, state, t):
        logits = timerl.mlp(params["pi"], state["x"])
        action = jax.lax.stop_gradient(jax.random.categorical(t.key_for("action"), logits))
        state, step = timerl.env_step(t.key_for("env"), state, action)
        reward, going = rlfx.series(step.reward, end=0.0), rlfx.series(_discount(step), end=0.0)
        ahead = slice(t, None) if n == 0 else slice(t, t + n)
        gain = jax.lax.stop_gradient(rlfx.discounted_sum(reward[ahead], going[ahead]))
        return -jax.nn.log_softmax(logits)[action] * gain, state

    return act


def _discount(step):
    return timerl.GAMMA * (1 - (step.terminated | step.truncated).astype(jnp.float32))


def by_rlfx(n, length, batch, mesh=None):
    loss_fn = rlfx.compile(reinforce(n), length=length, batch=batch, mesh=mesh)

    def iteration(params, state, key):
        (loss, (state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, key)
        return (loss, grads), state

    return iteration


def by_hand(n, length, batch):
    def keys(key, name, t):
        return timerl.keys_of(key, name, jnp.arange(batch), t)

    def iteration(params, state, key):
        def act(state, t):
            obs = state["x"]
            action = jax.vmap(jax.random.categorical)(keys(key, "action", t), timerl.mlp(params["pi"], obs))
            state, step = jax.vmap(timerl.env_step)(keys(key, "env", t), state, action)
            return state, (obs, action, step.reward, _discount(step))

        state, (obs, action, reward, going) = jax.lax.scan(act, state, jnp.arange(length))
        if n == 0:
            back = lambda g, x: (x[0] + x[1] * g,) * 2  # noqa: E731
            _, gain = jax.lax.scan(back, jnp.zeros(batch), (reward, going), reverse=True)
        else:
            pad = lambda x: jnp.concatenate([x, jnp.zeros((n, batch))])  # noqa: E731
            rewards, goings, gain = pad(reward), pad(going), jnp.zeros((length, batch))
            for k in reversed(range(n)):
                gain = rewards[k : k + length] + goings[k : k + length] * gain

        # XLA:CPU is slow at weight gradients that contract over two axes: the learner sees rows.
        obs, action, gain = (x.reshape((-1,) + x.shape[2:]) for x in (obs, action, gain))

        def loss(params):
            log_probs = jax.nn.log_softmax(timerl.mlp(params["pi"], obs))
            return -jnp.mean(jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0] * gain)

        return jax.value_and_grad(loss)(params), state

    return iteration


def arguments(batch, hidden=64):
    params = timerl.init(jax.random.key(0), hidden)
    state = jax.vmap(timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
    return params, state, jax.random.key(2)


def name_of(n):
    return f"n={n}" if n else "Monte Carlo"


def speed(args, mesh):
    for n in args.n:
        programs = {"hand": by_hand(n, args.length, args.batch), "rlfx": by_rlfx(n, args.length, args.batch)}
        if mesh is not None:
            programs[f"rlfx on {mesh.size} devices"] = by_rlfx(n, args.length, args.batch, mesh)
        rows = timerl.measure(programs, arguments(args.batch), args.rounds)
        print(f"{name_of(n)}, T={args.length}, B={args.batch}: ratios to hand-written, medians of {args.rounds} rounds")
        for name, r in rows.items():
            print(
                f"  {name:18} wall {r['wall_ratio']:5.2f}x  cpu {r['cpu_ratio']:5.2f}x | {r['wall_ms']:7.1f} ms  temp "
                f"{r['temp_mb']:6.1f} MB a device  compile {r['compile_s']:.2f} s ({r['compile_ratio']:.2f}x)",
                flush=True,
            )
        yield {"n": n, "T": args.length, "B": args.batch, "rounds": args.rounds, "programs": rows}


def memory(args):
    for n in args.n:
        for length in args.lengths:
            row = {}
            for name, make in (("hand", by_hand), ("rlfx", by_rlfx)):
                run = jax.jit(make(n, length, args.batch)).lower(*arguments(args.batch)).compile()
                row[name] = run.memory_analysis().temp_size_in_bytes / 1e6
            print(f"{name_of(n)}, T={length}: temp MB hand {row['hand']:.1f}, rlfx {row['rlfx']:.1f}", flush=True)
            yield {"n": n, "T": length, "B": args.batch, "temp_mb": row}


def seeds(args):
    """Process CPU time of one seed, of an iteration vmapped over many seeds."""
    n = args.n[0]
    params, state, _ = arguments(args.batch)
    for count in args.seeds:
        keys = jax.random.split(jax.random.key(3), count)
        runs, times = {}, {"hand": [], "rlfx": []}
        for name, make in (("hand", by_hand), ("rlfx", by_rlfx)):
            fn = jax.vmap(make(n, args.length, args.batch), in_axes=(None, None, 0))
            runs[name] = jax.jit(fn).lower(params, state, keys).compile()
        for _ in range(args.rounds):
            for name, run in runs.items():
                begin = time.process_time()
                jax.block_until_ready(run(params, state, keys))
                times[name].append((time.process_time() - begin) / count)
        row = {name: 1e3 * statistics.median(t) for name, t in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["rlfx"], times["hand"], strict=True))
        print(
            f"{count:4} seeds: cpu ms a seed, hand {row['hand']:.2f}, rlfx {row['rlfx']:.2f} ({ratio:.2f}x)", flush=True
        )
        yield {"n": n, "T": args.length, "B": args.batch, "seeds": count, "cpu_ms_per_seed": row, "ratio": ratio}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32, 64, 0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 1000, 4000, 8000])
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--out")
    args = parser.parse_args()
    mesh = rlfx.use_all_cores(args.cores) if args.cores > 1 else None
    results = list(memory(args) if args.memory else seeds(args) if args.seeds else speed(args, mesh))
    if args.out:
        record = recorded.about(
            "nstep_reinforce " + ("memory" if args.memory else "seeds" if args.seeds else "speed")
        ) | {
            "results": results,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
