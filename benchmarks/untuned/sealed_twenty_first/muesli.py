"""Muesli (Hessel et al. 2021) on stored episodes: a policy, values, and a model of what actions lead to, which tells rewards,
values and policies some steps ahead; what all actions are worth by one step of the target network's model makes the policy
that the learner's are drawn to, clipped (CMPO), beside a policy gradient of Retrace's returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, CLIP, STEPS = 24, 6, 0.99, 1.0, 4
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "see": c.mlp_params(k[0], (OBS, hidden, hidden)), "now": c.dense(k[1], hidden, ACTIONS + 1),
        "model": c.mlp_params(k[2], (hidden + ACTIONS, hidden, hidden)), "then": c.dense(k[3], hidden, ACTIONS + 2),
    }  # fmt: skip


def seen(p, obs):
    """A state, its policy (log-probabilities) and its value."""
    state = relu(c.mlp(p["see"], obs, relu))
    out = c.linear(p["now"], state)
    return state, jax.nn.log_softmax(out[..., :-1]), out[..., -1]


def led(p, state, action):
    """The state that an action leads to; the reward on the way, and policy and value there."""
    acted = jax.nn.one_hot(action, ACTIONS)
    state = relu(c.mlp(p["model"], jnp.concatenate([state, acted], -1), relu))
    out = c.linear(p["then"], state)
    return state, out[..., -1], jax.nn.log_softmax(out[..., :-2]), out[..., -2]


def worth(p, state):
    """What all actions are worth, ``[ACTIONS]`` of a state."""
    _, reward, _, value = jax.vmap(led, (None, None, 0))(p, state, jnp.arange(ACTIONS))
    return reward + GAMMA * value


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    old_state, prior, old_value = seen(old, x["obs"])
    q = worth(old, old_state)
    expected = rlfx.series((jnp.exp(prior) * q).sum(), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    log_rho = prior[x["action"]] - x["log_mu"]
    returns = rlfx.retrace(step, q[x["action"]], expected[t + 1], log_rho, gamma=GAMMA)
    gained = returns - old_value
    spread = jnp.sqrt(rlfx.mean(gained**2) + 1e-8)
    better = jax.nn.softmax(prior + jnp.clip((q - old_value) / spread, -CLIP, CLIP))
    returns, gained, better = stop_gradient((returns, gained / spread, better))

    state, log_p, value = seen(p, x["obs"])
    ratio = jnp.minimum(stop_gradient(jnp.exp(log_p[x["action"]] - x["log_mu"])), 1.0)
    loss = 0.5 * (value - returns) ** 2 - ratio * gained * log_p[x["action"]] - (better * log_p).sum()

    going = 1.0 - x["done"].astype(jnp.float32)
    steps = rlfx.series((x["action"], x["reward"], going)).window(0, STEPS, fill=0)
    aims = rlfx.series((returns, better)).window(1, STEPS + 1, fill=0.0)
    there = jnp.float32(1.0)
    for k in range(STEPS):
        (action, reward, going), (aim, policy) = jax.tree.map(lambda x: x[k], (steps, aims))
        state, told, log_p, value = led(p, state, action)
        loss += there * 0.5 * (told - reward) ** 2 / STEPS
        there = there * going  # nothing is told of what is behind an episode's end
        loss += there * (0.5 * (value - aim) ** 2 - (policy * log_p).sum()) / STEPS
    return loss, carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, old, data: jax.value_and_grad(lambda p: loss_fn(((p, old), data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def returns_of(q, expected, log_rho, data):
    """Retrace's, ``[T, B]``."""
    going, weight = 1.0 - data["done"].astype(jnp.float32), jnp.minimum(jnp.exp(log_rho), 1.0)
    none = jnp.zeros_like(q[0])
    error = data["reward"] + GAMMA * going * c.shifted(expected, none) - q
    return q + c.discounted(error, GAMMA * going * c.shifted(weight, none))


def plain(length, batch):
    def run(p, old, data):
        action, ahead = data["action"], lambda x, k: jnp.concatenate([x[k:], jnp.zeros_like(x[:k])])
        old_state, prior, old_value = seen(old, data["obs"])
        q = jax.vmap(jax.vmap(worth, (None, 0)), (None, 0))(old, old_state)
        expected, log_rho = (jnp.exp(prior) * q).sum(-1), c.pick(prior, action) - data["log_mu"]
        returns = returns_of(c.pick(q, action), expected, log_rho, data)
        gained = returns - old_value
        spread = jnp.sqrt((gained**2).mean() + 1e-8)
        better = jax.nn.softmax(prior + jnp.clip((q - old_value[..., None]) / spread, -CLIP, CLIP))
        going = 1.0 - data["done"].astype(jnp.float32)

        def loss(p):
            state, log_p, value = seen(p, data["obs"])
            taken = c.pick(log_p, action)
            ratio = jnp.minimum(stop_gradient(jnp.exp(taken - data["log_mu"])), 1.0)
            loss = 0.5 * (value - returns) ** 2 - ratio * gained / spread * taken - (better * log_p).sum(-1)
            there = jnp.ones((length, batch))
            for k in range(STEPS):
                state, told, log_p, value = led(p, state, ahead(action, k))
                loss += there * 0.5 * (told - ahead(data["reward"], k)) ** 2 / STEPS
                there = there * ahead(going, k)
                missed = 0.5 * (value - ahead(returns, k + 1)) ** 2 - (ahead(better, k + 1) * log_p).sum(-1)
                loss += there * missed / STEPS
            return loss.mean()

        return jax.value_and_grad(loss)(p)

    return run
