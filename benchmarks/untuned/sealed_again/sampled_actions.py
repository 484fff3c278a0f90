"""MPO on stored sequences: actions sampled from an old policy, weighed by their values, are what the new policy is fitted to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

OBS, ACTIONS, GAMMA, LAMBDA, SLACK, NEAR = 10, 4, 0.99, 0.8, 0.1, 0.01


def params_of(key, hidden):
    k = jax.random.split(key)
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS))
    critic = c.mlp_params(k[1], (OBS + ACTIONS, hidden, hidden, 1))
    return {"actor": actor, "critic": critic, "heat": jnp.float32(1.0), "price": jnp.float32(0.5)}


def normal(p, obs):
    mean, spread = jnp.split(c.mlp(p["actor"], obs, jax.nn.elu), 2, -1)
    return mean, jax.nn.softplus(spread) + 0.01


def critic(p, obs, action):
    return c.mlp(p["critic"], jnp.concatenate([obs, action], -1), jax.nn.elu)[..., 0]


def log_prob(action, mean, std):
    return -(0.5 * ((action - mean) / std) ** 2 + jnp.log(std)).sum(-1)


def divergence(old, new):
    (mean, std), (other, spread) = old, new
    return (jnp.log(spread / std) + (std**2 + (mean - other) ** 2) / (2 * spread**2) - 0.5).sum(-1)


def fitted(weights, actions, mean, std):
    return -(weights * log_prob(actions, mean[..., None, :], std[..., None, :])).sum(-1)


def by_moments(weights, actions, mean, std):
    """The same from the weighed mean and deviation of the actions."""
    center = (weights[..., None] * actions).sum(-2)
    wide = (weights[..., None] * (actions - center[..., None, :]) ** 2).sum(-2)
    return (0.5 * (wide + (center - mean) ** 2) / std**2 + jnp.log(std)).sum(-1)


def point_loss(p, x, old, actions, q, aim, fit=fitted):
    """Of one point, or of rows: ``actions[..., K, ACTIONS]`` and their values ``q[..., K]``."""
    new = normal(p, x["obs"])
    heat, price = jax.nn.softplus(p["heat"]), jax.nn.softplus(p["price"])
    weights = jax.nn.softmax(q / stop_gradient(heat), -1)
    dual = heat * (SLACK + jax.nn.logsumexp(q / heat, -1) - np.log(q.shape[-1]))
    far = divergence(old, new)
    trust = stop_gradient(price) * far + price * (NEAR - stop_gradient(far))
    error = 0.5 * (critic(p, x["obs"], x["action"]) - aim) ** 2
    return fit(weights, actions, *new) + dual + trust + error


def program(samples):
    def mpo(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        mean, std = old = normal(target, x["obs"])
        actions = mean + std * jax.random.normal(t.key_for("actions"), (samples, ACTIONS))
        q = jax.vmap(lambda action: critic(target, x["obs"], action))(actions)
        value = rlfx.series(q.mean(), end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        aim = rlfx.lambda_return(step, value[t + 1], gamma=GAMMA, lam=LAMBDA)
        return point_loss(p, x, *stop_gradient((old, actions, q, aim))), carry

    return mpo


def by_rlfx(length, batch, samples):
    loss_fn = rlfx.compile(program(samples), length=length, batch=batch)

    def run(p, target, data, key):
        loss = lambda p: loss_fn(((p, target), data), jnp.zeros(batch), key)[0]  # noqa: E731
        return jax.value_and_grad(loss)(p)

    return run


# -- by hand: values ``[..., K]`` of ``actions[..., K, ACTIONS]``


def beside(p, obs, actions):
    """Every action beside a copy of the observation."""
    return critic(p, jnp.broadcast_to(obs[..., None, :], (*actions.shape[:-1], OBS)), actions)


def mapped(p, obs, actions):
    return jax.vmap(lambda action: critic(p, obs, action), -2, -1)(actions)


def in_rows(p, obs, actions):
    """The same as one matrix."""
    copies = jnp.broadcast_to(obs[..., None, :], (*actions.shape[:-1], OBS))
    both = jnp.concatenate([copies, actions], -1)
    return c.mlp(p["critic"], both.reshape(-1, OBS + ACTIONS), jax.nn.elu).reshape(actions.shape[:-1])


def split(p, obs, actions):
    """The observation's product is taken once for all actions."""
    first, second, last = p["critic"]
    seen = obs @ first["w"][:OBS] + first["b"]
    h = (actions.reshape(-1, ACTIONS) @ first["w"][OBS:]).reshape(*actions.shape[:-1], -1) + seen[..., None, :]
    h = c.linear(second, jax.nn.elu(h).reshape(-1, h.shape[-1]))
    return c.linear(last, jax.nn.elu(h)).reshape(actions.shape[:-1])


def in_a_loop(p, obs, actions):
    """One action of every point at a time."""
    first, second, last = p["critic"]
    seen = obs @ first["w"][:OBS] + first["b"]

    def of(action):
        h = jax.nn.elu(seen + action @ first["w"][OBS:])
        return c.linear(last, jax.nn.elu(c.linear(second, h)))[..., 0]

    return jnp.moveaxis(jax.lax.map(of, jnp.moveaxis(actions, -2, 0)), 0, -1)


def features_first(p, obs, actions):
    """For rows ``[N, ...]``: pairs of an action and a point are innermost."""
    first, second, last = p["critic"]
    seen = first["w"][:OBS].T @ obs.T + first["b"][:, None]
    h = (first["w"][OBS:].T @ actions.reshape(-1, ACTIONS).T).reshape(-1, *actions.shape[:-1]) + seen[..., None]
    h = second["w"].T @ jax.nn.elu(h).reshape(h.shape[0], -1) + second["b"][:, None]
    return (last["w"].T @ jax.nn.elu(h) + last["b"][:, None]).reshape(actions.shape[:-1])


def by_hand(length, batch, samples, judge=beside, flat=True, chunk=None, back=False, fit=fitted, late=False):
    """``chunk``: timesteps of a block; ``back``: one loop backwards over blocks draws, values, and learns; ``late``: numbers are
    drawn in it."""

    def run(p, target, data, key):
        (keys,) = c.streams(key, batch, "actions")
        draw = jax.vmap(lambda k: jax.random.normal(k, (samples, ACTIONS)))
        drawn = jax.vmap(lambda t: draw(c.at(keys, t)))
        going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
        flatten = c.rows_of if flat else lambda x: x
        times, mean = jnp.arange(length), 1.0 / (length * batch)

        def old_of(obs, noise):
            old = normal(target, obs)
            actions = old[0][..., None, :] + old[1][..., None, :] * noise
            return old, actions, judge(target, obs, actions)

        def loss(p, part):
            x, old, actions, q, aim = part
            return mean * point_loss(p, x, old, actions, q, aim, fit).sum()

        def aims(value, reward, going, after):
            """Of a block, whose next value and return are ``after``."""

            def body(after, x):
                value, reward, going = x
                aim = reward + going * ((1.0 - LAMBDA) * after[0] + LAMBDA * after[1])
                return (value, aim), aim

            return jax.lax.scan(body, after, (value, reward, going), reverse=True)

        ends = jnp.zeros(batch), jnp.zeros(batch)
        if back:

            def body(state, block):
                after, total = state
                x, going, times, noise = block
                noise = drawn(times) if noise is None else noise
                old, actions, q = old_of(*c.rows_of((x["obs"], noise)))
                after, aim = aims(q.mean(-1).reshape(-1, batch), x["reward"], going, after)
                found = jax.value_and_grad(loss)(p, (c.rows_of(x), old, actions, q, aim.reshape(-1)))
                return (after, jax.tree.map(jnp.add, total, found)), None

            blocks = c.in_chunks((data, going, times, None if late else drawn(times)), chunk)
            total = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            return jax.lax.scan(body, (ends, total), blocks, reverse=True)[0][1]

        x, noise = flatten((data, drawn(times)))
        if chunk is None:
            old, actions, q = old_of(x["obs"], noise)
        else:
            made = jax.lax.map(lambda part: old_of(*part), c.in_chunks((x["obs"], noise), chunk * batch))
            old, actions, q = c.rows_of(made)
        aim = flatten(aims(q.mean(-1).reshape(length, batch), data["reward"], going, ends)[1])
        part = x, old, actions, q, aim
        if chunk is None:
            return jax.value_and_grad(loss)(p, part)
        return c.summed_gradient(loss, p, c.in_chunks(part, chunk * batch))

    return run


def workload(length, batch, samples, hidden, chunk=4):
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.normal(k[1], (*size, ACTIONS)),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, samples, **how)  # noqa: E731
    back = {"back": True, "fit": by_moments, "chunk": 1}
    forms = {
        "rlfx": by_rlfx(length, batch, samples), "plain": make(judge=mapped), "beside": make(), "not flattened": make(flat=False),
        "one matrix": make(judge=in_rows), "split": make(judge=split), "split, by moments": make(judge=split, fit=by_moments),
        "in a loop, by moments": make(judge=in_a_loop, fit=by_moments),
        "features first, by moments": make(judge=features_first, fit=by_moments),
        f"blocks of {chunk}": make(judge=in_rows, chunk=chunk),
        f"split, by moments, blocks of {chunk}": make(judge=split, fit=by_moments, chunk=chunk),
        f"split, by moments, blocks of {chunk}, threefry unrolled": make(judge=split, fit=by_moments, chunk=chunk),
        f"in a loop, by moments, blocks of {chunk}, threefry unrolled": make(judge=in_a_loop, fit=by_moments, chunk=chunk),
        f"split, back by {chunk}, threefry unrolled": make(judge=split, **back | {"chunk": chunk}),
        "split, back by 1, threefry unrolled": make(judge=split, **back),
        "split, back by 1": make(judge=split, **back), "features first, back by 1": make(judge=features_first, **back),
        f"features first, back by {chunk}": make(judge=features_first, **back | {"chunk": chunk}),
        "features first, back by 1, threefry unrolled": make(judge=features_first, **back),
        "features first, back by 1, drawn there, threefry unrolled": make(judge=features_first, **back, late=True),
        "split, back by 1, drawn there, threefry unrolled": make(judge=split, **back, late=True),
    }  # fmt: skip
    given = params_of(k[4], hidden), params_of(k[5], hidden), data
    unrolled = *given, jax.random.key(3, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(3)), own, tolerance=5e-6)
