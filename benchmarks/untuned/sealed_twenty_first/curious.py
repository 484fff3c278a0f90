"""PPO with an intrinsic curiosity module (Pathak et al. 2017): features of observations are learnt by telling the action between
two of them, a forward model tells the next features from the action, and its error is rewarded beside what the environment
gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, EPISODE, GAMMA, LAMBDA, CLIP = 12, 5, 50, 0.99, 0.95, 0.2
BONUS, BETA = 0.05, 0.2
drift, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)
relu = jax.nn.relu


def params_of(key, hidden, code):
    k = jax.random.split(key, 5)
    return {
        "pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
        "code": c.mlp_params(k[2], (OBS, hidden, code)), "inverse": c.mlp_params(k[3], (2 * code, hidden, ACTIONS)),
        "forward": c.mlp_params(k[4], (code + ACTIONS, hidden, code)),
    }  # fmt: skip


def errors_of(p, code, following, action):
    """Of the forward model and of the inverse one, ``[...]``."""
    acted = jax.nn.one_hot(action, ACTIONS)
    told = c.mlp(p["forward"], jnp.concatenate([code, acted], -1), relu)
    guess = jax.nn.log_softmax(c.mlp(p["inverse"], jnp.concatenate([code, following], -1), relu))
    return 0.5 * ((told - following) ** 2).sum(-1), -(guess * acted).sum(-1)


def point_loss(log_p, value, action, old, advantage, target):
    acted = jax.nn.one_hot(action, ACTIONS)
    ratio = jnp.exp((log_p * acted).sum(-1) - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return 0.5 * (value - target) ** 2 - gain + 0.01 * (jnp.exp(log_p) * log_p).sum(-1)


def program(p, state, t):
    obs = state["x"]
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], obs))
    action = jax.random.categorical(t.key_for("action"), stop_gradient(log_p))
    state, step = drift(t.key_for("env"), state, action)

    code = rlfx.series(c.mlp(p["code"], obs, relu))
    ahead, inverse = errors_of(p, code[t], code[t + 1], action)
    going = 1.0 - step.terminated.astype(jnp.float32)
    step = step._replace(reward=step.reward + BONUS * going * ahead)

    value = rlfx.series(c.mlp(p["v"], obs)[0])
    advantage = stop_gradient(rlfx.gae(step, value[t], value[t + 1], gamma=GAMMA, lam=LAMBDA))
    target = advantage + stop_gradient(value[t])
    advantage = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    old = stop_gradient(log_p[action])
    curiosity = going * ((1.0 - BETA) * inverse + BETA * ahead)
    return point_loss(log_p, value[t], action, old, advantage, target) + curiosity, state


# -- by hand, as usual


def plain(length, batch):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            log_p = jax.nn.log_softmax(c.mlp(p["pi"], state["x"]))
            action = c.categorical(c.at(action_keys, t), log_p)
            value = c.mlp(p["v"], state["x"])[..., 0]
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            old = c.pick(log_p, action)
            kept = {"obs": state["x"], "next": after["x"], "action": action, "old": old, "value": value}
            return after, kept | {"reward": step.reward, "done": step.terminated}

        state, data = jax.lax.scan(body, state, jnp.arange(length))
        last, going = c.mlp(p["v"], state["x"])[..., 0], 1.0 - data["done"].astype(jnp.float32)
        code = lambda p, obs: c.mlp(p["code"], obs, relu)  # noqa: E731
        bonus, _ = errors_of(p, code(p, data["obs"]), code(p, data["next"]), data["action"])
        reward = data["reward"] + BONUS * going * bonus
        advantage = c.gae(data["value"], last, reward, data["done"], GAMMA, LAMBDA)
        target = advantage + data["value"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def loss(p):
            log_p, value = jax.nn.log_softmax(c.mlp(p["pi"], data["obs"])), c.mlp(p["v"], data["obs"])[..., 0]
            learnt = point_loss(log_p, value, data["action"], data["old"], advantage, target)
            ahead, inverse = errors_of(p, code(p, data["obs"]), code(p, data["next"]), data["action"])
            return (learnt + going * ((1.0 - BETA) * inverse + BETA * ahead)).mean()

        return *jax.value_and_grad(loss)(p), state

    return run
