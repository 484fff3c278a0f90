"""Pixel control beside an advantage actor critic (UNREAL, Jaderberg et al. 2017) on stored frames: duelling action values for
every cell of a grid, by transposed convolutions, of how much its pixels will change; targets are discounted changes, and at the
end the best value there is. The network is one of flax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

CHANNELS, ACTIONS, BORDER, CELL, DEPTH, GAMMA, LAMBDA, OF_CHANGES, CONTROL = 3, 5, 2, 2, 16, 0.99, 0.95, 0.9, 0.05


def cells_of(side):
    """Cells of a side, and of what is convolved to them."""
    cells = (side - 2 * BORDER) // CELL
    return cells, (cells - 4) // 2 + 1


class Network(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, frame):
        """Logits, value, and action values ``[cells, cells, ACTIONS]`` of one frame."""
        x = nn.relu(nn.Conv(16, (4, 4), (2, 2), "VALID", name="first")(frame))
        x = nn.relu(nn.Conv(32, (3, 3), (2, 2), "VALID", name="second")(x))
        x = nn.relu(nn.Dense(self.hidden, name="torso")(x.ravel()))
        small = cells_of(len(frame))[1]
        grid = nn.relu(nn.Dense(small**2 * DEPTH, name="grid")(x)).reshape(small, small, DEPTH)
        base = nn.ConvTranspose(1, (4, 4), (2, 2), "VALID", name="base")(grid)
        better = nn.ConvTranspose(ACTIONS, (4, 4), (2, 2), "VALID", name="better")(grid)
        control = base + better - better.mean(-1, keepdims=True)
        return nn.Dense(ACTIONS, name="pi")(x), nn.Dense(1, name="v")(x)[0], control


def params_of(key, side, hidden):
    return Network(hidden).init(key, jnp.zeros((side, side, CHANNELS)))


def changed(before, after):
    """How much the pixels of every cell change, ``[..., cells, cells]``."""
    x = jnp.abs(after - before)[..., BORDER:-BORDER, BORDER:-BORDER, :]
    cells = x.shape[-2] // CELL
    return x.reshape(*x.shape[:-3], cells, CELL, cells, CELL, CHANNELS).mean((-4, -2, -1))


def program(network, params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    logits, value, control = network.apply(p, x["frame"])
    log_p = jax.nn.log_softmax(logits)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=LAMBDA))
    target = stop_gradient(advantage + value)
    loss = c.actor_critic_loss(log_p, value, log_p[x["action"]], advantage, target)

    change = changed(x["frame"], rlfx.series(x["frame"], end=x["frame"])[t + 1])
    going = 1.0 - x["done"].astype(jnp.float32)
    best = stop_gradient(control.max(-1))
    to_come = rlfx.solve(lambda g: going * (change + OF_CHANGES * g[t + 1]), end=best)
    return loss + CONTROL * 0.5 * ((control[..., x["action"]] - to_come) ** 2).sum(), carry


def by_rlfx(length, batch, hidden):
    loss_fn = rlfx.compile(functools.partial(program, Network(hidden)), length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def acted(logits, value, data):
    """The loss of the actor and critic, of ``[T, B]``, summed."""
    log_p = jax.nn.log_softmax(logits)
    advantage = stop_gradient(c.gae(value, jnp.zeros_like(value[0]), data["reward"], data["done"], GAMMA, LAMBDA))
    return c.actor_critic_loss(
        log_p, value, c.pick(log_p, data["action"]), advantage, stop_gradient(advantage + value)
    ).sum()


def to_come(data, best):
    """Targets ``[T, B, cells, cells]``; ``best``: what there is after the end."""
    frame, going = data["frame"], 1.0 - data["done"].astype(jnp.float32)[..., None, None]
    change = changed(frame, c.shifted(frame, frame[-1]))

    def body(g, x):
        change, going = x
        g = going * (change + OF_CHANGES * g)
        return g, g

    return jax.lax.scan(body, best, (change, going), reverse=True)[1]


def plain(length, batch, hidden):
    network = Network(hidden)

    def run(p, data):
        def loss(p):
            logits, value, control = jax.vmap(jax.vmap(lambda frame: network.apply(p, frame)))(data["frame"])
            target = to_come(data, stop_gradient(control[-1].max(-1)))
            chosen = c.pick(control, jnp.broadcast_to(data["action"][..., None, None], control.shape[:-1]))
            controlled = CONTROL * 0.5 * ((chosen - target) ** 2).sum()
            return (acted(logits, value, data) + controlled) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
