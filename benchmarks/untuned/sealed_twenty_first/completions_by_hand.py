"""GRPO by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twenty_first import completions as given
from benchmarks.untuned.sealed_twenty_first.completions import (
    HEADS,
    TOKENS,
    advantages,
    log_probs_of,
    params_of,
    point_loss,
)  # fmt: skip


def one_product_normed(x):
    """Both means by one product with ones."""
    n = x.shape[-1]
    ones = np.full((n, 1), 1.0 / n, np.float32)
    less = x - x @ ones
    return less * jax.lax.rsqrt((less * less) @ ones + 1e-5)


# -- what heads find, of ``q, k, v[B, T, HEADS, w]``


def square(q, k, v):
    """All pairs; divided after the product."""
    mask = np.triu(np.full((q.shape[1],) * 2, -np.inf, np.float32), 1)
    scores = jnp.einsum("bqhw,bkhw->bhqk", q, k) + mask
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    found = jnp.einsum("bhqk,bkhw->bhqw", weights, v) / weights.sum(-1, keepdims=True)
    return found.swapaxes(1, 2)


def in_pieces(attend, pieces, q, k, v):
    """Some queries after the others, each with no more keys than there are."""
    length, found = q.shape[1], []
    for i in range(pieces):
        a, b = i * length // pieces, (i + 1) * length // pieces
        found.append(attend(q[:, a:b], k[:, :b], v[:, :b], a))
    return jnp.concatenate(found, 1)


def piece(q, k, v, begin):
    n, m = q.shape[1], k.shape[1]
    mask = np.where(np.arange(m) <= begin + np.arange(n)[:, None], 0.0, -np.inf).astype(np.float32)
    scores = jnp.einsum("bqhw,bkhw->bhqk", q, k) + mask
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    found = jnp.einsum("bhqk,bkhw->bhqw", weights, v) / weights.sum(-1, keepdims=True)
    return found.swapaxes(1, 2)


def turned_scores(q, k, v):
    """Keys before queries, so that sums over keys go along rows."""
    mask = np.tril(np.full((q.shape[1],) * 2, -np.inf, np.float32), -1)
    scores = jnp.einsum("bqhw,bkhw->bhkq", q, k) + mask
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-2, keepdims=True)))
    found = jnp.einsum("bhkq,bkhw->bhwq", weights, v) / weights.sum(-2, keepdims=True)
    return found.transpose(0, 3, 1, 2)


class Way(NamedTuple):
    attend: Any = square
    normed: Any = given.normed
    rows: bool = True  # products of rows
    ones: bool = False  # tokens are looked up, and picked, by products with one-hot vectors
    answers: int | None = None  # so many after the others


def by_hand(length, batch, group, way):
    def layered(layer, x):
        shape, width = x.shape, x.shape[-1]
        flat = (lambda x: x.reshape(-1, x.shape[-1])) if way.rows else (lambda x: x)
        scale = np.repeat(np.float32([1.0 / np.sqrt(width // HEADS), 1.0, 1.0]), width)
        qkv = flat(way.normed(x)) @ (layer["qkv"]["w"] * scale) + layer["qkv"]["b"] * scale
        q, k, v = (part.reshape(*shape[:-1], HEADS, -1) for part in jnp.split(qkv, 3, -1))
        x = flat(x) + c.linear(layer["out"], way.attend(q, k, v).reshape(flat(x).shape))
        x = x + c.linear(layer["down"], jax.nn.gelu(c.linear(layer["up"], way.normed(x))))
        return x.reshape(shape)

    def log_prob_of(p, x):
        ones = lambda i: jax.nn.one_hot(i, TOKENS)  # noqa: E731
        x, follows = (ones(x["token"]) @ p["token"] if way.ones else p["token"][x["token"]]) + p["place"], x["follows"]
        for layer in p["layers"]:
            x = layered(layer, x)
        logits = c.linear(p["head"], way.normed(x))
        picked = (logits * ones(follows)).sum(-1) if way.ones else c.pick(logits, follows)
        return picked - jax.nn.logsumexp(logits, -1)

    def lost(log_prob, of_reference, x):
        made = point_loss(log_prob, x["old"], of_reference, x["advantage"][:, None])
        return ((made * x["written"]).sum(1) / x["written"].sum(1)).sum() / batch

    def some(p, reference, x):
        of_reference = log_prob_of(reference, x)
        return jax.value_and_grad(lambda p: lost(log_prob_of(p, x), of_reference, x))(p)

    def run(p, reference, data, reward):
        x = jax.tree.map(lambda x: x.swapaxes(0, 1), data)
        x |= {"written": x["written"].astype(jnp.float32), "advantage": advantages(reward, group)}
        if way.answers is None:
            return some(p, reference, x)
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, reference, x)), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), c.in_chunks(x, way.answers))[0]

    return run


def workload(length, batch, group, width, answers=4, pieces=3):
    make, best = functools.partial(by_hand, length, batch, group), Way(normed=one_product_normed)
    turned, cut = best._replace(attend=turned_scores), best._replace(attend=functools.partial(in_pieces, piece, pieces))
    some = {"answers": answers}
    forms = {
        "rlfx": given.by_rlfx(length, batch, group), "plain": given.plain(length, batch, group),
        "rows": make(Way()), "rows, one-hot": make(Way(ones=True)), f"{answers} answers": make(Way(**some)),
        "norms by products": make(best), "norms by products, turned": make(turned),
        f"norms by products, {pieces} pieces": make(cut), f"norms by products, {answers} answers": make(best._replace(**some)),
        f"norms by products, turned, {answers} answers": make(turned._replace(**some)),
        f"norms by products, turned, {2 * answers} answers": make(turned._replace(answers=2 * answers)),
        f"norms by products, {pieces} pieces, {answers} answers": make(cut._replace(**some)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    reference = params_of(k[0], length, width)
    p = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(k[1], x.shape), reference)
    tokens = jax.random.randint(k[2], (batch, length + 1), 0, TOKENS)
    asked = jnp.repeat(jax.random.randint(k[3], (batch // group,), length // 6, length // 2), group)[:, None]
    ends = jax.random.randint(k[4], (batch, 1), 2 * length // 3, length + 1)
    places = jnp.arange(length)
    log_probs = c.pick(log_probs_of(p, tokens[:, :-1]), tokens[:, 1:])
    data = {
        "token": tokens[:, :-1], "follows": tokens[:, 1:], "written": (places >= asked) & (places < ends),
        "old": log_probs + 0.2 * jax.random.normal(k[5], log_probs.shape),
    }  # fmt: skip
    data = jax.tree.map(lambda x: x.swapaxes(0, 1), data)
    return Workload(forms, (p, reference, data, jax.random.normal(k[6], (batch,))))
