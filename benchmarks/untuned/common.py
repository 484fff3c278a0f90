"""What the workloads share: layers, keys, environments and returns, as plain JAX of one timestep or of ``[T, B]``;
and how a program that acts is called."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx


class Step(NamedTuple):
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


# -- layers ----------------------------------------------------------------------------------------------------------


def dense(key, rows, columns):
    return {"w": jax.random.normal(key, (rows, columns)) / np.float32(np.sqrt(rows)), "b": jnp.zeros(columns)}


def linear(p, x):
    return x @ p["w"] + p["b"]


def mlp_params(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [dense(k, i, o) for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def mlp(layers, x, activation=jnp.tanh):
    for layer in layers[:-1]:
        x = activation(linear(layer, x))
    return linear(layers[-1], x)


def first_joined(nets, obs, activation=jnp.tanh):
    """Logits and values of the networks ``pi`` and ``v``, whose first layers are one product."""
    first = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), nets["pi"][0], nets["v"][0])
    actor, critic = jnp.split(activation(linear(first, obs)), 2, -1)
    return mlp(nets["pi"][1:], actor, activation), mlp(nets["v"][1:], critic, activation)[..., 0]


def columns(layers, x, activation=jnp.tanh):
    """The network with features first, rows innermost: ``x[features, N]`` to ``[outputs, N]``."""
    *hidden, last = layers
    for layer in hidden:
        x = activation(layer["w"].T @ x + layer["b"][:, None])
    return last["w"].T @ x + last["b"][:, None]


def pick(values, index):
    """``values[..., index]``, for an index of every row."""
    return jnp.take_along_axis(values, index[..., None], -1)[..., 0]


# -- random numbers: what the programs of rlfx draw ------------------------------------------------------------------


def named(key, text):
    words = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4")
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


def shared_stream(key):
    """The one key of all environments: ``t.shared_key`` but for t."""
    return jax.random.fold_in(named(key, b"t.key"), jnp.uint32(0xFFFFFFFF))


def streams(key, batch, *names):
    """Keys ``[B]`` for each name: ``t.key_for(name)`` but for t."""

    def stream(name):
        of_name = named(key, b"t.key_for:" + name.encode())
        return jax.vmap(lambda b: jax.random.fold_in(of_name, 2 * b + 1))(jnp.arange(batch, dtype=jnp.uint32))

    return tuple(map(stream, names))


def at(keys, t):
    """The keys ``[B]`` of a stream at timestep t."""
    return jax.vmap(lambda k: jax.random.fold_in(k, jnp.uint32(2) * t.astype(jnp.uint32)))(keys)


def normals(key, name, length, batch, shape):
    """Normal numbers ``[T, B, *shape]`` of a stream."""
    (keys,) = streams(key, batch, name)
    return jax.vmap(lambda t: jax.vmap(lambda k: jax.random.normal(k, shape))(at(keys, t)))(jnp.arange(length))


def categorical(keys, logits):
    return jax.vmap(jax.random.categorical)(keys, stop_gradient(logits))


def squashed(p, obs, noise):
    """A squashed normal: the action and its log-probability."""
    mean, log_std = jnp.split(mlp(p, obs, jax.nn.relu), 2, -1)
    log_std = jnp.clip(log_std, -5.0, 2.0)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), log_prob.sum(-1)


def mapped(critics, obs, action):
    """All critics by `jax.vmap` over their stacked weights: ``[members, ...]``."""
    x = jnp.concatenate([obs, action], -1)
    return jax.vmap(lambda p: mlp(p, x, jax.nn.relu)[..., 0])(critics)


def member(nets, i):
    """One network of several that are stacked."""
    return jax.tree.map(lambda w: w[i], nets)


def one_by_one(critics, obs, action):
    x = jnp.concatenate([obs, action], -1)
    members = critics[0]["w"].shape[0]
    return jnp.stack([mlp(member(critics, i), x, jax.nn.relu)[..., 0] for i in range(members)])


def twins_joined(critics, obs, action):
    """Two critics whose first layers are one product: ``[2, ...]``."""
    first, *rest = critics
    w = jnp.concatenate([first["w"][0], first["w"][1]], -1)
    h = jax.nn.relu(jnp.concatenate([obs, action], -1) @ w + first["b"].reshape(-1))
    parts = jnp.split(h, 2, -1)
    return jnp.stack([mlp(member(rest, i), x, jax.nn.relu)[..., 0] for i, x in enumerate(parts)])


def by_rlfx(program, length, batch):
    """Loss, its gradient, and the last carry, of a program that acts."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, carry, key):
        (loss, (carry, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(p, carry, key)
        return loss, grads, carry

    return run


def learner_by_rlfx(program, length, batch):
    """Loss and its gradient, of a program that learns from data: with respect to parameters, and not to others beside them."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, others, data, key=None):
        return jax.value_and_grad(lambda p: loss_fn(((p, others), data), jnp.zeros(batch), key)[0])(p)

    return run


def actor_by_rlfx(program, length, batch):
    """Loss, its gradient with respect to the first parameters, and the last carry, of a program that goes on from a carry."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, others, carry, key):
        loss = lambda p: loss_fn((p, others), carry, key)  # noqa: E731
        (found, (carry, _)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, carry

    return run


# -- returns over [T, B] ---------------------------------------------------------------------------------------------


def known_of(data):
    """1.0 where what came next is the next timestep, of ``truncated[T, B]``."""
    return (~data["truncated"]).astype(jnp.float32).at[-1].set(0.0)


def episodes(k, size, obs, actions):
    """Stored ones ``[T, B]`` of some numbers and actions, by four keys; ``first``: of the timestep that an episode begins at."""
    done = (jax.random.uniform(k[0], size) < 0.05).at[-1].set(True)
    return {
        "obs": jax.random.normal(k[1], (*size, obs)), "action": jax.random.randint(k[2], size, 0, actions), "done": done,
        "first": jnp.concatenate([jnp.ones_like(done[:1]), done[:-1]]), "reward": jax.random.normal(k[3], size),
    }  # fmt: skip


def shifted(x, last):
    """The value at t + 1: ``x[1:]`` and then ``last``."""
    return jnp.concatenate([x[1:], last[None]])


def discounted(delta, decay, unroll=1):
    """``a[t] = delta[t] + decay[t] * a[t + 1]``."""

    def body(a, x):
        a = x[0] + x[1] * a
        return a, a

    return jax.lax.scan(body, jnp.zeros_like(delta[0]), (delta, decay), reverse=True, unroll=unroll)[1]


def gae(value, last, reward, done, gamma, lam, unroll=1):
    going = 1.0 - done.astype(jnp.float32)
    delta = reward + gamma * going * shifted(value, last) - value
    return discounted(delta, gamma * lam * going, unroll)


def vtrace(value, last, log_rho, data, gamma):
    """V-trace's targets and advantages; ``last``: the value after the end."""
    going, clipped = 1.0 - data["done"].astype(jnp.float32), jnp.minimum(jnp.exp(log_rho), 1.0)
    delta = clipped * (data["reward"] + gamma * going * shifted(value, last) - value)
    target = value + discounted(delta, gamma * going * clipped)
    return target, clipped * (data["reward"] + gamma * going * shifted(target, last) - value)


def actor_critic_loss(logits, value, log_prob, advantage, target, entropy_bonus=0.01):
    """Of each point: ``logits[..., A]``, and the rest ``[...]``."""
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return 0.5 * (value - target) ** 2 - log_prob * advantage - entropy_bonus * entropy


def rows_of(tree):
    """``[T, B, ...]`` as ``[T * B, ...]``."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def acted_by_environments(acted, given, length, envs):
    """``acted(given) -> (state, data[T, B])`` of ``envs`` environments after the others; None: of all at once."""
    if not envs:
        return acted(given)
    parts = jax.tree.map(lambda x: x.reshape(-1, envs, *x.shape[1:]), given)
    state, data = jax.lax.map(acted, parts)
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)
    return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(length, -1, *x.shape[3:]), data)


def summed_gradient(loss, params, parts):
    """Value and gradient of ``loss(params, part)`` summed over the leading axis of ``parts``, one part at a time."""

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

    return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)[0]


def in_chunks(tree, chunk):
    """``[T, ...]`` as ``[T // chunk, chunk, ...]``."""
    return jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), tree)


def gradient_by_environments(loss, chunk=None):
    """Value and gradient of ``loss(params, (data [T, B, ...], states [B, ...]))``, summed over parts of some environments."""

    def run(params, data, states):
        if chunk is None:
            return jax.value_and_grad(loss)(params, (data, states))
        data = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0), data)
        return summed_gradient(loss, params, (data, in_chunks(states, chunk)))

    return run


# -- environments, of one environment each; both start new episodes by themselves ---------------------------------------


def cartpole_reset(key):
    return {"x": jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), "count": jnp.int32(0)}


def cartpole_step(key, state, action):
    x, speed, angle, turn = state["x"]
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pushed = (force + 0.05 * turn**2 * sin) / 1.1
    turning = (9.8 * sin - cos * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    moving = pushed - 0.05 * turning * cos / 1.1
    new = jnp.stack([x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning])
    count = state["count"] + 1
    done = (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.2095) | (count >= 500)
    start = cartpole_reset(key)
    state = {"x": jnp.where(done, start["x"], new), "count": jnp.where(done, 0, count)}
    return stop_gradient(state), Step(jnp.float32(1.0), done, jnp.zeros_like(done))


def drift_reset(size):
    """A cheap environment of ``size`` numbers, all observed."""
    return lambda key: {"x": jax.random.normal(key, (size,)), "count": jnp.int32(0)}


def drift_step(size, limit):
    """Its step: the action moves all numbers; an episode ends at ``limit`` timesteps or where the first is above 0.9."""

    def step(key, state, action):
        push = 0.05 * (jnp.sum(action.astype(jnp.float32)) - 1.5)
        x = jnp.tanh(0.95 * state["x"] + 0.1 * jnp.roll(state["x"], 1) + push)
        count = state["count"] + 1
        done = (x[0] > 0.9) | (count >= limit)
        new = {"x": jnp.where(done, jax.random.normal(key, (size,)), x), "count": jnp.where(done, 0, count)}
        return stop_gradient(new), Step(-jnp.mean(x**2), done, jnp.zeros_like(done))

    return step


def batch_of(reset, batch, seed=1):
    return jax.vmap(reset)(jax.random.split(jax.random.key(seed), batch))
