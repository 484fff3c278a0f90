"""Networks as plain pytrees: the policies of most examples (see `policies.py` for flax and equinox)."""

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


def patches(x, size=3):
    """``x[h, w, c] -> [h - size + 1, w - size + 1, size * size * c]``: what a kernel sees at each place.

    A convolution is a product of this with its weights. With the networks of many seeds under `jax.vmap` it stays a product.
    """
    h, w = (n - size + 1 for n in x.shape[:2])
    return jnp.concatenate([x[i : i + h, j : j + w] for i in range(size) for j in range(size)], -1)


def init_cnn(key, shape, channels, sizes, last_scale=1.0):
    """A convolution of 3 x 3 of images of ``shape``, and an MLP of what it gives, as `cnn` takes them."""
    h, w, c = shape
    kernel_key, mlp_key = jax.random.split(key)
    kernel = init_mlp(kernel_key, (9 * c, channels), 2**0.5)
    return {"kernel": kernel, "head": init_mlp(mlp_key, ((h - 2) * (w - 2) * channels, *sizes), last_scale)}


def cnn(params, x):
    """``x[h, w, c] -> [out]``."""
    return mlp(params["head"], jax.nn.relu(mlp(params["kernel"], patches(x))).reshape(-1))
