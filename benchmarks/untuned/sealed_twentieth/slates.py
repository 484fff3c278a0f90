"""Slates for users (a Plackett-Luce policy, as of learning to rank and REINFORCE of slates, Chen et al. 2019, Oosterhuis 2021):
items are scored for a user, and a slate is drawn one item after the other without replacement, by adding noise and sorting; the
user clicks on one of them or none, and likes more of what was clicked. The slate's order has a likelihood that learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

TRAITS, ITEMS, SLATE, GAMMA, LAMBDA, EPISODE, LIKING, ENTROPY = 8, 24, 5, 0.95, 0.9, 40, 0.3, 0.01
PLACES = -0.2 * np.arange(SLATE, dtype=np.float32)
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    rank = c.dense(k[2], hidden, 1)["w"][:, 0]  # without a bias, which would not change who is first
    score = c.mlp_params(k[0], (2 * TRAITS, hidden, hidden))
    return {"score": score, "rank": rank, "value": c.mlp_params(k[1], (TRAITS, hidden, 1))}


def reset(key):
    return {"likes": unit(jax.random.normal(key, (TRAITS,))), "count": jnp.int32(0)}


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def scores_of(p, likes, items):
    both = jnp.concatenate([jnp.broadcast_to(likes, items.shape), items], -1)
    return relu(c.mlp(p["score"], both, relu)) @ p["rank"]


def worth(p, likes):
    return c.mlp(p["value"], likes, relu)[..., 0]


def shown(key, user, slate):
    """What a user does with ``slate[SLATE, TRAITS]``: nobody who clicks on nothing stays for long."""
    click_key, reset_key = jax.random.split(key)
    appeal = jnp.append(slate @ user["likes"] + PLACES, 0.0)
    click = jax.random.categorical(click_key, appeal)
    clicked, item = click < SLATE, slate[jnp.minimum(click, SLATE - 1)]
    likes = jnp.where(clicked, unit(user["likes"] + LIKING * item), user["likes"])
    count = user["count"] + jnp.where(clicked, 1, 4)
    done = count >= EPISODE
    reward = jnp.where(clicked, jax.nn.sigmoid(item[0] - item[1]), 0.0)
    after = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset(reset_key), {"likes": likes, "count": count})
    return stop_gradient(after), c.Step(reward, done, jnp.zeros_like(done))


def program(p, user, t):
    items = jax.random.normal(t.key_for("items"), (ITEMS, TRAITS))
    scores = scores_of(p, user["likes"], items)
    order = jnp.argsort(scores + jax.random.gumbel(t.key_for("noise"), (ITEMS,)), descending=True)
    after, step = shown(t.key_for("user"), user, items[order[:SLATE]])

    ranked = scores[order]
    log_prob = (ranked - jax.lax.cumlogsumexp(ranked, reverse=True))[:SLATE].sum()
    log_p = jax.nn.log_softmax(scores)
    entropy = -(jnp.exp(log_p) * log_p).sum()
    value = rlfx.series(worth(p, user["likes"]))
    advantage = stop_gradient(rlfx.gae(step, value[t], value[t + 1], gamma=GAMMA, lam=LAMBDA))
    target = advantage + stop_gradient(value[t])
    return 0.5 * (value[t] - target) ** 2 - log_prob * advantage - ENTROPY * entropy, after


# -- by hand, as usual


def plain(length, batch):
    def run(p, users, key):
        item_keys, noise_keys, user_keys = c.streams(key, batch, "items", "noise", "user")

        def one(user, item_key, noise_key, user_key):
            items = jax.random.normal(item_key, (ITEMS, TRAITS))
            scores = scores_of(p, user["likes"], items)
            order = jnp.argsort(scores + jax.random.gumbel(noise_key, (ITEMS,)), descending=True)
            after, step = shown(user_key, user, items[order[:SLATE]])
            told = {"likes": user["likes"], "items": items, "order": order}
            return after, told | {"reward": step.reward, "done": step.terminated}

        def body(users, t):
            return jax.vmap(one)(users, c.at(item_keys, t), c.at(noise_keys, t), c.at(user_keys, t))

        users, data = jax.lax.scan(body, users, jnp.arange(length))
        value = worth(p, data["likes"])
        advantage = c.gae(value, worth(p, users["likes"]), data["reward"], data["done"], GAMMA, LAMBDA)
        target = advantage + value

        def point(p, likes, items, order, advantage, target):
            scores, value = scores_of(p, likes, items), worth(p, likes)
            ranked = scores[order]
            log_prob = (ranked - jax.lax.cumlogsumexp(ranked, reverse=True))[:SLATE].sum()
            log_p = jax.nn.log_softmax(scores)
            entropy = -(jnp.exp(log_p) * log_p).sum()
            return 0.5 * (value - target) ** 2 - log_prob * advantage - ENTROPY * entropy

        def loss(p):
            of = jax.vmap(jax.vmap(point, (None, *[0] * 5)), (None, *[0] * 5))
            return of(p, data["likes"], data["items"], data["order"], advantage, target).mean()

        return *jax.value_and_grad(loss)(p), users

    return run
