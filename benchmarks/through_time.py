"""Backpropagation through time: rlfx's plans against the usual programs by hand. Ratios first.

    python benchmarks/through_time.py [--length 1024] [--batch 64] [--hidden 128] [--cell gru lstm gru2] [--rounds 5] [--out FILE]
    python benchmarks/through_time.py --devices 2 ...        environments split over two host devices, a core each

A recurrent actor-critic whose episodes are reset inside the rollout: `gru`, `lstm`, or two layers `gru2`. By hand: `two pass`
acts, and runs the recurrence again under `jax.grad`; `one pass` differentiates the acting loop; `checkpointed` is the former in
chunks of 32 timesteps under `jax.checkpoint`. All draw the same numbers, and their losses and gradients are compared before
anything is timed. One core, interleaved, medians of CPU time; temporary bytes are XLA's own, of a device. With several devices
the programs by hand are sharded by `jax.jit`, and times are of the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import recorded

import rlfx
from rlfx.errors import MemoryBudgetError

OBS, ACTIONS, GAMMA, LAMBDA, EPISODE, CHUNK = 8, 4, 0.99, 0.95, 50, 32


def dense(key, rows, columns):
    return {"w": jax.random.normal(key, (rows, columns)) / np.sqrt(rows), "b": jnp.zeros(columns)}


def linear(p, x):
    return x @ p["w"] + p["b"]


def gru(p, h, x):
    xr, xz, xn = jnp.split(linear(p["x"], x), 3, -1)
    hr, hz, hn = jnp.split(linear(p["h"], h), 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    return z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def lstm(p, state, x):
    c, h = state
    i, f, g, o = jnp.split(linear(p["x"], x) + linear(p["h"], h), 4, -1)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def gru_memory(p, state, x):
    state = gru(p["0"], state, x)
    return state, state


def lstm_memory(p, state, x):
    state = lstm(p["0"], state, x)
    return state, state[1]


def gru2_memory(p, state, x):
    first = gru(p["0"], state[0], x)
    second = gru(p["1"], state[1], first)
    return (first, second), second


#: ``(memory, gates of a layer, layers, leaves of state)``.
CELLS = {"gru": (gru_memory, 3, 1, 1), "lstm": (lstm_memory, 4, 1, 2), "gru2": (gru2_memory, 3, 2, 2)}


def weights(cell, hidden):
    _, gates, layers, _ = CELLS[cell]
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * layers))
    memory = {}
    for i in range(layers):
        rows = {"x": OBS if i == 0 else hidden, "h": hidden}
        memory[str(i)] = {name: dense(next(keys), n, gates * hidden) for name, n in rows.items()}
    return {"memory": memory, "policy": dense(next(keys), hidden, ACTIONS), "value": dense(next(keys), hidden, 1)}


def zero_state(cell, lead, hidden):
    leaves = CELLS[cell][3]
    return jnp.zeros((*lead, hidden)) if leaves == 1 else (jnp.zeros((*lead, hidden)),) * leaves


def act(p, cell, carry, key):
    """One timestep of one environment: its observation, action and value, and what follows."""
    obs, count, state = carry
    state, h = CELLS[cell][0](p["memory"], state, obs)
    logits, value = linear(p["policy"], h), linear(p["value"], h)[..., 0]
    choice, noise = jax.random.split(key)
    action = jax.random.categorical(choice, jax.lax.stop_gradient(logits))
    moved = 0.95 * obs + 0.1 * jax.nn.one_hot(action, OBS) + 0.1 * jax.random.normal(noise, (OBS,))
    done = count == EPISODE - 1
    state = jax.tree.map(lambda x: jnp.where(done, 0.0, x), state)
    carry = jnp.where(done, 0.0, moved), jnp.where(done, 0, count + 1), state
    return jax.lax.stop_gradient(carry[:2]) + carry[2:], (obs, action, logits, value, moved[0], done)


def point_loss(logits, action, value, advantage, target):
    log_prob = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_prob) * log_prob, -1)
    chosen = jnp.take_along_axis(log_prob, action[..., None], -1)[..., 0]
    return 0.5 * (value - target) ** 2 - chosen * advantage - 0.01 * entropy


def program(cell):
    def timestep(p, carry, t):
        carry, (_, action, logits, value, reward, done) = act(p, cell, carry, t.key)
        values, going = rlfx.series(value), rlfx.series(1.0 - done)
        delta = rlfx.series(reward + GAMMA * going[t] * values[t + 1] - value)
        advantage = rlfx.discounted_sum(delta[t:], GAMMA * LAMBDA * going[t:])
        advantage = jax.lax.stop_gradient(advantage)
        return point_loss(logits, action, value, advantage, jax.lax.stop_gradient(value) + advantage), carry

    return timestep


def by_rlfx(cell, length, batch, **options):
    fn = rlfx.compile(program(cell), length=length, batch=batch, **options)
    return jax.value_and_grad(lambda p, carry, key: fn(p, carry, key)[0]), fn


def keys_of(key, length, batch):
    """The keys that rlfx gives: of every timestep and environment."""
    fn = rlfx.unroll(lambda _, c, t: (c, t.key), length=length, batch=batch)
    return fn(None, None, key)[1]


def by_hand(cell, length, batch, form):
    step = jax.vmap(act, (None, None, 0, 0))
    memory = jax.vmap(CELLS[cell][0], (None, 0, 0))

    def rollout(p, carry, keys):
        return jax.lax.scan(lambda c, k: step(p, cell, c, k), carry, keys)

    def advantages(p, carry, value, reward, done):
        _, h = memory(p["memory"], carry[2], carry[0])
        last = jax.lax.stop_gradient(linear(p["value"], h)[..., 0])
        value, going = jax.lax.stop_gradient(value), 1.0 - done
        delta = reward + GAMMA * going * jnp.concatenate([value[1:], last[None]]) - value
        back = lambda a, x: (x[0] + GAMMA * LAMBDA * x[1] * a,) * 2  # noqa: E731
        return jax.lax.scan(back, jnp.zeros(batch), (delta, going), reverse=True)[1]

    def one_pass(p, carry, keys):
        def loss(p):
            after, (_, action, logits, value, reward, done) = rollout(p, carry, keys)
            advantage = jax.lax.stop_gradient(advantages(p, after, value, reward, done))
            return point_loss(logits, action, value, advantage, jax.lax.stop_gradient(value) + advantage).mean()

        return jax.value_and_grad(loss)(p)

    def two_pass(p, carry, keys, chunk=None):
        after, (obs, action, _, value, reward, done) = rollout(p, carry, keys)
        advantage = advantages(p, after, value, reward, done)
        target = value + advantage

        def learn(p, state, xs):
            obs, done, action, advantage, target = xs

            def body(state, x):
                state, h = memory(p["memory"], state, x[0])
                return jax.tree.map(lambda s: jnp.where(x[1][:, None], 0.0, s), state), h

            state, h = jax.lax.scan(body, state, (obs, done))
            value = linear(p["value"], h)[..., 0]
            return state, point_loss(linear(p["policy"], h), action, value, advantage, target).sum()

        xs = obs, done, action, advantage, target

        def loss(p):
            if chunk is None:
                return learn(p, carry[2], xs)[1] / (length * batch)
            parts = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), xs)
            again = jax.checkpoint(lambda state, x: learn(p, state, x), prevent_cse=False)
            return jax.lax.scan(again, carry[2], parts)[1].sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    forms = {"one pass": one_pass, "two pass": two_pass, "checkpointed": lambda *a: two_pass(*a, chunk=CHUNK)}
    return lambda p, carry, key: forms[form](p, carry, keys_of(key, length, batch))


def compare(cell, length, batch, hidden, rounds, mesh):
    clock = time.process_time if mesh is None else time.perf_counter
    start = jnp.zeros((batch, OBS)), jnp.zeros(batch, jnp.int32), zero_state(cell, (batch,), hidden)
    if mesh is not None:
        start = jax.device_put(start, jax.NamedSharding(mesh, jax.P("b")))
    arguments = weights(cell, hidden), start, jax.random.key(1)
    full, at_once = by_rlfx(cell, length, batch, plan=rlfx.Plan(), mesh=mesh)
    candidates, plans = {"at once": full}, {"at once": rlfx.Plan()}
    whole = at_once.explain(*arguments, measure=True).measured_bytes
    candidates["default"], fn = by_rlfx(cell, length, batch, mesh=mesh)
    plans["default"] = fn.plan(*arguments)
    for share in (8, 16, 32):
        name, began = f"budget 1/{share}", time.process_time()
        candidate, fn = by_rlfx(cell, length, batch, memory_budget=whole // share, mesh=mesh)
        try:
            plans[name] = fn.plan(*arguments)
        except MemoryBudgetError as error:
            print(f"  {name}: {error}", flush=True)
            continue
        candidates[name] = candidate
        print(f"  {name} planned in {time.process_time() - began:.1f} s: {plans[name]!r}", flush=True)
    candidates |= {form: by_hand(cell, length, batch, form) for form in ("two pass", "one pass", "checkpointed")}
    rows, programs, results = {}, {}, {}
    for name, candidate in candidates.items():
        began = time.process_time()
        programs[name] = jax.jit(candidate).lower(*arguments).compile()
        rows[name] = {"compile_s": round(time.process_time() - began, 2), "plan": repr(plans.get(name, ""))}
        rows[name]["temp_mib"] = round(programs[name].memory_analysis().temp_size_in_bytes / 2**20, 2)
        results[name] = jax.block_until_ready(programs[name](*arguments))
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(results["two pass"]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5, err_msg=name)
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            began = clock()
            jax.block_until_ready(run(*arguments))
            times[name].append(clock() - began)
    best = min(statistics.median(times[n]) for n in ("two pass", "one pass", "checkpointed"))
    for name, row in rows.items():
        median = statistics.median(times[name])
        row |= {
            "of_best_by_hand": round(median / best, 3),
            "of_at_once": round(median / statistics.median(times["at once"]), 3),
        }
        row |= {
            "memory_of_at_once": round(row["temp_mib"] / rows["at once"]["temp_mib"], 4),
            "ms": round(1e3 * median, 2),
        }
        print(f"  {cell} {name:12} {row}", flush=True)
    return {"cell": cell, "T": length, "B": batch, "H": hidden, "devices": 1 if mesh is None else mesh.size, "programs": rows}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    mesh = rlfx.use_all_cores(args.devices) if args.devices > 1 else None
    if mesh is None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = [compare(cell, args.length, args.batch, args.hidden, args.rounds, mesh) for cell in args.cell]
    if args.out:
        recorded.write(args.out, recorded.about("through_time") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
