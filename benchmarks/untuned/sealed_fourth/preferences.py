"""DPO (Rafailov et al. 2023): a causal transformer over tokens, of which the better answer of a pair should be likelier than
the worse one, as against a reference. A sum over all tokens of both is what one logistic loss of a pair is of."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

HEADS, BETA = 4, 0.1


def params_of(key, length, words, width, layers):
    keys = iter(jax.random.split(key, 2 + 4 * layers))
    table = lambda n: jax.random.normal(next(keys), (n, width)) / np.float32(np.sqrt(width))  # noqa: E731

    def block():
        sizes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "wide": (width, 4 * width),
            "back": (4 * width, width),
        }
        norms = {"norm": jnp.ones(width), "norm2": jnp.ones(width)}
        return {name: c.dense(next(keys), *size) for name, size in sizes.items()} | norms

    made = {"token": 4.0 * table(words), "position": table(length)}
    return made | {"blocks": [block() for _ in range(layers)], "norm": jnp.ones(width)}


def normed(scale, x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def thought(p, x):
    """The second half of a block."""
    return x + c.linear(p["back"], jax.nn.gelu(c.linear(p["wide"], normed(p["norm2"], x))))


# -- of one token


def attend(p, x, t):
    query, key, value = c.linear(p["qkv"], x).reshape(3, HEADS, -1)
    keys, values = rlfx.series(key)[: t + 1], rlfx.series(value)[: t + 1]
    scores = jnp.einsum("thd,hd->th", keys, query) / np.float32(np.sqrt(query.shape[-1]))
    return c.linear(p["out"], jnp.einsum("th,thd->hd", jax.nn.softmax(scores, 0), values).reshape(-1))


def log_prob(p, text, t):
    """Of the token that follows, if it is the answer's."""
    text = rlfx.inputs(text)
    x = p["token"][text[t]["token"]] + p["position"][t.now]
    for block in p["blocks"]:
        x = thought(block, x + attend(block, normed(block["norm"], x), t))
    log_probs = jax.nn.log_softmax(normed(p["norm"], x) @ p["token"].T)
    following = text[rlfx.minimum(t + 1, t.length - 1)]
    return jnp.where((t + 1 < t.length) & following["answer"], log_probs[following["token"]], 0.0)


def program(params, carry, t):
    (p, reference), pairs = params
    gained = lambda text: log_prob(p, text, t) - stop_gradient(log_prob(reference, text, t))  # noqa: E731
    margin = rlfx.sum(gained(pairs["better"]) - gained(pairs["worse"]), over="t")
    return -jax.nn.log_sigmoid(BETA * margin), carry


# -- by hand: attention of texts ``q, k, v[N, T, HEADS, D]``


def causal(q, k):
    """Which of the last rows sees what."""
    return np.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] >= np.arange(k.shape[1])


def masked(q, k, v):
    scores = jnp.einsum("nthd,nshd->nhts", q, k) / np.float32(np.sqrt(q.shape[-1]))
    shares = jax.nn.softmax(jnp.where(causal(q, k), scores, -1e9), -1)
    return jnp.einsum("nhts,nshd->nthd", shares, v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def divided_last(q, k, v):
    """Heads first; shares are divided after their product."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
    there = np.tril(np.ones(scores.shape[-2:], bool), scores.shape[-1] - scores.shape[-2])
    scores = jnp.where(there, scores, -1e9)
    shares = jnp.exp(scores - stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.swapaxes(shares @ v / shares.sum(-1, keepdims=True), 1, 2)


def keys_first(q, k, v):
    """Scores ``[N, HEADS, S, T]``, so that sums over keys are not over neighbours in memory."""
    there = causal(q, k).T
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = jnp.where(there, k @ jnp.swapaxes(q, -1, -2) / np.float32(np.sqrt(q.shape[-1])), -1e9)
    shares = jnp.exp(scores - stop_gradient(scores.max(-2, keepdims=True)))
    return jnp.moveaxis(jnp.swapaxes(v, -1, -2) @ shares / shares.sum(-2, keepdims=True), -1, 1)


def in_steps(count, attend=divided_last):
    """Queries in so many blocks, each of which sees no more keys than it may."""

    def run(q, k, v):
        ends = np.linspace(0, q.shape[1], count + 1).astype(int)
        parts = [attend(q[:, a:b], k[:, :b], v[:, :b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        return jnp.concatenate(parts, 1)

    return run


# -- what a row's logits tell: the log-probability of the word that follows


def whole(table, x, word):
    return c.pick(jax.nn.log_softmax(x @ table.T), word)


def without_pick(table, x, word):
    """The word's logit is a product of its own, so that its derivative is no scatter among logits."""
    return (x * table[word]).sum(-1) - jax.nn.logsumexp(x @ table.T, -1)


def words_first(table, x, word):
    """Logits ``[words, rows]``."""
    return (x * table[word]).sum(-1) - jax.nn.logsumexp(table @ x.T, 0)


@jax.custom_vjp
def written(table, x, word):
    """No logits are kept but their shares, from which one product gives both derivatives."""
    return written_forwards(table, x, word)[0]


def written_forwards(table, x, word):
    logits = x @ table.T
    top = logits.max(-1, keepdims=True)
    shares = jnp.exp(logits - top)
    total = shares.sum(-1, keepdims=True)
    found = ((x * table[word]).sum(-1, keepdims=True) - top - jnp.log(total))[..., 0]
    return found, (table, x, word, shares, total)


def written_backwards(residuals, by):
    table, x, word, shares, total = residuals
    g = -shares * (by[..., None] / total) + by[..., None] * (word[..., None] == np.arange(len(table)))
    return g.reshape(-1, len(table)).T @ x.reshape(-1, x.shape[-1]), g @ table, None


written.defvjp(written_forwards, written_backwards)


def text_log_prob(p, text, attend=masked, head=whole, again=False):
    """Of the answers of texts ``[N, T]``."""
    count, length = text["token"].shape
    x = (p["token"][text["token"]] + p["position"][:length]).reshape(count * length, -1)

    def block_of(block, x):
        qkv = c.linear(block["qkv"], normed(block["norm"], x)).reshape(count, length, 3, HEADS, -1)
        found = attend(*(qkv[:, :, i] for i in range(3))).reshape(x.shape)
        return thought(block, x + c.linear(block["out"], found))

    block_of = jax.checkpoint(block_of) if again else block_of
    for block in p["blocks"]:
        x = block_of(block, x)
    x = x.reshape(count, length, -1)[:, :-1].reshape(count * (length - 1), -1)
    head = jax.checkpoint(head) if again else head
    found = head(p["token"], normed(p["norm"], x), text["token"][:, 1:].reshape(-1))
    return jnp.where(text["answer"][:, 1:], found.reshape(count, length - 1), 0.0).sum(1)


def apart(p, pairs, of):
    """Both answers by calls of their own."""
    return of(p, pairs["better"]) - of(p, pairs["worse"])


def mapped(p, pairs, of):
    """Text by text, as a model of one text is written, under `jax.vmap`."""
    one = lambda text: of(p, jax.tree.map(lambda x: x[None], text))[0]  # noqa: E731
    return jax.vmap(one)(pairs["better"]) - jax.vmap(one)(pairs["worse"])


def together(p, pairs, of):
    """Both answers as rows of one call."""
    both = jax.tree.map(lambda *x: jnp.concatenate(x), pairs["better"], pairs["worse"])
    better, worse = jnp.split(of(p, both), 2)
    return better - worse


def by_hand(batch, margin=together, chunk=None, before=False, **how):
    """``chunk``: pairs of a block; ``before``: the reference's margins of all pairs come first."""
    of = functools.partial(text_log_prob, **how)

    def run(p, reference, pairs):
        pairs = jax.tree.map(lambda x: x.T, pairs)

        def loss(p, part):
            pairs, given = part
            expected = stop_gradient(margin(reference, pairs, of)) if given is None else given
            return -jax.nn.log_sigmoid(BETA * (margin(p, pairs, of) - expected)).sum() / batch

        if chunk is None:
            return jax.value_and_grad(loss)(p, (pairs, margin(reference, pairs, of) if before else None))
        parts = c.in_chunks(pairs, chunk)
        expected = jax.lax.map(lambda x: margin(reference, x, of), parts) if before else None
        return c.summed_gradient(loss, p, (parts, expected))

    return run


def workload(length, batch, words, width, layers, chunk=2, steps=4):
    make = lambda margin=together, **how: by_hand(batch, margin, **how)  # noqa: E731
    last, heads, stepped = {"attend": divided_last}, {"head": written}, {"attend": in_steps(steps), "head": written}
    halves = {"attend": in_steps(2, keys_first), "head": written}
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch), "plain": make(mapped), "rows": make(apart), "together": make(),
        "library's attention": make(attend=library), "divided last": make(**last), "checkpointed": make(again=True),
        "heads without a pick": make(head=without_pick), "heads written out": make(**heads),
        "divided last, heads written out": make(**last, **heads), f"in {steps} steps, heads written out": make(**stepped),
        f"blocks of {chunk}": make(chunk=chunk),
        f"divided last, heads written out, blocks of {chunk}": make(**last, **heads, chunk=chunk),
        "divided last, heads written out, blocks of 1": make(**last, **heads, chunk=1),
        f"in {steps} steps, heads written out, blocks of {chunk}": make(**stepped, chunk=chunk),
        f"in {steps} steps, heads written out, blocks of 1": make(**stepped, chunk=1),
        f"in {steps} steps, heads written out, blocks of {chunk}, reference first": make(**stepped, chunk=chunk, before=True),
        "words first": make(head=words_first), "keys first": make(attend=keys_first),
        "keys first, words first": make(attend=keys_first, head=words_first),
        f"keys first, words first, blocks of {chunk}": make(attend=keys_first, head=words_first, chunk=chunk),
        f"divided last, words first, blocks of {chunk}": make(**last, head=words_first, chunk=chunk),
        "keys first, in 2 steps, heads written out": make(**halves),
        f"keys first, in 2 steps, heads written out, blocks of {chunk}": make(**halves, chunk=chunk),
        "keys first, in 2 steps, heads written out, blocks of 1": make(**halves, chunk=1),
        "in steps, heads without a pick, blocks of 1": make(attend=in_steps(steps), head=without_pick, chunk=1),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)

    def text(key):
        """A prompt, an answer, and what fills it up."""
        k = jax.random.split(key, 3)
        begin = jax.random.randint(k[0], (batch,), length // 8, length // 3)
        end = jax.random.randint(k[1], (batch,), length // 2, length + 1)
        times = jnp.arange(length)[:, None]
        token = jax.random.randint(k[2], (length, batch), 0, words)
        return {"token": jnp.where(times < end, token, 0), "answer": (times >= begin) & (times < end)}

    pairs = {"better": text(k[0]), "worse": text(k[1])}
    p, reference = (params_of(key, length, words, width, layers) for key in k[2:4])
    return Workload(forms, (p, reference, pairs), tolerance=1e-5)
