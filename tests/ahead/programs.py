"""Small programs whose compilations are recorded, and of which it is known by hand what they launch."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

STEPS, ROUNDS = 50, 7
S = jax.ShapeDtypeStruct


def loops(x, w):
    """A loop of 50 iterations forward, and one backward."""

    def value(w):
        def body(c, r):
            c = jnp.tanh(c @ w) + r
            return c, c

        return jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1].sum()

    return jax.grad(value)(w)


def open_ended(x):
    """A loop that ends when data says, with one of seven iterations inside, and a conditional before."""

    def body(x):
        return jax.lax.fori_loop(0, ROUNDS, lambda i, x: jnp.sin(x) @ x, x)

    x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sort(x, axis=0) @ x, lambda x: x, x)
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, body, x)


def split(mesh):
    """A sum over the devices once, and one in each of seven iterations."""

    def on_one(x):
        def body(i, c):
            return c + jax.lax.psum(jnp.tanh(x).sum(0) + c, "b")

        c = jax.lax.fori_loop(0, ROUNDS, body, jnp.zeros(x.shape[1]))
        return jax.lax.psum(c @ c, "b")

    over = {"in_specs": PartitionSpec("b"), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.shard_map(on_one, mesh=mesh, **over)


def split_shape(mesh):
    return S((64, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("b")))


def hosted(x):
    """Rows computed one by one go to the host's memory, and come back one by one."""
    host = jax.memory.Space.Host

    def forth(c, row):
        c = jnp.tanh(c + row)
        return c, jax.device_put(c, host)

    def back(c, row):
        return jnp.sin(c) * jax.device_put(row, jax.memory.Space.Device), None

    last, kept = jax.lax.scan(forth, jnp.zeros(x.shape[1]), x)
    return jax.lax.scan(back, last, kept, reverse=True)[0]


LOOPS = (S((STEPS, 512, 64), jnp.float32), S((64, 64), jnp.float32))
OPEN_ENDED = (S((128, 128), jnp.float32),)
HOSTED = (S((STEPS, 4096), jnp.float32),)
