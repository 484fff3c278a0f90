"""Learners by their returns: V-trace, Retrace, TD(lambda), PPO of continuous actions, V-MPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import nets, value_of

OBS, ACTIONS, DIMS, GAMMA = 17, 6, 6, 0.99


# -- IMPALA: targets and advantages by V-trace


def vtrace_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    log_p, value = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"])), value_of(p, x["obs"])
    log_prob = log_p[x["action"]]
    following = rlfx.series(value, end=value_of(p, x["last"]))[t + 1]
    target, advantage = rlfx.vtrace(parts.step_of(x), value, following, log_prob - x["log_prob"], gamma=GAMMA)
    entropy = -(jnp.exp(log_p) * log_p).sum()
    loss = 0.5 * (value - stop_gradient(target)) ** 2 - log_prob * stop_gradient(advantage) - 0.01 * entropy
    return loss, carry


def vtrace_plain(p, _, data):
    logits, value = c.mlp(p["pi"], data["obs"]), value_of(p, parts.with_last(data))
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    target, advantage = stop_gradient(c.vtrace(value[:-1], value[-1], log_prob - data["log_prob"], data, GAMMA))
    return c.actor_critic_loss(logits, value[:-1], log_prob, advantage, target).mean()


def impala(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["log_prob"] = 0.3 * jax.random.normal(jax.random.key(5), (length, batch)) - 1.8
    p = nets(jax.random.key(0), OBS, hidden, ACTIONS)
    return parts.learner(vtrace_program, parts.usual(vtrace_plain), length, batch, p, (), data)


# -- Retrace: action values of a policy beside that of the data


def retrace_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]

    def expected(obs):
        return (jax.nn.softmax(c.mlp(old["pi"], obs)) * c.mlp(old["q"], obs)).sum()

    following = rlfx.series(expected(x["obs"]), end=expected(x["last"]))[t + 1]
    log_rho = jax.nn.log_softmax(c.mlp(old["pi"], x["obs"]))[x["action"]] - x["log_prob"]
    q_old = c.mlp(old["q"], x["obs"])[x["action"]]
    target = rlfx.retrace(parts.step_of(x), q_old, following, log_rho, gamma=GAMMA, lam=0.9)
    q, log_p = c.mlp(p["q"], x["obs"]), jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    actor = -(jnp.exp(log_p) * (stop_gradient(q) - 0.05 * log_p)).sum()
    return (q[x["action"]] - stop_gradient(target)) ** 2 + actor, carry


def retrace_plain(p, old, data):
    obs, discount = parts.with_last(data), parts.going(data, GAMMA)
    old_log, q_old = jax.nn.log_softmax(c.mlp(old["pi"], obs)), c.mlp(old["q"], obs)
    expected = (jnp.exp(old_log) * q_old).sum(-1)
    weight = 0.9 * jnp.minimum(jnp.exp(c.pick(old_log[:-1], data["action"]) - data["log_prob"]), 1.0)
    q_taken = c.pick(q_old[:-1], data["action"])
    delta = data["reward"] + discount * expected[1:] - q_taken
    error = c.discounted(delta, discount * c.shifted(weight, jnp.zeros_like(weight[0])))
    target = stop_gradient(q_taken + error)
    q, log_p = c.mlp(p["q"], data["obs"]), jax.nn.log_softmax(c.mlp(p["pi"], data["obs"]))
    actor = -(jnp.exp(log_p) * (stop_gradient(q) - 0.05 * log_p)).sum(-1)
    return ((c.pick(q, data["action"]) - target) ** 2 + actor).mean()


def retrace(length, batch, hidden):
    def params_of(key):
        k, sizes = jax.random.split(key), (OBS, hidden, hidden, ACTIONS)
        return {"pi": c.mlp_params(k[0], sizes), "q": c.mlp_params(k[1], sizes)}

    p, old = params_of(jax.random.key(0)), params_of(jax.random.key(3))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["log_prob"] = 0.3 * jax.random.normal(jax.random.key(5), (length, batch)) - 1.8
    return parts.learner(retrace_program, parts.usual(retrace_plain), length, batch, p, old, data)


# -- TD(lambda): a value function alone


def td_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    following = rlfx.series(value_of(old, x["obs"]), end=value_of(old, x["last"]))[t + 1]
    target = rlfx.lambda_return(parts.step_of(x), following, gamma=GAMMA, lam=0.9)
    return (value_of(p, x["obs"]) - stop_gradient(target)) ** 2, carry


def td_plain(p, old, data):
    following, discount = value_of(old, parts.with_last(data))[1:], parts.going(data, GAMMA)

    def body(target, x):
        reward, discount, following = x
        target = reward + discount * (0.1 * following + 0.9 * target)
        return target, target

    _, target = jax.lax.scan(body, following[-1], (data["reward"], discount, following), reverse=True)
    return ((value_of(p, data["obs"]) - stop_gradient(target)) ** 2).mean()


def td(length, batch, hidden):
    p, old = ({"v": nets(jax.random.key(i), OBS, hidden, ACTIONS)["v"]} for i in range(2))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    return parts.learner(td_program, parts.usual(td_plain), length, batch, p, old, data)


# -- PPO of continuous actions: advantages by the critic that learns


def normal_log_prob(mean, log_std, action):
    return (-0.5 * ((action - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.919).sum(-1)


def surrogate(ratio, advantage):
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


def ppo_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    value = value_of(p, x["obs"])
    following = rlfx.series(value, end=value_of(p, x["last"]))[t + 1]
    advantage = stop_gradient(rlfx.gae(parts.step_of(x), value, following, gamma=GAMMA, lam=0.95))
    target = advantage + stop_gradient(value)
    advantage = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    log_prob = normal_log_prob(c.mlp(p["pi"], x["obs"]), p["log_std"], x["action"])
    entropy = p["log_std"].sum()
    loss = 0.5 * (value - target) ** 2 - surrogate(jnp.exp(log_prob - x["log_prob"]), advantage) - 0.01 * entropy
    return loss, carry


def ppo_plain(p, _, data):
    value = value_of(p, parts.with_last(data))
    value, last = value[:-1], value[-1]
    advantage = stop_gradient(c.gae(value, last, data["reward"], data["done"], GAMMA, 0.95))
    target = advantage + stop_gradient(value)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_prob = normal_log_prob(c.mlp(p["pi"], data["obs"]), p["log_std"], data["action"])
    loss = 0.5 * (value - target) ** 2 - surrogate(jnp.exp(log_prob - data["log_prob"]), advantage)
    return (loss - 0.01 * p["log_std"].sum()).mean()


def continuous_data(length, batch, p):
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    told = normal_log_prob(c.mlp(p["pi"], data["obs"]), p["log_std"], data["action"])
    return data | {"log_prob": told + 0.1 * jax.random.normal(jax.random.key(5), told.shape)}


def ppo(length, batch, hidden):
    p = nets(jax.random.key(0), OBS, hidden, DIMS) | {"log_std": jnp.full(DIMS, -0.5)}
    data = continuous_data(length, batch, p)
    return parts.learner(ppo_program, parts.usual(ppo_plain), length, batch, p, (), data)


# -- V-MPO: weights of a softmax of the better half, a temperature and a bound that learn

EPS_ETA, EPS_ALPHA = 0.1, 0.01


def vmpo_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    value = value_of(p, x["obs"])
    following = rlfx.series(value, end=value_of(p, x["last"]))[t + 1]
    target = stop_gradient(rlfx.n_step_return(parts.step_of(x), following, gamma=GAMMA, n=8))
    advantage = target - stop_gradient(value)
    better = advantage > rlfx.mean(advantage)
    eta, alpha = jax.nn.softplus(p["eta"]), jax.nn.softplus(p["alpha"])
    scaled = jnp.where(better, advantage / eta, -jnp.inf)
    top = stop_gradient(rlfx.max(scaled))
    weight = jnp.exp(scaled - top)
    total = rlfx.sum(weight)
    mean_weight = total / rlfx.sum(better.astype(jnp.float32))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    old_log = jax.nn.log_softmax(c.mlp(old, x["obs"]))
    kl = (jnp.exp(old_log) * (old_log - log_p)).sum()
    count = t.length * x["batch"]
    policy = -stop_gradient(weight / total) * log_p[x["action"]] * count
    dual = eta * (EPS_ETA + top + jnp.log(mean_weight))
    bound = alpha * (EPS_ALPHA - stop_gradient(kl)) + stop_gradient(alpha) * kl
    return 0.5 * (value - target) ** 2 + policy + dual + bound, carry


def vmpo_plain(p, old, data):
    value = value_of(p, parts.with_last(data))
    value, last = value[:-1], value[-1]
    target, discount = data["reward"] + parts.going(data, GAMMA) * c.shifted(value, last), parts.going(data, GAMMA)
    for _ in range(7):
        target = data["reward"] + discount * c.shifted(target, last)
    target = stop_gradient(target)
    advantage = target - stop_gradient(value)
    better = advantage > advantage.mean()
    eta, alpha = jax.nn.softplus(p["eta"]), jax.nn.softplus(p["alpha"])
    scaled = jnp.where(better, advantage / eta, -jnp.inf)
    top = stop_gradient(scaled.max())
    weight = jnp.exp(scaled - top)
    log_p, old_log = (jax.nn.log_softmax(c.mlp(w, data["obs"])) for w in (p["pi"], old))
    kl = (jnp.exp(old_log) * (old_log - log_p)).sum(-1)
    policy = -(stop_gradient(weight / weight.sum()) * c.pick(log_p, data["action"])).sum()
    dual = eta * (EPS_ETA + top + jnp.log(weight.sum() / better.sum()))
    bound = alpha * (EPS_ALPHA - stop_gradient(kl)) + stop_gradient(alpha) * kl
    return (0.5 * (value - target) ** 2 + bound).mean() + policy + dual


def vmpo(length, batch, hidden):
    p = nets(jax.random.key(0), OBS, hidden, ACTIONS) | {"eta": jnp.float32(1.0), "alpha": jnp.float32(0.5)}
    old = c.mlp_params(jax.random.key(4), (OBS, hidden, hidden, ACTIONS))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["batch"] = jnp.full((length, batch), float(batch))
    return parts.learner(vmpo_program, parts.usual(vmpo_plain), length, batch, p, old, data)
