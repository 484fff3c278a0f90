"""BYOL-Explore by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_nineteenth import foresight as given
from benchmarks.untuned.sealed_nineteenth.foresight import (
    ACTIONS,
    AHEAD,
    CODE,
    GAMMA,
    LAMBDA,
    ahead_of,
    ended,
    foresights,
    heads,
    normalised,
    params_of,
    reset,
    rewards,
    step_of,
)  # fmt: skip

# -- the cell: what it keeps for its derivative, and that


class Kept(NamedTuple):
    r: Any
    z: Any
    n: Any
    hn: Any
    h: Any  # before


def opened(x, hh, h):
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, -1), jnp.split(hh, 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return z * h + (1.0 - z) * n, Kept(r, z, n, hn, h)


def back_through(kept, by):
    """Cotangents of the product with the input, of that with the state, and of the state beside."""
    r, z, n, hn, h = kept
    by_z = by * (h - n) * z * (1.0 - z)
    by_n = by * (1.0 - z) * (1.0 - n**2)
    by_r = by_n * hn * r * (1.0 - r)
    return jnp.concatenate([by_r, by_z, by_n], -1), jnp.concatenate([by_r, by_z, by_n * r], -1), by * z


@jax.custom_vjp
def recalled(p, made, hs, kept, done):
    """The states ``hs[T, B, hidden]`` that were, whose derivative comes by what was kept; weights have theirs after the loop."""
    return hs


def recalled_back(given_, by):
    w, kept, done = given_

    def body(by_h, x):
        kept, by, done = x
        by_x, by_hh, beside = back_through(kept, by + ended(by_h, done))
        return beside + by_hh @ w.T, (by_x, by_hh)

    _, (by_x, by_hh) = jax.lax.scan(body, jnp.zeros_like(by[0]), (kept, by, done), reverse=True)
    rows = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    by_p = {"w": rows(kept.h).T @ rows(by_hh), "b": rows(by_hh).sum(0)}
    return by_p, by_x, None, None, None


recalled.defvjp(lambda p, made, hs, kept, done: (hs, (p["w"], kept, done)), recalled_back)


def before(p, obs, last):
    """The cell's products with what is seen and with the last action, which no recurrence needs."""
    seen = c.mlp(p["see"], obs)
    return seen @ p["x"]["w"][:CODE] + last @ p["x"]["w"][CODE:] + p["x"]["b"]


def one_by_one(p, h, made, done):
    def body(h, x):
        made, done = x
        h = gates(made, c.linear(p["h"], h), h)
        return ended(h, done), h

    return jax.lax.scan(body, h, (made, done))[1]


def weights_after(p, h, made, done):
    def body(h, x):
        made, done = x
        h, kept = opened(made, c.linear(p["h"], h), h)
        return ended(h, done), (h, kept)

    _, (hs, kept) = jax.lax.scan(body, h, (made, done))
    return recalled(p["h"], made, *stop_gradient((hs, kept)), done)


# -- foresights ``[AHEAD, N, CODE]`` from states ``h[N, hidden]``, with actions ``[AHEAD, N]``; N: timesteps of environments


def looped(p, h, actions, chosen):
    def go_on(g, action):
        g = given.unseeing(p, g, action)
        return g, g

    return jax.lax.scan(go_on, h, chosen)[1]


def unrolled(p, h, actions, chosen):
    found = []
    made = c.linear(p["open"]["x"], chosen.reshape(-1, ACTIONS)).reshape(AHEAD, len(h), -1)
    for x in made:
        h = gates(x, c.linear(p["open"]["h"], h), h)
        found.append(h)
    return jnp.stack(found)


@jax.custom_vjp
def written_out(p, h, chosen):
    return ahead(p, h, chosen)[0]


def ahead(p, h, chosen):
    found, kept = [], []
    for action in chosen:
        h, k = opened(c.linear(p["x"], action), c.linear(p["h"], h), h)
        found.append(h)
        kept.append(k)
    return jnp.stack(found), (p, kept, chosen)


def back(given_, by):
    p, kept, chosen = given_
    by_h, by_x, by_hh = 0.0, [], []
    for k, b in zip(reversed(kept), by[::-1], strict=True):
        x, hh, beside = back_through(k, b + by_h)
        by_h = beside + hh @ p["h"]["w"].T
        by_x.append(x)
        by_hh.append(hh)
    join = lambda xs: jnp.concatenate(xs[::-1])  # noqa: E731
    by_x, by_hh = join(by_x), join(by_hh)
    actions, states = chosen.reshape(-1, ACTIONS), jnp.concatenate([k.h for k in kept])
    by_p = {"x": {"w": actions.T @ by_x, "b": by_x.sum(0)}, "h": {"w": states.T @ by_hh, "b": by_hh.sum(0)}}
    return by_p, by_h, jnp.zeros_like(chosen)


written_out.defvjp(ahead, back)


def written(p, h, actions, chosen):
    """Its derivative written out, weights after."""
    return written_out(p["open"], h, chosen)


class Way(NamedTuple):
    recurrence: Any = one_by_one  # None: what acted is kept
    forward: Any = looped
    ahead: bool = False  # what is drawn comes before the loop
    parts: int = 1  # of timesteps, from whose states it goes on, one after the other
    at_once: bool = False  # a part's errors and their derivative, which no reward has to do with, come together


def by_hand(length, batch, way):
    def run(p, target, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))
        draw = lambda t: (gumbel(c.at(action_keys, t)), c.at(env_keys, t))  # noqa: E731
        times = jnp.arange(length)

        def body(carry, x):
            noise, for_env = x if way.ahead else draw(x)
            state, h, last = carry
            made = before(p, state["x"], last)
            h, kept = opened(made, c.linear(p["h"], h), h)
            logits = c.mlp(p["pi"], h)
            action = jnp.argmax(logits + noise, -1)
            after, step = jax.vmap(step_of)(for_env, state, action)
            done = step.terminated
            chosen = jax.nn.one_hot(action, ACTIONS)
            told = state["x"], last, action, chosen, step.reward, done
            return (after, ended(h, done), ended(chosen, done)), (told, (h, kept) if way.recurrence is None else h)

        after, (told, states) = jax.lax.scan(body, carry, jax.vmap(draw)(times) if way.ahead else times)
        obs, last, action, chosen, outside, done = told
        codes = normalised(c.mlp(target, obs))
        there, chosen, following = foresights(done), ahead_of(chosen, 0), ahead_of(codes, 1)
        actions = jnp.argmax(chosen, -1)
        state, h, last_of_all = after
        h = gates(before(p, state["x"], last_of_all), c.linear(p["h"], h), h)
        value_after = c.mlp(p["v"], h)[:, 0]

        def errors_of(p, x):
            h, actions, chosen, following, there = x
            foreseen = way.forward(p, h, actions, chosen)
            told = normalised(c.mlp(p["tell"], foreseen.reshape(-1, foreseen.shape[-1]))).reshape(following.shape)
            return there * ((told - following) ** 2).sum(-1)

        def cut(x):
            """``[parts, ...]`` of ``[N, ...]``, and of others ``[AHEAD, N, ...]``."""
            h, *others = x
            rest = [jnp.moveaxis(v.reshape(AHEAD, way.parts, -1, *v.shape[2:]), 1, 0) for v in others]
            return h.reshape(way.parts, -1, h.shape[-1]), *rest

        def in_parts(p, x):
            if way.parts == 1:
                errors = errors_of(p, x)
                return errors, errors.mean()
            part = jax.checkpoint(errors_of, prevent_cse=False)
            errors = jnp.moveaxis(jax.lax.map(lambda v: part(p, v), cut(x)), 0, 1)
            return errors, errors.mean()

        def errors_and_mean(p, x):
            weights = {name: p[name] for name in ("open", "tell")}

            def mean(weights, h, others):
                errors = errors_of(weights, (h, *others))
                return errors.sum() / (AHEAD * length * batch), errors

            def part(grads, x):
                h, *others = x
                (_, errors), (more, by_h) = jax.value_and_grad(mean, (0, 1), has_aux=True)(stop_gradient(weights), h, others)
                return jax.tree.map(jnp.add, grads, more), (errors, by_h)

            parts = stop_gradient(cut(x))
            grads, (errors, by_h) = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, weights), parts)
            errors = jnp.moveaxis(errors, 0, 1)
            # what has this derivative, and is zero
            pairs = zip(jax.tree.leaves((grads, by_h.reshape(x[0].shape))), jax.tree.leaves((weights, x[0])), strict=True)
            slope = sum((by * (w - stop_gradient(w))).sum() for by, w in pairs)
            return errors, errors.mean() + slope

        def loss(p):
            made = before(p, obs, last)
            if way.recurrence is None:
                h = recalled(p["h"], made, *states, done)
            else:
                h = way.recurrence(p, carry[1], made, done)
            rows = lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1])  # noqa: E731
            flat = lambda x: x.reshape(AHEAD, -1)  # noqa: E731
            x = rows(h), flat(actions), rows(chosen), rows(following), flat(there)
            errors, total = errors_and_mean(p, x) if way.at_once else in_parts(p, x)
            errors = errors.reshape(AHEAD, length, batch)
            logits, value = heads(p, rows(h))
            logits, value = logits.reshape(length, batch, -1), value.reshape(length, batch)
            v = stop_gradient(value)
            advantage = c.gae(v, value_after, rewards(stop_gradient(errors), outside), done, GAMMA, LAMBDA)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, value, log_prob, advantage, advantage + v).mean() + total

        return *jax.value_and_grad(loss)(p), after

    return run


def workload(length, batch, hidden, parts=8):
    make = functools.partial(by_hand, length, batch)
    best = Way(None, written)
    forms = {
        "rlfx": c.actor_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "seen before": make(Way()), "unrolled": make(Way(forward=unrolled)),
        "weights after": make(Way(weights_after, unrolled)), "weights after, written out": make(Way(weights_after, written)),
        "kept, unrolled": make(Way(None, unrolled)), "kept, written out": make(best),
        f"kept, written out, {parts} parts": make(best._replace(parts=parts)),
        f"kept, written out, {parts} parts at once": make(best._replace(parts=parts, at_once=True)),
        f"weights after, unrolled, {parts} parts at once": make(Way(weights_after, unrolled, parts=parts, at_once=True)),
        "kept, written out, drawn ahead": make(best._replace(ahead=True)),
        "seen before, threefry unrolled": make(Way()), "kept, unrolled, threefry unrolled": make(Way(None, unrolled)),
        f"kept, written out, {parts} parts, threefry unrolled": make(best._replace(parts=parts)),
        f"kept, written out, {parts} parts at once, threefry unrolled": make(best._replace(parts=parts, at_once=True)),
        f"kept, written out, {parts} parts at once, drawn ahead, threefry unrolled": make(
            best._replace(parts=parts, at_once=True, ahead=True)
        ),
    }  # fmt: skip
    p, target = params_of(jax.random.key(0), hidden)
    carry = c.batch_of(reset, batch), jnp.zeros((batch, hidden)), jnp.zeros((batch, ACTIONS))
    return drawing(forms, (p, target, carry), tolerance=1e-4)
