"""Multilayer perceptrons as plain pytrees: the policies of most examples (see `policies.py` for flax and equinox)."""

import jax
import jax.numpy as jnp


def init_mlp(key, sizes, last_scale=1.0):
    """Orthogonal weights and zero biases: a list of ``(w[in, out], b[out])``."""
    shapes = list(zip(sizes[:-1], sizes[1:], strict=True))
    scales = [2**0.5] * (len(shapes) - 1) + [last_scale]
    keys = jax.random.split(key, len(shapes))
    weights = [jax.nn.initializers.orthogonal(g)(k, s) for k, s, g in zip(keys, shapes, scales, strict=True)]
    return [(w, jnp.zeros(w.shape[1])) for w in weights]


def one_each(fn, keys):
    """``jax.vmap(fn)(keys)``, key by key: on a CPU two batched QRs of one program may wait for each other's threads, for ever."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(fn, keys))


def mlp(layers, x):
    """``x[in] -> [out]``, for one environment: tanh between the layers."""
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        x = jnp.tanh(x @ w + b)
    return x @ w_out + b_out


def init_actor_critic(key, sizes):
    """Two networks, ``{"actor": ..., "critic": ...}``; ``sizes`` are the actor's, the critic has one output."""
    actor_key, critic_key = jax.random.split(key)
    return {"actor": init_mlp(actor_key, sizes, 0.01), "critic": init_mlp(critic_key, (*sizes[:-1], 1))}


def actor(params, obs):
    """Log-probabilities of the actions, ``[actions]``."""
    return jax.nn.log_softmax(mlp(params["actor"], obs))


def critic(params, obs):
    """The value of an observation, a scalar."""
    return mlp(params["critic"], obs)[0]
