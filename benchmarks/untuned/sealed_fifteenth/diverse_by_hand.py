"""EDAC by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_fifteenth import diverse
from benchmarks.untuned.sealed_fifteenth.diverse import (
    ACTIONS,
    DIVERSITY,
    ENTROPY,
    GAMMA,
    OBS,
    noises,
    params_of,
    relu,
    unit,
)  # fmt: skip

# -- critics of rows ``x[N, OBS + ACTIONS]``: values ``[members, N]`` and both hidden layers ``[members, N, hidden]``


def together(critics, x):
    first, second, last = critics
    h = relu(x @ first["w"] + first["b"][:, None])
    g = relu(h @ second["w"] + second["b"][:, None])
    return (g @ last["w"])[..., 0] + last["b"], (h, g)


def first_joined(critics, x):
    """The first layer is one product for all critics."""
    first, second, last = critics
    members, inputs, hidden = first["w"].shape
    h = relu(x @ jnp.moveaxis(first["w"], 0, 1).reshape(inputs, -1) + first["b"].reshape(-1))
    h = jnp.moveaxis(h.reshape(len(x), members, hidden), 1, 0)
    g = relu(h @ second["w"] + second["b"][:, None])
    return (g @ last["w"])[..., 0] + last["b"], (h, g)


def one_by_one(critics, x):
    made = [together(jax.tree.map(lambda w, i=i: w[i : i + 1], critics), x) for i in range(len(critics[0]["b"]))]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *made)


def in_columns(critics, x):
    """Features first, and the first layers of all one product."""
    first, second, last = critics
    members, inputs, hidden = first["w"].shape
    h = first["w"].mT.reshape(-1, inputs) @ x.T
    h = relu(h.reshape(members, hidden, -1) + first["b"][..., None])
    g = relu(second["w"].mT @ h + second["b"][..., None])
    return (last["w"].mT @ g)[:, 0] + last["b"], (h.mT, g.mT)


# -- slopes ``[members, N, ACTIONS]`` of values by the action


def by_masks(critics, x, kept):
    """A product of weights, where hidden units are on."""
    (first, second, last), (h, g) = critics, kept
    on = jnp.where(g > 0, last["w"][:, None, :, 0], 0.0)
    on = jnp.where(h > 0, on @ second["w"].mT, 0.0)
    return on @ first["w"][:, OBS:].mT


def by_columns(critics, x, kept):
    """The same with features first."""
    first, second, last = critics
    h, g = (v.mT for v in kept)
    on = jnp.where(g > 0, last["w"], 0.0)
    on = jnp.where(h > 0, second["w"] @ on, 0.0)
    return (first["w"][:, OBS:] @ on).mT


def alike(slopes):
    """Summed: all cosines are the square of the sum."""
    slopes = unit(slopes)
    return ((slopes.sum(0) ** 2).sum() - (slopes**2).sum()) / (len(slopes) - 1)


# -- losses of critics, summed over rows ``(x, aim[N], known[N])``, and gradients


def by_gradient(critics, rows, layers, slopes):
    def loss(critics):
        x, aim, known = rows
        q, kept = layers(critics, x)
        return (0.5 * known * (q - aim) ** 2).sum() + DIVERSITY * alike(slopes(critics, x, kept))

    return jax.value_and_grad(loss)(critics)


def of_slopes(slopes):
    """What is ``alike``, and its gradient."""
    size = jax.lax.rsqrt((slopes**2).sum(-1, keepdims=True) + diverse.SMALL)
    to = size * slopes
    every, part = to.sum(0), DIVERSITY / (len(slopes) - 1)
    by = 2.0 * part * (every - to)
    return part * ((every**2).sum() - (to**2).sum()), size * (by - to * (to * by).sum(-1, keepdims=True))


def written_out(critics, rows, layers, slopes=None):
    """What goes back from a value is what slopes are made of: products of both are one."""
    (first, second, last), (x, aim, known) = critics, rows
    q, (h, g) = layers(critics, x)
    on_g = jnp.where(g > 0, last["w"][:, None, :, 0], 0.0)
    on_h = jnp.where(h > 0, on_g @ second["w"].mT, 0.0)
    w = first["w"][:, OBS:]
    found, by_slopes = of_slopes(on_h @ w.mT)
    by_h = jnp.where(h > 0, by_slopes @ w, 0.0)
    by_g = jnp.where(g > 0, by_h @ second["w"], 0.0)
    error = known * (q - aim)
    by_q = error[..., None]
    seen = by_q * x
    seen = jnp.concatenate([seen[..., :OBS], seen[..., OBS:] + by_slopes], -1)
    # sums over rows as products with errors, of which one row is enough
    grads = [
        {"w": seen.mT @ on_h, "b": (error[:, None] @ on_h)[:, 0]},
        {"w": (by_q * h + by_h).mT @ on_g, "b": (error[:, None] @ on_g)[:, 0]},
        {"w": (error[:, None] @ g + by_g.sum(1, keepdims=True)).mT, "b": error.sum(1, keepdims=True)},
    ]
    return 0.5 * (error * (q - aim)).sum() + found, grads


def written_in_columns(critics, rows, layers=None, slopes=None):
    """The same with features first."""
    (first, second, last), (x, aim, known) = critics, rows
    q, kept = in_columns(critics, x)
    h, g = (v.mT for v in kept)
    on_g = jnp.where(g > 0, last["w"], 0.0)
    on_h = jnp.where(h > 0, second["w"] @ on_g, 0.0)
    w = first["w"][:, OBS:]
    found, by_slopes = of_slopes((w @ on_h).mT)
    by_slopes = by_slopes.mT
    by_h = jnp.where(h > 0, w.mT @ by_slopes, 0.0)
    by_g = jnp.where(g > 0, second["w"].mT @ by_h, 0.0)
    error = known * (q - aim)
    by_q = error[:, None]
    seen = by_q * x.T
    seen = jnp.concatenate([seen[:, :OBS], seen[:, OBS:] + by_slopes], 1)
    grads = [
        {"w": seen @ on_h.mT, "b": (on_h @ by_q.mT)[..., 0]},
        {"w": (by_q * h + by_h) @ on_g.mT, "b": (on_g @ by_q.mT)[..., 0]},
        {"w": g @ by_q.mT + by_g.sum(-1, keepdims=True), "b": error.sum(1, keepdims=True)},
    ]
    return 0.5 * (error * (q - aim)).sum() + found, grads


# -- what is learnt


def by_hand(length, batch, layers=together, slopes=by_masks, critics=by_gradient, chunk=None):
    """``chunk``: timesteps of a block. The actor is evaluated once, and critics have a loss of their own."""
    scale = 1.0 / (length * batch)

    def some(p, noise, x, aim, known):
        """Of rows, summed."""
        learn = lambda nets: c.squashed(nets, x["obs"], noise)  # noqa: E731
        fixed, alpha = p["critics"], jnp.exp(p["log_alpha"])

        def loss(nets):
            action, log_prob = learn(nets)
            q = layers(fixed, jnp.concatenate([x["obs"], action], -1))[0]
            return (alpha * log_prob - q.min(0)).sum(), log_prob.sum()

        (actor, log_prob), by_actor = jax.value_and_grad(loss, has_aux=True)(p["actor"])
        rows = jnp.concatenate([x["obs"], x["action"]], -1), aim, known
        errors, by_critics = critics(p["critics"], rows, layers, slopes)
        by_alpha = -(log_prob + ENTROPY * len(noise))
        return errors + actor + p["log_alpha"] * by_alpha, {
            "actor": by_actor,
            "critics": by_critics,
            "log_alpha": by_alpha,
        }

    def softened(p, target, obs, noise):
        action, log_prob = c.squashed(p["actor"], obs, noise)
        q = layers(target, jnp.concatenate([obs, action], -1))[0]
        return q.min(0) - jnp.exp(p["log_alpha"]) * log_prob

    def run(p, target, data, key):
        noise = noises(key, length, batch).reshape(-1, ACTIONS)
        x = c.rows_of({"obs": data["obs"], "action": data["action"]})
        if chunk is None:
            soft = softened(p, target, x["obs"], noise)
        else:
            soft = jax.lax.map(lambda x: softened(p, target, *x), c.in_chunks((x["obs"], noise), chunk * batch))
        soft = soft.reshape(length, batch)
        aim = data["reward"] + GAMMA * (1.0 - data["terminated"]) * c.shifted(soft, jnp.zeros_like(soft[0]))
        rows = noise, x, aim.reshape(-1), c.known_of(data).reshape(-1)
        if chunk is None:
            total = some(p, *rows)
        else:
            add = lambda total, rows: (jax.tree.map(jnp.add, total, some(p, *rows)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            total = jax.lax.scan(add, none, c.in_chunks(rows, chunk * batch))[0]
        return jax.tree.map(lambda x: scale * x, total)

    return run


def actor_once(length, batch, layers=together, critics=written_out, both=False):
    """The policy is evaluated once for aims and for its own loss; slopes of the least critic are written out. ``both``: its
    critics and those of the target are one call."""
    scale = 1.0 / (length * batch)

    def least_slopes(nets, kept, q):
        """Of the critic that is least, ``[N, ACTIONS]``."""
        (first, second, last), (h, g) = nets, kept
        least = (jnp.argmin(q, 0) == jnp.arange(len(q))[:, None])[..., None]
        on = jnp.where(least & (g > 0), last["w"][:, None, :, 0], 0.0)
        on = jnp.where(h > 0, on @ second["w"].mT, 0.0)
        return (on @ first["w"][:, OBS:].mT).sum(0)

    def run(p, target, data, key):
        noise, alpha = noises(key, length, batch).reshape(-1, ACTIONS), jnp.exp(p["log_alpha"])
        obs, done = (data[name].reshape(length * batch, -1) for name in ("obs", "action"))
        (action, log_prob), pull = jax.vjp(lambda nets: c.squashed(nets, obs, noise), p["actor"])
        tried, members = jnp.concatenate([obs, action], -1), len(p["critics"][0]["b"])
        if both:
            every, kept = layers(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), p["critics"], target), tried)
            q, old, kept = every[:members], every[members:], jax.tree.map(lambda x: x[:members], kept)
        else:
            (q, kept), (old, _) = layers(p["critics"], tried), layers(target, tried)
        (by_actor,) = pull((-scale * least_slopes(p["critics"], kept, q), jnp.full_like(log_prob, scale) * alpha))
        soft = (old.min(0) - alpha * log_prob).reshape(length, batch)
        aim = data["reward"] + GAMMA * (1.0 - data["terminated"]) * c.shifted(soft, jnp.zeros_like(soft[0]))
        rows = jnp.concatenate([obs, done], -1), aim.reshape(-1), c.known_of(data).reshape(-1)
        errors, by_critics = critics(p["critics"], rows, layers, by_masks)
        by_alpha = -(log_prob.mean() + ENTROPY)
        value = scale * (errors + (alpha * log_prob - q.min(0)).sum()) + p["log_alpha"] * by_alpha
        by_critics = jax.tree.map(lambda x: scale * x, by_critics)
        return value, stop_gradient({"actor": by_actor, "critics": by_critics, "log_alpha": by_alpha})

    return run


def workload(length, batch, members, hidden, chunk=4):
    make, once = functools.partial(by_hand, length, batch), functools.partial(actor_once, length, batch)
    single, joined, out = {"layers": one_by_one}, {"layers": first_joined}, {"critics": written_out}
    column, column_out = (
        {"layers": in_columns, "slopes": by_columns},
        {"layers": in_columns, "critics": written_in_columns},
    )
    forms = {
        "rlfx": c.learner_by_rlfx(diverse.program, length, batch), "plain": diverse.plain(length, batch),
        "masks, joined": make(**joined), "masks, one by one": make(**single), "masks, features first": make(**column),
        "written out": make(**out), "written out, joined": make(**out, **joined),
        "written out, one by one": make(**out, **single),
        "written out, features first": make(**column_out), f"written out, blocks of {chunk}": make(**out, chunk=chunk),
        "written out, actor once, both": once(both=True), "written out, actor once, joined": once(**joined),
        "written out, joined, threefry unrolled": make(**out, **joined),
        "written out, actor once, joined, threefry unrolled": once(**joined),
        f"written out, blocks of {chunk}, threefry unrolled": make(**out, chunk=chunk),
        f"written out, joined, blocks of {chunk}, threefry unrolled": make(**out, **joined, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "terminated": (jax.random.uniform(k[3], size) < 0.03).astype(jnp.float32),
        "truncated": jax.random.uniform(k[4], size) < 0.03,
    }  # fmt: skip
    return drawing(forms, (*params_of(k[5], members, hidden), data), tolerance=2e-5)
