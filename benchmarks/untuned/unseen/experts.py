"""A policy gradient whose policy is a mixture of experts, all computed, with a loss that balances them over the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, BALANCE = 8, 4, 0.99, 0.95, 0.05
drift = c.drift_step(OBS, 50)


def params_of(count, hidden):
    k = jax.random.split(jax.random.key(0), 3)
    experts = jax.vmap(lambda key: c.mlp_params(key, (OBS, hidden, ACTIONS)))(jax.random.split(k[0], count))
    return {"experts": experts, "gate": c.dense(k[1], OBS, count), "v": c.mlp_params(k[2], (OBS, hidden, 1))}


def mapped(p, obs):
    """Gates, logits and value: the experts under `jax.vmap`."""
    gate = jax.nn.softmax(c.linear(p["gate"], obs))
    each = jax.vmap(lambda expert: c.mlp(expert, obs), out_axes=-2)(p["experts"])
    return gate, (gate[..., None] * each).sum(-2), c.mlp(p["v"], obs)[..., 0]


def wide(p, obs):
    """All experts as one network: its hidden units are weighted by the gates before the last product."""
    gate = jax.nn.softmax(c.linear(p["gate"], obs))
    first, last = p["experts"]
    count, _, hidden = first["w"].shape
    units = jnp.tanh(obs @ jnp.moveaxis(first["w"], 0, 1).reshape(OBS, -1) + first["b"].reshape(-1))
    units = units.reshape(*obs.shape[:-1], count, hidden) * gate[..., None]
    logits = units.reshape(*obs.shape[:-1], -1) @ last["w"].reshape(-1, ACTIONS) + gate @ last["b"]
    return gate, logits, c.mlp(p["v"], obs)[..., 0]


def wide_features_first(p, obs):
    """The same for ``obs[N, OBS]`` with rows innermost."""
    x = obs.T
    layer = lambda w, b, x: w.T @ x + b[:, None]  # noqa: E731
    gate = jax.nn.softmax(layer(p["gate"]["w"], p["gate"]["b"], x), 0)
    first, last = p["experts"]
    count, _, hidden = first["w"].shape
    units = jnp.tanh(layer(jnp.moveaxis(first["w"], 0, 1).reshape(OBS, -1), first["b"].reshape(-1), x))
    units = (units.reshape(count, hidden, -1) * gate[:, None]).reshape(count * hidden, -1)
    logits = last["w"].reshape(-1, ACTIONS).T @ units + last["b"].T @ gate
    value = layer(p["v"][1]["w"], p["v"][1]["b"], jnp.tanh(layer(p["v"][0]["w"], p["v"][0]["b"], x)))[0]
    return gate.T, logits.T, value


def busiest(gate):
    """Which expert has the largest gate, as zeros and a one."""
    return jax.nn.one_hot(jnp.argmax(gate, -1), gate.shape[-1])


def loss_of(gate, logits, v, action, advantage, target, share):
    """Of each point; ``share[E]``: how often each expert is the busiest."""
    log_prob = c.pick(jax.nn.log_softmax(logits), action)
    balance = gate.shape[-1] * (share * gate).sum(-1)
    return c.actor_critic_loss(logits, v, log_prob, advantage, target) + BALANCE * balance


def program(p, state, t):
    gate, logits, v = mapped(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    share = stop_gradient(rlfx.mean(busiest(gate), over=("t", "b")))
    return loss_of(gate, logits, v, action, advantage, advantage + stop_gradient(v), share), state


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, state, key):
        (loss, (state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(p, state, key)
        return loss, grads, state

    return run


def by_hand(length, batch, net=mapped, flat=True, chunk=None):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            gate, logits, v = net(p, state["x"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (state["x"], action, v, busiest(gate).mean(0), step.reward, step.terminated)

        after, (obs, action, v, shares, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        advantage = c.gae(v, net(p, after["x"])[2], reward, done, GAMMA, LAMBDA)
        share = shares.mean(0)

        def loss(p, data):
            obs, *rest = data
            return loss_of(*net(p, obs), *rest, share).sum() / (length * batch)

        data = obs, action, advantage, advantage + v
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def workload(length, batch, count, hidden, chunk=16):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "not flattened": make(flat=False), "wide": make(net=wide),
        f"blocks of {chunk}": make(chunk=chunk), f"wide, blocks of {chunk}": make(net=wide, chunk=chunk),
        "wide, blocks of 1": make(net=wide, chunk=1), "wide, features first": make(net=wide_features_first),
        f"wide, features first, blocks of {chunk}": make(net=wide_features_first, chunk=chunk),
    }  # fmt: skip
    return Workload(forms, (params_of(count, hidden), c.batch_of(c.drift_reset(OBS), batch), jax.random.key(2)))
