"""Learned policy gradients by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fourteenth import rules
from benchmarks.untuned.sealed_fourteenth.rules import (
    ACTIONS,
    OBS,
    PREDICT,
    RATE,
    advantages,
    after_loss,
    agent_of,
    gated,
    outputs,
    penalty_of,
    rule_of,
    told_of,
    update_loss,
)  # fmt: skip

# -- agents ``[agents, ...]`` of observations ``[agents, T, B, OBS]``: logits of actions and of classes


def as_given(agents, obs):
    return jax.vmap(outputs)(agents, obs)


def by_rows(agents, obs):
    made = jax.vmap(outputs)(agents, obs.reshape(len(obs), -1, OBS))
    return jax.tree.map(lambda x: x.reshape(*obs.shape[:-1], -1), made)


def heads_joined(p, obs):
    h = jnp.tanh(c.mlp(p["torso"], obs))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["y"])
    return jnp.split(c.linear(both, h), [ACTIONS], -1)


def joined(agents, obs):
    """Both heads are one product."""
    logits, y = jax.vmap(heads_joined)(agents, obs.reshape(len(obs), -1, OBS))
    return logits.reshape(*obs.shape[:-1], -1), y.reshape(*obs.shape[:-1], -1)


def in_columns(agents, obs):
    """Features first."""

    def of(p, x):
        h = jnp.tanh(c.columns(p["torso"], x))
        return c.columns([p["pi"]], h).T, c.columns([p["y"]], h).T

    made = jax.vmap(of)(agents, obs.reshape(len(obs), -1, OBS).mT)
    return jax.tree.map(lambda x: x.reshape(*obs.shape[:-1], -1), made)


def each(agents, obs):
    """One agent after the other."""
    made = jax.lax.map(lambda x: outputs(x[0], x[1].reshape(-1, OBS)), (agents, obs))
    return jax.tree.map(lambda x: x.reshape(*obs.shape[:-1], -1), made)


# -- the LSTM, backwards over ``told[T, N, TOLD]``: hidden states ``[T, N, hidden]``


def in_loop(rule, told, going, **how):
    """What it is told is multiplied in the loop."""
    return rows_first(lambda told, h: c.linear(rule["x"], told) + h @ rule["h"], rule, told, going, **how)


def hoisted(rule, told, going, **how):
    return rows_first(lambda made, h: made + h @ rule["h"], rule, c.linear(rule["x"], told), going, **how)


def side_by_side(rule, told, going, **how):
    """What it is told and what it was are one product."""
    w = jnp.concatenate([rule["x"]["w"], rule["h"]])
    product = lambda told, h: jnp.concatenate([told, h], -1) @ w + rule["x"]["b"]  # noqa: E731
    return rows_first(product, rule, told, going, **how)


def rows_first(product, rule, told, going, unroll=1, again=False):
    def step(state, x):
        told, going = x
        h, cell = (going[:, None] * m for m in state)
        state = gated(product(told, h), cell)
        return state, state[0]

    return looped(step, rule, (told, going), unroll, again)


def features_first(rule, told, going, unroll=1, again=False):
    """States are ``[hidden, N]``."""
    made = jnp.einsum("tnk,kh->thn", told, rule["x"]["w"]) + rule["x"]["b"][:, None]

    def step(state, x):
        (h, cell), (made, going) = state, x
        i, f, o, u = jnp.split(made + rule["h"].T @ (going * h), 4)
        cell = jax.nn.sigmoid(f) * (going * cell) + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (h, cell), h

    return looped(step, rule, (made, going), unroll, again, first=True).mT


def looped(step, rule, xs, unroll, again, first=False):
    rows, hidden = xs[1].shape[1], len(rule["h"])
    nothing = jnp.zeros((hidden, rows) if first else (rows, hidden))
    step = jax.checkpoint(step, prevent_cse=False) if again else step
    return jax.lax.scan(step, (nothing, nothing), xs, reverse=True, unroll=unroll)[1]


def forwards(w, made, going, unroll, halves=False):
    """All hidden states, and what the way back needs."""
    nothing, squash = jnp.zeros(made.shape[1:-1] + (len(w),)), by_halves if halves else jax.nn.sigmoid

    def step(state, x):
        made, going = x
        h, before = (going[:, None] * m for m in state)
        g = made + h @ w
        ifo, u = squash(g[:, : 3 * len(w)]), jnp.tanh(g[:, 3 * len(w) :])
        i, f, o = jnp.split(ifo, 3, -1)
        cell = f * before + i * u
        top = jnp.tanh(cell)
        return (o * top, cell), (o * top, (h, before, ifo, u, top))

    return jax.lax.scan(step, (nothing, nothing), (made, going), reverse=True, unroll=unroll)[1]


def by_halves(x):
    """A sigmoid is half of a tangent."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def own_loop(w, made, going, unroll, halves):
    return forwards(w, made, going, unroll, halves)[0]


def own_forwards(w, made, going, unroll, halves):
    hs, kept = forwards(w, made, going, unroll, halves)
    return hs, (w, going, kept)


def own_backwards(unroll, halves, residuals, by):
    """Weights get one product of all timesteps behind the loop."""
    w, going, kept = residuals

    def step(carry, x):
        dh, dcell = carry
        by, going, (_, before, ifo, u, top) = x
        i, f, o = jnp.split(ifo, 3, -1)
        dh = dh + by
        dcell = dcell + dh * o * (1.0 - top * top)
        gates = jnp.concatenate([dcell * u, dcell * before, dh * top], -1) * ifo * (1.0 - ifo)
        d = jnp.concatenate([gates, dcell * i * (1.0 - u * u)], -1)
        return (going[:, None] * (d @ w.T), going[:, None] * (dcell * f)), d

    nothing = jnp.zeros(by.shape[1:])
    ds = jax.lax.scan(step, (nothing, nothing), (by, going, kept), unroll=unroll)[1]
    h = kept[0]
    return h.reshape(-1, h.shape[-1]).T @ ds.reshape(-1, ds.shape[-1]), ds, jnp.zeros_like(going)


own_loop.defvjp(own_forwards, own_backwards)


def own(rule, told, going, unroll=1, halves=False):
    rows = c.linear(rule["x"], told.reshape(-1, told.shape[-1]))
    return own_loop(rule["h"], rows.reshape(*told.shape[:-1], -1), going, unroll, halves)


# -- targets of all agents, ``[agents, T, B, ...]``


def targets_of(rule, out, last_y, steps, recur, folded=True):
    """``folded``: the LSTM has rows of all agents."""
    told, going = jax.vmap(told_of, (None, 0, 0, 0))(rule, out, last_y, steps)
    if folded:
        fold = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])  # noqa: E731
        h = recur(rule, fold(told), fold(going))
        likelier, y = (c.linear(rule[name], h.reshape(-1, h.shape[-1])) for name in ("pi", "y"))
        apart = lambda x: jnp.moveaxis(x.reshape(told.shape[1], len(told), told.shape[2], -1), 1, 0)  # noqa: E731
        return apart(likelier)[..., 0], apart(y)
    h = jax.vmap(recur, (None, 0, 0))(rule, told, going)
    return c.linear(rule["pi"], h)[..., 0], c.linear(rule["y"], h)


# -- the whole: loss and gradient


def stepped(agents, grads):
    return jax.tree.map(lambda w, g: w - RATE * g, agents, grads)


def all_agents(loss, *parts):
    """Summed: each one's gradient is its own."""
    return jax.vmap(loss)(*parts).sum()


def slopes(out, targets, steps):
    """Of an agent's loss by its outputs."""
    (logits, y), (likelier, y_target) = out, targets
    pi, log_y = jax.nn.softmax(logits), jax.nn.log_softmax(y)
    away, chance = log_y - jax.nn.log_softmax(y_target), jnp.exp(log_y)
    by_y = PREDICT * chance * (away - (chance * away).sum(-1, keepdims=True))
    by_logits = likelier[..., None] * (pi - jax.nn.one_hot(steps["action"], ACTIONS))
    return by_logits / likelier[0].size, by_y / likelier[0].size


def through_step(rule, agents, first, then, evaluate, recur, folded=True, written=False):
    """The gradient goes through the agents' gradient; ``written``: whose beginning is by hand."""
    (steps, last), gained = first, jax.vmap(advantages)(then)
    out, last_y = evaluate(agents, steps["obs"]), evaluate(agents, last["obs"][:, None])[1][:, 0]

    def loss(rule):
        targets = targets_of(rule, out, last_y, steps, recur, folded)
        if written:
            grads = jax.vjp(lambda q: evaluate(q, steps["obs"]), agents)[1](slopes(out, targets, steps))[0]
        else:
            grads = jax.grad(lambda q: all_agents(update_loss, evaluate(q, steps["obs"]), targets, steps))(agents)
        after = evaluate(stepped(agents, grads), then[0]["obs"])
        found = jax.vmap(after_loss)(after, gained, then[0]) + jax.vmap(penalty_of)(targets)
        return found.mean()

    return jax.value_and_grad(loss)(rule)


def along_step(rule, agents, first, then, evaluate, recur, folded=True, once=False):
    """An agent's gradient is linear in what its loss is linear in: how targets should change is found by how outputs change along
    the gradient of what comes after, forwards. ``once``: agents' outputs, and how they change, are of one evaluation."""
    (steps, last), gained, count = first, jax.vmap(advantages)(then), len(first[0]["reward"])
    seen = lambda q: evaluate(q, steps["obs"])  # noqa: E731
    out, change = jax.linearize(seen, agents) if once else (seen(agents), None)
    last_y = evaluate(agents, last["obs"][:, None])[1][:, 0]
    targets, pull = jax.vjp(lambda rule: targets_of(rule, out, last_y, steps, recur, folded), rule)
    back = jax.linear_transpose(change, agents) if once else jax.vjp(seen, agents)[1]
    moved = stepped(agents, back(slopes(out, targets, steps))[0])
    after = lambda q: all_agents(after_loss, evaluate(q, then[0]["obs"]), gained, then[0])  # noqa: E731
    found, grads = jax.value_and_grad(after)(moved)
    dlogits, dy = change(grads) if once else jax.jvp(seen, (agents,), (grads,))[1]
    dlog_p = c.pick(dlogits - (jax.nn.softmax(out[0]) * dlogits).sum(-1, keepdims=True), steps["action"])
    size = steps["reward"][0].size
    chance = jax.nn.softmax(out[1])
    dchance = chance * (dy - (chance * dy).sum(-1, keepdims=True))
    # the change is -dlog_p * likelier - PREDICT * (dchance * log_softmax(y_target)).sum(), and what has no target in it
    penalty, by_penalty = jax.value_and_grad(lambda targets: all_agents(penalty_of, targets))(targets)
    by_likelier = RATE * dlog_p / size + by_penalty[0]
    by_target = RATE * PREDICT * dchance / size + by_penalty[1]  # changes of chances add up to nothing
    scaled = jax.tree.map(lambda x: x / count, (by_likelier, by_target))
    return (found + penalty) / count, pull(scaled)[0]


def agent_by_agent(rule, agents, first, then, learn, **how):
    """One after the other."""

    def add(total, x):
        return jax.tree.map(jnp.add, total, learn(rule, *jax.tree.map(lambda x: x[None], x), **how)), None

    none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, rule)
    total = jax.lax.scan(add, none, (agents, first, then))[0]
    return jax.tree.map(lambda x: x / len(first[0]["reward"]), total)


def by_hand(learn=along_step, evaluate=by_rows, recur=hoisted, singly=False, **how):
    how |= {"evaluate": evaluate, "recur": recur}
    return functools.partial(agent_by_agent, learn=learn, **how) if singly else functools.partial(learn, **how)


def rollouts(key, agents, length, batch):
    k, size = jax.random.split(key, 7), (agents, length, batch)
    steps = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.05,
        "value": jax.random.normal(k[4], size),
    }  # fmt: skip
    return steps, {"obs": jax.random.normal(k[5], (agents, batch, OBS)), "value": jax.random.normal(k[6], (agents, batch))}


def workload(agents, length, batch, hidden):
    make, cut, nested = by_hand, functools.partial, {"learn": through_step}
    owned, halves, owned_2 = {"recur": own}, {"recur": cut(own, halves=True)}, {"recur": cut(own, unroll=2, halves=True)}
    column, first, single, alone = {"evaluate": in_columns}, {"recur": features_first}, {"evaluate": each}, {"singly": True}
    heads, once, written = {"evaluate": joined}, {"once": True}, {"written": True}
    forms = {
        "rlfx": rules.by_rlfx(length, batch), "plain": rules.plain(length, batch),
        "nested, LSTMs apart": make(**nested, evaluate=as_given, folded=False, recur=in_loop),
        "nested, hoisted, LSTMs apart": make(**nested, folded=False), "nested": make(**nested, recur=in_loop),
        "nested, hoisted": make(**nested), "nested, hoisted, again": make(**nested, recur=cut(hoisted, again=True)),
        "nested, own way back": make(**nested, **owned), "nested, written": make(**nested, **written),
        "nested, written, own way back": make(**nested, **written, **owned),
        "nested, written, features first": make(**nested, **written, **first, **column),
        "nested, own way back, agents one by one": make(**nested, **owned, **alone),
        "along, LSTMs apart": make(folded=False), "along": make(recur=in_loop), "along, hoisted": make(),
        "along, side by side": make(recur=side_by_side), "along, features first": make(**first, **column),
        "along, own way back": make(**owned), "along, own way back, halves": make(**halves),
        "along, own way back, halves, unrolled by 2": make(**owned_2),
        "along, own way back, heads joined": make(**owned, **heads),
        "along, own way back, agents in columns": make(**owned, **column),
        "along, own way back, agents each": make(**owned, **single),
        "along, own way back, agents one by one": make(**owned, **alone),
        "along, own way back, halves, agents one by one": make(**halves, **alone),
        "once, hoisted": make(**once), "once, own way back": make(**once, **owned), "once, halves": make(**once, **halves),
        "once, halves, heads joined": make(**once, **halves, **heads),
        "once, halves, in columns": make(**once, **halves, **column),
        "once, halves, unrolled by 2": make(**once, **owned_2),
        "once, halves, agents one by one": make(**once, **halves, **alone),
        "once, halves, heads joined, agents one by one": make(**once, **halves, **heads, **alone),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    population = jax.vmap(lambda k: agent_of(k, hidden))(jax.random.split(k[0], agents))
    data = rollouts(k[1], agents, length, batch), rollouts(k[2], agents, length, batch)
    return Workload(forms, (rule_of(k[3], hidden), population, *data), tolerance=1e-4)
