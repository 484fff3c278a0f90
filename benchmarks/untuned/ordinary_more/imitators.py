"""Learners of rewards: GAIL with a penalty on gradients, AIRL, preferences between segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import nets, relu, value_of

OBS, ACTIONS, GAMMA = 17, 6, 0.99


def with_experts(length, batch):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    expert = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return data | {"expert_obs": expert["obs"], "expert_action": expert["action"], "last_expert": expert["last"]}


def together(obs, action):
    return jnp.concatenate([obs, jax.nn.one_hot(action, ACTIONS)], -1)


# -- GAIL: what tells an agent from an expert is its reward; the gradient between both is to have a length of one


def unlike(p, agent, expert, mix):
    """The discriminator's loss of a point, or of all."""
    of_agent, of_expert = c.mlp(p, agent)[..., 0], c.mlp(p, expert)[..., 0]
    between = mix * agent + (1.0 - mix) * expert
    slope = jax.grad(lambda x: c.mlp(p, x)[..., 0].sum())(between)
    length = jnp.sqrt((slope**2).sum(-1) + 1e-8)
    return jax.nn.softplus(of_agent) + jax.nn.softplus(-of_expert) + 10.0 * (length - 1.0) ** 2


def gail_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    agent, expert = together(x["obs"], x["action"]), together(x["expert_obs"], x["expert_action"])
    told = unlike(p["told"], agent, expert, jax.random.uniform(t.key_for("mix"), (1,)))
    reward = stop_gradient(jax.nn.softplus(c.mlp(p["told"], agent)[0]))
    value = value_of(p, x["obs"])
    following = rlfx.series(value, end=value_of(p, x["last"]))[t + 1]
    advantage = stop_gradient(rlfx.gae(parts.step_of(x | {"reward": reward}), value, following, gamma=GAMMA, lam=0.95))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))
    entropy = -(jnp.exp(log_p) * log_p).sum()
    target = advantage + stop_gradient(value)
    return told + 0.5 * (value - target) ** 2 - log_p[x["action"]] * advantage - 0.01 * entropy, carry


def gail_plain(length, batch):
    def loss(p, _, data, key):
        (keys,) = c.streams(key, batch, "mix")
        mix = jax.vmap(lambda t: jax.vmap(lambda k: jax.random.uniform(k, (1,)))(c.at(keys, t)))(jnp.arange(length))
        agent, expert = together(data["obs"], data["action"]), together(data["expert_obs"], data["expert_action"])
        told = unlike(p["told"], agent, expert, mix)
        reward = stop_gradient(jax.nn.softplus(c.mlp(p["told"], agent)[..., 0]))
        value = value_of(p, parts.with_last(data))
        value, last = value[:-1], value[-1]
        advantage = stop_gradient(c.gae(value, last, reward, data["done"], GAMMA, 0.95))
        logits = c.mlp(p["pi"], data["obs"])
        log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
        return (told + c.actor_critic_loss(logits, value, log_prob, advantage, stop_gradient(value) + advantage)).mean()

    return parts.usual(loss)


def gail(length, batch, hidden):
    p = nets(jax.random.key(0), OBS, hidden, ACTIONS)
    p["told"] = c.mlp_params(jax.random.key(1), (OBS + ACTIONS, hidden, hidden, 1))
    data = with_experts(length, batch)
    del data["last_expert"]
    return parts.learner(gail_program, gail_plain(length, batch), length, batch, p, (), data, random=True)


# -- AIRL: a reward and a shape of it, told apart by the policy's own probabilities


def rewarded(p, obs, next_obs, action, done):
    shape, following = c.mlp(p["shape"], obs, relu)[..., 0], c.mlp(p["shape"], next_obs, relu)[..., 0]
    return c.mlp(p["reward"], together(obs, action), relu)[..., 0] + GAMMA * (1.0 - done) * following - shape


def airl_losses(p, policy, x, next_obs, next_expert):
    log_pi = lambda obs, action: c.pick(jax.nn.log_softmax(c.mlp(policy, obs)), action)  # noqa: E731
    agent = rewarded(p, x["obs"], next_obs, x["action"], x["done"]) - log_pi(x["obs"], x["action"])
    expert = rewarded(p, x["expert_obs"], next_expert, x["expert_action"], 0.0) - log_pi(x["expert_obs"], x["expert_action"])
    return jax.nn.softplus(agent) + jax.nn.softplus(-expert)


def airl_program(params, carry, t):
    (p, policy), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    next_expert = rlfx.series(x["expert_obs"], end=x["last_expert"])[t + 1]
    return airl_losses(p, policy, x, next_obs, next_expert), carry


def airl_plain(p, policy, data):
    next_expert = c.shifted(data["expert_obs"], data["last_expert"])
    return airl_losses(p, policy, data, parts.with_last(data)[1:], next_expert).mean()


def airl(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 3)
    p = {
        "reward": c.mlp_params(k[0], (OBS + ACTIONS, hidden, hidden, 1)), "shape": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
    }  # fmt: skip
    policy = c.mlp_params(k[2], (OBS, hidden, hidden, ACTIONS))
    return parts.learner(airl_program, parts.usual(airl_plain), length, batch, p, policy, with_experts(length, batch))


# -- preferences: an ensemble of rewards, whose sums over segments of sixteen timesteps say which one is liked

SEGMENT = 16


def pleasing(p, obs, action):
    """``[members, ...]``."""
    x = together(obs, action)
    return jax.vmap(lambda p: jnp.tanh(c.mlp(p, x, relu)[..., 0]))(p)


def preferred_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    more = rlfx.series(pleasing(p, x["obs"], x["action"]) - pleasing(p, x["expert_obs"], x["expert_action"]))
    begin = t - t % SEGMENT
    more = more[begin : begin + SEGMENT].sum(0)
    loss = jax.nn.softplus(jnp.where(x["liked"], -more, more)).sum()
    return jnp.where(t % SEGMENT == 0, loss, 0.0), carry


def preferred_plain(p, _, data):
    more = pleasing(p, data["obs"], data["action"]) - pleasing(p, data["expert_obs"], data["expert_action"])
    members, length, batch = more.shape
    more = more.reshape(members, -1, SEGMENT, batch).sum(2)
    return jax.nn.softplus(jnp.where(data["liked"][::SEGMENT], -more, more)).sum() / (length * batch)


def preferred(length, batch, hidden, members):
    sizes = OBS + ACTIONS, hidden, hidden, 1
    p = jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(jax.random.key(0), members))
    data = with_experts(length, batch)
    data = {name: data[name] for name in ("obs", "action", "expert_obs", "expert_action")}
    data["liked"] = jax.random.bernoulli(jax.random.key(3), 0.5, (length, batch))
    return parts.learner(preferred_program, parts.usual(preferred_plain), length, batch, p, (), data)
