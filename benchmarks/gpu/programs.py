"""Small learners that meet most of what accelerators run otherwise: affine recurrences, draws, picks, slices, ends, products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

import rlfx


@dataclass(frozen=True)
class Learner:
    """A program and what it is called with.

    Attributes:
      f: the program of one timestep.
      options: of ``rlfx.compile``, besides length and batch.
      carry: the shape of one environment's carry.
    """

    f: Callable
    options: dict[str, Any] = field(default_factory=dict)
    carry: tuple[int, ...] = (8,)


def init(key: jax.Array, width: int = 8) -> dict[str, jax.Array]:
    """Parameters of any of the learners."""
    keys = jax.random.split(key, 4)
    draw = lambda k, *shape: jax.random.normal(k, shape) / shape[-1] ** 0.5  # noqa: E731
    return {
        "a": draw(keys[0], width, width),
        "b": draw(keys[1], 4, width),
        "c": draw(keys[2], width),
        "g": jnp.float32(0.9),
    }


def _moved(c: jax.Array, t: Any) -> jax.Array:
    return jax.lax.stop_gradient(jnp.tanh(jnp.roll(c, 1)) + 0.1 * jax.random.normal(t.key_for("env"), c.shape))


def policy_gradient(p, c, t):
    """Actions, and all that they earn later."""
    logits = p["b"] @ jnp.tanh(p["a"] @ c)
    action = jax.random.categorical(t.key_for("action"), logits)
    reward = rlfx.series(c[0] + action.astype(jnp.float32))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], jnp.full_like(reward[t:], 0.9)))
    return -jax.nn.log_softmax(logits)[action] * returns, _moved(c, t), reward[t]


def actor_critic(p, c, t):
    """Advantages of episodes that end, made comparable over all environments."""
    value = p["c"] @ jnp.tanh(p["a"] @ c)
    reward, values = rlfx.series(c[0]), rlfx.series(value)
    going = rlfx.series(jnp.where(c[1] > 0.8, 0.0, 0.95))
    target = reward[t] + going[t] * jax.lax.stop_gradient(values.window(1, 2, fill=0.0)[0])
    error = rlfx.series(jax.lax.stop_gradient(target - value))
    advantage = rlfx.discounted_sum(error[t:], going[t:] * 0.9)
    scaled = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-6)
    return (value - target) ** 2 - scaled * value, _moved(c, t), scaled


def recurrent(p, c, t):
    """A gated cell whose gradient flows through time."""
    gate = jax.nn.sigmoid(p["a"] @ c)
    state = gate * c + (1 - gate) * jnp.tanh(p["c"] * t.now.astype(jnp.float32) * 0.1)
    return (p["b"] @ state).max() ** 2, state, gate[0]


def attention(p, c, t):
    """What is seen of one's own past."""
    keys = rlfx.series(p["a"] @ c)
    weights = jax.nn.softmax(keys[: t + 1] @ c)
    return (weights @ keys[: t + 1]).sum() ** 2, _moved(c, t), weights.max()


def traces(p, c, t):
    """Eligibility traces, counters, and a largest value so far."""
    trace = rlfx.solve(lambda z: p["g"] * 0.9 * z[t - 1] + c, start=0.0)
    count = rlfx.solve(lambda n: jnp.where(c[0] > 0, n[t - 1] + 1, 0), start=0)
    return (trace @ p["c"]) ** 2, _moved(c, t), (trace, count, jnp.max(rlfx.series(c[0])[: t + 1]))


LEARNERS = {
    "policy gradient": Learner(policy_gradient),
    "actor and critic": Learner(actor_critic),
    "recurrent": Learner(recurrent),
    "attention": Learner(attention),
    "traces": Learner(traces),
    "episodes of many lengths": Learner(policy_gradient, {"until": lambda c: c[2] > 0.9}),
    "in blocks": Learner(policy_gradient, {"plan": rlfx.Plan("blocks", 4)}),
    "recurrent, in blocks": Learner(recurrent, {"plan": rlfx.Plan("blocks", 4)}),
}
