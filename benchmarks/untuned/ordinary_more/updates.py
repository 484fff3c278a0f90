"""Updates of policies and values: TRPO's conjugate gradients, UPGO, PPG's auxiliary phase, emphatic V-trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import relu, value_of

OBS, ACTIONS, GAMMA = 17, 6, 0.99

# -- TRPO: five iterations of conjugate gradients with products of the Fisher matrix, by the gradient of a slope of the divergence

ITERATIONS, DAMPING = 5, 0.1


def inner(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def plus(a, scale, b):
    return jax.tree.map(lambda x, y: x + scale * y, a, b)


def natural(surrogate, divergence, p):
    """The direction of the step, and how long it is in the metric: the surrogate itself is 0 here."""
    grads = jax.grad(surrogate)(p)

    def fisher(v):
        product = jax.grad(lambda p: inner(jax.grad(divergence)(p), v))(p)
        return plus(product, DAMPING, v)

    def body(state, _):
        x, r, d, rr = state
        product = fisher(d)
        step = rr / inner(d, product)
        x, r = plus(x, step, d), plus(r, -step, product)
        after = inner(r, r)
        return (x, r, plus(r, after / rr, d), after), None

    start = jax.tree.map(jnp.zeros_like, grads), grads, grads, inner(grads, grads)
    direction = jax.lax.scan(body, start, None, length=ITERATIONS)[0][0]
    return direction, inner(direction, fisher(direction))


def surrogate_of(log_p, old, action):
    return jnp.exp(c.pick(log_p, action) - stop_gradient(c.pick(old, action)))


def divergence_of(log_p, old):
    return (jnp.exp(old) * (old - log_p)).sum(-1)


def surrogate_program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    log_p = jax.nn.log_softmax(c.mlp(p, x["obs"]))
    going = rlfx.series(jnp.where(x["done"], 0.0, GAMMA))
    returns = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], going[t:])
    advantage = (returns - rlfx.mean(returns)) / (rlfx.std(returns) + 1e-8)
    return -surrogate_of(log_p, x["log_p"], x["action"]) * advantage, carry


def divergence_program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    return divergence_of(jax.nn.log_softmax(c.mlp(p, x["obs"])), x["log_p"]), carry


def trpo(length, batch, hidden):
    surrogate, divergence = (
        rlfx.compile(f, length=length, batch=batch) for f in (surrogate_program, divergence_program)
    )

    def by_rlfx(p, data):
        carry = jnp.zeros(batch)
        return natural(lambda p: surrogate((p, data), carry)[0], lambda p: divergence((p, data), carry)[0], p)

    def plain(p, data):
        def loss(p):
            returns = c.discounted(data["reward"], parts.going(data, GAMMA))
            advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
            return -(surrogate_of(logs(p), data["log_p"], data["action"]) * advantage).mean()

        logs = lambda p: jax.nn.log_softmax(c.mlp(p, data["obs"]))  # noqa: E731
        return natural(loss, lambda p: divergence_of(logs(p), data["log_p"]).mean(), p)

    p = c.mlp_params(jax.random.key(0), (OBS, hidden, hidden, ACTIONS))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    data["log_p"] = jax.nn.log_softmax(c.mlp(p, data["obs"]))
    return Workload({"rlfx": by_rlfx, "plain": plain}, (p, data), tolerance=1e-3)


# -- UPGO: the return goes on as long as what was done was better than expected


def upgo_losses(p, x, value, target, upgo):
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    ratio = jnp.minimum(jnp.exp(stop_gradient(c.pick(log_p, x["action"])) - x["log_prob"]), 1.0)
    policy = -ratio * stop_gradient(upgo - value) * c.pick(log_p, x["action"])
    return 0.5 * (value - stop_gradient(target)) ** 2 + policy + 0.01 * (jnp.exp(log_p) * log_p).sum(-1)


def upgo_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    value = value_of(p, x["obs"])
    last = value_of(p, x["last"])
    following = stop_gradient(rlfx.series(value, end=last)[t + 1])
    discount = jnp.where(x["done"], 0.0, GAMMA)
    better = rlfx.series(x["reward"] + discount * following >= stop_gradient(value), end=True)[t + 1]
    upgo = rlfx.solve(lambda g: x["reward"] + discount * jnp.where(better, g[t + 1], following), end=stop_gradient(last))
    target = rlfx.lambda_return(parts.step_of(x), following, gamma=GAMMA, lam=0.8)
    return upgo_losses(p, x, value, target, upgo), carry


def upgo_plain(p, _, data):
    value = value_of(p, parts.with_last(data))
    value, last = value[:-1], stop_gradient(value[-1])
    following, discount = stop_gradient(c.shifted(value, last)), parts.going(data, GAMMA)
    here = data["reward"] + discount * following >= stop_gradient(value)
    better = c.shifted(here, jnp.ones_like(here[0]))

    def body(state, x):
        reward, discount, following, better = x
        upgo = reward + discount * jnp.where(better, state[0], following)
        target = reward + discount * (0.2 * following + 0.8 * state[1])
        return (upgo, target), (upgo, target)

    _, (upgo, target) = jax.lax.scan(body, (last, last), (data["reward"], discount, following, better), reverse=True)
    return upgo_losses(p, data, value, target, upgo).mean()


def upgo(length, batch, hidden):
    p = parts.nets(jax.random.key(0), OBS, hidden, ACTIONS)
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["log_prob"] = -1.8 + 0.3 * jax.random.normal(jax.random.key(2), (length, batch))
    return parts.learner(upgo_program, parts.usual(upgo_plain), length, batch, p, (), data)


# -- PPG's auxiliary phase: values of the policy's features, while the policy stays what it was


def auxiliary_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "features": c.mlp_params(k[0], (OBS, hidden, hidden)), "pi": c.dense(k[1], hidden, ACTIONS),
        "aside": c.dense(k[2], hidden, 1), "v": c.mlp_params(k[3], (OBS, hidden, hidden, 1)),
    }  # fmt: skip


def auxiliary_loss(p, x, target):
    features = relu(c.mlp(p["features"], x["obs"], relu))
    log_p = jax.nn.log_softmax(c.linear(p["pi"], features))
    aside, value = c.linear(p["aside"], features)[..., 0], c.mlp(p["v"], x["obs"], relu)[..., 0]
    return 0.5 * (aside - target) ** 2 + 0.5 * (value - target) ** 2 + divergence_of(log_p, x["log_p"])


def auxiliary_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    _, target = parts.advantage_and_target(x, t, GAMMA)
    return auxiliary_loss(p, x, target), carry


def auxiliary_plain(p, _, data):
    return auxiliary_loss(p, data, parts.advantages_and_targets(data, GAMMA)[1]).mean()


def auxiliary(length, batch, hidden):
    k = jax.random.split(jax.random.key(2))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    value = jax.random.normal(k[0], (length + 1, batch))
    log_p = jax.nn.log_softmax(jax.random.normal(k[1], (length, batch, ACTIONS)))
    data |= {"value": value[:-1], "last_value": value[-1], "log_p": log_p}
    p = auxiliary_params(jax.random.key(0), hidden)
    return parts.learner(auxiliary_program, parts.usual(auxiliary_plain), length, batch, p, (), data)


# -- emphatic V-trace (Jiang et al. 2021): errors weighed by how much of the past leads there


def emphatic_losses(p, x, value, target, advantage, emphasis):
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    policy = -stop_gradient(advantage) * c.pick(log_p, x["action"])
    return stop_gradient(emphasis) * (0.5 * (value - stop_gradient(target)) ** 2 + policy)


def log_rho_of(p, x):
    return stop_gradient(c.pick(jax.nn.log_softmax(c.mlp(p["pi"], x["obs"])), x["action"])) - x["log_prob"]


def emphatic_program(params, trace, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    log_rho, value = log_rho_of(p, x), value_of(p, x["obs"])
    following = rlfx.series(value, end=value_of(p, x["last"]))[t + 1]
    target, advantage = rlfx.vtrace(parts.step_of(x), value, following, log_rho, gamma=GAMMA)
    emphasis = trace + 1.0
    after = jnp.where(x["done"], 0.0, GAMMA) * jnp.minimum(jnp.exp(log_rho), 1.0) * emphasis
    return emphatic_losses(p, x, value, target, advantage, emphasis), after


def emphatic_plain(p, _, data):
    value, log_rho = value_of(p, parts.with_last(data)), log_rho_of(p, data)
    value, last = value[:-1], value[-1]
    target, advantage = c.vtrace(stop_gradient(value), stop_gradient(last), log_rho, data, GAMMA)

    def body(trace, decay):
        return decay * (trace + 1.0), trace + 1.0

    decay = parts.going(data, GAMMA) * jnp.minimum(jnp.exp(log_rho), 1.0)
    _, emphasis = jax.lax.scan(body, jnp.zeros_like(last), decay)
    return emphatic_losses(p, data, value, target, advantage, emphasis).mean()


def emphatic(length, batch, hidden):
    p = parts.nets(jax.random.key(0), OBS, hidden, ACTIONS)
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["log_prob"] = -1.8 + 0.3 * jax.random.normal(jax.random.key(2), (length, batch))
    return parts.learner(emphatic_program, parts.usual(emphatic_plain), length, batch, p, (), data)
