"""Agents that talk (TarMAC, Das et al. 2019): each has a GRU, whose state sends a message with a key at every timestep, and reads
those of all by attention. They share their weights and one critic, act, and learn by A2C through time, from one rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing

SEEN, SHIFT, ACTIONS, KEY, MESSAGE, GAMMA, LAMBDA, EPISODE = 8, 4, 4, 8, 16, 0.99, 0.95, 50


def size_of(agents):
    return SHIFT * agents


def drift_of(agents):
    return c.drift_step(size_of(agents), EPISODE)


def params_of(hidden):
    sizes = {
        "in": (SEEN, hidden), "x": (hidden + MESSAGE, 3 * hidden), "h": (hidden, 3 * hidden), "query": (hidden, KEY),
        "key": (hidden, KEY), "message": (hidden, MESSAGE), "pi": (hidden, ACTIONS), "v": (hidden, 1),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), len(sizes))
    p = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}
    # A bias of keys would leave every softmax as it is.
    return p | {"h": p["h"] | {"b": 0.1 * jax.random.normal(k[0], p["h"]["b"].shape)}, "key": {"w": p["key"]["w"]}}


def seen_by(agents, x):
    """What each agent sees of a state ``x[..., n]``, ``[..., agents, SEEN]``."""
    return jnp.stack([jnp.roll(x, -SHIFT * i, -1)[..., :SEEN] for i in range(agents)], -2)


def heads(p, h):
    """Logits of each agent, and the value of their mean state."""
    return c.linear(p["pi"], h), c.linear(p["v"], h.mean(-2))[..., 0]


def cell(p, h, obs):
    """The states ``[..., agents, hidden]`` that follow."""
    query, key, message = c.linear(p["query"], h), h @ p["key"]["w"], c.linear(p["message"], h)
    scores = jnp.einsum("...ik,...jk->...ij", query, key) / KEY**0.5
    read = jax.nn.softmax(scores) @ message
    x = jnp.concatenate([jnp.tanh(c.linear(p["in"], obs)), read], -1)
    return gates(c.linear(p["x"], x), c.linear(p["h"], h), h)


def team_loss(logits, v, action, advantage, target):
    """``logits[..., agents, ACTIONS]``, ``action[..., agents]``, and the rest ``[...]``."""
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, (-2, -1))
    return 0.5 * (v - target) ** 2 - c.pick(log_p, action).sum(-1) * advantage - 0.01 * entropy


def program(agents):
    drift = drift_of(agents)

    def tarmac(p, carry, t):
        state, h = carry
        h = cell(p, h, seen_by(agents, state["x"]))
        logits, v = heads(p, h)
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = drift(t.key_for("env"), state, action)
        value = rlfx.series(v)
        advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
        loss = team_loss(logits, v, action, advantage, advantage + stop_gradient(v))
        return loss, (state, jnp.where(step.terminated, 0.0, h))

    return tarmac


# -- by hand: the cell, of ``h[..., agents, hidden]`` and what ``before`` made of the observation


def before(p, obs):
    """The products with the observation, which no recurrence needs."""
    hidden = p["in"]["b"].shape[0]
    return jnp.tanh(c.linear(p["in"], obs)) @ p["x"]["w"][:hidden] + p["x"]["b"]


def by_products(query, key, message):
    return jax.nn.softmax(jnp.einsum("...ik,...jk->...ij", query, key) / KEY**0.5) @ message


def by_sums(query, key, message):
    """Sums of products: matrices of as many rows as agents are too small."""
    shares = jax.nn.softmax((query[..., :, None, :] * key[..., None, :, :]).sum(-1) / KEY**0.5)
    return (shares[..., None] * message[..., None, :, :]).sum(-2)


def one_by_one(query, key, message):
    """Agent after agent, each a row of sums."""
    agents = query.shape[-2]
    scores = [(query * key[..., j, None, :]).sum(-1, keepdims=True) / KEY**0.5 for j in range(agents)]
    most = jnp.concatenate(scores, -1).max(-1, keepdims=True)
    shares = [jnp.exp(s - stop_gradient(most)) for s in scores]
    return sum(s * message[..., j, None, :] for j, s in enumerate(shares)) / sum(shares)


def joined_weights(p):
    """All products with the state as one, and what reads messages."""
    key = p["key"] | {"b": jnp.zeros(KEY)}
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), p["query"], key, p["message"], p["h"])
    return first, p["x"]["w"][p["in"]["b"].shape[0] :]


def joined(weights, h, made, attend=by_products, probe=None):
    first, reads = weights
    hidden = h.shape[-1]
    # Rows of all agents are one matrix.
    both = (h.reshape(-1, hidden) @ first["w"] + first["b"]).reshape(*h.shape[:-1], -1)
    both = both if probe is None else both + probe
    query, key, message, hh = jnp.split(both, (KEY, 2 * KEY, 2 * KEY + MESSAGE), -1)
    read = attend(query, key, message)
    made = made + (read.reshape(-1, MESSAGE) @ reads).reshape(*h.shape[:-1], -1)
    return gates(made, hh, h), read


def folded_weights(p):
    """Queries with keys, and messages with what reads them, are products of two matrices: each is multiplied before."""
    reads = joined_weights(p)[1]
    keys = p["key"]["w"].T
    asked = {"w": p["query"]["w"] @ keys, "b": p["query"]["b"] @ keys}
    sent = {"w": p["message"]["w"] @ reads, "b": p["message"]["b"] @ reads}
    return jax.tree.map(lambda *w: jnp.concatenate(w, -1), asked, sent, p["h"])


def folded(weights, h, made):
    hidden = h.shape[-1]
    both = (h.reshape(-1, hidden) @ weights["w"] + weights["b"]).reshape(*h.shape[:-1], -1)
    asked, sent, hh = jnp.split(both, (hidden, 4 * hidden), -1)
    return gates(made + by_products(asked, h, sent), hh, h)


# -- by hand: the states ``[T, B, agents, hidden]`` of stored observations


def restarted(done, h):
    return jnp.where(done[:, None, None], 0.0, h)


def stepwise(p, h, xs, unroll=1):
    def body(h, x):
        h = cell(p, h, x[0])
        return restarted(x[1], h), h

    return jax.lax.scan(body, h, xs, unroll=unroll)


def hoisted(attend=by_products, fold=False):
    def run(p, h, xs, unroll=1):
        obs, done = xs
        weights = folded_weights(p) if fold else joined_weights(p)

        def body(h, x):
            h = folded(weights, h, x[0]) if fold else joined(weights, h, x[0], attend)[0]
            return restarted(x[1], h), h

        return jax.lax.scan(body, h, (before(p, obs), done), unroll=unroll)

    return run


def features_first(p, h, xs, unroll=1):
    """Environments are innermost, ``h[hidden, agents, B]``."""
    obs, done = xs
    hidden, agents, batch = h.shape[-1], h.shape[-2], h.shape[0]
    first, reads = joined_weights(p)
    made = jnp.moveaxis(before(p, obs), 1, -1).swapaxes(1, 2)  # [T, 3 * hidden, agents, B]

    def gated(x, hh, h):
        (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3), jnp.split(hh, 3)
        z = jax.nn.sigmoid(xz + hz)
        return z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)

    def body(h, x):
        made, done = x
        both = (first["w"].T @ h.reshape(hidden, -1) + first["b"][:, None]).reshape(-1, agents, batch)
        query, key, message, hh = jnp.split(both, (KEY, 2 * KEY, 2 * KEY + MESSAGE))
        shares = jax.nn.softmax((query[:, :, None] * key[:, None]).sum(0) / KEY**0.5, axis=1)
        read = (shares * message[:, None]).sum(2)
        made = made + (reads.T @ read.reshape(MESSAGE, -1)).reshape(-1, agents, batch)
        h = gated(made, hh, h)
        return jnp.where(done, 0.0, h), h

    h, hs = jax.lax.scan(body, h.transpose(2, 1, 0), (made, done), unroll=unroll)
    return h.transpose(2, 1, 0), hs.transpose(0, 3, 2, 1)


def checkpointed(recurrence, chunk):
    def run(p, h, xs, unroll=1):
        part = jax.checkpoint(lambda h, x: recurrence(p, h, x, unroll), prevent_cse=False)
        h, hs = jax.lax.scan(part, h, c.in_chunks(xs, chunk))
        return h, hs.reshape(-1, *hs.shape[2:])

    return run


def total(p, hs, x, count):
    action, advantage, target = x
    return team_loss(*heads(p, hs), action, advantage, target).sum() / count


def sent_back(p, count, xs, befores, hs, x, attend, after_loop):
    """The gradient from the states that acting kept: what heads send back is known at once, and goes back through a loop in which
    each timestep is computed again. ``after_loop``: weights learn of all timesteps at once."""
    obs, done = xs
    found, (grads, dhs) = jax.value_and_grad(lambda p, hs: total(p, hs, x, count), (0, 1))(p, hs)
    made, made_back = jax.vjp(lambda p: before(p, obs), p)
    weights, weights_back = jax.vjp(joined_weights, p)
    outputs = len(weights[0]["b"])

    def body(carry, x):
        dh, sums = carry
        h, made, done, more = x
        dh = restarted(done, dh) + more
        if after_loop:
            probe = jnp.zeros((*h.shape[:-1], outputs))
            of = lambda h, made, probe: joined(weights, h, made, attend, probe)  # noqa: E731
            _, back, read = jax.vjp(of, h, made, probe, has_aux=True)
            dh, *by = back(dh)
            return (dh, sums), (*by, read)
        _, back = jax.vjp(lambda w, h, made: joined(w, h, made, attend)[0], weights, h, made)
        dw, dh, dmade = back(dh)
        return (dh, jax.tree.map(jnp.add, sums, dw)), dmade

    start = jnp.zeros_like(hs[0]), None if after_loop else jax.tree.map(jnp.zeros_like, weights)
    (_, sums), ys = jax.lax.scan(body, start, (befores, made, done, dhs), reverse=True)
    if after_loop:
        across = lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])  # noqa: E731
        dmade, dboth, read = ys
        sums = {"w": across(befores, dboth), "b": dboth.sum((0, 1, 2))}, across(read, dmade)
    else:
        dmade = ys
    return found, jax.tree.map(lambda *g: sum(g), grads, made_back(dmade)[0], weights_back(sums)[0])


def by_hand(length, batch, agents, learning=None, acting=stepwise, attend=by_products, ways="twice", **how):
    """``ways``: the states are computed "twice", by acting and by learning; or the gradient is taken "through acting"; or it is
    "sent back" from acting's states, with weights' gradients in the loop, or "after the loop". ``envs``: environments of a block
    that learns; ``ahead``: random numbers of actions are drawn before the loop; ``unroll``: timesteps of the learner's loop."""
    drift, count = drift_of(agents), length * batch
    envs, ahead, unroll = how.get("envs"), how.get("ahead"), how.get("unroll", 1)
    learning = learning or hoisted(attend)

    def run(p, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (agents, ACTIONS)))(c.at(action_keys, t))  # noqa: E731

        def rollout(p):
            weights = None if acting is stepwise else joined_weights(p)

            def moved(h, x):
                if acting is stepwise:
                    return cell(p, h, seen_by(agents, x))
                return joined(weights, h, before(p, seen_by(agents, x)), attend)[0]

            def body(carry, given):
                t, gumbel = given
                state, old = carry
                h = moved(old, state["x"])
                logits, v = heads(p, h)
                action = jnp.argmax(stop_gradient(logits) + (draw(t) if gumbel is None else gumbel), -1)
                after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
                kept = restarted(step.terminated, h)
                return (after, kept), (state["x"], action, v, h, old, step.reward, step.terminated)

            times = jnp.arange(length)
            xs = times, jax.vmap(draw)(times) if ahead else None
            after, (x, action, v, hs, befores, reward, done) = jax.lax.scan(body, carry, xs)
            fixed = stop_gradient(v)
            last = stop_gradient(heads(p, moved(after[1], after[0]["x"]))[1])
            gained = c.gae(fixed, last, reward, done, GAMMA, LAMBDA)
            return after, (seen_by(agents, x), done), (action, gained, gained + fixed), hs, befores

        if ways == "through acting":

            def loss(p):
                after, _, x, hs, _ = rollout(p)
                return total(p, hs, x, count), after

            (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
            return found, grads, after

        after, xs, x, hs, befores = rollout(p)
        if ways != "twice":
            return *sent_back(p, count, xs, befores, hs, x, attend, ways == "after the loop"), after

        def again(p, part):
            (xs, x), h = part
            return total(p, learning(p, h, xs, unroll)[1], x, count)

        return *c.gradient_by_environments(again, envs)(p, (xs, x), carry[1]), after

    return run


def workload(length, batch, agents, hidden, chunk=8, envs=8):
    make = lambda learning=None, **how: by_hand(length, batch, agents, learning, **how)  # noqa: E731
    fast = {"acting": joined}
    sums, small = fast | {"attend": by_sums}, fast | {"attend": one_by_one}
    through, back, late = ({"ways": w} for w in ("through acting", "sent back", "after the loop"))
    forms = {
        "rlfx": c.by_rlfx(program(agents), length, batch), "plain": make(stepwise), "hoisted": make(),
        "joined": make(**fast), "sums of products": make(**sums), "agents one by one": make(**small),
        "folded": make(hoisted(fold=True), **fast), "features first": make(features_first, **sums),
        "joined, unrolled by 4": make(**fast, unroll=4), "features first, unrolled by 2": make(features_first, **sums, unroll=2),
        f"again by {chunk}": make(checkpointed(stepwise, chunk)),
        f"joined, again by {chunk}": make(checkpointed(hoisted(by_sums), chunk), **sums),
        f"joined, {envs} environments": make(**sums, envs=envs),
        "through acting": make(**through), "joined, through acting": make(**sums, **through, ahead=True),
        "sent back": make(**sums, **back), "sent back, weights after the loop": make(**sums, **late),
        "agents one by one, sent back, weights after the loop": make(**small, **late, ahead=True),
        "joined, threefry unrolled": make(**sums, ahead=True),
        "joined, through acting, threefry unrolled": make(**sums, **through, ahead=True),
        "sent back, weights after the loop, threefry unrolled": make(**sums, **late, ahead=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(1), 2)
    state = c.batch_of(c.drift_reset(size_of(agents)), batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    carry = state, 0.3 * jax.random.normal(k[1], (batch, agents, hidden))
    given = params_of(hidden), carry
    return drawing(forms, given, tolerance=2e-5)
