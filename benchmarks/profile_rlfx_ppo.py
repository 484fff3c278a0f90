"""The PPO of `profile_workloads` as a per-timestep program that rlfx compiles: same sizes, losses and operations."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from profile_workloads import ALGORITHMS, mlp, mlp_init

import rlfx
import rlfx.envs
from rlfx.profile import operation

CONFIG = ALGORITHMS["PPO"]


class Sample(NamedTuple):
    """What the learner needs of one timestep."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def build(n: int = 16):
    """`(train state, iterate, environment steps an iteration)`, compiled and warmed up."""
    env = rlfx.envs.make("gymnax/CartPole-v1")
    opt = optax.adam(3e-4)

    def act(params, state, t):
        with operation("inference"):
            obs = env.observe(state)
            logits = jax.nn.log_softmax(mlp(params["pi"], obs))
            action = jax.random.categorical(t.key_for("action"), logits)
            value = mlp(params["v"], obs)[0]
        with operation("simulation"):
            state, step = env.step(t.key_for("env"), state, action)
        with operation("advantages"):
            next_value = rlfx.next_value(lambda obs: mlp(params["v"], obs)[0], step, value)
            advantage = rlfx.gae(step, value, next_value, gamma=0.99, lam=0.95)
        return state, Sample(obs, action, logits[action], advantage, advantage + value)

    def loss(params, s):
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(mlp(params["pi"], s.obs)), s.action[:, None], axis=1)[:, 0]
        ratio = jnp.exp(log_prob - s.log_prob)
        clipped = jnp.clip(ratio, 1 - CONFIG.clip, 1 + CONFIG.clip)
        value = mlp(params["v"], s.obs)[:, 0]
        policy = -jnp.minimum(ratio * s.advantage, clipped * s.advantage).mean()
        return policy + 0.5 * ((value - s.target) ** 2).mean()

    def learn(learner, sample):
        params, opt_state = learner
        grads = jax.grad(loss)(params, sample)
        updates, opt_state = opt.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    rollout = rlfx.unroll(act, length=CONFIG.steps, batch=n)

    @jax.jit
    def iterate(train):
        params, opt_state, state, key = train
        with operation("rollout"):
            key, act_key, learn_key = jax.random.split(key, 3)
            state, samples = rollout(params, state, act_key)
        with operation("backpropagation"):
            (params, opt_state), _ = rlfx.minibatch_epochs(
                learn, (params, opt_state), samples, epochs=CONFIG.epochs, minibatches=CONFIG.minibatches, key=learn_key
            )
        return params, opt_state, state, key

    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    h = CONFIG.hidden
    params = {"pi": mlp_init(k1, (4, h, h, 2)), "v": mlp_init(k2, (4, h, h, 1))}
    train = params, opt.init(params), jax.vmap(env.reset)(jax.random.split(k3, n)), k4
    for _ in range(2):
        train = jax.block_until_ready(iterate(train))
    return train, iterate, CONFIG.steps * n
