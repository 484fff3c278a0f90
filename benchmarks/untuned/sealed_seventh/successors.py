"""Successor features and generalised policy improvement (Barreto et al. 2017): one head for the policy of every task, each of
which is learnt towards the next timestep's features under the action that the best of all policies takes for its task. What the
features are, and each task's weights of them, is learnt of the rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA = 16, 5, 0.97
relu = jax.nn.relu


def params_of(key, tasks, features, hidden):
    k = jax.random.split(key, 4)
    head = lambda key: c.mlp_params(key, (hidden, hidden, ACTIONS * features))  # noqa: E731
    return {
        "trunk": c.dense(k[0], OBS, hidden), "heads": jax.vmap(head)(jax.random.split(k[1], tasks)),
        "cumulants": c.mlp_params(k[2], (OBS, hidden, ACTIONS * features)), "w": jax.random.normal(k[3], (tasks, features)),
    }  # fmt: skip


def huber(error):
    return jnp.where(jnp.abs(error) < 1.0, 0.5 * error**2, jnp.abs(error) - 0.5)


def by_action(x):
    """``[..., ACTIONS * features]`` as ``[..., ACTIONS, features]``."""
    return x.reshape(*x.shape[:-1], ACTIONS, -1)


def mapped(p, x):
    """The features of all policies and actions, ``[..., tasks, ACTIONS, features]``, by `jax.vmap` over heads."""
    return by_action(jax.vmap(lambda head: c.mlp(head, x, relu), out_axes=-2)(p["heads"]))


def successors(p, obs, heads=mapped):
    return heads(p, relu(c.linear(p["trunk"], obs)))


def cumulants(p, obs):
    return by_action(jnp.tanh(c.mlp(p["cumulants"], obs, relu)))


def greedy(psi, w):
    """For each task the action whose value is best under any policy, ``[..., tasks]``."""
    return jnp.argmax(jnp.einsum("...jad,id->...ija", psi, w).max(-2), -1)


def taken(x, action):
    """``x[..., ACTIONS, features]`` of an action."""
    return jnp.take_along_axis(x, action[..., None, None], -2)[..., 0, :]


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    psi, phi = successors(p, x["obs"]), cumulants(p, x["obs"])[x["action"]]
    best = greedy(stop_gradient(psi), stop_gradient(p["w"]))
    following = rlfx.series(stop_gradient(taken(successors(target, x["obs"]), best)), end=0.0)
    aim = stop_gradient(phi) + GAMMA * jnp.where(x["done"], 0.0, following[t + 1])
    known = 0.5 * (phi @ p["w"][x["task"]] - x["reward"]) ** 2
    return huber(psi[:, x["action"]] - aim).sum(-1).mean() + known, carry


# -- by hand: heads of ``x[..., hidden]``


def one_by_one(p, x):
    tasks = len(p["w"])
    return by_action(jnp.stack([c.mlp(jax.tree.map(lambda w: w[i], p["heads"]), x, relu) for i in range(tasks)], -2))


def products(p, x):
    """The heads' first layers as one product, the second ones as one of stacks."""
    first, second = p["heads"]
    tasks, width, hidden = first["w"].shape
    h = relu(x @ first["w"].transpose(1, 0, 2).reshape(width, -1) + first["b"].reshape(-1))
    h = h.reshape(*x.shape[:-1], tasks, hidden)
    return by_action(jnp.einsum("...nh,nho->...no", h, second["w"]) + second["b"])


def split(p, x):
    """The heads' first layers as one product, of which each head takes its part."""
    first, second = p["heads"]
    tasks, width, _ = first["w"].shape
    h = relu(x @ first["w"].transpose(1, 0, 2).reshape(width, -1) + first["b"].reshape(-1))
    parts = jnp.split(h, tasks, -1)
    return by_action(jnp.stack([h @ w + b for h, w, b in zip(parts, second["w"], second["b"], strict=True)], -2))


# -- by hand: the actions


def by_rows(psi, w):
    """As one product of matrices."""
    q = psi.reshape(-1, psi.shape[-1]) @ w.T
    return jnp.argmax(q.reshape(*psi.shape[:-1], -1).max(-3), -2)


def by_sums(psi, w):
    """One task after another, as sums of products."""
    return jnp.stack([jnp.argmax((psi * one).sum(-1).max(-2), -1) for one in w], -1)


# -- by hand: of points, the features of what was taken, the cumulants there, and what the timestep before aims at


def pieces_of(heads=mapped, act=greedy, hot=False, joined=False):
    """``hot``: actions are taken by products with ones and zeros; ``joined``: trunk and cumulants have one first layer."""

    def picked(x, action):
        return (x * jax.nn.one_hot(action, ACTIONS)[..., None]).sum(-2) if hot else taken(x, action)

    def run(p, target, x):
        obs, action = x["obs"], x["action"]
        if joined:
            first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), p["trunk"], p["cumulants"][0])
            trunk, phi = jnp.split(relu(c.linear(first, obs)), 2, -1)
            psi, phi = heads(p, trunk), by_action(jnp.tanh(c.linear(p["cumulants"][1], phi)))
        else:
            psi, phi = successors(p, obs, heads), cumulants(p, obs)
        of_target = successors(target, obs, heads)
        best = act(stop_gradient(psi), stop_gradient(p["w"]))
        each = jnp.broadcast_to(action[..., None], best.shape)
        return picked(psi, each), picked(phi, action), stop_gradient(picked(of_target, best))

    return run


def features_first(p, target, x):
    """Of rows, which are innermost throughout; turned at the end."""
    obs, action = x["obs"].T, jax.nn.one_hot(x["action"], ACTIONS, axis=0)
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731

    def made(p):
        first, second = p["heads"]
        tasks, width, hidden = first["w"].shape
        h = first["w"].transpose(0, 2, 1).reshape(-1, width) @ relu(act(p["trunk"], obs)) + first["b"].reshape(-1, 1)
        h = relu(h).reshape(tasks, hidden, -1)
        psi = jnp.einsum("nho,nhm->nom", second["w"], h) + second["b"][..., None]
        return psi.reshape(tasks, ACTIONS, -1, psi.shape[-1])

    psi, of_target = made(p), made(target)
    phi = jnp.tanh(act(p["cumulants"][1], relu(act(p["cumulants"][0], obs)))).reshape(ACTIONS, -1, obs.shape[1])
    q = jnp.einsum("jadm,id->ijam", stop_gradient(psi), stop_gradient(p["w"])).max(1)
    best = jax.nn.one_hot(jnp.argmax(q, 1), ACTIONS, axis=1)
    following = stop_gradient((of_target * best[:, :, None]).sum(1))
    of_taken = (psi * action[:, None]).sum(1)
    return of_taken.transpose(2, 0, 1), (phi * action[:, None]).sum(0).T, following.transpose(2, 0, 1)


def by_hand(length, batch, pieces=None, flat=True, envs=None, chunk=None, ways="kept"):
    """``envs``: environments of a block; ``chunk``: timesteps of one, what it computes is kept, or computed again by
    `jax.checkpoint`, or the networks run twice, for what is aimed at and for the loss."""
    pieces = pieces or pieces_of()

    def found(p, made, following, x):
        of_taken, phi = made
        going = GAMMA * (1.0 - x["done"].astype(jnp.float32))[..., None, None]
        aim = stop_gradient(phi)[..., None, :] + going * following
        known = 0.5 * ((phi * p["w"][x["task"]]).sum(-1) - x["reward"]) ** 2
        return (huber(of_taken - aim).sum(-1).mean(-1) + known).sum() / (length * batch)

    def run(p, target, data):
        rows = c.rows_of if flat else lambda x: x

        def next_of(x, size):
            """The next timestep's, of ``size``: ``[T, B]``."""
            x = x.reshape(*size, *x.shape[-2:])
            return rows(c.shifted(x, jnp.zeros_like(x[0])))

        def whole(p, data):
            one = lambda part: pieces(p, target, part)  # noqa: E731
            if chunk:
                one = jax.checkpoint(one, prevent_cse=False) if ways == "again" else one
                parts = jax.lax.map(one, c.in_chunks(rows(data), chunk * batch))
                *made, following = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
            else:
                *made, following = one(rows(data))
            return found(p, made, next_of(following, data["done"].shape), rows(data))

        if ways == "twice":
            parts = c.in_chunks(rows(data), chunk * batch)
            following = jax.lax.map(lambda x: pieces(p, target, x)[2], parts)
            following = next_of(following, (length, batch))
            loss = lambda p, part: found(p, pieces(p, target, part[0])[:2], part[1], part[0])  # noqa: E731
            return c.summed_gradient(loss, p, (parts, c.in_chunks(following, chunk * batch)))
        loss = lambda p, part: whole(p, part[0])  # noqa: E731
        return c.gradient_by_environments(loss, envs)(p, data, jnp.zeros(batch))

    return run


def workload(length, batch, tasks, features, hidden, chunk=4):
    make = lambda pieces=None, **how: by_hand(length, batch, pieces, **how)  # noqa: E731
    loops, stacks, parts = pieces_of(one_by_one), pieces_of(products, by_rows), pieces_of(split, by_rows)
    hot, some, first = pieces_of(split, by_sums, hot=True), {"chunk": chunk}, features_first
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch), "plain": make(flat=False), "rows": make(),
        "heads one by one": make(loops), "stacks": make(stacks), "split": make(parts), "ones and zeros": make(hot),
        "split, joined": make(pieces_of(split, by_rows, joined=True)), "features first": make(first),
        f"{chunk} environments": make(envs=chunk), f"split, {chunk} environments": make(parts, envs=chunk),
        f"split, joined, {2 * chunk} environments": make(pieces_of(split, by_rows, joined=True), envs=2 * chunk),
        f"features first, {chunk} environments": make(first, envs=chunk), f"split, blocks of {chunk}": make(parts, **some),
        f"ones and zeros, blocks of {chunk}": make(hot, **some), f"features first, blocks of {chunk}": make(first, **some),
        f"split, blocks of {chunk}, again": make(parts, **some, ways="again"),
        f"split, blocks of {chunk}, twice": make(parts, **some, ways="twice"),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "task": jax.random.randint(k[3], size, 0, tasks),
        "done": (jax.random.uniform(k[4], size) < 0.05).at[-1].set(True),
    }  # fmt: skip
    given = tuple(params_of(k, tasks, features, hidden) for k in k[5:])
    return Workload(forms, (*given, data), tolerance=1e-5)
