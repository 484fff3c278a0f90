"""CQL (Kumar et al. 2020) on stored sequences: twin soft critics, whose values of sampled actions are held down: random ones, the
policy's own, and those it would take at the next timestep."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, ALPHA, HELD = 17, 6, 0.99, 0.2, 5.0
EVEN = np.float32(-ACTIONS * np.log(2.0))  # the log-density of random actions
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    critics = jax.vmap(lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1)))
    p = {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS)), "critics": critics(jax.random.split(k[1]))}
    return p, critics(jax.random.split(k[2]))


def values(critics, obs, actions):
    """Both critics' ``[2, N]``, of one observation and actions ``[N, ACTIONS]``."""
    return c.mapped(critics, jnp.broadcast_to(obs, (len(actions), OBS)), actions)


def program(count):
    def cql(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        obs, critics = x["obs"], p["critics"]
        sampled, log_probs = c.squashed(p["actor"], obs, jax.random.normal(t.key_for("own"), (count, ACTIONS)))
        action, log_prob = sampled[0], log_probs[0]
        own = stop_gradient((sampled, log_probs))

        soft = c.mapped(target, obs, own[0][0]).min(0) - ALPHA * own[1][0]
        following = rlfx.series(soft, end=0.0)
        aim = x["reward"] + GAMMA * (1.0 - x["done"]) * following[t + 1]
        taken = c.mapped(critics, obs, x["action"])

        uniform = jax.random.uniform(t.key_for("random"), (count, ACTIONS), minval=-1.0, maxval=1.0)
        then = rlfx.series(own, end=jax.tree.map(jnp.zeros_like, own))[t + 1]
        kinds = (uniform, EVEN), own, then
        some = [values(critics, obs, actions) - density for actions, density in kinds]
        held = jax.nn.logsumexp(jnp.concatenate(some, -1), -1) - taken

        actor = ALPHA * log_prob - c.mapped(stop_gradient(critics), obs, action).min(0)
        loss = ((taken - stop_gradient(aim)) ** 2 + HELD * held).sum() + actor
        return jnp.where(t + 1 < t.length, loss, 0.0), carry

    return cql


# -- by hand: critics of observations ``[..., OBS]`` and actions ``[..., N, ACTIONS]``, ``[2, ..., N]``


def repeated(critics, obs, actions, each=c.mapped):
    return each(critics, jnp.broadcast_to(obs[..., None, :], (*actions.shape[:-1], OBS)), actions)


one_by_one = functools.partial(repeated, each=c.one_by_one)


def member(critics, i):
    return jax.tree.map(lambda w: w[i], critics)


def split(critics, obs, actions):
    """The product with an observation is taken once for all actions."""

    def one(layers):
        first, *rest = layers
        wide = (obs @ first["w"][:OBS] + first["b"])[..., None, :] + actions @ first["w"][OBS:]
        return c.mlp(rest, relu(wide), relu)[..., 0]

    return jnp.stack([one(member(critics, i)) for i in range(2)])


def split_rows(critics, obs, actions):
    """The same, whose pairs are rows of two axes for products."""

    def one(layers):
        first, second, last = layers
        of_actions = actions.reshape(-1, ACTIONS) @ first["w"][OBS:]
        wide = relu((obs @ first["w"][:OBS] + first["b"])[..., None, :] + of_actions.reshape(*actions.shape[:-1], -1))
        wide = relu(c.linear(second, wide.reshape(len(of_actions), -1)))
        return ((wide * last["w"][:, 0]).sum(-1) + last["b"]).reshape(actions.shape[:-1])

    return jnp.stack([one(member(critics, i)) for i in range(2)])


def both_at_once(critics, obs, actions):
    """First layers of both critics are one product, second ones are two."""
    first, second, last = critics
    wide = jnp.concatenate(list(first["w"]), -1)
    h = (obs @ wide[:OBS] + jnp.concatenate(list(first["b"])))[..., None, :] + actions @ wide[OBS:]
    halves = [c.mlp([member(second, i), member(last, i)], x, relu)[..., 0] for i, x in enumerate(jnp.split(relu(h), 2, -1))]
    return jnp.stack(halves)


def features_first(critics, obs, actions):
    """Pairs are innermost: ``[hidden, N, ...]``."""
    shape = actions.shape[:-1]
    x = jnp.moveaxis(obs.reshape(-1, OBS), -1, 0)
    a = actions.reshape(-1, shape[-1], ACTIONS).transpose(2, 1, 0)

    def one(layers):
        first, second, last = layers
        of_obs = first["w"][:OBS].T @ x + first["b"][:, None]
        wide = relu(of_obs[:, None] + jnp.einsum("ah,anr->hnr", first["w"][OBS:], a))
        wide = relu(second["w"].T @ wide.reshape(len(second["w"]), -1) + second["b"][:, None])
        found = (last["w"].T @ wide)[0] + last["b"]
        return found.reshape(shape[-1], -1).T.reshape(shape)

    return jnp.stack([one(member(critics, i)) for i in range(2)])


def apart(q, critics, obs, x, own, then):
    """Values of the stored action, and of each kind of sampled ones."""
    kinds = (x["action"][..., None, :], x["random"], own[0], then[0])
    return tuple(q(critics, obs, actions) for actions in kinds)


def together(q, critics, obs, x, own, then):
    """All actions of an observation in one call."""
    count = own[0].shape[-2]
    everything = q(critics, obs, jnp.concatenate([x["action"][..., None, :], x["random"], own[0], then[0]], -2))
    return jnp.split(everything, (1, 1 + count, 1 + 2 * count), -1)


def by_hand(length, batch, count, q=repeated, kinds=apart, flat=True, chunk=None, ahead=True):
    """``chunk``: timesteps of a block; ``ahead``: random numbers come first."""

    def run(p, target, data, key):
        keys = dict(zip(("own", "random"), c.streams(key, batch, "own", "random"), strict=True))
        normal = lambda k: jax.random.normal(k, (count, ACTIONS))  # noqa: E731
        uniform = lambda k: jax.random.uniform(k, (count, ACTIONS), minval=-1.0, maxval=1.0)  # noqa: E731
        draw = lambda name, how: lambda t: jax.vmap(how)(c.at(keys[name], t))  # noqa: E731
        times = jnp.arange(length)
        noise = jax.vmap(draw("own", normal))(times)
        rows = c.rows_of if flat else lambda x: x

        def acted(actor, obs, noise):
            """Actions of all noise of an observation, from one mean."""
            mean, log_std = jnp.split(c.mlp(actor, obs, relu)[..., None, :], 2, -1)
            log_std = jnp.clip(log_std, -5.0, 2.0)
            u = mean + jnp.exp(log_std) * noise
            log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
            return jnp.tanh(u), log_prob.sum(-1)

        own = acted(p["actor"], *rows((data["obs"], noise)))
        own = jax.tree.map(lambda x: x.reshape(length, batch, *x.shape[2 - flat :]), own)
        first = own[0][:, :, :1]
        soft = q(target, *rows((data["obs"], first)))[..., 0].min(0).reshape(length, batch) - ALPHA * own[1][..., 0]
        later = lambda x: c.shifted(x, jnp.zeros_like(x[0]))  # noqa: E731
        aim = data["reward"] + GAMMA * (1.0 - data["done"]) * later(soft)
        counted = jnp.broadcast_to((times < length - 1)[:, None], (length, batch))
        given = {
            "x": data, "own": own, "then": jax.tree.map(later, own), "noise": noise[:, :, :1], "aim": aim,
            "counted": counted, "random": jax.vmap(draw("random", uniform))(times) if ahead else times,
        }  # fmt: skip

        def loss(p, part):
            random = part.pop("random") if ahead else jax.vmap(draw("random", uniform))(part.pop("random"))
            part = rows(part | {"random": random})
            x, own, then = part["x"] | {"random": part["random"]}, part["own"], part["then"]
            taken, *some = kinds(q, p["critics"], x["obs"], x, own, then)
            some = some[0] - EVEN, some[1] - own[1], some[2] - then[1]
            taken, held = taken[..., 0], jax.nn.logsumexp(jnp.concatenate(some, -1), -1)
            action, log_prob = acted(p["actor"], x["obs"], part["noise"])
            actor = ALPHA * log_prob[..., 0] - q(stop_gradient(p["critics"]), x["obs"], action)[..., 0].min(0)
            found = ((taken - part["aim"]) ** 2 + HELD * (held - taken)).sum(0) + actor
            return jnp.where(part["counted"], found, 0.0).sum() / (length * batch)

        if chunk is None:
            return jax.value_and_grad(lambda p: loss(p, dict(given)))(p)
        return c.summed_gradient(lambda p, part: loss(p, dict(part)), p, c.in_chunks(given, chunk))

    return run


def workload(length, batch, hidden, count, chunk=4):
    make = lambda q=repeated, kinds=together, **how: by_hand(length, batch, count, q, kinds, **how)  # noqa: E731
    some = {"chunk": chunk}
    forms = {
        "rlfx": c.learner_by_rlfx(program(count), length, batch),
        "plain": make(kinds=apart, flat=False), "rows": make(kinds=apart),
        "together": make(), "one by one": make(one_by_one), "split": make(split), "split, apart": make(split, apart),
        "split rows": make(split_rows), "both critics at once": make(both_at_once), "features first": make(features_first),
        f"together, blocks of {chunk}": make(**some), f"split, blocks of {chunk}": make(split, **some),
        f"split rows, blocks of {chunk}": make(split_rows, **some), "split rows, blocks of 1": make(split_rows, chunk=1),
        f"features first, blocks of {chunk}": make(features_first, **some),
        "features first, blocks of 1": make(features_first, chunk=1),
        f"split rows, blocks of {chunk}, threefry unrolled": make(split_rows, **some),
        f"split, apart, blocks of {chunk}, threefry unrolled": make(split, apart, **some),
        f"split rows, blocks of {chunk}, drawn late, threefry unrolled": make(split_rows, **some, ahead=False),
        f"features first, blocks of {chunk}, threefry unrolled": make(features_first, **some),
        "features first, blocks of 1, threefry unrolled": make(features_first, chunk=1),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 5)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.05).astype(jnp.float32),
    }  # fmt: skip
    given = *params_of(k[4], hidden), data
    return drawing(forms, given, tolerance=1e-5)
