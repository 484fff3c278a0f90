"""Programs for judging the choice of plans alone: families and sizes on which nothing was fitted, with no peers by hand.

``CASES[name] = (make, sizes)``, as of ``benchmarks.untuned``; ``make(**sizes)`` gives ``(function, arguments)``, where the
function is a loss and its gradient by rlfx. ``TINY`` are sizes for tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA = 12, 3, 0.97
drift, reset = c.drift_step(OBS, 40), c.drift_reset(OBS)


def networks(width, layers, outputs=ACTIONS):
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = (width,) * layers
    return {"pi": c.mlp_params(keys[0], (OBS, *hidden, outputs)), "v": c.mlp_params(keys[1], (OBS, *hidden, 1))}


def gradient(program, length, batch, p, carry):
    """Loss, gradient and last carry of a program that acts."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    run = lambda p, carry, key: jax.value_and_grad(loss_fn, has_aux=True)(p, carry, key)  # noqa: E731
    return run, (p, carry, jax.random.key(2))


def gradient_of_data(program, length, batch, p, data, carry):
    """Loss and gradient of a program that reads data and does not act."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), carry)[0])(p), (p, data)


def recorded(length, batch):
    k = jax.random.split(jax.random.key(1), 5)
    size = length, batch
    return {
        "obs": jax.random.normal(k[0], (*size, OBS)),
        "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size),
        "done": jax.random.uniform(k[3], size) < 0.05,
        "log_mu": -1.0 + 0.1 * jax.random.normal(k[4], size),
    }


def acted(p, state, t, outputs=ACTIONS):
    """A discrete action drawn, and the environment's step."""
    logits = c.mlp(p["pi"], state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    return jax.nn.log_softmax(logits)[action], logits, state, step


# -- feed-forward, acting --------------------------------------------------------------------------------------------


def reinforce(length, batch, width):
    """Monte Carlo returns to the end of the rollout, without a critic."""

    def program(p, state, t):
        log_prob, _, state, step = acted(p, state, t)
        total = rlfx.discounted_sum(rlfx.series(step.reward)[t:], GAMMA)
        return -log_prob * stop_gradient(total), state

    return gradient(program, length, batch, networks(width, 2), c.batch_of(reset, batch))


def actor_critic(length, batch, width, layers):
    """A2C with lambda returns: two networks of any depth."""

    def program(p, state, t):
        v = c.mlp(p["v"], state["x"])[0]
        log_prob, logits, state, step = acted(p, state, t)
        value = rlfx.series(v)
        target = stop_gradient(rlfx.lambda_return(step, value[t + 1], gamma=GAMMA, lam=0.9))
        return c.actor_critic_loss(logits, v, log_prob, target - stop_gradient(v), target), state

    return gradient(program, length, batch, networks(width, layers), c.batch_of(reset, batch))


def n_step_q(length, batch, width, steps):
    """Expected n-step Sarsa of an epsilon-greedy policy."""

    def program(p, state, t):
        q = c.mlp(p["pi"], state["x"])
        policy = 0.1 / ACTIONS + 0.9 * jax.nn.one_hot(jnp.argmax(q), ACTIONS)
        action = jax.random.categorical(t.key_for("action"), jnp.log(policy))
        state, step = drift(t.key_for("env"), state, action)
        expected = rlfx.series(stop_gradient(policy @ q))
        target = stop_gradient(rlfx.n_step_return(step, expected[t + 1], gamma=GAMMA, n=steps))
        return jnp.square(q[action] - target), state

    return gradient(program, length, batch, networks(width, 2), c.batch_of(reset, batch))


def pictures(length, batch, side, channels):
    """A2C on planes of a board, of two convolutions."""
    k = jax.random.split(jax.random.key(0), 4)
    flat = channels * ((side + 3) // 4) ** 2
    p = {
        "first": jax.random.normal(k[0], (channels, 2, 3, 3)) / 4,
        "second": jax.random.normal(k[1], (channels, channels, 3, 3)) / 8,
        "pi": c.dense(k[2], flat, ACTIONS),
        "v": c.dense(k[3], flat, 1),
    }

    def program(p, state, t):
        x = jnp.outer(jnp.sin(3.0 * state["x"][0] + jnp.arange(side)), jnp.cos(3.0 * state["x"][1] + jnp.arange(side)))
        planes = jnp.stack([x, x**2])[None]
        for name in ("first", "second"):
            planes = jax.nn.relu(jax.lax.conv(planes, p[name], (2, 2), "SAME"))
        h = planes.reshape(-1)
        logits, v = c.linear(p["pi"], h), c.linear(p["v"], h)[0]
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = drift(t.key_for("env"), state, action)
        value = rlfx.series(v)
        advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=0.9))
        log_prob = jax.nn.log_softmax(logits)[action]
        return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), state

    return gradient(program, length, batch, p, c.batch_of(reset, batch))


# -- of data ---------------------------------------------------------------------------------------------------------


def cloning(length, batch, width, layers):
    """Behaviour cloning: every timestep alone."""

    def program(params, carry, t):
        p, data = params
        x = rlfx.inputs(data)[t]
        return -jax.nn.log_softmax(c.mlp(p["pi"], x["obs"]))[x["action"]], carry

    return gradient_of_data(
        program, length, batch, networks(width, layers), recorded(length, batch), jnp.zeros((batch,))
    )


def clipped(length, batch, width):
    """PPO's loss on recorded data, with GAE of the present critic."""

    def program(params, carry, t):
        p, data = params
        x = rlfx.inputs(data)[t]
        logits, v = c.mlp(p["pi"], x["obs"]), c.mlp(p["v"], x["obs"])[0]
        value = rlfx.series(v, end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        gain = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=0.95))
        ratio = jnp.exp(jax.nn.log_softmax(logits)[x["action"]] - x["log_mu"])
        surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        return 0.5 * jnp.square(v - gain - stop_gradient(v)) - surrogate, carry

    return gradient_of_data(program, length, batch, networks(width, 2), recorded(length, batch), jnp.zeros((batch,)))


# -- through time ----------------------------------------------------------------------------------------------------


def recurrent(length, batch, hidden):
    """A plain recurrent network predicts the next observation of recorded data."""
    k = jax.random.split(jax.random.key(0), 3)
    p = {"x": c.dense(k[0], OBS, hidden), "h": c.dense(k[1], hidden, hidden), "o": c.dense(k[2], hidden, OBS)}

    def program(params, h, t):
        p, data = params
        obs = rlfx.inputs(data)[t]["obs"]
        h = jnp.tanh(c.linear(p["x"], obs) + c.linear(p["h"], h))
        following = rlfx.series(obs, end=jnp.zeros(OBS))
        return jnp.mean(jnp.square(c.linear(p["o"], h) - following[t + 1])), h

    return gradient_of_data(program, length, batch, p, recorded(length, batch), jnp.zeros((batch, hidden)))


def memory(length, batch, hidden):
    """A plain recurrent network that acts, by REINFORCE with a baseline."""
    k = jax.random.split(jax.random.key(0), 4)
    sizes = {"x": (OBS, hidden), "h": (hidden, hidden), "pi": (hidden, ACTIONS), "v": (hidden, 1)}
    p = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}

    def program(p, carry, t):
        state, h = carry
        h = jnp.tanh(c.linear(p["x"], state["x"]) + c.linear(p["h"], h))
        logits, v = c.linear(p["pi"], h), c.linear(p["v"], h)[0]
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = drift(t.key_for("env"), state, action)
        target = stop_gradient(rlfx.discounted_sum(rlfx.series(step.reward)[t:], GAMMA))
        log_prob = jax.nn.log_softmax(logits)[action]
        return c.actor_critic_loss(logits, v, log_prob, target - stop_gradient(v), target), (state, h)

    return gradient(program, length, batch, p, (c.batch_of(reset, batch), jnp.zeros((batch, hidden))))


def through_dynamics(length, batch, width):
    """The return of a policy, differentiated through a smooth environment."""

    def program(p, x, t):
        action = jnp.tanh(c.mlp(p["pi"], x))
        x = jnp.tanh(0.9 * x + 0.1 * jnp.roll(x, 1) * jnp.sin(x)) + 0.05 * jnp.sum(action)
        return jnp.mean(x**2) + 0.01 * jnp.sum(action**2), x

    x = jax.random.normal(jax.random.key(1), (batch, OBS))
    return gradient(program, length, batch, networks(width, 2), x)


CASES = {
    "REINFORCE 2x64 T=200 B=8": (reinforce, {"length": 200, "batch": 8, "width": 64}),
    "REINFORCE 2x64 T=1000 B=1": (reinforce, {"length": 1000, "batch": 1, "width": 64}),
    "A2C 2x64 T=1 B=512": (actor_critic, {"length": 1, "batch": 512, "width": 64, "layers": 2}),
    "A2C 3x512 T=16 B=64": (actor_critic, {"length": 16, "batch": 64, "width": 512, "layers": 3}),
    "A2C 5x48 T=400 B=24": (actor_critic, {"length": 400, "batch": 24, "width": 48, "layers": 5}),
    "A2C 2x128 T=32 B=512": (actor_critic, {"length": 32, "batch": 512, "width": 128, "layers": 2}),
    "5-step Sarsa 2x128 T=128 B=64": (n_step_q, {"length": 128, "batch": 64, "width": 128, "steps": 5}),
    "40-step Sarsa 2x32 T=240 B=128": (n_step_q, {"length": 240, "batch": 128, "width": 32, "steps": 40}),
    "boards 2x24x24 T=40 B=12": (pictures, {"length": 40, "batch": 12, "side": 24, "channels": 12}),
    "cloning 2x64 T=50 B=256": (cloning, {"length": 50, "batch": 256, "width": 64, "layers": 2}),
    "cloning 3x300 T=64 B=20": (cloning, {"length": 64, "batch": 20, "width": 300, "layers": 3}),
    "PPO's loss 2x128 T=256 B=32": (clipped, {"length": 256, "batch": 32, "width": 128}),
    "RNN(256) of data T=100 B=32": (recurrent, {"length": 100, "batch": 32, "hidden": 256}),
    "RNN(128) of data T=256 B=1": (recurrent, {"length": 256, "batch": 1, "hidden": 128}),
    "RNN(96) acting T=200 B=48": (memory, {"length": 200, "batch": 48, "hidden": 96}),
    "through dynamics T=64 B=256": (through_dynamics, {"length": 64, "batch": 256, "width": 64}),
    "through dynamics T=300 B=4": (through_dynamics, {"length": 300, "batch": 4, "width": 128}),
}

TINY = {
    reinforce: {"length": 6, "batch": 2, "width": 8},
    actor_critic: {"length": 6, "batch": 2, "width": 8, "layers": 1},
    n_step_q: {"length": 6, "batch": 2, "width": 8, "steps": 2},
    pictures: {"length": 4, "batch": 2, "side": 8, "channels": 2},
    cloning: {"length": 6, "batch": 2, "width": 8, "layers": 1},
    clipped: {"length": 6, "batch": 2, "width": 8},
    recurrent: {"length": 6, "batch": 2, "hidden": 8},
    memory: {"length": 6, "batch": 2, "hidden": 8},
    through_dynamics: {"length": 6, "batch": 2, "width": 8},
}
