"""And more: complex linear recurrences (LRU), MPO with sampled actions, an ensemble of models (PETS), attention between agents,
a burn-in before a deep head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.attending import heads_of, scale_of
from benchmarks.untuned.ordinary.parts import gru, gru_params, layer_norm, norm_params, relu

OBS, ACTIONS, DIMS, GAMMA = 17, 6, 6, 0.99

# -- LRU (Orvieto et al. 2023): two layers of complex numbers that decay and turn, a gate after each


def lru_params(key, width, layers):
    k = iter(jax.random.split(key, 5 * layers + 2))

    def layer():
        return {
            "nu": jnp.log(jax.random.uniform(next(k), (width,), minval=0.01, maxval=0.3)),
            "theta": jax.random.uniform(next(k), (width,), maxval=0.6), "into": c.dense(next(k), width, 2 * width),
            "out": c.dense(next(k), 2 * width, width), "gate": c.dense(next(k), width, width),
        }  # fmt: skip

    head, tail = c.dense(next(k), OBS, width), c.dense(next(k), width, ACTIONS)
    return {"in": head, "layers": [layer() for _ in range(layers)], "out": tail}


def decay_of(layer):
    return jnp.exp(-jnp.exp(layer["nu"]) + 1j * layer["theta"])


def given_to(layer, h):
    real, imaginary = jnp.split(c.linear(layer["into"], h), 2, -1)
    return jax.lax.complex(real, imaginary)


def read_from(layer, h, state):
    y = c.linear(layer["out"], jnp.concatenate([state.real, state.imag], -1))
    return h + jax.nn.gelu(y) * jax.nn.sigmoid(c.linear(layer["gate"], y))


def lru_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h, after = c.linear(p["in"], x["obs"]), []
    for layer, state in zip(p["layers"], carry, strict=True):
        state = decay_of(layer) * jnp.where(x["first"], 0.0, state) + given_to(layer, h)
        h, after = read_from(layer, h, state), [*after, state]
    return -jax.nn.log_softmax(c.linear(p["out"], h))[x["action"]], after


def lru_plain(p, _, data):
    h = c.linear(p["in"], data["obs"])
    for layer in p["layers"]:
        decay = decay_of(layer)

        def body(state, x, decay=decay):
            state = decay * jnp.where(x[1][:, None], 0.0, state) + x[0]
            return state, state

        u = given_to(layer, h)
        h = read_from(layer, h, jax.lax.scan(body, jnp.zeros_like(u[0]), (u, data["first"]))[1])
    return -c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), data["action"]).mean()


def lru(length, batch, width, layers):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    first = jnp.concatenate([jnp.ones_like(data["done"][:1]), data["done"][:-1]])
    data = {"obs": data["obs"], "action": data["action"], "first": first}
    start = [jnp.zeros((batch, width), jnp.complex64) for _ in range(layers)]
    p = lru_params(jax.random.key(0), width, layers)
    return parts.learner(lru_program, parts.usual(lru_plain), length, batch, p, (), data, start)


# -- MPO: twenty actions of the old policy, weighed by a softmax of the critic, which the policy is to imitate

SAMPLES = 20


def density(p, obs):
    mean, log_std = jnp.split(c.mlp(p, obs, relu), 2, -1)
    return mean, jnp.clip(log_std, -5.0, 1.0)


def log_prob(mean, log_std, action):
    return (-0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.919).sum(-1)


def judged(p, obs, action):
    """``action[..., SAMPLES, DIMS]``."""
    obs = jnp.broadcast_to(obs[..., None, :], (*action.shape[:-1], OBS))
    return c.mlp(p, jnp.concatenate([obs, jnp.tanh(action)], -1), relu)[..., 0]


def sampled(p, obs, noise):
    mean, log_std = density(p, obs)
    return mean[..., None, :] + jnp.exp(log_std)[..., None, :] * noise


def mpo_policy(p, old, obs, noise):
    """The loss of the policy and of its temperature; what the actions are worth."""
    action = sampled(old["actor"], obs, noise)
    q, eta = judged(old["critic"], obs, action), jax.nn.softplus(p["eta"])
    weight = stop_gradient(jax.nn.softmax(q / eta))
    mean, log_std = density(p["actor"], obs)
    policy = -(weight * log_prob(mean[..., None, :], log_std[..., None, :], action)).sum(-1)
    dual = eta * (0.1 + jax.nn.logsumexp(q / eta, axis=-1) - jnp.log(float(SAMPLES)))
    return policy + dual, q.mean(-1)


def mpo_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    loss, value = mpo_policy(p, old, x["obs"], jax.random.normal(t.key_for("actions"), (SAMPLES, DIMS)))
    given = jnp.concatenate([x["obs"], x["action"]])
    log_rho = log_prob(*density(old["actor"], x["obs"]), x["action"]) - x["log_prob"]
    following = rlfx.series(value, end=value)[t + 1]
    q_old = c.mlp(old["critic"], given, relu)[0]
    target = rlfx.retrace(parts.step_of(x), q_old, following, log_rho, gamma=GAMMA)
    return loss + (c.mlp(p["critic"], given, relu)[0] - stop_gradient(target)) ** 2, carry


def mpo_plain(length, batch):
    def loss(p, old, data, key):
        found, value = mpo_policy(p, old, data["obs"], c.normals(key, "actions", length, batch, (SAMPLES, DIMS)))
        given = jnp.concatenate([data["obs"], data["action"]], -1)
        log_rho = log_prob(*density(old["actor"], data["obs"]), data["action"]) - data["log_prob"]
        weight, discount = jnp.minimum(jnp.exp(log_rho), 1.0), parts.going(data, GAMMA)
        q_old = c.mlp(old["critic"], given, relu)[..., 0]
        delta = data["reward"] + discount * c.shifted(value, value[-1]) - q_old
        target = q_old + c.discounted(delta, discount * c.shifted(weight, jnp.zeros_like(weight[0])))
        return (found + (c.mlp(p["critic"], given, relu)[..., 0] - stop_gradient(target)) ** 2).mean()

    return parts.usual(loss)


def mpo(length, batch, hidden):
    def params_of(key):
        k = jax.random.split(key)
        return {
            "actor": c.mlp_params(k[0], (OBS, hidden, 2 * DIMS)),
            "critic": c.mlp_params(k[1], (OBS + DIMS, hidden, hidden, 1)),
        }

    p, old = params_of(jax.random.key(0)) | {"eta": jnp.float32(0.5)}, params_of(jax.random.key(1))
    data = parts.stored(2, length, batch, (OBS,), (DIMS,))
    del data["last"]
    told = log_prob(*density(old["actor"], data["obs"]), data["action"])
    data["log_prob"] = told + 0.3 * jax.random.normal(jax.random.key(5), told.shape)
    return parts.learner(mpo_program, mpo_plain(length, batch), length, batch, p, old, data, random=True)


# -- PETS: an ensemble of models, each of which learns the next observation's density from weights of its own for every transition


def pets_losses(p, x, next_obs):
    given, aim = jnp.concatenate([x["obs"], x["action"]], -1), next_obs - x["obs"]

    def member(layers, bounds, weight):
        mean, log_var = jnp.split(c.mlp(layers, given, jax.nn.silu), 2, -1)
        log_var = bounds["high"] - jax.nn.softplus(bounds["high"] - log_var)
        log_var = bounds["low"] + jax.nn.softplus(log_var - bounds["low"])
        return weight * ((mean - aim) ** 2 * jnp.exp(-log_var) + log_var).sum(-1)

    losses = jax.vmap(member, (0, 0, -1))(p["layers"], p["bounds"], x["weight"])
    return losses.sum(0) + 0.01 * (p["bounds"]["high"] - p["bounds"]["low"]).sum()


def pets_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    return pets_losses(p, x, rlfx.series(x["obs"], end=x["last"])[t + 1]), carry


def pets_plain(p, _, data):
    return pets_losses(p, data, parts.with_last(data)[1:]).mean()


def pets(length, batch, hidden, members):
    sizes = OBS + DIMS, hidden, hidden, 2 * OBS
    layers = jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(jax.random.key(0), members))
    p = {"layers": layers, "bounds": {"high": jnp.full((members, OBS), 0.5), "low": jnp.full((members, OBS), -3.0)}}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    weight = jax.random.poisson(jax.random.key(2), 1.0, (length, batch, members))
    data["weight"] = weight.astype(jnp.float32)
    return parts.learner(pets_program, parts.usual(pets_plain), length, batch, p, (), data)


# -- agents that attend to one another at each timestep, and a memory of each

AGENTS = 6


def talking_params(key, width):
    k = jax.random.split(key, 8)
    return {
        "in": c.dense(k[0], OBS, width), "gru": gru_params(k[1], 2 * width, width), "norm": norm_params(width),
        **{name: c.dense(x, width, width)["w"] for name, x in zip("qkv", k[2:5], strict=True)},
        "pi": c.dense(k[5], width, ACTIONS), "value": c.dense(k[6], width, 1),
    }  # fmt: skip


def talked(p, h, heads):
    """``h[..., AGENTS, width]``."""
    q, k, v = (heads_of(layer_norm(p["norm"], h) @ p[name], heads) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("...ihw,...jhw->...hij", q, k) * scale_of(q), axis=-1)
    return jnp.einsum("...hij,...jhw->...ihw", weights, v).reshape(h.shape)


def talking_step(p, h, x, heads):
    return gru(p["gru"], h, jnp.concatenate([x, talked(p, h, heads)], -1))


def talking_losses(p, h, action, target):
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["value"], h)[..., 0]
    target = target[..., None]
    return (0.5 * (value - target) ** 2 - c.pick(log_p, action) * stop_gradient(target - value)).sum(-1)


def talking_program(heads):
    def program(params, h, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h = talking_step(p, h, relu(c.linear(p["in"], x["obs"])), heads)
        going = rlfx.series(jnp.where(x["done"], 0.0, GAMMA))
        target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], going[t:])
        return talking_losses(p, h, x["action"], target), jnp.where(x["done"], 0.0, h)

    return program


def talking_plain(heads, start):
    def loss(p, _, data):
        def body(h, x):
            h = talking_step(p, h, x[0], heads)
            return jnp.where(x[1][:, None, None], 0.0, h), h

        _, h = jax.lax.scan(body, start, (relu(c.linear(p["in"], data["obs"])), data["done"]))
        target = c.discounted(data["reward"], parts.going(data, GAMMA))
        return talking_losses(p, h, data["action"], target).mean()

    return parts.usual(loss)


def talking(length, batch, width, heads):
    data = parts.stored(1, length, batch, (AGENTS, OBS), ACTIONS)
    data = {name: data[name] for name in ("obs", "reward", "done")}
    data["action"] = jax.random.randint(jax.random.key(2), (length, batch, AGENTS), 0, ACTIONS)
    start, p = jnp.zeros((batch, AGENTS, width)), talking_params(jax.random.key(0), width)
    return parts.learner(talking_program(heads), talking_plain(heads, start), length, batch, p, (), data, start)


# -- a burn-in of half the sequence before a deep head


def burning_program(burn):
    def program(params, h, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h = jnp.where(t == burn, stop_gradient(h), h)
        h = gru(p["gru"], h, relu(c.linear(p["in"], x["obs"])))
        following = rlfx.series(x["value"], end=0.0)[t + 1]
        target = rlfx.lambda_return(parts.step_of(x), following, gamma=GAMMA, lam=0.9)
        loss = (c.mlp(p["head"], h, relu)[0] - target) ** 2
        return jnp.where(t >= burn, loss, 0.0), h

    return program


def burning_plain(batch, burn, start):
    def loss(p, _, data):
        def body(h, x):
            h = gru(p["gru"], h, x)
            return h, h

        x = relu(c.linear(p["in"], data["obs"]))
        h = stop_gradient(jax.lax.scan(body, start, x[:burn])[0])
        _, h = jax.lax.scan(body, h, x[burn:])
        discount, following = parts.going(data, GAMMA), c.shifted(data["value"], jnp.zeros(batch))
        one_step = data["reward"] + 0.1 * discount * following
        target = c.discounted(one_step[burn:], 0.9 * discount[burn:])
        return ((c.mlp(p["head"], h, relu)[..., 0] - target) ** 2).sum() / data["reward"].size

    return parts.usual(loss)


def burning(length, batch, burn, hidden):
    k, sizes = jax.random.split(jax.random.key(0), 4), (hidden, hidden, hidden, hidden, 1)
    p = {"in": c.dense(k[0], OBS, hidden), "gru": gru_params(k[1], hidden, hidden), "head": c.mlp_params(k[2], sizes)}
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "reward", "done")}
    data["value"], start = jax.random.normal(k[3], (length, batch)), jnp.zeros((batch, hidden))
    return parts.learner(burning_program(burn), burning_plain(batch, burn, start), length, batch, p, (), data, start)
