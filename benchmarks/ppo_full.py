"""PPO on CartPole, 4 epochs of 4 minibatches, T=128: rlfx against PureJaxRL's own file. Ratios first.

    python benchmarks/ppo_full.py --purejaxrl PATH [--envs 4 64 256] [--rounds 7] [--cores 2] [--out FILE.json]

PATH is a git clone of https://github.com/luchris429/purejaxrl (see `purejaxrl.py`: which commit, what is adapted). The
algorithm is PureJaxRL's in every respect: networks, clipped value loss, minibatch-normalised advantages, global-norm
clipping, annealed Adam, and time limits treated as terminations. A run of either is one jitted call that starts from
random parameters and trains for a number of updates; the programs are interleaved in one process. Figures are
environment steps a second, per core (process CPU time) and by the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import purejaxrl

import rlfx
import rlfx.envs

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


def make_train(env: Any, envs: int, updates: int, *, rate: float = 2.5e-4, mesh: Any = None, **epochs: Any) -> Callable:
    """``train(key) -> (agent, (score, done))``; each of the latter is [updates, T, envs]."""
    rollout = rlfx.unroll(make_act(env), length=LENGTH, batch=envs, mesh=mesh)
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
