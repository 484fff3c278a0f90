"""What ACKTR (Wu et al. 2017) learns from one batch of stored sequences: the gradient of an advantage actor critic of one
network, and of every layer both Kronecker factors of the Fisher information, means of products of its inputs and of its slopes,
those of the likelihood of an action and a value that the network itself would draw. Inverses are made now and then, elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA = 24, 6, 0.99, 0.95
LAYERS = ("one", "two", "pi", "v")


def params_of(key, hidden):
    """Biases are the last rows of matrices."""
    k = jax.random.split(key, 4)
    sizes = ((OBS, hidden), (hidden, hidden), (hidden, ACTIONS), (hidden, 1))
    return {
        name: jax.random.normal(key, (rows + 1, columns)) / rows**0.5
        for name, key, (rows, columns) in zip(LAYERS, k, sizes, strict=True)
    }


def with_one(x):
    return jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1))], -1)


def network(p, obs, nudge):
    """Logits, value, and the inputs of all layers; ``nudge`` is added to what comes out of their matrices."""
    inputs = {}

    def layer(name, x):
        inputs[name] = with_one(x)
        return inputs[name] @ p[name] + nudge[name]

    x = jnp.tanh(layer("two", jnp.tanh(layer("one", obs))))
    return layer("pi", x), layer("v", x)[..., 0], inputs


def log_likelihood(logits, value, drawn, seen):
    return jax.nn.log_softmax(logits)[drawn] - 0.5 * (value - seen) ** 2


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    none = {name: jnp.zeros(w.shape[1]) for name, w in p.items()}
    logits, value, inputs = network(p, x["obs"], none)
    log_p = jax.nn.log_softmax(logits)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=LAMBDA))
    target = stop_gradient(advantage + value)
    loss = c.actor_critic_loss(log_p, value, log_p[x["action"]], advantage, target)

    drawn = jax.random.categorical(t.key_for("action"), logits)
    seen = value + jax.random.normal(t.key_for("value"))

    def likelihood(nudge):
        logits, value, _ = network(p, x["obs"], nudge)
        return log_likelihood(logits, value, drawn, stop_gradient(seen))

    slopes = jax.grad(likelihood)(none)
    factors = {
        name: {
            "inputs": rlfx.mean(jnp.outer(inputs[name], inputs[name]), over=("t", "b")),
            "slopes": rlfx.mean(jnp.outer(slopes[name], slopes[name]), over=("t", "b")),
        }
        for name in LAYERS
    }
    return loss, carry, stop_gradient(factors)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, data, key):
        loss = lambda p: loss_fn((p, data), jnp.zeros(batch), key)  # noqa: E731
        (found, (_, factors)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, factors

    return run


# -- by hand, as usual


def drawn_by(keys, t):
    """What actions are drawn with (Gumbel's numbers), and what is added to values; by keys ``[B]`` of both streams."""
    of_action, of_value = (c.at(k, t) for k in keys)
    gumbels = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(of_action)
    return gumbels, jax.vmap(jax.random.normal)(of_value)


def loss_of(logits, value, data):
    """Of ``[T, B]``, summed."""
    log_p = jax.nn.log_softmax(logits)
    advantage = stop_gradient(c.gae(value, jnp.zeros_like(value[0]), data["reward"], data["done"], GAMMA, LAMBDA))
    return c.actor_critic_loss(
        log_p, value, c.pick(log_p, data["action"]), advantage, stop_gradient(advantage + value)
    ).sum()


def plain(length, batch):
    def run(p, data, key):
        none = {name: jnp.zeros(w.shape[1]) for name, w in p.items()}

        def loss(p):
            logits, value, inputs = network(p, data["obs"], none)
            return loss_of(logits, value, data) / (length * batch), (logits, value, inputs)

        (found, (logits, value, inputs)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        keys = c.streams(key, batch, "action", "value")
        gumbels, noise = jax.vmap(lambda t: drawn_by(keys, t))(jnp.arange(length))
        drawn = jnp.argmax(logits + gumbels, -1)

        def slopes_of(obs, drawn, seen):
            def likelihood(nudge):
                logits, value, _ = network(p, obs, nudge)
                return log_likelihood(logits, value, drawn, seen)

            return jax.grad(likelihood)(none)

        slopes = jax.vmap(jax.vmap(slopes_of))(data["obs"], drawn, value + noise)
        mean = lambda x: jnp.einsum("tbi,tbj->ij", x, x) / (length * batch)  # noqa: E731
        factors = {name: {"inputs": mean(inputs[name]), "slopes": mean(slopes[name])} for name in LAYERS}
        return found, grads, factors

    return run
