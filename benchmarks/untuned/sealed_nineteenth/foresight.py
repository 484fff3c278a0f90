"""BYOL-Explore (Guo et al. 2022): an agent is rewarded for what its model does not foresee. A GRU acts and sees; from its state
at every timestep another goes on with what will be done, unseeing, and tells a target network's codes of what follows; a
timestep's reward is the errors of all foresights about what came next, in deviations. Policy and value learn by them, with
generalised advantages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates

OBS, ACTIONS, CODE, AHEAD, GAMMA, LAMBDA, EPISODE, OUTSIDE, LEAST = 8, 4, 32, 6, 0.99, 0.95, 40, 0.1, 1e-3
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)


def params_of(key, hidden):
    k = jax.random.split(key, 8)
    see = c.mlp_params(k[0], (OBS, hidden, CODE))
    p = {
        "see": see, "x": c.dense(k[1], CODE + ACTIONS, 3 * hidden), "h": c.dense(k[2], hidden, 3 * hidden),
        "open": {"x": c.dense(k[3], ACTIONS, 3 * hidden), "h": c.dense(k[4], hidden, 3 * hidden)},
        "tell": c.mlp_params(k[5], (hidden, hidden, CODE)), "pi": c.mlp_params(k[6], (hidden, hidden, ACTIONS)),
        "v": c.mlp_params(k[7], (hidden, hidden, 1)),
    }  # fmt: skip
    return p, jax.tree.map(lambda w: 0.9 * w, see)


def normalised(x):
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def cell(p, h, obs, done_last):
    """What the agent knows next; ``done_last[..., ACTIONS]``: the last action."""
    x = jnp.concatenate([c.mlp(p["see"], obs), done_last], -1)
    return gates(c.linear(p["x"], x), c.linear(p["h"], h), h)


def unseeing(p, h, action):
    return gates(c.linear(p["open"]["x"], action), c.linear(p["open"]["h"], h), h)


def heads(p, h):
    h = stop_gradient(h)
    return c.mlp(p["pi"], h), c.mlp(p["v"], h)[..., 0]


def program(params, carry, t):
    p, target = params
    state, h, last = carry
    obs = state["x"]
    h = cell(p, h, obs, last)
    logits, v = heads(p, h)
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = step_of(t.key_for("env"), state, action)
    chosen = jax.nn.one_hot(action, ACTIONS)

    def go_on(g, action):
        g = unseeing(p, g, action)
        return g, g

    actions = rlfx.series(chosen).window(0, AHEAD, fill=0.0)
    _, foreseen = jax.lax.scan(go_on, h, actions)
    codes = rlfx.series(normalised(c.mlp(target, obs))).window(1, AHEAD + 1, fill=0.0)
    lasting = rlfx.series(1.0 - step.terminated).window(0, AHEAD, fill=0.0)
    there = rlfx.series(jnp.float32(1.0)).window(1, AHEAD + 1, fill=0.0)
    missed = ((normalised(c.mlp(p["tell"], foreseen)) - stop_gradient(codes)) ** 2).sum(-1)
    errors = jnp.cumprod(lasting) * there * missed

    # the last errors first: those of this timestep are of one step ahead, those of the one before of two
    about = rlfx.series(stop_gradient(errors)).window(1 - AHEAD, 1, fill=0.0)[::-1]
    surprise = jnp.trace(about)
    reward = surprise / (rlfx.std(surprise) + LEAST) + OUTSIDE * step.reward
    value = rlfx.series(v)
    step = step._replace(reward=reward)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    log_prob = jax.nn.log_softmax(logits)[action]
    loss = c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v))
    going = lambda x: jnp.where(step.terminated, 0.0, x)  # noqa: E731
    return loss + errors.mean(), (state, going(h), going(chosen))


# -- by hand, as usual


def ended(x, done):
    return jnp.where(done[:, None], 0.0, x)


def ahead_of(x, first):
    """``[AHEAD, T, B, ...]`` of ``x[T, B, ...]``, from ``first`` timesteps on; zeros behind the end."""
    padded = jnp.concatenate([x, jnp.zeros((AHEAD + first, *x.shape[1:]), x.dtype)])
    return jnp.stack([padded[first + i : first + i + len(x)] for i in range(AHEAD)])


def foresights(done):
    """Which there are, ``[AHEAD, T, B]``."""
    lasting = jnp.cumprod(ahead_of(1.0 - done, 0), 0)
    return lasting * ahead_of(jnp.ones(done.shape), 1)


def rewards(errors, outside):
    """``[T, B]`` of ``errors[AHEAD, T, B]``."""
    shifted = [jnp.pad(e, ((i, 0), (0, 0)))[: e.shape[0]] for i, e in enumerate(errors)]
    surprise = sum(shifted)
    return surprise / (surprise.std() + LEAST) + OUTSIDE * outside


def plain(length, batch):
    def run(p, target, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(carry, t):
            state, h, last = carry
            h = cell(p, h, state["x"], last)
            logits, v = heads(p, h)
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            done = step.terminated
            chosen = jax.nn.one_hot(action, ACTIONS)
            told = state["x"], last, action, chosen, v, step.reward, done
            return (after, ended(h, done), ended(chosen, done)), told

        after, (obs, last, action, chosen, v, outside, done) = jax.lax.scan(body, carry, jnp.arange(length))
        following = heads(p, cell(p, after[1], after[0]["x"], after[2]))[1]

        def loss(p):
            def again(h, x):
                obs, last, done = x
                h = cell(p, h, obs, last)
                return ended(h, done), h

            _, h = jax.lax.scan(again, carry[1], (obs, last, done))

            def go_on(g, action):
                g = unseeing(p, g, action)
                return g, g

            _, foreseen = jax.lax.scan(go_on, h, ahead_of(chosen, 0))
            codes = ahead_of(normalised(c.mlp(target, obs)), 1)
            errors = foresights(done) * ((normalised(c.mlp(p["tell"], foreseen)) - codes) ** 2).sum(-1)
            reward = rewards(stop_gradient(errors), outside)
            advantage = c.gae(v, following, reward, done, GAMMA, LAMBDA)
            logits, value = heads(p, h)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, value, log_prob, advantage, advantage + v).mean() + errors.mean()

        return *jax.value_and_grad(loss)(p), after

    return run
