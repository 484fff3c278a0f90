"""Implicit Q-learning (Kostrikov et al. 2022) on replayed trajectories: an expectile of what twin critics make of actions that
were taken, critics that learn from the value one timestep on, and a policy that repeats what was better than expected."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, TAU, BETA, MOST = 17, 6, 0.99, 0.7, 3.0, 100.0
relu = jax.nn.relu


def critics_of(key, hidden):
    sizes = OBS + ACTIONS, hidden, hidden, 1
    return jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(key))


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "value": c.mlp_params(k[0], (OBS, hidden, hidden, 1)), "critics": critics_of(k[1], hidden),
        "actor": c.mlp_params(k[2], (OBS, hidden, hidden, ACTIONS)), "log_std": jnp.full(ACTIONS, -0.5),
    }  # fmt: skip


def log_prob_of(mean, log_std, action):
    return (-0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.919).sum(-1)


def point_loss(v, mean, q, log_std, action, known, aim):
    """``q[2, ...]``; ``known``: the target critics' lower value."""
    apart = known - v
    of_value = jnp.where(apart > 0, TAU, 1.0 - TAU) * apart**2
    gain = stop_gradient(jnp.minimum(jnp.exp(BETA * apart), MOST))
    return of_value + ((q - aim) ** 2).sum(0) - gain * log_prob_of(mean, log_std, action)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    v = c.mlp(p["value"], x["obs"], relu)[0]
    mean = jnp.tanh(c.mlp(p["actor"], x["obs"], relu))
    known = c.mapped(target, x["obs"], x["action"]).min(0)
    value = rlfx.series(stop_gradient(v), end=0.0)
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * value[t + 1]
    q = c.mapped(p["critics"], x["obs"], x["action"])
    return point_loss(v, mean, q, p["log_std"], x["action"], known, aim), carry


# -- by hand: values, means and critics of rows: ``v[N], mean[N, ACTIONS], q[2, N]``


def with_critics(critics, joined=False):
    """``joined``: the first layers of value and actor are one product."""

    def of(p, obs, action):
        if joined:
            mean, v = c.first_joined({"pi": p["actor"], "v": p["value"]}, obs, relu)
        else:
            v, mean = c.mlp(p["value"], obs, relu)[..., 0], c.mlp(p["actor"], obs, relu)
        return v, jnp.tanh(mean), critics(p["critics"], obs, action)

    return of


def critic_columns(critics, obs, action):
    x = jnp.concatenate([obs, action], -1).T
    return jnp.concatenate([c.columns(jax.tree.map(lambda w: w[i], critics), x, relu) for i in range(2)])


def in_columns(p, obs, action):
    x = obs.T
    v, mean = c.columns(p["value"], x, relu)[0], jnp.tanh(c.columns(p["actor"], x, relu)).T
    return v, mean, critic_columns(p["critics"], obs, action)


def all_joined(p, obs, action):
    """All first layers are one product, with zeros for what sees no action, and all second ones products of a batch."""
    sees = lambda w: jnp.concatenate([w, jnp.zeros((ACTIONS, w.shape[-1]))])  # noqa: E731
    first, second, third = p["critics"]
    nets = (p["value"], p["actor"])
    w = jnp.concatenate([*(sees(net[0]["w"]) for net in nets), first["w"][0], first["w"][1]], -1)
    b = jnp.concatenate([*(net[0]["b"] for net in nets), first["b"].reshape(-1)])
    h = relu(jnp.concatenate([obs, action], -1) @ w + b)
    stacked = jax.tree.map(lambda *w: jnp.concatenate([jnp.stack(w[:2]), w[2]]), *(net[1] for net in nets), second)
    h = jnp.einsum("nkh,khg->kng", h.reshape(len(h), 4, -1), stacked["w"])
    h = relu(h + stacked["b"][:, None])
    q = (h[2:] @ third["w"])[..., 0] + third["b"]
    return c.linear(p["value"][2], h[0])[..., 0], jnp.tanh(c.linear(p["actor"][2], h[1])), q


@jax.custom_vjp
def scalar(p, x):
    """A network of one output, of data, whose way back is written out."""
    return scalar_forwards(p, x)[0]


def scalar_forwards(p, x):
    first = relu(c.linear(p[0], x))
    second = relu(c.linear(p[1], first))
    return second @ p[2]["w"][:, 0] + p[2]["b"][0], (p, x, first, second)


def scalar_backwards(kept, by):
    p, x, first, second = kept
    last = p[2]["w"][:, 0]
    on = jnp.where(second > 0, by[:, None] * last, 0.0)
    before = jnp.where(first > 0, on @ p[1]["w"].T, 0.0)
    layers = [
        {"w": x.T @ before, "b": before.sum(0)}, {"w": first.T @ on, "b": on.sum(0)},
        {"w": (second.T @ by)[:, None], "b": by.sum()[None]},
    ]  # fmt: skip
    return layers, jnp.zeros_like(x)  # of data


scalar.defvjp(scalar_forwards, scalar_backwards)


def written_out(p, obs, action):
    x = jnp.concatenate([obs, action], -1)
    q = jnp.stack([scalar(jax.tree.map(lambda w: w[i], p["critics"]), x) for i in range(2)])
    return scalar(p["value"], obs), jnp.tanh(c.mlp(p["actor"], obs, relu)), q


# -- by hand: the slopes of a loss of rows


def slopes_of(v, mean, q, log_std, action, known, aim):
    """The summed loss, and its slopes by ``v, mean, q, log_std``."""
    apart, rate = known - v, jnp.exp(-log_std)
    side = jnp.where(apart > 0, TAU, 1.0 - TAU) * apart
    gain, scaled, error = jnp.minimum(jnp.exp(BETA * apart), MOST), (action - mean) * rate, q - aim
    log_prob = (-0.5 * scaled**2 - log_std - 0.919).sum(-1)
    of_std = (gain[:, None] * (1.0 - scaled**2)).sum(0)
    loss = (side * apart).sum() + (error**2).sum() - (gain * log_prob).sum()
    return loss, (-2.0 * side, -(gain[:, None] * (scaled * rate)), 2.0 * error, of_std)


def derived(nets, known_slopes=False):
    """Value and gradient of rows, and their values: ``following(v)`` is what the value one timestep on adds."""

    def of(p, obs, action, known, reward, following, scale):
        def outputs(p):
            return *nets(p, obs, action), p["log_std"]

        made, back = jax.vjp(outputs, p)
        rest = action, known, reward + following(made[0])
        v, mean, q, log_std = made
        if known_slopes:
            loss, slopes = slopes_of(v, mean, q, log_std, *rest)
        else:
            loss, slopes = jax.value_and_grad(lambda *made: point_loss(*made, *rest).sum(), (0, 1, 2, 3))(*made)
        return (scale * loss, back(jax.tree.map(lambda s: scale * s, slopes))[0]), v

    return of


apart_nets, joined_nets = with_critics(c.mapped), with_critics(c.twins_joined, joined=True)
one_nets = with_critics(c.one_by_one)


def plain(length, batch):
    def run(p, target, data, key=None):
        known = c.mapped(target, data["obs"], data["action"]).min(0)

        def loss(p):
            v, mean, q = apart_nets(p, data["obs"], data["action"])
            going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
            aim = data["reward"] + going * c.shifted(stop_gradient(v), jnp.zeros(batch))
            return point_loss(v, mean, q, p["log_std"], data["action"], known, aim).mean()

        return jax.value_and_grad(loss)(p)

    return run


def by_hand(length, batch, nets=apart_nets, critics=c.mapped, slopes=False, again=False):
    """Rows of all timesteps; every network is evaluated once."""

    def run(p, target, data):
        x = c.rows_of(data)
        going = GAMMA * (1.0 - x["done"].astype(jnp.float32))
        following = lambda v: going * jnp.concatenate([v[batch:], jnp.zeros(batch)])  # noqa: E731
        known = critics(target, x["obs"], x["action"]).min(0)
        of = derived(jax.checkpoint(nets) if again else nets, slopes)
        return of(p, x["obs"], x["action"], known, x["reward"], following, 1.0 / (length * batch))[0]

    return run


def backwards(length, batch, chunk, nets=apart_nets, critics=c.mapped, slopes=False):
    """Blocks from the last timestep to the first: the value of the timestep behind a block waits."""
    of = derived(nets, slopes)

    def run(p, target, data):
        def body(carry, part):
            total, last = carry
            x = c.rows_of(part)
            going = GAMMA * (1.0 - x["done"].astype(jnp.float32))
            following = lambda v: going * jnp.concatenate([v[batch:], last])  # noqa: E731
            known = critics(target, x["obs"], x["action"]).min(0)
            found, v = of(p, x["obs"], x["action"], known, x["reward"], following, 1.0 / (length * batch))
            return (jax.tree.map(jnp.add, total, found), v[:batch]), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), jnp.zeros(batch)
        return jax.lax.scan(body, start, c.in_chunks(data, chunk), reverse=True)[0][0]

    return run


def in_environments(length, batch, chunk, nets=apart_nets, critics=c.mapped, slopes=False):
    """Some environments at a time, all of their timesteps."""
    some = by_hand(length, chunk, nets, critics, slopes)

    def run(p, target, data):
        cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        add = lambda total, part: (jax.tree.map(jnp.add, total, some(p, target, part)), None)  # noqa: E731
        total = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), cut)[0]
        return jax.tree.map(lambda x: x * np.float32(chunk / batch), total)

    return run


def workload(length, batch, hidden, chunk=4):
    rows, back = functools.partial(by_hand, length, batch), functools.partial(backwards, length, batch)
    beside = functools.partial(in_environments, length, batch, chunk)
    known, more, less = {"slopes": True}, 2 * chunk, chunk // 2
    one = {"critics": c.one_by_one}
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch), "plain": plain(length, batch), "rows": rows(),
        "one by one": rows(one_nets, **one), "firsts joined": rows(joined_nets, c.twins_joined),
        "all joined": rows(all_joined, c.twins_joined), "features first": rows(in_columns, critic_columns),
        "written out": rows(written_out, **one), "again": rows(one_nets, again=True, **one),
        "slopes known": rows(one_nets, **one, **known), "firsts joined, slopes known": rows(joined_nets, c.twins_joined, **known),
        "written out, slopes known": rows(written_out, **one, **known),
        "written out, firsts of targets joined, slopes known": rows(written_out, c.twins_joined, **known),
        f"backwards, blocks of {chunk}": back(chunk), f"one by one, backwards, blocks of {chunk}": back(chunk, one_nets, **one),
        f"firsts joined, backwards, blocks of {chunk}": back(chunk, joined_nets, c.twins_joined, **known),
        f"all joined, backwards, blocks of {chunk}": back(chunk, all_joined, c.twins_joined, **known),
        f"features first, backwards, blocks of {chunk}": back(chunk, in_columns, critic_columns, **known),
        f"one by one, slopes known, backwards, blocks of {less}": back(less, one_nets, **one, **known),
        f"one by one, slopes known, backwards, blocks of {more}": back(more, one_nets, **one, **known),
        f"firsts joined, backwards, blocks of {more}": back(more, joined_nets, c.twins_joined, **known),
        f"written out, backwards, blocks of {less}": back(less, written_out, **one, **known),
        f"written out, backwards, blocks of {chunk}": back(chunk, written_out, **one, **known),
        f"written out, backwards, blocks of {more}": back(more, written_out, **one, **known),
        f"one by one, {chunk} environments": beside(one_nets, **one),
        f"written out, {chunk} environments": beside(written_out, **one, **known),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.02,
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], hidden), critics_of(k[5], hidden), data), tolerance=2e-5)
