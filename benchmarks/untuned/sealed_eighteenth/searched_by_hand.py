"""AlphaZero's search and its learner by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_eighteenth import searched as given
from benchmarks.untuned.sealed_eighteenth.searched import (
    ACTIONS,
    EPISODE,
    EXPLORE,
    GAMMA,
    OBS,
    bounds,
    drawn,
    learnt,
    mixed,
    moved,
    networks,
    params_of,
    targets,
)  # fmt: skip

# -- searches of ``x[B, OBS]``: how often actions were tried, ``[B, ACTIONS]``, and the mean worth ``[B]``


def one_by_one(net, x, noise, simulations):
    """The usual one, but for the networks."""
    return jax.vmap(lambda x, noise: given.searched(net, x, noise, simulations))(x, noise)


class Nodes(NamedTuple):
    """Of a whole batch ``[B, nodes, ...]``, as a SearchTree; ``first``: the action that is tried next, and where it leads."""

    x: Any
    table: Any  # [B, nodes + 1, 5, ACTIONS]: prior, visits, total, reward, child; the last node is for what nobody reads
    parent: Any
    by: Any


def started(net, x, noise, nodes):
    batch = len(x)
    table = jnp.zeros((batch, nodes + 1, 5, ACTIONS)).at[:, :, 4].set(-1.0)
    table = table.at[:, 0, 0].set(mixed(net(x)[0], noise))
    none = jnp.full((batch, nodes), nodes)
    return Nodes(jnp.zeros((batch, nodes, OBS)).at[:, 0].set(x), table, none, none)


def of_batch(net, x, noise, simulations):
    """All trees go down together, and up together; what is known of a node is one row."""
    nodes, rows = simulations + 1, jnp.arange(len(x))

    def simulate(i, tree):
        def look(node):
            row = tree.table[rows, node]
            action = jnp.argmax(bounds(row[:, 0], row[:, 1], row[:, 2]), -1)
            return action, c.pick(row[:, 4], action).astype(jnp.int32)

        def descend(at):
            node, action, child = at
            on = child >= 0
            node = jnp.where(on, child, node)
            better, following = look(node)
            return node, jnp.where(on, better, action), jnp.where(on, following, child)

        root = jnp.zeros_like(rows)
        node, action, _ = jax.lax.while_loop(lambda at: (at[2] >= 0).any(), descend, (root, *look(root)))
        x, reward = moved(tree.x[rows, node], action)
        logits, value = net(x)
        table = tree.table.at[rows, node, 3, action].set(reward).at[rows, node, 4, action].set(i)
        table = table.at[:, i, 0].set(jax.nn.softmax(logits))
        parent, by = tree.parent.at[:, i].set(node), tree.by.at[:, i].set(action)

        def back_up(at):
            node, action, worth, table = at
            worth = table[rows, node, 3, action] + GAMMA * worth
            table = table.at[rows, node, 1, action].add(1.0).at[rows, node, 2, action].add(worth)
            above = jnp.minimum(node, nodes - 1)
            return jnp.where(node == nodes, nodes, parent[rows, above]), by[rows, above], worth, table

        start = node, action, value, table
        table = jax.lax.while_loop(lambda at: (at[0] < nodes).any(), back_up, start)[-1]
        return Nodes(tree.x.at[:, i].set(x), table, parent, by)

    root = jax.lax.fori_loop(1, nodes, simulate, started(net, x, noise, nodes)).table[:, 0]
    return root[:, 1] / simulations, root[:, 2].sum(-1) / simulations


def down_alone(net, x, noise, simulations, kept=False):
    """Tree by tree, without scatters: edges are marked on the way down, and all that is above a node learns at once what it is
    worth, by what was gained before. ``kept``: of every node is kept which action is tried next and where it leads."""
    nodes = simulations + 1
    every, actions = jnp.arange(nodes)[:, None], jnp.arange(ACTIONS)
    empty = jnp.zeros((nodes, ACTIONS))

    def of_one(x, noise):
        tree = {
            "x": jnp.zeros((nodes, OBS)).at[0].set(x), "prior": empty.at[0].set(mixed(net(x)[0], noise)), "visits": empty,
            "total": empty, "child": jnp.full((nodes, ACTIONS), -1), "gained": jnp.zeros(nodes), "scale": jnp.ones(nodes),
        }  # fmt: skip

        def simulate(i, tree):
            if kept:
                best = jnp.argmax(bounds(tree["prior"], tree["visits"], tree["total"]), -1)
                following = jnp.where(best[:, None] == actions, tree["child"], -1).max(-1)
                look = lambda node: (best[node], following[node])  # noqa: E731
            else:

                def look(node):
                    action = jnp.argmax(bounds(tree["prior"][node], tree["visits"][node], tree["total"][node]))
                    return action, tree["child"][node, action]

            def descend(at):
                node, action, child, above = at
                above = above | (every[:, 0] == child) if kept else above | ((every == node) & (actions == action))
                return child, *look(child), above

            begin = (every[:, 0] == 0) if kept else jnp.zeros((nodes, ACTIONS), bool)
            node, action, _, above = jax.lax.while_loop(lambda at: at[2] >= 0, descend, (0, *look(0), begin))
            last = (every == node) & (actions == action)
            edges = above[:, None] & (best[:, None] == actions) if kept else above | last
            x, reward = moved(tree["x"][node], action)
            logits, value = net(x)
            scale = tree["scale"][node]
            gained = tree["gained"][node] + scale * reward
            worth = (gained + GAMMA * scale * value - tree["gained"]) / tree["scale"]
            return {
                "x": tree["x"].at[i].set(x), "prior": tree["prior"].at[i].set(jax.nn.softmax(logits)),
                "visits": tree["visits"] + edges, "total": tree["total"] + edges * worth[:, None],
                "child": jnp.where(last, i, tree["child"]), "gained": tree["gained"].at[i].set(gained),
                "scale": tree["scale"].at[i].set(GAMMA * scale),
            }  # fmt: skip

        tree = jax.lax.fori_loop(1, nodes, simulate, tree)
        return tree["visits"][0] / simulations, tree["total"][0].sum() / simulations

    return jax.vmap(of_one)(x, noise)


def doublings(nodes):
    return int(np.ceil(np.log2(nodes)))


def without_loops(net, x, noise, simulations):
    """All nodes are looked at, once a simulation; where the best actions lead is found by doubling pointers, and what is known is
    told to all nodes above at once: by what was gained before each of them."""
    nodes, batch = simulations + 1, len(x)
    rows, every = jnp.arange(batch), jnp.arange(nodes)
    empty = jnp.zeros((batch, nodes, ACTIONS))
    tree = {
        "x": jnp.zeros((batch, nodes, OBS)).at[:, 0].set(x), "prior": empty.at[:, 0].set(mixed(net(x)[0], noise)),
        "visits": empty, "total": empty, "child": jnp.full((batch, nodes, ACTIONS), -1), "gained": jnp.zeros((batch, nodes)),
        "scale": jnp.ones((batch, nodes)), "above": jnp.zeros((batch, nodes, nodes)).at[:, 0, 0].set(1.0),
    }  # fmt: skip

    def simulate(i, tree):
        best = jnp.argmax(bounds(tree["prior"], tree["visits"], tree["total"]), -1)  # [B, nodes]
        following = c.pick(tree["child"], best)
        following = jnp.where(following >= 0, following, every)
        for _ in range(doublings(nodes)):
            following = jnp.take_along_axis(following, following, 1)
        node = following[:, 0]
        action = best[rows, node]
        x, reward = moved(tree["x"][rows, node], action)
        logits, value = net(x)
        above, scale = tree["above"][rows, node], tree["scale"][rows, node]
        gained = tree["gained"][rows, node] + scale * reward
        worth = ((gained + GAMMA * scale * value)[:, None] - tree["gained"]) / tree["scale"]
        edges = above[..., None] * jax.nn.one_hot(best, ACTIONS)
        return {
            "x": tree["x"].at[:, i].set(x), "prior": tree["prior"].at[:, i].set(jax.nn.softmax(logits)),
            "visits": tree["visits"] + edges, "total": tree["total"] + edges * worth[..., None],
            "child": tree["child"].at[rows, node, action].set(i), "gained": tree["gained"].at[:, i].set(gained),
            "scale": tree["scale"].at[:, i].set(GAMMA * scale), "above": tree["above"].at[:, i].set(above.at[:, i].set(1.0)),
        }  # fmt: skip

    tree = jax.lax.fori_loop(1, nodes, simulate, tree)
    return tree["visits"][:, 0] / simulations, tree["total"][:, 0].sum(-1) / simulations


def innermost(net, x, noise, simulations):
    """The same with the batch innermost."""
    nodes, batch = simulations + 1, len(x)
    empty = jnp.zeros((nodes, ACTIONS, batch))
    tree = {
        "x": jnp.zeros((nodes, OBS, batch)).at[0].set(x.T), "prior": empty.at[0].set(mixed(net(x)[0], noise).T),
        "visits": empty, "total": empty, "child": jnp.full((nodes, ACTIONS, batch), -1), "gained": jnp.zeros((nodes, batch)),
        "scale": jnp.ones((nodes, batch)), "above": jnp.zeros((nodes, nodes, batch)).at[0, 0].set(1.0),
    }  # fmt: skip
    every = jnp.arange(nodes)[:, None]

    def simulate(i, tree):
        visits, total = tree["visits"], tree["total"]
        score = total / jnp.maximum(visits, 1.0)
        score = score + EXPLORE * tree["prior"] * jnp.sqrt(1.0 + visits.sum(1, keepdims=True)) / (1.0 + visits)
        best = jnp.argmax(score, 1)
        chosen = best[:, None] == jnp.arange(ACTIONS)[:, None]
        following = jnp.where(chosen, tree["child"], -1).max(1)
        following = jnp.where(following >= 0, following, every)
        for _ in range(doublings(nodes)):
            following = jnp.take_along_axis(following, following, 0)
        here = following[0] == every  # [nodes, B]
        of = lambda x: jnp.where(here.reshape(nodes, *(1,) * (x.ndim - 2), batch), x, 0).sum(0)  # noqa: E731
        action = of(best)
        x, reward = moved(of(tree["x"]).T, action)
        logits, value = net(x)
        above, scale = of(tree["above"]), of(tree["scale"])
        gained = of(tree["gained"]) + scale * reward
        worth = (gained + GAMMA * scale * value - tree["gained"]) / tree["scale"]
        edges = above[:, None] * chosen
        return {
            "x": tree["x"].at[i].set(x.T), "prior": tree["prior"].at[i].set(jax.nn.softmax(logits).T), "visits": visits + edges,
            "total": total + edges * worth[:, None], "child": jnp.where(here[:, None] & chosen, i, tree["child"]),
            "gained": tree["gained"].at[i].set(gained), "scale": tree["scale"].at[i].set(GAMMA * scale),
            "above": tree["above"].at[i].set(above.at[i].set(1.0)),
        }  # fmt: skip

    tree = jax.lax.fori_loop(1, nodes, simulate, tree)
    return tree["visits"][0].T / simulations, tree["total"][0].sum(0) / simulations


# -- networks of rows


def apart(p):
    return functools.partial(networks, p)


def joined(p):
    """The first layers of both are one product, and the last ones are one, with zeros."""
    (a, b), (pi, v) = ([p[name][i] for name in ("pi", "v")] for i in (0, 2))
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), a, b)
    zeros = lambda w, other: jnp.zeros((len(w), other.shape[1]))  # noqa: E731
    w = jnp.block([[pi["w"], zeros(pi["w"], v["w"])], [zeros(v["w"], pi["w"]), v["w"]]])
    last = {"w": w, "b": jnp.concatenate([pi["b"], v["b"]])}

    def net(x):
        parts = jnp.split(jnp.tanh(c.linear(first, x)), 2, -1)
        second = [jnp.tanh(c.linear(p[name][1], h)) for name, h in zip(("pi", "v"), parts, strict=True)]
        made = c.linear(last, jnp.concatenate(second, -1))
        return made[..., :ACTIONS], made[..., ACTIONS]

    return net


# -- what is learnt


def by_hand(length, batch, simulations, search, net=apart, flat=True, ahead=False, envs=None, whole=False):
    """``ahead``: what is drawn comes before the loop; ``envs``: environments of a block, which acts by itself; ``whole``: the
    search is given the parameters."""

    def run(p, state, key):
        keys = c.streams(key, batch, "noise", "action", "env")
        times = jnp.arange(length)

        def acted(x):
            state, noise_keys, action_keys, env_keys = x
            of_tree = p if whole else net(p)
            gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))
            draw = lambda t: (jax.vmap(drawn)(c.at(noise_keys, t)), gumbel(c.at(action_keys, t)), c.at(env_keys, t))  # noqa: E731

            def body(state, given_):
                noise, gumbels, for_env = given_ if ahead else draw(given_)
                obs = state["x"]
                tried, worth = search(of_tree, obs, noise, simulations)
                action = jnp.argmax(jnp.log(tried) + gumbels, -1)
                state, step = jax.vmap(given.step_of)(for_env, state, action)
                return state, (obs, tried, worth, step.reward, step.terminated)

            return jax.lax.scan(body, state, jax.vmap(draw)(times) if ahead else times)

        state, told = c.acted_by_environments(acted, (state, *keys), length, envs)
        obs, tried, worth, reward, done = told
        data = obs, tried, targets(worth, networks(p, state["x"])[1], reward, done)
        data = c.rows_of(data) if flat else data
        return *jax.value_and_grad(lambda p: learnt(p, *data).mean())(p), state

    return run


def workload(length, batch, simulations, hidden, envs=8):
    make = functools.partial(by_hand, length, batch, simulations)
    kept = functools.partial(down_alone, kept=True)
    forms = {
        "rlfx": c.by_rlfx(given.program(simulations), length, batch), "plain": given.plain(length, batch, simulations),
        "tree by tree, rows learn": make(one_by_one, whole=True), "trees together": make(of_batch),
        "down alone": make(down_alone), "down alone, joined": make(down_alone, joined), "next ones kept": make(kept),
        "without loops": make(without_loops), "batch innermost": make(innermost),
        "down alone, drawn ahead": make(down_alone, ahead=True), f"down alone, {envs} environments": make(down_alone, envs=envs),
        "tree by tree, threefry unrolled": make(one_by_one, whole=True), "down alone, threefry unrolled": make(down_alone),
        "down alone, drawn ahead, threefry unrolled": make(down_alone, ahead=True),
        "next ones kept, drawn ahead, threefry unrolled": make(kept, ahead=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 2)
    state = c.batch_of(given.reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    return drawing(forms, (params_of(k[1], hidden), state), tolerance=2e-5)
