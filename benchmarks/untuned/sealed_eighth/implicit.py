"""Implicit quantile networks (IQN, Dabney et al. 2018) on replayed sequences: quantiles of fractions that are drawn anew for
every timestep, whose cosines gate the features of the observation; targets of n steps from a target network."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, STEPS, COSINES = 16, 4, 0.99, 3, 64
squash = jnp.tanh


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    sizes = {"seen": (OBS, hidden, hidden), "gate": (COSINES, hidden), "out": (hidden, hidden, ACTIONS)}
    return {name: c.mlp_params(key, size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def cosines(fractions):
    return jnp.cos(np.pi * jnp.arange(COSINES, dtype=jnp.float32) * fractions[..., None])


def quantiles(p, obs, fractions):
    """``[..., count, ACTIONS]``, of ``fractions[..., count]``."""
    gates = squash(c.mlp(p["gate"], cosines(fractions)))
    return c.mlp(p["out"], squash(c.mlp(p["seen"], obs, squash))[..., None, :] * gates, squash)


def greedy(values):
    """The quantiles of the action of the greatest mean."""
    best = jnp.argmax(values.mean(-2), -1)
    return jnp.take_along_axis(values, best[..., None, None], -1)[..., 0]


def huber(found, fractions, aim):
    """Quantile Huber loss of every pair: ``found[..., N]``, ``aim[..., M]``."""
    error = aim[..., None, :] - found[..., :, None]
    size = jnp.abs(error)
    loss = jnp.where(size <= 1.0, 0.5 * error**2, size - 0.5)
    return (jnp.abs(fractions[..., :, None] - (error < 0)) * loss).mean(-1).sum(-1)


def program(count):
    def iqn(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        fractions = jax.random.uniform(t.key_for("fractions"), (count,))
        others = jax.random.uniform(t.key_for("others"), (count,))
        following = rlfx.series(stop_gradient(greedy(quantiles(target, x["obs"], others))), end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        aim = rlfx.n_step_return(step, following[t + 1], gamma=GAMMA, n=STEPS)
        return huber(quantiles(p, x["obs"], fractions)[:, x["action"]], fractions, stop_gradient(aim)), carry

    return iqn


# -- by hand: cosines of ``fractions[...]``


def by_sums_of_angles(fractions):
    """Sixteen sines and cosines each, where there were sixty-four: ``cos(a + 8 b)``."""
    few, side = np.pi * fractions[..., None], int(np.sqrt(COSINES))
    small, large = few * np.arange(side, dtype=np.float32), few * np.arange(0, COSINES, side, dtype=np.float32)
    cos = jnp.cos(large)[..., :, None] * jnp.cos(small)[..., None, :]
    sin = jnp.sin(large)[..., :, None] * jnp.sin(small)[..., None, :]
    return (cos - sin).reshape(*fractions.shape, COSINES)


def by_polynomial(fractions):
    """A sine's polynomial, in turns: what is whole of them is taken off."""
    x = jnp.arange(COSINES, dtype=jnp.float32) * fractions[..., None]
    u = 0.5 - jnp.abs(x - 2.0 * jnp.round(0.5 * x))
    square, total = u * u, 0.0
    for power in range(11, 0, -2):
        total = total * square + np.float32((-1) ** (power // 2) * np.pi**power / math.factorial(power))
    return total * u


# -- by hand: ``found[N, count]`` of rows, and the target's ``[N, count]``


def features(p, obs, fractions, angles):
    """What the last layer multiplies, ``[N * count, hidden]``."""
    seen = squash(c.mlp(p["seen"], obs, squash))
    gates = squash(c.linear(p["gate"][0], angles(fractions).reshape(-1, COSINES)))
    mixed = (seen[:, None] * gates.reshape(*fractions.shape, -1)).reshape(gates.shape)
    return squash(c.linear(p["out"][0], mixed))


def in_rows(p, obs, fractions, angles):
    return c.linear(p["out"][1], features(p, obs, fractions, angles)).reshape(*fractions.shape, ACTIONS)


def picked(values, action):
    return jnp.take_along_axis(values, action[..., None, None], -1)[..., 0]


def taken_in_rows(p, obs, fractions, action, angles):
    return picked(in_rows(p, obs, fractions, angles), action)


def greedy_in_rows(p, obs, fractions, angles):
    return greedy(in_rows(p, obs, fractions, angles))


def taken_hot(p, obs, fractions, action, angles):
    """The action's value by ones and zeros: nothing is gathered, and so nothing scattered."""
    return (in_rows(p, obs, fractions, angles) * jax.nn.one_hot(action, ACTIONS)[:, None]).sum(-1)


def taken_one(p, obs, fractions, action, angles):
    """The last layer is multiplied for the action that was taken only."""
    last = p["out"][1]
    h = features(p, obs, fractions, angles).reshape(*fractions.shape, -1)
    chosen = jax.nn.one_hot(action, ACTIONS)
    return (h * (chosen @ last["w"].T)[:, None]).sum(-1) + (chosen @ last["b"])[:, None]


def greedy_of_means(p, obs, fractions, angles):
    """The mean of the features chooses."""
    last = p["out"][1]
    h = features(p, obs, fractions, angles).reshape(*fractions.shape, -1)
    best = jax.nn.one_hot(jnp.argmax(c.linear(last, h.mean(1)), -1), ACTIONS)
    return (h * (best @ last["w"].T)[:, None]).sum(-1) + (best @ last["b"])[:, None]


def in_columns(p, obs, fractions, angles):
    """Features first, rows innermost: ``[ACTIONS, count, N]``."""
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731
    count, hidden = fractions.shape[1], p["gate"][0]["b"].shape[0]
    seen = squash(act(p["seen"][1], squash(act(p["seen"][0], obs.T))))
    gates = squash(act(p["gate"][0], jnp.moveaxis(angles(fractions.T), -1, 0).reshape(COSINES, -1)))
    mixed = (seen[:, None] * gates.reshape(hidden, count, -1)).reshape(hidden, -1)
    return act(p["out"][1], squash(act(p["out"][0], mixed))).reshape(ACTIONS, count, -1)


def taken_in_columns(p, obs, fractions, action, angles):
    hot = action == jnp.arange(ACTIONS)[:, None]
    return (in_columns(p, obs, fractions, angles) * hot[:, None]).sum(0).T


def greedy_in_columns(p, obs, fractions, angles):
    values = in_columns(p, obs, fractions, angles)
    return (values * (jnp.argmax(values.mean(1), 0) == jnp.arange(ACTIONS)[:, None])[:, None]).sum(0).T


def counts_first(p, obs, fractions, angles):
    """``[count, N, ACTIONS]``: the observation's features are the same for every block of rows."""
    seen = squash(c.mlp(p["seen"], obs, squash))
    gates = squash(c.linear(p["gate"][0], angles(fractions.T).reshape(-1, COSINES)))
    mixed = (gates.reshape(-1, *seen.shape) * seen).reshape(gates.shape)
    return c.mlp(p["out"], mixed, squash).reshape(-1, len(obs), ACTIONS)


def taken_counts_first(p, obs, fractions, action, angles):
    return (counts_first(p, obs, fractions, angles) * jax.nn.one_hot(action, ACTIONS)).sum(-1).T


def greedy_counts_first(p, obs, fractions, angles):
    values = counts_first(p, obs, fractions, angles)
    return (values * jax.nn.one_hot(jnp.argmax(values.mean(0), -1), ACTIONS)).sum(-1).T


# -- by hand: losses of pairs


def written_out(found, fractions, aim):
    """The loss's slope is known: pairs are made once, and not kept."""

    def both(found):
        error = aim[:, None, :] - found[:, :, None]
        bounded = jnp.clip(error, -1.0, 1.0)
        weighted = jnp.abs(fractions[:, :, None] - (error < 0)) * bounded
        return (weighted * (error - 0.5 * bounded)).mean(-1).sum(-1), -weighted.mean(-1)

    @jax.custom_vjp
    def loss(found):
        return both(found)[0]

    loss.defvjp(both, lambda slope, by: (by[:, None] * slope,))
    return loss(found)


def aim_after_aim(found, fractions, aim):
    """The same; one of the target's quantiles after the other, with rows innermost."""

    def both(found):
        total = slope = 0.0
        for one in aim.T:
            error = one - found.T
            bounded = jnp.clip(error, -1.0, 1.0)
            weighted = jnp.abs(fractions.T - (error < 0)) * bounded
            total, slope = total + weighted * (error - 0.5 * bounded), slope - weighted
        return total.sum(0) / aim.shape[1], slope.T / aim.shape[1]

    @jax.custom_vjp
    def loss(found):
        return both(found)[0]

    loss.defvjp(both, lambda slope, by: (by[:, None] * slope,))
    return loss(found)


def aims(following, reward, done):
    """``[T, B, count]``, of what the target gives at the same timesteps."""
    going = 1.0 - done.astype(jnp.float32)
    bootstrap = GAMMA * going[..., None] * c.shifted(following, jnp.zeros_like(following[0]))
    later = c.shifted(following, jnp.zeros_like(following[0]))
    aim = reward[..., None] + bootstrap
    for _ in range(STEPS - 1):
        aim = reward[..., None] + GAMMA * going[..., None] * c.shifted(aim, later[-1])
    return aim


def plain(length, batch, count):
    """Everything ``[T, B, ...]``; weights meet a stack of quantiles."""

    def run(p, target, data, key):
        draw = lambda keys: jax.vmap(lambda t: jax.vmap(lambda k: jax.random.uniform(k, (count,)))(c.at(keys, t)))  # noqa: E731
        fractions, others = (draw(keys)(jnp.arange(length)) for keys in c.streams(key, batch, "fractions", "others"))
        aim = aims(greedy(quantiles(target, data["obs"], others)), data["reward"], data["done"])

        def loss(p):
            found = picked(quantiles(p, data["obs"], fractions), data["action"])
            return huber(found, fractions, aim).mean()

        return jax.value_and_grad(loss)(p)

    return run


def by_hand(
    length, batch, count, taken=taken_in_rows, best=greedy_in_rows, pairs=huber, angles=cosines, chunk=None, again=False
):
    """``chunk``: timesteps of a block, the target's too; ``again``: the features are computed again."""

    def run(p, target, data, key):
        draw_of = jax.vmap(jax.vmap(lambda k: jax.random.uniform(k, (count,))))
        draw = lambda keys: draw_of(jax.vmap(lambda t: c.at(keys, t))(jnp.arange(length)))  # noqa: E731
        fractions, others = map(draw, c.streams(key, batch, "fractions", "others"))
        seen, asked = c.rows_of((data["obs"], others))
        size = length * batch if chunk is None else chunk * batch
        if chunk is None:
            following = best(target, seen, asked, angles)
        else:
            following = jax.lax.map(lambda x: best(target, *x, angles), c.in_chunks((seen, asked), size))
        aim = aims(following.reshape(length, batch, count), data["reward"], data["done"])

        def loss(p, part):
            obs, action, fractions, aim = part
            run = jax.checkpoint(taken, static_argnums=4) if again else taken
            return pairs(run(p, obs, fractions, action, angles), fractions, aim).sum() / (length * batch)

        part = seen, *c.rows_of((data["action"], fractions, aim))
        if chunk is None:
            return jax.value_and_grad(loss)(p, part)
        return c.summed_gradient(loss, p, c.in_chunks(part, size))

    return run


def workload(length, batch, count, hidden, chunk=4):
    make = lambda *a, **how: by_hand(length, batch, count, *a, **how)  # noqa: E731
    rows, one, first, counts = (
        (taken_in_rows, greedy_in_rows), (taken_one, greedy_of_means), (taken_in_columns, greedy_in_columns),
        (taken_counts_first, greedy_counts_first),
    )  # fmt: skip
    hot, mixed = (taken_hot, greedy_in_rows), (taken_in_rows, greedy_of_means)
    sums, turns, some = {"angles": by_sums_of_angles}, {"angles": by_polynomial}, {"chunk": chunk}
    known, after = written_out, aim_after_aim
    forms = {
        "rlfx": c.learner_by_rlfx(program(count), length, batch), "plain": plain(length, batch, count), "rows": make(),
        "sums of angles": make(**sums), "polynomial": make(**turns), "slopes of pairs": make(*rows, known),
        "aim after aim": make(*rows, after), "one action": make(*one), "features first": make(*first),
        "counts first": make(*counts), "picked by ones": make(*hot), "means choose": make(*mixed),
        "again": make(*rows, after, again=True, **turns), f"blocks of {chunk}": make(**some),
        "aim after aim, polynomial": make(*rows, after, **turns),
        "counts first, aim after aim, polynomial": make(*counts, after, **turns),
        f"slopes, blocks of {chunk}": make(*rows, known, **some),
        f"aim after aim, polynomial, blocks of {chunk}": make(*rows, after, **turns, **some),
        "aim after aim, threefry unrolled": make(*rows, after),
        "aim after aim, polynomial, threefry unrolled": make(*rows, after, **turns),
        "counts first, aim after aim, polynomial, threefry unrolled": make(*counts, after, **turns),
        f"aim after aim, blocks of {chunk}, threefry unrolled": make(*rows, after, **some),
        f"aim after aim, polynomial, blocks of {chunk}, threefry unrolled": make(*rows, after, **turns, **some),
        f"counts first, aim after aim, polynomial, blocks of {chunk}, threefry unrolled": make(*counts, after, **turns, **some),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(2), 6)  # the target network has no two actions that are nearly as good
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.05,
    }  # fmt: skip
    given = params_of(k[4], hidden), params_of(k[5], hidden), data
    return drawing(forms, given, tolerance=2e-5)
