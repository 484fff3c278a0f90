"""Recurrent PPO: an LSTM that acts and forgets where an episode ends, and learns through time from minibatches of whole
sequences, in epochs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, LAMBDA, CLIP, EPISODE, EPOCHS, MINIBATCHES = 12, 4, 0.99, 0.95, 0.2, 40, 2, 4
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)


class Sample(NamedTuple):
    obs: jax.Array
    first: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array


def params_of(key, hidden):
    k = jax.random.split(key, 5)
    sizes = {"in": (OBS, hidden), "x": (hidden, 4 * hidden), "h": (hidden, 4 * hidden), "pi": (hidden, ACTIONS), "v": (hidden, 1)}
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def gates(made, cell):
    i, f, g, o = jnp.split(made, 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return cell, jax.nn.sigmoid(o) * jnp.tanh(cell)


def embedded(p, obs):
    return jnp.tanh(c.linear(p["in"], obs))


def lstm(p, memory, obs):
    return gates(c.linear(p["x"], embedded(p, obs)) + c.linear(p["h"], memory[1]), memory[0])


def heads(p, h):
    return jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[..., 0]


def forgotten(first, memory):
    return jax.tree.map(lambda m: jnp.where(first, 0.0, m), memory)


def point_loss(log_probs, value, x, normalised):
    """Of each point, ``[...]``."""
    log_prob = c.pick(log_probs, x.action)
    ratio = jnp.exp(log_prob - x.log_prob)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised)
    target = x.advantage + x.value
    clipped = x.value + jnp.clip(value - x.value, -CLIP, CLIP)
    error = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2)
    return 0.5 * error - gain + 0.01 * (jnp.exp(log_probs) * log_probs).sum(-1)


def descended(loss, learner, minibatch):
    p, opt_state = learner
    found, grads = jax.value_and_grad(loss)(p, minibatch)
    updates, opt_state = optimizer.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), found


def act(p, carry, t):
    state, memory = carry
    memory = forgotten(state["count"] == 0, memory)
    memory = lstm(p, memory, state["x"])
    log_probs, v = heads(p, memory[1])
    action = jax.random.categorical(t.key_for("action"), log_probs)
    after, step = step_of(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    return (after, memory), Sample(state["x"], state["count"] == 0, action, log_probs[action], v, advantage)


def learn(params, memory, t):
    p, samples = params
    x = rlfx.inputs(samples)[t]
    memory = lstm(p, forgotten(x.first, memory), x.obs)
    normalised = (x.advantage - rlfx.mean(x.advantage)) / (rlfx.std(x.advantage) + 1e-8)
    return point_loss(*heads(p, memory[1]), x, normalised), memory


def by_rlfx(length, batch):
    rollout = rlfx.unroll(act, length=length, batch=batch)
    loss_fn = rlfx.compile(learn, length=length, batch=batch // MINIBATCHES)

    def loss(p, minibatch):
        samples, memory = minibatch
        return loss_fn((p, samples), jax.tree.map(lambda m: m[0], memory))[0]

    def update(learner, carry, key):
        act_key, shuffle_key = jax.random.split(key)
        after, samples = rollout(learner[0], carry, act_key)
        memory = jax.tree.map(lambda m: m[None].repeat(length, axis=0), carry[1])  # what the sequences begin with
        learner, losses = rlfx.minibatch_epochs(
            functools.partial(descended, loss), learner, (samples, memory), epochs=EPOCHS, minibatches=MINIBATCHES,
            key=shuffle_key, axis="b",
        )  # fmt: skip
        return learner, after, losses

    return update


# -- by hand: the learner's recurrence, ``h[T, N, H]`` of what is given


def stepwise(p, memory, obs, first, unroll=1):
    def body(memory, x):
        memory = lstm(p, forgotten(x[1][:, None], memory), x[0])
        return memory, memory[1]

    return jax.lax.scan(body, memory, (obs, first), unroll=unroll)[1]


def hoisted(p, memory, obs, first, unroll=1, again=False):
    """Products with observations before the loop."""

    def body(memory, x):
        cell, h = forgotten(x[1][:, None], memory)
        memory = gates(x[0] + h @ p["h"]["w"], cell)
        return memory, memory[1]

    flat = embedded(p, obs.reshape(-1, OBS)) @ p["x"]["w"] + (p["x"]["b"] + p["h"]["b"])
    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, memory, (flat.reshape(*first.shape, -1), first), unroll=unroll)[1]


def joined(p, memory, obs, first):
    """One product of what is seen and remembered."""
    both = {"w": jnp.concatenate([p["x"]["w"], p["h"]["w"]]), "b": p["x"]["b"] + p["h"]["b"]}

    def body(memory, x):
        cell, h = forgotten(x[1][:, None], memory)
        memory = gates(c.linear(both, jnp.concatenate([x[0], h], -1)), cell)
        return memory, memory[1]

    return jax.lax.scan(body, memory, (embedded(p, obs), first))[1]


def weights_after(p, memory, obs, first, unroll=1):
    """The loop backwards gives the gradients of sums, written out; that of weights is of all timesteps at once."""
    goes_on = 1.0 - first.astype(jnp.float32)[..., None]

    def cell_of(made, cell):
        i, f, g, o = jnp.split(made, 4, -1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f + 1.0), jnp.tanh(g), jax.nn.sigmoid(o)
        after = f * cell + i * g
        return after, jnp.tanh(after), (i, f, g, o)

    def forwards(w, x):
        def body(memory, x):
            cell, h = memory[0] * x[1], memory[1] * x[1]
            after, squashed, kept = cell_of(x[0] + h @ w, cell)
            return (after, kept[3] * squashed), (kept[3] * squashed, (cell, h, squashed, *kept))

        hs, kept = jax.lax.scan(body, memory, (x, goes_on), unroll=unroll)[1]
        return hs, (w, kept)

    @jax.custom_vjp
    def run(w, x):
        return forwards(w, x)[0]

    def backwards(residuals, by):
        w, kept = residuals
        turned = w.T

        def body(carry, x):
            (by_cell, by_h), (by, on, (cell, _, squashed, i, f, g, o)) = carry, x
            by_h = by_h + by
            by_cell = by_cell + by_h * o * (1.0 - squashed**2)
            by_i, by_f, by_g, by_o = by_cell * g, by_cell * cell, by_cell * i, by_h * squashed
            made = jnp.concatenate([by_i * i * (1 - i), by_f * f * (1 - f), by_g * (1 - g**2), by_o * o * (1 - o)], -1)
            return (by_cell * f * on, (made @ turned) * on), made

        start = jax.tree.map(jnp.zeros_like, memory)
        made = jax.lax.scan(body, start, (by, goes_on, kept), reverse=True, unroll=unroll)[1]
        return c.rows_of(kept[1]).T @ c.rows_of(made), made

    run.defvjp(forwards, backwards)
    x = embedded(p, obs.reshape(-1, OBS)) @ p["x"]["w"] + (p["x"]["b"] + p["h"]["b"])
    return run(p["h"]["w"], x.reshape(*first.shape, -1))


def by_hand(length, batch, recurrence=stepwise, gather="in turn", ahead=False, unroll=1, flat=True):
    """``gather``: minibatches in turn, or all of an epoch at once; ``ahead``: the actor's random numbers come before its loop."""

    def rollout(p, carry, key):
        keys = c.streams(key, batch, "action", "env")
        gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))
        # The environment draws in its step; its keys are made before.
        draw = lambda t: (gumbel(c.at(keys[0], t)), c.at(keys[1], t))  # noqa: E731

        def body(carry, given):
            noise, env_keys = given if ahead else draw(given)
            state, memory = carry
            first = state["count"] == 0
            memory = lstm(p, forgotten(first[:, None], memory), state["x"])
            log_probs, v = heads(p, memory[1])
            action = jnp.argmax(log_probs + noise, -1)
            after, step = jax.vmap(step_of)(env_keys, state, action)
            told = Sample(state["x"], first, action, c.pick(log_probs, action), v, step.reward)
            return (after, memory), (told, step.terminated)

        times = jnp.arange(length)
        after, (told, done) = jax.lax.scan(body, carry, jax.vmap(draw)(times) if ahead else times, unroll=unroll)
        state, memory = after
        last = heads(p, lstm(p, forgotten((state["count"] == 0)[:, None], memory), state["x"])[1])[1]
        return after, told._replace(advantage=c.gae(told.value, last, told.advantage, done, GAMMA, LAMBDA))

    def loss(p, minibatch):
        x, memory = minibatch
        normalised = (x.advantage - x.advantage.mean()) / (x.advantage.std() + 1e-8)
        h = recurrence(p, memory, x.obs, x.first)
        h, x, normalised = c.rows_of((h, x, normalised)) if flat else (h, x, normalised)
        return point_loss(*heads(p, h), x, normalised).mean()

    def update(learner, carry, key):
        act_key, shuffle_key = jax.random.split(key)
        after, samples = rollout(learner[0], carry, act_key)
        one = functools.partial(descended, loss)
        some = lambda i: (jax.tree.map(lambda x: x[:, i], samples), jax.tree.map(lambda m: m[i], carry[1]))  # noqa: E731

        def epoch(learner, key):
            order = rlfx.shuffle(key, batch).reshape(MINIBATCHES, -1)
            if gather == "in turn":
                return jax.lax.scan(lambda learner, i: one(learner, some(i)), learner, order)
            return jax.lax.scan(one, learner, jax.vmap(some)(order))

        learner, losses = jax.lax.scan(epoch, learner, jax.random.split(shuffle_key, EPOCHS))
        return learner, after, losses

    return update


def workload(length, batch, hidden):
    make = lambda recurrence=stepwise, **how: by_hand(length, batch, recurrence, **how)  # noqa: E731
    cut = lambda recurrence, **how: functools.partial(recurrence, **how)  # noqa: E731
    ahead, four, after = {"ahead": True}, {"unroll": 4}, weights_after
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(gather="at once", flat=False), "in turn": make(),
        "rows": make(gather="at once"),
        "hoisted": make(hoisted), "hoisted, not flattened": make(hoisted, flat=False), "joined": make(joined),
        "hoisted, again": make(cut(hoisted, again=True)), "hoisted, drawn ahead": make(hoisted, **ahead),
        "hoisted, unrolled by 4": make(cut(hoisted, **four), **four), "weights after": make(after),
        "weights after, drawn ahead": make(after, **ahead), "weights after, unrolled by 2": make(cut(after, unroll=2)),
        "weights after, unrolled by 4": make(cut(after, **four)),
        "hoisted, threefry unrolled": make(hoisted), "weights after, threefry unrolled": make(after),
        "weights after, drawn ahead, threefry unrolled": make(after, **ahead),
        "weights after, drawn ahead, not flattened, threefry unrolled": make(after, **ahead, flat=False),
        "weights after, drawn ahead, gathered at once, threefry unrolled": make(after, **ahead, gather="at once"),
        "weights after, the actor unrolled by 4, threefry unrolled": make(after, **ahead, **four),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[1], (batch,), 0, EPISODE)
    memory = tuple(0.3 * jax.random.normal(x, (batch, hidden)) for x in jax.random.split(k[2]))
    p = params_of(k[0], hidden)
    given = (p, optimizer.init(p)), (state, memory)
    return drawing(forms, given, compared=lambda found: (found[0][0], *found[1:]), tolerance=1e-5)
