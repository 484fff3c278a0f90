"""QMIX's learner: agents that share a GRU, a mixing network of the whole state, and TD(lambda) of the target's mixture."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import Workload

OBS, STATE, ACTIONS, GAMMA, LAMBDA = 10, 24, 5, 0.99, 0.8


def params_of(key, agents, hidden, mixed):
    k = jax.random.split(key, 8)
    sizes = {
        "in": (OBS, hidden), "x": (hidden, 3 * hidden), "h": (hidden, 3 * hidden), "q": (hidden, ACTIONS),
        "w1": (STATE, agents * mixed), "b1": (STATE, mixed), "w2": (STATE, mixed),
    }  # fmt: skip
    layers = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=False)}
    return layers | {"b2": c.mlp_params(k[7], (STATE, mixed, 1))}


def cell(p, h, obs):
    """Of agents: ``h[..., H], obs[..., OBS]``."""
    return gates(c.linear(p["x"], jax.nn.relu(c.linear(p["in"], obs))), c.linear(p["h"], h), h)


def mixture(p, qs, state):
    """The agents' values ``[..., agents]`` as one."""
    w1 = jnp.abs(c.linear(p["w1"], state)).reshape(*qs.shape, -1)
    hidden = jax.nn.elu((qs[..., None] * w1).sum(-2) + c.linear(p["b1"], state))
    return (hidden * jnp.abs(c.linear(p["w2"], state))).sum(-1) + c.mlp(p["b2"], state, jax.nn.relu)[..., 0]


def mixture_joined(p, qs, state):
    """The products with the state as one."""
    first = {"w1": p["w1"], "b1": p["b1"], "w2": p["w2"], "b2": p["b2"][0]}
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *first.values())
    agents, size = qs.shape[-1], p["b1"]["b"].shape[0]
    w1, b1, w2, b2 = jnp.split(c.linear(both, state), (agents * size, (agents + 1) * size, (agents + 2) * size), -1)
    hidden = jax.nn.elu((qs[..., None] * jnp.abs(w1).reshape(*qs.shape, -1)).sum(-2) + b1)
    return (hidden * jnp.abs(w2)).sum(-1) + c.linear(p["b2"][1], jax.nn.relu(b2))[..., 0]


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    h, aside = carry
    h, aside = cell(p, h, x["obs"]), cell(target, aside, x["obs"])
    q, of_target = c.linear(p["q"], h), c.linear(target["q"], aside)
    best = mixture(target, c.pick(of_target, jnp.argmax(q, -1)), x["state"])
    best = rlfx.series(stop_gradient(best), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = stop_gradient(rlfx.lambda_return(step, best[t + 1], gamma=GAMMA, lam=LAMBDA))
    total = mixture(p, c.pick(q, x["action"]), x["state"])
    restart = lambda h: jnp.where(x["done"], 0.0, h)  # noqa: E731
    return 0.5 * (total - aim) ** 2, (restart(h), restart(aside))


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, target, data, h: jax.value_and_grad(lambda p: loss_fn(((p, target), data), h)[0])(p)


def stepwise(p, h, data):
    """The agents' states ``[T, B, agents, H]``."""

    def body(h, x):
        obs, done = x
        h = cell(p, h, obs)
        return jnp.where(done[:, None, None], 0.0, h), h

    return jax.lax.scan(body, h, (data["obs"], data["done"]))


def hoisted(p, h, data, unroll=1):
    """Products with observations before the loop, agents as rows."""
    length, batch, agents = data["obs"].shape[:3]
    rows = lambda x: x.reshape(*x.shape[:-3], batch * agents, x.shape[-1])  # noqa: E731
    x = c.linear(p["x"], jax.nn.relu(c.linear(p["in"], rows(data["obs"]))))
    goes_on = jnp.repeat(1.0 - data["done"].astype(jnp.float32), agents, 1)[..., None]

    def body(h, x):
        x, goes_on = x
        h = gates(x, c.linear(p["h"], h), h)
        return h * goes_on, h

    h, hs = jax.lax.scan(body, rows(h), (x, goes_on), unroll=unroll)
    return h.reshape(batch, agents, -1), hs.reshape(length, batch, agents, -1)


def checkpointed(recurrence, chunk):
    def run(p, h, data):
        part = jax.checkpoint(lambda h, x: recurrence(p, h, x), prevent_cse=False)
        h, hs = jax.lax.scan(part, h, c.in_chunks({k: data[k] for k in ("obs", "done")}, chunk))
        return h, hs.reshape(-1, *hs.shape[2:])

    return run


def by_hand(length, batch, recurrence=stepwise, mix=mixture, together=False):
    """``together``: both networks' recurrences in one call of `jax.vmap` over their weights."""

    def run(p, target, data, h):
        aside = None if together else recurrence(target, h[1], data)[1]
        going = GAMMA * (1.0 - data["done"].astype(jnp.float32))

        def loss(p):
            if together:
                both = jax.tree.map(lambda *x: jnp.stack(x), p, stop_gradient(target))
                hs, beside = jax.vmap(recurrence, (0, 0, None))(both, jnp.stack(h), data)[1]
                beside = stop_gradient(beside)
            else:
                hs, beside = recurrence(p, h[0], data)[1], aside
            q = c.linear(p["q"], hs)
            greedy = c.pick(c.linear(target["q"], beside), jnp.argmax(q, -1))
            following = c.shifted(stop_gradient(mix(target, greedy, data["state"])), jnp.zeros(batch))
            # G = r + going ((1 - lam) v' + lam G')
            aim = c.discounted(data["reward"] + going * (1 - LAMBDA) * following, going * LAMBDA)
            return (0.5 * (mix(p, c.pick(q, data["action"]), data["state"]) - stop_gradient(aim)) ** 2).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, agents, hidden, mixed, chunk=16):
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, agents, OBS)), "state": jax.random.normal(k[1], (*size, STATE)),
        "action": jax.random.randint(k[2], (*size, agents), 0, ACTIONS), "reward": jax.random.normal(k[3], size),
        "done": (jax.random.uniform(k[4], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    h = tuple(0.1 * jax.random.normal(x, (batch, agents, hidden)) for x in jax.random.split(k[5]))
    make = lambda *how, **more: by_hand(length, batch, *how, **more)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "hoisted": make(hoisted),
        "hoisted, joined": make(hoisted, mixture_joined),
        "hoisted, joined, unrolled by 4": make(lambda p, h, data: hoisted(p, h, data, 4), mixture_joined),
        "both networks together": make(hoisted, mixture_joined, together=True),
        f"again by {chunk}": make(checkpointed(stepwise, chunk)),
        f"hoisted, joined, again by {chunk}": make(checkpointed(hoisted, chunk), mixture_joined),
    }  # fmt: skip
    return Workload(forms, (params_of(k[6], agents, hidden, mixed), params_of(k[7], agents, hidden, mixed), data, h))
