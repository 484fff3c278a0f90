"""Categorical double DQN (C51, Bellemare et al. 2017) on replayed boards as of MinAtar: one convolution, a distribution over 51
returns for every action, and targets of three steps that are spread over those returns again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

ACTIONS, PLANES, ATOMS, LARGEST, GAMMA, STEPS = 6, 4, 51, 10.0, 0.99, 3
ATOM = np.linspace(-LARGEST, LARGEST, ATOMS, dtype=np.float32)
APART = np.float32(2 * LARGEST / (ATOMS - 1))
relu = jax.nn.relu
DIMENSIONS = "NHWC", "HWIO", "NHWC"


def params_of(key, side, channels, hidden):
    k = jax.random.split(key)
    kernel = jax.random.normal(k[0], (3, 3, PLANES, channels)) / np.float32(np.sqrt(9 * PLANES))
    return {"kernel": kernel, "dense": c.mlp_params(k[1], (channels * (side - 2) ** 2, hidden, ACTIONS * ATOMS))}


def features(p, boards):
    """Of boards ``[N, side, side, PLANES]``, rows of them."""
    x = boards.astype(jnp.float32)
    x = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "VALID", dimension_numbers=DIMENSIONS)
    return relu(x).reshape(len(x), -1)


def distributions(p, boards, of=features):
    """Logarithms of probabilities ``[N, ACTIONS, ATOMS]``."""
    made = c.mlp(p["dense"], of(p, boards), relu).reshape(-1, ACTIONS, ATOMS)
    return jax.nn.log_softmax(made)


def expected(log_probs):
    return (jnp.exp(log_probs) * ATOM).sum(-1)


def spread(probs, gained, left):
    """The distribution ``probs[..., ATOMS]`` of ``gained + left * ATOM``, on the atoms: each is shared by its two neighbours."""
    where = jnp.clip(gained[..., None] + left[..., None] * ATOM, -LARGEST, LARGEST)
    near = jnp.clip(1.0 - jnp.abs(where[..., None, :] - ATOM[:, None]) / APART, 0.0, 1.0)
    return (near * probs[..., None, :]).sum(-1)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    log_probs = distributions(p, x["board"][None])[0]
    best = jnp.argmax(expected(log_probs))
    probs = jnp.exp(distributions(target, x["board"][None])[0, best])
    later = rlfx.series(stop_gradient(probs), end=jnp.zeros(ATOMS))[t + STEPS]
    going = rlfx.series(GAMMA * (1.0 - x["done"]))[t : t + STEPS]
    gained = rlfx.discounted_sum(rlfx.series(x["reward"])[t : t + STEPS], going)
    aim = spread(later, gained, jnp.prod(going))
    return jnp.where(t + STEPS < t.length, -(stop_gradient(aim) * log_probs[x["action"]]).sum(), 0.0), carry


# -- by hand, as usual


def nearest(data):
    """What is gained in three steps, and what is left then, ``[T - STEPS, B]``."""
    counted = len(data["reward"]) - STEPS
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    gained, left = 0.0, 1.0
    for i in range(STEPS):
        gained = gained + left * data["reward"][i : i + counted]
        left = left * going[i : i + counted]
    return gained, left


def taken(values, action):
    return jnp.take_along_axis(values, action[..., None, None], -2)[..., 0, :]


def plain(length, batch):
    def run(p, target, data, key=None):
        flat = lambda p: jax.vmap(lambda boards: distributions(p, boards))(data["board"])  # noqa: E731
        gained, left = nearest(data)

        def loss(p):
            log_probs = flat(p)
            best = jnp.argmax(expected(log_probs), -1)
            later = taken(jnp.exp(flat(target)), best)[STEPS:]
            aim = stop_gradient(spread(later, gained, left))
            found = -(aim * taken(log_probs, data["action"])[:-STEPS]).sum(-1)
            return found.sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
