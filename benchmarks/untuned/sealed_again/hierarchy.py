"""FeUdal networks: a manager sets directions for some timesteps ahead, a worker is paid for going there; two LSTMs that act."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

OBS, ACTIONS, LATENT, EMBEDDED, HORIZON = 8, 4, 16, 8, 5
LAMBDA, FAR, NEAR, PAY = 0.95, 0.99, 0.95, 0.5
drift = c.drift_step(OBS, 40)


def params_of(hidden):
    k = jax.random.split(jax.random.key(0), 9)
    sizes = {
        "see": (OBS, hidden), "space": (hidden, LATENT), "manager": (LATENT + hidden, 4 * hidden),
        "worker": (2 * hidden, 4 * hidden), "goal": (hidden, LATENT), "options": (hidden, ACTIONS * EMBEDDED),
        "far": (hidden, 1), "near": (hidden, 1),
    }  # fmt: skip
    layers = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=False)}
    return layers | {"phi": jax.random.normal(k[8], (LATENT, EMBEDDED)) / 4.0}


def lstm_gates(gates, memory):
    i, f, g, o = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(f + 1.0) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def lstm(p, x, state):
    h, memory = state
    return lstm_gates(c.linear(p, jnp.concatenate([x, h], -1)), memory)


def cores(p, x, manager, worker):
    """What is seen, in the manager's space, and both states after it."""
    z = jnp.tanh(c.linear(p["see"], x))
    s = jnp.tanh(c.linear(p["space"], z))
    return s, lstm(p["manager"], s, manager), lstm(p["worker"], z, worker)


def goal_of(p, h):
    goal = c.linear(p["goal"], h)
    return goal * jax.lax.rsqrt((goal**2).sum(-1, keepdims=True) + 1e-6)


def logits_of(p, h, pooled):
    """``pooled``: the goals of the last timesteps, summed."""
    options = c.linear(p["options"], h)
    return (options.reshape(*options.shape[:-1], ACTIONS, EMBEDDED) @ (pooled @ p["phi"])[..., None])[..., 0]


def cosine(a, b):
    return (a * b).sum(-1) * jax.lax.rsqrt((a**2).sum(-1) * (b**2).sum(-1) + 1e-6)


def program(p, carry, t):
    state, manager, worker = carry
    s, manager, worker = cores(p, state["x"], manager, worker)
    goal = goal_of(p, manager[0])
    pooled = rlfx.series(stop_gradient(goal))[t - HORIZON + 1 : t + 1].sum(0)
    logits = logits_of(p, worker[0], pooled)
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)

    place = stop_gradient(s)
    before, aimed = rlfx.series((place, stop_gradient(goal)))[t - HORIZON : t]
    pay = cosine(place - before, aimed).sum() / HORIZON
    later = rlfx.series(place)[rlfx.minimum(t + HORIZON, t.length - 1)]
    went = cosine(later - place, goal)

    far, near = (c.linear(p["far"], manager[0])[0], c.linear(p["near"], worker[0])[0])
    far_values, near_values = rlfx.series(far), rlfx.series(near)
    managed = stop_gradient(rlfx.gae(step, far_values, far_values[t + 1], gamma=FAR, lam=LAMBDA))
    paid = step._replace(reward=step.reward + PAY * pay)
    worked = stop_gradient(rlfx.gae(paid, near_values, near_values[t + 1], gamma=NEAR, lam=LAMBDA))

    log_prob = jax.nn.log_softmax(logits)[action]
    loss = c.actor_critic_loss(logits, near, log_prob, worked, worked + stop_gradient(near))
    loss += 0.5 * (far - managed - stop_gradient(far)) ** 2 - managed * went
    again = lambda x: jnp.where(step.terminated, 0.0, x)  # noqa: E731
    return loss, (state, jax.tree.map(again, manager), jax.tree.map(again, worker))


# -- by hand: the learner's states ``h[T, B, ...]`` of manager and worker, from what was seen


def reset(done, states):
    return jax.tree.map(lambda x: jnp.where(done[:, None], 0.0, x), states)


def body_of(p):
    def body(states, given):
        x, done = given
        s, *states = cores(p, x, *states)
        return reset(done, states), (s, states[0][0], states[1][0])

    return body


def together(p, x, done, starts, acted):
    """The usual loop."""
    return jax.lax.scan(body_of(p), starts, (x, done))[1]


def in_parts(p, x, done, starts, acted, chunk):
    """The usual loop, run again from the beginning of each part."""
    part = jax.checkpoint(lambda states, given: jax.lax.scan(body_of(p), states, given), prevent_cse=False)
    return c.rows_of(jax.lax.scan(part, starts, c.in_chunks((x, done), chunk))[1])


def before_loop(p, x):
    """For ``x[T, B, OBS]``: places, what the LSTMs are given, their products with that, and their weights of states."""
    z = jnp.tanh(c.linear(p["see"], c.rows_of(x)))
    s = jnp.tanh(c.linear(p["space"], z))
    parts = (p["manager"], s, LATENT), (p["worker"], z, z.shape[-1])
    pre = [(g @ q["w"][:n] + q["b"]).reshape(*x.shape[:2], -1) for q, g, n in parts]
    return s.reshape(*x.shape[:2], -1), (s, z), pre, [q["w"][n:] for q, _, n in parts]


def hoisted(p, x, done, starts, acted):
    """All products with what is seen are outside of the loop."""
    s, _, pre, w = before_loop(p, x)
    return s, *recurred(w, pre, done, starts)[-1]


def recurred(w, pre, done, starts):
    """Of LSTMs of recurrent weights ``w``, products with inputs ``pre``: all gates, memories before them, and states."""

    def body(states, given):
        pre, done = given
        gates = [x + h @ w for x, (h, _), w in zip(pre, states, w, strict=True)]
        after = [lstm_gates(g, memory) for g, (_, memory) in zip(gates, states, strict=True)]
        return reset(done, after), (gates, states, [h for h, _ in after])

    return jax.lax.scan(body, starts, (pre, done))[1]


@jax.custom_vjp
def replayed(w, pre, done, gates, before, hs):
    """``hs``, which the loop made; the gradient goes to ``pre``, whose products include the recurrent ones."""
    return hs


def replayed_backwards(residuals, by):
    weights, done, gates, before = residuals

    def body(after, x):
        done, *cells = x
        found, nexts = [], []
        for derivatives, gates, (_, memory), given, w in zip(after, *cells, weights, strict=True):
            dh, dmemory = (jnp.where(done[:, None], 0.0, d) for d in derivatives)
            dgates, dmemory = jax.vjp(lstm_gates, gates, memory)[1]((dh + given, dmemory))
            found.append(dgates)
            nexts.append((dgates @ w.T, dmemory))
        return nexts, found

    start = jax.tree.map(lambda x: jnp.zeros_like(x[0]), before)
    dpre = jax.lax.scan(body, start, (done, gates, before, by), reverse=True)[1]
    return None, dpre, None, None, None, None


replayed.defvjp(lambda w, pre, done, gates, before, hs: (hs, (w, done, gates, before)), replayed_backwards)


def weights_after(p, x, done, starts, acted):
    """The gradient of all weights is taken after the loop backwards; ``acted``: what the acting loop has computed of it."""
    s, given, pre, w = before_loop(p, x)
    pre, w = stop_gradient((pre, w))
    acted = recurred(w, pre, done, starts) if acted is None else acted
    gates, before, hs = stop_gradient(acted)
    pre = [
        c.linear(q, jnp.concatenate([g, c.rows_of(h)], -1)).reshape(*x.shape[:2], -1)
        for g, q, (h, _) in zip(given, (p["manager"], p["worker"]), before, strict=True)
    ]
    return s, *replayed(w, pre, done, gates, before, hs)


def by_hand(length, batch, learner=together, onepass=False, keeps=False, ahead=False, stacked=False):
    """``onepass``: the acting loop itself is differentiated; ``keeps``: it keeps gates and states for the learner; ``ahead``:
    random numbers are drawn before the loop; ``stacked``: pairs of timesteps all at once, else one offset after the other."""

    def run(p, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(action_keys, t))  # noqa: E731
        times = jnp.arange(length)

        def acting(p, carry):
            def body(carry, given):
                (state, *states, ring), (t, gumbel) = carry, given
                x = state["x"]
                if keeps:
                    z = jnp.tanh(c.linear(p["see"], x))
                    s = jnp.tanh(c.linear(p["space"], z))
                    gates = [
                        c.linear(q, jnp.concatenate([g, h], -1))
                        for q, g, (h, _) in zip((p["manager"], p["worker"]), (s, z), states, strict=True)
                    ]
                    before = states
                    states = [lstm_gates(g, memory) for g, (_, memory) in zip(gates, states, strict=True)]
                    made = gates, before, [h for h, _ in states]
                else:
                    s, *states = cores(p, x, *states)
                    made = (s, states[0][0], states[1][0]) if onepass else None
                goal = stop_gradient(goal_of(p, states[0][0]))
                ring = jnp.concatenate([ring[1:], goal[None]])
                pooled = ring.sum(0)
                logits = stop_gradient(logits_of(p, states[1][0], pooled))
                action = jnp.argmax(logits + (draw(t) if gumbel is None else gumbel), -1)
                after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
                out = x, pooled, action, step.reward, step.terminated, made
                return (after, *reset(step.terminated, states), ring), out

            start = *carry, jnp.zeros((HORIZON, batch, LATENT))
            (after, *states, _), kept = jax.lax.scan(body, start, (times, jax.vmap(draw)(times) if ahead else None))
            return (after, *states), kept

        def last_values(after):
            _, manager, worker = cores(p, after[0]["x"], *after[1:])
            return c.linear(p["far"], manager[0])[..., 0], c.linear(p["near"], worker[0])[..., 0]

        def pays(place, goal):
            if stacked:
                padded = [jnp.concatenate([jnp.zeros((HORIZON, *x.shape[1:])), x]) for x in (place, goal)]
                back = jnp.arange(length)[:, None] + jnp.arange(HORIZON)
                return cosine(place[:, None] - padded[0][back], padded[1][back]).sum(1) / HORIZON
            total = jnp.zeros((length, batch))
            for i in range(1, min(HORIZON, length - 1) + 1):
                total = total.at[i:].add(cosine(place[i:] - place[:-i], goal[:-i]))
            return total / HORIZON

        def losses(p, s, manager, worker, kept, last):
            _, pooled, action, reward, done, _ = kept
            goal, logits = goal_of(p, manager), logits_of(p, worker, pooled)
            far, near = c.linear(p["far"], manager)[..., 0], c.linear(p["near"], worker)[..., 0]
            place = stop_gradient(s)
            pay = pays(place, stop_gradient(goal))
            later = jnp.concatenate([place[HORIZON:], jnp.broadcast_to(place[-1], (length, *place.shape[1:]))])[:length]
            managed = stop_gradient(c.gae(far, last[0], reward, done, FAR, LAMBDA))
            worked = stop_gradient(c.gae(near, last[1], reward + PAY * pay, done, NEAR, LAMBDA))
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            loss = c.actor_critic_loss(logits, near, log_prob, worked, worked + stop_gradient(near))
            loss += 0.5 * (far - managed - stop_gradient(far)) ** 2 - managed * cosine(later - place, goal)
            return loss.mean()

        if onepass:

            def whole(p):
                after, kept = acting(p, carry)
                return losses(p, *kept[-1], kept, stop_gradient(last_values(after))), after

            (found, after), grads = jax.value_and_grad(whole, has_aux=True)(p)
            return found, grads, after

        after, kept = acting(p, carry)
        last = last_values(after)

        def loss(p):
            return losses(p, *learner(p, kept[0], kept[4], list(carry[1:]), kept[-1]), kept, last)

        return *jax.value_and_grad(loss)(p), after

    return run


def workload(length, batch, hidden, chunk=8):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": c.by_rlfx(program, length, batch), "plain": make(), "windows stacked": make(stacked=True),
        "one pass": make(onepass=True), "one pass, drawn ahead": make(onepass=True, ahead=True),
        f"parts of {chunk}": make(learner=functools.partial(in_parts, chunk=chunk)), "inputs hoisted": make(learner=hoisted),
        "weights after": make(learner=weights_after), "weights after, gates kept": make(learner=weights_after, keeps=True),
        "weights after, gates kept, drawn ahead": make(learner=weights_after, keeps=True, ahead=True),
        "weights after, gates kept, windows stacked": make(learner=weights_after, keeps=True, stacked=True),
        "weights after, gates kept, threefry unrolled": make(learner=weights_after, keeps=True),
        "weights after, gates kept, drawn ahead, threefry unrolled": make(learner=weights_after, keeps=True, ahead=True),
    }  # fmt: skip
    zeros = jnp.zeros((batch, hidden))
    given = params_of(hidden), (c.batch_of(c.drift_reset(OBS), batch), (zeros, zeros), (zeros, zeros))
    unrolled = *given, jax.random.key(2, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, tolerance=5e-6)
