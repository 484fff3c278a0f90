"""Forward-backward representations by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fifteenth import measures
from benchmarks.untuned.sealed_fifteenth.measures import (
    ACTIONS,
    GAMMA,
    OBS,
    ORTHONORMAL,
    SHARP,
    params_of,
    relu,
    scaled,
)  # fmt: skip

# -- hidden layers and outputs of rows: the first layer's sums ``[N, hidden]`` are given


def by_rows(layers, x):
    """``(kept, out)``."""
    kept = [relu(x)]
    for layer in layers[:-1]:
        kept.append(relu(c.linear(layer, kept[-1])))
    return kept, c.linear(layers[-1], kept[-1])


def by_columns(layers, x):
    """Features first."""
    kept = [relu(x).T]
    for layer in layers[:-1]:
        kept.append(relu(layer["w"].T @ kept[-1] + layer["b"][:, None]))
    return [x.T for x in kept], (layers[-1]["w"].T @ kept[-1] + layers[-1]["b"][:, None]).T


def way_back(layers, kept, by):
    """Gradients of the layers, and of the first layer's sums."""
    grads = []
    for layer, x in zip(layers[::-1], kept[::-1], strict=True):
        grads.append({"w": x.T @ by, "b": by.sum(0)})
        by = jnp.where(x > 0, by @ layer["w"].T, 0.0)
    return grads[::-1], by


# -- the first layer of the forward network: of observations ``[T, B, OBS]``, and a task of each environment


def tasks_as_rows(first, obs, tasks):
    x = jnp.concatenate([obs, jnp.broadcast_to(tasks, (*obs.shape[:2], tasks.shape[-1]))], -1)
    return c.linear(first, x.reshape(-1, x.shape[-1]))


def tasks_once(first, obs, tasks):
    """What a task adds is the same at all timesteps."""
    of_task = tasks @ first["w"][OBS:] + first["b"]
    of_obs = (obs.reshape(-1, OBS) @ first["w"][:OBS]).reshape(*obs.shape[:2], -1)
    return (of_obs + of_task).reshape(-1, of_task.shape[-1])


def first_back(by, obs, tasks):
    """The first layer's gradient, of ``tasks_once``."""
    of_task = by.reshape(len(obs), len(tasks), -1).sum(0)
    return {"w": jnp.concatenate([obs.reshape(-1, OBS).T @ by, tasks.T @ of_task]), "b": of_task.sum(0)}


# -- pairs: summed over timesteps, of ``[T, B, code]``


def as_given(chosen, reached, after, old, known):
    return jax.vmap(measures.of_pairs)(chosen, reached, after, old, known).sum()


def by_differences(chosen, reached, after, old, known):
    """Measure less aim is one product, and diagonals are taken from the sums of squares."""
    size = chosen.shape[1]
    pairs, code = 1.0 / (size * (size - 1)), chosen.shape[2]
    left = jnp.concatenate([chosen, -GAMMA * after], -1)
    right = jnp.concatenate([reached, old], -1)
    errors = known * ((left @ right.mT) ** 2).sum(-1) - known * (left * right).sum(-1) ** 2
    gram, norm = reached.mT @ reached, (reached**2).sum(-1)
    apart = 0.5 * pairs * ((gram**2).sum() - (norm**2).sum()) - norm.sum() / size
    assert gram.shape[-1] == code  # smaller than that of a batch
    return 0.5 * pairs * errors.sum() - (known * (chosen * reached).sum(-1)).sum() / size + ORTHONORMAL * apart


def pairs_back(chosen, reached, after, old, known):
    """The sum, and its gradients by what was chosen and what was reached."""
    size = chosen.shape[1]
    pairs = 1.0 / (size * (size - 1))
    others = known[..., None] * (1.0 - jnp.eye(size))
    error = others * (jnp.concatenate([chosen, -GAMMA * after], -1) @ jnp.concatenate([reached, old], -1).mT)
    gram, norm = reached.mT @ reached, (reached**2).sum(-1, keepdims=True)
    value = 0.5 * pairs * (error**2).sum() - (known * (chosen * reached).sum(-1)).sum() / size
    apart = 0.5 * pairs * ((gram**2).sum() - (norm**2).sum()) - norm.sum() / size
    by_chosen = pairs * (error @ reached) - known[..., None] * reached / size
    by_reached = pairs * (error.mT @ chosen) - known[..., None] * chosen / size
    by_apart = 2.0 * (pairs * (reached @ gram - norm * reached) - reached / size)
    return value + ORTHONORMAL * apart, by_chosen, by_reached + ORTHONORMAL * by_apart


# -- what is learnt


def ones_of(data):
    return jax.nn.one_hot(data["action"][:-1], ACTIONS).reshape(-1, ACTIONS, 1)


def known_of(data):
    return 1.0 - data["done"][:-1].astype(jnp.float32)


def expected(codes, tasks, size):
    """Of ``codes[N, ACTIONS * code]``: those of the policy, ``[T, B, code]``."""
    codes = codes.reshape(*size, ACTIONS, -1)
    policy = jax.nn.softmax(SHARP * (codes * tasks[:, None]).sum(-1))
    return (policy[..., None] * codes).sum(-2)


def first_joined(nets, others, obs, tasks):
    """The first layers of four networks, of all timesteps, are one product: those of ``obs[:-1]`` and ``obs[1:]``."""
    firsts = [net[0] for net in (nets["forward"], nets["backward"], others["forward"], others["backward"])]
    made = (obs.reshape(-1, OBS) @ jnp.concatenate([first["w"][:OBS] for first in firsts], -1)).reshape(
        *obs.shape[:2], -1
    )
    parts = jnp.split(made, len(firsts), -1)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    of_task = [tasks @ first["w"][OBS:] + first["b"] for first in (firsts[0], firsts[2])]
    return (
        flat(parts[0][:-1] + of_task[0]), flat(parts[1][1:] + firsts[1]["b"]),
        flat(parts[2][1:] + of_task[1]), flat(parts[3][1:] + firsts[3]["b"]),
    )  # fmt: skip


def of_target(target, obs, tasks, layers, first):
    """What the target network says of the timesteps after ``[T - 1, B, code]``."""
    size = len(obs) - 1, obs.shape[1]
    after = layers(target["forward"][1:], first(target["forward"][0], obs[1:], tasks))[1]
    old = layers(target["backward"][1:], c.linear(target["backward"][0], obs[1:].reshape(-1, OBS)))[1]
    return expected(after, tasks, size), scaled(old).reshape(*size, -1)


def by_hand(length, batch, layers=by_rows, first=tasks_once, pairs=as_given, ones=True, joined=False, chunk=None):
    """``ones``: what was done is chosen by a product with ones; ``chunk``: timesteps of a block."""
    size = length - 1, batch

    def choose(made, data):
        codes = made.reshape(-1, ACTIONS, made.shape[-1] // ACTIONS)
        if ones:
            return (ones_of(data) * codes).sum(1)
        return jnp.take_along_axis(codes, data["action"][:-1].reshape(-1, 1, 1), 1)[:, 0]

    def loss_joined(p, target, data, tasks):
        sums = first_joined(p, stop_gradient(target), data["obs"], tasks)
        nets = p["forward"], p["backward"], target["forward"], target["backward"]
        made = [layers(net[1:], x)[1] for net, x in zip(nets, sums, strict=True)]
        after, old = stop_gradient((expected(made[2], tasks, size), scaled(made[3]).reshape(*size, -1)))
        chosen = choose(made[0], data).reshape(*size, -1)
        return pairs(chosen, scaled(made[1]).reshape(*size, -1), after, old, known_of(data)) / length

    def loss(p, target, data, tasks):
        obs = data["obs"]
        some = len(obs) - 1, batch
        after, old = of_target(target, obs, tasks, layers, first)
        made = layers(p["forward"][1:], first(p["forward"][0], obs[:-1], tasks))[1]
        reached = layers(p["backward"][1:], c.linear(p["backward"][0], obs[1:].reshape(-1, OBS)))[1]
        chosen, reached = choose(made, data).reshape(*some, -1), scaled(reached).reshape(*some, -1)
        return pairs(chosen, reached, after, old, known_of(data)) / length

    def run(p, target, given):
        data, tasks = given
        if chunk is None:
            return jax.value_and_grad(loss_joined if joined else loss)(p, target, data, tasks)
        total = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        whole = (length - 1) // chunk
        cut = jax.tree.map(lambda x: jnp.stack([x[i * chunk : (i + 1) * chunk + 1] for i in range(whole)]), data)
        of_block = lambda data: jax.value_and_grad(loss)(p, target, data, tasks)  # noqa: E731
        total = jax.lax.scan(lambda total, data: (jax.tree.map(jnp.add, total, of_block(data)), None), total, cut)[0]
        if whole * chunk < length - 1:
            total = jax.tree.map(jnp.add, total, of_block(jax.tree.map(lambda x: x[whole * chunk :], data)))
        return total

    return run


def written_out(length, batch, layers=by_rows):
    """With a way back of its own."""
    size = length - 1, batch

    def run(p, target, given):
        data, tasks = given
        obs, rows = data["obs"], data["obs"][1:].reshape(-1, OBS)
        after, old = of_target(target, obs, tasks, layers, tasks_once)
        forward, backward = p["forward"], p["backward"]
        kept, made = layers(forward[1:], tasks_once(forward[0], obs[:-1], tasks))
        kept_b, made_b = layers(backward[1:], c.linear(backward[0], rows))
        ones = ones_of(data)
        chosen = (ones * made.reshape(len(made), ACTIONS, -1)).sum(1)
        by = jax.lax.rsqrt((made_b**2).mean(-1, keepdims=True) + 1e-6)
        reached = by * made_b
        folded = lambda x: x.reshape(*size, -1)  # noqa: E731
        value, by_chosen, by_reached = pairs_back(folded(chosen), folded(reached), after, old, known_of(data))

        by_made = (ones * by_chosen.reshape(len(made), 1, -1)).reshape(made.shape) / length
        grads, by_first = way_back(forward[1:], kept, by_made)
        by_reached = by_reached.reshape(reached.shape) / length
        by_made_b = by * (by_reached - reached * (reached * by_reached).mean(-1, keepdims=True))
        grads_b, by_first_b = way_back(backward[1:], kept_b, by_made_b)
        return value / length, {
            "forward": [first_back(by_first, obs[:-1], tasks), *grads],
            "backward": [{"w": rows.T @ by_first_b, "b": by_first_b.sum(0)}, *grads_b],
        }

    return run


def workload(length, batch, code, hidden, chunk=5):
    make = functools.partial(by_hand, length, batch)
    rows, column, apart = {"first": tasks_as_rows}, {"layers": by_columns}, {"pairs": by_differences}
    forms = {
        "rlfx": c.learner_by_rlfx(measures.program, length, batch), "plain": measures.plain(length, batch),
        "rows": make(**rows, ones=False), "rows, ones": make(**rows),
        "tasks once": make(), "tasks once, differences": make(**apart), "tasks once, joined": make(**apart, joined=True),
        "features first": make(**column, **apart), f"differences, blocks of {chunk}": make(**apart, chunk=chunk),
        "written out": written_out(length, batch), "written out, features first": written_out(length, batch, by_columns),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "done": jax.random.uniform(k[2], size) < 0.03,
    }  # fmt: skip
    p, target = (params_of(k, code, hidden) for k in k[3:5])
    return Workload(forms, (p, target, (data, scaled(jax.random.normal(k[5], (batch, code))))), tolerance=2e-5)
