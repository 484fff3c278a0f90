"""Retrace on long stored sequences of another policy: action values, a target network, few environments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, TEMPERATURE = 16, 6, 0.99, 0.95, 0.5
relu = jax.nn.relu


def expected(q, of_target):
    """The target policy's log-probabilities, and the value it expects."""
    log_pi = jax.nn.log_softmax(q / TEMPERATURE)
    return log_pi, (jnp.exp(log_pi) * of_target).sum(-1)


def program(params, after_end, t):
    """The carry is the value of what follows the data."""
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    q, of_target = c.mlp(p, x["obs"], relu), c.mlp(target, x["obs"], relu)
    log_pi, value = expected(q, of_target)
    value = rlfx.series(value, end=after_end)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    log_rho = log_pi[x["action"]] - x["log_mu"]
    aim = rlfx.retrace(step, of_target[x["action"]], value[t + 1], log_rho, gamma=GAMMA, lam=LAMBDA)
    return 0.5 * (q[x["action"]] - stop_gradient(aim)) ** 2, after_end


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, target, data, last):
        after_end = expected(c.mlp(p, last, relu), c.mlp(target, last, relu))[1]
        return jax.value_and_grad(lambda p: loss_fn(((p, target), data), stop_gradient(after_end))[0])(p)

    return run


def one_after_another(decay, delta, unroll=1):
    return c.discounted(delta, decay, unroll)


def associative(decay, delta):
    """The same recurrence in log T steps."""
    after = lambda later, now: (now[0] * later[0], now[0] * later[1] + now[1])  # noqa: E731
    return jax.lax.associative_scan(after, (decay, delta), reverse=True)[1]


def separate(p, target, obs):
    return c.mlp(p, obs, relu), c.mlp(target, obs, relu)


def features_first(p, target, obs):
    def net(layers, x):
        for i, layer in enumerate(layers):
            x = layer["w"].T @ x + layer["b"][:, None]
            x = relu(x) if i + 1 < len(layers) else x
        return x.T

    return net(p, obs.T), net(target, obs.T)


def by_hand(length, batch, nets=separate, recurrence=one_after_another, flat=True, chunk=None, kept=True):
    """``kept``: one evaluation of what is learned gives the policy of the targets as well."""

    def evaluated(p, target, obs):
        if not flat:
            return nets(p, target, obs)
        found = nets(p, target, obs.reshape(-1, OBS))
        return jax.tree.map(lambda x: x.reshape(*obs.shape[:2], ACTIONS), found)

    def targets(q, of_target, data, after_end):
        log_pi, value = expected(q, of_target)
        chosen, going = c.pick(of_target, data["action"]), GAMMA * (1.0 - data["done"].astype(jnp.float32))
        trace = LAMBDA * jnp.minimum(jnp.exp(c.pick(log_pi, data["action"]) - data["log_mu"]), 1.0)
        # G = r + going (v' + c' (G' - q')): of the excess e = G - q, with its own trace, e = (r + going v' - q) + going c' e'.
        delta = data["reward"] + going * c.shifted(value, after_end) - chosen
        return chosen + recurrence(going * c.shifted(trace, jnp.zeros(batch)), delta)

    error = lambda q, action, aim: (0.5 * (c.pick(q, action) - aim) ** 2).sum() / (length * batch)  # noqa: E731

    def run(p, target, data, last):
        after_end = expected(*nets(p, target, last))[1]
        if chunk is None:

            def loss(p):
                q, of_target = evaluated(p, target, data["obs"])
                return error(q, data["action"], stop_gradient(targets(q, of_target, data, after_end)))

            if kept:
                return jax.value_and_grad(loss)(p)
            aim = targets(*evaluated(p, target, data["obs"]), data, after_end)
            return jax.value_and_grad(lambda p: error(evaluated(p, p, data["obs"])[0], data["action"], aim))(p)

        rows = c.in_chunks(data, chunk)
        found = jax.lax.map(lambda obs: evaluated(p, target, obs), rows["obs"])
        aim = targets(*jax.tree.map(lambda x: x.reshape(length, batch, ACTIONS), found), data, after_end)
        loss = lambda p, x: error(evaluated(p, p, x[0])[0], *x[1:])  # noqa: E731
        return c.summed_gradient(loss, p, (rows["obs"], rows["action"], c.in_chunks(aim, chunk)))

    return run


def workload(length, batch, hidden, chunk=50):
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "log_mu": -1.8 + 0.2 * jax.random.normal(k[2], size), "reward": jax.random.normal(k[3], size),
        "done": jax.random.uniform(k[4], size) < 0.01,
    }  # fmt: skip
    net = lambda key: c.mlp_params(key, (OBS, hidden, hidden, ACTIONS))  # noqa: E731
    unrolled = lambda decay, delta: one_after_another(decay, delta, 8)  # noqa: E731
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "not flattened": make(flat=False),
        "unrolled by 8": make(recurrence=unrolled),
        "associative": make(recurrence=associative), "features first": make(nets=features_first, recurrence=unrolled),
        "evaluated twice": make(kept=False, recurrence=unrolled), f"blocks of {chunk}": make(chunk=chunk, recurrence=unrolled),
        f"blocks of {chunk}, features first": make(nets=features_first, chunk=chunk, recurrence=unrolled),
    }  # fmt: skip
    return Workload(forms, (net(k[5]), net(k[6]), data, jax.random.normal(k[7], (batch, OBS))))
