"""Slates for users by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twentieth import slates as given
from benchmarks.untuned.sealed_twentieth.slates import (
    ENTROPY,
    EPISODE,
    GAMMA,
    ITEMS,
    LAMBDA,
    LIKING,
    PLACES,
    SLATE,
    TRAITS,
    params_of,
    relu,
    reset,
    unit,
    worth,
)  # fmt: skip

# -- scores ``[..., ITEMS]`` of likes ``[..., TRAITS]`` and items, and both hidden layers


def concatenated(p, likes, items):
    first, second = p["score"]
    likes = jnp.broadcast_to(likes[..., None, :], items.shape)
    h = relu(c.linear(first, jnp.concatenate([likes, items], -1)))
    g = relu(c.linear(second, h))
    return g @ p["rank"], h, g


def split(p, likes, items):
    """What is known of a user is multiplied once."""
    first, second = p["score"]
    mine = likes @ first["w"][:TRAITS] + first["b"]
    h = relu(items @ first["w"][TRAITS:] + mine[..., None, :])
    g = relu(c.linear(second, h))
    return g @ p["rank"], h, g


def split_rows(p, likes, items):
    """Products of rows."""
    first, second = p["score"]
    mine = likes @ first["w"][:TRAITS] + first["b"]
    theirs = items.reshape(-1, TRAITS) @ first["w"][TRAITS:]
    h = relu(theirs.reshape(*items.shape[:-1], -1) + mine[..., None, :])
    g = relu(h.reshape(-1, h.shape[-1]) @ second["w"] + second["b"])
    return (g @ p["rank"]).reshape(items.shape[:-1]), h, g.reshape(h.shape)


# -- slates ``[B, SLATE]`` of noisy scores, in order


def by_sorting(noisy):
    return jnp.argsort(noisy, -1, descending=True)[:, :SLATE]


def by_top_k(noisy):
    return jax.lax.top_k(noisy, SLATE)[1]


def by_turns(noisy):
    """The largest, and again without it."""
    made, every = [], jnp.arange(ITEMS)
    for _ in range(SLATE):
        made.append(jnp.argmax(noisy, -1))
        noisy = jnp.where(every == made[-1][:, None], -jnp.inf, noisy)
    return jnp.stack(made, -1)


def by_comparing(noisy):
    """How many are larger than each."""
    rank = (noisy[:, None] > noisy[:, :, None]).sum(-1)
    return jnp.argmax(rank[:, None] == jnp.arange(SLATE)[:, None], -1)


# -- likelihoods of slates of rows, and the entropy of who is first


def ranks_of(slate):
    """The place of every item; SLATE of those that are not shown."""
    here = slate[..., None] == jnp.arange(ITEMS)
    return jnp.where(here, jnp.arange(SLATE)[:, None], SLATE).min(-2)


def likely(scores, slate):
    """What is left after each place: all without those before it."""
    rank, log_p = ranks_of(slate), jax.nn.log_softmax(scores)
    share = jnp.exp(log_p)
    left = jnp.where(rank[..., None, :] >= jnp.arange(SLATE)[:, None], share[..., None, :], 0.0).sum(-1)
    log_prob = jnp.where(rank < SLATE, log_p, 0.0).sum(-1) - jnp.log(left).sum(-1)
    return log_prob, -(share * log_p).sum(-1)


def likely_in_turn(scores, slate):
    """As `likely`, place after place, without an axis of places."""
    log_p = jax.nn.log_softmax(scores)
    share, every = jnp.exp(log_p), jnp.arange(ITEMS)
    rest, log_prob = share, 0.0
    for k in range(SLATE):
        here = slate[..., k, None] == every
        log_prob = log_prob + jnp.where(here, log_p, 0.0).sum(-1) - jnp.log(rest.sum(-1))
        rest = jnp.where(here, 0.0, rest)
    return log_prob, -(share * log_p).sum(-1)


def slope_of(scores, slate, advantage):
    """Of a point's loss, in its scores; the loss of both."""
    log_p = jax.nn.log_softmax(scores)
    share, every = jnp.exp(log_p), jnp.arange(ITEMS)
    entropy = -(share * log_p).sum(-1)
    rest, log_prob, by = share, 0.0, jnp.zeros_like(share)
    for k in range(SLATE):
        here = slate[..., k, None] == every
        total = rest.sum(-1)
        log_prob = log_prob + jnp.where(here, log_p, 0.0).sum(-1) - jnp.log(total)
        by = by + here - rest / total[..., None]
        rest = jnp.where(here, 0.0, rest)
    slope = ENTROPY * share * (log_p + entropy[..., None]) - advantage[..., None] * by
    return slope, -log_prob * advantage - ENTROPY * entropy


# -- what users do, of a batch


def shown(user, slate, gumbel, fresh):
    """With what was drawn."""
    appeal = jnp.concatenate([jnp.einsum("bki,bi->bk", slate, user["likes"]) + PLACES, jnp.zeros((len(slate), 1))], -1)
    click = jnp.argmax(appeal + gumbel, -1)
    clicked = click < SLATE
    item = jnp.where((click[:, None] == jnp.arange(SLATE))[..., None], slate, 0.0).sum(1)
    likes = jnp.where(clicked[:, None], unit(user["likes"] + LIKING * item), user["likes"])
    count = user["count"] + jnp.where(clicked, 1, 4)
    done = count >= EPISODE
    reward = jnp.where(clicked, jax.nn.sigmoid(item[:, 0] - item[:, 1]), 0.0)
    return {"likes": jnp.where(done[:, None], fresh, likes), "count": jnp.where(done, 0, count)}, reward, done


def drawn(keys, t):
    """Of all environments: items, what slates are drawn by, clicks, and new users."""
    items = jax.vmap(lambda k: jax.random.normal(k, (ITEMS, TRAITS)))(c.at(keys[0], t))
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (ITEMS,)))(c.at(keys[1], t))
    both = jax.vmap(jax.random.split)(c.at(keys[2], t))
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (SLATE + 1,)))(both[:, 0])
    return items, noise, gumbel, jax.vmap(lambda k: reset(k)["likes"])(both[:, 1])


class Way(NamedTuple):
    scores: Any = split
    slate: Any = by_top_k
    likely: Any = likely
    slopes: bool = False  # slopes of scores are written out
    kept: bool = False  # hidden layers are kept from acting; with slopes only
    ahead: bool = False  # what is drawn comes before the loop
    envs: int | None = None  # environments that act after the others
    chunk: int | None = None  # timesteps that learn after the others


def backwards(p, likes, items, h, g, slope):
    """The gradient of the network of scores, by slopes of scores of rows ``[N, ITEMS]``."""
    second = p["score"][1]
    n, hidden = slope.size, h.shape[-1]
    h, g, s = h.reshape(n, hidden), g.reshape(n, hidden), slope.reshape(n)
    by_g = jnp.where(g > 0.0, s[:, None] * p["rank"], 0.0)
    by_h = jnp.where(h > 0.0, by_g @ second["w"].T, 0.0)
    mine = by_h.reshape(-1, ITEMS, hidden).sum(1)
    by_first = {"w": jnp.concatenate([likes.T @ mine, items.reshape(n, TRAITS).T @ by_h]), "b": mine.sum(0)}
    return {"score": [by_first, {"w": h.T @ by_g, "b": by_g.sum(0)}], "rank": s @ g}


def by_hand(length, batch, way):
    def run(p, users, key):
        def acted(x):
            users, *keys = x
            draw, times = functools.partial(drawn, keys), jnp.arange(length)

            def body(user, x):
                items, noise, gumbel, fresh = x if way.ahead else draw(x)
                scores, *hidden = way.scores(p, user["likes"], items)
                slate = way.slate(scores + noise)
                after, reward, done = shown(user, jnp.take_along_axis(items, slate[..., None], 1), gumbel, fresh)
                told = {"likes": user["likes"], "items": items, "slate": slate, "reward": reward, "done": done}
                return after, told | ({"scores": scores, "hidden": hidden} if way.kept else {})

            return jax.lax.scan(body, users, jax.vmap(draw)(times) if way.ahead else times)

        given_ = users, *c.streams(key, batch, "items", "noise", "user")
        users, data = c.acted_by_environments(acted, given_, length, way.envs)
        value = worth(p, data["likes"])
        advantage = c.gae(value, worth(p, users["likes"]), data["reward"], data["done"], GAMMA, LAMBDA)
        rows = {name: data[name] for name in ("likes", "items", "slate", *(("scores", "hidden") if way.kept else ()))}
        rows = c.rows_of(rows | {"advantage": advantage, "target": advantage + value})
        missed = lambda p, x: 0.5 * ((worth(p, x["likes"]) - x["target"]) ** 2).sum()  # noqa: E731

        def loss(p, x):
            log_prob, entropy = way.likely(way.scores(p, x["likes"], x["items"])[0], x["slate"])
            return missed(p, x) - (log_prob * x["advantage"] + ENTROPY * entropy).sum()

        def sloped(p, x):
            scores, h, g = (x["scores"], *x["hidden"]) if way.kept else way.scores(p, x["likes"], x["items"])
            slope, lost = slope_of(scores, x["slate"], x["advantage"])
            found, grads = jax.value_and_grad(missed)(p, x)
            return found + lost.sum(), grads | backwards(p, x["likes"], x["items"], h, g, slope)

        learn = sloped if way.slopes else jax.value_and_grad(loss)
        if way.chunk is None:
            made = learn(p, rows)
        else:
            add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, x)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            made = jax.lax.scan(add, none, c.in_chunks(rows, way.chunk * batch))[0]
        return *jax.tree.map(lambda x: x / (length * batch), made), users

    return run


def workload(length, batch, hidden, envs=8, chunk=2):
    make, cut = functools.partial(by_hand, length, batch), {"chunk": chunk}
    turns = Way(likely=likely_in_turn, slate=by_turns)
    sloped = turns._replace(slopes=True)
    kept, ahead = sloped._replace(kept=True), {"ahead": True}
    forms = {
        "rlfx": c.by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "sorted, rows learn": make(Way(concatenated, by_sorting)), "split, the first ones": make(Way()),
        "split, compared": make(Way(slate=by_comparing)), "split, in turn": make(turns),
        f"split, in turn, blocks of {chunk}": make(turns._replace(**cut)),
        "slopes written": make(sloped), f"slopes written, blocks of {chunk}": make(sloped._replace(**cut)),
        f"rows, slopes written, blocks of {chunk}": make(sloped._replace(scores=split_rows, **cut)),
        "kept": make(kept), f"kept, blocks of {chunk}": make(kept._replace(**cut)),
        f"slopes written, {envs} environments": make(sloped._replace(envs=envs, **cut)),
        "slopes written, drawn ahead": make(sloped._replace(**ahead, **cut)),
        "split, in turn, threefry unrolled": make(turns._replace(**cut)),
        "slopes written, threefry unrolled": make(sloped._replace(**cut)),
        "slopes written, drawn ahead, threefry unrolled": make(sloped._replace(**ahead, **cut)),
        "kept, threefry unrolled": make(kept._replace(**cut)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    users = c.batch_of(given.reset, batch)
    users["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    return drawing(forms, (params_of(k[1], hidden), users), tolerance=2e-5)
