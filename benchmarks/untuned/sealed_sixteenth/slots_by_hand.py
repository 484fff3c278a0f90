"""Q-learning by slot attention by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_sixteenth import slots as given
from benchmarks.untuned.sealed_sixteenth.slots import (
    ACTIONS,
    CHANNELS,
    FIRST,
    GAMMA,
    LAMBDA,
    ROUNDS,
    SMALL,
    gated,
    loss_of,
    normed,
    params_of,
    refined,
    relu,
    tokens_of,
    values,
)  # fmt: skip

# -- convolutions: tokens ``[N, tokens, width]`` of frames ``[N, side, side, CHANNELS]``


def shifts(x, stride):
    """Of ``[N, side, side, C]`` all nine neighbours, ``[N, side / stride, side / stride, 9 C]``, padded as SAME is."""
    side = x.shape[1]
    before = 1 if stride == 1 else 0
    x = jnp.pad(x, ((0, 0), (before, 2 - before), (before, 2 - before), (0, 0)))
    parts = [x[:, i : i + side : stride, j : j + side : stride] for i in range(3) for j in range(3)]
    return jnp.concatenate(parts, -1)


def by_products(p, frames, second_too=True):
    """Convolutions are products of neighbours; ``second_too``: both of them."""
    x = relu(shifts(frames, 1) @ p["first"]["w"].reshape(9 * CHANNELS, FIRST) + p["first"]["b"])
    if second_too:
        x = shifts(x, 2) @ p["second"]["w"].reshape(9 * FIRST, -1)
    else:
        x = jax.lax.conv_general_dilated(x, p["second"]["w"], (2, 2), "SAME", dimension_numbers=given.LAYOUT)
    x = relu(x + p["second"]["b"])
    return normed(p["of_tokens"], x.reshape(len(x), -1, x.shape[-1]) + p["place"])


first_by_products = functools.partial(by_products, second_too=False)


def channels_first(p, frames):
    """The usual layout of XLA's convolutions elsewhere."""

    def conv(layer, x, stride):
        made = jax.lax.conv_general_dilated(
            x,
            jnp.transpose(layer["w"], (3, 2, 0, 1)),
            (stride, stride),
            "SAME",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )
        return made + layer["b"][:, None, None]

    x = relu(conv(p["second"], relu(conv(p["first"], jnp.moveaxis(frames, 3, 1), 1)), 2))
    return normed(p["of_tokens"], x.reshape(*x.shape[:2], -1).mT + p["place"])


# -- slots ``[N, slots, width]``


def shares(scores):
    """``[N, slots, tokens]``, of tokens 1 in all."""
    share = jax.nn.softmax(scores, axis=1) + SMALL
    return share / share.sum(2, keepdims=True)


def of_rows(p, tokens):
    """Keys and values are one product, and slots of all frames are rows."""
    count, _, width = tokens.shape
    key, value = jnp.split(tokens @ jnp.concatenate([p["k"], p["v"]], -1), 2, -1)
    slots = jnp.broadcast_to(p["slots"], (count, *p["slots"].shape))
    for _ in range(ROUNDS):
        query = normed(p["of_slots"], slots) @ (p["q"] / width**0.5)
        taken = shares(jnp.einsum("nsw,ntw->nst", query, key)) @ value
        slots = refined(p, gated(c.linear(p["x"], taken), slots @ p["h"], slots))
    return slots


def joined(p):
    """Weights that follow one another are one: of queries and keys, of values and the GRU's input."""
    return (p["q"] / p["k"].shape[1] ** 0.5) @ p["k"].T, p["v"] @ p["x"]["w"]


def once(p, tokens, x, slots, known=None):
    """One round; ``known``: of slots that all frames share."""
    of_query, of_taken = x
    if known is None:
        query, of_h = normed(p["of_slots"], slots) @ of_query, slots @ p["h"]
        scores = jnp.einsum("nsw,ntw->nst", query, tokens)
    else:
        query, of_h = normed(p["of_slots"], known) @ of_query, known @ p["h"]
        scores, slots = (tokens @ query.T).mT, known
    taken = shares(scores) @ tokens
    return refined(p, gated(taken @ of_taken + p["x"]["b"], of_h, slots))


def without_keys(p, tokens, again=False):
    """Tokens themselves are attended to: a frame has more of them than slots in all rounds."""
    x = joined(p)
    go = jax.checkpoint(once) if again else once
    slots = jnp.broadcast_to(p["slots"], (len(tokens), *p["slots"].shape))
    for _ in range(ROUNDS):
        slots = go(p, tokens, x, slots)
    return slots


def first_shared(p, tokens, again=False):
    """The same, and what all frames begin with is multiplied once."""
    x = joined(p)
    go = jax.checkpoint(once) if again else once
    slots = go(p, tokens, x, None, p["slots"])
    for _ in range(ROUNDS - 1):
        slots = go(p, tokens, x, slots)
    return slots


def keys_first_shared(p, tokens):
    """Keys and values are made, and the first round's products are those of one frame."""
    width = tokens.shape[2]
    key, value = jnp.split(tokens @ jnp.concatenate([p["k"], p["v"] @ p["x"]["w"]], -1), [width], -1)
    slots = p["slots"]
    for i in range(ROUNDS):
        query, of_h = normed(p["of_slots"], slots) @ (p["q"] / width**0.5), slots @ p["h"]
        scores = (key @ query.T).mT if i == 0 else jnp.einsum("nsw,ntw->nst", query, key)
        slots = refined(p, gated(shares(scores) @ value + p["x"]["b"], of_h, slots))
    return slots


# -- what is learnt


def by_hand(length, batch, tokens=tokens_of, slots=of_rows, chunk=None, again=False):
    """``chunk``: timesteps of a block; ``again``: tokens are made again for the gradient."""
    scale = 1.0 / (length * batch)
    make = jax.checkpoint(tokens) if again else tokens

    def network(p, frames):
        return values(p, slots(p, make(p, frames)))

    def at_once(p, target, data):
        frames = c.rows_of(data["frame"])
        each = lambda nets: network(nets, frames).reshape(length, batch, ACTIONS)  # noqa: E731
        return jax.value_and_grad(lambda p: scale * loss_of(each(p), each(target), data))(p)

    def in_blocks(p, target, data):
        """From the last block to the first: the return of a block begins with what followed it."""

        def step(carry, x):
            value, grads, following, after = carry
            rows = c.rows_of(x["frame"])
            q, pull = jax.vjp(lambda p: network(p, rows), p)
            best = c.pick(network(target, rows), jnp.argmax(q, -1)).reshape(chunk, batch)
            going = GAMMA * (1.0 - x["done"].astype(jnp.float32))
            aims = [None] * chunk
            for i in range(chunk - 1, -1, -1):
                aims[i] = after = x["reward"][i] + going[i] * ((1.0 - LAMBDA) * following + LAMBDA * after)
                following = best[i]
            error = c.pick(q, x["action"].reshape(-1)) - jnp.stack(aims).reshape(-1)
            hot = jax.nn.one_hot(x["action"].reshape(-1), ACTIONS)
            (by,) = pull(scale * error[:, None] * hot)
            return (value + 0.5 * scale * (error**2).sum(), jax.tree.map(jnp.add, grads, by), following, after), None

        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p), jnp.zeros(batch), jnp.zeros(batch)
        value, grads, _, _ = jax.lax.scan(step, none, c.in_chunks(data, chunk), reverse=True)[0]
        return stop_gradient((value, grads))

    return at_once if chunk is None else in_blocks


def workload(length, batch, side, width, slots, chunk=1):
    make = functools.partial(by_hand, length, batch)
    both, one = {"tokens": by_products}, {"tokens": first_by_products}
    less, shared = {"slots": without_keys}, {"slots": first_shared}
    rounds_again = {"slots": functools.partial(first_shared, again=True)}
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "rows": make(), "rows, products": make(**both), "rows, channels first": make(channels_first),
        "without keys": make(**less), "without keys, products": make(**less, **both),
        "first round shared, products": make(**shared, **both),
        "first round shared, first by products": make(**shared, **one),
        "keys, first round shared, products": make(by_products, keys_first_shared),
        "first round shared, again, products": make(**rounds_again, **both, again=True),
        f"rows, blocks of {chunk}": make(chunk=chunk), f"rows, products, blocks of {chunk}": make(**both, chunk=chunk),
        f"first round shared, products, blocks of {chunk}": make(**shared, **both, chunk=chunk),
        f"first round shared, products, blocks of {2 * chunk}": make(**shared, **both, chunk=2 * chunk),
        f"first round shared, first by products, blocks of {chunk}": make(**shared, **one, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "frame": jax.random.uniform(k[0], (*size, side, side, CHANNELS)), "reward": jax.random.normal(k[1], size),
        "action": jax.random.randint(k[2], size, 0, ACTIONS), "done": (jax.random.uniform(k[3], size) < 0.05).at[-1].set(True),
    }  # fmt: skip
    return Workload(
        forms, (params_of(k[4], side, width, slots), params_of(k[5], side, width, slots), data), tolerance=5e-6
    )
