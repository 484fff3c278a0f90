"""Recurrent PPO on CartPole-v1 without velocities: a GRU policy, minibatches of whole sequences.

Notice that there are two programs. `act` is the rollout; the GRU's state is part of the carry. `learn` goes over stored
sequences, which come in as `rlfx.inputs`, and its loss is differentiated through time. `axis="b"` of `minibatch_epochs`
keeps every environment's sequence whole, and the compiled `learn` is called inside the update like any other function.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from loops import descent, falling_adam
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx.envs

LENGTH, ENVS, EPOCHS, MINIBATCHES, UPDATES = 128, 16, 4, 4, 250
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE, HIDDEN = 0.99, 0.99, 0.2, 0.01, 1e-3, 32
# Lambda is that high because a cart that leaves the track began to long before: at 0.95 a policy drifts outwards unseen.
AVERAGE = 0.02  # of the new weights, at each update, in those that are evaluated: the last ones fall now and then
REWARD_SCALE = 0.02  # values of the size of log-probabilities: the actor and the critic share the memory
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held

env = rlfx.envs.make("CartPole-v1")


# -- the policy


def init_gru(key, inputs, hidden):
    w, u = jax.random.split(key)
    init = jax.nn.initializers.orthogonal()
    return {"w": init(w, (inputs, 3 * hidden)), "u": init(u, (hidden, 3 * hidden)), "b": jnp.zeros(3 * hidden)}


def gru(params, h, x):
    """``h[hidden], x[inputs] -> h[hidden]`` (Cho et al. 2014)."""
    xr, xz, xn = jnp.split(x @ params["w"] + params["b"], 3)
    hr, hz, hn = jnp.split(h @ params["u"], 3)
    z = jax.nn.sigmoid(xz + hz)
    return z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def init_params(key, hidden=HIDDEN):
    keys = jax.random.split(key, 4)
    return {
        "embed": init_mlp(keys[0], (2, hidden), 2**0.5),
        "gru": init_gru(keys[1], hidden, hidden),
        "actor": init_mlp(keys[2], (hidden, hidden, 2), 0.01),
        "critic": init_mlp(keys[3], (hidden, hidden, 1)),
    }


def positions(obs):
    """The observation without velocities, which have to be remembered; on a common scale."""
    return jnp.stack([obs[0], 30.0 * obs[2]])


def policy(params, h, obs):
    """``(h, log-probabilities, value)``."""
    h = gru(params["gru"], h, jnp.tanh(mlp(params["embed"], obs)))
    return h, jax.nn.log_softmax(mlp(params["actor"], h)), mlp(params["critic"], h)[0]


# -- acting


class Carry(NamedTuple):
    state: object
    h: jax.Array


class Sample(NamedTuple):
    obs: jax.Array
    first: jax.Array  # whether an episode begins here
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def act(params, carry, t):
    obs = positions(env.observe(carry.state))
    h, log_probs, value = policy(params, carry.h, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), carry.state, action)

    next_value = rlfx.next_value(lambda obs: policy(params, h, positions(obs))[2], step, value)
    scaled = step.replace(reward=REWARD_SCALE * step.reward)
    advantage = rlfx.gae(scaled, value, next_value, gamma=GAMMA, lam=LAMBDA)

    sample = Sample(obs, carry.state.time == 0, action, log_probs[action], advantage, advantage + value)
    return Carry(state, jnp.where(step.done, 0.0, h)), (sample, step.terminated)


# -- learning: the same policy over stored sequences


def learn(params, h, t):
    params, samples = params
    sample = rlfx.inputs(samples)[t]
    h, log_probs, value = policy(params, jnp.where(sample.first, 0.0, h), sample.obs)

    advantage = (sample.advantage - rlfx.mean(sample.advantage)) / (rlfx.std(sample.advantage) + 1e-8)
    ratio = jnp.exp(log_probs[sample.action] - sample.log_prob)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    return 0.25 * (value - sample.target) ** 2 - surrogate - ENTROPY * entropy, h


def make_update(optimizer, *, length, batch, epochs=EPOCHS, minibatches=MINIBATCHES, mesh=None):
    """``update((params, opt_state, carry), key) -> (..., falls per 1,000 steps)``."""
    rollout = rlfx.unroll(act, length=length, batch=batch, mesh=mesh)
    loss_fn = rlfx.compile(learn, length=length, batch=batch // minibatches, mesh=mesh)

    def loss(params, minibatch):
        samples, h = minibatch
        return loss_fn((params, samples), h[0])[0]

    def update(agent, key):
        params, opt_state, carry = agent
        act_key, shuffle_key = jax.random.split(key)
        after, (samples, fell) = rollout(params, carry, act_key)
        h = carry.h[None].repeat(length, axis=0)  # what the sequences begin with travels with them
        (params, opt_state), _ = rlfx.minibatch_epochs(
            descent(loss, optimizer), (params, opt_state), (samples, h), epochs=epochs, minibatches=minibatches,
            key=shuffle_key, axis="b", mesh=mesh,
        )  # fmt: skip
        return (params, opt_state, after), 1000 * fell.mean()

    return update


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    carry: Any
    average: Any  # of the parameters


def greedy(agent, h, obs, key):
    """The policy that is evaluated: its memory is its own, and begins with zeros, as at every reset."""
    h, log_probs, _ = policy(agent.average, h, positions(obs))
    return jnp.argmax(log_probs).astype(jnp.int32), h


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=HIDDEN, mesh=None):
    optimizer = falling_adam(LEARNING_RATE, updates * EPOCHS * MINIBATCHES)
    one = make_update(optimizer, length=length, batch=envs, mesh=mesh)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = init_params(params_key, hidden)
        state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), Carry(state, jnp.zeros((envs, hidden))), params)

    def update(agent, key):
        following, falls = one(agent[:3], key)
        average = optax.incremental_update(following[0], agent.average, AVERAGE)
        return Agent(*following, average), {"falls per 1,000 steps": falls}

    return Recipe(
        "recurrent_ppo", env, init, update, greedy, updates, 5, 10, length * envs, BAR, memory=jnp.zeros(hidden)
    )


if __name__ == "__main__":
    sys.exit(main(make))
