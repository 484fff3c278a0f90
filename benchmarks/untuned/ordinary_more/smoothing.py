"""Learners that estimate what is hidden: by what was and what will be seen, and by particles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.critics import noises
from benchmarks.untuned.ordinary.parts import relu

ACTIONS, SYMBOLS = 6, 64

# -- forwards and backwards through a hidden Markov model; a policy that is to imitate reads what is believed with hindsight


def smoothed_params(key, states, hidden):
    k = jax.random.split(key, 4)
    return {
        "start": jax.random.normal(k[0], (states,)), "moves": 2.0 * jax.random.normal(k[1], (states, states)),
        "shows": 2.0 * jax.random.normal(k[2], (states, SYMBOLS)), "pi": c.mlp_params(k[3], (states, hidden, hidden, ACTIONS)),
    }  # fmt: skip


def summing_to_one(x):
    return x / x.sum(-1, keepdims=True)


def smoothed_program(params, belief, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    moves, likely = jax.nn.softmax(p["moves"]), jax.nn.softmax(p["shows"])[:, x["symbol"]]
    belief = jnp.where(t == 0, jax.nn.softmax(p["start"]), belief)
    told = rlfx.solve(lambda m: summing_to_one(likely * (moves @ m[t + 1])), end=jnp.ones_like(belief))
    joint = belief * likely
    evidence = joint.sum()
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], summing_to_one(belief * told), relu))
    return -jnp.log(evidence) - log_p[x["action"]], (joint / evidence) @ moves


def smoothed_plain(p, _, data):
    moves, likely = jax.nn.softmax(p["moves"]), jax.nn.softmax(p["shows"]).T[data["symbol"]]

    def forwards(belief, likely):
        joint = belief * likely
        evidence = joint.sum(-1)
        return (joint / evidence[:, None]) @ moves, (belief, evidence)

    def backwards(told, likely):
        told = summing_to_one(likely * (told @ moves.T))
        return told, told

    start = jnp.broadcast_to(jax.nn.softmax(p["start"]), likely[0].shape)
    _, (belief, evidence) = jax.lax.scan(forwards, start, likely)
    _, told = jax.lax.scan(backwards, jnp.ones_like(start), likely, reverse=True)
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], summing_to_one(belief * told), relu))
    return (-jnp.log(evidence) - c.pick(log_p, data["action"])).mean()


def smoothed(length, batch, states, hidden):
    k = jax.random.split(jax.random.key(1))
    numbers = lambda key, n: jax.random.randint(key, (length, batch), 0, n)  # noqa: E731
    data = {"symbol": numbers(k[0], SYMBOLS), "action": numbers(k[1], ACTIONS)}
    p, start = smoothed_params(jax.random.key(0), states, hidden), jnp.zeros((batch, states))
    return parts.learner(smoothed_program, parts.usual(smoothed_plain), length, batch, p, (), data, start)


# -- a particle filter whose dynamics are learned; particles are drawn again by their weights, softly, so that these learn

OBS, PLACE, DIMS, SOFT = 8, 4, 3, 0.5


def particles_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "moves": c.mlp_params(k[0], (PLACE + DIMS, hidden, PLACE)), "shows": c.mlp_params(k[1], (PLACE, hidden, OBS)),
        "log_moved": jnp.full(PLACE, -1.5), "log_seen": jnp.zeros(OBS),
    }  # fmt: skip


def moved(p, particles, log_weight, x, noise):
    """Of one environment: particles ``[N, PLACE]``, their new log-weights, and the log-likelihood of what is seen."""
    action = jnp.broadcast_to(x["action"], (len(particles), DIMS))
    particles = particles + 0.3 * c.mlp(p["moves"], jnp.concatenate([particles, action], -1))
    particles = particles + jnp.exp(p["log_moved"]) * noise
    z = (x["obs"] - c.mlp(p["shows"], particles)) * jnp.exp(-p["log_seen"])
    log_weight = log_weight + (-0.5 * z**2 - p["log_seen"] - 0.919).sum(-1)
    evidence = jax.nn.logsumexp(log_weight)
    return particles, log_weight - evidence, evidence


def drawn_again(particles, log_weight, place):
    """Systematically: with one number ``place`` of [0, 1)."""
    n = len(particles)
    drawn = SOFT * jnp.exp(log_weight) + (1.0 - SOFT) / n
    which = jnp.searchsorted(jnp.cumsum(drawn), (place + jnp.arange(n)) / n)
    which = jnp.minimum(which, n - 1)
    log_weight = (log_weight - jnp.log(drawn))[which]
    return particles[which], log_weight - jax.nn.logsumexp(log_weight)


def filtered(p, carry, x, noise, place):
    particles, log_weight, evidence = moved(p, *carry, x, noise)
    guess = jnp.exp(log_weight) @ particles
    return ((guess - x["place"]) ** 2).sum() - 0.1 * evidence, drawn_again(particles, log_weight, place)


def particles_program(count):
    def program(params, carry, t):
        (p, _), data = params
        noise, place = jax.random.normal(t.key_for("noise"), (count, PLACE)), jax.random.uniform(t.key_for("place"))
        return filtered(p, carry, rlfx.inputs(data)[t], noise, place)

    return program


def particles_plain(length, batch, count, start):
    def loss(p, _, data, key):
        (noise,) = noises(key, ("noise",), length, batch, (count, PLACE))
        (keys,) = c.streams(key, batch, "place")
        place = jax.vmap(lambda t: jax.vmap(jax.random.uniform)(c.at(keys, t)))(jnp.arange(length))

        def body(carry, x):
            loss, carry = jax.vmap(filtered, (None, 0, 0, 0, 0))(p, carry, *x)
            return carry, loss

        return jax.lax.scan(body, start, (data, noise, place))[1].mean()

    return parts.usual(loss)


def particles(length, batch, count, hidden):
    k = jax.random.split(jax.random.key(2))
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    data = {"obs": data["obs"], "action": data["action"], "place": jax.random.normal(k[0], (length, batch, PLACE))}
    start = jax.random.normal(k[1], (batch, count, PLACE)), jnp.full((batch, count), -jnp.log(float(count)))
    program, plain = particles_program(count), particles_plain(length, batch, count, start)
    return parts.learner(program, plain, length, batch, particles_params(jax.random.key(0), hidden), (), data, start, random=True)
