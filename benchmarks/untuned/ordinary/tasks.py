"""A meta-gradient (of a discount, a mixing parameter and bonuses), heads of several tasks, and features of successors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import nets, relu, value_of

OBS, ACTIONS, TASKS, FEATURES, GAMMA = 17, 6, 8, 16, 0.99

# -- a meta-gradient (Xu et al. 2018): by gamma, lambda and an entropy bonus, through one step of the learner


def inner_program(params, carry, t):
    (p, eta), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    gamma, lam = jax.nn.sigmoid(eta["gamma"]), jax.nn.sigmoid(eta["lam"])
    value = value_of(p, x["obs"])
    following = rlfx.series(stop_gradient(value), end=stop_gradient(value_of(p, x["last"])))[t + 1]
    target = rlfx.lambda_return(parts.step_of(x), following, gamma=gamma, lam=lam)
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    entropy = -(jnp.exp(log_p) * log_p).sum()
    policy = -log_p[x["action"]] * (target - stop_gradient(value))
    return policy + 0.5 * (value - target) ** 2 - jnp.exp(eta["bonus"]) * entropy, carry


def inner_plain(p, eta, data):
    gamma, lam = jax.nn.sigmoid(eta["gamma"]), jax.nn.sigmoid(eta["lam"])
    value = value_of(p, parts.with_last(data))
    following, value, discount = stop_gradient(value[1:]), value[:-1], parts.going(data, gamma)

    def body(target, x):
        reward, discount, following = x
        target = reward + discount * ((1.0 - lam) * following + lam * target)
        return target, target

    _, target = jax.lax.scan(body, following[-1], (data["reward"], discount, following), reverse=True)
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], data["obs"]))
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    policy = -c.pick(log_p, data["action"]) * (target - stop_gradient(value))
    return (policy + 0.5 * (value - target) ** 2 - jnp.exp(eta["bonus"]) * entropy).mean()


FIXED = {"gamma": 4.6, "lam": 3.0, "bonus": -4.6}


def meta(length, batch, hidden):
    loss_fn = rlfx.compile(inner_program, length=length, batch=batch)
    losses = {"rlfx": lambda p, eta, data: loss_fn(((p, eta), data), jnp.zeros(batch))[0], "plain": inner_plain}

    def learnt(loss):
        def run(eta, p, data, later):
            def outer(eta):
                new = jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, eta, data))
                return loss(new, {name: jnp.float32(x) for name, x in FIXED.items()}, later)

            return jax.value_and_grad(outer)(eta)

        return run

    eta = {"gamma": jnp.float32(3.0), "lam": jnp.float32(2.0), "bonus": jnp.float32(-3.0)}
    data, later = (parts.stored(i, length, batch, (OBS,), ACTIONS) for i in range(2))
    forms = {name: learnt(loss) for name, loss in losses.items()}
    return Workload(forms, (eta, nets(jax.random.key(0), OBS, hidden, ACTIONS), data, later))


# -- an actor-critic with a head of every task; an environment has a task of its own, and values are scaled task by task


def tasks_params(key, hidden):
    k = jax.random.split(key, 4)
    heads = lambda k, n: jax.vmap(lambda k: c.dense(k, hidden, n))(jax.random.split(k, TASKS))  # noqa: E731
    body = c.mlp_params(k[0], (OBS, hidden, hidden))
    scale = {"mean": jnp.linspace(-1.0, 1.0, TASKS), "deviation": jnp.linspace(0.5, 2.0, TASKS)}
    return {"body": body, "pi": heads(k[1], ACTIONS), "v": heads(k[2], 1)}, scale


def tasks_program(params, carry, t):
    (p, scale), data = params
    x = rlfx.inputs(data, axes=parts.axes(data, task="b"))[t]
    task = x["task"]
    pi, v = c.member(p["pi"], task), c.member(p["v"], task)
    mean, deviation = scale["mean"][task], scale["deviation"][task]

    def seen(obs):
        h = relu(c.mlp(p["body"], obs, relu))
        return c.linear(pi, h), c.linear(v, h)[0]

    logits, value = seen(x["obs"])
    following = rlfx.series(value, end=seen(x["last"])[1])[t + 1]
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    unscaled = lambda v: stop_gradient(deviation * v + mean)  # noqa: E731
    log_rho = stop_gradient(log_prob) - x["log_prob"]
    target, advantage = rlfx.vtrace(parts.step_of(x), unscaled(value), unscaled(following), log_rho, gamma=GAMMA)
    aim = (target - mean) / deviation
    return 0.5 * (value - aim) ** 2 - log_prob * advantage / deviation, carry


def tasks_plain(p, given, data):
    scale, task = given, data["task"]
    mean, deviation = scale["mean"][task], scale["deviation"][task]
    h = relu(c.mlp(p["body"], parts.with_last(data), relu))
    head = lambda w, h: jnp.einsum("tbh,bho->tbo", h, w["w"][task]) + w["b"][task]  # noqa: E731
    logits, value = head(p["pi"], h[:-1]), head(p["v"], h)[..., 0]
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    unscaled = stop_gradient(deviation * value + mean)
    log_rho = stop_gradient(log_prob) - data["log_prob"]
    target, advantage = c.vtrace(unscaled[:-1], unscaled[-1], log_rho, data, GAMMA)
    aim = (target - mean) / deviation
    return (0.5 * (value[:-1] - aim) ** 2 - log_prob * advantage / deviation).mean()


def tasks(length, batch, hidden):
    p, scale = tasks_params(jax.random.key(0), hidden)
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data["log_prob"] = 0.3 * jax.random.normal(jax.random.key(5), (length, batch)) - 1.8
    data["task"] = jnp.arange(batch) % TASKS
    return parts.learner(tasks_program, parts.usual(tasks_plain), length, batch, p, scale, data)


# -- successor features of several policies (Barreto et al. 2018), n-step targets, and generalised policy improvement


def features_program(params, carry, t):
    (p, (old, w, phi)), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    of = lambda p, obs: c.mlp(p, obs, relu).reshape(TASKS, ACTIONS, FEATURES)  # noqa: E731
    here = of(old, x["obs"])
    best = jnp.argmax(jnp.einsum("iaf,if->ia", here, w), -1)
    following = rlfx.series(here[jnp.arange(TASKS), best], end=jnp.zeros((TASKS, FEATURES)))[t + 1]
    seen = jnp.tanh(c.mlp(phi, x["obs"], relu))
    aim = stop_gradient(seen + GAMMA * (1.0 - x["done"]) * following)
    return ((of(p, x["obs"])[:, x["action"]] - aim) ** 2).sum(), carry


def features_plain(p, given, data):
    old, w, phi = given
    of = lambda p, obs: c.mlp(p, obs, relu).reshape(*obs.shape[:-1], TASKS, ACTIONS, FEATURES)  # noqa: E731
    here = of(old, data["obs"])
    best = jnp.argmax(jnp.einsum("tbiaf,if->tbia", here, w), -1)
    chosen = jnp.take_along_axis(here, best[..., None, None], -2)[..., 0, :]
    following = c.shifted(chosen, jnp.zeros_like(chosen[0]))
    seen = jnp.tanh(c.mlp(phi, data["obs"], relu))
    aim = stop_gradient(seen[..., None, :] + parts.going(data, GAMMA)[..., None, None] * following)
    given = jnp.take_along_axis(of(p, data["obs"]), data["action"][..., None, None, None], -2)[..., 0, :]
    return ((given - aim) ** 2).sum((-2, -1)).mean()


def features(length, batch, hidden):
    k, sizes = jax.random.split(jax.random.key(0), 4), (OBS, hidden, hidden, TASKS * ACTIONS * FEATURES)
    p, old = (c.mlp_params(x, sizes) for x in k[:2])
    w, phi = jax.random.normal(k[2], (TASKS, FEATURES)), c.mlp_params(k[3], (OBS, hidden, FEATURES))
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    return parts.learner(features_program, parts.usual(features_plain), length, batch, p, (old, w, phi), data)
