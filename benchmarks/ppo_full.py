"""PPO on CartPole, 4 epochs of 4 minibatches, T=128: rlfx against PureJaxRL's own file. Ratios first.

    python benchmarks/ppo_full.py --purejaxrl PATH [--envs 4 64 256] [--rounds 7] [--out FILE.json]   # on one core
    python benchmarks/ppo_full.py --purejaxrl PATH --cores 2 [...]                                    # on two

PATH is a git clone of https://github.com/luchris429/purejaxrl (see `purejaxrl.py`: which commit, what is adapted). The
algorithm is PureJaxRL's in every respect: networks, clipped value loss, minibatch-normalised advantages, global-norm
clipping, annealed Adam, and time limits treated as terminations. A run of either is one jitted call that starts from
random parameters and trains for a number of updates; the programs are interleaved in one process. Figures are
environment steps a second, per core (process CPU time; the process is pinned to one core) and, with `--cores 2`, by the
clock. `rlfx` has rlfx's own CartPole and unrolled threefry keys, `rlfx, gymnax` gymnax's CartPole, as the peer does,
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import purejaxrl
import recorded

import rlfx
import rlfx.envs
from rlfx.threefry import threefry

LENGTH, EPOCHS, MINIBATCHES = 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, NORM = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


# -- the program: one timestep of one environment, one minibatch


class Carry(NamedTuple):
    state: Any
    score: jax.Array  # the return of the episode so far


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array


class Ended(NamedTuple):
    """A step whose time limits count as terminations, as PureJaxRL has it."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def mlp(layers, x):
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        x = jnp.tanh(x @ w + b)
    return x @ w_out + b_out


def heads(params, obs):
    """Log-probabilities [..., actions] and values [...]."""
    return jax.nn.log_softmax(mlp(params["actor"], obs)), mlp(params["critic"], obs)[..., 0]


def init_params(key, inputs, actions, hidden=64):
    def layers(key, out, last_scale):
        sizes = (inputs, hidden, hidden, out)
        scales = (2**0.5, 2**0.5, last_scale)
        shapes = zip(jax.random.split(key, 3), scales, sizes[:-1], sizes[1:], strict=True)
        return [(jax.nn.initializers.orthogonal(g)(k, (i, o)), jnp.zeros(o)) for k, g, i, o in shapes]

    actor, critic = jax.random.split(key)
    return {"actor": layers(actor, actions, 0.01), "critic": layers(critic, 1, 1.0)}


def make_act(env):
    def act(params, carry, t):
        obs = jnp.ravel(env.observe(carry.state)).astype(jnp.float32)
        log_probs, value = heads(params, obs)
        action = jax.random.categorical(t.key_for("action"), log_probs)
        state, step = env.step(t.key_for("env"), carry.state, action)
        done = step.terminated | step.truncated
        value = rlfx.series(value)
        advantage = rlfx.gae(Ended(step.reward, done, done), value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
        score = carry.score + step.reward
        sample = Sample(obs, action, log_probs[action], value[t], advantage)
        return Carry(state, jnp.where(done, 0.0, score)), (sample, (score, done))

    return act


def ppo_loss(params, sample):
    log_probs, value = heads(params, sample.obs)
    log_prob = jnp.take_along_axis(log_probs, sample.action[:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - sample.log_prob)
    advantage = (sample.advantage - sample.advantage.mean()) / (sample.advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    target = sample.advantage + sample.value
    clipped = sample.value + jnp.clip(value - sample.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return (VALUE * value_loss - surrogate - ENTROPY * entropy).mean()


def make_train(
    env: Any,
    envs: int,
    updates: int,
    *,
    rate: float = 2.5e-4,
    mesh: Any = None,
    transform: Any = None,
    **epochs: Any,
) -> Callable:
    """``train(key) -> (agent, (score, done))``; each of the latter is [updates, T, envs]."""
    rollout = rlfx.unroll(make_act(env), length=LENGTH, batch=envs, mesh=mesh, transform=transform)
    schedule = lambda count: rate * (1 - (count // (EPOCHS * MINIBATCHES)) / updates)  # noqa: E731
    optimizer = optax.chain(optax.clip_by_global_norm(NORM), optax.adam(schedule, eps=1e-5))

    def learn(learner, sample):
        params, state = learner
        grads, state = optimizer.update(jax.grad(ppo_loss)(params, sample), state, params)
        return (optax.apply_updates(params, grads), state), None

    def update(agent, key):
        learner, carry = agent
        act_key, shuffle_key = jax.random.split(key)
        carry, (samples, episodes) = rollout(learner[0], carry, act_key)
        learner, _ = rlfx.minibatch_epochs(
            learn,
            learner,
            samples,
            epochs=EPOCHS,
            minibatches=MINIBATCHES,
            key=shuffle_key,
            mesh=mesh,
            **epochs,
        )
        return (learner, carry), episodes

    def train(key):
        params_key, env_key, train_key = jax.random.split(key, 3)
        params = init_params(params_key, int(np.prod(env.observation_space.shape)), env.action_space.n)
        carry = Carry(jax.vmap(env.reset)(jax.random.split(env_key, envs)), jnp.zeros(envs))
        agent = ((params, optimizer.init(params)), carry)
        return jax.lax.scan(update, agent, jax.random.split(train_key, updates))

    return train


# -- measuring


def programs(checkout: str, envs: int, updates: int, mesh: Any) -> dict[str, tuple[Callable, jax.Array]]:
    """Of each program: ``train``, and a key of the kind it takes."""
    own, gymnax = rlfx.envs.make("CartPole-v1"), rlfx.envs.make("gymnax/CartPole-v1")
    key = jax.random.key(0, impl=threefry)
    theirs = purejaxrl.make_train(checkout, NUM_ENVS=envs, TOTAL_TIMESTEPS=envs * LENGTH * updates)
    found = {
        "PureJaxRL": (theirs, jax.random.PRNGKey(0)),
        "rlfx": (make_train(own, envs, updates), key),
        "rlfx, gymnax": (make_train(gymnax, envs, updates), key),
    }
    if mesh is not None:
        found[f"rlfx, {mesh.size} devices"] = (make_train(own, envs, updates, mesh=mesh), key)
    return found


def measure(found: dict, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """``steps`` are the environment steps of one call."""
    rows, runs = {}, {}
    for name, (train, key) in found.items():
        start = time.perf_counter()
        lowered = jax.jit(train).lower(key)
        traced = time.perf_counter()
        runs[name] = lowered.compile(), key
        rows[name] = {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}
        jax.block_until_ready(runs[name][0](key))
    times: dict[str, list] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (run, key) in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(key))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    first = next(iter(found))
    for name, row in rows.items():
        for i, clock in enumerate(("wall", "cpu")):
            row[f"{clock}_steps_per_s"] = steps / statistics.median(pair[i] for pair in times[name])
            row[f"{clock}_ratio"] = statistics.median(
                theirs[i] / ours[i] for theirs, ours in zip(times[first], times[name], strict=True)
            )
        total = row["trace_s"] + row["compile_s"]
        row["compile_ratio"] = total / (rows[first]["trace_s"] + rows[first]["compile_s"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--purejaxrl", required=True)
    parser.add_argument("--envs", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of one timed call, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peer's imports
    if args.cores == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    mesh = rlfx.use_all_cores(args.cores) if args.cores > 1 else None
    results = []
    for envs in args.envs:
        updates = max(2, args.steps // (envs * LENGTH))
        rows = measure(programs(args.purejaxrl, envs, updates, mesh), envs * LENGTH * updates, args.rounds)
        print(
            f"{envs} environments, {updates} updates a call: faster than PureJaxRL by (medians of {args.rounds} rounds)"
        )
        for name, r in rows.items():
            print(
                f"  {name:16} cpu {r['cpu_ratio']:.2f}x  wall {r['wall_ratio']:.2f}x | env-steps/s "
                f"{r['cpu_steps_per_s'] / 1e3:.0f}k a core, {r['wall_steps_per_s'] / 1e3:.0f}k by the clock | trace "
                f"{r['trace_s']:.2f} s, compile {r['compile_s']:.2f} s ({r['compile_ratio']:.2f}x)",
                flush=True,
            )
        results.append({"environments": envs, "updates": updates, "rounds": args.rounds, "programs": rows})
    if args.out:
        record = recorded.about("ppo_full", purejaxrl=purejaxrl.COMMIT) | {
            "cores": args.cores,
            "results": results,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
