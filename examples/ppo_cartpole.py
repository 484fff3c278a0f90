"""PPO on CartPole-v1 from a program of one timestep. `make demo` runs it.

Notice `act`: one step of one environment, and the advantage of what was done there. There is no loop over time, no
batch axis, no reverse scan for the advantages and no extra call of the critic after the rollout. `rlfx.next_value` and
`rlfx.gae` read the next timestep; rlfx finds out what has to run inside the acting loop, what runs for all timesteps at
once, and what runs backwards. Everything is one pure function, so a whole update is one jitted call.
"""

import argparse
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from networks import actor, critic, init_actor_critic
from tqdm import tqdm

import rlfx.envs

LENGTH, EPOCHS, MINIBATCHES, UPDATES_PER_CALL = 128, 4, 4, 5
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 2.5e-3
SOLVED = 475.0  # mean return of the last 100 episodes

env = rlfx.envs.make("CartPole-v1")  # starts new episodes by itself; final_obs is the true last observation


# -- the program: one timestep of one environment


class Carry(NamedTuple):
    """What one timestep hands to the next."""

    state: object
    score: jax.Array  # the return of the episode so far


class Sample(NamedTuple):
    """What the learner needs of one timestep."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def act(params, carry, t):
    obs = env.observe(carry.state)
    log_probs, value = actor(params, obs), critic(params, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), carry.state, action)

    next_value = rlfx.next_value(lambda obs: critic(params, obs), step, value)  # value[t + 1], but at truncations
    advantage = rlfx.gae(step, value, next_value, gamma=GAMMA, lam=LAMBDA)

    score = carry.score + step.reward
    sample = Sample(obs, action, log_probs[action], advantage, advantage + value)
    return Carry(state, jnp.where(step.done, 0.0, score)), (sample, (score, step.done))


# -- the learner: PPO's loss on a minibatch of samples, and 4 epochs of 4 minibatches


def ppo_loss(params, sample):
    log_probs = jax.vmap(partial(actor, params))(sample.obs)
    value = jax.vmap(partial(critic, params))(sample.obs)
    log_prob = jnp.take_along_axis(log_probs, sample.action[:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - sample.log_prob)
    advantage = (sample.advantage - sample.advantage.mean()) / (sample.advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    value_error = (value - sample.target) ** 2
    return (0.25 * value_error - surrogate - ENTROPY * entropy).mean()


def make_update(rollout, optimizer, mesh=None):
    """``update((params, opt_state, carry), key) -> ((params, opt_state, carry), (score, done))``."""

    def learn(learner, sample):
        params, opt_state = learner
        updates, opt_state = optimizer.update(jax.grad(ppo_loss)(params, sample), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def update(agent, key):
        params, opt_state, carry = agent
        act_key, shuffle_key = jax.random.split(key)
        carry, (samples, episodes) = rollout(params, carry, act_key)
        (params, opt_state), _ = rlfx.minibatch_epochs(
            learn, (params, opt_state), samples, epochs=EPOCHS, minibatches=MINIBATCHES, key=shuffle_key, mesh=mesh
        )
        return (params, opt_state, carry), episodes

    return update


# -- training


def init_agent(key, optimizer, envs):
    params_key, env_key = jax.random.split(key)
    params = init_actor_critic(params_key, (4, 64, 64, 2))
    carry = Carry(jax.vmap(env.reset)(jax.random.split(env_key, envs)), jnp.zeros(envs))
    return params, optimizer.init(params), carry


def make_optimizer(updates):
    schedule = optax.linear_schedule(LEARNING_RATE, 0.0, updates * EPOCHS * MINIBATCHES)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))


def train(train_step, agent, keys, *, label="", quiet=False):
    """Run every call; returns the curve: rows of (env-steps, seconds, mean return of the last 100 episodes)."""
    envs, recent, curve, begin = agent[2].score.size, deque(maxlen=100), [], time.perf_counter()
    calls = tqdm(keys, desc=label, unit="call", disable=quiet)
    for i, call_keys in enumerate(calls, start=1):
        agent, (score, done) = train_step(agent, call_keys)
        recent.extend(np.asarray(score)[np.asarray(done)])
        steps, seconds = i * len(call_keys) * LENGTH * envs, time.perf_counter() - begin
        curve.append((steps, seconds, np.mean(recent) if recent else np.nan))
        calls.set_postfix_str(f"return {curve[-1][2]:.0f}, {steps / seconds:,.0f} env-steps/s")
    return np.array(curve)


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed, curve in curves.items():
        axes.plot(curve[:, 0], curve[:, 2], label=f"seed {seed}")
    axes.axhline(SOLVED, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="environment steps", ylabel="mean return of the last 100 episodes", title="PPO on CartPole-v1")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--plot", type=Path, default=Path("out/ppo_cartpole.png"))
    args = parser.parse_args(argv)

    mesh = rlfx.use_all_cores(batch=args.envs)  # the environments, and every minibatch, are split over the cores
    rollout = rlfx.unroll(act, length=LENGTH, batch=args.envs, mesh=mesh)
    optimizer = make_optimizer(args.updates)
    update = make_update(rollout, optimizer, mesh)
    train_step = jax.jit(lambda agent, keys: jax.lax.scan(update, agent, keys))
    agent = init_agent(jax.random.key(0), optimizer, args.envs)
    print(rollout.explain(agent[0], agent[2]), "\n")

    calls = max(1, args.updates // UPDATES_PER_CALL)
    begin = time.perf_counter()
    train_step = train_step.lower(agent, jax.random.split(jax.random.key(0), UPDATES_PER_CALL)).compile()
    print(f"compiled in {time.perf_counter() - begin:.1f} s; {UPDATES_PER_CALL} updates a call")

    curves = {}
    for seed in args.seed:
        agent_key, train_key = jax.random.split(jax.random.key(seed))
        agent = init_agent(agent_key, optimizer, args.envs)
        keys = jax.random.split(train_key, (calls, UPDATES_PER_CALL))
        curves[seed] = train(train_step, agent, keys, label=f"seed {seed}")
    plot(curves, args.plot)

    solved = {seed: curve[curve[:, 2] >= SOLVED] for seed, curve in curves.items()}
    for seed, rows in solved.items():
        when = f"{rows[0, 1]:.1f} s, {rows[0, 0]:,.0f} env-steps" if len(rows) else "not reached"
        print(f"seed {seed}: mean return {SOLVED:.0f}: {when}; at the end {curves[seed][-1, 2]:.0f}")
    print(f"\nlearning curve: {args.plot.resolve()}")
    print(
        "next: examples/recurrent_ppo.py and examples/dqn.py; other sizes: examples/ppo_cartpole.py --help; docs/language.md"
    )
    return 0 if all(len(rows) for rows in solved.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
