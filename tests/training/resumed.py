"""Runs to be killed, with arrays that take a while to save: ``resumed.py AGENT DIRECTORY UPDATES``.

What they compile is kept beside the directory: only the first one waits for it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from rlfx.training import Checkpoints, run
from rlfx.training.cache import kept_programs

LENGTH, BATCH, CAPACITY, WIDTH, AGENTS = 4, 2, 64, 2048, 2


def replay(_, carry, t):
    """A step of a random walk, remembered; parameters follow what is read at random, and moments count it."""
    x, memory, weights, moments = carry
    x = x + jax.random.normal(t.key_for("x"), (WIDTH,))
    memory = rlfx.series(x, history=memory)
    i = jax.random.randint(t.key_for("i"), (), jnp.maximum(t.now - CAPACITY + 1, 0), t.now + 1)
    y, moments = rlfx.normalize(memory[i], moments)
    weights = rlfx.shared(lambda y: 0.9 * weights + 0.1 * jnp.tanh(y).mean(0), y)
    return (x, memory.history, weights, moments), None


PROGRAM = rlfx.unroll(replay, length=LENGTH, batch=BATCH)


def init(key):
    zeros = jnp.zeros(WIDTH)
    memory = rlfx.History(CAPACITY, like=zeros, batch=BATCH)
    carry = (jnp.zeros((BATCH, WIDTH)), memory, rlfx.Shared(zeros), rlfx.Shared(rlfx.Moments.of(zeros)))
    return {"carry": carry, "t0": jnp.int32(0), "key": key, "empty": jnp.zeros((0, 2))}


def one(agent, key):
    key = jax.random.fold_in(key, jax.random.bits(agent["key"], (), jnp.uint32))
    carry, _ = PROGRAM(None, agent["carry"], key, t0=agent["t0"])
    following = {"carry": carry, "t0": agent["t0"] + LENGTH, "key": jax.random.split(agent["key"])[0]}
    return {**following, "empty": agent["empty"]}, {"weights": carry[2].value.mean()}


update = jax.vmap(one)


def walk(agent, key):
    """An update that compiles at once, and takes less time than to save what it made."""
    x = agent["x"] + jax.random.normal(jax.random.fold_in(key, agent["n"]), (1, agent["x"].shape[1]))
    return {"x": x, "n": agent["n"] + 1}, None


def start_replay():
    return jax.vmap(init)(jax.random.split(jax.random.key(0), AGENTS)), jax.random.split(jax.random.key(7), AGENTS)


def start_walk():
    return {"x": jnp.zeros((2000, 1000)), "n": jnp.int32(0)}, jax.random.key(7)


#: ``(update, start() -> (agent, key))``
RUNS = {"replay": (update, start_replay), "walk": (walk, start_walk)}


def main(name, directory, updates):
    update, start = RUNS[name]
    with kept_programs(f"{directory}-programs"):
        agent, key = start()
        run(update, agent, key, updates=updates, per_call=2, callbacks=[Checkpoints(directory, every=1)])


def leaves(agent):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(plain(x)) for x in jax.tree.leaves(agent)]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
