"""DDPG with hindsight by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twelfth import hindsight
from benchmarks.untuned.sealed_twelfth.hindsight import (
    ACTIONS,
    GAMMA,
    GOAL,
    OBS,
    drawn,
    loss_of,
    mu,
    params_of,
    q_of,
    relu,
    reward_of,
)  # fmt: skip

SEEN = OBS + GOAL

# -- goals of rows ``[T * B, GOAL]``


def looked_up(data, again, when):
    """Where a goal is another one, a row of what was achieved."""
    length, batch = again.shape
    rows = (when * batch + jnp.arange(batch)).reshape(-1)
    later = data["achieved"].reshape(length * batch, GOAL)[rows]
    return jnp.where(again.reshape(-1, 1), later, data["goal"].reshape(-1, GOAL))


def one_table(data, again, when):
    """One lookup in both tables."""
    length, batch = again.shape
    both = jnp.concatenate([data["achieved"].reshape(-1, GOAL), data["goal"].reshape(-1, GOAL)])
    own = length * batch + jnp.arange(length * batch)
    rows = (when * batch + jnp.arange(batch)).reshape(-1)
    return both[jnp.where(again.reshape(-1), rows, own)]


# -- losses of rows, summed: of the gradient's parameters, of the targets, of rows and their goals


def as_given(p, old, x, goal):
    return loss_of(p, old, x, goal).sum()


def target_of(old, x, goal):
    after = jnp.concatenate([x["after"], goal], -1)
    value = q_of(old["critic"], after, mu(old["actor"], after)[0])
    return jnp.clip(reward_of(x["achieved"], goal) + GAMMA * value, -1.0 / (1.0 - GAMMA), 0.0)


def first_shared(p, old, x, goal):
    """What the critic's first layer makes of an observation is for both actions."""
    seen = jnp.concatenate([x["obs"], goal], -1)
    first, *rest = p["critic"]
    made = seen @ first["w"][:SEEN] + first["b"]
    q = c.mlp(rest, relu(made + x["action"] @ first["w"][SEEN:]), relu)[..., 0]
    action, before = mu(p["actor"], seen)
    tried = relu(stop_gradient(made) + action @ stop_gradient(first["w"][SEEN:]))
    gained = c.mlp(stop_gradient(rest), tried, relu)[..., 0]
    return (0.5 * (q - stop_gradient(target_of(old, x, goal))) ** 2 - gained + (before**2).mean(-1)).sum()


def in_columns(p, old, x, goal):
    """Features first."""
    x, goal = jax.tree.map(jnp.transpose, (x, goal))
    q = lambda net, x, action: c.columns(net, jnp.concatenate([x, action]), relu)[0]  # noqa: E731
    after, seen = jnp.concatenate([x["after"], goal]), jnp.concatenate([x["obs"], goal])
    value = q(old["critic"], after, jnp.tanh(c.columns(old["actor"], after, relu)))
    target = jnp.clip(reward_of(x["achieved"].T, goal.T) + GAMMA * value, -1.0 / (1.0 - GAMMA), 0.0)
    before = c.columns(p["actor"], seen, relu)
    error = q(p["critic"], seen, x["action"]) - stop_gradient(target)
    return (0.5 * error**2 - q(stop_gradient(p["critic"]), seen, jnp.tanh(before)) + (before**2).mean(0)).sum()


# -- the way back written out


def layers_ahead(net, x):
    """What the network makes, and what is put into each layer."""
    kept = [x]
    for layer in net[:-1]:
        x = relu(c.linear(layer, x))
        kept.append(x)
    return c.linear(net[-1], x), kept


def slopes_back(net, kept, by):
    """Slopes of what each layer makes."""
    slopes = [by]
    for layer, x in zip(net[:0:-1], kept[:0:-1], strict=True):
        by = jnp.where(x > 0, by @ layer["w"].T, 0.0)
        slopes.append(by)
    return slopes[::-1]


def weights_of(kept, slopes):
    return [{"w": x.T @ by, "b": by.sum(0)} for x, by in zip(kept, slopes, strict=True)]


def written_out(p, old, x, goal, both=False):
    """Loss and gradient; ``both``: the critic of both actions is of twice so many rows."""
    seen, target = jnp.concatenate([x["obs"], goal], -1), target_of(old, x, goal)
    before, actor = layers_ahead(p["actor"], seen)
    action = jnp.tanh(before)
    done, tried = jnp.concatenate([seen, x["action"]], -1), jnp.concatenate([seen, action], -1)
    if both:
        (q, gained), critic = both_ahead(p["critic"], done, tried)
        error = q - target[:, None]
        by = jnp.concatenate([error, -jnp.ones_like(error)])
        slopes = slopes_back(p["critic"], critic, by)
        size = len(seen)
        of_action = slopes[0][size:] @ p["critic"][0]["w"][SEEN:].T
        of_critic = weights_of([x[:size] for x in critic], [x[:size] for x in slopes])
    else:
        q, critic = layers_ahead(p["critic"], done)
        gained, other = layers_ahead(p["critic"], tried)
        error = q - target[:, None]
        of_critic = weights_of(critic, slopes_back(p["critic"], critic, error))
        first = slopes_back(p["critic"], other, -jnp.ones_like(error))[0]
        of_action = first @ p["critic"][0]["w"][SEEN:].T
    by = of_action * (1.0 - action * action) + (2.0 / ACTIONS) * before
    of_actor = weights_of(actor, slopes_back(p["actor"], actor, by))
    loss = (0.5 * error[:, 0] ** 2 - gained[:, 0] + (before**2).mean(-1)).sum()
    return loss, {"actor": of_actor, "critic": of_critic}


def both_ahead(net, done, tried):
    q, kept = layers_ahead(net, jnp.concatenate([done, tried]))
    return jnp.split(q, 2), kept


def columns_ahead(net, x):
    kept = [x]
    for layer in net[:-1]:
        x = relu(layer["w"].T @ x + layer["b"][:, None])
        kept.append(x)
    return net[-1]["w"].T @ x + net[-1]["b"][:, None], kept


def columns_back(net, kept, by):
    """Slopes of what each layer makes."""
    slopes = [by]
    for layer, x in zip(net[:0:-1], kept[:0:-1], strict=True):
        by = jnp.where(x > 0, layer["w"] @ by, 0.0)
        slopes.append(by)
    return slopes[::-1]


def columns_written_out(p, old, x, goal):
    """Features first."""
    turned, sums = jax.tree.map(jnp.transpose, (x, goal)), lambda x, by: {"w": x @ by.T, "b": by.sum(1)}
    x, goal = turned
    after, seen = jnp.concatenate([x["after"], goal]), jnp.concatenate([x["obs"], goal])
    value = jnp.concatenate([after, jnp.tanh(c.columns(old["actor"], after, relu))])
    value = c.columns(old["critic"], value, relu)[0]
    target = jnp.clip(reward_of(x["achieved"].T, goal.T) + GAMMA * value, -1.0 / (1.0 - GAMMA), 0.0)
    before, actor = columns_ahead(p["actor"], seen)
    action = jnp.tanh(before)
    q, critic = columns_ahead(p["critic"], jnp.concatenate([seen, x["action"]]))
    gained, other = columns_ahead(p["critic"], jnp.concatenate([seen, action]))
    error = q - target
    by = p["critic"][0]["w"][SEEN:] @ columns_back(p["critic"], other, -jnp.ones_like(error))[0]
    by = by * (1.0 - action * action) + (2.0 / ACTIONS) * before
    grads = {
        "actor": list(map(sums, actor, columns_back(p["actor"], actor, by))),
        "critic": list(map(sums, critic, columns_back(p["critic"], critic, error))),
    }
    return (0.5 * error[0] ** 2 - gained[0] + (before**2).mean(0)).sum(), grads


def differentiated(loss):
    return lambda p, old, x, goal: jax.value_and_grad(loss)(p, old, x, goal)


def by_hand(length, batch, learn=None, goals=looked_up, chunk=None):
    """``learn`` gives loss and gradient, summed over rows; ``chunk``: so many rows after the others."""
    learn, size = differentiated(as_given) if learn is None else learn, length * batch

    def run(p, old, data, key):
        goal = goals(data, *drawn(key, length, batch))
        rows = c.rows_of(data)
        if chunk is None:
            total = learn(p, old, rows, goal)
        else:
            add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, old, *x)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            total = jax.lax.scan(add, none, c.in_chunks((rows, goal), chunk))[0]
        return jax.tree.map(lambda x: x / size, total)

    return run


def targets_first(length, batch, goals=looked_up):
    """Nothing of the targets is in what is differentiated."""

    def run(p, old, data, key):
        goal, rows = goals(data, *drawn(key, length, batch)), c.rows_of(data)
        seen, target = jnp.concatenate([rows["obs"], goal], -1), target_of(old, rows, goal)

        def loss(p):
            action, before = mu(p["actor"], seen)
            error = q_of(p["critic"], seen, rows["action"]) - target
            gained = q_of(stop_gradient(p["critic"]), seen, action)
            return (0.5 * error**2 - gained + (before**2).mean(-1)).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, chunk=80):
    make = functools.partial(by_hand, length, batch)
    given, shared, column = (differentiated(loss) for loss in (as_given, first_shared, in_columns))
    double, table, more = functools.partial(written_out, both=True), {"goals": one_table}, 2 * chunk
    forms = {
        "rlfx": c.learner_by_rlfx(hindsight.program, length, batch), "plain": hindsight.plain(length, batch),
        "rows": make(), "rows, one table": make(**table), "targets first": targets_first(length, batch),
        "targets first, one table": targets_first(length, batch, one_table), "shared": make(shared),
        "shared, one table": make(shared, **table),
        "features first": make(column), "features first, one table": make(column, **table),
        "written out": make(written_out), "written out, one table": make(written_out, **table),
        "written out, both": make(double), "written out, both, one table": make(double, **table),
        "features first, written out": make(columns_written_out),
        "features first, written out, one table": make(columns_written_out, **table),
        f"features first, written out, {more} rows": make(columns_written_out, chunk=more),
        f"features first, written out, {2 * more} rows": make(columns_written_out, chunk=2 * more),
        f"{chunk} rows": make(given, chunk=chunk), f"{more} rows": make(given, chunk=more),
        f"{chunk} rows, one table": make(given, chunk=chunk, **table), f"{2 * more} rows": make(given, chunk=2 * more),
        f"shared, {chunk} rows": make(shared, chunk=chunk), f"shared, {more} rows": make(shared, chunk=more),
        f"shared, {2 * more} rows": make(shared, chunk=2 * more), f"features first, {chunk} rows": make(column, chunk=chunk),
        f"features first, {more} rows": make(column, chunk=more), f"written out, {chunk} rows": make(written_out, chunk=chunk),
        f"written out, {more} rows": make(written_out, chunk=more),
        f"written out, {2 * more} rows": make(written_out, chunk=2 * more),
        f"written out, both, {chunk} rows": make(double, chunk=chunk),
        f"written out, both, {more} rows": make(double, chunk=more),
        f"written out, {more} rows, one table": make(written_out, chunk=more, **table),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(1), 8), (length, batch)
    achieved = 0.2 * jnp.cumsum(jax.random.normal(k[0], (*size, GOAL)), 0)
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "after": jax.random.normal(k[2], (*size, OBS)), "achieved": achieved,
        "goal": jax.random.normal(k[3], (*size, GOAL)), "action": jnp.tanh(jax.random.normal(k[4], (*size, ACTIONS))),
    }  # fmt: skip
    return drawing(forms, (params_of(k[5], hidden), params_of(k[6], hidden), data), tolerance=5e-5)
