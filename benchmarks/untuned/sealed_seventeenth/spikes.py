"""A spiking actor and critic (leaky integrate-and-fire neurons, as snnTorch's, Eshraghian et al. 2023; as an actor, Tang et al.
2020), learnt from stored sequences with generalised advantages: an observation is a current for some ticks; two layers, the
second with synapses back to itself, fire where their potential is above one and begin anew, and go on from one timestep to the
next; derivatives of spikes are surrogates (fast sigmoids). Weights are multiples of 1/64, so that sums of spikes are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, TICKS, LEAK, SLOPE, GAMMA, LAMBDA = 16, 5, 4, 0.5, 5.0, 0.99, 0.95


def params_of(key, hidden):
    k = jax.random.split(key, 6)
    coarse = lambda p, scale: jax.tree.map(lambda w: jnp.round(64.0 * scale * w) / 64.0, p)  # noqa: E731
    return {
        "a": coarse(c.dense(k[0], OBS, hidden), 1.0), "b": coarse(c.dense(k[1], hidden, hidden), 2.0),
        "back": coarse(c.dense(k[2], hidden, hidden)["w"], 1.0), "pi": c.dense(k[3], hidden, ACTIONS),
        "v": c.dense(k[4], hidden, 1),
    }  # fmt: skip


def at_rest(hidden):
    """Potentials of both layers, and spikes of the second."""
    return {"a": jnp.zeros(hidden), "b": jnp.zeros(hidden), "fired": jnp.zeros(hidden)}


@jax.custom_jvp
def spike(above):
    return (above > 0).astype(jnp.float32)


@spike.defjvp
def surrogate(primals, tangents):
    (above,), (moved,) = primals, tangents
    return spike(above), moved / (1.0 + SLOPE * jnp.abs(above)) ** 2


def fired(potential, current):
    """Spikes, and potentials behind them."""
    potential = LEAK * potential + current
    out = spike(potential - 1.0)
    return potential * (1.0 - stop_gradient(out)), out


def tick(p, current, state):
    a, first = fired(state["a"], current)
    b, second = fired(state["b"], c.linear(p["b"], first) + state["fired"] @ p["back"])
    return {"a": a, "b": b, "fired": second}, second


def program(params, state, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    state = jax.tree.map(lambda s: jnp.where(x["first"], 0.0, s), state)
    current = c.linear(p["a"], x["obs"])
    state, spikes = jax.lax.scan(lambda s, _: tick(p, current, s), state, None, length=TICKS)
    rates = spikes.mean(0)
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], rates)), c.linear(p["v"], rates)[0]
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=LAMBDA))
    target = stop_gradient(advantage + value)
    return c.actor_critic_loss(log_p, value, log_p[x["action"]], advantage, target), state


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, state: jax.value_and_grad(lambda p: loss_fn((p, data), state)[0])(p)


# -- by hand, as usual


def loss_of(logits, value, data):
    """Of ``[T, B]``, summed."""
    log_p = jax.nn.log_softmax(logits)
    advantage = stop_gradient(c.gae(value, jnp.zeros_like(value[0]), data["reward"], data["done"], GAMMA, LAMBDA))
    return c.actor_critic_loss(
        log_p, value, c.pick(log_p, data["action"]), advantage, stop_gradient(advantage + value)
    ).sum()


def plain(length, batch):
    def run(p, data, state):
        def loss(p):
            def step(state, x):
                state = jax.tree.map(lambda s: jnp.where(x["first"][:, None], 0.0, s), state)
                current = c.linear(p["a"], x["obs"])
                state, spikes = jax.lax.scan(lambda s, _: tick(p, current, s), state, None, length=TICKS)
                rates = spikes.mean(0)
                return state, (c.linear(p["pi"], rates), c.linear(p["v"], rates)[:, 0])

            _, (logits, value) = jax.lax.scan(step, state, data)
            return loss_of(logits, value, data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
