"""Differentiable communication (DIAL, Foerster et al. 2016): recurrent Q-networks of several agents, whose noisy messages reach
the others one timestep on, and through which the others' errors flow back. They act, and learn through time from one rollout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed import agents as a

ACTIONS, MESSAGE, NOISE, GAMMA, EPSILON = a.ACTIONS, 8, 0.5, 0.97, 0.2


def params_of(key, agents, hidden):
    k = jax.random.split(key, 5)
    seen = a.SEEN + agents + ACTIONS
    sizes = {
        "seen": (seen, hidden), "heard": ((agents - 1) * MESSAGE, hidden), "x": (hidden, 3 * hidden), "h": (hidden, 3 * hidden),
        "out": (hidden, ACTIONS + MESSAGE),
    }  # fmt: skip
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def seen_by(agents, x, before):
    """A part of the state, which agent it is, and what it did before: ``[..., agents, seen]``."""
    return jnp.concatenate([a.seen_by(agents, x), jax.nn.one_hot(before, ACTIONS)], -1)


def heard(message):
    """What the others said, ``[..., agents, (agents - 1) * MESSAGE]``."""
    return jnp.concatenate([jnp.roll(message, -i, -2) for i in range(1, message.shape[-2])], -1)


def cell(p, h, seen, message):
    x = jnp.tanh(c.linear(p["seen"], seen) + c.linear(p["heard"], heard(message)))
    return gates(c.linear(p["x"], x), c.linear(p["h"], h), h)


def heads(p, h):
    """Values of actions, and what is said but for the noise."""
    made = c.linear(p["out"], h)
    return made[..., :ACTIONS], made[..., ACTIONS:]


def chosen(q, explores, random):
    return jnp.where(explores < EPSILON, random, jnp.argmax(stop_gradient(q), -1))


def draws(agents):
    """Of one key each."""
    return {
        "noise": lambda k: jax.random.normal(k, (agents, MESSAGE)), "explores": lambda k: jax.random.uniform(k, (agents,)),
        "random": lambda k: jax.random.randint(k, (agents,), 0, ACTIONS),
    }  # fmt: skip


def program(agents):
    drift = a.drift_of(agents)

    def dial(params, carry, t):
        p, target = params
        state, h, far, message, before = carry
        seen = seen_by(agents, state["x"], before)
        h, far = cell(p, h, seen, message), cell(target, far, seen, stop_gradient(message))
        q, said = heads(p, h)
        noise, explores, random = (draw(t.key_for(name)) for name, draw in draws(agents).items())
        action = chosen(q, explores, random)
        message = jax.nn.sigmoid(said + NOISE * noise)
        state, step = drift(t.key_for("env"), state, action)
        following = rlfx.series(stop_gradient(heads(target, far)[0].max(-1)))[t + 1]
        aim = step.reward + GAMMA * jnp.where(step.terminated, 0.0, following)
        h, far, message = (jnp.where(step.terminated, 0.0, x) for x in (h, far, message))
        return ((c.pick(q, action) - aim) ** 2).sum(), (state, h, far, message, action)

    return dial


# -- by hand


def forgotten(done, x):
    return jnp.where(done[:, None, None], 0.0, x)


def acting(agents, batch, key):
    """What is drawn at a timestep, and how it is acted."""
    drift, how = a.drift_of(agents), draws(agents)
    keys = dict(zip((*how, "env"), c.streams(key, batch, *how, "env"), strict=True))
    draw = lambda t: {name: jax.vmap(how[name])(c.at(keys[name], t)) for name in how}  # noqa: E731

    def moved(t, state, q, drawn):
        action = chosen(q, drawn["explores"], drawn["random"])
        state, step = jax.vmap(drift)(c.at(keys["env"], t), state, action)
        return state, step, action

    return draw, moved


def target_after(target, agents, far, state, end, before, last, message, done, hoisted=True):
    """The greatest values of the target network at ``t + 1``, ``[T, B, agents]``; and its state after the end of the rollout."""
    x = jnp.concatenate([state, end[None]])
    seen = seen_by(agents, x, jnp.concatenate([before, last[None]]))
    forget = jnp.concatenate([done, jnp.zeros_like(done[:1])])
    size = far.shape[-1]
    if hoisted:  # all inputs are known: rows of all timesteps
        made = jnp.tanh(c.linear(target["seen"], flat(seen)) + c.linear(target["heard"], flat(heard(message))))
        given = c.linear(target["x"], made).reshape(len(x), -1, 3 * size)
        after = lambda far, given: gates(given, c.linear(target["h"], far), far)  # noqa: E731
    else:
        given = seen, message
        after = lambda far, given: cell(target, far, *given)  # noqa: E731

    def body(far, x):
        found = after(far.reshape(-1, size) if hoisted else far, x[0]).reshape(far.shape)
        return forgotten(x[1], found), (far, found)

    begun, found = jax.lax.scan(body, far, (given, forget))[1]
    return heads(target, flat(found))[0].reshape(*found.shape[:-1], ACTIONS).max(-1)[1:], begun[-1]


def flat(x):
    return x.reshape(-1, x.shape[-1])


def targets(reward, done, following):
    return reward[..., None] + GAMMA * jnp.where(done[..., None], 0.0, following)


def through(length, batch, agents, target_by="with", again=False, unroll=1, ahead=False, rows=False, chunk=None):
    """Acting is differentiated itself. ``target_by``: its network runs "with" it, "after" it, or "hoisted" after it."""

    def run(p, target, carry, key):
        draw, moved = acting(agents, batch, key)
        times = jnp.arange(length)

        def loss(p):
            def body(carry, given):
                t, drawn = given
                drawn = draw(t) if drawn is None else drawn
                state, h, far, message, before = carry
                seen = seen_by(agents, state["x"], before)
                if rows:
                    x = jnp.tanh(c.linear(p["seen"], flat(seen)) + c.linear(p["heard"], flat(heard(message))))
                    after = gates(c.linear(p["x"], x), c.linear(p["h"], flat(h)), flat(h))
                    q, said = (x.reshape(*h.shape[:-1], -1) for x in heads(p, after))
                    after = after.reshape(h.shape)
                else:
                    after = cell(p, h, seen, message)
                    q, said = heads(p, after)
                beside = cell(target, far, seen, stop_gradient(message)) if target_by == "with" else far
                sent = jax.nn.sigmoid(said + NOISE * drawn["noise"])
                then, step, action = moved(t, state, q, drawn)
                kept = (forgotten(step.terminated, x) for x in (after, beside, sent))
                best = stop_gradient(heads(target, beside)[0].max(-1)) if target_by == "with" else None
                found = c.pick(q, action), best, step.reward, step.terminated
                return (then, *kept, action), (*found, state["x"], before, stop_gradient(message))

            some = jax.checkpoint(body, prevent_cse=False) if again else body
            xs = times, jax.vmap(draw)(times) if ahead else None
            if chunk is None:
                end, found = jax.lax.scan(some, carry, xs, unroll=unroll)
            else:
                block = jax.checkpoint(lambda carry, x: jax.lax.scan(some, carry, x, unroll=unroll), prevent_cse=False)
                end, found = jax.lax.scan(block, carry, c.in_chunks(xs, chunk))
                found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
            q, best, reward, done, x, before, message = found
            state, h, far, sent, action = stop_gradient(end)
            if target_by == "with":
                last = cell(target, far, seen_by(agents, state["x"], action), sent)
                following = c.shifted(best, heads(target, last)[0].max(-1))
            else:
                messages = jnp.concatenate([message, sent[None]])
                given = carry[2], x, state["x"], before, action, messages, done, target_by == "hoisted"
                following, far = target_after(target, agents, *given)
            error = q - stop_gradient(targets(reward, done, following))
            return (error**2).sum() / (length * batch), (state, h, far, sent, action)

        (found, end), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, end

    return run


def weights_after(length, batch, agents, beside=False, unroll=1, back_unroll=1, ahead=False, chunk=None):
    """Acting keeps what its derivative needs; the way back is written out, and the weights' gradients are contracted after it, of
    all timesteps, or of ``chunk``. ``beside``: the target network runs with acting, and has its first product in common."""

    def run(p, target, carry, key):
        draw, moved = acting(agents, batch, key)
        times, size = jnp.arange(length), carry[1].shape[-1]
        shaped = lambda x: x.reshape(batch, agents, -1)  # noqa: E731
        nets = (p, target) if beside else (p,)
        inner = jnp.concatenate([jnp.concatenate([net["seen"]["w"], net["heard"]["w"]]) for net in nets], -1)
        inner_bias = jnp.concatenate([net["seen"]["b"] + net["heard"]["b"] for net in nets], -1)

        def body(carry, given):
            t, drawn = given
            drawn = draw(t) if drawn is None else drawn
            state, h, far, message, before = carry
            u = flat(jnp.concatenate([seen_by(agents, state["x"], before), heard(message)], -1))
            x, *others = jnp.split(jnp.tanh(u @ inner + inner_bias), len(nets), -1)
            made, side = c.linear(p["x"], x), c.linear(p["h"], h)
            r, z = jnp.split(jax.nn.sigmoid(made[:, : 2 * size] + side[:, : 2 * size]), 2, -1)
            side = side[:, 2 * size :]
            n = jnp.tanh(made[:, 2 * size :] + r * side)
            after = n + z * (h - n)
            q, said = (shaped(x) for x in heads(p, after))
            sent = jax.nn.sigmoid(said + NOISE * drawn["noise"])
            then, step, action = moved(t, state, q, drawn)
            on = 1.0 - step.terminated.astype(jnp.float32)
            goes, best = jnp.repeat(on, agents)[:, None], None
            if beside:
                far = gates(c.linear(target["x"], others[0]), c.linear(target["h"], far), far)
                best = shaped(heads(target, far)[0]).max(-1)
                far = far * goes
            found = c.pick(q, action), action, step.reward, step.terminated, best
            told = None if beside else (state["x"], before, message)
            kept = u, x, h, r, z, n, side, sent, on
            return (then, after * goes, far, sent * on[:, None, None], action), (found, told, kept)

        state, h, far, message, before = carry
        xs = times, jax.vmap(draw)(times) if ahead else None
        begun = state, flat(h), flat(far) if beside else None, message, before
        (state, h, after, sent, last), (found, told, kept) = jax.lax.scan(body, begun, xs, unroll=unroll)
        q, action, reward, done, best = found
        if beside:
            far = shaped(after)
            end = cell(target, far, seen_by(agents, state["x"], last), sent)
            following = c.shifted(best, heads(target, end)[0].max(-1))
        else:
            messages = jnp.concatenate([told[2], sent[None]])
            following, far = target_after(target, agents, far, told[0], state["x"], told[1], last, messages, done)
        error = q - targets(reward, done, following)
        by_q = ((2.0 / (length * batch)) * error)[..., None] * jax.nn.one_hot(action, ACTIONS)
        of_q, of_said = jnp.split(p["out"]["w"].T, (ACTIONS,))
        turned = p["h"]["w"].T, p["x"]["w"].T, p["heard"]["w"].T

        def back(carry, given):
            by_h, by_message = carry
            by_q, (_, x, h, r, z, n, side, sent, on) = given
            by_said = by_message * on[:, None, None] * sent * (1.0 - sent)
            by = by_h * jnp.repeat(on, agents)[:, None] + flat(by_q) @ of_q + flat(by_said) @ of_said
            by_n = by * (1.0 - z) * (1.0 - n * n)
            by_z, by_r = by * (h - n) * z * (1.0 - z), by_n * side * r * (1.0 - r)
            of_h, of_x = jnp.concatenate([by_r, by_z, by_n * r], -1), jnp.concatenate([by_r, by_z, by_n], -1)
            by_x = (of_x @ turned[1]) * (1.0 - x * x)
            parts = jnp.split(shaped(by_x @ turned[2]), agents - 1, -1)
            by_message = sum(jnp.roll(part, i + 1, -2) for i, part in enumerate(parts))
            return (by * z + of_h @ turned[0], by_message), (flat(by_said), of_h, of_x, by_x)

        def of_block(carry, given):
            carry, slopes = jax.lax.scan(back, carry, given, reverse=True, unroll=back_unroll)
            by_said, of_h, of_x, by_x = c.rows_of(slopes)
            u, x, h, _, z, n, *_ = c.rows_of(given[1])
            pairs = {"x": (x, of_x), "h": (h, of_h), "in": (u, by_x)}
            pairs["out"] = n + z * (h - n), jnp.concatenate([c.rows_of(given[0]).reshape(-1, ACTIONS), by_said], -1)
            return carry, {name: {"w": one.T @ by, "b": by.sum(0)} for name, (one, by) in pairs.items()}

        start = jnp.zeros_like(h), jnp.zeros_like(sent)
        if chunk is None:
            grads = of_block(start, (by_q, kept))[1]
        else:
            blocks = jax.lax.scan(of_block, start, c.in_chunks((by_q, kept), chunk), reverse=True)[1]
            grads = jax.tree.map(lambda x: x.sum(0), blocks)
        both = grads.pop("in")
        ours, theirs = jnp.split(both["w"], (p["seen"]["w"].shape[0],))
        grads |= {"seen": {"w": ours, "b": both["b"]}, "heard": {"w": theirs, "b": both["b"]}}
        return (error**2).sum() / (length * batch), grads, (state, shaped(h), far, sent, last)

    return run


def workload(length, batch, agents, hidden, chunk=8):
    make = functools.partial(through, length, batch, agents)
    after = functools.partial(weights_after, length, batch, agents)
    late, hoisted, ahead = {"target_by": "after"}, {"target_by": "hoisted"}, {"ahead": True}
    rows, beside, some, less = {**hoisted, "rows": True}, {"beside": True}, {"chunk": chunk}, max(chunk // 2, 1)
    forms = {
        "rlfx": c.actor_by_rlfx(program(agents), length, batch), "plain": make(), "target after": make(**late),
        "target hoisted": make(**hoisted), "rows": make(**rows), "steps again": make(again=True, **hoisted),
        f"again in blocks of {chunk}": make(**hoisted, **some), "unrolled by 2": make(unroll=2, **hoisted),
        "drawn ahead": make(**rows, **ahead), "rows, again in blocks": make(**rows, **some),
        "weights after": after(), "weights after, drawn ahead": after(**ahead), "weights after, beside": after(**beside),
        f"weights after, blocks of {chunk}": after(**some), f"weights after, beside, blocks of {chunk}": after(**beside, **some),
        "weights after, way back unrolled by 2": after(back_unroll=2), "threefry unrolled": make(),
        "target after, threefry unrolled": make(**late), "rows, threefry unrolled": make(**rows),
        "rows, beside, threefry unrolled": make(rows=True),
        "drawn ahead, threefry unrolled": make(**ahead), "weights after, threefry unrolled": after(),
        "weights after, beside, threefry unrolled": after(**beside),
        "weights after, beside, drawn ahead, threefry unrolled": after(**beside, **ahead),
        f"weights after, blocks of {chunk}, threefry unrolled": after(**some),
        f"weights after, beside, blocks of {chunk}, threefry unrolled": after(**beside, **some),
        f"weights after, beside, blocks of {less}, threefry unrolled": after(**beside, chunk=less),
        f"weights after, beside, blocks of {chunk}, drawn ahead, threefry unrolled": after(**beside, **some, **ahead),
        f"weights after, beside, blocks of {chunk}, unrolled by 2, threefry unrolled": after(
            **beside, **some, unroll=2, back_unroll=2
        ),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    state = c.batch_of(c.drift_reset(a.size_of(agents)), batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, 60)
    h, far = (0.3 * jax.random.normal(k, (batch, agents, hidden)) for k in k[1:3])
    message = jax.random.uniform(k[3], (batch, agents, MESSAGE))
    carry = state, h, far, message, jax.random.randint(k[4], (batch, agents), 0, ACTIONS)
    return drawing(forms, (params_of(k[5], agents, hidden), params_of(k[6], agents, hidden), carry), tolerance=2e-5)
