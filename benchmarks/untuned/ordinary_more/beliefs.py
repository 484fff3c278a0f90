"""Learners that filter: the belief of a hidden Markov model, the belief that actions move before a policy, a Kalman filter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts

OBS, ACTIONS, SYMBOLS = 8, 4, 64


def begins(data):
    """Where an episode begins: after the end of another, and at first."""
    return jnp.concatenate([jnp.ones_like(data["done"][:1]), data["done"][:-1]])


# -- the forward algorithm, scaled: what is believed before a symbol is seen, and how likely that symbol was


def markov_params(key, states):
    k = jax.random.split(key, 3)
    return {
        "start": jax.random.normal(k[0], (states,)), "moves": 2.0 * jax.random.normal(k[1], (states, states)),
        "shows": 2.0 * jax.random.normal(k[2], (states, SYMBOLS)),
    }  # fmt: skip


def markov_program(params, belief, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    belief = jnp.where(x["first"], jax.nn.softmax(p["start"]), belief)
    joint = belief * jax.nn.softmax(p["shows"])[:, x["symbol"]]
    evidence = joint.sum()
    return -jnp.log(evidence), (joint / evidence) @ jax.nn.softmax(p["moves"])


def markov_plain(p, _, data):
    start, moves = jax.nn.softmax(p["start"]), jax.nn.softmax(p["moves"])

    def body(belief, x):
        first, likely = x
        joint = jnp.where(first[:, None], start, belief) * likely
        evidence = joint.sum(-1)
        return (joint / evidence[:, None]) @ moves, evidence

    likely = jax.nn.softmax(p["shows"]).T[data["symbol"]]
    _, evidence = jax.lax.scan(body, jnp.zeros_like(likely[0]), (data["first"], likely))
    return -jnp.log(evidence).mean()


def markov(length, batch, states):
    k = jax.random.split(jax.random.key(1))
    ends = jax.random.uniform(k[0], (length, batch)) < 0.02
    data = {"symbol": jax.random.randint(k[1], (length, batch), 0, SYMBOLS), "first": begins({"done": ends})}
    p = markov_params(jax.random.key(0), states)
    start = jnp.zeros((batch, states))
    return parts.learner(markov_program, parts.usual(markov_plain), length, batch, p, (), data, start)


# -- a belief in logarithms that the action moves, of states that are seen through noise; a policy that is to imitate reads it


def acting_params(key, states, hidden):
    k = jax.random.split(key, 4)
    return {
        "start": jnp.zeros(states), "moves": jax.random.normal(k[0], (ACTIONS, states, states)),
        "mean": jax.random.normal(k[1], (states, OBS)), "log_std": jnp.zeros((states, OBS)),
        "pi": c.mlp_params(k[2], (states, hidden, hidden, ACTIONS)),
    }  # fmt: skip


def log_likely(p, obs):
    """Of ``obs[..., OBS]`` in each state."""
    z = (obs[..., None, :] - p["mean"]) * jnp.exp(-p["log_std"])
    return (-0.5 * z**2 - p["log_std"] - 0.919).sum(-1)


def acting_program(params, belief, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    belief = jnp.where(x["first"], jax.nn.log_softmax(p["start"]), belief)
    joint = belief + log_likely(p, x["obs"])
    evidence = jax.nn.logsumexp(joint)
    now = joint - evidence
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], jnp.exp(now)))
    moves = jax.nn.log_softmax(p["moves"][x["action"]])
    return -evidence - log_p[x["action"]], jax.nn.logsumexp(now[:, None] + moves, axis=0)


def acting_plain(p, _, data):
    start, moves = jax.nn.log_softmax(p["start"]), jax.nn.log_softmax(p["moves"])

    def body(belief, x):
        first, likely, action = x
        joint = jnp.where(first[:, None], start, belief) + likely
        evidence = jax.nn.logsumexp(joint, axis=-1)
        now = joint - evidence[:, None]
        return jax.nn.logsumexp(now[:, :, None] + moves[action], axis=1), (evidence, now)

    likely = log_likely(p, data["obs"])
    _, (evidence, now) = jax.lax.scan(body, jnp.zeros_like(likely[0]), (data["first"], likely, data["action"]))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], jnp.exp(now)))
    return (-evidence - c.pick(log_p, data["action"])).mean()


def acting(length, batch, states, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.02)
    data = {"obs": data["obs"], "action": data["action"], "first": begins(data)}
    p = acting_params(jax.random.key(0), states, hidden)
    start = jnp.zeros((batch, states))
    return parts.learner(acting_program, parts.usual(acting_plain), length, batch, p, (), data, start)


# -- a Kalman filter, whose dynamics and noise are learned: the likelihood of what is observed


def kalman_params(key, states):
    k = jax.random.split(key, 3)
    return {
        "moves": 0.9 * jnp.eye(states) + 0.05 * jax.random.normal(k[0], (states, states)),
        "shows": c.dense(k[1], states, OBS)["w"], "pushes": c.dense(k[2], ACTIONS, states)["w"],
        "log_moved": jnp.full(states, -1.0), "log_seen": jnp.zeros(OBS),
    }  # fmt: skip


def kalman_step(p, mean, cov, x):
    """Of one environment: the new moments, and the log-likelihood of what was observed."""
    mean = p["moves"] @ mean + x["action"] @ p["pushes"]
    cov = p["moves"] @ cov @ p["moves"].T + jnp.diag(jnp.exp(p["log_moved"]))
    error = x["obs"] - mean @ p["shows"]
    spread = p["shows"].T @ cov @ p["shows"] + jnp.diag(jnp.exp(p["log_seen"]))
    root = jnp.linalg.cholesky(spread)
    white = jax.scipy.linalg.solve_triangular(root, error, lower=True)
    gain = jax.scipy.linalg.cho_solve((root, True), p["shows"].T @ cov).T
    log_p = -0.5 * (white**2).sum() - jnp.log(jnp.diag(root)).sum() - 0.919 * OBS
    return mean + gain @ error, cov - gain @ p["shows"].T @ cov, log_p


def kalman_program(params, carry, t):
    (p, _), data = params
    mean, cov, log_p = kalman_step(p, *carry, rlfx.inputs(data)[t])
    return -log_p, (mean, cov)


def kalman_plain(start):
    def loss(p, _, data):
        def body(state, x):
            mean, cov, log_p = jax.vmap(kalman_step, (None, 0, 0, 0))(p, *state, x)
            return (mean, cov), log_p

        return -jax.lax.scan(body, start, data)[1].mean()

    return parts.usual(loss)


def kalman(length, batch, states):
    data = parts.stored(1, length, batch, (OBS,), (ACTIONS,))
    data = {name: data[name] for name in ("obs", "action")}
    start = jnp.zeros((batch, states)), jnp.tile(jnp.eye(states), (batch, 1, 1))
    p = kalman_params(jax.random.key(0), states)
    return parts.learner(kalman_program, kalman_plain(start), length, batch, p, (), data, start)
