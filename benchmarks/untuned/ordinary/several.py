"""Several of something: agents (QMIX, MADDPG), options, members of a population."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu

OBS, ACTIONS, GAMMA, AGENTS, STATE = 17, 6, 0.99, 5, 32

# -- QMIX: a GRU of every agent (with weights in common), and a mixer whose weights are made of the state

EMBEDDED = 32


def qmix_params(key, hidden):
    k = jax.random.split(key, 7)
    return {
        "in": c.dense(k[0], OBS + AGENTS, hidden), "gru": gru_params(k[1], hidden, hidden), "q": c.dense(k[2], hidden, ACTIONS),
        "w1": c.dense(k[3], STATE, AGENTS * EMBEDDED), "b1": c.dense(k[4], STATE, EMBEDDED),
        "w2": c.dense(k[5], STATE, EMBEDDED), "b2": c.mlp_params(k[6], (STATE, EMBEDDED, 1)),
    }  # fmt: skip


def mixed(p, q, state):
    """``q[..., AGENTS]``, ``state[..., STATE]``."""
    w1 = jnp.abs(c.linear(p["w1"], state)).reshape(*state.shape[:-1], AGENTS, EMBEDDED)
    h = jax.nn.elu(jnp.einsum("...a,...ae->...e", q, w1) + c.linear(p["b1"], state))
    return (h * jnp.abs(c.linear(p["w2"], state))).sum(-1) + c.mlp(p["b2"], state, relu)[..., 0]


def named(obs):
    """With the number of the agent."""
    who = jnp.broadcast_to(jnp.eye(AGENTS), (*obs.shape[:-1], AGENTS))
    return jnp.concatenate([obs, who], -1)


def qmix_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    here, there = (
        gru(w["gru"], h, relu(c.linear(w["in"], named(x["obs"])))) for w, h in zip((p, target), carry, strict=True)
    )
    q, old = c.linear(p["q"], here), c.linear(target["q"], there)
    best = c.pick(old, jnp.argmax(q, -1))
    following = rlfx.series(stop_gradient(mixed(target, best, x["state"])), end=0.0)[t + 1]
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * following
    counted = t + 1 < t.length
    return jnp.where(counted, (mixed(p, c.pick(q, x["action"]), x["state"]) - aim) ** 2, 0.0), (here, there)


def qmix_plain(batch, hidden):
    def values(p, obs):
        def body(h, x):
            h = gru(p["gru"], h, x)
            return h, h

        start = jnp.zeros((batch, AGENTS, hidden))
        return c.linear(p["q"], jax.lax.scan(body, start, relu(c.linear(p["in"], named(obs))))[1])

    def loss(p, target, data):
        q, old = values(p, data["obs"]), values(target, data["obs"])
        following = mixed(target, c.pick(old, jnp.argmax(q, -1)), data["state"])[1:]
        aim = stop_gradient(data["reward"][:-1] + parts.going(data, GAMMA)[:-1] * following)
        taken = mixed(p, c.pick(q, data["action"]), data["state"])[:-1]
        return ((taken - aim) ** 2).sum() / data["reward"].size

    return parts.usual(loss)


def qmix(length, batch, hidden):
    p, target = (qmix_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (AGENTS, OBS), ACTIONS)
    k, size = jax.random.split(jax.random.key(3)), (length, batch)
    action = jax.random.randint(k[0], (*size, AGENTS), 0, ACTIONS)
    data = {name: data[name] for name in ("obs", "reward", "done")}
    data |= {"action": action, "state": jax.random.normal(k[1], (*size, STATE))}
    start = (jnp.zeros((batch, AGENTS, hidden)),) * 2
    return parts.learner(qmix_program, qmix_plain(batch, hidden), length, batch, p, target, data, start)


# -- MADDPG: an actor and a critic of every agent, critics of what all see and do

DIMS = 2


def maddpg_params(key, hidden):
    def agent(key):
        k = jax.random.split(key)
        return {
            "actor": c.mlp_params(k[0], (OBS, hidden, hidden, DIMS)),
            "critic": c.mlp_params(k[1], (AGENTS * (OBS + DIMS), hidden, hidden, 1)),
        }  # fmt: skip

    return jax.vmap(agent)(jax.random.split(key, AGENTS))


def actions_of(actors, obs):
    """``obs[..., AGENTS, OBS]``."""
    return jnp.tanh(jax.vmap(lambda p, o: c.mlp(p, o, relu), (0, -2), -2)(actors, obs))


def critics_of(critics, obs, actions):
    """``[AGENTS, ...]``."""
    x = jnp.concatenate([obs, actions], -1)
    x = x.reshape(*x.shape[:-2], -1)
    return jax.vmap(lambda p: c.mlp(p, x, relu)[..., 0])(critics)


def maddpg_losses(p, old, x, next_obs):
    following = critics_of(old["critic"], next_obs, actions_of(old["actor"], next_obs))
    reward = jnp.moveaxis(x["reward"], -1, 0)
    aim = stop_gradient(reward + GAMMA * (1.0 - x["done"]) * following)
    critic = ((critics_of(p["critic"], x["obs"], x["action"]) - aim) ** 2).sum(0)
    mine = actions_of(p["actor"], x["obs"])
    fixed = stop_gradient(p["critic"])

    def of(i):
        """The value to agent i of doing what it would, the others what they did."""
        actions = jnp.where((jnp.arange(AGENTS) == i)[:, None], mine, x["action"])
        joint = jnp.concatenate([x["obs"], actions], -1)
        return c.mlp(c.member(fixed, i), joint.reshape(*joint.shape[:-2], -1), relu)[..., 0]

    return critic - jax.vmap(of)(jnp.arange(AGENTS)).sum(0)


def maddpg_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    return maddpg_losses(p, old, x, rlfx.series(x["obs"], end=x["last"])[t + 1]), carry


def maddpg_plain(p, old, data):
    return maddpg_losses(p, old, data, parts.with_last(data)[1:]).mean()


def maddpg(length, batch, hidden):
    p, old = (maddpg_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (AGENTS, OBS), (AGENTS, DIMS))
    data["reward"] = jax.random.normal(jax.random.key(3), (length, batch, AGENTS))
    return parts.learner(maddpg_program, parts.usual(maddpg_plain), length, batch, p, old, data)


# -- option-critic: of every option a policy and a termination

OPTIONS = 4


def options_params(key, hidden):
    k = jax.random.split(key, 4)
    head = lambda k, n: c.dense(k, hidden, n)  # noqa: E731
    return {
        "body": c.mlp_params(k[0], (OBS, hidden, hidden)), "q": head(k[1], OPTIONS), "ends": head(k[2], OPTIONS),
        "pi": head(k[3], OPTIONS * ACTIONS),
    }  # fmt: skip


def options_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    option = x["option"]
    h = jnp.tanh(c.mlp(p["body"], x["obs"]))
    q, ends = c.linear(p["q"], h), jax.nn.sigmoid(c.linear(p["ends"], h))
    log_pi = jax.nn.log_softmax(c.linear(p["pi"], h).reshape(OPTIONS, ACTIONS)[option])

    def worth(obs):
        """Of going on with the option, or of the best one."""
        h = jnp.tanh(c.mlp(old["body"], obs))
        q, ends = c.linear(old["q"], h), jax.nn.sigmoid(c.linear(old["ends"], h))
        return (1.0 - ends) * q + ends * q.max()

    following = rlfx.series(worth(x["obs"]), end=worth(x["last"]))[t + 1][option]
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    entropy = -(jnp.exp(log_pi) * log_pi).sum()
    before = rlfx.series(option, start=option)[t - 1]
    stop = ends[before] * stop_gradient(q[before] - q.max() + 0.01)
    policy = -log_pi[x["action"]] * stop_gradient(aim - q[option])
    return 0.5 * (q[option] - aim) ** 2 + policy + stop - 0.01 * entropy, carry


def options_plain(p, old, data):
    option = data["option"]
    h = jnp.tanh(c.mlp(p["body"], data["obs"]))
    q, ends = c.linear(p["q"], h), jax.nn.sigmoid(c.linear(p["ends"], h))
    logits = c.linear(p["pi"], h).reshape(*option.shape, OPTIONS, ACTIONS)
    log_pi = jax.nn.log_softmax(jnp.take_along_axis(logits, option[..., None, None], -2)[..., 0, :])
    h = jnp.tanh(c.mlp(old["body"], parts.with_last(data)[1:]))
    old_q, old_ends = c.linear(old["q"], h), jax.nn.sigmoid(c.linear(old["ends"], h))
    following = c.pick((1.0 - old_ends) * old_q + old_ends * old_q.max(-1, keepdims=True), option)
    aim = stop_gradient(data["reward"] + parts.going(data, GAMMA) * following)
    entropy = -(jnp.exp(log_pi) * log_pi).sum(-1)
    before = jnp.concatenate([option[:1], option[:-1]])
    stop = c.pick(ends, before) * stop_gradient(c.pick(q, before) - q.max(-1) + 0.01)
    policy = -c.pick(log_pi, data["action"]) * stop_gradient(aim - c.pick(q, option))
    return (0.5 * (c.pick(q, option) - aim) ** 2 + policy + stop - 0.01 * entropy).mean()


def options(length, batch, hidden):
    p, old = (options_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    data["option"] = jax.random.randint(jax.random.key(3), (length, batch), 0, OPTIONS)
    return parts.learner(options_program, parts.usual(options_plain), length, batch, p, old, data)


# -- a population: members with discounts, entropy bonuses and weights of their own, by `jax.vmap`


def member_params(key, hidden):
    k = jax.random.split(key)
    return {"pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1))}


def member_program(params, carry, t):
    (p, hyper), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    log_p, value = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"])), c.mlp(p["v"], x["obs"])[0]
    following = rlfx.series(value, end=c.mlp(p["v"], x["last"])[0])[t + 1]
    advantage = stop_gradient(rlfx.gae(parts.step_of(x), value, following, gamma=hyper["gamma"], lam=0.95))
    target = stop_gradient(value) + advantage
    entropy = -(jnp.exp(log_p) * log_p).sum()
    return 0.5 * (value - target) ** 2 - log_p[x["action"]] * advantage - hyper["entropy"] * entropy, carry


def member_plain(p, hyper, data):
    logits, value = c.mlp(p["pi"], data["obs"]), c.mlp(p["v"], parts.with_last(data))[..., 0]
    value, last = value[:-1], value[-1]
    advantage = stop_gradient(c.gae(value, last, data["reward"], data["done"], hyper["gamma"], 0.95))
    target = stop_gradient(value) + advantage
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    return c.actor_critic_loss(logits, value, log_prob, advantage, target, hyper["entropy"]).mean()


def population(length, batch, hidden, members):
    p = jax.vmap(lambda k: member_params(k, hidden))(jax.random.split(jax.random.key(0), members))
    hyper = {"gamma": jnp.linspace(0.95, 0.99, members), "entropy": jnp.linspace(0.001, 0.02, members)}
    data = [parts.stored(i, length, batch, (OBS,), ACTIONS) for i in range(members)]
    data = jax.tree.map(lambda *x: jnp.stack(x), *data)
    loss_fn = rlfx.compile(member_program, length=length, batch=batch)

    def by_rlfx(p, hyper, data):
        return jax.value_and_grad(lambda p: loss_fn(((p, hyper), data), jnp.zeros(batch))[0])(p)

    forms = {"rlfx": jax.vmap(by_rlfx), "plain": jax.vmap(parts.usual(member_plain))}
    return Workload(forms, (p, hyper, data))
