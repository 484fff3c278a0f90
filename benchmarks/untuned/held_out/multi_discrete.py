"""One-epoch PPO with several discrete actions at once, of which some are not allowed in a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.one_epoch import GAMMA, LAMBDA, ppo_points

OBS, CHOICES, CLIP = 12, (5, 3, 7, 2), 0.2
ENDS = np.cumsum(CHOICES)[:-1]
drift = c.drift_step(OBS, 60)


def params_of(hidden):
    k = jax.random.split(jax.random.key(0), 2 + len(CHOICES))
    heads = [c.dense(key, hidden, n) for key, n in zip(k[2:], CHOICES, strict=True)]
    return {
        "body": c.mlp_params(k[0], (OBS, hidden, hidden)),
        "heads": heads,
        "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
    }


def allowed(obs):
    """``bool[..., sum(CHOICES)]``: the first of each choice always is, the others by the signs of what is observed."""
    first = np.concatenate([np.arange(n) == 0 for n in CHOICES])
    return first | (jnp.roll(jnp.concatenate([obs, obs], -1), 3, -1)[..., : sum(CHOICES)] > -0.3)


def separate(p, obs):
    """Logits of all choices, one after the other, and the value; a product for each choice."""
    h = jnp.tanh(c.mlp(p["body"], obs))
    return jnp.concatenate([c.linear(head, h) for head in p["heads"]], -1), c.mlp(p["v"], obs)[..., 0]


def joined(p, obs):
    """One product for all choices."""
    head = jax.tree.map(lambda *xs: jnp.concatenate(xs, -1), *p["heads"])
    return c.linear(head, jnp.tanh(c.mlp(p["body"], obs))), c.mlp(p["v"], obs)[..., 0]


def log_probs(logits, mask):
    """Of each choice, ``[..., n]``."""
    return [jax.nn.log_softmax(x) for x in jnp.split(jnp.where(mask, logits, -1e9), ENDS, -1)]


def log_prob_and_entropy(log_p, action):
    chosen = sum(c.pick(x, action[..., i]) for i, x in enumerate(log_p))
    return chosen, -sum(jnp.sum(jnp.exp(x) * x, -1) for x in log_p)


def point_loss(log_p, v, action, old, normalised, target):
    log_prob, entropy = log_prob_and_entropy(log_p, action)
    ratio = jnp.exp(log_prob - old)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised)
    return 0.5 * (v - target) ** 2 - gain - 0.01 * entropy


def sample(key, log_p):
    keys = jax.random.split(key, len(CHOICES))
    return jnp.stack([jax.random.categorical(k, stop_gradient(x)) for k, x in zip(keys, log_p, strict=True)], -1)


def program(p, state, t):
    obs = state["x"]
    logits, v = separate(p, obs)
    log_p = log_probs(logits, allowed(obs))
    action = sample(t.key_for("action"), log_p)
    state, step = drift(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    normalised = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    old = stop_gradient(log_prob_and_entropy(log_p, action)[0])
    return point_loss(log_p, v, action, old, normalised, advantage + stop_gradient(v)), state


def by_hand(length, batch, net=separate, flat=True, chunk=None, masks_kept=False):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            obs = state["x"]
            logits, v = net(p, obs)
            mask = allowed(obs)
            log_p = log_probs(logits, mask)
            action = jax.vmap(sample)(c.at(action_keys, t), log_p)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            old, _ = log_prob_and_entropy(log_p, action)
            return after, ((obs, mask) if masks_kept else obs, action, v, old, step.reward, step.terminated)

        after, (seen, action, v, old, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        given = ppo_points(v, net(p, after["x"])[1], old, reward, done)

        def loss(p, data):
            seen, action, given = data
            obs, mask = seen if masks_kept else (seen, allowed(seen))
            logits, v = net(p, obs)
            return point_loss(log_probs(logits, mask), v, action, *given).sum() / (length * batch)

        data = seen, action, given
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def workload(length, batch, hidden, chunk=16):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": c.by_rlfx(program, length, batch), "plain": make(), "joined": make(net=joined),
        "not flattened, masks kept": make(flat=False, masks_kept=True),
        f"joined, blocks of {chunk}": make(net=joined, chunk=chunk), "joined, blocks of 1": make(net=joined, chunk=1),
    }  # fmt: skip
    return Workload(forms, (params_of(hidden), c.batch_of(c.drift_reset(OBS), batch), jax.random.key(2)))
