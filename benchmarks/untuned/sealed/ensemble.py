"""REDQ on stored sequences: many critics, targets of n steps by the smaller of two of them, an actor that pleases all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, ALPHA, STEPS = 12, 3, 0.99, 0.2, 3


def params_of(key, members, hidden):
    k = jax.random.split(key)
    critic = lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1))  # noqa: E731
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS))
    return {"actor": actor, "critics": jax.vmap(critic)(jax.random.split(k[1], members))}


def in_a_loop(critics, obs, action):
    x = jnp.concatenate([obs, action], -1)
    return jax.lax.map(lambda p: c.mlp(p, x, jax.nn.relu)[..., 0], critics)


def first_joined(critics, obs, action):
    """For rows ``[N, ...]``: features first, so that the first layers of all critics are one product without a copy."""
    x = jnp.concatenate([obs, action], -1).T
    first, second, last = critics
    members, inputs, hidden = first["w"].shape
    w = jnp.swapaxes(first["w"], 1, 2).reshape(members * hidden, inputs)
    h = jax.nn.relu((w @ x).reshape(members, hidden, -1) + first["b"][..., None])
    h = jax.nn.relu(jnp.swapaxes(second["w"], 1, 2) @ h + second["b"][..., None])
    return (jnp.swapaxes(last["w"], 1, 2) @ h)[:, 0] + last["b"]


def two_of(target, pair):
    return jax.tree.map(lambda w: w[pair], target)


def point_loss(p, x, action, log_prob, aim, critics=c.mapped):
    error = 0.5 * ((critics(p["critics"], x["obs"], x["action"]) - aim) ** 2).sum(0)
    return error + ALPHA * log_prob - critics(stop_gradient(p["critics"]), x["obs"], action).mean(0)


def program(params, carry, t):
    (p, target, pair), data = params
    x = rlfx.inputs(data)[t]
    action, log_prob = c.squashed(p["actor"], x["obs"], jax.random.normal(t.key_for("noise"), (ACTIONS,)))
    soft = c.mapped(two_of(target, pair), x["obs"], action).min(0) - ALPHA * log_prob
    soft = rlfx.series(stop_gradient(soft), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = stop_gradient(rlfx.n_step_return(step, soft[t + 1], gamma=GAMMA, n=STEPS))
    return point_loss(p, x, action, log_prob, aim), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, target, pair, data, key):
        loss = lambda p: loss_fn(((p, target, pair), data), jnp.zeros(batch), key)[0]  # noqa: E731
        return jax.value_and_grad(loss)(p)

    return run


def by_hand(length, batch, critics=c.mapped, flat=True, once=False, chunk=None):
    """``once``: the policy is evaluated once, for the targets and for its loss; ``chunk``: timesteps of a block."""

    def run(p, target, pair, data, key):
        (keys,) = c.streams(key, batch, "noise")
        draw = jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))
        noise = jax.vmap(lambda t: draw(c.at(keys, t)))(jnp.arange(length))
        going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
        believed = two_of(target, pair)
        flatten = (lambda x: x) if not flat else c.rows_of

        def aims(action, log_prob):
            obs = flatten(data["obs"])
            soft = critics(believed, obs, action).min(0) - ALPHA * log_prob
            soft, ends = soft.reshape(length, batch), jnp.zeros(batch)
            aim = data["reward"] + going * c.shifted(soft, ends)
            for _ in range(STEPS - 1):
                aim = data["reward"] + going * c.shifted(aim, ends)
            return stop_gradient(flatten(aim))

        def loss_once(p):
            action, log_prob = c.squashed(p["actor"], flatten(data["obs"]), flatten(noise))
            aim = aims(stop_gradient(action), stop_gradient(log_prob))
            return point_loss(p, flatten(data), action, log_prob, aim, critics).mean()

        if once:
            return jax.value_and_grad(loss_once)(p)
        aim = aims(*c.squashed(p["actor"], flatten(data["obs"]), flatten(noise)))

        def loss(p, part):
            x, noise, aim = part
            action, log_prob = c.squashed(p["actor"], x["obs"], noise)
            return point_loss(p, x, action, log_prob, aim, critics).sum() / (length * batch)

        part = flatten(data), flatten(noise), aim
        if chunk is None:
            return jax.value_and_grad(loss)(p, part)
        return c.summed_gradient(loss, p, c.in_chunks(part, chunk * batch))

    return run


def workload(length, batch, members, hidden, chunk=4):
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    ones, joined = {"critics": c.one_by_one}, {"critics": first_joined}
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "not flattened": make(flat=False), "policy once": make(once=True),
        "one by one": make(**ones), "one by one, policy once": make(**ones, once=True),
        "in a loop, policy once": make(critics=in_a_loop, once=True),
        "features first, joined": make(**joined), "features first, joined, policy once": make(**joined, once=True),
        f"blocks of {chunk}": make(chunk=chunk), f"one by one, blocks of {chunk}": make(**ones, chunk=chunk),
        f"features first, joined, blocks of {chunk}": make(**joined, chunk=chunk),
    }  # fmt: skip
    p, target = params_of(k[4], members, hidden), params_of(k[5], members, hidden)["critics"]
    pair = jnp.asarray(np.array([1, members - 1], np.int32))
    return Workload(forms, (p, target, pair, data, jax.random.key(3)), tolerance=5e-6)
