"""Random network distillation: PPO of one epoch with a reward for what a predictor does not know, and two values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, FOREVER, LAMBDA, CLIP = 10, 5, 0.99, 0.97, 0.95, 0.2
drift = c.drift_step(OBS, 70)


def params_of(hidden, code):
    k = jax.random.split(jax.random.key(0), 5)
    learned = {
        "body": c.mlp_params(k[0], (OBS, hidden, hidden)), "pi": c.dense(k[1], hidden, ACTIONS), "v": c.dense(k[2], hidden, 2),
        "predictor": c.mlp_params(k[3], (OBS, hidden, hidden, code)),
    }  # fmt: skip
    return learned, c.mlp_params(k[4], (OBS, hidden, code))


def net(p, obs):
    """Logits, and the values of the reward from outside and of the one from within."""
    h = jnp.tanh(c.mlp(p["body"], obs))
    return c.linear(p["pi"], h), c.linear(p["v"], h)


def surprise(p, fixed, obs):
    """The predictor's squared error."""
    return ((c.mlp(p["predictor"], obs, jax.nn.relu) - stop_gradient(c.mlp(fixed, obs, jax.nn.relu))) ** 2).mean(-1)


def point_loss(logits, v, log_prob, old, advantage, outside, inside, error):
    ratio = jnp.exp(log_prob - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    critic = c.actor_critic_loss(logits, v[..., 0], 0.0, 0.0, outside) + 0.5 * (v[..., 1] - inside) ** 2
    return critic - gain + error


def program(params, state, t):
    p, fixed = params
    logits, v = net(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    error = surprise(p, fixed, state["x"])
    bonus = stop_gradient(error)
    bonus = bonus / (rlfx.std(bonus) + 1e-8)
    never = jnp.zeros_like(step.terminated)
    outside, inside = rlfx.series(v[0]), rlfx.series(v[1])
    gained = stop_gradient(rlfx.gae(step, outside, outside[t + 1], gamma=GAMMA, lam=LAMBDA))
    novel = stop_gradient(rlfx.gae(c.Step(bonus, never, never), inside, inside[t + 1], gamma=FOREVER, lam=LAMBDA))
    advantage = 2.0 * gained + novel
    advantage = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    log_prob = jax.nn.log_softmax(logits)[action]
    targets = gained + stop_gradient(v[0]), novel + stop_gradient(v[1])
    return point_loss(logits, v, log_prob, stop_gradient(log_prob), advantage, *targets, error), state


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, fixed, state, key):
        (loss, (state, _)), grads = jax.value_and_grad(lambda p: loss_fn((p, fixed), state, key), has_aux=True)(p)
        return loss, grads, state

    return run


def by_hand(length, batch, late=False, flat=True, kept=False, chunk=None):
    """``late``: the surprise of all timesteps at once, after the loop; ``kept``: the fixed network's codes are kept for the
    learner."""

    def run(p, fixed, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        code = lambda obs: c.mlp(fixed, obs, jax.nn.relu)  # noqa: E731

        def body(state, t):
            logits, v = net(p, state["x"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            bonus = None if late else surprise(p, fixed, after["x"])
            return after, (state["x"], after["x"], action, v, log_prob, step.reward, step.terminated, bonus)

        after, (obs, seen, action, v, old, reward, done, bonus) = jax.lax.scan(body, state, jnp.arange(length))
        codes = code(seen) if kept else None
        if late:
            told = c.mlp(p["predictor"], seen, jax.nn.relu)
            bonus = ((told - (codes if kept else code(seen))) ** 2).mean(-1)
        last = net(p, after["x"])[1]
        gained = c.gae(v[..., 0], last[..., 0], reward, done, GAMMA, LAMBDA)
        novel = c.gae(v[..., 1], last[..., 1], bonus / (bonus.std() + 1e-8), jnp.zeros_like(done), FOREVER, LAMBDA)
        advantage = 2.0 * gained + novel
        given = (advantage - advantage.mean()) / (advantage.std() + 1e-8), gained + v[..., 0], novel + v[..., 1]

        def loss(p, data):
            obs, seen, codes, action, old, given = data
            logits, v = net(p, obs)
            told = c.mlp(p["predictor"], seen, jax.nn.relu)
            error = ((told - (code(seen) if codes is None else codes)) ** 2).mean(-1)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return point_loss(logits, v, log_prob, old, *given, error).sum() / (length * batch)

        data = obs, seen, codes, action, old, given
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def workload(length, batch, hidden, code, chunk=16):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "surprise after the loop": make(late=True),
        "codes kept": make(late=True, kept=True), "not flattened": make(late=True, flat=False),
        f"blocks of {chunk}": make(chunk=chunk), f"late, kept, blocks of {chunk}": make(late=True, kept=True, chunk=chunk),
        "late, kept, blocks of 1": make(late=True, kept=True, chunk=1),
    }  # fmt: skip
    p, fixed = params_of(hidden, code)
    return Workload(forms, (p, fixed, c.batch_of(c.drift_reset(OBS), batch), jax.random.key(2)))
