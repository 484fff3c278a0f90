"""IQL on stored sequences, with expectiles, by networks of messages along the edges of a small graph (a body's joints)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

FEATURES, ACTIONS, ROUNDS, GAMMA, EXPECTILE, HEAT = 6, 5, 2, 0.99, 0.8, 3.0
#: A torso with four limbs, two of which have a joint more; edges go both ways.
LINKS = ((0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (2, 6), (5, 7))
NODES = 8
SENDERS = np.array([a for a, _ in LINKS] + [b for _, b in LINKS], np.int32)
RECEIVERS = np.array([b for _, b in LINKS] + [a for a, _ in LINKS], np.int32)
AT_SENDER, AT_RECEIVER = (np.eye(NODES, dtype=np.float32)[i] for i in (SENDERS, RECEIVERS))


def net_params(key, hidden, outputs):
    k = jax.random.split(key, 2 + 2 * ROUNDS)
    rounds = [
        {"edge": c.dense(k[2 * i], 2 * hidden, hidden), "node": c.dense(k[2 * i + 1], 2 * hidden, hidden)}
        for i in range(ROUNDS)
    ]
    return {"in": c.dense(k[-2], FEATURES, hidden), "rounds": rounds, "out": c.dense(k[-1], hidden, outputs)}


def net(p, x):
    """Of one graph ``x[NODES, FEATURES]``."""
    n = jnp.tanh(c.linear(p["in"], x))
    for r in p["rounds"]:
        message = jnp.tanh(c.linear(r["edge"], jnp.concatenate([n[RECEIVERS], n[SENDERS]], -1)))
        received = jax.ops.segment_sum(message, RECEIVERS, NODES)
        n = jnp.tanh(c.linear(r["node"], jnp.concatenate([n, received], -1)))
    return c.linear(p["out"], n.mean(-2))


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    q = [net_params(k, hidden, ACTIONS) for k in k[:2]]
    return {"q": q, "v": net_params(k[2], hidden, 1), "pi": net_params(k[3], hidden, ACTIONS)}


def point_loss(qs, believed, v, logits, x, after):
    """Of one point, or of rows; ``believed`` by the targets, and ``after``, what follows, are no one's parameters."""
    gap = believed - v
    fit = jnp.abs(EXPECTILE - (gap < 0.0)) * gap**2
    aim = x["reward"] + GAMMA * (1.0 - x["done"].astype(jnp.float32)) * after
    error = sum(0.5 * (c.pick(q, x["action"]) - aim) ** 2 for q in qs)
    weight = jnp.minimum(jnp.exp(HEAT * stop_gradient(gap)), 100.0)
    return fit + error - weight * c.pick(jax.nn.log_softmax(logits), x["action"])


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    obs = x["obs"]
    v = net(p["v"], obs)[0]
    believed = jnp.minimum(*(net(q, obs)[x["action"]] for q in target))
    after = rlfx.series(stop_gradient(v), end=0.0)[t + 1]
    qs = [net(q, obs) for q in p["q"]]
    return point_loss(qs, stop_gradient(believed), v, net(p["pi"], obs), x, after), carry


# -- by hand: networks of rows of graphs ``x[N, NODES, FEATURES]``; outputs ``[N, outputs]``


def mapped(p, x):
    return jax.vmap(lambda x: net(p, x))(x)


def in_rows(p, x):
    """Products of matrices, and edges gathered and added for all graphs at once."""
    flat = lambda p, x: c.linear(p, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)  # noqa: E731
    n = jnp.tanh(flat(p["in"], x))
    for r in p["rounds"]:
        message = jnp.tanh(flat(r["edge"], jnp.concatenate([n[:, RECEIVERS], n[:, SENDERS]], -1)))
        received = jnp.zeros_like(n).at[:, RECEIVERS].add(message)
        n = jnp.tanh(flat(r["node"], jnp.concatenate([n, received], -1)))
    return c.linear(p["out"], n.mean(1))


def by_incidence(p, x):
    """Gathers and sums are products with the graph's matrices."""
    n = jnp.tanh(c.linear(p["in"], x))
    for r in p["rounds"]:
        ends = jnp.concatenate([AT_RECEIVER @ n, AT_SENDER @ n], -1)
        n = jnp.concatenate([n, AT_RECEIVER.T @ jnp.tanh(c.linear(r["edge"], ends))], -1)
        n = jnp.tanh(c.linear(r["node"], n))
    return c.linear(p["out"], n.mean(1))


def halves(r, n):
    """A message's two products, taken of nodes and not of edges: ``n[..., H]``."""
    hidden = n.shape[-1]
    return n @ r["edge"]["w"][:hidden] + r["edge"]["b"], n @ r["edge"]["w"][hidden:]


def split(p, x):
    """Nodes are multiplied, edges only added."""
    size, hidden = x.shape[:2], p["in"]["w"].shape[1]
    n = jnp.tanh(c.linear(p["in"], x.reshape(-1, FEATURES)))
    for r in p["rounds"]:
        to, of = (h.reshape(*size, -1) for h in halves(r, n))
        received = AT_RECEIVER.T @ jnp.tanh(to[:, RECEIVERS] + of[:, SENDERS])
        n = jnp.tanh(
            n @ r["node"]["w"][:hidden] + received.reshape(-1, hidden) @ r["node"]["w"][hidden:] + r["node"]["b"]
        )
    return c.linear(p["out"], n.reshape(*size, -1).mean(1))


def received_of(to, of):
    """For ``[NODES, ...]``: each node's messages, one after the other."""
    into = [[] for _ in range(NODES)]
    for sender, receiver in zip(SENDERS, RECEIVERS, strict=True):
        into[receiver].append(jnp.tanh(to[receiver] + of[sender]))
    return jnp.stack([sum(messages) for messages in into])


def nodes_first(p, x):
    """Nodes are outermost, so that a node of all graphs is one piece, and no edge is gathered."""
    hidden = p["in"]["w"].shape[1]
    n = jnp.tanh(c.linear(p["in"], jnp.moveaxis(x, 1, 0).reshape(-1, FEATURES)))
    for r in p["rounds"]:
        to, of = (h.reshape(NODES, -1, hidden) for h in halves(r, n))
        received = received_of(to, of).reshape(-1, hidden)
        n = jnp.tanh(n @ r["node"]["w"][:hidden] + received @ r["node"]["w"][hidden:] + r["node"]["b"])
    return c.linear(p["out"], n.reshape(NODES, -1, hidden).mean(0))


def features_first(p, x):
    """The same, and features before both: graphs are innermost."""
    hidden = p["in"]["w"].shape[1]
    n = jnp.tanh(p["in"]["w"].T @ jnp.moveaxis(x, 0, 2).swapaxes(0, 1).reshape(FEATURES, -1) + p["in"]["b"][:, None])
    for r in p["rounds"]:
        to = r["edge"]["w"][:hidden].T @ n + r["edge"]["b"][:, None]
        of = r["edge"]["w"][hidden:].T @ n
        to, of = (jnp.swapaxes(h.reshape(hidden, NODES, -1), 0, 1) for h in (to, of))
        received = jnp.swapaxes(received_of(to, of), 0, 1).reshape(hidden, -1)
        w = r["node"]["w"]
        n = jnp.tanh(w[:hidden].T @ n + w[hidden:].T @ received + r["node"]["b"][:, None])
    return (p["out"]["w"].T @ n.reshape(hidden, NODES, -1).mean(1) + p["out"]["b"][:, None]).T


def by_hand(length, batch, net=mapped, once=False, chunk=None, back=False):
    """``once``: the value network is evaluated once, for what follows and for its loss; ``chunk``: timesteps of a block;
    ``back``: one loop backwards over blocks, the value of the timestep after them in its carry."""

    def run(p, target, data):
        mean = 1.0 / (length * batch)

        def believed_of(x):
            return jnp.minimum(*(c.pick(net(q, x["obs"]), x["action"]) for q in target))

        def loss(p, part, last=None):
            """``last``: the value after a block, of which what follows is not yet known."""
            x, believed, after = part
            v = net(p["v"], x["obs"])[:, 0]
            if after is None:
                after = c.shifted(v.reshape(-1, batch), jnp.zeros(batch) if last is None else last).reshape(-1)
            qs = [net(q, x["obs"]) for q in p["q"]]
            losses = point_loss(qs, believed, v, net(p["pi"], x["obs"]), x, stop_gradient(after))
            return mean * losses.sum(), v[:batch]

        if back:

            def body(state, x):
                last, total = state
                x = c.rows_of(x)
                (found, first), grads = jax.value_and_grad(loss, has_aux=True)(p, (x, believed_of(x), None), last)
                return (first, jax.tree.map(jnp.add, total, (found, grads))), None

            start = jnp.zeros(batch), (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p))
            return jax.lax.scan(body, start, c.in_chunks(data, chunk), reverse=True)[0][1]

        x, of_rows = c.rows_of(data), lambda p, part: loss(p, part)[0]
        if once:
            return jax.value_and_grad(of_rows)(p, (x, believed_of(x), None))
        v = net(p["v"], x["obs"])[:, 0].reshape(length, batch)
        part = x, believed_of(x), c.shifted(v, jnp.zeros(batch)).reshape(-1)
        if chunk is None:
            return jax.value_and_grad(of_rows)(p, part)
        return c.summed_gradient(of_rows, p, c.in_chunks(part, chunk * batch))

    return run


def workload(length, batch, hidden, chunk=4):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    back = {"chunk": 1, "back": True}
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch),
        "plain": make(), "in rows": make(net=in_rows), "by incidence": make(net=by_incidence),
        "split": make(net=split), "value once": make(once=True), "nodes first": make(net=nodes_first, once=True),
        "features first": make(net=features_first, once=True), f"in rows, blocks of {chunk}": make(net=in_rows, chunk=chunk),
        f"split, blocks of {chunk}": make(net=split, chunk=chunk), "split, back by 1": make(net=split, **back),
        "nodes first, back by 1": make(net=nodes_first, **back),
        f"nodes first, back by {chunk}": make(net=nodes_first, chunk=chunk, back=True),
        f"features first, back by {chunk}": make(net=features_first, chunk=chunk, back=True),
        f"nodes first, back by {2 * chunk}": make(net=nodes_first, chunk=2 * chunk, back=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, NODES, FEATURES)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], hidden), params_of(k[5], hidden)["q"], data), tolerance=5e-6)
