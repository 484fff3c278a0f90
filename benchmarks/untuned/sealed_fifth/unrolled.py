"""MuZero's learner (Schrittwieser et al. 2020) on stored games: from every position a model unrolls five actions, and told at
each of its states are the reward, the value and what the search had visited."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, BINS, UNROLLED, STEPS, GAMMA = 32, 6, 41, 5, 5, 0.997
relu = jax.nn.relu
HEADS = {"policy": ACTIONS, "value": BINS, "reward": BINS}


def params_of(key, hidden):
    k = jax.random.split(key, 5)
    made = {
        "encoder": c.mlp_params(k[0], (OBS, hidden, hidden)),
        "dynamics": c.mlp_params(k[1], (hidden + ACTIONS, hidden, hidden)),
    }
    return made | {
        n: c.mlp_params(k, (hidden, hidden, out)) for k, (n, out) in zip(k[2:], HEADS.items(), strict=True)
    }


def scaled(s):
    """Between 0 and 1."""
    low, high = s.min(-1, keepdims=True), s.max(-1, keepdims=True)
    return (s - low) / (high - low + 1e-5)


def halved(x):
    """With half the gradient."""
    return 0.5 * x + 0.5 * stop_gradient(x)


def two_hot(x):
    """Shares of the two bins around x, which is made small, ``[..., BINS]``."""
    small = jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + 0.001 * x
    place = jnp.clip(5.0 * small + BINS // 2, 0.0, BINS - 1.0)
    return jnp.maximum(1.0 - jnp.abs(place[..., None] - np.arange(BINS, dtype=np.float32)), 0.0)


def entropy(shares, logits):
    return -(shares * jax.nn.log_softmax(logits)).sum(-1)


def encoded(p, obs):
    return scaled(c.mlp(p["encoder"], obs, relu))


def moved(p, s, action):
    """The state after an action, whose gradient is halved."""
    both = jnp.concatenate([halved(s), jax.nn.one_hot(action, ACTIONS)], -1)
    return scaled(s + c.mlp(p["dynamics"], both, relu))


def head(p, name, s):
    return c.mlp(p[name], s, relu)


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    root = rlfx.series(x["root"], end=0.0)
    told = {
        "value": rlfx.n_step_return(step, root[t + 1], gamma=GAMMA, n=STEPS), "reward": x["reward"],
        "visits": x["visits"], "action": x["action"], "going": 1.0 - x["done"],
    }  # fmt: skip
    told = rlfx.series(told, end=jax.tree.map(jnp.zeros_like, told))

    s, share, loss = encoded(p, x["obs"]), 1.0, 0.0
    for k in range(UNROLLED + 1):
        at = told[t + k]
        judged = entropy(at["visits"], head(p, "policy", s)) + 0.25 * entropy(two_hot(at["value"]), head(p, "value", s))
        loss = loss + share * judged / (1 if k == 0 else UNROLLED)
        if k < UNROLLED:
            s = moved(p, s, at["action"])
            loss = loss + share * entropy(two_hot(at["reward"]), head(p, "reward", s)) / UNROLLED
            share = share * at["going"]
    return loss, carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand: what is told of every position, ``[UNROLLED + 1, T, B, ...]``


def targets(data):
    going, ends = GAMMA * (1.0 - data["done"].astype(jnp.float32)), jnp.zeros(data["done"].shape[1])
    aim = data["reward"] + going * c.shifted(data["root"], ends)
    for _ in range(STEPS - 1):
        aim = data["reward"] + going * c.shifted(aim, ends)
    told = {"value": aim, "going": 1.0 - data["done"]} | {n: data[n] for n in ("reward", "visits", "action")}

    def later(x):
        longer = jnp.concatenate([x, jnp.zeros_like(x[:UNROLLED])])
        return jnp.stack([longer[k : k + len(x)] for k in range(UNROLLED + 1)])

    told = jax.tree.map(later, told)
    going = told.pop("going")[:-1]
    share = jnp.concatenate([jnp.ones_like(going[:1]), jnp.cumprod(going, 0)])
    weight = share / jnp.array([1.0] + [UNROLLED] * UNROLLED)[:, None, None]
    return told | {"judged": weight, "moved": share[:-1] / UNROLLED}


# -- by hand: states of positions ``s[N, hidden]``


def step_by_step(p, s, action):
    found = [s]
    for k in range(UNROLLED):
        found.append(moved(p, found[-1], action[k]))
    return jnp.stack(found)


def scanned(p, s, action, unroll=1, again=False):
    def body(s, action):
        s = moved(p, s, action)
        return s, s

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jnp.concatenate([s[None], jax.lax.scan(body, s, action[:UNROLLED], unroll=unroll)[1]])


def split(p, s, action):
    """The action's row of weights is added, instead of a product with it."""
    first, second = p["dynamics"]
    pushed = first["w"][-ACTIONS:][action[:UNROLLED]] + first["b"]
    found = [s]
    for k in range(UNROLLED):
        s = scaled(s + c.linear(second, relu(halved(s) @ first["w"][:-ACTIONS] + pushed[k])))
        found.append(s)
    return jnp.stack(found)


# -- by hand: losses of states ``[UNROLLED + 1, N, hidden]``, summed


def shares_of(told, name):
    """The bins' shares of what is told, which may have been made before."""
    x = told[name]
    return x if x.ndim > told["judged"].ndim else two_hot(x)


def apart(p, s, told):
    judged = entropy(told["visits"], head(p, "policy", s)) + 0.25 * entropy(shares_of(told, "value"), head(p, "value", s))
    rewards = entropy(shares_of(told, "reward")[:-1], head(p, "reward", s[1:]))
    return (told["judged"] * judged).sum() + (told["moved"] * rewards).sum()


def by_state(p, s, told):
    """One state of every position at a time."""
    loss = 0.0
    for k in range(UNROLLED + 1):
        at = jax.tree.map(lambda x: x[k], {n: told[n] for n in ("visits", "value", "judged")})
        judged = entropy(at["visits"], head(p, "policy", s[k])) + 0.25 * entropy(two_hot(at["value"]), head(p, "value", s[k]))
        loss += (at["judged"] * judged).sum()
        if k:
            rewards = entropy(two_hot(told["reward"][k - 1]), head(p, "reward", s[k]))
            loss += (told["moved"][k - 1] * rewards).sum()
    return loss


def cross(shares, logits):
    """`entropy` of shares whose sum is 1 or 0: the logits' own logarithm is subtracted from one sum."""
    return shares.sum(-1) * jax.nn.logsumexp(logits, -1) - (shares * logits).sum(-1)


def joined(p, s, told):
    """The first layers of the heads are one product, and no log-probabilities are made."""
    s, told = s.reshape(-1, s.shape[-1]), dict(told)
    early = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x]).reshape(-1, *x.shape[2:])  # noqa: E731
    told |= {"reward": early(told["reward"][:-1]), "moved": early(told["moved"])}
    told |= {n: told[n].reshape(-1, *told[n].shape[2:]) for n in ("visits", "value", "judged")}
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[n][0] for n in HEADS))
    wide = jnp.split(relu(c.linear(first, s)), 3, -1)
    policy, value, reward = (c.linear(p[n][1], x) for n, x in zip(HEADS, wide, strict=True))
    judged = cross(told["visits"], policy) + 0.25 * cross(shares_of(told, "value"), value)
    return (told["judged"] * judged + told["moved"] * cross(shares_of(told, "reward"), reward)).sum()


def crossed(p, s, told):
    """As `apart`, but no log-probabilities are made."""
    judged = cross(told["visits"], head(p, "policy", s)) + 0.25 * cross(shares_of(told, "value"), head(p, "value", s))
    rewards = cross(shares_of(told, "reward")[:-1], head(p, "reward", s[1:]))
    return (told["judged"] * judged).sum() + (told["moved"] * rewards).sum()


def features_first(p, obs, told, together=False):
    """Everything with positions innermost; ``together``: the heads' first layers are one product."""
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731
    net = lambda layers, x: act(layers[1], relu(act(layers[0], x)))  # noqa: E731
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[n][0] for n in HEADS))

    def scale(s):
        low, high = s.min(0), s.max(0)
        return (s - low) / (high - low + 1e-5)

    def crossed(shares, logits):
        shares = shares.T
        return shares.sum(0) * jax.nn.logsumexp(logits, 0) - (shares * logits).sum(0)

    def logits(s):
        if not together:
            return [net(p[n], s) for n in HEADS]
        wide = jnp.split(relu(act(both, s)), len(HEADS))
        return [act(p[n][1], x) for n, x in zip(HEADS, wide, strict=True)]

    s, loss = scale(net(p["encoder"], obs.T)), 0.0
    first, second = p["dynamics"]
    for k in range(UNROLLED + 1):
        policy, value, reward = logits(s)
        judged = crossed(told["visits"][k], policy) + 0.25 * crossed(two_hot(told["value"][k]), value)
        loss += (told["judged"][k] * judged).sum()
        if k:
            loss += (told["moved"][k - 1] * crossed(two_hot(told["reward"][k - 1]), reward)).sum()
        if k < UNROLLED:
            hot = jax.nn.one_hot(told["action"][k], ACTIONS, axis=0)
            wide = first["w"][:-ACTIONS].T @ halved(s) + first["w"][-ACTIONS:].T @ hot + first["b"][:, None]
            s = scale(s + act(second, relu(wide)))
    return loss


joined_first = functools.partial(features_first, together=True)


def by_hand(length, batch, states=step_by_step, heads=apart, flat=True, chunk=None, whole=None):
    """``chunk``: timesteps of a block; ``whole``: the loss of observations, instead of states and heads."""

    def run(p, data):
        told = targets(data)

        def loss(p, part):
            obs, told = part
            told = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1) if flat else x, told)
            found = whole(p, obs, told) if whole else heads(p, states(p, encoded(p, obs), told["action"]), told)
            return found / (length * batch)

        if not flat:
            return jax.value_and_grad(loss)(p, (data["obs"], told))
        # Positions are rows, and come first.
        rows = data["obs"], {n: jnp.moveaxis(x, 0, 2) for n, x in told.items()}
        rows = c.rows_of(rows)
        if chunk is None:
            return jax.value_and_grad(loss)(p, rows)
        return c.summed_gradient(loss, p, c.in_chunks(rows, chunk * batch))

    return run


def one_by_one(length, batch):
    """A position's loss, under `jax.vmap`."""

    def run(p, data):
        def loss(p):
            of = lambda obs, told: apart(p, step_by_step(p, encoded(p, obs), told["action"]), told)  # noqa: E731
            return jax.vmap(jax.vmap(of, (0, 1)), (0, 1))(data["obs"], targets(data)).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, chunk=4):
    make = lambda states=step_by_step, heads=apart, **how: by_hand(length, batch, states, heads, **how)  # noqa: E731
    some, again = {"chunk": chunk}, functools.partial(scanned, again=True)
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(scanned, flat=False), "position by position": one_by_one(length, batch),
        "rows": make(scanned), "rows, step by step": make(), "again": make(again), "heads state by state": make(heads=by_state),
        "heads joined": make(heads=joined), "no log-probabilities": make(heads=crossed), "split": make(split, crossed),
        "split, heads joined": make(split, joined),
        f"heads joined, blocks of {chunk}": make(heads=joined, **some),
        f"split, no log-probabilities, blocks of {chunk}": make(split, crossed, **some),
        f"split, heads joined, blocks of {chunk}": make(split, joined, **some),
        "split, heads joined, blocks of 1": make(split, joined, chunk=1),
        "features first": make(whole=features_first), f"features first, blocks of {chunk}": make(whole=features_first, **some),
        "features first, heads joined": make(whole=joined_first),
        f"features first, heads joined, blocks of {chunk}": make(whole=joined_first, **some),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": 2.0 * jax.random.normal(k[2], size), "root": 3.0 * jax.random.normal(k[3], size),
        "visits": jax.nn.softmax(2.0 * jax.random.normal(k[4], (*size, ACTIONS))),
        "done": jax.random.uniform(k[5], size) < 0.03,
    }  # fmt: skip
    return Workload(forms, (params_of(k[6], hidden), data), tolerance=1e-5)
