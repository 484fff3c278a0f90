"""Contrastive RL (Eysenbach et al. 2022): which of a batch's goals did this state and action reach? A matrix of all pairs of
environments at each timestep, and an actor that comes near to its own goal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

OBS, ACTIONS, GOAL, ALPHA, TEMPERED = 18, 4, 6, 0.1, 0.1


def params_of(key, hidden, code):
    """Networks of two layers with norms."""
    sizes = {"actor": (OBS + GOAL, 2 * ACTIONS), "pair": (OBS + ACTIONS, code), "goal": (GOAL, code)}

    def network(key, given, out):
        k = jax.random.split(key, 3)
        layers = [c.dense(k, *size) for k, size in zip(k, ((given, hidden), (hidden, hidden)), strict=False)]
        norm = {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}
        return {"layers": [layer | norm for layer in layers], "out": c.dense(k[2], hidden, out)}

    return {n: network(k, *size) for k, (n, size) in zip(jax.random.split(key, 3), sizes.items(), strict=True)}


def normed(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def net(p, x):
    for layer in p["layers"]:
        x = jax.nn.swish(normed(layer, c.linear(layer, x)))
    return c.linear(p["out"], x)


def acted(made, noise):
    """A squashed normal's action and its log-probability, of what the network made."""
    mean, log_std = jnp.split(made, 2, -1)
    log_std = -2.0 + 2.0 * jnp.tanh(log_std)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), log_prob.sum(-1)


def near(a, b):
    """How near codes are, less than 0."""
    return -jnp.sqrt(((a - b) ** 2).sum(-1) + 1e-6)


def infonce(pairs, goals):
    """Both ways, of the codes ``[B, code]`` of a batch; log-partitions are kept small."""
    logits = near(pairs[:, None], goals[None])
    ways = jax.nn.logsumexp(logits, 1), jax.nn.logsumexp(logits, 0)
    return (ways[0] + ways[1] - 2.0 * jnp.diagonal(logits) + TEMPERED * ways[0] ** 2).mean()


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    obs, goal = x["obs"], x["goal"]
    critic = rlfx.shared(infonce, net(p["pair"], jnp.concatenate([obs, x["action"]])), net(p["goal"], goal))

    noise = jax.random.normal(t.key_for("noise"), (ACTIONS,))
    action, log_prob = acted(net(p["actor"], jnp.concatenate([obs, goal])), noise)
    judge = stop_gradient(p)
    reached = near(net(judge["pair"], jnp.concatenate([obs, action])), net(judge["goal"], goal))
    return critic + ALPHA * log_prob - reached, carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, data, key):
        return jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch), key)[0])(p)

    return run


# -- by hand: the loss of codes ``[..., B, code]``, summed over all timesteps


def of_logits(logits):
    ways = jax.nn.logsumexp(logits, -1), jax.nn.logsumexp(logits, -2)
    own = jnp.diagonal(logits, axis1=-2, axis2=-1)
    return (ways[0] + ways[1] - 2.0 * own + TEMPERED * ways[0] ** 2).sum()


def mapped(pairs, goals):
    return jax.vmap(infonce)(pairs, goals).sum() * pairs.shape[-2]


def again(pairs, goals):
    return jax.checkpoint(mapped)(pairs, goals)


def one_by_one(pairs, goals):
    """A timestep after the other, whose gradient computes it again."""
    return jax.lax.map(lambda x: jax.checkpoint(infonce)(*x), (pairs, goals)).sum() * pairs.shape[-2]


def products(pairs, goals):
    """Distances by products."""
    squares = (pairs**2).sum(-1)[..., :, None] + (goals**2).sum(-1)[..., None, :]
    return of_logits(-jnp.sqrt(squares - 2.0 * pairs @ jnp.swapaxes(goals, -1, -2) + 1e-6))


def products_by_one(pairs, goals):
    return jax.lax.map(lambda x: jax.checkpoint(products)(*x), (pairs, goals)).sum()


def innermost(pairs, goals):
    """Sums of differences over codes, environments innermost, so that no axis is reduced within a vector."""
    pairs, goals = jnp.moveaxis(pairs, -1, 0), jnp.moveaxis(goals, -1, 0)
    return of_logits(-jnp.sqrt(((pairs[..., :, None] - goals[..., None, :]) ** 2).sum(0) + 1e-6))


def written_out(distances):
    """One matrix is kept; its exponentials are taken once for both ways, and its derivative is written by hand."""

    @jax.custom_vjp
    def loss(pairs, goals):
        return forwards(pairs, goals)[0]

    def forwards(pairs, goals):
        d = distances(pairs, goals)
        e = jnp.exp(d.min((-2, -1), keepdims=True) - d)
        rows, columns = e.sum(-1, keepdims=True), e.sum(-2, keepdims=True)
        low = -d.min((-2, -1), keepdims=True)
        by_rows = jnp.log(rows) + low
        own = jnp.diagonal(d, axis1=-2, axis2=-1)
        found = (by_rows + TEMPERED * by_rows**2).sum() + (jnp.log(columns) + low).sum() + 2.0 * own.sum()
        slope = e * ((1.0 + 2.0 * TEMPERED * by_rows) / rows + 1.0 / columns) - 2.0 * jnp.eye(d.shape[-1])
        return found, (pairs, goals, slope / d)

    def backwards(residuals, by):
        """Of ``sum(slope * -d)``: with w = slope / d, rows are pulled by what they see."""
        pairs, goals, w = residuals
        to_goals = jnp.swapaxes(w, -1, -2) @ pairs - w.sum(-2)[..., None] * goals
        return by * (w @ goals - w.sum(-1)[..., None] * pairs), by * to_goals

    loss.defvjp(forwards, backwards)
    return loss


def by_products(pairs, goals):
    squares = (pairs**2).sum(-1)[..., :, None] + (goals**2).sum(-1)[..., None, :]
    return jnp.sqrt(squares - 2.0 * pairs @ jnp.swapaxes(goals, -1, -2) + 1e-6)


def features_first(p, x):
    """`net` of rows ``[N, given]``, with rows innermost."""
    x = x.T
    for layer in p["layers"]:
        x = layer["w"].T @ x + layer["b"][:, None]
        x = x - x.mean(0)
        x = x * jax.lax.rsqrt((x**2).mean(0) + 1e-6) * layer["scale"][:, None] + layer["bias"][:, None]
        x = jax.nn.swish(x)
    return (p["out"]["w"].T @ x).T + p["out"]["b"]


def by_hand(length, batch, matrix=mapped, net=net, flat=True, chunk=None, once=True, ahead=True):
    """``once``: codes of goals serve the actor, too; ``chunk``: timesteps of a block; ``ahead``: noise comes first."""

    def run(p, data, key):
        (keys,) = c.streams(key, batch, "noise")
        draw = lambda t: jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(c.at(keys, t))  # noqa: E731
        times = jnp.arange(length)

        def loss(p, part):
            x, given = part
            noise = given if ahead else jax.vmap(draw)(given)
            shape = x["goal"].shape[:2]
            x, noise = c.rows_of((x, noise)) if flat else (x, noise)
            both = lambda *parts: jnp.concatenate(parts, -1)  # noqa: E731
            pairs, goals = net(p["pair"], both(x["obs"], x["action"])), net(p["goal"], x["goal"])
            in_time = lambda x: x.reshape(*shape, -1)  # noqa: E731
            critic = matrix(in_time(pairs), in_time(goals))
            action, log_prob = acted(net(p["actor"], both(x["obs"], x["goal"])), noise)
            own = stop_gradient(goals) if once else net(stop_gradient(p["goal"]), x["goal"])
            reached = near(net(stop_gradient(p["pair"]), both(x["obs"], action)), own)
            return (critic + (ALPHA * log_prob - reached).sum()) / (length * batch)

        part = data, jax.vmap(draw)(times) if ahead else times
        if chunk is None:
            return jax.value_and_grad(loss)(p, part)
        return c.summed_gradient(loss, p, c.in_chunks(part, chunk))

    return run


def workload(length, batch, hidden, code, chunk=2):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    written, blocks, late = {"matrix": written_out(by_products)}, {"chunk": chunk}, {"ahead": False}
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(flat=False, once=False), "goals once": make(flat=False), "rows": make(),
        "matrices again": make(matrix=again), "matrices one by one": make(matrix=one_by_one),
        "products": make(matrix=products), "products, one by one": make(matrix=products_by_one),
        "environments innermost": make(matrix=innermost), "written out": make(**written),
        "features first, written out": make(net=features_first, **written),
        f"blocks of {chunk}": make(**blocks), f"environments innermost, blocks of {chunk}": make(matrix=innermost, **blocks),
        f"products, blocks of {chunk}": make(matrix=products, **blocks),
        f"written out, blocks of {chunk}": make(**written, **blocks), "written out, blocks of 1": make(**written, chunk=1),
        f"features first, written out, blocks of {chunk}": make(net=features_first, **written, **blocks),
        f"written out, blocks of {chunk}, threefry unrolled": make(**written, **blocks),
        "written out, blocks of 1, drawn late, threefry unrolled": make(**written, chunk=1, **late),
        f"features first, written out, blocks of {chunk}, threefry unrolled": make(net=features_first, **written, **blocks),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "goal": jax.random.normal(k[1], (*size, GOAL)),
        "action": jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS))),
    }  # fmt: skip
    p = params_of(k[3], hidden, code)
    own = {name: (p, data, jax.random.key(2, impl=threefry)) for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (p, data, jax.random.key(2)), own, tolerance=5e-6)
