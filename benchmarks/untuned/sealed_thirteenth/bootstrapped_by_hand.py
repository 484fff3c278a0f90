"""Bootstrapped DQN with randomised priors by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_thirteenth import bootstrapped
from benchmarks.untuned.sealed_thirteenth.bootstrapped import (
    ACTIONS,
    EPISODE,
    GAMMA,
    OBS,
    SCALE,
    params_of,
    relu,
    reset,
)  # fmt: skip

# -- layers of all members for rows ``x[N, OBS]``: hidden layers, and outputs ``[members, N, ACTIONS]``


def together(nets, x):
    kept = []
    for layer in nets[:-1]:
        x = relu(x @ layer["w"] + layer["b"][:, None])
        kept.append(x)
    return kept, x @ nets[-1]["w"] + nets[-1]["b"][:, None]


def first_joined(nets, x):
    """The first layer is one product for all members."""
    first, *rest = nets
    members, size = first["b"].shape
    x = relu(x @ first["w"].swapaxes(0, 1).reshape(x.shape[-1], -1) + first["b"].reshape(-1))
    x = jnp.moveaxis(x.reshape(-1, members, size), 1, 0)
    kept, made = together(rest, x)
    return [x, *kept], made


def one_by_one(nets, x):
    members = len(nets[0]["b"])
    made = [together(jax.tree.map(lambda w, i=i: w[i : i + 1], nets), x) for i in range(members)]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *made)


def in_columns(nets, x):
    """Features first."""
    x, kept = x.T, []
    for layer in nets[:-1]:
        x = relu(layer["w"].mT @ x + layer["b"][..., None])
        kept.append(x.mT)
    return kept, (nets[-1]["w"].mT @ x + nets[-1]["b"][..., None]).mT


def member_by_member(nets, x):
    return jax.lax.map(lambda net: jax.tree.map(lambda x: x[0], together(jax.tree.map(lambda w: w[None], net), x)), nets)


# -- how a member acts: what its network makes of ``x[B, OBS]``


def all_members(layers):
    """Of which one is taken; hidden layers and outputs are kept."""

    def of(p, priors, x, member):
        (kept, net), (_, prior) = layers(p, x), layers(priors, x)
        q = jnp.moveaxis(net + SCALE * prior, 0, 1)
        own = jnp.take_along_axis(q, member[:, None, None], 1)[:, 0]
        return own, (kept, net, prior)

    return of


def own_weights(p, priors, x, member):
    """By the weights of each environment's member."""

    def made(nets):
        h = x
        for i, layer in enumerate(nets):
            h = jnp.einsum("bi,bij->bj", h, layer["w"][member]) + layer["b"][member]
            h = relu(h) if i < len(nets) - 1 else h
        return h

    return made(p) + SCALE * made(priors), None


def own_by_ones(p, priors, x, member):
    """Rows of all members, but of others zeros, are one product with all weights."""
    ones = jax.nn.one_hot(member, len(p[0]["b"]))

    def made(nets):
        h = x
        for i, layer in enumerate(nets):
            rows = (ones[:, :, None] * h[:, None]).reshape(len(x), -1)
            h = rows @ layer["w"].reshape(rows.shape[1], -1) + ones @ layer["b"]
            h = relu(h) if i < len(nets) - 1 else h
        return h

    return made(p) + SCALE * made(priors), None


def moved(state, action, start):
    """The world's next state, reward, and whether an episode has ended."""
    x = jnp.tanh(0.95 * state["x"] + 0.1 * jnp.roll(state["x"], 1, -1) + 0.05 * (action.astype(jnp.float32) - 1.5)[:, None])
    count = state["count"] + 1
    done = (x[:, 0] > 0.9) | (count >= EPISODE)
    after = {"x": jnp.where(done[:, None], start, x), "count": jnp.where(done, 0, count)}
    return after, -jnp.mean(x**2, -1), done


def acted(p, priors, carry, key, length, act, ahead=False, unroll=1):
    batch, members = len(carry[1]), len(p[0]["b"])
    env_keys, mask_keys, member_keys = c.streams(key, batch, "env", "mask", "member")

    def draw(t):
        start = jax.vmap(lambda k: jax.random.normal(k, (OBS,)))(c.at(env_keys, t))
        another = jax.vmap(lambda k: jax.random.randint(k, (), 0, members))(c.at(member_keys, t))
        return start, another, bootstrapped.masks(mask_keys, t, members)

    def body(carry, x):
        (state, member), (start, another, learns) = carry, x if ahead else draw(x)
        q, kept = act(p, priors, state["x"], member)
        action = jnp.argmax(q, -1)
        after, reward, done = moved(state, action, start)
        data = {"obs": state["x"], "action": action, "reward": reward, "done": done.astype(jnp.float32), "learns": learns}
        return (after, jnp.where(done, another, member)), (data, kept)

    times = jnp.arange(length)
    return jax.lax.scan(body, carry, jax.vmap(draw)(times) if ahead else times, unroll=unroll)


# -- learning, of ``[T, B]``


def errors_of(q, best, old_after, data):
    """``[members, N, ACTIONS]`` to the error where it learns, else 0; ``best``: the next timestep's actions."""
    data = c.rows_of(data)
    following = c.pick(old_after, best)
    target = data["reward"] + GAMMA * (1.0 - data["done"]) * following
    chosen = jnp.take_along_axis(q, data["action"][None, :, None], -1)[..., 0]
    return data["learns"].T * (chosen - jax.lax.stop_gradient(target))


def half_squares(error):
    return 0.5 * (error**2).sum()


def relearnt(p, old, priors, data, last, layers):
    """Networks are evaluated once for all timesteps and the one behind, and shifted."""
    size, batch = data["obs"].shape[:2]
    seen = jnp.concatenate([data["obs"], last[None]]).reshape(-1, OBS)
    prior, before = SCALE * layers(priors, seen)[1], layers(old, seen)[1]
    old_after = (before + prior)[:, batch:]

    def loss(p):
        q = layers(p, seen)[1] + prior
        best = jnp.argmax(q[:, batch:], -1)
        return half_squares(errors_of(q[:, : size * batch], best, old_after, data))

    return jax.value_and_grad(loss)(p)


def written_out(p, old, priors, data, last, layers):
    """With a way back of its own."""
    size, batch = data["obs"].shape[:2]
    seen = jnp.concatenate([data["obs"], last[None]]).reshape(-1, OBS)
    kept, made = layers(p, seen)
    prior, before = SCALE * layers(priors, seen)[1], layers(old, seen)[1]
    q, rows = made + prior, size * batch
    error = errors_of(q[:, :rows], jnp.argmax(q[:, batch:], -1), (before + prior)[:, batch:], data)
    return half_squares(error), way_back(p, [x[:, :rows] for x in kept], seen[:rows], error, data)


def way_back(p, kept, seen, error, data):
    by = error[..., None] * jax.nn.one_hot(data["action"].reshape(-1), ACTIONS)
    grads, inputs = [], [jnp.broadcast_to(seen, (len(error), *seen.shape)), *kept]
    for layer, x in zip(p[::-1], inputs[::-1], strict=True):
        grads.append({"w": x.mT @ by, "b": by.sum(1)})
        by = jnp.where(x > 0, by @ layer["w"].mT, 0.0)
    return grads[::-1]


def from_acting(p, old, priors, data, end, kept, layers):
    """What all members made of observations when acting is not made again."""
    last, (size, batch) = end[0]["x"], data["obs"].shape[:2]
    flat = lambda x: jnp.moveaxis(x, 1, 0).reshape(x.shape[1], size * batch, -1)  # noqa: E731
    hidden, net, prior = jax.tree.map(flat, kept)
    q, more = net + SCALE * prior, layers(p, last)[1]
    last_prior = SCALE * layers(priors, last)[1]
    best = jnp.argmax(jnp.concatenate([q[:, batch:], more + last_prior], 1), -1)
    following = jnp.concatenate([data["obs"][1:], last[None]]).reshape(-1, OBS)
    prior_after = jnp.concatenate([SCALE * prior[:, batch:], last_prior], 1)
    error = errors_of(q, best, layers(old, following)[1] + prior_after, data)
    return half_squares(error), way_back(p, hidden, c.rows_of(data["obs"]), error, data)


def some_members(p, old, priors, data, last, learn, chunk):
    """``chunk`` members after the others."""

    def one(x):
        nets, learns = x
        return learn(*nets, data | {"learns": jnp.moveaxis(learns, 0, -1)}, last)

    parts = c.in_chunks(((p, old, priors), jnp.moveaxis(data["learns"], -1, 0)), chunk)
    loss, grads = jax.lax.map(one, parts)
    return loss.sum(), jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads)


def some_environments(p, old, priors, data, last, learn, parts):
    data = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, parts, *x.shape[2:]), 1, 0), data)
    add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, old, priors, *x)), None)  # noqa: E731
    none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
    return jax.lax.scan(add, none, (data, c.in_chunks(last, parts)))[0]


def by_hand(length, batch, act=None, layers=together, learn=relearnt, chunk=None, parts=None, **how):
    """``act``: by all members unless it is said."""
    kept_by_acting = learn is from_acting
    act = all_members(layers) if act is None else act
    if not kept_by_acting:
        learn = functools.partial(learn, layers=layers)
        if chunk is not None:
            learn = functools.partial(some_members, learn=learn, chunk=chunk)
        elif parts is not None:
            learn = functools.partial(some_environments, learn=learn, parts=parts)

    def run(p, others, carry, key):
        old, priors = others
        end, (data, kept) = acted(p, priors, carry, key, length, act, **how)
        if kept_by_acting:
            total = from_acting(p, old, priors, data, end, kept, layers)
        else:
            total = learn(p, old, priors, data, end[0]["x"])
        return *jax.tree.map(lambda x: x / (length * batch), total), end

    return run


def workload(length, batch, members, hidden, chunk=8):
    make, half = functools.partial(by_hand, length, batch), members // 2
    own, ones, joined = {"act": own_weights}, {"act": own_by_ones}, {"layers": first_joined}
    out, kept, single, column = {"learn": written_out}, {"learn": from_acting}, {"layers": one_by_one}, {"layers": in_columns}
    ahead, mapped = {"ahead": True}, {"layers": member_by_member}
    best = {**own, **out, **ahead}
    forms = {
        "rlfx": c.actor_by_rlfx(bootstrapped.program, length, batch), "plain": bootstrapped.plain(length, batch),
        "once": make(), "once, joined": make(**joined), "once, one by one": make(**single),
        "once, features first": make(**column),
        "once, drawn ahead": make(**ahead), "own weights": make(**own), "own weights, joined": make(**own, **joined),
        "own weights, features first": make(**own, **column), "own by ones": make(**ones),
        "own by ones, joined": make(**ones, **joined), "own weights, member by member": make(**own, **mapped),
        "own weights, a member": make(chunk=1, **own), f"own weights, {half} members": make(chunk=half, **own),
        f"own weights, {chunk} environments": make(parts=chunk, **own), "written out": make(**out),
        "written out, own weights": make(**own, **out), "written out, own weights, joined": make(**own, **out, **joined),
        "written out, own weights, a member": make(chunk=1, **own, **out),
        "written out, own weights, features first": make(**own, **out, **column),
        "written out, own weights, one by one": make(**own, **out, **single),
        f"written out, own weights, {chunk} environments": make(parts=chunk, **own, **out),
        "kept": make(**kept), "kept, joined": make(**kept, **joined), "kept, one by one": make(**kept, **single),
        "own weights, drawn ahead": make(**own, **ahead), "once, threefry unrolled": make(),
        "own weights, threefry unrolled": make(**own), "kept, drawn ahead, threefry unrolled": make(**kept, **ahead),
        "kept, drawn ahead, joined, threefry unrolled": make(**kept, **ahead, **joined),
        "own weights, drawn ahead, a member, threefry unrolled": make(chunk=1, **own, **ahead),
        "written out, own weights, drawn ahead, threefry unrolled": make(**best),
        "written out, own weights, drawn ahead, joined, threefry unrolled": make(**best, **joined),
        "written out, own weights, drawn ahead, one by one, threefry unrolled": make(**best, **single),
        "written out, own weights, drawn ahead, a member, threefry unrolled": make(chunk=1, **best),
        "written out, own by ones, drawn ahead, a member, threefry unrolled": make(chunk=1, **{**best, **ones}),
        "written out, own weights, drawn ahead, unrolled by 2, threefry unrolled": make(unroll=2, **best),
        f"written out, own weights, drawn ahead, {chunk} environments, threefry unrolled": make(parts=chunk, **best),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    p, *others = (params_of(k, members, hidden) for k in k[:3])
    carry = c.batch_of(reset, batch), jax.random.randint(k[3], (batch,), 0, members)
    return drawing(forms, (p, tuple(others), carry), tolerance=5e-5)
