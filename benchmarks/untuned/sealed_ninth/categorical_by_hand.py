"""Categorical double DQN by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_ninth import categorical as cat
from benchmarks.untuned.sealed_ninth.categorical import ACTIONS, APART, ATOM, ATOMS, LARGEST, STEPS, features, relu

# -- features


def channels_first(p, boards):
    x = jnp.moveaxis(boards, -1, 1).astype(jnp.float32)
    x = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "VALID", dimension_numbers=("NCHW", "HWIO", "NCHW"))
    return jnp.moveaxis(relu(x), 1, -1).reshape(len(x), -1)


def by_patches(p, boards):
    """A product of patches."""
    out = boards.shape[1] - 2
    x = jnp.concatenate([boards[:, i : i + out, j : j + out] for i in range(3) for j in range(3)], -1)
    return relu(x.astype(jnp.float32) @ p["kernel"].reshape(-1, p["kernel"].shape[-1])).reshape(len(boards), -1)


# -- distributions that are spread


def by_scattering(probs, gained, left):
    where = (jnp.clip(gained[..., None] + left[..., None] * ATOM, -LARGEST, LARGEST) + LARGEST) / APART
    low = jnp.clip(jnp.floor(where), 0, ATOMS - 2)
    share, low = where - low, low.astype(jnp.int32)

    def one(probs, share, low):
        return jnp.zeros(ATOMS).at[low].add(probs * (1.0 - share)).at[low + 1].add(probs * share)

    return jnp.vectorize(one, signature="(n),(n),(n)->(n)")(probs, share, low)


def columns_spread(probs, gained, left):
    """Rows innermost, one atom after the other."""
    shape, (probs, gained, left) = probs.shape, c.rows_of((probs, gained, left)) if probs.ndim == 3 else (probs, gained, left)
    where = jnp.clip(gained + left * ATOM[:, None], -LARGEST, LARGEST) / APART
    turned = probs.T
    found = [(jnp.maximum(1.0 - jnp.abs(where - a / APART), 0.0) * turned).sum(0) for a in ATOM]
    return jnp.stack(found, -1).reshape(shape)


def by_folding(probs, gained, left):
    """In units of atoms, as a product of each row's own shares."""
    shift, scale = (gained / APART)[..., None, None], left[..., None, None]
    at, of = np.arange(ATOMS, dtype=np.float32)[:, None], np.arange(ATOMS, dtype=np.float32)
    middle = (ATOMS - 1) / 2
    where = jnp.clip(shift + scale * (of - middle), -middle, middle) + middle
    return jnp.einsum("...ij,...j->...i", jnp.maximum(1.0 - jnp.abs(where - at), 0.0), probs)


# -- what was taken


def taken_first(p, h, action):
    """Only the logits of what was taken, of features behind the dense layer."""
    last = p["dense"][1]
    w = last["w"].reshape(-1, ACTIONS, ATOMS)
    hot = jax.nn.one_hot(action, ACTIONS)
    made = (hot[:, :, None] * jnp.einsum("nh,hak->nak", h, w)).sum(1)
    return made + hot @ last["b"].reshape(ACTIONS, ATOMS)


def of_action(p, h, action):
    """One action after the other, of which most rows are zeros."""
    made, last = 0.0, p["dense"][1]
    for i in range(ACTIONS):
        part = slice(i * ATOMS, (i + 1) * ATOMS)
        made = made + jnp.where((action == i)[:, None], h @ last["w"][:, part] + last["b"][part], 0.0)
    return made


def only_taken(p, h, action):
    """All products, of which only the chosen are looked at, by ones and zeros."""
    made = c.linear(p["dense"][1], h).reshape(-1, ACTIONS, ATOMS)
    return (made * jax.nn.one_hot(action, ACTIONS)[..., None]).sum(-2)


def means_of(p, h):
    made = c.linear(p["dense"][1], h).reshape(-1, ACTIONS, ATOMS)
    grown = jnp.exp(made - stop_gradient(made.max(-1, keepdims=True)))
    return (grown @ ATOM) / grown.sum(-1)


def hidden_of(p, boards, of):
    return relu(c.linear(p["dense"][0], of(p, boards)))


def of_best(target, h, best, pick):
    return jax.nn.softmax(pick(target, h, best))


def by_hand(length, batch, of=features, spread=cat.spread, pick=only_taken, again=False):
    """Rows; the network is evaluated once, for what it learns and to choose."""

    def run(p, target, data):
        gained, left = cat.nearest(data)
        boards, action = c.rows_of((data["board"], data["action"]))
        asked = boards[STEPS * batch :]
        far = hidden_of(target, asked, of)
        some = jax.checkpoint(hidden_of, static_argnums=2) if again else hidden_of

        def loss(p):
            h = some(p, boards, of)
            best = jnp.argmax(means_of(p, stop_gradient(h)), -1)[STEPS * batch :]
            later = of_best(target, far, best, pick).reshape(-1, batch, ATOMS)
            aim = stop_gradient(spread(later, gained, left)).reshape(-1, ATOMS)
            counted = slice(-STEPS * batch)
            return -(aim * jax.nn.log_softmax(pick(p, h[counted], action[counted]))).sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run


def made_once(length, batch, of=features, spread=cat.spread):
    """All logits are made once, of which a loss's slopes are for the taken action; those are multiplied for all actions."""

    def run(p, target, data):
        gained, left = cat.nearest(data)
        boards, action = c.rows_of((data["board"], data["action"]))
        made, back = jax.vjp(lambda p: c.linear(p["dense"][1], hidden_of(p, boards, of)).reshape(-1, ACTIONS, ATOMS), p)
        loss, slopes = learnt(made, target, boards[STEPS * batch :], action, gained, left, of, spread, batch)
        return loss / (length * batch), back(slopes / (length * batch))[0]

    return run


def learnt(made, target, asked, action, gained, left, of, spread, batch):
    """The loss, and the slopes of all logits ``made[N, ACTIONS, ATOMS]``."""
    best = jnp.argmax(cat.expected(jax.nn.log_softmax(made[STEPS * batch :])), -1)
    later = of_best(target, hidden_of(target, asked, of), best, only_taken).reshape(-1, batch, ATOMS)
    aim = spread(later, gained, left).reshape(-1, ATOMS)
    return slopes_of(made[: -STEPS * batch], aim, action[: -STEPS * batch], STEPS * batch)


def slopes_of(made, aim, action, more=0):
    """``more``: so many rows behind have none."""
    hot = jax.nn.one_hot(action, ACTIONS)[..., None]
    log_probs = jax.nn.log_softmax((made * hot).sum(1))
    slope = aim.sum(-1, keepdims=True) * jnp.exp(log_probs) - aim
    return -(aim * log_probs).sum(), jnp.pad(hot * slope[:, None], ((0, more), (0, 0), (0, 0)))


def two_passes(length, batch, chunk, of=features, spread=cat.spread, pick=only_taken):
    """All aims first, in blocks of ``chunk`` timesteps, and then what is learnt, in such blocks."""

    def run(p, target, data):
        gained, left = cat.nearest(data)

        def asked(boards):
            boards = c.rows_of(boards)
            best = jnp.argmax(means_of(p, hidden_of(p, boards, of)), -1)
            return of_best(target, hidden_of(target, boards, of), best, pick)

        later = jax.lax.map(asked, c.in_chunks(data["board"], chunk)).reshape(length, batch, ATOMS)[STEPS:]
        aim = jnp.pad(spread(later, gained, left), ((0, STEPS), (0, 0), (0, 0)))

        def loss(p, part):
            boards, action, aim = c.rows_of(part)
            found = aim * jax.nn.log_softmax(pick(p, hidden_of(p, boards, of), action))
            return -found.sum() / (length * batch)

        return c.summed_gradient(loss, p, c.in_chunks((data["board"], data["action"], aim), chunk))

    return run


def in_columns(length, batch, chunk=None, of=by_patches):
    """Behind the convolution features are first, and rows innermost: logits are ``[ACTIONS, ATOMS, N]``. ``chunk``: as below."""

    def hidden(p, boards):
        return relu(jnp.einsum("nf,fh->hn", of(p, boards), p["dense"][0]["w"]) + p["dense"][0]["b"][:, None])

    def logits(p, boards):
        last = p["dense"][1]
        return (last["w"].T @ hidden(p, boards) + last["b"][:, None]).reshape(ACTIONS, ATOMS, -1)

    def chosen(made, target, boards):
        """Probabilities ``[ATOMS, N]`` of the best action's returns, by the target network."""
        grown = jnp.exp(made - made.max(1, keepdims=True))
        best = jnp.argmax((grown * ATOM[:, None]).sum(1) / grown.sum(1), 0)
        return jax.nn.softmax((jax.nn.one_hot(best, ACTIONS, axis=0)[:, None] * logits(target, boards)).sum(0), 0)

    def learnt(made, probs, action, gained, left):
        where = jnp.clip(gained + left * ATOM[:, None], -LARGEST, LARGEST) / APART
        aim = jnp.stack([(jnp.maximum(1.0 - jnp.abs(where - a / APART), 0.0) * probs).sum(0) for a in ATOM])
        hot = jax.nn.one_hot(action, ACTIONS, axis=0)[:, None]
        log_probs = jax.nn.log_softmax((made * hot).sum(0), 0)
        return -(aim * log_probs).sum(), hot * (jnp.exp(log_probs) * aim.sum(0) - aim)

    def run(p, target, data):
        gained, left = cat.nearest(data)
        boards, action = c.rows_of((data["board"], data["action"]))
        counted, scale = slice(-STEPS * batch), 1.0 / (length * batch)
        if chunk is None:
            made, back = jax.vjp(lambda p: logits(p, boards), p)
            probs = chosen(made[..., STEPS * batch :], target, boards[STEPS * batch :])
            loss, slopes = learnt(made[..., counted], probs, action[counted], gained.reshape(-1), left.reshape(-1))
            return scale * loss, back(jnp.pad(scale * slopes, ((0, 0), (0, 0), (0, STEPS * batch))))[0]

        def body(carry, part):
            total, waiting = carry
            boards, action, gained, left = c.rows_of(part[:4])
            made, back = jax.vjp(lambda p: logits(p, boards), p)
            joined = jnp.concatenate([chosen(made, target, boards), waiting], -1)
            probs = joined[:, STEPS * batch :] * jnp.repeat(part[4], batch)
            loss, slopes = learnt(made, probs, action, gained, left)
            found = scale * loss, back(scale * slopes)[0]
            return (jax.tree.map(jnp.add, total, found), joined[:, : STEPS * batch]), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), jnp.zeros((ATOMS, STEPS * batch))
        gained, left = (jnp.pad(x, ((0, STEPS), (0, 0))) for x in (gained, left))
        counts = (jnp.arange(length) + STEPS < length).astype(jnp.float32)
        parts = c.in_chunks((data["board"], data["action"], gained, left, counts), chunk)
        return jax.lax.scan(body, start, parts, reverse=True)[0][0]

    return run


def backwards(length, batch, chunk, of=features, spread=cat.spread):
    """Blocks from the last to the first, each evaluated once: what was asked of the timesteps behind waits. The last ones, that
    are not counted, have no gradient."""

    def run(p, target, data):
        gained, left = (jnp.pad(x, ((0, STEPS), (0, 0))) for x in cat.nearest(data))
        counted = jnp.arange(length) + STEPS < length
        scale = 1.0 / (length * batch)

        def body(carry, part):
            total, waiting = carry
            boards, action, gained, left, counted = part
            boards = c.rows_of(boards)
            made, back = jax.vjp(
                lambda p: c.linear(p["dense"][1], hidden_of(p, boards, of)).reshape(-1, ACTIONS, ATOMS), p
            )
            best = jnp.argmax(cat.expected(jax.nn.log_softmax(made)), -1)
            probs = of_best(target, hidden_of(target, boards, of), best, only_taken).reshape(chunk, batch, ATOMS)
            joined = jnp.concatenate([probs, waiting])
            aim = spread(joined[STEPS : STEPS + chunk], gained, left) * counted[:, None, None]
            loss, slopes = slopes_of(made, aim.reshape(-1, ATOMS), action.reshape(-1))
            found = scale * loss, back(scale * slopes)[0]
            return (jax.tree.map(jnp.add, total, found), joined[:STEPS]), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), jnp.zeros((STEPS, batch, ATOMS))
        parts = c.in_chunks((data["board"], data["action"], gained, left, counted), chunk)
        return jax.lax.scan(body, start, parts, reverse=True)[0][0]

    return run


def workload(length, batch, side, channels, hidden, chunk=8):
    make = functools.partial(by_hand, length, batch)
    once = functools.partial(made_once, length, batch)
    two, back = functools.partial(two_passes, length, batch), functools.partial(backwards, length, batch)
    columns, less, least = functools.partial(in_columns, length, batch), chunk // 2, chunk // 4
    forms = {
        "rlfx": c.learner_by_rlfx(cat.program, length, batch), "plain": cat.plain(length, batch), "rows": make(),
        "channels first": make(channels_first), "patches": make(by_patches), "scattered": make(spread=by_scattering),
        "spread in columns": make(spread=columns_spread), "spread by folding": make(spread=by_folding),
        "patches, spread by folding": make(by_patches, by_folding), "patches, scattered": make(by_patches, by_scattering),
        "action by action": make(pick=of_action), "chosen weights": make(pick=taken_first), "again": make(again=True),
        "patches, again": make(by_patches, again=True), "spread by folding, again": make(spread=by_folding, again=True),
        "made once": once(), "made once, spread by folding": once(spread=by_folding),
        "made once, patches": once(by_patches), "made once, patches, spread by folding": once(by_patches, by_folding),
        "made once, patches, spread in columns": once(by_patches, columns_spread), "features first": columns(),
        "features first, convolved": columns(of=features), f"two passes, blocks of {chunk}": two(chunk),
        f"two passes, patches, blocks of {chunk}": two(chunk, by_patches),
        f"backwards, patches, spread by folding, blocks of {chunk}": back(chunk, by_patches, by_folding),
        f"backwards, patches, spread by folding, blocks of {less}": back(less, by_patches, by_folding),
        f"backwards, patches, spread by folding, blocks of {least}": back(least, by_patches, by_folding),
        f"backwards, patches, spread in columns, blocks of {less}": back(less, by_patches, columns_spread),
        f"backwards, features first, blocks of {chunk}": columns(chunk),
        f"backwards, features first, blocks of {less}": columns(less),
        f"backwards, features first, blocks of {least}": columns(least),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(4), 6)  # no two actions are nearly as good
    size = length, batch
    data = {
        "board": jax.random.uniform(k[0], (*size, side, side, cat.PLANES)) < 0.15, "done": jax.random.uniform(k[3], size) < 0.05,
        "action": jax.random.randint(k[1], size, 0, ACTIONS), "reward": jax.random.normal(k[2], size),
    }  # fmt: skip
    given = cat.params_of(k[4], side, channels, hidden), cat.params_of(k[5], side, channels, hidden), data
    return Workload(forms, given, tolerance=2e-5)
