"""AlphaZero (Silver et al. 2018) for one agent that knows its world: at every timestep a tree is searched, node by node, in which
upper bounds of actions' values lead; the agent acts by how often actions were tried, which the policy learns; the value learns
lambda returns of what the search found."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA, EPISODE, EXPLORE, MIXED = 8, 4, 0.97, 0.9, 30, 1.25, 0.25
PUSH = 0.4 * np.random.default_rng(0).standard_normal((ACTIONS, OBS)).astype(np.float32)


class SearchTree(NamedTuple):
    """Nodes, of which the first is the root, and of every node's actions what is known."""

    x: Any  # [nodes, OBS]
    prior: Any  # [nodes, ACTIONS], as all that follow
    visits: Any
    total: Any
    reward: Any
    child: Any  # -1: none
    parent: Any  # [nodes]
    by: Any  # [nodes], the action of the parent


def params_of(key, hidden):
    pi, v = jax.random.split(key)
    return {"pi": c.mlp_params(pi, (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(v, (OBS, hidden, hidden, 1))}


def networks(p, x):
    return c.mlp(p["pi"], x), c.mlp(p["v"], x)[..., 0]


def reset(key):
    return {"x": jax.random.normal(key, (OBS,)), "count": jnp.int32(0)}


def moved(x, action):
    """What follows, and the reward."""
    x = jnp.tanh(0.95 * x + 0.1 * jnp.roll(x, 1, -1) + jnp.asarray(PUSH)[action])
    return x, -(x**2).mean(-1)


def step_of(key, state, action):
    x, reward = moved(state["x"], action)
    count = state["count"] + 1
    done = count >= EPISODE
    after = jax.tree.map(lambda a, b: jnp.where(done, a, b), reset(key), {"x": x, "count": count})
    return after, c.Step(reward, done, jnp.zeros_like(done))


def bounds(prior, visits, total):
    """How promising actions are, ``[..., ACTIONS]``."""
    known = total / jnp.maximum(visits, 1.0)
    return known + EXPLORE * prior * jnp.sqrt(1.0 + visits.sum(-1, keepdims=True)) / (1.0 + visits)


def mixed(logits, noise):
    """The root's prior, with noise of a flat Dirichlet distribution."""
    return (1.0 - MIXED) * jax.nn.softmax(logits) + MIXED * noise / noise.sum(-1, keepdims=True)


def searched(p, x, noise, simulations):
    """Of one state: how often each action was tried, and what it is worth on average."""
    nodes, empty = simulations + 1, jnp.zeros((simulations + 1, ACTIONS))
    none = jnp.full((nodes, ACTIONS), -1), jnp.full(nodes, -1), jnp.full(nodes, -1)
    tree = SearchTree(jnp.zeros((nodes, OBS)).at[0].set(x), empty, empty, empty, empty, *none)
    tree = tree._replace(prior=tree.prior.at[0].set(mixed(networks(p, x)[0], noise)))

    def simulate(i, tree):
        best = lambda node: jnp.argmax(bounds(tree.prior[node], tree.visits[node], tree.total[node]))  # noqa: E731

        def descend(at):
            node = tree.child[at]
            return node, best(node)

        node, action = jax.lax.while_loop(lambda at: tree.child[at] >= 0, descend, (0, best(0)))
        x, reward = moved(tree.x[node], action)
        logits, value = networks(p, x)
        tree = tree._replace(
            x=tree.x.at[i].set(x), prior=tree.prior.at[i].set(jax.nn.softmax(logits)), parent=tree.parent.at[i].set(node),
            reward=tree.reward.at[node, action].set(reward), child=tree.child.at[node, action].set(i),
            by=tree.by.at[i].set(action),
        )  # fmt: skip

        def back_up(given):
            node, worth, visits, total = given
            parent, action = tree.parent[node], tree.by[node]
            worth = tree.reward[parent, action] + GAMMA * worth
            return parent, worth, visits.at[parent, action].add(1.0), total.at[parent, action].add(worth)

        start = i, value, tree.visits, tree.total
        _, _, visits, total = jax.lax.while_loop(lambda given: given[0] > 0, back_up, start)
        return tree._replace(visits=visits, total=total)

    tree = jax.lax.fori_loop(1, nodes, simulate, tree)
    return tree.visits[0] / simulations, tree.total[0].sum() / simulations


def program(simulations):
    def alphazero(p, state, t):
        noise = jax.random.exponential(t.key_for("noise"), (ACTIONS,))
        tried, worth = searched(stop_gradient(p), state["x"], noise, simulations)
        action = jax.random.categorical(t.key_for("action"), jnp.log(tried))
        logits, value = networks(p, state["x"])
        state, step = step_of(t.key_for("env"), state, action)
        following = rlfx.series(worth, end=networks(stop_gradient(p), state["x"])[1])[t + 1]
        target = rlfx.lambda_return(step, following, gamma=GAMMA, lam=LAMBDA)
        return 0.5 * (value - target) ** 2 - (tried * jax.nn.log_softmax(logits)).sum(), stop_gradient(state)

    return alphazero


# -- by hand, as usual


def learnt(p, obs, tried, target):
    """The loss of points ``[...]``."""
    logits, value = networks(p, obs)
    return 0.5 * (value - target) ** 2 - (tried * jax.nn.log_softmax(logits)).sum(-1)


def targets(worth, last, reward, done):
    """Lambda returns ``[T, B]``; ``last``: the value after the end."""
    going = GAMMA * (1.0 - done.astype(jnp.float32))
    delta = (reward + (1.0 - LAMBDA) * going * c.shifted(worth, last)).at[-1].add(LAMBDA * going[-1] * last)
    return c.discounted(delta, LAMBDA * going)


def drawn(key):
    return jax.random.exponential(key, (ACTIONS,))


def plain(length, batch, simulations):
    def run(p, state, key):
        noise_keys, action_keys, env_keys = c.streams(key, batch, "noise", "action", "env")

        def body(state, t):
            obs = state["x"]
            noise = jax.vmap(drawn)(c.at(noise_keys, t))
            tried, worth = jax.vmap(lambda x, noise: searched(p, x, noise, simulations))(obs, noise)
            action = c.categorical(c.at(action_keys, t), jnp.log(tried))
            state, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            return state, (obs, tried, worth, step.reward, step.terminated)

        state, (obs, tried, worth, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        target = targets(worth, networks(p, state["x"])[1], reward, done)
        found, grads = jax.value_and_grad(lambda p: learnt(p, obs, tried, target).mean())(p)
        return found, grads, state

    return run
