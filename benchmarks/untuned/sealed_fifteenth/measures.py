"""Forward-backward representations (Touati and Ollivier 2021) on replayed segments: products of a state and action's code with
those of all states that a batch reached next are successor measures, learnt by their Bellman equation from a target network;
codes of states are kept orthonormal. Every segment has a task, and the policy is that of its task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, ORTHONORMAL, SHARP = 16, 4, 0.98, 0.5, 0.2
relu = jax.nn.relu


def params_of(key, code, hidden):
    k = jax.random.split(key)
    return {
        "forward": c.mlp_params(k[0], (OBS + code, hidden, hidden, ACTIONS * code)),
        "backward": c.mlp_params(k[1], (OBS, hidden, hidden, code)),
    }


def scaled(x):
    """To a mean square of 1."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def forward(nets, obs, task):
    """Codes ``[..., ACTIONS, code]``."""
    made = c.mlp(nets["forward"], jnp.concatenate([obs, task], -1), relu)
    return made.reshape(*obs.shape[:-1], ACTIONS, task.shape[-1])


def backward(nets, obs):
    return scaled(c.mlp(nets["backward"], obs, relu))


def expected(nets, obs, task):
    """The code of what the task's policy does, ``[..., code]``."""
    codes = forward(nets, obs, task)
    policy = jax.nn.softmax(SHARP * (codes * task[..., None, :]).sum(-1))
    return (policy[..., None] * codes).sum(-2)


def of_pairs(chosen, reached, after, old_reached, known):
    """The loss of a timestep, of codes ``[B, code]``."""
    size = len(chosen)
    others = 1.0 - jnp.eye(size)
    measure, aim = chosen @ reached.T, GAMMA * (after @ old_reached.T)
    errors = 0.5 * (known[:, None] * others * (measure - aim) ** 2).sum() / (size * (size - 1))
    gram = reached @ reached.T
    apart = 0.5 * (others * gram**2).sum() / (size * (size - 1)) - jnp.diagonal(gram).mean()
    return errors - (known * jnp.diagonal(measure)).mean() + ORTHONORMAL * apart


def program(params, carry, t):
    (p, target), (data, tasks) = params
    x, task = rlfx.inputs(data)[t], rlfx.inputs(tasks, axes="b")[t]
    after, old = expected(target, x["obs"], task), backward(target, x["obs"])
    codes = rlfx.series((backward(p, x["obs"]), stop_gradient(after), stop_gradient(old)), end=0.0)
    reached, after, old_reached = codes[t + 1]
    chosen = forward(p, x["obs"], task)[x["action"]]
    known = jnp.where((t + 1 < t.length) & ~x["done"], 1.0, 0.0)  # else what came next is not in the segment
    return rlfx.shared(of_pairs, chosen, reached, after, old_reached, known), carry


# -- by hand, as usual


def plain(length, batch):
    def run(p, target, given):
        data, tasks = given
        obs, task = data["obs"], jnp.broadcast_to(tasks, (length, *tasks.shape))

        def loss(p):
            codes = forward(p, obs[:-1], task[:-1])
            chosen = jnp.take_along_axis(codes, data["action"][:-1, :, None, None], 2)[:, :, 0]
            after = stop_gradient(expected(target, obs[1:], task[1:]))
            reached, old_reached = backward(p, obs[1:]), stop_gradient(backward(target, obs[1:]))
            known = 1.0 - data["done"][:-1].astype(jnp.float32)
            return jax.vmap(of_pairs)(chosen, reached, after, old_reached, known).sum() / length

        return jax.value_and_grad(loss)(p)

    return run
